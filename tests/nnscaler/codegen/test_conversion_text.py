"""Conversions over several axes, as a rank program writes them, run on threads: the value is kept, and the gradient is
the adjoint under the pairing of layouts."""

from __future__ import annotations

from itertools import product
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

import nnscaler.layout
from nnscaler.codegen.python_text_of_calls import conversion_text
from nnscaler.ir.conversion_table_and_paths import explain_illegal, find_path
from nnscaler.layout import (
    INVARIANT,
    PARTIAL,
    REPLICATED,
    Axis,
    DeviceMesh,
    Invariant,
    Layout,
    Partial,
    Sharded,
    State,
    States,
    parse_state,
)
from nnscaler.runtime import Simulator
from nnscaler.runtime.communication import differentiable_collectives as comm
from nnscaler.runtime.communication.differentiable_collectives import AxisGroup
from nnscaler.runtime.shards import assemble, shard
from tests.layouts import gradient_states

SHAPE = (24, 36)
NAMES = ("a", "b", "c")
UNEVEN = (  # dim, outer, sizes of two and of three parts
    *((0, 1, (11, 13)), (0, 1, (7, 9, 8)), (0, 2, (7, 5)), (0, 2, (1, 8, 3))),
    *((1, 1, (17, 19)), (1, 1, (2, 30, 4)), (1, 3, (5, 7)), (1, 3, (5, 1, 6))),
)
SECTIONS = {0: (12, 6, 6), 1: (24, 12)}


def states() -> st.SearchStrategy[State]:
    sharded = st.builds(Sharded, st.sampled_from([0, 1]), st.sampled_from([1, 2, 3, 4, 6, 12]))
    sectioned = st.sampled_from([Sharded(dim, sections=sections) for dim, sections in SECTIONS.items()])
    uneven = st.sampled_from([Sharded(dim, outer, (), sizes) for dim, outer, sizes in UNEVEN])
    whole = st.sampled_from([INVARIANT, REPLICATED, PARTIAL])
    return st.one_of(whole, sharded, sharded, sectioned, uneven)


@st.composite
def layouts(draw: st.DrawFn, sizes: tuple[int, ...]) -> Layout:
    """Legal ones: each axis draws among the states that go with those before."""
    layout: Layout = ()
    for axis in range(len(sizes)):
        state = draw(states())
        assume(explain_illegal((*layout, state), sizes[: axis + 1], SHAPE) is None)
        layout = (*layout, state)
    return layout


@st.composite
def conversions(draw: st.DrawFn) -> tuple[tuple[int, ...], Layout, Layout]:
    sizes = draw(st.sampled_from([(2, 2, 2), (2, 3), (3, 2)]))
    return sizes, draw(layouts(sizes)), draw(layouts(sizes))


def held(states: States, mesh: DeviceMesh, seed: int) -> list[Tensor]:
    """Return each rank's piece of a random value, for every rank of the mesh."""
    sizes = {a.name: a.size for a in mesh.axes}
    summed = [name for name in sizes if isinstance(states.get(name), Partial)]
    generator = torch.Generator().manual_seed(seed)
    terms = {
        at: torch.randint(-9, 10, SHAPE, generator=generator).double()
        for at in product(*(range(sizes[name]) for name in summed))
    }
    cut = {name: state for name, state in states.items() if isinstance(state, Sharded)}
    coordinates = [mesh.coordinates(rank) for rank in mesh.ranks]
    return [shard(terms[tuple(at[name] for name in summed)], cut, sizes, at) for at in coordinates]


def together(tensors: list[Tensor], states: States, mesh: DeviceMesh) -> Tensor:
    """The logical value, after checking that copies are equal."""
    pieces = [(mesh.coordinates(rank), tensor) for rank, tensor in zip(mesh.ranks, tensors, strict=True)]
    made = assemble(pieces, states, {a.name: a.size for a in mesh.axes}, SHAPE)
    assert not made.differences
    return made.value


def pairing(states: States, mesh: DeviceMesh, values: list[Tensor], gradients: list[Tensor]) -> float:
    """<value, gradient>: over all ranks, but only one of those that hold both whole."""
    once = [name for name in mesh.names if isinstance(states[name], Invariant)]
    counted = [i for i, rank in enumerate(mesh.ranks) if not any(mesh.coordinates(rank)[name] for name in once)]
    return float(sum((values[i] * gradients[i]).sum() for i in counted))


def read_back(layout: Layout) -> dict[str, State]:
    """The states by axis, from their text as rank programs have it."""
    assert [parse_state(str(s)) for s in layout] == list(layout)
    return {name: eval(repr(state), vars(nnscaler.layout)) for name, state in zip(NAMES, layout, strict=False)}


@settings(max_examples=30)
@given(conversions())
def test_a_path_keeps_the_value_and_its_backward_is_the_adjoint(case: tuple[tuple[int, ...], Layout, Layout]) -> None:
    sizes, source, target = case
    found = find_path(source, target, sizes, SHAPE, True)
    assert found is not None
    mesh = DeviceMesh(tuple(Axis(*axis) for axis in zip(NAMES, sizes, strict=False)), tuple(range(prod(sizes))))
    before, after = read_back(source), read_back(target)
    values, cotangents = held(before, mesh, 1), held(gradient_states(after), mesh, 2)

    def run(communicator: Any) -> tuple[Tensor, Tensor]:
        stage = SimpleNamespace()
        at = mesh.coordinates(communicator.rank)
        for axis in mesh.axes:
            peers = tuple(r for r in mesh.ranks if {**mesh.coordinates(r), axis.name: 0} == {**at, axis.name: 0})
            setattr(stage, axis.name, AxisGroup(axis.name, axis.size, at[axis.name], peers, communicator))
        leaf = values[communicator.rank].clone().requires_grad_()
        x = leaf * 1
        for move in found[1]:
            text = conversion_text(move, sizes, "x", f"self.{NAMES[move.axis]}", "x")
            x = eval(text, {"comm": comm, "self": stage, "x": x})
        x.backward(cotangents[communicator.rank])
        assert leaf.grad is not None
        return x.detach(), leaf.grad

    outputs, gradients = (list(r) for r in zip(*Simulator(len(mesh.ranks)).run(run), strict=True))
    assert torch.equal(together(outputs, after, mesh), together(values, before, mesh))
    together(gradients, gradient_states(before), mesh)  # equal where they should be
    assert pairing(after, mesh, outputs, cotangents) == pairing(before, mesh, values, gradients)
