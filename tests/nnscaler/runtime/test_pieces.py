"""The end of a region that runs in pieces, and the place of a piece."""

from __future__ import annotations

import pytest
import torch

from nnscaler.runtime import Partial, ProgramError, Replicated, Sharded, recompute
from nnscaler.runtime.communication import differentiable_collectives as comm
from nnscaler.runtime.communication.differentiable_collectives import AxisGroup
from nnscaler.runtime.stage_base_class import RunContext, Stage

TWO = AxisGroup("co", 2, 0)


class InPieces(Stage):
    time_axes = {"co": 2}  # noqa: RUF012 - as a program has it


def test_results_are_joined_by_their_states() -> None:
    pieces = [(torch.full((2,), float(i)), torch.full((2,), float(i)), torch.arange(3.0)) for i in (1, 2)]
    total, joined, same = comm.join(iter(pieces), TWO, Partial(), Sharded(0), Replicated())
    assert (total.tolist(), joined.tolist(), same.tolist()) == ([3, 3], [1, 1, 2, 2], [0, 1, 2])
    largest, strided = comm.join([p[:2] for p in pieces], TWO, Partial("max"), Sharded(0, 2))
    assert (largest.tolist(), strided.tolist()) == ([2, 2], [1, 2, 1, 2])


@pytest.mark.parametrize("count", [0, 1, 3])
def test_another_number_of_pieces_is_an_error(count: int) -> None:
    with pytest.raises(ProgramError, match=f"{count} pieces of 'co' are joined, which has 2"):
        comm.join(((torch.ones(2),) for _ in range(count)), TWO, Partial())


def test_another_number_of_results_and_a_maximum_with_gradient_are_errors() -> None:
    with pytest.raises(ProgramError, match="has 1 results, and 2 are joined"):
        comm.join([(torch.ones(2),)] * 2, TWO, Partial(), Partial())
    with pytest.raises(ProgramError, match="the maximum over 'co' of a tensor that needs a gradient"):
        comm.join([(torch.ones(2, requires_grad=True),)] * 2, TWO, Partial("max"))


def test_sums_are_made_while_pieces_run() -> None:
    alive: list[int] = []

    def pieces():  # type: ignore[no-untyped-def]
        for i in range(4):
            alive.append(i)
            yield (torch.full((2,), float(i)),)

    (total,) = comm.join(pieces(), AxisGroup("co", 4, 0), Partial())
    assert alive == [0, 1, 2, 3] and total.tolist() == [6, 6]


def test_a_piece_is_at_its_place_in_forward_and_in_backward() -> None:
    stage = InPieces(0, RunContext())
    seen: list[int] = []

    def piece(x: torch.Tensor) -> tuple[torch.Tensor]:
        seen.append(stage.coordinates()["co"])
        return ((x * (1 + stage.co.index)).square(),)  # type: ignore[attr-defined]

    x = torch.tensor([3.0], requires_grad=True)
    (total,) = comm.join((recompute(stage.in_piece(piece, co=i), x) for i in range(2)), stage.co, Partial())  # type: ignore[attr-defined]
    assert seen == [0, 1] and stage.co.index == 0  # type: ignore[attr-defined]
    total.backward()
    assert seen == [0, 1, 1, 0] and stage.co.index == 0 and float(x.grad) == 2 * 3 * (1 + 4)  # type: ignore[arg-type, attr-defined]
    assert stage.sizes() == {"co": 2, "micro": 1}


def test_the_place_is_left_where_a_piece_fails() -> None:
    stage = InPieces(0, RunContext())

    def fails() -> None:
        raise ValueError(str(stage.co.index))  # type: ignore[attr-defined]

    with pytest.raises(ValueError, match="1"):
        stage.in_piece(fails, co=1)()
    assert stage.co.index == 0  # type: ignore[attr-defined]
