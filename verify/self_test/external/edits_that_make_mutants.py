"""A mutant: a right program with one mistake, and the edits that make mistakes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle

from verify.external.observe_rank_run import modules_of
from verify.external.program import ExternalProgram, Step
from verify.self_test.external.models import clipped, squares
from verify.self_test.external.tensor_parallel import TensorParallel

Edit = Callable[[ExternalProgram], ExternalProgram]
Change = Callable[[Any, DeviceMesh], object]


@dataclass(frozen=True)
class ExternalMutant:
    """One row.

    family      of mistakes
    bug         in words
    base        a key of `PROGRAMS`
    edit        makes the mistake
    causes      classes of cause, or codes of findings, of which one finding must name one
    equivalent  why the program is still right; empty for a mistake
    thread      where such a mistake was reported: owner/repository#number
    """

    family: str
    bug: str
    base: str
    edit: Edit
    causes: tuple[str, ...]
    equivalent: str = ""
    thread: str = ""


def row(family: str, base: str, bug: str, causes: str, edit: Edit) -> ExternalMutant:
    """Return a row; `causes` are words."""
    return ExternalMutant(family, bug, base, edit, tuple(causes.split()))


def same(family: str, base: str, bug: str, why: str, edit: Edit) -> ExternalMutant:
    """Return a row whose edit leaves the program right."""
    return ExternalMutant(family, bug, base, edit, (), why)


@dataclass(frozen=True)
class Around:
    """An author's `parallelize` with something done before and after it."""

    inner: Callable[[nn.Module, DeviceMesh], Any]
    before: Change | None = None
    after: Change | None = None

    def __call__(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        if self.before is not None:
            self.before(model, mesh)
        made = self.inner(model, mesh)
        made = model if made is None else made
        if self.after is not None:
            made = self.after(made, mesh) or made
        return made


# -- edits of what the author chose -----------------------------------------------------------------------------------


def choice(**fields: Any) -> Edit:
    """Choose otherwise in `parallelize`."""
    return lambda program: replace(program, parallelize=replace(program.parallelize, **fields))  # type: ignore[type-var]


def step_choice(**fields: Any) -> Edit:
    """Choose otherwise in `step`."""
    return lambda program: replace(program, step=replace(program.step, **fields))  # type: ignore[type-var]


def program_choice(**fields: Any) -> Edit:
    """Choose otherwise in the program: its optimizer, how it clips."""
    return lambda program: replace(program, **fields)


def both(*edits: Edit) -> Edit:
    """Make several edits."""

    def edit(program: ExternalProgram) -> ExternalProgram:
        for one in edits:
            program = one(program)
        return program

    return edit


def plan(change: Callable[[dict[str, ParallelStyle]], dict[str, ParallelStyle]]) -> Edit:
    """Change the plan, also where tensor parallelism is a part of something else."""

    def changed(way: Any) -> Any:
        if isinstance(way, TensorParallel):
            return replace(way, plan=lambda: change(dict(way.plan())))
        for field in ("before", "inner"):
            parts = getattr(way, field, ())
            if any(isinstance(part, TensorParallel) for part in parts):
                return replace(way, **{field: tuple(changed(p) if isinstance(p, TensorParallel) else p for p in parts)})
        raise AssertionError(f"{way} has no plan")

    return lambda program: replace(program, parallelize=changed(program.parallelize))


def lacking(*names: str) -> Edit:
    """Remove rules of the plan."""

    def change(rules: dict[str, ParallelStyle]) -> dict[str, ParallelStyle]:
        assert all(name in rules for name in names), names
        return {name: style for name, style in rules.items() if name not in names}

    return plan(change)


def ruled(**styles: Callable[[], ParallelStyle]) -> Edit:
    """Replace or add rules whose names end in these words: `down=RowwiseParallel`."""

    def change(rules: dict[str, ParallelStyle]) -> dict[str, ParallelStyle]:
        found = dict(rules)
        for word, make in styles.items():
            names = [name for name in rules if name.rpartition(".")[2] == word]
            assert names, word
            found |= {name: make() for name in names}
        return found

    return plan(change)


# -- edits of what is done --------------------------------------------------------------------------------------------


def afterwards(change: Change) -> Edit:
    """Do something more at the end of `parallelize`."""
    return lambda program: replace(program, parallelize=Around(program.parallelize, after=change))


def beforehand(change: Change) -> Edit:
    """Do something more at the start of `parallelize`."""
    return lambda program: replace(program, parallelize=Around(program.parallelize, before=change))


def stepping(make: Callable[[Step], Step]) -> Edit:
    """Change the step of the program, not that of the plain model."""
    return lambda p: replace(p, step=make(p.step), reference_step=p.reference_step or p.step)


def after_backward(change: Callable[[Any], object]) -> Edit:
    """Do something more to the gradients, once they are there."""

    def make(step: Step) -> Step:
        def changed(made: Any, batch: Any) -> Tensor | None:
            loss = step(made, batch)
            if loss is not None and loss.requires_grad:
                loss.backward()
            change(made)
            return None if loss is None else loss.detach()

        return changed

    return stepping(make)


def of_batch(change: Callable[[Any], Any]) -> Edit:
    """Hand another batch to the step."""
    return stepping(lambda step: lambda made, batch: step(made, change(batch)))


def of_loss(change: Callable[[Tensor], Tensor]) -> Edit:
    """Change the loss before its backward pass."""

    def make(step: Step) -> Step:
        def changed(made: Any, batch: Any) -> Tensor | None:
            loss = step(made, batch)
            return None if loss is None else change(loss)

        return changed

    return stepping(make)


# -- helpers of edits -------------------------------------------------------------------------------------------------


def parameters_of(made: Any, word: str = "") -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters whose name has the word."""
    for module in modules_of(made):
        yield from ((name, p) for name, p in module.named_parameters() if word in name)


def gradients_of(made: Any, word: str = "") -> Iterator[Tensor]:
    """Yield local gradients that can be changed in place."""
    for _, parameter in parameters_of(made, word):
        if parameter.grad is not None:
            yield local(parameter.grad)


def clip_by_all_squares(made: Any, limit: float) -> Tensor:
    """Clip by squares that are summed over all ranks: those of copies are counted as often as there are copies."""
    gradients = list(gradients_of(made))
    total = squares(gradients)
    dist.all_reduce(total)
    return clipped(gradients, total.sqrt(), limit)


def local(tensor: Tensor) -> Tensor:
    """Return what this rank holds."""
    found = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return found.detach()


def scaled(factor: float, word: str = "", ranks: tuple[int, ...] | None = None) -> Callable[[Any], None]:
    """Multiply gradients, on some ranks."""

    def change(made: Any) -> None:
        if ranks is None or dist.get_rank() in ranks:
            for gradient in gradients_of(made, word):
                gradient.mul_(factor)

    return change


def each_gradient(change: Callable[[Tensor], object], word: str = "") -> Callable[[Any], None]:
    """Change each gradient in place."""

    def changed(made: Any) -> None:
        for gradient in gradients_of(made, word):
            change(gradient)

    return changed


def exchanged_pieces(made: Any, word: str) -> None:
    """Give each rank the values that the next one holds."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for _, parameter in parameters_of(made, word):
        value = local(parameter)
        every = [torch.empty_like(value) for _ in range(ranks)]
        dist.all_gather(every, value.contiguous())
        with torch.no_grad():
            value.copy_(every[(rank + 1) % ranks])


def hooked_output(word: str, change: Callable[[Tensor], Tensor]) -> Change:
    """Change what the modules return whose name ends in the word."""

    def hook(made: Any, mesh: DeviceMesh) -> None:
        found = [m for part in modules_of(made) for n, m in part.named_modules() if n.rpartition(".")[2] == word]
        assert found, word
        for module in found:
            module.register_forward_hook(lambda m, inputs, output: change(output))

    return hook


def frozen(word: str) -> Change:
    """Stop the training of parameters."""

    def freeze(made: Any, mesh: DeviceMesh) -> None:
        for _, parameter in parameters_of(made, word):
            parameter.requires_grad_(False)

    return freeze
