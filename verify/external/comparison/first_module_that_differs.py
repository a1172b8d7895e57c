"""Find the first module whose result differs, forward and backward.

Both sides run one step with a hook on every module. A module ends after those inside of it, so that in the order in
which they end the first one that differs is the innermost wrong one: everything that it was given agrees. The same
holds backward for gradients of modules' outputs, in the order in which autograd makes them.

A rank's tensor is compared where it is known which part of the model's it is: whole, the rank's rows, a DTensor, or
one of the equal pieces along a dim; else the module is passed over.

Worked example. A row-parallel `down` without its all_reduce, on tp rank 1 of 2: `up` gives a piece along dim 1, which
agrees; `down` gives a tensor of the model's shape with other values: "forward, down". In backward `down`'s output has
the model's gradient and so has `up`'s: nothing is found there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nnscaler.runtime.nested_values import tensors_in
from nnscaler.runtime.tensor_bits_and_differences import difference
from nnscaler.tracing.export.independent_module_copies import copied_with_hooks
from verify.external.observe_rank_run import RankRecord, modules_of, parallelised, rows_of, run_step, tensors_of_program
from verify.external.parameter_mapping import clean_name, give, local_value, moved_modules
from verify.external.program import ExternalProgram
from verify.external.reference import (
    PlainReference,
    batch_of_step,
    computing_in,
    coordinates,
    copied,
    data_part,
    row_count,
)
from verify.external.shards_made_anew import GUESSED

_REPLACED = ("given", GUESSED)  # how pieces are found that have the model's values in place of the program's own
_CLOSE = {torch.float64: 1e-7, torch.float32: 1e-4}  # relative; in narrower dtypes rounding hides too much
_ROOT = "the model"
_LARGEST = 1 << 22  # elements of a tensor that is kept


@dataclass(frozen=True)
class Seen:
    """The result of one call of a module.

    name   of the module
    kind   its class
    value  what it returned, the first tensor of it
    """

    name: str
    kind: str
    value: Tensor


@dataclass(frozen=True)
class StepResults:
    """The results of one step: forward in the order in which modules end, backward in that of autograd."""

    forward: tuple[Seen, ...]
    backward: tuple[Seen, ...]


@dataclass(frozen=True)
class FirstDifference:
    """A module's result that differs although everything before it agrees.

    direction  "forward": its output; "backward": the gradient of its output
    """

    direction: str
    name: str
    kind: str
    rank: int

    def __str__(self) -> str:
        what = "output" if self.direction == "forward" else "gradient of the output"
        return f"the {what} of {self.name} ({self.kind}) on rank {self.rank}"


def traced_model(program: ExternalProgram, model: nn.Module, reference: PlainReference) -> StepResults:
    """Run the plain model for one step, and keep what its modules return."""
    mine = copied_with_hooks(model)
    step = program.reference_step or program.step
    plain = ExternalProgram(program.name, program.model, program.batch, lambda m, mesh: m, program.mesh, step=step)
    with torch.random.fork_rng(devices=[]), computing_in(mine, reference.dtype), _recorded([mine]) as seen:
        run_step(plain, mine, copied(batch_of_step(reference.batch, 0), reference.dtype))
    return _whole(seen)


def traced_rank(
    program: ExternalProgram, model: nn.Module, reference: PlainReference, start: Tensor, record: RankRecord
) -> StepResults:
    """Run the program on this rank for one step, and keep what its modules return; DTensors are put together.

    start   the plain model's values at the start, over all addresses
    record  of this rank's run: it says which of them take the place of the program's own
    """
    with parallelised(program, model, reference.dtype) as made, _recorded(modules_of(made)) as seen:
        own = {piece.local: piece for piece in record.pieces if piece.found in _REPLACED}
        for local, tensor, _ in tensors_of_program(made, program):
            if local in own and (addresses := own[local].addresses) is not None:
                give(tensor, start, addresses)
        run_step(program, made, rows_of(program, reference, record.rank, 0))
        return _whole(seen)


def _whole(seen: tuple[list[Seen], list[Seen]]) -> StepResults:
    """Put DTensors together: after the step, for hooks run at other times on other ranks."""
    forward, backward = (
        tuple(Seen(s.name, s.kind, s.value.full_tensor() if isinstance(s.value, DTensor) else s.value) for s in side)
        for side in seen
    )
    return StepResults(forward, backward)


@contextmanager
def _recorded(modules: Sequence[nn.Module]) -> Iterator[tuple[list[Seen], list[Seen]]]:
    forward: list[Seen] = []
    backward: list[Seen] = []
    handles = []

    def watch(name: str, module: nn.Module) -> None:
        kind = type(module).__name__

        def ended(_module: nn.Module, _inputs: object, output: object) -> None:
            value = next((t for t in tensors_in(output) if t.is_floating_point()), None)
            if value is None or value.numel() > _LARGEST:
                return
            forward.append(Seen(name, kind, _kept(value)))
            if value.requires_grad:
                value.register_hook(lambda gradient: backward.append(Seen(name, kind, _kept(gradient))))

        handles.append(module.register_forward_hook(ended))

    for root in modules:
        for name, module in root.named_modules():
            watch(clean_name(name) or _ROOT, module)
    try:
        yield forward, backward
    finally:
        for handle in handles:
            handle.remove()


def _kept(value: Tensor) -> Tensor:
    kept = value.detach()
    return kept.clone() if isinstance(kept, DTensor) else local_value(kept).clone()


def first_differences(
    program: ExternalProgram,
    reference: PlainReference,
    right: StepResults,
    ranks: Sequence[StepResults],
    records: Sequence[RankRecord],
    directions: Sequence[str],
) -> tuple[FirstDifference, ...]:
    """Return the first difference over all ranks in the first of these directions in which there is one: backward alone
    where the losses are right, for what looks wrong forward is then a partial sum that is added up outside of the
    module. What the records say of modules that a rank has by other names, in a wrapper, is gone by."""
    if reference.dtype not in _CLOSE:
        return ()
    rows = row_count(reference.batch)
    for direction in directions:
        expected: list[Seen] = list(getattr(right, direction))
        earliest: tuple[int, FirstDifference] | None = None
        for rank, traced in enumerate(ranks):
            index, parts = data_part(program, coordinates(program)[rank])
            places = _Places(index, parts, rows, _CLOSE[reference.dtype])
            seen = _as_in_model(getattr(traced, direction), moved_modules(records[rank].pieces))
            found = _first_wrong(seen, expected, places, direction)
            if found is not None and (earliest is None or found[0] < earliest[0]):
                earliest = found[0], FirstDifference(direction, found[1].name, found[1].kind, rank)
        if earliest is not None:
            return (earliest[1],)
    return ()


def _as_in_model(seen: Sequence[Seen], moved: Iterable[tuple[str, str]]) -> list[Seen]:
    """Name modules as the model does: those within the longest of the moved ones."""
    moves = sorted(moved, key=lambda move: (-len(move[0]), move))

    def renamed(name: str) -> str:
        for here, there in moves:
            if here and f"{name}.".startswith(f"{here}."):
                return ".".join(part for part in (there, name[len(here) + 1 :]) if part) or _ROOT
        return name

    return [Seen(renamed(one.name), one.kind, one.value) for one in seen]


@dataclass(frozen=True)
class _Places:
    """A rank's data part, of how many, the rows of the whole batch, and the relative difference that is rounding."""

    index: int
    parts: int
    rows: int
    close: float


def _first_wrong(
    found: Sequence[Seen], expected: Sequence[Seen], places: _Places, direction: str
) -> tuple[int, Seen] | None:
    """Return the first result that differs, by the order of the plain model, with its place there.

    A step may call its model for some rows at a time, so that a data part makes its share of the plain model's calls;
    autograd goes through them from the last one on.
    """
    calls: dict[str, list[Seen]] = {}
    for seen in found:
        calls.setdefault(seen.name, []).append(seen)
    counts: dict[str, int] = {}
    for number, right in enumerate(expected):
        count = counts[right.name] = counts.get(right.name, -1) + 1
        mine = calls.get(right.name, [])
        total = sum(other.name == right.name for other in expected)
        shared = places.parts > 1 and len(mine) * places.parts == total
        if len(mine) != total and not shared:
            continue  # micro-batches, recomputation, or a module of another rank
        part = places.index if direction == "forward" else places.parts - 1 - places.index
        own = count - (part * len(mine) if shared else 0)
        here = replace(places, rows=0) if shared else places
        if 0 <= own < len(mine) and _agrees(mine[own].value, right.value, here) is False:
            return number, mine[own]
    return None


def _agrees(value: Tensor, expected: Tensor, places: _Places) -> bool | None:
    """Return whether a rank's tensor is the model's, or its part of it; None where that cannot be said."""
    candidates = list(_candidates(value, expected, places))
    if not candidates or (value.dim() == 0 and places.parts > 1):  # the loss of a part is its own
        return None
    if any(difference(value, other).relative < places.close for other in candidates):
        return True
    # with one data part a tensor of the model's shape is the model's; a piece may be cut in ways that are not known
    return False if value.shape == _own(expected, places).shape else None


def _own(expected: Tensor, places: _Places) -> Tensor:
    if places.parts > 1 and expected.dim() and places.rows and expected.shape[0] % places.rows == 0:
        return expected.chunk(places.parts, 0)[places.index]
    return expected


def _candidates(value: Tensor, expected: Tensor, places: _Places) -> Iterator[Tensor]:
    own = _own(expected, places)
    for whole in (own, expected) if own is not expected else (own,):
        for scale in (1, places.parts) if places.parts > 1 else (1,):  # a part's mean has fewer terms
            scaled = whole * scale
            if value.shape == scaled.shape:
                yield scaled
            elif value.dim() == scaled.dim():
                yield from _pieces(value, scaled)


def _pieces(value: Tensor, whole: Tensor) -> Iterator[Tensor]:
    """Yield the equal pieces of a tensor along the one dim in which it is larger."""
    dims = [d for d in range(value.dim()) if value.shape[d] != whole.shape[d]]
    if len(dims) == 1 and value.shape[dims[0]] and whole.shape[dims[0]] % value.shape[dims[0]] == 0:
        yield from whole.split(value.shape[dims[0]], dims[0])
