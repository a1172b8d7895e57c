"""Steps of optimizers are operators: verify-op proves their annotations, and refutes wrong ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from op_registry.builtin.optimizers import UPDATES

from nnscaler.errors import NnscalerError
from verify.evidence.inputs.find_operator import matching
from verify.evidence.verify_op_options import OpOptions
from verify.operators.run.job import address_of
from verify.operators.run.targets import find_jobs
from verify.operators.run.verify_many import run_one
from verify.results.report import Report
from verify.results.verdict import Verdict

FILE = Path(__file__).parents[1] / "data" / "optimizers.py"
VARIANTS = [
    *sorted(UPDATES),
    "torch.optim.SGD(momentum=0.9)",
    "torch.optim.SGD(momentum=0.9, nesterov=True, weight_decay=0.1)",
    "torch.optim.SGD(momentum=0.9, dampening=0.1, maximize=True)",
    "torch.optim.Adam(amsgrad=True, weight_decay=0.1)",
    "torch.optim.AdamW(amsgrad=True, maximize=True)",
    "torch.optim.RMSprop(momentum=0.9)",
    "torch.optim.RMSprop(centered=True, momentum=0.9)",
    "torch.optim.NAdam(weight_decay=0.1, decoupled_weight_decay=True)",
    "torch.optim.RAdam(weight_decay=0.1, decoupled_weight_decay=True)",
    "torch.optim.Adagrad(lr_decay=0.1, initial_accumulator_value=0.5)",
    "torch.optim.ASGD(t0=5, weight_decay=0.1)",
    "torch.optim.Adamax(weight_decay=0.1)",
    "torch.optim.Adadelta(weight_decay=0.1)",
    "torch.optim.Adafactor(weight_decay=0.1, maximize=True)",
    "torch.optim.Muon(nesterov=False, adjust_lr_fn='match_rms_adamw')",
]
QUICK = OpOptions(cases=6)


def report_on(target: str, annotation: str | None = None, options: OpOptions = QUICK) -> Report:
    (job,) = find_jobs([target], annotation=annotation)
    return run_one(job, options, isolate=False)


def splits(report: Report) -> dict[str, Verdict]:
    return {check.name: check.verdict for check in report.checks if check.name.startswith("split")}


def error_of(*targets: str, **more: Any) -> NnscalerError:
    with pytest.raises(NnscalerError) as caught:
        find_jobs(targets, **more)
    return caught.value


@pytest.mark.long
@pytest.mark.parametrize("target", ["torch.optim.AdamW", "torch.optim.SGD", f"{FILE}::Lion(weight_decay=0.1)"])
def test_elementwise_steps_are_proved_for_all_sizes(target: str) -> None:
    report = report_on(target)
    assert report.verdict.passes
    assert splits(report) == {f"split `*{i}` (spatial)": Verdict.PROVED_ALL_SIZES for i in range(2)}


@pytest.mark.long
@pytest.mark.parametrize("target", VARIANTS)
def test_every_annotation_of_torchs_optimizers_holds(target: str) -> None:
    report = report_on(target, options=OpOptions())
    assert report.verdict.passes and not report.findings
    name = target.partition("(")[0]
    tested = name in ("torch.optim.ASGD", "torch.optim.Adamax") or "amsgrad" in target  # their traces are not followed
    wanted = [Verdict.TESTED_EXACT if tested else Verdict.PROVED_ALL_SIZES] * 2
    assert list(splits(report).values()) == (wanted if UPDATES[name] == "elementwise" else [])


@pytest.mark.long
@pytest.mark.parametrize(
    ("target", "annotation"),
    [
        ("torch.optim.Muon", "a b, a b, a b -> a b, a b"),
        (f"{FILE}::LAMB", "*, *, *, * -> *, *, *"),
    ],
)
def test_a_norm_of_the_whole_is_not_elementwise(target: str, annotation: str) -> None:
    report = report_on(target, annotation, OpOptions(cases=1, explain=False, prove=False))
    assert set(splits(report).values()) == {Verdict.REFUTED}
    assert {finding.code for finding in report.findings} == {"annotation_wrong"}


@pytest.mark.parametrize(
    ("target", "annotation"),
    [
        ("torch.optim.Adafactor", "a^ b^, a^ b^, a^ 1, 1 b^ -> a^ b^, a^ 1, 1 b^"),
        (f"{FILE}::LAMB", "a^ b^, a^ b^, a^ b^, a^ b^ -> a^ b^, a^ b^, a^ b^"),
        (f"{FILE}::Clipped", "a^ b^, a^ b^, () -> a^ b^, ()"),
    ],
)
def test_what_needs_the_whole_is_frozen(target: str, annotation: str) -> None:
    report = report_on(target)
    assert report.verdict.passes and annotation in report.setting
    assert any("is not elementwise" in note for note in report.notes)
    assert any("each rank must have all" in note for note in report.notes) is ("Clipped" in target)


@pytest.mark.parametrize(
    ("name", "annotation"),
    [
        ("NormAfterWarmup", "*, * -> *"),
        ("NormAfterWarmup(warmup=4000)", "*, * -> *"),
        ("CountsInGroup", "*, * -> *"),
        ("CountsItself", "*, * -> *"),
        ("ClipsNorm", "*, * -> *"),
        ("FactoredWhereLarge", "*, *, * -> *, *"),
    ],
)
def test_what_begins_beyond_a_number_in_the_code_is_refuted(name: str, annotation: str) -> None:
    report = report_on(f"{FILE}::{name}", annotation, OpOptions(explain=False))
    assert set(splits(report).values()) == {Verdict.REFUTED}


def test_the_steps_that_a_proof_follows_are_named() -> None:
    """The trace has a number in the place of the step: another step may take another branch."""
    report = report_on(f"{FILE}::HiddenWarmup")
    assert report.verdict.passes
    assert set(splits(report).values()) == {Verdict.PROVED_BOUNDED}
    assert all("counts its steps, and steps 1, 2 and 13 are followed" in c.detail for c in report.checks[3:])
    report = report_on(f"{FILE}::LinearWarmup")
    assert report.verdict.passes and set(splits(report).values()) == {Verdict.PROVED_BOUNDED}
    assert "steps 1, 2, 13 and 43 are followed" in report.checks[-1].detail


def test_the_widest_annotation_is_found_and_proved() -> None:
    report = report_on(f"{FILE}::RowNorm")
    assert "a b^, a b^, a -> a b^, a" in report.setting
    assert splits(report) == {"split `a` (spatial)": Verdict.PROVED_ALL_SIZES}


def test_hyper_parameters_are_part_of_the_address() -> None:
    (job,) = find_jobs([f"{FILE}::Lion"], arguments="lr=0.5, weight_decay=0.1")
    assert job.address is not None and job.address.endswith("optimizers.py::Lion(lr=0.5, weight_decay=0.1)")
    (again,) = matching(job.address)
    assert again.name == job.spec.name and address_of(again) == job.address
    (torchs,) = find_jobs(["torch.optim.SGD"], arguments="momentum=0.9,nesterov=True")
    assert torchs.address == "torch.optim.SGD(momentum=0.9, nesterov=True)"
    assert torchs.spec.annotation == "*, *, * -> *, *"
    (plain,) = find_jobs(["torch.optim.SGD"])
    assert plain.spec.annotation == "*, * -> *"


def test_what_cannot_be_verified_says_why() -> None:
    wrong = [
        (error_of("torch.optim.LBFGS"), "evaluates the loss anew", "AdamW"),
        (error_of("torch.optim.SparseAdam"), "sparse gradients", "AdamW"),
        (error_of("torch.optim.AdmW"), "no optimizer 'torch.optim.AdmW'", "torch.optim.AdamW"),
        (error_of("torch.optim.SGD", arguments="0.1"), "cannot read", "lr=0.1"),
        (error_of("torch.optim.SGD", arguments="momntum=0.9"), "cannot be made", "momentum=0"),
        (error_of("aten.gelu(x=1)"), "takes no hyper-parameters", "--sample-inputs"),
        (error_of("torch.optim.SGD", "torch.optim.Adam", arguments="lr=1"), "2 targets", "name one"),
    ]
    for error, message, help in wrong:
        assert message in error.message and help in (error.help or "")
