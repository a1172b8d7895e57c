"""Parameters that rest in shards over dp: when the planner takes them, and that it never does for nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from nnscaler.communication.materialise import materialise
from nnscaler.errors import NnscalerError
from nnscaler.ir.signature import signatures
from nnscaler.planning.cluster.read import load_cluster
from nnscaler.planning.configurations import Configuration, configurations
from nnscaler.planning.constraints import all_of, constraints_of, data_parallel, read_constraints, sizes
from nnscaler.planning.planner.bounds import bound_within, near_bound, rough_bound
from nnscaler.planning.planner.evaluate import evaluate
from nnscaler.planning.planner.find_plan import find_plan
from nnscaler.planning.sharding.parameter_placement import WHOLE, ZERO_3
from nnscaler.transform.apply import apply_plan
from nnscaler.transform.plan import Plan, RestStep
from tests.nnscaler.planning.planner.planned import deep, graph_of, subject_of

PLENTY = 1e12


@pytest.mark.parametrize("layers", [4, 9])  # a graph, and a chain
def test_shards_are_taken_where_memory_asks_for_them(layers: int) -> None:
    graph, cluster = deep(layers, tokens=2048), load_cluster("h100x8").scaled(4)
    known = dict(signatures(graph))
    free = find_plan(graph, known, cluster, memory=PLENTY, constraint=data_parallel())
    assert not free.best.configuration.zero
    limit = 0.7 * free.best.stages[0].resting
    with pytest.raises(NnscalerError, match="fits into"):
        find_plan(graph, known, cluster, memory=limit, constraint=all_of([data_parallel(), sizes(zero=False)]))
    tight = find_plan(graph, known, cluster, memory=limit, constraint=data_parallel())
    assert tight.best.configuration.zero and "zero=3" in tight.certificate.configuration
    assert tight.best.memory <= limit and tight.best.seconds > free.best.seconds and tight.certificate.gap < 0.1
    assert RestStep(("*",)) in tight.plan.steps
    (program,) = materialise(apply_plan(graph, known, tight.plan), known).stages
    at_rest = [stored for stored in program.stored if graph.tensors[stored.tensor].role == "parameter"]
    assert all("Sharded" in str(stored.at_rest[0]) for stored in at_rest)


def test_a_plan_with_shards_is_found_again_from_its_constraints() -> None:
    graph, cluster = graph_of("gpt"), load_cluster("ethernet10g").scaled(4)
    known = dict(signatures(graph))
    kept = sizes(dp=2, tp=2, pp=1, micro_batches=1, recompute=False, zero=True)
    made = find_plan(graph, known, cluster, constraint=kept)
    again = find_plan(graph, known, cluster, constraint=constraints_of(made.plan, graph, known))
    assert again.plan == made.plan and again.best.seconds == made.best.seconds
    free = find_plan(graph, known, cluster)
    assert free.best.seconds <= made.best.seconds and not free.best.configuration.zero
    with pytest.raises(NnscalerError, match="some parameters at rest in shards"):
        constraints_of(Plan((("dp", 4),), (RestStep(("blocks.0",)),)), graph, known)


def test_what_fits_takes_no_less_than_its_bounds() -> None:
    subject = subject_of(deep(9, tokens=256), 4, "ethernet10g")
    looked = 0
    for c in configurations(4, subject.batch, len(subject.layers)):
        if not c.zero or c.micro_batches > 2:
            continue
        found = evaluate(subject, c, PLENTY)
        assert found is not None
        for limit in (found.memory, PLENTY):
            for bound in (rough_bound, near_bound, bound_within):
                assert bound(subject, c, limit) <= found.seconds * (1 + 1e-9), (c, bound)
        looked += 1
    assert looked > 4


def test_the_stage_of_zero_may_be_written_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "kept.toml"
    for value in ("true", "3"):
        file.write_text(f'[[constraint]]\nkind = "sizes"\nzero = {value}\n', encoding="utf-8")
        kept = read_constraints(file, graph_of("gpt"))
        assert [kept.permits(Configuration(dp=2, parameters=p)) for p in (WHOLE, ZERO_3)] == [False, True]
    file.write_text('[[constraint]]\nkind = "sizes"\nzero = 1\n', encoding="utf-8")
    with pytest.raises(NnscalerError, match="zero is 1"):
        read_constraints(file, graph_of("gpt"))


def test_gathering_is_never_free() -> None:
    """Nothing is gained by shards but memory."""
    subject = subject_of("gpt", 4)
    for c in (Configuration(dp=4), Configuration(dp=2, tp=2, micro_batches=3), Configuration(dp=2, pp=2)):
        whole = evaluate(subject, c, PLENTY)
        cut = evaluate(subject, Configuration(c.dp, c.tp, c.pp, c.micro_batches, parameters=ZERO_3), PLENTY)
        assert whole is not None and cut is not None
        assert cut.seconds > whole.seconds and cut.stages[0].resting < whole.stages[0].resting
