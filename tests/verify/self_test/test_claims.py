from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nnscaler.ir.operation_placement import Split
from nnscaler.layout import PARTIAL, REPLICATED, Partial, Sharded
from verify.evidence.oracle.case_runner import OperatorRunner
from verify.evidence.split_case import Inputs
from verify.evidence.verify_op_options import OpOptions, Safeguards
from verify.self_test.operators.calls_for_annotation_mutants import SampledCall, composed_subjects
from verify.self_test.operators.judge_annotation_mutants import (
    AnnotationTable,
    Answer,
    Claim,
    ask,
    bind_mutant,
    claims_of,
    confirmed,
    run_annotations,
    truly_holds,
)
from verify.self_test.operators.mutants.mutant import spec_of
from verify.self_test.operators.second_opinion import holds

ALL = Safeguards()


def _subject(annotation: str, function: Callable[..., Tensor], **sizes: int) -> SampledCall:
    spec = spec_of("an operator", annotation, function)
    runner = OperatorRunner(spec, OpOptions(prove=False))
    inputs = (Inputs(None, tuple(sizes.items()), "integers", 1), Inputs(None, tuple(sizes.items()), "normal", 2))
    runs = tuple(runner.prepare(i) for i in inputs)
    return SampledCall("an operator", spec, annotation, (), runs, runner, inputs)


def _matmul() -> SampledCall:
    return _subject("m k+, k+ n -> m n", torch.matmul, m=6, k=12, n=18)


def _answer(subject: SampledCall, text: str, identifier: str) -> Answer:
    signature = bind_mutant(subject, text)
    assert not isinstance(signature, str)
    return ask(subject, signature, identifier, ALL)


def test_claims_of_a_product() -> None:
    assert set(claims_of(_matmul().signature)) == {
        Claim((Sharded(0), REPLICATED), (Sharded(0),), 6),
        Claim((Sharded(1), Sharded(0)), (Partial(),), 12),
        Claim((REPLICATED, Sharded(1)), (Sharded(1),), 18),
    }


def test_a_frozen_or_undivided_identifier_claims_nothing() -> None:
    assert not claims_of(_subject("a^ b -> a^ b", lambda x: x * 2, a=6, b=11).signature)


def test_names_belong_to_a_claim_only_where_the_call_looks_at_them() -> None:
    def shown(x: Tensor, h: int) -> Tensor:
        return x.view(x.shape[0], h, -1)

    claims = claims_of(_subject("a (h d) -> a h d", shown, a=6, h=4, d=6).signature)
    assert {claim.names for claim in claims} == {(), ("h",)}


@pytest.mark.parametrize(
    ("text", "stage"),
    [("m k, k+ n -> m n", "registration"), ("k+ m, k+ n -> m n", "shape"), ("m k+, k+ n n -> m n", "registration")],
)
def test_mutants_that_never_run(text: str, stage: str) -> None:
    assert bind_mutant(_matmul(), text) == stage


def test_a_false_claim_is_refuted_by_values() -> None:
    subject = _subject("a b^ -> a b^", lambda x: x.softmax(1), a=6, b=12)
    assert _answer(subject, "a b -> a b", "b").found == "values"
    assert _answer(subject, "a b -> a b", "a").found == "passes"


def test_a_claim_on_which_a_shard_raises() -> None:
    subject = _subject("a b^ -> a b^", lambda x: x.view(-1, 12) * 1.0, a=6, b=12)
    assert _answer(subject, "a b -> a b", "b").found in ("raises", "values")


def test_the_second_opinion_agrees_on_true_and_false_claims() -> None:
    subject = _subject("a b^ -> a", lambda x: x.sum(1), a=6, b=12)
    signature = bind_mutant(subject, "a b+ -> a")
    assert not isinstance(signature, str)
    assert truly_holds(subject, signature, "b")
    largest = bind_mutant(subject, "a b+max -> a")
    assert not isinstance(largest, str)
    assert not truly_holds(subject, largest, "b")
    assert confirmed(subject, largest, "b", Answer("values", 2))


def test_partial_inputs_are_terms_and_their_gradients_copies() -> None:
    subject = _subject("m k+, n k+, +n -> m n", torch.nn.functional.linear, m=6, k=12, n=18)
    claims = {name: claim for claim, name in claims_of(subject.signature).items()}
    whole = subject.runs[1].whole
    assert claims["k"].inputs[2] == PARTIAL
    assert holds(whole, subject.signature, Split("k"), 3, 0)
    copied = (*claims["k"].inputs[:2], REPLICATED)
    assert not holds(whole, subject.signature, Split("k"), 3, 0, copied)


def _table(subject: SampledCall) -> AnnotationTable:
    return run_annotations([subject], lambda _: None)


def test_every_false_claim_of_a_product_is_found() -> None:
    table = _table(_matmul())
    assert table.good
    assert table.stages.total() == table.mutants
    assert table.stages["missed"] == table.stages["holds"] == 0


def test_what_an_annotation_freezes_without_need_is_listed() -> None:
    table = _table(_subject("a b^ -> a", lambda x: x.sum(1), a=6, b=12))
    assert {c.text for c in table.true} == {"a b+ -> a"}
    assert table.stages["holds"] >= 1


def test_a_miss_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verify.self_test.operators.judge_annotation_mutants.ask", lambda *_: Answer("passes"))
    table = _table(_matmul())
    assert table.missed
    assert not table.good


def test_an_oracle_that_refutes_what_is_true_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verify.self_test.operators.judge_annotation_mutants.ask", lambda *_: Answer("values", 2))
    table = _table(_subject("a b^ -> a", lambda x: x.sum(1), a=6, b=12))
    assert table.disputed
    assert not table.good


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.long
def test_composed_operators_run(equal: bool) -> None:
    subjects = list(composed_subjects(OpOptions(prove=False), equal))
    assert len(subjects) >= 25
    for subject in subjects:
        for identifier in claims_of(subject.signature).values():
            assert ask(subject, subject.signature, identifier, ALL).found == "passes", (subject.name, identifier)
