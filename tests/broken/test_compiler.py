"""A stage of the compiler, or the runtime, that is wrong: whatever it generates is caught all the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from op_registry.builtin import embedding_and_index_hooks

import nnscaler
import verify
from nnscaler.codegen import role_writer
from nnscaler.communication import cross_mesh_resharding, insert_conversions
from nnscaler.ir.conversion_table_and_paths import ROWS as TABLE
from nnscaler.ir.conversion_table_and_paths import ConversionRow
from nnscaler.layout import Invariant, Partial, Replicated, Sharded
from nnscaler.runtime.training import backward, executor
from nnscaler.runtime.training.gradients import accumulate_and_reduce as gradients
from nnscaler.runtime.training.gradients import buckets
from nnscaler.transform.plan import AssignStep, Plan, SplitStep
from tests.broken import models
from tests.broken.planting import Original, assert_refuted
from tests.sampling import every

VALUE, GRADIENT, PARAMETER = "tensor_differs", "tensor_gradient_differs", "gradient_differs"
Patch = pytest.MonkeyPatch


def verified(plan: Any = "dp=2,tp=2", ranks: int = 4) -> verify.Report:
    """A transformer, compiled and trained as everything is now."""
    return verify.verify_plan(models.one_block, models.text(), ranks=ranks, plan=plan, level="run", depth="quick")


def verified_small() -> verify.Report:
    """The perceptron, tp=2."""
    return verify.verify_plan(models.perceptron, models.points(), ranks=2, plan="tp=2", level="run", depth="quick")


ROWS = [
    (Invariant, Replicated, "invariant", verified, GRADIENT, "layer_norm"),  # nothing / nothing
    (Invariant, Partial, "replicate", verified, VALUE, "blocks_0_attention_proj_bias_v1"),  # the same on every rank
    (Sharded, Invariant, "place", verified, VALUE, "words_weight_v1"),  # zeros where other ranks have values
    (Partial, Invariant, "invariant", verified_small, VALUE, "linear_1_v1"),  # nothing / nothing
    (Partial, Invariant, "all_reduce_replicated", verified_small, GRADIENT, "linear_1"),  # all_reduce / all_reduce
]


@pytest.mark.parametrize(
    ("source", "target", "function", "program", "code", "tensor"),
    every(4, ROWS),
    ids=[f"{s.__name__}-{f}" for s, _, f, *_ in ROWS],
)
def test_rows_of_the_conversion_table(
    monkeypatch: Patch,
    source: type,
    target: type,
    function: str,
    program: Callable[[], verify.Report],
    code: str,
    tensor: str,
) -> None:
    row = TABLE[source, target]
    monkeypatch.setitem(TABLE, (source, target), ConversionRow(function, row.forward, row.backward))
    assert_refuted(program(), code, tensor)


def test_no_gradient_is_summed_over_ranks(monkeypatch: Patch) -> None:
    """Every gradient is refuted, for each is a part of a sum; the loss of the first step is right."""
    stored_layouts = insert_conversions.stored_layouts

    def without_reductions(*arguments: Any) -> Mapping[str, Any]:
        return {name: replace(layout, reduce=()) for name, layout in stored_layouts(*arguments).items()}

    monkeypatch.setattr(insert_conversions, "stored_layouts", without_reductions)
    report = verified()
    finding = assert_refuted(report, PARAMETER, "words.weight")
    assert "an all_reduce over dp is missing" in str(finding.cause)
    checks = {check.name: check for check in report.checks}
    assert checks["gradients"].refuted == checks["gradients"].count
    assert [f.counter_example["step"] for f in report.findings if f.code == "loss_differs"] == ["1"]


def test_gradients_are_averaged(monkeypatch: Patch, one_block: Original) -> None:
    """As data-parallel training does whose loss is a mean over the rank's own samples."""
    wait = buckets.SumBucket.wait

    def averaged(self: buckets.SumBucket) -> None:
        wait(self)
        self.place(0)._base.div_(len(self.group))  # type: ignore[union-attr]

    monkeypatch.setattr(buckets.SumBucket, "wait", averaged)
    finding = assert_refuted(one_block.verify(one_block.folder, depth="quick"), PARAMETER, "words.weight")
    assert "1/2 of the model's, the size of dp or tp: averaged where it should be summed" in str(finding.cause)


def test_gradients_are_not_accumulated(monkeypatch: Patch, staged: Original) -> None:
    """Each micro-batch replaces what the one before it left."""
    run = backward.BackwardPasses.run

    def replacing(self: backward.BackwardPasses, stage: Any, *more: Any) -> None:
        for parameter in stage.at_rest.values():
            parameter.grad = None
        run(self, stage, *more)

    monkeypatch.setattr(backward.BackwardPasses, "run", replacing)
    report = staged.verify(staged.folder, depth="quick")
    assert_refuted(report, PARAMETER, "words.weight")
    assert [f.counter_example["step"] for f in report.findings if f.code == "loss_differs"] == ["1"]


def test_gradients_of_the_last_step_are_added(monkeypatch: Patch, one_block: Original) -> None:
    """Nobody clears them: only the second step shows it."""
    monkeypatch.setattr(gradients.Gradients, "begin", lambda self: None)
    monkeypatch.setattr(executor.RankExecutor, "zero_grad", lambda self: None)
    finding = assert_refuted(one_block.verify(one_block.folder, depth="quick"), PARAMETER, "words.weight")
    assert finding.counter_example["step"] == "1"


def test_every_block_of_the_vocabulary_starts_at_zero(monkeypatch: Patch) -> None:
    monkeypatch.setattr(embedding_and_index_hooks, "block_start", lambda *_: 0)
    plan = nnscaler.parallelize(models.one_block(), models.text(), ranks=2, plan="tp=2").plan
    split = replace(plan, steps=(*plan.steps, SplitStep(("embedding",), "tp", "v")))
    assert_refuted(verified(split, 2), VALUE, "embedding")


def between_meshes() -> verify.Report:
    """The perceptron, from a mesh of 2 ranks to one of 3."""
    steps = (AssignStep(("layers.0", "tanh"), (0,)), AssignStep(("layers.1", "sub", "square", "mean"), (1,)))
    plan = Plan((("pp", 2),), steps, stage_axes=((("dp", 2),), (("dp", 3),)))
    return verify.verify_plan(models.perceptron, models.points(), ranks=5, plan=plan, level="run")


def test_regions_are_right_as_they_are() -> None:
    assert between_meshes().exit_code == 0


def test_regions_come_from_the_wrong_place(monkeypatch: Patch) -> None:
    """Every message takes the first rows that the sender has."""

    def shifted(*arguments: Any) -> tuple[cross_mesh_resharding.BlockMessage, ...]:
        return tuple(
            replace(m, source_slices=_to_zero(m.source_slices)) for m in cross_mesh_resharding.transfer(*arguments)
        )

    monkeypatch.setattr(role_writer, "transfer", shifted)
    finding = assert_refuted(between_meshes(), VALUE, "tanh")
    assert "agrees where it is computed, and differs where stage 1 receives it" in finding.message


def _to_zero(slices: Any) -> Any:
    start, stop, step = slices[0]
    return ((0, stop - start, step), *slices[1:])


def test_gradients_between_meshes_are_dropped(monkeypatch: Patch) -> None:
    """Messages back come from the first rank only."""

    def fewer(shape: Any, source: Any, *rest: Any) -> tuple[cross_mesh_resharding.BlockMessage, ...]:
        messages = cross_mesh_resharding.transfer(shape, source, *rest)
        return messages if len(source.ranks) == 2 else messages[:1]

    monkeypatch.setattr(role_writer, "transfer", fewer)
    assert_refuted(between_meshes(), GRADIENT, "tanh")
