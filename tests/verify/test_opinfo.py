"""Torch's own samples of the operators that the registry knows: their annotations bind and hold."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from op_registry.registry import Registry
from op_registry.spec import OperatorSpec

from tests.opinfo import EXCLUDED, OpInfoEntry, check_call, entries, sample_results, traced_calls


@pytest.fixture(scope="module")
def shared() -> dict[str, OpInfoEntry]:
    return {entry.name: entry for entry in entries()}


@pytest.mark.long
@pytest.mark.early
@pytest.mark.parametrize(("samples", "each"), [(1, 18), pytest.param(4, 1, marks=pytest.mark.long)])
def test_annotations_hold_on_torchs_samples(shared: dict[str, OpInfoEntry], samples: int, each: int) -> None:
    results = [r for entry in list(shared.values())[::each] for r in sample_results(entry, samples)]
    assert not [r for r in results if r.status == "refuted"]
    count = Counter(r.status for r in results)
    considered = count.total() - count["empty"] - count["excluded"]
    held = count["holds"] + count["nothing to split"]
    wrong = [r for r in results if r.status in ("not bindable", "unknown overload")]
    assert held >= 0.95 * considered, wrong
    assert count["holds"] >= 250 / each
    assert sum(r.comparisons for r in results) >= 2000 / each


def test_more_than_164_names_are_shared(shared: dict[str, OpInfoEntry]) -> None:
    assert len({entry.info.name for entry in shared.values()}) >= 164


def test_every_exclusion_is_of_an_entry_that_is_there(shared: dict[str, OpInfoEntry]) -> None:
    excluded = [entry for entry in shared.values() if entry.info.name in EXCLUDED]
    assert {entry.info.name for entry in excluded} == set(EXCLUDED)
    assert {r.status for entry in excluded for r in sample_results(entry, 1)} == {"excluded"}


@pytest.mark.parametrize(
    ("entry", "wrong"),
    [
        ("softmax", OperatorSpec("aten.softmax.int", "* -> *")),
        ("linalg.vector_norm", OperatorSpec("aten.linalg_vector_norm.default", lambda call: "a+ -> ()")),
        ("sin", OperatorSpec("aten.sin.default", "* -> *", linear=(frozenset({0}),))),
    ],
    ids=["a split", "a reduction", "a linear set"],
)
def test_a_wrong_annotation_is_refuted(shared: dict[str, OpInfoEntry], entry: str, wrong: OperatorSpec) -> None:
    results = list(sample_results(shared[entry], 20, Registry(lambda: [wrong])))
    assert "refuted" in {r.status for r in results}


def test_a_text_that_fits_no_sample_is_not_bindable(shared: dict[str, OpInfoEntry]) -> None:
    wrong = OperatorSpec("aten.sin.default", "a b c d e f -> a b c d e f")
    assert {r.status for r in sample_results(shared["sin"], 20, Registry(lambda: [wrong]))} == {"not bindable"}


@pytest.mark.parametrize(
    ("function", "arguments", "names"),
    [
        (F.linear, (torch.ones(2, 3), (torch.ones(4, 3),), {}), ["aten.linear.default"]),
        (torch.sum, (torch.ones(2, 3), (), {"dim": 1}), ["aten.sum.dim_IntList"]),
        (F.softmin, (torch.ones(2, 3), (), {"dim": 1}), ["aten.neg.default", "aten.softmax.int"]),
    ],
    ids=["linear", "sum", "softmin"],
)
def test_calls_are_those_of_a_compilation(function: Any, arguments: Any, names: list[str]) -> None:
    assert [call.call.operator for call in traced_calls(function, arguments)] == names


def test_a_call_of_an_unknown_overload() -> None:
    (call,) = traced_calls(torch.sin, (torch.ones(4), (), {}))
    assert check_call(call, Registry()).status == "unknown overload"
