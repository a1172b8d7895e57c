"""Tensors that go to a later stage: rank to rank where the meshes have one shape, by regions where they do not."""

from __future__ import annotations

from math import prod

from nnscaler.communication.builder import StageBuilder
from nnscaler.communication.communicated_graph import Message, Version
from nnscaler.errors import NnscalerError
from nnscaler.ir.conversion import Move
from nnscaler.ir.layout import INVARIANT, Layout, Sharded, local_shape


def bring(builders: list[StageBuilder], target: StageBuilder, tensor: str, layout: Layout) -> Version:
    """Send `tensor` to the target stage, so that it has it in `layout` there.

    Between meshes of one shape every state can travel, rank to rank; the conversion is done on the side where it is
    cheaper, or split between both: among the versions that the producer has or can make, the one with the least
    volume sent plus converted is chosen.
    """
    source = _holder(builders, target, tensor)
    if not source.stage.mesh.same_shape(target.stage.mesh):
        return _bring_by_regions(source, target, tensor, layout)
    choices: list[tuple[float, int, Version, tuple[Move, ...], Layout]] = []
    for version in source.known(tensor).values():
        for goal in dict.fromkeys((version.layout, layout)):
            made = source.path(version.layout, goal, tensor)
            rest = target.path(goal, layout, tensor)
            if made is not None and rest is not None:
                sent = prod(local_shape(goal, source.stage.sizes, source.graph.tensors[tensor].shape))
                choices.append((made[0] + sent + rest[0], len(choices), version, made[1], goal))
    if not choices:
        raise _unreachable(tensor, target)
    _, _, version, moves, goal = min(choices)
    _send(source, target, source.convert(version, moves), goal)
    return target.obtain(tensor, layout)


def _holder(builders: list[StageBuilder], target: StageBuilder, tensor: str) -> StageBuilder:
    """Return the nearest earlier stage that made the tensor itself."""
    received = {(b.stage.index, m.tensor) for b in builders for m in b.receives}
    for builder in reversed(builders[: target.stage.index]):
        if builder.known(tensor) and (builder.stage.index, tensor) not in received:
            return builder
    raise AssertionError(f"{tensor} is made by no stage before {target.stage.index}")


def _send(source: StageBuilder, target: StageBuilder, version: Version, layout: Layout) -> None:
    needs_grad = source.graph.tensors[version.tensor].needs_grad
    received = target.add(version.tensor, layout)
    message = Message(version.tensor, source.stage.index, target.stage.index, version, received, needs_grad)
    source.sends.append(message)
    target.receives.append(message)


def _bring_by_regions(source: StageBuilder, target: StageBuilder, tensor: str, layout: Layout) -> Version:
    """Only whole and sharded states of mesh axes can be cut into regions: the others are converted on either side. A
    micro-batch travels by itself, so its state on the axis of micro-batches is the same on both sides."""
    choices: list[tuple[float, int, Version, tuple[Move, ...], Layout]] = []
    for version in source.known(tensor).values():
        for over_micro_batches in dict.fromkeys((version.layout[-1], layout[-1])):
            there = (*_regular(version.layout[:-1]), over_micro_batches)
            here = (*_regular(layout[:-1]), over_micro_batches)
            made, rest = source.path(version.layout, there, tensor), target.path(here, layout, tensor)
            if made is not None and rest is not None:
                choices.append((made[0] + rest[0], len(choices), version, made[1], here))
    if not choices:
        raise _unreachable(tensor, target)
    _, _, version, moves, here = min(choices)
    _send(source, target, source.convert(version, moves), here)
    return target.obtain(tensor, layout)


def _regular(layout: Layout) -> Layout:
    return tuple(s if isinstance(s, Sharded) else INVARIANT for s in layout)


def _unreachable(tensor: str, target: StageBuilder) -> NnscalerError:
    message = f"tensor {tensor} cannot reach the layout that stage {target.stage.index} needs"
    return NnscalerError("no_conversion", message)
