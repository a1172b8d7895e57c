"""Every row of the communication table: the value is kept, and backward is the adjoint under the typed pairing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nnscaler.layout import State
from nnscaler.runtime import Invariant, Partial, ProgramError, Replicated, Sharded, Simulator
from nnscaler.runtime.communication import differentiable_collectives as comm
from nnscaler.runtime.communication.differentiable_collectives import AxisGroup
from nnscaler.runtime.shards import assemble, shard
from tests.layouts import gradient_of

INVARIANT, REPLICATED, PARTIAL = Invariant(), Replicated(), Partial()
Row = Callable[[Tensor, AxisGroup], Tensor]


def integers(*shape: int, seed: int) -> Tensor:
    return torch.randint(-9, 10, shape, generator=torch.Generator().manual_seed(seed)).double()


def held(state: State, shape: tuple[int, ...], parts: int, seed: int) -> list[Tensor]:
    """Return each rank's piece of a random value in this state."""
    if isinstance(state, Partial):
        return [integers(*shape, seed=seed + r) for r in range(parts)]
    return [shard(integers(*shape, seed=seed), {"a": state}, {"a": parts}, {"a": r}) for r in range(parts)]


def pairing(state: State, values: list[Tensor], gradients: list[Tensor]) -> float:
    if isinstance(state, Invariant):
        return float((values[0] * gradients[0]).sum())
    if isinstance(state, Replicated):
        return float((values[0] * sum(gradients)).sum())
    if isinstance(state, Partial):
        return float((sum(values) * gradients[0]).sum())
    return float(sum((v * g).sum() for v, g in zip(values, gradients, strict=True)))


def together(tensors: list[Tensor], state: State, parts: int, shape: tuple[int, ...]) -> Tensor:
    """The logical tensor, after checking that copies are equal."""
    made = assemble([({"a": r}, t) for r, t in enumerate(tensors)], {"a": state}, {"a": parts}, shape)
    assert not made.differences
    return made.value


def check_row(row: Row, before: State, after: State, parts: int, shape: tuple[int, ...]) -> None:
    values = held(before, shape, parts, seed=10)
    cotangents = held(gradient_of(after), shape, parts, seed=50)
    ranks = tuple(range(parts))

    def run(communicator) -> tuple[Tensor, Tensor]:
        rank = communicator.rank
        x = values[rank].clone().requires_grad_()
        y = row(x, AxisGroup("a", parts, rank, ranks, communicator))
        assert y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr() or y._is_view()
        y.backward(cotangents[rank])
        assert x.grad is not None
        return y.detach(), x.grad

    outputs, gradients = zip(*Simulator(parts).run(run), strict=True)
    value = together(values, before, parts, shape)
    assert torch.equal(together(list(outputs), after, parts, shape), value)
    together(list(gradients), gradient_of(before), parts, shape)  # equal where they should be
    assert pairing(after, list(outputs), cotangents) == pairing(before, values, list(gradients))


PLAIN: list[tuple[str, Row, State, State]] = [
    ("replicate", comm.replicate, INVARIANT, REPLICATED),
    ("keep_first", comm.keep_first, INVARIANT, PARTIAL),
    ("all_reduce", comm.all_reduce, PARTIAL, INVARIANT),
    ("all_reduce_replicated", comm.all_reduce_replicated, PARTIAL, REPLICATED),
    ("invariant", comm.invariant, REPLICATED, INVARIANT),
    ("keep_first_replicated", comm.keep_first_replicated, REPLICATED, PARTIAL),
]
WITH_DIM: list[tuple[str, Callable[..., Tensor], State | None, State | None]] = [  # None: the sharded side
    ("shard", comm.shard, INVARIANT, None),
    ("all_gather", comm.all_gather, None, INVARIANT),
    ("all_gather_replicated", comm.all_gather_replicated, None, REPLICATED),
    ("place", comm.place, None, PARTIAL),
    ("reduce_scatter", comm.reduce_scatter, PARTIAL, None),
    ("shard_replicated", comm.shard_replicated, REPLICATED, None),
]


@pytest.mark.parametrize("parts", [2, 3, 4])
@pytest.mark.parametrize("name, row, before, after", PLAIN, ids=[r[0] for r in PLAIN])
def test_rows_without_a_dim(name: str, row: Row, before: State, after: State, parts: int) -> None:
    check_row(row, before, after, parts, (5, 7))


@pytest.mark.parametrize("parts", [2, 3, 4])
@pytest.mark.parametrize("name, row, before, after", WITH_DIM, ids=[r[0] for r in WITH_DIM])
def test_rows_with_a_dim(name: str, row: Callable[..., Tensor], before: State, after: State, parts: int) -> None:
    cuts = [(0, 1, ()), (1, 1, ()), (1, 3, ()), (1, 1, (12, 24)), (1, 1, (12, 12, 12))]
    for dim, outer, sections in cuts:
        sharded = Sharded(dim, outer, sections)
        check_row(
            lambda x, axis, d=dim, o=outer, s=sections: row(x, axis, d, o, s),
            before or sharded,
            after or sharded,
            parts,
            (12, 36),
        )


@pytest.mark.parametrize("parts", [2, 3, 4])
@pytest.mark.parametrize(
    "from_dim, to_dim, from_outer, to_outer",
    [(0, 1, 1, 1), (1, 0, 1, 1), (0, 1, 2, 3), (1, 1, 1, "p"), (1, 1, "p", 1), (1, 1, 2, "2p"), (1, 1, "6p", 3)],
)
def test_all_to_all(parts: int, from_dim: int, to_dim: int, from_outer: int | str, to_outer: int | str) -> None:
    outers = tuple(int(o.removesuffix("p") or 1) * parts if isinstance(o, str) else o for o in (from_outer, to_outer))
    check_row(
        lambda x, axis: comm.all_to_all(x, axis, from_dim, to_dim, outers),
        Sharded(from_dim, outers[0]),
        Sharded(to_dim, outers[1]),
        parts,
        (24, 6 * parts * parts),
    )


def test_local_outer_when_another_axis_shares_the_dim() -> None:
    """The dim is (2 of axis b, 3, 2 of axis a, 2): along `a`, the local outer is the logical one less b's digit."""
    sizes, states = {"a": 2, "b": 2}, {"a": Sharded(0, 6), "b": Sharded(0)}
    whole = torch.arange(24.0)

    def run(communicator) -> tuple[Tensor, Tensor]:
        at = {"a": communicator.rank // 2, "b": communicator.rank % 2}
        group = AxisGroup("a", 2, at["a"], (at["b"], 2 + at["b"]), communicator)
        gathered = comm.all_gather(shard(whole, states, sizes, at), group, 0, outer=3)
        return gathered, shard(whole, {"b": Sharded(0)}, sizes, at)

    for gathered, expected in Simulator(4).run(run):
        assert torch.equal(gathered, expected)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16])
def test_any_dtype_without_gradient(dtype: torch.dtype) -> None:
    whole = (torch.arange(12) % 5).to(dtype)

    def run(communicator) -> Tensor:
        axis = AxisGroup("a", 3, communicator.rank, (0, 1, 2), communicator)
        piece = comm.shard(whole, axis, 0)
        assert torch.equal(comm.all_reduce(comm.place(piece, axis, 0), axis), whole)
        assert torch.equal(comm.all_reduce(comm.keep_first(whole, axis), axis, "max"), whole)
        return comm.all_gather(piece, axis, 0)

    for result in Simulator(3).run(run):
        assert torch.equal(result, whole) and result.dtype == dtype


def test_micro_batches_take_only_rows_without_communication() -> None:
    x = torch.arange(6.0, requires_grad=True)
    piece = comm.shard_replicated(x, AxisGroup("micro", 3, 1), 0)
    assert piece.tolist() == [2.0, 3.0]
    piece.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [0, 0, 1, 1, 0, 0]
    with pytest.raises(ProgramError, match="'micro' has no ranks"):
        comm.all_gather(x, AxisGroup("micro", 3, 1), 0)


def test_a_maximum_has_no_gradient() -> None:
    with pytest.raises(ProgramError, match="maximum"):
        comm.all_reduce(torch.ones(2, requires_grad=True), AxisGroup("a", 1, 0, (0,)), "max")


def test_backward_is_recorded_at_the_line_of_the_program() -> None:
    places: list[str] = []

    def run(communicator) -> None:
        communicator.listener = lambda call: places.append(str(call))
        x = torch.ones(2, requires_grad=True)
        y = comm.replicate(x, AxisGroup("a", 2, communicator.rank, (0, 1), communicator))
        communicator.context = "B0.0"
        y.sum().backward()

    Simulator(2).run(run)
    line = run.__code__.co_firstlineno + 3
    assert places == [f"all_reduce(sum) float32[2] over ranks (0, 1) in B0.0 at {__file__}:{line}"] * 2
