"""Random annotations: what verify-op passes is true, and a verifier that passes what is false is found out."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from op_registry.annotation.well_formed import parse_checked
from op_registry.registry import default_registry

from nnscaler.cli.main import main
from nnscaler.errors import AnnotationError
from nnscaler.ir.operation_annotations import Signature
from verify.evidence.dimension_types.prove import Proof, Proofs, targets
from verify.evidence.verify_op_options import OpOptions
from verify.results.report import Check, Report
from verify.results.verdict import Verdict
from verify.self_test.operators import annotation_fuzz
from verify.self_test.operators.annotation_fuzz import SoundnessTable, Violation, run_soundness, soundness_lines
from verify.self_test.operators.annotation_mutants import edited


@pytest.mark.long
def test_what_passes_is_true() -> None:
    table = run_soundness(lambda _: None, 24, 5)
    assert table.good, "\n".join(line.text for line in soundness_lines(table))
    assert table.asked >= 20 and table.judged > 5 and table.splits > 10 * table.judged
    assert table.verdicts["refuted"] > 2


def _passes_all(spec: Any, options: OpOptions, runner: Any = None) -> Report:
    check = Check("split", Verdict.TESTED_EXACT, 1)
    return Report("verify-op", spec.name, "", options.seed, (check,))


def test_a_verifier_that_passes_everything_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(annotation_fuzz, "verify_spec", _passes_all)
    monkeypatch.setattr(annotation_fuzz, "PROVED_EVERY", 10**9)
    table = run_soundness(lambda _: None, 24, 5)
    assert len(table.violations) > 2
    assert not table.good


def _proves_all(spec: Any, signature: Signature, concrete: Any) -> Proofs:
    return Proofs(tuple(Proof(target, True) for target in targets(signature)))


def test_a_refuted_split_is_put_to_the_prover(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = default_registry().lookup("aten.flip.default")
    monkeypatch.setattr(annotation_fuzz, "SPECS", (spec,))
    monkeypatch.setattr(annotation_fuzz, "FALSE_EVERY", 1)
    table = run_soundness(lambda _: None, 6, 0)
    assert table.false_asked and table.verdicts["refuted"] and not table.violations
    monkeypatch.setattr(annotation_fuzz, "prove", _proves_all)
    table = run_soundness(lambda _: None, 6, 0)
    assert {v.verdict for v in table.violations} == {"is PROVED"}


@pytest.mark.long
def test_edits_are_random_and_some_are_annotations() -> None:
    found = Counter(edited("m (k 2), [k l] n -> m^ n", random.Random(seed)) for seed in range(200))
    assert len(found) > 80
    assert [edited("a b -> a b", random.Random(7)) for _ in range(3)] == [edited("a b -> a b", random.Random(7))] * 3
    right = 0
    for seed in range(200):
        try:
            parse_checked(edited("m k+, k+ n -> m n", random.Random(seed)))
        except AnnotationError:
            continue
        right += 1
    assert 20 < right < 180


def _table(**changes: Any) -> SoundnessTable:
    table = SoundnessTable(3, 2, 10, 1, Counter(passed=4, refuted=5, inconclusive=1), 4, 40)
    return replace(table, proved=Counter({"PROVED (all sizes)": 1, "TESTED (exact)": 1}), **changes)


@pytest.mark.parametrize(
    ("table", "code", "said"),
    [
        (_table(), 0, "10 annotations of 2 operators, seed 3: 4 passed, 5 refuted, 1 inconclusive"),
        (_table(), 0, "1 of 2 that passed and were put to the prover are PROVED"),
        (
            _table(violations=[Violation("aten.x", "a -> a", "a+ -> a", "Split in 2", "(6,)", "passes")]),
            1,
            "VIOLATION: aten.x (true: `a -> a`): `a+ -> a` passes and is false: Split in 2 on (6,)",
        ),
        (_table(true_not_passed=["aten.y `a -> a`: REFUTED"]), 1, "not passed although true: aten.y"),
        (_table(judged=0), 1, "0 violations"),
        (_table(verdicts=Counter(passed=4)), 1, "0 refuted"),
    ],
)
def test_the_command(
    table: SoundnessTable,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[tuple[int, int]] = []

    def run(progress: Any, count: int, seed: int) -> SoundnessTable:
        asked.append((count, seed))
        return table

    monkeypatch.setattr(annotation_fuzz, "run_soundness", run)
    assert main(["self-test", "soundness-ops", "--count", "7", "--seed", "3"]) == code
    assert asked == [(7, 3)]
    out = capsys.readouterr().out
    assert said in out and out.splitlines()[-1].startswith("PASSED" if code == 0 else "FAILED")


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["self-test", "soundness-ops", "--count", "0"]) == 2
    assert "--count is at least 1" in capsys.readouterr().err
