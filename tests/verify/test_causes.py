"""Each kind of cause is named from the values alone, by whoever asks, and rounding names none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nnscaler.layout import Partial, Sharded, State
from nnscaler.runtime.shards import shard, unravel
from verify.programs.causes.explain_wrong_values import cause_of
from verify.programs.causes.wrong_tensor import STAGES, Cause, WrongTensor, laid_out

RIGHT = torch.randn(6, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
OTHER = torch.randn(6, 4, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
FEW = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0, 0.0], dtype=torch.float64)[:, None]  # of an embedding: words of a batch
SQUARE = torch.randn(4, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
LARGE = RIGHT * 1e5  # more than float16 holds
AT = {(rank, 0): {"dp": rank // 2, "tp": rank % 2} for rank in range(6)}
SIZES = {"dp": 3, "tp": 2}


def wrong(values: Callable[[int], Tensor], **more: object) -> WrongTensor:
    """Return a tensor that every rank holds whole, as rank 0 has it."""
    pieces = {place: values(place[0]) for place in AT}
    given = {"expected": RIGHT, "sizes": SIZES, "judged": ((0, 0),), **more}
    return WrongTensor("gradient", pieces, at=AT, **given)  # type: ignore[arg-type]


def parts(rank: int) -> Tensor:
    """Return terms that add up to the right value over tp."""
    return OTHER if rank % 2 else RIGHT - OTHER


def means(rank: int) -> Tensor:
    """Return values whose mean over dp is the right one."""
    return (OTHER, RIGHT, 2 * RIGHT - OTHER)[rank // 2]


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (wrong(parts), ("missing_reduction", "tp", 0.0)),
        (wrong(means), ("missing_reduction", "dp", 0.0)),
        (wrong(lambda rank: RIGHT * 2), ("scaled", "tp", 2.0)),
        (wrong(lambda rank: RIGHT / 3), ("scaled", "dp", 1 / 3)),
        (wrong(lambda rank: RIGHT * 6), ("scaled", "dp,tp", 6.0)),
        (wrong(lambda rank: RIGHT * 1.5), ("scaled", "", 1.5)),
        (wrong(lambda rank: -RIGHT), ("scaled", "", -1.0)),
        (wrong(lambda rank: torch.zeros_like(RIGHT)), ("zero", "", 0.0)),
        (wrong(lambda rank: OTHER, before=OTHER), ("stale", "", 0.0)),
        (wrong(lambda rank: OTHER + RIGHT, before=OTHER), ("stale", "", 0.0)),
        (wrong(lambda rank: OTHER, own=lambda: OTHER), ("own_rows", "", 0.0)),
        (wrong(lambda rank: OTHER / 4, own=lambda: OTHER), ("own_rows", "", 0.25)),
        (wrong(lambda rank: OTHER, others={"a": RIGHT, "b": OTHER}), ("swapped", "", 0.0)),
        (wrong(lambda rank: RIGHT + 2 * OTHER, operands={"b": OTHER}), ("added", "", 0.0)),
        (wrong(lambda rank: RIGHT - 0.5), ("offset", "", 0.0)),
        (wrong(lambda rank: RIGHT.bfloat16().double()), ("rounded", "", 0.0)),
        (wrong(lambda rank: LARGE + 1, expected=LARGE), ("offset", "", 0.0)),
        (wrong(lambda rank: RIGHT.flip(0, 1), elements=RIGHT.flatten()), ("permuted", "", 0.0)),
        (wrong(lambda rank: torch.cat([OTHER[:1], RIGHT[1:]])), ("partly_wrong", "", 0.0)),
        (wrong(lambda rank: FEW * OTHER, expected=FEW * RIGHT), ("differs", "", 0.0)),
        (wrong(lambda rank: OTHER, elements=RIGHT.flatten()), ("differs", "", 0.0)),
        (wrong(lambda rank: RIGHT * float("nan")), ("differs", "", 0.0)),
    ],
)
def test_the_cause_is_named(case: WrongTensor, expected: tuple[str, str, float]) -> None:
    found = cause_of(case)
    assert (found.kind, found.axis, pytest.approx(found.factor)) == expected


def laid(
    states: Mapping[str, State], change: Callable[[Mapping[str, int], Tensor], Tensor], right: Tensor = RIGHT
) -> WrongTensor | None:
    """Return a tensor that lies so on two axes of two ranks, changed by a function of the coordinate and the piece."""
    sizes = {"dp": 2, "tp": 2}
    at = {(rank, 0): unravel(rank, sizes) for rank in range(4)}
    held = {place: (here, change(here, shard(right, states, sizes, here))) for place, here in at.items()}
    return laid_out("gradient", held, right, states, sizes)


ROWS = {"dp": Sharded(0)}


@pytest.mark.parametrize(
    ("case", "text"),
    [
        (laid(ROWS, lambda c, p: p * c["tp"]), "only rank 1 of tp is right: it has all of it"),
        (laid(ROWS, lambda c, p: p * c["dp"]), "on rank 0, 1 alone: the gradient is zero everywhere"),
        (laid(ROWS, lambda c, p: p * (1 - c["tp"])), "only the first rank of tp is right: it has all of it"),
        (laid(ROWS, lambda c, p: p * (0.25, 0.75)[c["tp"]]), "of the ranks of tp add up to the model's: an all_reduce"),
        (laid(ROWS, lambda c, p: p * (0.5, 1.5)[c["tp"]]), "an averaging all_reduce over tp is missing"),
        (laid({}, lambda c, p: p * (0.3, 0.7)[c["tp"] ^ c["dp"]]), "over dp or tp is missing"),
        (laid({}, lambda c, p: p * (0.1, 0.2, 0.3, 0.4)[2 * c["dp"] + c["tp"]]), "over dp,tp is missing"),
        (laid(ROWS, lambda c, p: p * 2), "it is 2 times the model's, the size of dp or tp: summed once too often"),
        (laid(ROWS, lambda c, p: p / 4), "1/4 of the model's, the size of dp,tp: averaged where"),
        (laid(ROWS, lambda c, p: p * 5), "it is 5 times the model's"),
        (laid(ROWS, lambda c, p: p / 5), "it is 1/5 of the model's"),
        (laid(ROWS, lambda c, p: -p), "its sign is wrong"),
        (laid(ROWS, lambda c, p: p * 0.7 if c["dp"] else p), "on rank 2, 3 alone: it is 7/10 times the model's"),
        (laid({"tp": Partial()}, lambda c, p: RIGHT), "every rank of tp holds all of it where each should hold a part"),
        (laid(ROWS, lambda c, p: RIGHT * (0.25, 0.75)[c["dp"]]), "a reduce_scatter over dp is missing"),
        (laid(ROWS, lambda c, p: RIGHT.chunk(2)[1 - c["dp"]]), "wrong places: rank 0 has the piece of rank 2"),
        (laid(ROWS, lambda c, p: p.flip(1)), "in other places: a wrong layout"),
        (laid({"tp": Sharded(1)}, lambda c, p: RIGHT[:, c["tp"] :: 2]), "it is cut as Sharded(1, outer=2) over tp"),
        (laid(ROWS, lambda c, p: SQUARE.T.chunk(2)[c["dp"]], SQUARE), "it is transposed: dims 0 and 1 are exchanged"),
        (laid(ROWS, lambda c, p: RIGHT.roll(1, 0).chunk(2)[c["dp"]]), "it is shifted by one along dim 0"),
        (laid(ROWS, lambda c, p: p.exp() if c["dp"] + c["tp"] else p), "only rank 0 is right"),
        (laid(ROWS, lambda c, p: p.exp() if c["tp"] else p), "it is wrong on rank 1, 3 alone"),
    ],
)
def test_pieces_tell_the_cause(case: WrongTensor | None, text: str) -> None:
    assert text in cause_of(case).text


def test_stages_that_share_a_tensor() -> None:
    """Two views of a tensor are told in the order of the table."""
    values = {(0, 0): OTHER, (1, 0): RIGHT - OTHER}
    stages = WrongTensor("gradient", values, RIGHT, {place: {STAGES: place[0]} for place in values})
    assert "each has only its own part" in cause_of(laid({}, lambda c, p: OTHER), stages).text


def test_a_number_has_no_ratio_to_another() -> None:
    """A scalar is told to be a multiple by a simple fraction alone, and elements that are few prove no order."""
    one = torch.tensor(0.3, dtype=torch.float64)
    assert cause_of(replace(wrong(lambda rank: one * 2.718281), expected=one)).text == ""
    counts = torch.arange(24.0, dtype=torch.float64).reshape(6, 4) % 3
    other = replace(wrong(lambda rank: counts.flip(0)), expected=counts, elements=counts.flatten())
    assert cause_of(other).kind == "differs"


def test_rounding_is_no_cause() -> None:
    """A factor within rounding of 1, and sums that miss the right value by 1e-5, name nothing."""
    assert cause_of(wrong(lambda rank: RIGHT * (1 + 1e-5))) == Cause("differs", "")
    assert cause_of(wrong(lambda rank: parts(rank) + 1e-5)).kind == "differs"


@pytest.mark.parametrize("seed", range(20))
def test_random_values_have_no_cause(seed: int) -> None:
    generator = torch.Generator().manual_seed(100 + seed)
    values = [torch.randn(6, 4, generator=generator, dtype=torch.float64) for _ in AT]
    more = {"before": values[1], "own": lambda: values[2], "elements": RIGHT.flatten(), "operands": {"a": OTHER}}
    assert cause_of(wrong(lambda rank: values[rank], **more)) == Cause("differs", "")


def test_of_one_element_any_two_numbers_have_a_ratio() -> None:
    right, own = RIGHT[0, 0].reshape(1), OTHER[0, 0].reshape(1)
    pieces = dict.fromkeys(AT, 1.2701 * own)
    case = WrongTensor("gradient", pieces, right, AT, sizes=SIZES, judged=((0, 0),), own=lambda: own)
    assert cause_of(case).kind not in ("own_rows", "scaled")
    halved = replace(case, pieces=dict.fromkeys(AT, own / 2))
    assert cause_of(halved).kind == "own_rows"


def test_what_is_next_to_nothing_is_no_multiple() -> None:
    assert cause_of(wrong(lambda rank: RIGHT * 1e-310)).kind != "scaled"
