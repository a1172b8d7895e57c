"""Try the repairs that a cause suggests, as lines to add after `parallelize`, on a copy before one is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from nnscaler.errors import few
from verify.external.comparison.comparison_records import ComparisonResult, Difference
from verify.external.observe_rank_run import run_step, tensors_of_program
from verify.external.parameter_mapping import Lookup, local_value, match
from verify.external.program import Batch, ExternalProgram


@dataclass(frozen=True)
class Placed:
    """A program on one rank, to be changed.

    made    what `parallelize` returned
    names   name in the program -> name in the plain model, as they are at the start
    """

    program: ExternalProgram
    made: Any
    mesh: DeviceMesh
    names: Mapping[str, str]

    def tensors(self, names: frozenset[str]) -> Iterator[Tensor]:
        """Yield the parameters that have these names in the plain model."""
        for local, tensor, kind in tensors_of_program(self.made, self.program):
            if kind == "parameter" and self.names.get(local) in names:
                yield tensor


Change = Callable[[Placed], None]


@dataclass(frozen=True)
class Repair:
    """A change of a program that may mend it.

    text      for people: what to add
    start     make it once, after `parallelize`; None: nothing
    backward  make it after each backward pass, before the optimizer's step; None: nothing
    """

    text: str
    start: Change | None = None
    backward: Change | None = None

    def applied(self, program: ExternalProgram, lookup: Lookup) -> ExternalProgram:
        """Return the program with the change; `lookup`: values of the plain model at the start."""
        ranks: dict[int, Placed] = {}  # by what `parallelize` returned, for each rank has its own

        def parallelize(model: Any, mesh: DeviceMesh) -> Any:
            made = program.parallelize(model, mesh)
            made = model if made is None else made
            pieces = match(list(tensors_of_program(made, program)), lookup, program.names)
            ranks[id(made)] = Placed(program, made, mesh, {piece.local: piece.name for piece in pieces})
            if self.start is not None:
                self.start(ranks[id(made)])
            return made

        def step(made: Any, batch: Batch) -> Tensor | None:
            loss = run_step(program, made, batch)
            if self.backward is not None:
                self.backward(ranks[id(made)])
            return loss.detach() if isinstance(loss, Tensor) else None

        plain = program.reference_step or program.step
        return replace(program, parallelize=parallelize, step=step, reference_step=plain)


def repair_of(program: ExternalProgram, compared: Sequence[ComparisonResult]) -> Repair | None:
    """Return the repair of all wrong gradients together; None where a cause suggests none."""
    wrong = [d for result in compared for d in result.differences if d.code in ("gradient_differs", "replicas_differ")]
    parts = list(_parts(program, wrong))
    if not wrong or not parts or any(part is None for part in parts):
        return None
    repairs = [part for part in parts if part is not None]

    def start(placed: Placed) -> None:
        for repair in repairs:
            if repair.start is not None:
                repair.start(placed)

    def backward(placed: Placed) -> None:
        for repair in repairs:
            if repair.backward is not None:
                repair.backward(placed)

    return Repair("; ".join(repair.text for repair in repairs), start, backward)


def _parts(program: ExternalProgram, wrong: Sequence[Difference]) -> Iterator[Repair | None]:
    """Yield one repair for each cause; None for a cause without one."""
    groups: dict[tuple[str, str, str, float], list[str]] = {}
    for one in wrong:
        how = "averag" if "averag" in one.cause.text else "sum"
        names = groups.setdefault((one.cause.kind, one.cause.axis, how, round(one.cause.factor, 9)), [])
        names.append(one.name)
    for (kind, axis, how, factor), names in groups.items():
        which = sorted(set(names))
        shown = few(which)
        if kind == "missing_reduction" and axis:
            sizes = dict(program.mesh)
            count = prod(sizes[a] for a in axis.split(","))
            divisor = count if how == "averag" else 1
            text = f"{'average' if divisor > 1 else 'all_reduce'} the gradients of {shown} over {axis} after backward"
            reduce = partial(_all_reduced, axes=tuple(axis.split(",")), divisor=divisor)
            changed = partial(_changed, names=frozenset(which), make=reduce)
            yield Repair(text, backward=changed)
        elif kind == "scaled" and factor:
            text = f"divide the gradients of {shown} by {factor:g}"
            scale = partial(_scaled, factor)
            yield Repair(text, backward=partial(_changed, names=frozenset(which), make=scale))
        elif kind == "not_synchronised":
            text = f"broadcast {shown} from rank 0 before training"
            yield Repair(text, start=_broadcast)
        else:
            yield None


def _changed(
    placed: Placed, *, names: frozenset[str], make: Callable[[DeviceMesh], Callable[[Tensor], Tensor]]
) -> None:
    """Replace the local gradients of these parameters by a function of them."""
    function = make(placed.mesh)
    for parameter in placed.tensors(names):
        if parameter.grad is not None:
            with torch.no_grad():
                local = local_value(parameter.grad)
                local.copy_(function(local))


def _all_reduced(mesh: DeviceMesh, *, axes: tuple[str, ...], divisor: int) -> Callable[[Tensor], Tensor]:
    groups = [mesh.get_group(axis) for axis in axes]

    def reduce(local: Tensor) -> Tensor:
        total = local.clone()
        for group in groups:
            dist.all_reduce(total, group=group)
        return total / divisor

    return reduce


def _scaled(factor: float, _mesh: DeviceMesh) -> Callable[[Tensor], Tensor]:
    return lambda local: local / factor


def _broadcast(placed: Placed) -> None:
    for _, tensor, _ in tensors_of_program(placed.made, placed.program):
        dist.broadcast(local_value(tensor), 0)
