"""Other ways through an operator's code are looked at: where several conditions on sizes lead to it,
where symbols are seen to be no numbers, and where the operator itself is wrong beyond a number of its code."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.sampling import every
from tests.verify.op_checks.test_beyond_bounds import verified
from verify.evidence.sizes_of_other_ways import MOST_TRACES
from verify.results.verdict import Verdict


def turned_by_two_remainders(x: Tensor) -> Tensor:
    return x.flip(0) if x.shape[0] % 5 == 0 and x.shape[0] % 7 == 0 else x * 1.0


def turned_by_three_remainders(x: Tensor) -> Tensor:
    return x.flip(0) if x.shape[0] % 3 == 0 and x.shape[0] % 4 == 2 and x.shape[0] % 5 == 1 else x * 1.0


def doubled_of_one_product(x: Tensor) -> Tensor:
    return x * (2.0 if x.shape[0] * x.shape[1] == 77 else 1.0)


def turned_in_a_range(x: Tensor) -> Tensor:
    return x.flip(0) if 90 <= x.shape[0] < 96 else x * 1.0


@pytest.mark.parametrize(
    "function",
    every(4, [turned_by_three_remainders, turned_by_two_remainders, doubled_of_one_product, turned_in_a_range]),
)
def test_conditions_lead_on_to_the_sizes_at_which_all_of_them_hold(function: Any) -> None:
    report = verified(function)
    assert [finding.code for finding in report.findings][:1] == ["annotation_wrong"]


def right_by_three_remainders(x: Tensor) -> Tensor:
    return x + x if x.shape[0] % 3 == 0 and x.shape[0] % 4 == 2 else x * 2.0


@pytest.mark.long
def test_what_is_right_on_all_of_these_ways_passes() -> None:
    assert MOST_TRACES < 10 and verified(right_by_three_remainders).verdict is Verdict.PROVED_BOUNDED


def by_kind_of_number(x: Tensor) -> Tensor:
    rows = x.shape[0]
    return x.flip(0) if isinstance(rows, int) and rows**3 > 10**9 else x * 1.0


def by_text_of_size(x: Tensor) -> Tensor:
    return x.flip(0) if str(x.shape[0]).endswith("321") else x * 1.0


def by_text_of_shape(x: Tensor) -> Tensor:
    return x.flip(0) if f"{x.shape}".count("3") > 2 else x * 1.0


def _doubled_beyond(rows: object) -> float:
    return 2.0 if isinstance(rows, int) and rows**3 > 10**9 else 1.0


def by_kind_in_a_helper(x: Tensor) -> Tensor:
    """Each line of the helper is run for numbers, too."""
    return x * _doubled_beyond(x.shape[0]) * _doubled_beyond(2.5) * _doubled_beyond(3) * _doubled_beyond(4000)


_OF_KINDS = {int: _doubled_beyond}


def by_table_of_kinds(x: Tensor) -> Tensor:
    return x * _OF_KINDS.get(type(x.shape[0]), lambda rows: 1.0)(x.shape[0])


def by_what_numbers_have(x: Tensor) -> Tensor:
    return x * (2.0 if getattr(x.shape[0], "real", 0) ** 3 > 10**9 else 1.0)


def by_kind_in_a_thread(x: Tensor) -> Tensor:
    with ThreadPoolExecutor(1) as pool:
        return x * pool.submit(lambda: _doubled_beyond(x.shape[0])).result()


SEEING_SYMBOLS = [
    by_kind_in_a_helper, by_kind_of_number, by_table_of_kinds, by_text_of_size, by_what_numbers_have, by_text_of_shape,
    by_kind_in_a_thread,
]  # fmt: skip


@pytest.mark.parametrize("function", every(4, SEEING_SYMBOLS))
def test_code_that_sees_that_sizes_are_symbols_is_not_proved_for_all_sizes(function: Any) -> None:
    assert verified(function).verdict is not Verdict.PROVED_ALL_SIZES


def text_of_size_only_if_wrong(x: Tensor) -> Tensor:
    assert x.dim() > 1, f"two dims at least, not {x.shape}"
    return x * 2.0


def test_a_message_that_names_a_size_costs_no_proof() -> None:
    assert verified(text_of_size_only_if_wrong).verdict is Verdict.PROVED_ALL_SIZES


def changes_many_rows(x: Tensor) -> Tensor:
    if x.shape[0] > 40:
        x[0] += 1.0
    return x * 1.0


def test_inputs_that_are_changed_at_larger_sizes_only() -> None:
    """Nothing is compared there: no gradient is recorded of a leaf that is written to."""
    (finding,) = verified(changes_many_rows).findings
    assert finding.code == "input_mutated" and finding.counter_example["shapes"].startswith("(42, ")


class SoftmaxByBlocks(torch.autograd.Function):
    """Its backward forgets what lies beyond the first block of a row."""

    blocks = 1

    @classmethod
    def forward(cls, ctx: Any, x: Tensor) -> Tensor:
        y = torch.softmax(x, -1)
        ctx.save_for_backward(y)
        return y

    @classmethod
    def backward(cls, ctx: Any, gradient: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        terms = gradient * y
        found = sum(terms[:, 32 * i : 32 * i + 32].sum(-1, keepdim=True) for i in range(cls.blocks))
        return y * (gradient - found)


class RightSoftmaxByBlocks(SoftmaxByBlocks):
    """Right up to 32 blocks."""

    blocks = 32


def test_a_backward_that_is_wrong_beyond_its_first_block() -> None:
    (finding,) = verified(SoftmaxByBlocks.apply, "b d^ -> b d^").findings
    assert finding.code == "gradient_is_not_derivative"
    assert "where `d` is 34, since 32 stands in its code" in str(finding.counter_example)
    assert verified(RightSoftmaxByBlocks.apply, "b d^ -> b d^").verdict.passes


def scaled_if_bytes(x: Tensor) -> Tensor:
    whole, large = bool((x == x.round()).all()), bool((x.abs() > 16).any())
    return x / 255 if whole and large else x * 1.0


def test_whole_numbers_of_which_one_is_large() -> None:
    assert verified(scaled_if_bytes).verdict is Verdict.REFUTED
