"""Every built-in annotation against its operator: each question on each of the operator's sample calls.

A new overload is one row in `op_registry/samples/`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest

from op_registry.builtin import SPECS
from op_registry.samples import SAMPLES
from op_registry.samples.sample import F, S, Sample

from tests.op_registry.builtin.oracle import Whole, whole_run
from tests.op_registry.builtin.questions import FROZEN_ANYWAY, LINEAR_ANYWAY, QUESTIONS, short_name, splits, with_text

# A sample's position is the seed of its random tensors.
BY_OPERATOR: dict[str, list[int]] = {}
for position, row in enumerate(SAMPLES):
    BY_OPERATOR.setdefault(row.operator, []).append(position)

# Each question: of how many samples something is asked, and how many checks that makes. All other samples have nothing
# to split, no linear set, no frozen dim of a size that could be split, or an operator that is excepted by name.
ASKED = {
    "what_may_be_split": (1388, 1388),
    "splits": (1286, 11923),
    "two_axes": (1276, 3923),
    "partial_sums": (656, 821),
    "frozen_dims": (376, 522),
    "other_linear_sets": (643, 2604),
}


def answer_all(sample: Sample, w: Whole) -> None:
    """Check all that is asked of a sample. The first wrong answer is named: the sample, the question, and the case."""
    for question in QUESTIONS:
        for case, check in question(sample, w):
            try:
                check()
            except (Exception, pytest.fail.Exception) as error:
                raise AssertionError(f"{sample}: {question.__name__}, {case}: {error}") from error


def count(samples: Sequence[Sample]) -> dict[str, tuple[int, int]]:
    """Of how many samples each question asks something, and how much of all of them."""
    asked: dict[str, list[int]] = {question.__name__: [] for question in QUESTIONS}
    for number, sample in enumerate(samples):
        w = whole_run(sample, number)
        for question in QUESTIONS:
            asked[question.__name__].append(len(list(question(sample, w))))
    return {name: (sum(map(bool, numbers)), sum(numbers)) for name, numbers in asked.items()}


def test_every_operator_has_a_sample() -> None:
    assert {spec.name for spec in SPECS} - {s.operator for s in SAMPLES} == set()


def test_no_operator_is_annotated_twice() -> None:
    names = [spec.name for spec in SPECS]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("operator", BY_OPERATOR)
def test_operator(operator: str) -> None:
    """On each fourth of its samples, with the first one."""
    for number in BY_OPERATOR[operator][::4]:
        answer_all(SAMPLES[number], whole_run(SAMPLES[number], number))


@pytest.mark.long
@pytest.mark.parametrize("operator", [name for name, samples in BY_OPERATOR.items() if len(samples) > 1])
def test_operator_on_its_other_samples(operator: str) -> None:
    for number in (number for place, number in enumerate(BY_OPERATOR[operator]) if place % 4):
        answer_all(SAMPLES[number], whole_run(SAMPLES[number], number))


@pytest.mark.long
def test_what_is_asked() -> None:
    assert count(SAMPLES) == ASKED


def test_exceptions_are_names_of_operators() -> None:
    known = {short_name(sample.operator) for sample in SAMPLES}
    assert set(FROZEN_ANYWAY) - known == set()
    assert set(LINEAR_ANYWAY) - known == set()


def test_a_wrong_answer_is_named() -> None:
    sample = S("softmax.int", F(6, 12), 1, splits="a b")
    wrong = with_text(whole_run(sample, 0), "a b -> a b")
    with pytest.raises(
        AssertionError, match=re.escape("softmax.int(n[6,12], 1): splits, b = 1 x 2: output 0 at {'x': 0}: ")
    ):
        answer_all(sample, wrong)
    with pytest.raises(AssertionError, match=re.escape("softmax.int(n[6,12], 1): what_may_be_split, in 2: ")):
        answer_all(replace(sample, splits=frozenset("a")), wrong)
    assert [case for case, _ in splits(sample, wrong)][:2] == ["a = 1 x 2", "a = 3 x 2"]


def test_what_is_not_said_is_named() -> None:
    sample = S("relu", F(6, 12), splits="b")
    frozen = with_text(whole_run(sample, 0), "a^ b -> a^ b")
    with pytest.raises(AssertionError, match=re.escape("relu(n[6,12]): frozen_dims, a^ as a: DID NOT RAISE")):
        answer_all(sample, frozen)
    sample = S("neg", F(6, 12), splits="a b")
    w = whole_run(sample, 0)
    silent = replace(with_text(w, "a b -> a b"), spec=replace(w.spec, linear=()))
    with pytest.raises(AssertionError, match=re.escape("neg(n[6,12]): other_linear_sets, inputs [0]: DID NOT RAISE")):
        answer_all(sample, silent)
