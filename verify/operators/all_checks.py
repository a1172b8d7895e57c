"""All that is checked of one operator, in order: the operator itself, its splits, its linear sets, pairs, proofs.

This is the oracle. It knows nothing of advice, which asks it: `verify_record` says when its tests are done, and whoever
calls it may add to them before proofs follow.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from op_registry.bind_and_localise_call import named_values
from op_registry.call import TensorArgument
from op_registry.spec import OperatorSpec

from nnscaler.errors import AnnotationError
from verify.evidence.inputs.draw_calls import left_out_as_none
from verify.evidence.oracle.annotation_claims import Claimed, Target, claims_of, kind_of, slices_of, untested
from verify.evidence.oracle.case_runner import CaseResult, OperatorRunner
from verify.evidence.oracle.check_by_cases import TargetOutcome, as_check, check_target, run_cases
from verify.evidence.oracle.check_gradients_asked_alone import check_subsets
from verify.evidence.oracle.enumerate_cases import Base, Enumerator, bases, by_identifier, leaders_of, why_unused
from verify.evidence.oracle.find_runnable_inputs import Unusable
from verify.evidence.oracle.findings_from_counter_examples import (
    does_not_fit,
    not_tested,
    refuted_by_proof,
    survived,
    unusable,
    went_one_way,
    wrong,
)
from verify.evidence.oracle.search_decision_boundaries import try_values
from verify.evidence.oracle.shrink import shrink
from verify.evidence.prove_tested_claims import prove_base
from verify.evidence.split_case import SplitCase
from verify.evidence.verify_op_options import DRAWS, OpOptions
from verify.operators.audit.larger_sizes import LargerSizes, derivative_and_larger_sizes
from verify.operators.audit.side_effects import audit
from verify.operators.audit.torch_library_opcheck import opcheck
from verify.operators.audit.watch_effects_on_tensors import Probed
from verify.results.finding import Finding
from verify.results.finding_codes import INCOMPARABLE
from verify.results.report import Check, Report, environment
from verify.results.verdict import TESTED, Strength, Verdict, weakest

Reproduce = Callable[[str, SplitCase | None], str | None]  # (finding code, the case of it) -> a command line
FLAGS = bool | str | int | float  # types of defaults
WHOLE = "whole operator"
AUDITED = 3  # sample calls on which the operator itself is looked at
PROOF_SHARE = 0.2  # of the limit of one operator: processor time for proofs; what is left then is tested only


@dataclass(frozen=True)
class Claim:
    """One claim to be checked. `needs`: (sample call, target) of everything that it follows from."""

    name: str
    needs: tuple[tuple[int, Target], ...]
    outcome: TargetOutcome
    seconds: float


class Verification:
    """Collects checks, findings and notes while it runs."""

    def __init__(
        self,
        spec: OperatorSpec,
        options: OpOptions,
        progress: Callable[[str], None] | None = None,
        reproduce: Reproduce | None = None,
        runner: OperatorRunner | None = None,
    ) -> None:
        self.spec = spec
        self.options = options
        self.runner = runner or OperatorRunner(spec, options, progress)
        self.progress = progress
        self.reproduce = reproduce
        self.checks: list[Check] = []
        self.claims: list[Claim] = []
        self.findings: list[Finding] = []
        self.counter_examples: dict[int, CaseResult] = {}  # position among the findings -> what showed it
        self.notes: dict[str, None] = {}
        self.text = ""
        self.larger = LargerSizes(self.runner)
        self.tested: list[Base] = []  # sample calls whose tests ran to their end

    def test(self) -> None:
        """Raises Unusable and AnnotationError where the whole operator cannot be run."""
        started = time.perf_counter()
        found = [base for base in self.bases() if not base.inputs.flags or self.without_side_effects(base)]
        if not found:
            return
        bound = found[0].signature.bound
        self.text = bound.text if bound is not None else ""
        seconds = time.perf_counter() - started
        fits = Check(WHOLE, Verdict.TESTED_EXACT, len(found), 0, seconds, "fits its annotation", supporting=True)
        self.checks.append(self.unused(found) or fits)
        for index in sorted({index for base in found for index in base.inputs.without_gradient}):
            self.notes[f"input {index} asks for no gradient: torch has no derivative for it"] = None
        for position, name in dict.fromkeys(pair for base in found for pair in base.inputs.whole_numbers):
            drawn = f"integers below `{name}`" if name else "booleans"
            self.notes[f"input {position} was drawn as {drawn}: `sample_inputs` gives others"] = None
        if found[0].style == "smooth":
            self.notes["all sizes were even: it raises on others, or gives other shapes than its annotation"] = None
        if not any(leaders_of(b.signature, ones=True) or b.linear or slices_of(b.signature) for b in found):
            self.notes[f"`{self.spec.name}` claims nothing: no identifier of `{self.text}` can be split"] = None
        for name, value in self.never_changed(found):
            self.notes[f"`{name}` was {value} in all calls: `sample_inputs` gives others"] = None
        self.audit(found)
        if any(f.code in INCOMPARABLE for f in self.findings):
            return
        for step in (self.derivative, self.subsets, self.singles, self.slices, self.linear, self.pairs):
            step(found)
            if self.findings and self.options.fail_fast:
                break
        self.tested = found

    def prove(self) -> None:
        """Tries to prove what passed its tests, and makes the check of every claim."""
        strengths = self.proofs(self.tested)
        for claim in self.claims:
            strength = weakest([strengths.get(key, TESTED) for key in claim.needs])
            if not claim.outcome.failures and claim.name != "two axes":
                pairs = [(self.tested[i], target, strengths.get((i, target), TESTED)) for i, target in claim.needs]
                run_cases(self.runner, self.larger.cases(pairs, claim.outcome.left_out), claim.outcome)
                for pair in pairs if not claim.outcome.failures else ():
                    claim.outcome.add_beyond(try_values(self.runner, *pair))
                self.explain(claim.outcome)
            if strength.counter_example is not None and not claim.outcome.failures and claim.name != "two axes":
                self.findings.append(refuted_by_proof(self.spec, claim.name, self.text, strength.counter_example))
            self.checks.append(as_check(claim.name, claim.outcome, claim.seconds, strength))
            self.notes.update(claim.outcome.left_out)
        self.probed(self.larger.found)

    def never_changed(self, found: list[Base]) -> Iterator[tuple[str, str]]:
        """Yield optional arguments of a user's function, with all that they were: another value may do anything."""
        calls, optional = [base.signature.call for base in found], left_out_as_none(self.spec)
        for parameter in self.spec.parameters if self.spec.target is not None else ():
            values = [dict(named_values(self.spec, call)).get(parameter.name) for call in calls]
            shown = {"a tensor" if isinstance(value, TensorArgument) else repr(value) for value in values}
            if len(shown) == 1 and (parameter.name in optional or isinstance(parameter.default, FLAGS)):
                yield parameter.name, shown.pop()

    def unused(self, found: list[Base]) -> Check | None:
        """Report sample calls on which the operator raises, as a check that is open: what they were to show is not
        tested."""
        used = {base.inputs.sample for base in found}
        missing = [i for i in range(self.runner.samples) if i not in used]
        if not missing:
            return None
        message = f"on sample call {missing[0]} `{self.spec.name}` raises {why_unused(self.runner, missing[0])}"
        self.findings.append(unusable(self.spec, Unusable("uninformative", message)))
        return Check(WHOLE, Verdict.INCONCLUSIVE, len(found), 0, detail=message)

    def bases(self) -> list[Base]:
        """Return the calls that cases vary. Raises Unusable.

        An operator that cannot be run is audited all the same: that it changes its inputs may be the reason.
        """
        try:
            return bases(self.runner)
        except Unusable:
            if self.options.safeguards.audit:
                for call in self.runner.first_calls():
                    self.probed(audit(self.spec, call, self.options.seed, function=self.runner.function(call)))
            if any(f.code in INCOMPARABLE for f in self.findings):
                return []
            self.checks.clear()
            self.findings.clear()
            raise

    def proofs(self, found: list[Base]) -> dict[tuple[int, Target], Strength]:
        """Return (sample call, target) -> the strength of the claim; nothing where proofs are not wanted or tests
        failed."""
        if not self.options.prove:
            return {}
        failed = frozenset(target for claim in self.claims if claim.outcome.failures for _, target in claim.needs)
        deadline = time.thread_time() + PROOF_SHARE * self.options.timeout
        strengths: dict[tuple[int, Target], Strength] = {}
        for index, base in enumerate(found):
            if self.progress is not None:
                self.progress(f"the proof of sample call {index}")
            for target, strength in prove_base(self.runner, base, deadline, failed).items():
                strengths[index, target] = strength
        return strengths

    def audit(self, found: list[Base]) -> None:
        """Audit the operator as it is: side effects, random numbers, torch's own tests."""
        if not self.options.safeguards.audit:
            return
        for base in [base for base in found if not base.inputs.flags][:AUDITED]:
            self.probed(self.audited(base))
            if self.findings:
                return
        self.probed(opcheck(self.spec, self.runner.concrete(found[0].inputs)))

    def audited(self, base: Base) -> Probed:
        """Return what the audit of one sample call finds."""
        call, strides = self.runner.concrete(base.inputs), self.options.safeguards.strides
        compare, function = call.compare and not self.spec.random, self.runner.function(call)
        return audit(self.spec, call, self.options.seed, compare=compare, strides=strides, function=function)

    def without_side_effects(self, base: Base) -> bool:
        """Return whether a call with a flag that nobody may set (`inplace`, `training`) can be compared with shards."""
        return not self.options.safeguards.audit or not self.audited(base).findings

    def derivative(self, found: list[Base]) -> None:
        """Compare gradients with finite differences, where a backward is written by hand."""
        if self.options.safeguards.derivative and not self.spec.random:
            for base in found[:AUDITED]:
                self.probed(derivative_and_larger_sizes(self.runner, base))

    def probed(self, result: Probed) -> None:
        """Take in what a check of the operator itself says; the same check of two sample calls is one."""
        for check in result.checks:
            same = next((i for i, c in enumerate(self.checks) if c.name == check.name), None)
            if same is None:
                self.checks.append(replace(check, supporting=True))
            else:
                self.checks[same] = self.checks[same].with_other(check)
        self.findings += [f for f in result.findings if f.code not in {g.code for g in self.findings}]
        self.notes.update(dict.fromkeys(result.notes))

    def subsets(self, found: list[Base]) -> None:
        """Check that gradients do not depend on which other inputs ask for one."""
        if self.options.safeguards.subsets:
            self.add(check_subsets(self.runner, found))

    def add(self, result: tuple[Check | None, list[Finding]]) -> None:
        check, findings = result
        if check is not None:
            self.checks.append(check)
        self.findings += findings

    def singles(self, found: list[Base]) -> None:
        """Check every identifier, over all sample calls that have it."""
        for name, kind, group in by_identifier(found):
            started = time.perf_counter()
            outcome = TargetOutcome()
            shown = [(index, base) for index, base in group if name in base.leaders]
            for _, base in shown:
                check_target(Enumerator(self.runner, base), name, outcome)
                if outcome.failures:
                    break
            kinds = {kind_of(base.signature) for _, base in shown}
            # calls in which the identifier is 1, of a kind that no other shows: nothing is proved of them
            alone: list[tuple[int, Target]] = [(i, name) for i, base in group if kind_of(base.signature) not in kinds]
            needs: list[tuple[int, Target]] = [(index, name) for index, _ in shown]
            outcome.untested = self.retried(outcome, name, [base for _, base in group])
            self.conclude(f"split `{name}` ({kind})", f"a split of `{name}`", outcome, started, needs, alone)
            if outcome.failures and self.options.fail_fast:
                return

    def slices(self, found: list[Base]) -> None:
        """Check what is read up to a row in slices in time, which have the rows before them: that is tested only."""
        for target in dict.fromkeys(target for base in found for target in slices_of(base.signature)):
            started = time.perf_counter()
            outcome = TargetOutcome()
            shown = [(i, base) for i, base in enumerate(found) if target in slices_of(base.signature)]
            for _, base in shown:
                if not outcome.failures:
                    check_target(Enumerator(self.runner, base), target, outcome)
            outcome.untested = self.retried(outcome, target, [base for _, base in shown])
            self.conclude(str(target), str(target), outcome, started, [(i, target) for i, _ in shown])

    def linear(self, found: list[Base]) -> None:
        """Check every set of operands through which partial sums are said to pass."""
        if not any(base.linear for base in found):
            return
        started = time.perf_counter()
        outcome = TargetOutcome()
        for base in found:
            for slots in base.linear:
                if not outcome.failures:
                    check_target(Enumerator(self.runner, base), slots, outcome)
        needs: list[tuple[int, Target]] = [(i, slots) for i, base in enumerate(found) for slots in base.linear]
        outcome.untested = self.untested(outcome, [(base, slots) for base in found for slots in base.linear])
        self.conclude("partial sums pass through", "partial sums", outcome, started, needs)

    def retried(self, outcome: TargetOutcome, target: Target, group: list[Base]) -> tuple[Claimed, ...]:
        """Test the claims about a target again at other sizes; return those that still no sample has shown."""
        for claim in self.untested(outcome, [(base, target) for base in group]):
            for base in group:
                tried = claim in outcome.exercised or outcome.failures
                if not tried and kind_of(base.signature) == claim.kind:
                    run_cases(self.runner, Enumerator(self.runner, base).resized(claim), outcome)
        return untested(self.untested(outcome, [(base, target) for base in group]), (), outcome.declined)

    def untested(self, outcome: TargetOutcome, targets: list[tuple[Base, Target]]) -> tuple[Claimed, ...]:
        """Return the claims about these targets that no case has shown; none where a case failed."""
        if outcome.failures:
            return ()
        guards = self.options.safeguards
        claimed = [claim for base, target in targets for claim in claims_of(base.signature, [target], guards)]
        return untested(claimed, outcome.exercised)

    def pairs(self, found: list[Base]) -> None:
        """Check two targets at once, if each holds alone."""
        if not self.options.safeguards.pairs or self.findings:
            return
        started = time.perf_counter()
        outcome = TargetOutcome()
        for base in found:
            enumerator = Enumerator(self.runner, base)
            run_cases(self.runner, (case for _, case in enumerator.pairs(base.targets)), outcome)
            if outcome.failures:
                break
        if outcome.cases:
            # a split that is right for all sizes is right on the shards of another one
            needs: list[tuple[int, Target]] = [(i, t) for i, b in enumerate(found) for t in b.targets]
            self.conclude("two axes", "a mesh of two axes", outcome, started, needs)

    def explain(self, outcome: TargetOutcome) -> None:
        """Add the finding of what failed."""
        if outcome.failures:
            failed = outcome.failures[0]
            smallest = shrink(self.runner, failed) if self.options.explain else failed
            finding = wrong(self.spec, smallest)
            line = self.reproduce(finding.code, smallest.case) if self.reproduce is not None else None
            self.counter_examples[len(self.findings)] = smallest
            self.findings.append(finding.with_reproduce(line))
        elif outcome.unseen and (open_ := went_one_way(self.spec, outcome.unseen)) not in self.findings:
            self.findings.append(open_)

    def conclude(
        self,
        name: str,
        target: str,
        outcome: TargetOutcome,
        started: float,
        needs: list[tuple[int, Target]],
        unproved: Sequence[tuple[int, Target]] = (),
    ) -> None:
        """Keep an outcome for its check, and add its finding.

        `needs`: what a proof of it has to prove; `unproved`: what it would have to, and cannot.
        """
        self.explain(outcome)
        if not outcome.failures and self.options.safeguards.mutants and outcome.survived(DRAWS):
            self.findings.append(survived(self.spec, target, outcome.survived(DRAWS)))
        if outcome.half_line:
            note = f"`{self.spec.name}` raises or is not finite on some inputs: what passed holds on positive ones"
            self.notes[note] = None
        if outcome.untested and (outcome.count or outcome.skipped or not needs):
            self.findings.append(not_tested(self.spec, outcome.untested, tuple(outcome.skipped)))
        elif not outcome.count and not any(f.code == "uninformative" for f in self.findings):
            message = f"`{self.spec.name}` gives NaN, infinity or only zeros on all inputs tried"
            self.findings.append(unusable(self.spec, Unusable("uninformative", message)))
        self.claims.append(Claim(name, (*needs, *unproved), outcome, time.perf_counter() - started))


def verify_record(
    spec: OperatorSpec,
    options: OpOptions | None = None,
    *,
    reproduce: Reproduce | None = None,
    progress: Callable[[str], None] | None = None,
    runner: OperatorRunner | None = None,
    advise: Callable[[Verification], None] = lambda verification: None,
) -> Report:
    """Ask the oracle about an operator.

    reproduce  gives the line that findings show
    progress   is told what runs, before it runs
    runner     runs the operator on other samples than its own
    advise     is called between tests and proofs, and may add to what was found
    """
    started = time.perf_counter()
    options = options or OpOptions()
    verification = Verification(spec, options, progress, reproduce, runner)
    try:
        verification.test()
    except Unusable as problem:
        refuted = int(problem.refuted)
        verdict = Verdict.REFUTED if problem.refuted else Verdict.INCONCLUSIVE
        verification.checks.append(Check(WHOLE, verdict, refuted, refuted))
        verification.findings.append(unusable(spec, problem))
    except AnnotationError as error:
        verification.checks.append(Check(WHOLE, Verdict.REFUTED, 1, 1))
        verification.findings.append(does_not_fit(spec, error))
    advise(verification)
    if verification.tested:
        verification.prove()
    findings = [f.with_reproduce(reproduce(f.code, None) if reproduce else None) for f in verification.findings]
    return Report(
        "verify-op",
        spec.name,
        f"`{verification.text}`" if verification.text else "",
        options.seed,
        tuple(verification.checks),
        tuple(findings),
        tuple(verification.notes),
        {**environment(), "dtype": "float64"},
        time.perf_counter() - started,
    )
