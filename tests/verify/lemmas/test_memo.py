"""A lemma that has passed is not tried again; one that has not passed is."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch

from op_registry.call import Call, TensorArgument
from op_registry.registry import default_registry
from op_registry.spec import Shards

from nnscaler.ir.operation_placement import RunReplicated, Split
from tests.verify.lemmas.planted import SECONDS, called, floats, stated, users
from verify.operators.run.cache import Cache
from verify.programs.lemmas import LemmaResult, Memo, check_claims, prove_obligations
from verify.programs.lemmas.check_claims import Evidence
from verify.programs.lemmas.operator_claims_without_sizes import Claim, Splits
from verify.programs.lemmas.small_call import represent
from verify.programs.typing import Obligation
from verify.results.verdict import Strength, Verdict


def linear() -> Obligation:
    operator = "aten.linear.default"
    return stated(operator, called(operator, [(8, 64)], floats(8, 32), floats(64, 32)), Split("k"))


def wrong() -> Obligation:
    spec = users(lambda x: torch.softmax(x, -1), "a b -> a b")
    return stated(spec, called("planted", [(8, 32)], floats(8, 32)), Split("b"))


def run(obligation: Obligation, memo: Memo, seconds: float = SECONDS) -> LemmaResult:
    return prove_obligations([obligation], seconds=seconds, memo=memo)


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_pass_is_kept(on_disk: bool, tmp_path: Path) -> None:
    memo = Memo(Cache(tmp_path / "lemmas") if on_disk else None)
    first = run(linear(), memo)
    assert first.verdict is Verdict.PROVED_ALL_SIZES
    again = run(linear(), Memo(memo.disk) if on_disk else memo, seconds=-1.0)  # no time to test anything
    assert [(m.text, m.strength, m.count) for m in again.lemmas] == [
        (m.text, m.strength, m.count) for m in first.lemmas
    ]


def test_nothing_is_kept_that_does_not_pass(tmp_path: Path) -> None:
    memo = Memo(Cache(tmp_path / "lemmas"))
    assert run(wrong(), memo).verdict is Verdict.REFUTED
    assert not memo.kept and not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize(("read", "kept"), [(np.genfromtxt, False), (np.shape, True)])
def test_a_pass_of_code_that_reads_is_not_kept_on_disk(
    read: Callable[[str], object], kept: bool, tmp_path: Path
) -> None:
    file = str(tmp_path / "t.txt")
    Path(file).write_text("2")

    def doubled(x: torch.Tensor) -> torch.Tensor:
        read(file)
        return x * 2.0

    memo, call = Memo(Cache(tmp_path / "lemmas")), called("planted", [(6, 4)], floats(6, 4))
    assert run(stated(users(doubled, "a b -> a b"), call, Split("a")), memo).verdict.passes
    assert memo.kept and bool(list(tmp_path.rglob("*.json"))) is kept


def test_another_seed_of_claims_is_another_entry() -> None:
    memo = Memo()
    run(linear(), memo)
    operator = "aten.linear.default"
    other = stated(operator, called(operator, [(8, 64)], floats(8, 32), floats(64, 32)), Split("n"))
    assert run(other, memo, seconds=-1.0).verdict is Verdict.INCONCLUSIVE


def test_without_a_memo_nothing_is_kept() -> None:
    prove_obligations([linear()], seconds=SECONDS)
    assert prove_obligations([linear()], seconds=-1.0).verdict is Verdict.INCONCLUSIVE


def filled(value: float) -> Obligation:
    operator = "aten.masked_fill.Scalar"
    call = called(operator, [(6, 4)], floats(6, 4), TensorArgument(0, (6, 4), "bool"), value)
    return stated(operator, call, Split("a"))


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_call_that_was_looked_at_with_other_numbers_is_another_entry(on_disk: bool, tmp_path: Path) -> None:
    """An infinity is replaced by a number, and a call with that number is proved: of infinity it says less."""
    memo = Memo(Cache(tmp_path / "lemmas") if on_disk else None)
    assert run(filled(-3.0), memo).verdict is Verdict.PROVED_ALL_SIZES
    memo = Memo(memo.disk) if on_disk else memo
    assert run(filled(float("-inf")), memo).verdict is Verdict.PROVED_BOUNDED
    assert run(filled(-3.0), memo, seconds=-1.0).verdict is Verdict.PROVED_ALL_SIZES


def test_calls_of_other_numbers_are_not_one_form() -> None:
    result = prove_obligations([filled(-3.0), filled(float("-inf"))], seconds=SECONDS)
    assert {m.strength for m in result.lemmas} == {Verdict.PROVED_ALL_SIZES, Verdict.PROVED_BOUNDED}


def test_an_operator_that_ran_whole_with_other_numbers_is_not_proved() -> None:
    spec = users(lambda x, value: x * 2 + value, "a b -> a b")
    result = run(stated(spec, called("planted", [(6, 4)], floats(6, 4), float("-inf")), RunReplicated()), Memo())
    (whole,) = (m for m in result.lemmas if m.text.endswith("runs whole"))
    assert whole.strength is Verdict.PROVED_BOUNDED and "other numbers" in whole.blocker


def hook(keep: bool, call: Call, shards: Shards) -> Call:
    return call if keep else call.replace(1, "shifts", 0)


@pytest.mark.long
def test_two_hooks_of_one_factory_are_two_entries(tmp_path: Path) -> None:
    """So are those of our own factories, and partial functions. The same hook made again is the same entry."""
    spec, disk = default_registry().lookup("aten.roll.default"), Cache(tmp_path)
    other = default_registry().lookup("aten.upsample_nearest1d.default")
    planar = default_registry().lookup("aten.upsample_nearest2d.default")
    assert spec is not None and other is not None and planar is not None

    def made(keep: bool) -> Callable[[Call, Shards], Call]:
        return lambda call, shards: hook(keep, call, shards)

    def key(localize: Callable[[Call, Shards], Call] | None) -> str | None:
        assert spec is not None
        call = called("aten.roll.default", [(6, 4)], floats(6, 4), [1], [1])
        small = represent(stated(replace(spec, localize=localize), call, Split("a")).signature, 0)
        return Memo(disk)._key(check_claims.ClaimedCall(small, {Splits("a"): None}))

    hooks = [None, made(True), made(False), partial(hook, True), partial(hook, False), other.localize, planar.localize]
    keys = [key(localize) for localize in hooks]
    assert None not in keys and len(set(keys)) == len(hooks)
    assert [key(made(True)), key(partial(hook, True))] == [keys[1], keys[3]]


class Stopped(Exception):
    """Ends a run in the middle of it."""


@pytest.mark.parametrize("how", ["interrupt", "limit"])
def test_a_run_that_was_cut_short_is_gone_on_with(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that are done are not done again, whether the limit was reached or the user pressed Ctrl-C."""
    disk, real = Cache(tmp_path / "lemmas"), check_claims.prove

    def cut(
        subject: check_claims.ClaimedCall, tested: Mapping[Claim, Evidence], deadline: float
    ) -> dict[Claim, Evidence]:
        if how == "interrupt":
            raise Stopped
        return real(subject, tested, deadline - 2 * SECONDS)

    with monkeypatch.context() as patch, suppress(Stopped):
        patch.setattr(check_claims, "prove", cut)
        first = run(linear(), Memo(disk))
        assert how == "limit" and first.verdict is Verdict.TESTED_EXACT
        split = next(m for m in first.lemmas if m.text.endswith("splits `k`"))
        assert split.open and "limit of processor time" in split.blocker
    monkeypatch.setattr(check_claims, "test", lambda *_: pytest.fail("it has been tested already"))
    assert run(linear(), Memo(disk)).verdict is Verdict.PROVED_ALL_SIZES
    monkeypatch.setattr(check_claims, "prove", lambda *_: pytest.fail("it has been proved already"))
    assert run(linear(), Memo(disk), seconds=-1.0).verdict is Verdict.PROVED_ALL_SIZES


def test_what_a_proof_refutes_is_no_longer_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It had passed its tests, and was kept as such until then."""
    strength = Strength(Verdict.REFUTED, "", {"x": "1"})
    monkeypatch.setattr(
        check_claims, "prove_base", lambda runner, base, deadline: dict.fromkeys(base.targets, strength)
    )
    memo = Memo(Cache(tmp_path / "lemmas"))
    assert run(linear(), memo).verdict is Verdict.REFUTED
    assert not memo.kept and not list(tmp_path.rglob("*.json"))


def test_other_work_on_the_machine_changes_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand seconds pass, and this thread hardly computes: it waits for a processor."""
    clock = count(0.0, 1000.0)
    for name in ("monotonic", "perf_counter", "time"):
        monkeypatch.setattr(time, name, lambda: next(clock))
    assert run(linear(), Memo(), seconds=20.0).verdict is Verdict.PROVED_ALL_SIZES


def test_a_limit_that_is_reached_says_how_to_raise_it() -> None:
    result = run(linear(), Memo(), seconds=-1.0)
    (outcome,) = result.outcomes
    assert "the limit of -1 s of processor time was reached before it was tested" in (outcome.findings[0].cause or "")
    assert outcome.findings[0].help == (
        "run it again: what was tested is kept, and it goes on from there; --timeout S raises the limit"
    )
