"""Every row of the conversion table is what it says, and a wrong one is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from nnscaler.ir.conversion_table_and_paths import ROWS
from nnscaler.layout import Partial, Replicated, Sharded
from nnscaler.runtime.communication import differentiable_collectives as comm
from nnscaler.runtime.communication.differentiable_collectives import AxisGroup
from nnscaler.runtime.cut_tensors import piece_of
from verify.programs.lemmas import check_rows
from verify.programs.lemmas.conversions_and_their_adjoints import OF_SLICES, conversions, of_slices
from verify.results.verdict import Verdict

EVERY = sorted({row.function for row in ROWS.values()})


def test_every_row_is_the_map_that_the_table_says() -> None:
    outcome = check_rows(EVERY)
    assert outcome.check.verdict is Verdict.PROVED_BOUNDED and not outcome.findings
    assert outcome.check.count > 100 and f"{len(EVERY)} rows" in outcome.check.detail


@pytest.mark.parametrize("function", EVERY)
def test_every_row_is_looked_at(function: str) -> None:
    cases = list(of_slices(function, 3) if function in OF_SLICES else conversions(frozenset([function]), 3))
    assert cases and all(case.function == function for case in cases)
    if any("outer" in str(case) for case in cases) and function != "all_to_all":
        assert any("sections" in str(case) for case in cases)
        assert any("sizes" in str(case) for case in cases)


def test_no_row_is_no_proof() -> None:
    assert check_rows([]).check.verdict is Verdict.INCONCLUSIVE


def test_a_row_that_the_table_does_not_have_is_refuted() -> None:
    outcome = check_rows(["all_reduce", "all_reduce_twice"])
    assert outcome.check.verdict is Verdict.REFUTED and "all_reduce_twice" in outcome.findings[0].message


def _reversed(tensor: Tensor, axis: AxisGroup) -> Tensor:
    return torch.cat(list(reversed(axis.connected().all_gather(tensor, axis.ranks))), 1)


def _begins_elsewhere(
    x: Tensor, axis: AxisGroup, dim: int, outer: int = 1, sections: tuple[int, ...] = (), sizes: tuple[int, ...] = ()
) -> Tensor:
    """Pieces of the right sizes that begin where equal ones would."""
    cut = Sharded(dim, outer, sections, sizes)

    def kernel(tensor: Tensor, axis: AxisGroup) -> Tensor:
        if not sizes or outer > 1:
            return comm._slice(cut)(tensor, axis)
        total, size = tensor.shape[dim], sizes[axis.index]
        return tensor.narrow(dim, min(axis.index * total // axis.size, total - size), size).clone()

    return comm._convert(x, axis, kernel, comm._gather(cut))


def _wrong_rows() -> dict[str, tuple[str, Callable[..., Tensor]]]:
    convert, same, add, own = comm._convert, comm._same, comm._sum, comm.own_rows
    half = lambda t, axis: add(t, axis) / axis.size  # noqa: E731
    last = lambda t, axis: t.clone() if axis.index == axis.size - 1 else torch.zeros_like(t)  # noqa: E731

    def flat(x: Tensor, axis: AxisGroup, dim: int, *_: Any) -> Tensor:
        """Strided shards taken for contiguous ones."""
        cut = Sharded(dim)
        return convert(x, axis, comm._gather(cut), comm._slice(cut))

    return {
        "the backward all_reduce is missing": ("replicate", lambda x, a: convert(x, a, same, same)),
        "the forward all_reduce is missing": ("all_reduce", lambda x, a, *_: convert(x, a, same, same)),
        "the backward of the sum is a sum too": ("all_reduce", lambda x, a, *_: convert(x, a, add, add)),
        "a mean instead of a sum": ("all_reduce_replicated", lambda x, a: convert(x, a, half, add)),
        "the gradient is kept on all ranks": ("invariant", lambda x, a: convert(x, a, same, same)),
        "another rank keeps it": ("keep_first", lambda x, a: convert(x, a, last, same)),
        "the gradient of all ranks": ("keep_first_replicated", lambda x, a: convert(x, a, comm._first, same)),
        "shards in reverse": (
            "all_gather",
            lambda x, a, d, o=1, s=(), z=(): convert(x, a, _reversed, comm._slice(Sharded(d, o, s, z))),
        ),
        "the sizes of other ranks": (
            "place",
            lambda x, a, d, o=1, s=(), z=(): convert(
                x, a, comm._place(Sharded(d, o, s, z)), comm._slice(Sharded(d, o, s, z[::-1]))
            ),
        ),
        "unequal pieces begin where equal ones do": ("shard", _begins_elsewhere),
        "the first rows in place of its own": ("own_rows", lambda x, a, d, z=(): own(x.flip(d), a, d, z).flip(d)),
        "unequal slices taken for equal ones": ("own_rows", lambda x, a, d, z=(): own(x, a, d)),
        "a slice takes no gradient": ("own_rows", lambda x, a, d, z=(): own(x.detach(), a, d, z) + 0 * x.sum()),
        "outer is forgotten": ("all_gather", flat),
    }


@pytest.mark.parametrize("name", _wrong_rows())
def test_a_wrong_conversion_is_refuted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row, function = _wrong_rows()[name]
    monkeypatch.setattr(comm, row, function)
    outcome = check_rows([row], parts=(2, 3))
    assert outcome.check.verdict is Verdict.REFUTED and f"comm.{row}" in outcome.findings[0].message


def _wrong_joins() -> dict[str, Callable[..., tuple[Tensor, ...]]]:
    join = comm.join
    return {
        "the sum starts with the first piece twice": lambda pieces, axis, *s: join(
            ((p[0] * (2 if isinstance(s[0], Partial) and i == 0 else 1),) for i, p in enumerate(pieces)), axis, *s
        ),
        "shards in reverse": lambda pieces, axis, *s: join(reversed(list(pieces)), axis, *s),
        "a piece without its gradient": lambda pieces, axis, *s: join(
            ((p[0].detach() if i else p[0],) for i, p in enumerate(pieces)), axis, *s
        ),
        "the mean of what all pieces have": lambda pieces, axis, *s: (
            join(pieces, axis, *s)
            if isinstance(s[0], Sharded)
            else tuple(t * (1.5 if isinstance(s[0], Replicated) else 1) for t in join(pieces, axis, *s))
        ),
    }


@pytest.mark.parametrize("name", _wrong_joins())
def test_a_wrong_end_of_a_region_is_refuted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_rows(["join"], parts=(2, 3)).check.verdict is Verdict.PROVED_BOUNDED
    monkeypatch.setattr(comm, "join", _wrong_joins()[name])
    outcome = check_rows(["join"], parts=(2, 3))
    assert outcome.check.verdict is Verdict.REFUTED and "comm.join" in outcome.findings[0].message


def test_rows_on_an_axis_in_time_are_looked_at_without_a_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    right = check_rows(["join", "shard_replicated"], parts=(2,))
    assert right.check.verdict is Verdict.PROVED_BOUNDED
    sliced = comm._slice

    def of_the_first(cut: Sharded) -> comm.Kernel:
        return lambda t, a: piece_of(t, cut, a.size, 0) if a.communicator is None else sliced(cut)(t, a)

    monkeypatch.setattr(comm, "_slice", of_the_first)
    assert check_rows(["shard_replicated"], parts=(2,)).check.verdict is Verdict.PROVED_BOUNDED
    assert check_rows(["join", "shard_replicated"], parts=(2,)).check.verdict is Verdict.REFUTED
