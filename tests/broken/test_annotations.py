"""Wrong annotations: refuted by verify-op, which names the identifier, and by verify-plan, which names the tensor."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from op_registry.registry import default_registry

import nnscaler
import verify
from nnscaler.errors import NnscalerError
from nnscaler.transform.plan import Plan, ReplicateStep, SplitStep
from tests.broken import models
from tests.broken.operators import WRONG, Uses, Wrong
from tests.broken.planting import assert_refuted
from tests.sampling import every

BATCH = {"x": torch.randn(6, 7, generator=torch.Generator().manual_seed(0))}


def test_an_identifier_that_the_output_lacks_cannot_be_registered_without_a_mark() -> None:
    """`k` for `k+`: nobody can register it, and what it would say is refuted."""

    def product(x: Tensor, w: Tensor) -> Tensor:
        return x @ w

    with pytest.raises(NnscalerError, match="`k` has no mark, but output 0 `m n` lacks it"):
        nnscaler.register_op("m k, k n -> m n", name="broken_unmarked")(product)
    report = verify.verify_op(product, annotation="m k, k n -> m n")
    assert report.exit_code == 1
    finding = report.findings[0]
    assert finding.code == "annotation_wrong"
    assert "`k` in `m k, k n -> m n`" in finding.message
    assert str(finding.help).splitlines() == [
        'this annotation holds (tested): "m k+, k+ n -> m n"',
        "`k` should be `k+`: the outputs of the shards sum to the right answer",
    ]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda w: w.name)
def test_verify_op_names_the_identifier(wrong: Wrong) -> None:
    finding = assert_refuted(verify.verify_op(wrong.operator), wrong.code, wrong.identifier)
    assert f"`{wrong.operator_name}`" in finding.message
    assert wrong.right in str(finding.help) or wrong.code != "annotation_wrong"


def test_a_frozen_dim_that_is_unfrozen_is_tested_although_no_sample_lists_it() -> None:
    spec = default_registry().lookup("aten.roll.default")
    assert spec is not None and callable(spec.annotation)
    annotation = spec.annotation
    report = verify.verify_op("aten.roll", annotation=lambda call: str(annotation(call)).replace("^", ""))
    assert report.exit_code == 1, report.to_json()
    first = report.findings[0]  # it has no place: nobody's file has this operator
    assert first.code == "annotation_wrong"
    assert "`aten.roll.default` is wrong when `a` is split" in first.message


@pytest.mark.parametrize("wrong", WRONG, ids=lambda w: w.name)
def test_verify_op_accepts_what_it_should_have_been(wrong: Wrong) -> None:
    plain = wrong.plain
    assert verify.verify_op(plain, annotation=wrong.right).exit_code == 0


@pytest.mark.parametrize("wrong", every(3, WRONG), ids=lambda w: w.name)
def test_verify_plan_names_the_tensor(wrong: Wrong) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return Uses(wrong.operator, wrong.shapes)

    whole = Plan((("tp", 2),), (ReplicateStep((wrong.operator_name,), "tp"),))
    assert verify.verify_plan(build, BATCH, ranks=2, plan=whole).exit_code == 0
    split = Plan((("tp", 2),), (SplitStep((wrong.operator_name,), "tp", wrong.identifier),))
    finding = assert_refuted(
        verify.verify_plan(build, BATCH, ranks=2, plan=split, level="run"), "tensor_differs", wrong.operator_name
    )
    assert f"the annotation of `{wrong.operator_name}`" in str(finding.help)
    static = verify.verify_plan(build, BATCH, ranks=2, plan=split, level="static")
    assert static.exit_code == 1, static.to_json()
    assert wrong.operator_name in static.findings[0].message  # its lemma does not hold


def test_a_mean_whose_shards_are_means_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The built-in annotation of `mean` without its hook, which divides by the size of the whole."""
    registry = default_registry()
    spec = registry.lookup("aten.mean.default")
    assert spec is not None
    monkeypatch.setitem(registry._specs, spec.name, replace(spec, localize=None))
    report = verify.verify_plan(models.perceptron, models.points(), ranks=2, plan="dp=2", level="run")
    finding = assert_refuted(report, "tensor_differs", "mean")
    assert "2 times the model's" in str(finding.cause)
    static = verify.verify_plan(models.perceptron, models.points(), ranks=2, plan="dp=2", level="static")
    assert static.exit_code == 1 and "aten.mean" in static.findings[0].message, static.to_json()


def test_a_function_that_is_declared_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = default_registry()
    spec = registry.lookup("aten.tanh.default")
    assert spec is not None
    monkeypatch.setitem(registry._specs, spec.name, replace(spec, linear=(frozenset({0}),)))
    steps = (SplitStep(("linear",), "tp", "k"), ReplicateStep(("tanh",), "tp", partial=(0,)))
    report = verify.verify_plan(
        models.perceptron, models.points(), ranks=7, plan=Plan((("tp", 7),), steps), level="run"
    )
    assert_refuted(report, "tensor_differs", "tanh")
