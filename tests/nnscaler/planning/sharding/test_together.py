"""Operations that are kept together make the same choice, in the tables of all layers only."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from nnscaler.ir.operation_placement import RunInvariant, RunPartial, RunReplicated, Split
from nnscaler.planning.sharding.build_problem import Weights, pose
from nnscaler.planning.sharding.settings_and_strategies import alike
from nnscaler.planning.solver.solve import solve
from tests.nnscaler.planning.planner.planned import subject_of


def test_what_is_the_same_choice() -> None:
    assert alike(RunInvariant(), RunReplicated()) and alike(Split("n", 3), Split("n"))
    assert alike(RunPartial(frozenset((0,))), RunPartial(frozenset((1,))))
    for other in (Split("n"), RunPartial(frozenset((0,)))):
        assert not alike(RunInvariant(), other) and not alike(other, RunReplicated())
    assert not alike(Split("n"), Split("k")) and not alike(Split("n"), RunPartial(frozenset((0,))))


def test_tables_forbid_unlike_choices() -> None:
    subject = subject_of("gpt", 2)
    builder = replace(subject._builder(2, 1), together=(("linear_2", "linear_3"), ("linear_2", "add")))
    free, kept = subject.tables(2, 1), builder.build()
    added = kept.edges[len(free.edges) :]
    assert len(added) == 2 and len(builder.build([op.name for op in subject.graph.operations]).edges) == len(free.edges)
    first, second, table = added[0]
    strategies = [kept.strategies[kept.names[i]] for i in (first, second)]
    assert (kept.names[first], kept.names[second]) == ("linear_2", "linear_3")
    for i, one in enumerate(strategies[0]):
        for j, other in enumerate(strategies[1]):
            assert table[i, j] == (0.0 if alike(one.choices[0], other.choices[0]) else inf)
    before, after = (solve(pose(tables, Weights())) for tables in (free, kept))
    chosen = [strategies[n][after.choices[i]].choices[0] for n, i in enumerate((first, second))]
    assert alike(*chosen) and after.value >= before.value
