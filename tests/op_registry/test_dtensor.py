"""Our annotations against DTensor's rules, operator by operator: no split that DTensor has is missing without a reason.

`pytest -s -k table tests/op_registry/test_dtensor.py` prints what ours have, theirs have, and both.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from op_registry.registry import default_registry
from op_registry.samples import SAMPLES
from op_registry.samples.sample import F, S, Sample

from tests.op_registry.builtin.oracle import run, whole_run
from tests.op_registry.dtensor.compare import Compared, compare, our_rules
from tests.op_registry.dtensor.explained import NOT_ANNOTATED, REASONS, out_of_scope, reasons_of
from tests.op_registry.dtensor.rules import Rule, propagator, recorded, registered, rules_of

try:
    propagator()
    from torch.distributed.tensor._ops.single_dim_strategy import _ShardingPlaceholder  # noqa: F401
except (ImportError, AttributeError, AssertionError) as error:
    pytest.skip(f"this version of torch keeps DTensor's rules elsewhere: {error}", allow_module_level=True)


@pytest.fixture(scope="module")
def some() -> list[Compared]:
    """Each fourth sample call of a built-in operator."""
    return [compare(number) for number in range(0, len(SAMPLES), 4)]


@pytest.fixture(scope="module")
def compared() -> list[Compared]:
    """Every sample call of a built-in operator."""
    return [compare(number) for number in range(len(SAMPLES))]


def _theirs_only(compared: list[Compared]) -> Iterator[tuple[str, Rule]]:
    for one in compared:
        for rule in one.theirs_only:
            yield one.sample.operator, rule


def _shown(rule: Rule) -> str:
    return f"{' '.join(rule[0]) or '()'} -> {' '.join(rule[1])}"


def _unexplained(compared: list[Compared]) -> set[str]:
    return {f"{name}: {_shown(rule)}" for name, rule in _theirs_only(compared) if not reasons_of(name, rule)}


@pytest.mark.long
def test_rules_that_they_alone_have_are_explained(some: list[Compared]) -> None:
    assert sum(len(one.both) for one in some) >= 450 and any(one.theirs_only for one in some)
    assert _unexplained(some) == set()


@pytest.mark.long
def test_every_rule_that_they_alone_have_is_explained(compared: list[Compared]) -> None:
    assert _unexplained(compared) == set()


@pytest.mark.long
def test_no_reason_is_stale(compared: list[Compared]) -> None:
    used = {id(reason) for name, rule in _theirs_only(compared) for reason in reasons_of(name, rule)}
    assert [(r.operators, r.why) for r in REASONS if id(r) not in used] == []


@pytest.mark.long
def test_every_operator_of_theirs_is_annotated_or_out_of_scope(compared: list[Compared]) -> None:
    ours, below = set(default_registry().names()), frozenset().union(*(one.below for one in compared))
    missing = {n for n, op in registered().items() if n not in ours and out_of_scope(n, op, below) is None}
    assert missing == set(NOT_ANNOTATED)


@pytest.mark.long
def test_most_of_ours_are_compared(compared: list[Compared]) -> None:
    known = {one.sample.operator for one in compared if not one.unknown and one.theirs}
    assert len(known) >= 500
    assert sum(len(one.both) for one in compared) >= 1800


@pytest.mark.long
def test_the_table(compared: list[Compared]) -> None:
    """Printed: operators, and rules of theirs with the reason."""
    lines = [
        f"{one.sample!s:70.70} both {len(one.both):3} ours only {len(one.ours_only):3} theirs only "
        f"{len(one.theirs_only):3}{'  no rules for ' + one.unknown[:60] if one.unknown else ''}"
        for one in compared
    ]
    lines += [
        f"{name}: {_shown(rule)}: {reasons_of(name, rule)[0].why}"
        for name, rule in dict.fromkeys(_theirs_only(compared))
    ]
    total = (sum(len(one.both) for one in compared), sum(len(one.ours_only) for one in compared))
    lines.append(f"both {total[0]}, ours only {total[1]}, theirs only {sum(1 for _ in _theirs_only(compared))}")
    sys.stdout.write("\n".join(lines) + "\n")
    assert total[0] > total[1]


@pytest.mark.parametrize(
    ("sample", "rules"),
    [
        (S("mm", F(6, 12), F(12, 18)), {"S(0) R -> S(0)", "R S(1) -> S(1)", "S(1) S(0) -> P", "P R -> P", "R P -> P"}),
        (S("relu", F(6, 12)), {"S(0) -> S(0)", "S(1) -> S(1)"}),
        (S("sum.dim_IntList", F(6, 12), [1]), {"S(0) -> S(0)", "S(1) -> P", "P -> P"}),
        (
            S("linear", F(6, 12), F(18, 12)),
            {"S(0) R -> S(0)", "R S(0) -> S(1)", "S(1) S(1) -> P", "P R -> P", "R P -> P"},
        ),
    ],
    ids=["mm", "relu", "sum", "linear, a chain"],
)
def test_rules_that_are_known(sample: Sample, rules: set[str]) -> None:
    w = whole_run(sample, 0)
    theirs = {_shown(r) for r in rules_of(recorded(lambda: run(w.call, w.inputs, {}), w.inputs))}
    assert {r for r in theirs if "P(" not in r} == rules == {_shown(r) for r in our_rules(w)}
