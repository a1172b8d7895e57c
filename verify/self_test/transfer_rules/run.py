"""`rule_fuzz` over all rules, in child processes: kernels that are given what they do not check may end a process."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from verify.evidence.dimension_types.rules import RULES, conclude, rule_of
from verify.evidence.dimension_types.rules.call_with_states import Rule
from verify.processes.pool import Died, Note, TimedOut
from verify.self_test.run_rows import died_unexpectedly, ended_by_a_kernel, run_rows_apart
from verify.self_test.transfer_rules.calls import DrawnCall, drawn_calls
from verify.self_test.transfer_rules.handwritten_calls import direct_calls
from verify.self_test.transfer_rules.planted_mistakes import PLANTED, Planted
from verify.self_test.transfer_rules.rule_fuzz import (
    THOROUGH,
    Effort,
    RuleResult,
    Unsound,
    by_overload,
    fuzz_rule,
    replaced,
)

ENOUGH = 50  # claims of a rule that must have been compared


@dataclass(frozen=True)
class RulesReport:
    """
    results    what came out, by overload that has a rule
    unreached  rules of which no call is known: nothing was tried
    untraced   samples that cannot be traced, with the reason
    planted    how many wrong rules were planted; `missed`: those that were not found
    """

    results: Mapping[str, RuleResult]
    unreached: tuple[str, ...]
    untraced: Mapping[str, str]
    planted: int
    missed: tuple[str, ...]

    @property
    def unsound(self) -> tuple[Unsound, ...]:
        return tuple(found for result in self.results.values() for found in result.unsound)

    @property
    def short(self) -> dict[str, int]:
        """Rules of which too few claims were compared, with how many were."""
        return {name: r.verified for name, r in self.results.items() if r.verified < ENOUGH}

    @property
    def passed(self) -> bool:
        """Return whether every rule was tried enough, none is wrong, and every planted mistake was found.

        Nothing tried: no.
        """
        tried = bool(self.results) and not self.short and not self.unreached
        return tried and not self.unsound and self.planted > 0 and not self.missed

    def lines(self) -> list[str]:
        """Return the report for people; what is wrong comes last."""
        compared = sum(result.verified for result in self.results.values())
        asked = sum(result.asked for result in self.results.values())
        strong = sum(result.strong for result in self.results.values())
        found = self.planted - len(self.missed)
        text = [
            f"{len(self.results)} transfer rules, asked {asked} times",
            f"{compared} claims compared with torch ({strong} of shards and partial sums), {len(self.unsound)} wrong",
            f"planted wrong rules: {found} of {self.planted} found",
        ]
        text += [f"not found: {mistake}" for mistake in self.missed]
        text += [f"few claims: {name}, {count} compared" for name, count in self.short.items()]
        text += [f"never tried: {name}" for name in self.unreached]
        text += [f"UNSOUND {u.overload}: {u.states} => {u.claim}: {u.problem}  ({u.call})" for u in self.unsound]
        return text


def fuzz_rules(seed: int = 0) -> RulesReport:
    """Try every rule of the prover on the calls of all samples and on the direct ones, and the planted ones."""
    drawn = drawn_calls()
    calls = by_overload([*drawn.calls, *direct_calls()])
    ruled = {name: found for name, found in calls.items() if rule_of(found[0].overload) is not None}
    results = fuzz_in_children(ruled, seed=seed)
    unreached = tuple(sorted(set(RULES) - set(calls)))
    missed = tuple(f"{p.overload} {p.mistake}" for p in missed_plants(calls, PLANTED, seed))
    return RulesReport(results, unreached, drawn.untraced, len(PLANTED), missed)


def missed_plants(calls: Mapping[str, Sequence[DrawnCall]], planted: Sequence[Planted], seed: int = 0) -> list[Planted]:
    """Return the wrong rules of which no wrong claim is found."""
    missed: list[Planted] = []
    left = list(planted)
    while left:
        now = {p.overload: p for p in reversed(left)}  # one for each overload at a time
        left = [p for p in left if p is not now[p.overload]]
        wrong = replaced({name: p.rule for name, p in now.items()})
        chosen = {name: calls[name] for name in now}
        results = fuzz_in_children(chosen, wrong, seed, Effort(least=2000, unsound=1))
        missed += [p for name, p in now.items() if not results[name].unsound]
    return missed


def fuzz_in_children(
    calls: Mapping[str, Sequence[DrawnCall]],
    conclude: Rule = conclude,
    seed: int = 0,
    effort: Effort = THOROUGH,
) -> dict[str, RuleResult]:
    """Return the results by overload, in the order of their names.

    An overload whose process dies is unsound: a kernel was given what it cannot take.
    """

    def work(row: _Row, _: Note) -> RuleResult:
        return row.died or fuzz_rule(calls[row.name], conclude, seed, effort)

    rows = [_Row(name) for name in calls]
    results = {row.name: result for row, result in run_rows_apart(rows, work, 2, ended=_died)}
    return {name: results[name] for name in calls}


@dataclass(frozen=True, slots=True)
class _Row:
    """One overload. `died`: what its rule came to where that ended the process."""

    name: str
    died: RuleResult | None = None


def _died(row: _Row, event: Died | TimedOut) -> _Row:
    if not isinstance(event, Died) or not ended_by_a_kernel(event):
        raise died_unexpectedly(row, event)
    code = os.waitstatus_to_exitcode(event.status)
    result = RuleResult(row.name, asked=1)
    problem = f"the process ended with {code} while a claim was compared"
    result.unsound.append(Unsound(row.name, "?", "?", problem, "?"))
    return replace(row, died=result)
