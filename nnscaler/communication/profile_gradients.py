"""The gradient sums of a step, in the buckets that `nnscaler.runtime.training.gradients` makes.

A test holds the two together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from nnscaler.communication.communicated_graph import CommunicatedGraph, StageProgram, Stored
from nnscaler.communication.profile_calls import CallClass, Ranks, by_bytes, groups_over, layer_pattern
from nnscaler.ir.graph import Graph, gradient_dtype
from nnscaler.planning.cost.collectives import BUCKET_BYTES


@dataclass(frozen=True, slots=True)
class _Gradient:
    """A local gradient: the groups that sum it, and its size on a rank of each group."""

    fqn: str
    members: tuple[Ranks, ...]
    dtype: str
    sizes: tuple[int, ...]
    stage: int
    axes: tuple[str, ...]
    where: str

    @property
    def bytes(self) -> int:
        return self.sizes[0]


def gradient_calls(communicated: CommunicatedGraph) -> Iterator[tuple[CallClass, int]]:
    """Yield one call per bucket and group, on every role."""
    graph = communicated.partitioned.graph
    devices: dict[int, list[StageProgram]] = {}
    for program in communicated.stages:
        devices.setdefault(program.stage.device, []).append(program)
    shared: dict[Ranks, int] = {}  # a group that spans devices is counted with the first of them
    for device, programs in devices.items():
        found = [g for p in programs for s in p.stored if (g := _gradient(communicated, graph, p, s)) is not None]
        for bucket in _buckets(_alike(found)):
            own = tuple(group for group in bucket[0].members if shared.setdefault(group, device) == device)
            if own and len(own[0]) > 1:
                yield replace(_call(bucket), members=own), 1


def _alike(gradients: Sequence[_Gradient]) -> list[_Gradient]:
    """Return the gradients, for groups apart whose ranks have other sizes of some: these fill their buckets
    otherwise."""
    together: dict[tuple[Ranks, ...], list[_Gradient]] = {}
    for gradient in gradients:
        together.setdefault(gradient.members, []).append(gradient)
    classes: dict[tuple[Ranks, ...], list[list[int]]] = {}
    for members, found in together.items():
        positions: dict[tuple[int, ...], list[int]] = {}
        for i in range(len(members)):
            positions.setdefault(tuple(gradient.sizes[i] for gradient in found), []).append(i)
        classes[members] = list(positions.values())
    return [
        replace(g, members=tuple(g.members[i] for i in alike), sizes=tuple(g.sizes[i] for i in alike))
        for g in gradients
        for alike in classes[g.members]
    ]


def _gradient(communicated: CommunicatedGraph, graph: Graph, program: StageProgram, stored: Stored) -> _Gradient | None:
    tensor, stage = graph.tensors[stored.tensor], program.stage
    users = graph.consumers[stored.tensor]
    if tensor.role != "parameter" or not tensor.needs_grad or not users:
        return None
    inside = groups_over(stage.mesh, stored.reduce)
    members = inside
    if len(stored.copies) > 1:
        meshes = list(dict.fromkeys(communicated.stages[s].stage.mesh for s in stored.copies))
        positions = {rank: i for i, rank in enumerate(stage.mesh.ranks)}
        members = tuple(
            tuple(sorted({mesh.ranks[positions[rank]] for mesh in meshes for rank in group})) for group in inside
        )
    dtype = gradient_dtype(tensor.dtype)
    by_size = by_bytes(inside, stage, stored.at_rest, tensor.shape, dtype)
    size_of = {group: size for size, groups in by_size.items() for group in groups}
    sizes = tuple(size_of[group] for group in inside)
    copies = ("pp",) if len(members[0]) > len(inside[0]) else ()
    where = users[0][0].where
    line = f"{where.file.rpartition('/')[2]}:{where.line}" if where is not None else ""
    return _Gradient(tensor.fqns[0], members, dtype, sizes, stage.index, (*stored.reduce, *copies), line)


def _buckets(gradients: Sequence[_Gradient]) -> list[list[_Gradient]]:
    """Gradients with one group and dtype, by name, up to `BUCKET_BYTES` each."""
    distinct = {(g.members, g.dtype, g.fqn): g for g in reversed(gradients)}
    buckets: list[list[_Gradient]] = []
    size = 0
    for gradient in sorted(distinct.values(), key=lambda g: (g.members, g.dtype, g.fqn)):
        last = buckets[-1][0] if buckets else None
        together = last is not None and (last.members, last.dtype) == (gradient.members, gradient.dtype)
        if not together or size + gradient.bytes > BUCKET_BYTES:
            buckets.append([])
            size = 0
        buckets[-1].append(gradient)
        size += gradient.bytes
    return buckets


def _call(bucket: Sequence[_Gradient]) -> CallClass:
    first = bucket[0]
    patterns = list(dict.fromkeys(layer_pattern(g.fqn) for g in bucket))
    module = ", ".join(patterns[:2]) + (f" and {len(patterns) - 2} more" if len(patterns) > 2 else "")
    return CallClass(
        "all_reduce",
        "gradient",
        "gradient",
        first.stage,
        "+".join(first.axes),
        first.dtype,
        sum(g.bytes for g in bucket),
        first.members,
        module,
        first.where,
        reduction="sum",
    )
