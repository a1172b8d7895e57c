"""What has passed is not looked at again; what has not passed is."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from nnscaler.ir.placement import Split
from tests.verify.lemmas.planted import SECONDS, called, floats, stated, users
from verify.lemmas import LemmaResult, Memo, prove_obligations
from verify.lemmas.obligation import Stated
from verify.op_run.cache import Cache
from verify.verdict import Verdict


def linear() -> Stated:
    operator = "aten.linear.default"
    return stated(operator, called(operator, [(8, 64)], floats(8, 32), floats(64, 32)), Split("k"))


def wrong() -> Stated:
    spec = users(lambda x: torch.softmax(x, -1), "a b -> a b")
    return stated(spec, called("planted", [(8, 32)], floats(8, 32)), Split("b"))


def run(obligation: Stated, memo: Memo, seconds: float = SECONDS) -> LemmaResult:
    return prove_obligations([obligation], deadline=time.monotonic() + seconds, memo=memo)


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


def test_another_seed_of_claims_is_another_entry() -> None:
    memo = Memo()
    run(linear(), memo)
    operator = "aten.linear.default"
    other = stated(operator, called(operator, [(8, 64)], floats(8, 32), floats(64, 32)), Split("n"))
    assert run(other, memo, seconds=-1.0).verdict is Verdict.INCONCLUSIVE


def test_without_a_memo_nothing_is_kept() -> None:
    prove_obligations([linear()], deadline=time.monotonic() + SECONDS)
    assert prove_obligations([linear()], deadline=time.monotonic() - 1.0).verdict is Verdict.INCONCLUSIVE
