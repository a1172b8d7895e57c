"""Repairs that a cause suggests, as lines to add after `parallelize`: each is tried on a copy before it is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from verify.external.addresses import Lookup, local_value, match
from verify.external.compare import Compared, Difference
from verify.external.observe import tensors_of_program
from verify.external.program import ExternalProgram

Change = Callable[[ExternalProgram, Any, DeviceMesh], None]


@dataclass(frozen=True)
class Repair:
    """A change of a program that may mend it.

    text    for people: what to add
    change  make it, of (program, what `parallelize` returned, mesh)
    """

    text: str
    change: Change

    def applied(self, program: ExternalProgram) -> ExternalProgram:
        """Return the program with the change."""

        def parallelize(model: Any, mesh: DeviceMesh) -> Any:
            made = program.parallelize(model, mesh)
            made = model if made is None else made
            self.change(program, made, mesh)
            return made

        return replace(program, parallelize=parallelize)


def repair_of(program: ExternalProgram, compared: Sequence[Compared], lookup: Lookup) -> Repair | None:
    """Return the repair of all wrong gradients together; None where a cause suggests none."""
    wrong = [d for result in compared for d in result.differences if d.code in ("gradient_differs", "replicas_differ")]
    parts = list(_parts(program, wrong, lookup))
    if not wrong or not parts or any(part is None for part in parts):
        return None
    repairs = [part for part in parts if part is not None]

    def change(target: ExternalProgram, made: Any, mesh: DeviceMesh) -> None:
        for repair in repairs:
            repair.change(target, made, mesh)

    return Repair("; ".join(repair.text for repair in repairs), change)


def _parts(program: ExternalProgram, wrong: Sequence[Difference], lookup: Lookup) -> Iterator[Repair | None]:
    """Yield one repair for each cause; None for a cause without one."""
    groups: dict[tuple[str, str, str, float], list[str]] = {}
    for one in wrong:
        how = "averag" if "averag" in one.cause.text else "sum"
        names = groups.setdefault((one.cause.kind, one.cause.axis, how, round(one.cause.factor, 9)), [])
        names.append(one.name)
    for (kind, axis, how, factor), names in groups.items():
        which = sorted(set(names))
        shown = ", ".join(which[:3]) + (f" and {len(which) - 3} more" if len(which) > 3 else "")
        if kind == "missing_reduction" and axis:
            sizes = dict(program.mesh)
            count = prod(sizes[a] for a in axis.split(","))
            divisor = count if how == "averag" else 1
            text = f"{'average' if divisor > 1 else 'all_reduce'} the gradients of {shown} over {axis} after backward"
            reduce = partial(_all_reduced, axes=tuple(axis.split(",")), divisor=divisor)
            yield Repair(text, partial(_hooked, names=frozenset(which), lookup=lookup, make=reduce))
        elif kind == "scaled" and factor:
            text = f"divide the gradients of {shown} by {factor:g}"
            yield Repair(text, partial(_hooked, names=frozenset(which), lookup=lookup, make=partial(_scaled, factor)))
        elif kind == "not_synchronised":
            text = f"broadcast {shown} from rank 0 before training"
            yield Repair(text, _broadcast)
        else:
            yield None


def _hooked(
    program: ExternalProgram,
    made: Any,
    mesh: DeviceMesh,
    *,
    names: frozenset[str],
    lookup: Lookup,
    make: Callable[[DeviceMesh], Callable[[Tensor], Tensor]],
) -> None:
    """Let a function of the local gradient run whenever the gradient of one of these parameters is complete."""
    tensors = list(tensors_of_program(made, program))
    function = make(mesh)
    for piece, (_, tensor, kind) in zip(match(tensors, lookup, program.names), tensors, strict=True):
        if kind == "parameter" and piece.name in names and tensor.requires_grad:
            tensor.register_post_accumulate_grad_hook(partial(_changed, function))


def _changed(function: Callable[[Tensor], Tensor], parameter: Tensor) -> None:
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


def _broadcast(program: ExternalProgram, made: Any, _mesh: DeviceMesh) -> None:
    for _, tensor, _ in tensors_of_program(made, program):
        dist.broadcast(local_value(tensor), 0)
