"""Every transfer rule of the prover against torch, and the harness that does it against wrong rules."""

from __future__ import annotations

import pytest

from verify.self_test.rule_fuzz import RuleResult, by_overload, fuzz_rule, replaced
from verify.self_test.rule_fuzz_calls import DrawnCalls, drawn_calls
from verify.self_test.rule_fuzz_direct import direct_calls
from verify.self_test.rule_fuzz_planted import PLANTED, Planted
from verify.self_test.rule_fuzz_run import RulesReport, fuzz_in_children, fuzz_rules


@pytest.fixture(scope="module")
def drawn() -> DrawnCalls:
    return drawn_calls()
