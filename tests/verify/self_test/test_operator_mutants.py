from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.sampling import every
from verify.evidence.verify_op_options import Safeguards
from verify.results.finding_codes import CODES
from verify.results.verdict import Verdict
from verify.self_test.operators import judge_operator_mutants
from verify.self_test.operators.ablate_safeguards import EARNERS, WITNESSES, ablations, run_ablation
from verify.self_test.operators.judge_operator_mutants import Judgement, judge, operator_mutants, run_operators
from verify.self_test.operators.mutants.mutant import Family, OperatorMutant
from verify.self_test.operators.mutants.right_backwards_and_mistakes import HOSTS, raw

MUTANTS = {m.name: m for m in operator_mutants()}
_SILENT = lambda _: None  # noqa: E731 - the shortest way to say it


@pytest.mark.long
def test_there_are_enough_of_every_family() -> None:
    families = Counter(m.family for m in MUTANTS.values())
    assert len(MUTANTS) == len(operator_mutants()), "two mutants have one name"
    assert len(MUTANTS) >= 150
    assert min(families.values()) >= 30
    assert set(families) == {"backward", "rank and size", "layout", "reduction", "index", "state and dtype"}


def test_expected_codes_are_in_the_catalogue() -> None:
    assert set().union(*(m.codes for m in MUTANTS.values())) <= set(CODES)


def test_a_mutant_differs_from_its_twin_in_what_it_does_only() -> None:
    for name, mutant in MUTANTS.items():
        wrong, right = mutant.wrong, mutant.right
        assert wrong.annotation == right.annotation, name
        assert wrong.sample_inputs is right.sample_inputs, name
        assert (wrong.target, wrong.localize, wrong.shape_argument) != (
            right.target,
            right.localize,
            right.shape_argument,
        ), name


@pytest.mark.parametrize("host", HOSTS, ids=lambda h: h.name)
def test_the_hosts_backwards_are_right(host: object) -> None:
    """Against torch's own derivative of the forward."""
    from verify.self_test.operators.mutants.right_backwards_and_mistakes import Host

    assert isinstance(host, Host)
    sizes = {"silu": [(5, 4)], "sigmoid": [(5, 4)], "tanh": [(5, 4)], "softmax": [(5, 4)], "matmul": [(5, 4), (4, 3)]}
    sizes |= {"scale_shift": [(5, 4), (4,), (4,)], "linear": [(5, 4), (3, 4), (3,)], "rms_norm": [(5, 4), (4,)]}
    sizes |= {"layer_norm": [(5, 4), (4,), (4,)], "bmm": [(2, 5, 4), (2, 4, 3)], "swiglu": [(5, 4), (5, 4)]}
    sizes |= {"squared_error": [(5, 4), (5, 4)], "weighted_sum": [(5, 4), (4,)]}
    sizes |= {"attend": [(2, 5, 4), (2, 6, 4), (2, 6, 3)]}
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in sizes[host.name]]
    expected, found = host.forward(*inputs), host.right(*inputs)
    cotangent = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    ours = torch.autograd.grad(found, inputs, cotangent)
    for a, b in zip(ours, torch.autograd.grad(expected, inputs, cotangent), strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-9)


def test_raw_reads_memory_in_its_order() -> None:
    x = torch.arange(12.0).view(3, 4)
    assert torch.equal(raw(x), x)
    assert raw(x.t()).flatten().tolist() == list(range(12))
    assert raw(x[:, 1:3]).flatten().tolist() == [1, 2, 3, 4, 5, 6]


def _one(wrong: bool) -> OperatorMutant:
    def halves(x: torch.Tensor) -> torch.Tensor:
        return x / x.shape[0] if wrong else x / 12

    return Family("example").mutant("halves", "a b -> a b", halves, lambda x: x / 12)


@pytest.mark.long
def test_a_kill_is_counted_and_named() -> None:
    table = run_operators([_one(wrong=True)], _SILENT)
    assert table.good
    assert table.killed == table.twins == 1
    assert table.mutants[0].named


@pytest.mark.long
def test_a_survivor_is_counted() -> None:
    table = run_operators([_one(wrong=False)], _SILENT)
    assert [m.name for m in table.survivors] == ["example/halves"]
    assert not table.good


@pytest.mark.apart
def test_a_wrong_call_that_ends_its_process_is_refuted_and_the_table_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    dying = MUTANTS["index/hook dropped: aten.ctc_loss.Tensor"]
    verify_spec = judge_operator_mutants.verify_spec
    monkeypatch.setattr(
        judge_operator_mutants, "verify_spec", lambda s, o: os.abort() if s is dying.wrong else verify_spec(s, o)
    )
    table = run_operators([dying, _one(wrong=True)], _SILENT)
    assert [m.judgement.codes for m in table.mutants] == [("operator_died",), ("annotation_wrong",)]
    assert table.killed == table.twins == 2 and not table.mutants[0].named
    assert "SIGABRT" in table.mutants[0].judgement.message


@pytest.mark.apart
@pytest.mark.parametrize("end", [lambda: os._exit(3), lambda: os.kill(os.getpid(), signal.SIGKILL)])
def test_a_process_that_is_ended_from_outside_refutes_nothing(
    end: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    dying = MUTANTS["index/hook dropped: aten.ctc_loss.Tensor"]
    monkeypatch.setattr(judge_operator_mutants, "verify_spec", lambda s, o: end())
    found = judge_operator_mutants.judge_wrong(dying)
    assert not found.refuted and found.codes == ("operator_died",)


HOOKS = [name for name in MUTANTS if name.startswith("index/hook dropped")]


@pytest.mark.apart
@pytest.mark.parametrize("name", every(18, HOOKS))
def test_a_sample_asks_for_every_hook(name: str) -> None:
    """Without a sample that splits what a hook rewrites, nobody sees that it is gone."""
    assert judge_operator_mutants.judge_wrong(MUTANTS[name]).refuted


def test_a_twin_that_fails_makes_the_kill_worthless() -> None:
    mutant = _one(wrong=True)
    table = run_operators([replace(mutant, right=mutant.wrong)], _SILENT)
    assert table.killed == 1
    assert len(table.failing_twins) == 1
    assert not table.good


def test_inconclusive_is_no_kill() -> None:
    assert not Judgement(Verdict.INCONCLUSIVE).refuted


def test_no_mutants_are_no_success() -> None:
    assert not run_operators([], _SILENT).good


def test_every_safeguard_has_a_row() -> None:
    rows = ablations()
    assert set(EARNERS) <= set(rows)
    assert all(safeguards != Safeguards() for safeguards in rows.values())
    assert len(set(map(repr, rows.values()))) == len(rows)


@pytest.mark.parametrize("safeguard", every(3, WITNESSES))
def test_a_safeguard_refutes_what_nothing_else_does(safeguard: str) -> None:
    name = WITNESSES[safeguard]
    assert judge(MUTANTS[name].wrong).refuted
    anew = {m.name: m for m in operator_mutants()}
    assert not judge(anew[name].wrong, ablations()[safeguard]).refuted


def test_the_ablation_table_counts_what_is_lost() -> None:
    def make() -> list[OperatorMutant]:
        return [_one(wrong=True), MUTANTS["reduction/one added"]]

    before = {m.name: m for m in run_operators(make(), _SILENT).mutants}
    table = run_ablation(make, before, [], _SILENT, ["outputs compared", "wrong variants"])
    lost = {row.safeguard: row.lost.total() for row in table.rows}
    assert lost == {"outputs compared": 1, "wrong variants": 0}
    assert table.idle == ("wrong variants",)
    assert table.rows[0].examples == ("reduction/one added",)
    assert table.rows[0].passing == 1
