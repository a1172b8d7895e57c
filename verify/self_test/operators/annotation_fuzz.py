"""`nnscaler self-test soundness-ops`: whenever verify-op passes, is the annotation true?

Random annotations of built-in operators, near the true ones, are verified on a part of the operator's samples. What
passes is judged by the second opinion, which shares no code with verify-op's cutting and joining: on samples and sizes
that verify-op did not see, in three numbers of shards, strided, unequal and by sections, values and gradients. Of the
splits that verify-op refutes, some are put to the prover without a test before: it must not prove them.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from op_registry.bind_and_localise_call import bind_call
from op_registry.builtin import SPECS
from op_registry.call import Call
from op_registry.samples import Sample, samples_of
from op_registry.spec import OperatorSpec

from nnscaler.ir.derive_operand_layouts import explain_illegal_choice
from nnscaler.ir.operation_annotations import Signature
from nnscaler.ir.operation_placement import Choice, RunPartial, Split
from verify.evidence.dimension_types.prove import prove
from verify.evidence.oracle.case_runner import OperatorRunner, Prepared
from verify.evidence.oracle.enumerate_cases import leaders_of
from verify.evidence.split_case import Inputs
from verify.evidence.verify_op_options import OpOptions, Safeguards
from verify.operators.report_on_operator import verify_spec
from verify.results.report import Report
from verify.results.styled_line import StyledLine, plain
from verify.self_test.operators.annotation_mutants import edited
from verify.self_test.operators.judge_annotation_mutants import claims_of
from verify.self_test.operators.second_opinion import holds
from verify.self_test.run_rows import Progress, closing_line

COUNT = 5000
OPERATORS = 200
TRUE = 0.08  # of the annotations are the true ones
TRIES = 40  # edits until one fits the call
SAME = 0.2  # of the edits that claim no more than the true annotation are kept
SHARDS = (2, 3, 5, 7, 4)  # the second opinion takes the first three that divide
FEW = 3  # splits that are judged on a second call
SIZES = (30, 42, 20)  # of the identifier that is split, on other calls than those that verify-op saw
PROVED_EVERY = 12  # of the annotations that pass, so many are proved as well
FALSE_EVERY = 12  # of the splits that are refuted, so many are put to the prover
# Less than verify-op does: whatever passes there passes here, and what is false and passes here is asked of all of it.
LIGHT = Safeguards(derivative=False, pairs=False, dtypes=False, subsets=False, small=False, strides=False, audit=False)


@dataclass(frozen=True)
class Kind:
    """The calls of one operator that have one annotation. `sizes`: those that come with the text."""

    spec: OperatorSpec
    text: str
    calls: tuple[Sample, ...]


@dataclass(frozen=True)
class Violation:
    """A false claim that passed: `how` it was split, and on which shapes."""

    operator: str
    true: str
    text: str
    how: str
    shapes: str
    verdict: str


@dataclass
class SoundnessTable:
    """Counts of the soundness fuzz of operators.

    asked        annotations that were verified
    verdicts     verdict -> number of annotations
    judged       passed annotations that the second opinion decided
    splits       comparisons in which it did
    proved       verdicts of those that were proved too
    false_asked  refuted splits that were put to the prover
    """

    seed: int
    operators: int = 0
    asked: int = 0
    true: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)
    judged: int = 0
    splits: int = 0
    proved: Counter[str] = field(default_factory=Counter)
    false_asked: int = 0
    violations: list[Violation] = field(default_factory=list)
    true_not_passed: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        """Return whether nothing false passed, in a run that shows something."""
        seen = self.judged and self.verdicts["passed"] and self.verdicts["refuted"]
        return bool(seen) and not self.violations and not self.true_not_passed


class _SampleRunner(OperatorRunner):
    """Runs some of the operator's samples. Whether shapes are tried first is found out once for all annotations."""

    def __init__(self, spec: OperatorSpec, rows: Sequence[Sample], options: OpOptions, tried: dict[str, bool]) -> None:
        super().__init__(spec, options)
        self.rows, self.trusted = tuple(rows), False
        self.tried = tried

    def keeps_tensors(self, function: Callable[..., Any], call: Any) -> bool:
        if self.spec.name not in self.tried:
            self.tried[self.spec.name] = super().keeps_tensors(function, call)
        return self.tried[self.spec.name]


def run_soundness(progress: Progress, count: int, seed: int) -> SoundnessTable:
    """Verify `count` random annotations, and judge those that pass."""
    started = time.perf_counter()
    table = SoundnessTable(seed)
    rng = random.Random(seed)
    specs = [spec for spec in SPECS if samples_of(spec.name) and not spec.random]
    operators = min(OPERATORS, len(specs), count)
    for spec in rng.sample(specs, len(specs)):
        if table.operators == operators:
            break
        fuzz = _Fuzz(table, spec, random.Random(f"{seed} {spec.name}"))
        if not fuzz.kinds:
            continue
        fuzz.run(count // operators + (table.operators < count % operators))
        table.operators += 1
        progress(f"{table.asked} of {count} annotations, {len(table.violations)} violations: {spec.name}")
    table.seconds = time.perf_counter() - started
    return table


class _Fuzz:
    """The random annotations of one operator."""

    def __init__(self, table: SoundnessTable, spec: OperatorSpec, rng: random.Random) -> None:
        self.table = table
        self.spec = spec
        self.rng = rng
        self.tried: dict[str, bool] = {}
        self.seen: set[str] = set()
        self.signatures: dict[str, Signature] = {}
        self.kinds = tuple(self.find_kinds())

    def find_kinds(self) -> Iterator[Kind]:
        """Yield the operator's samples by their annotation, those with something to split."""
        by_text: dict[str, list[Sample]] = {}
        rows = samples_of(self.spec.name)
        runner = self.runner(self.spec, rows)
        for index, row in enumerate(rows):
            try:
                signature = runner.prepare(Inputs(index, (), "normal")).signature
            except Exception:  # noqa: BLE001 - samples with values of their own; the others are enough
                continue
            if signature.bound is not None and signature.bound.sizes:
                by_text.setdefault(signature.bound.text, []).append(row)
                self.signatures.setdefault(signature.bound.text, signature)
        yield from (Kind(self.spec, text, tuple(calls)) for text, calls in by_text.items())

    def run(self, count: int) -> None:
        for _ in range(count):
            kind = self.rng.choice(self.kinds)
            true = self.rng.random() < TRUE
            spec = self.spec if true else self.random(kind)
            self.table.asked += 1
            self.table.true += true
            self.one(kind, spec, true)

    def random(self, kind: Kind) -> OperatorSpec:
        """Return the operator under a random annotation that its calls fit; under the true one, where none is found."""
        usual = claims_of(self.signatures[kind.text])
        found: OperatorSpec | None = None
        for _ in range(TRIES):
            spec = self.annotated(kind, text := edited(kind.text, self.rng))
            try:
                bound = bind_call(spec, self.signatures[kind.text].call)
            except Exception:  # noqa: BLE001 - no annotation of this call: refused at once, without a test
                self.table.verdicts["refused at once"] += 1
                continue
            signature = Signature(self.signatures[kind.text].call, spec, bound, ())
            if text in self.seen or not leaders_of(signature):
                continue
            self.seen.add(text)
            found = spec
            if self.rng.random() < SAME or set(claims_of(signature)) - set(usual):
                break
        return found or self.spec

    def annotated(self, kind: Kind, text: str) -> OperatorSpec:
        """Return the operator with `text` for the annotation of these calls; half the time without its hook."""
        original = self.spec.annotation

        def annotation(call: Call) -> Any:
            found = original(call) if callable(original) else original
            return text if isinstance(found, str) else (text, found[1])

        changed = replace(self.spec, annotation=annotation, linear=())
        if text != kind.text and self.spec.localize is not None and self.rng.random() < 0.5:
            changed = replace(changed, localize=None, contiguous=frozenset(), uneven=None)
        return changed

    def runner(self, spec: OperatorSpec, rows: Sequence[Sample], options: OpOptions | None = None) -> _SampleRunner:
        return _SampleRunner(spec, rows, options or OpOptions(prove=False), self.tried)

    def verified(self, spec: OperatorSpec, rows: Sequence[Sample], prove: bool, guards: Safeguards) -> Report:
        options = OpOptions(seed=self.rng.randrange(1000), prove=prove, explain=False, safeguards=guards)
        return verify_spec(spec, options, runner=self.runner(spec, rows, options))

    def one(self, kind: Kind, spec: OperatorSpec, true: bool) -> None:
        """One annotation: verified on a part of its calls, judged on all of them.

        The true ones of all kinds of calls are verified together, as verify-op does: one kind alone need not show every
        form of a split.
        """
        table = self.table
        seen = samples_of(spec.name) if true else _a_part(kind.calls)
        report = self.verified(spec, seen, False, LIGHT)
        word = {"VERIFIED": "passed", "REFUTED": "refuted"}.get(report.verdict.word, "inconclusive")
        table.verdicts[word] += 1
        if true and word != "passed":
            table.true_not_passed.append(f"{kind.spec.name} `{kind.text}`: {report.verdict.word}")
        if word == "refuted" and table.verdicts["refuted"] % FALSE_EVERY == 0:
            self.prover(kind, spec, report)
        if word != "passed":
            return
        if table.verdicts["passed"] % PROVED_EVERY == 0:
            table.proved[self.verified(spec, seen, True, LIGHT).verdict.value] += 1
        before = table.splits
        for choice, parts, prepared in self.questions(kind, spec):
            answer = holds(prepared.whole, prepared.signature, choice, parts, self.rng.randrange(1000))
            table.splits += answer is not None
            if answer is False:
                if self.verified(spec, seen, True, Safeguards()).verdict.passes:
                    table.violations.append(_violation(kind, prepared, f"{choice} in {parts}", "passes"))
                break
        table.judged += table.splits > before

    def prover(self, kind: Kind, spec: OperatorSpec, report: Report) -> None:
        """Give the splits that values refuted to the prover of dimension types, as if no test had been made."""
        wrong = {f.counter_example.get("identifier", "") for f in report.findings if f.code == "annotation_wrong"}
        runner = self.runner(spec, kind.calls)
        for index in range(len(kind.calls)):
            try:
                prepared = runner.prepare(Inputs(index, (), "normal"))
            except Exception:  # noqa: BLE001 - nothing to prove on a call that does not run
                continue
            names = tuple(name for name in leaders_of(prepared.signature) if name in wrong)
            if not names or prepared.signature.bound is None:
                continue
            for proof in prove(spec, prepared.signature, prepared.whole.concrete).proofs:
                if not isinstance(proof.target, Split) or proof.target.identifier not in names:
                    continue
                self.table.false_asked += 1
                if proof.proved and self.false_here(prepared, proof.target.identifier):
                    how = f"{proof.target.identifier} is refuted by values"
                    self.table.violations.append(_violation(kind, prepared, how, "is PROVED"))
            return

    def false_here(self, prepared: Prepared, name: str) -> bool:
        """Return whether the second opinion, too, finds a split false on this call: a split refuted on one call may
        hold on another."""
        splits = _splits(prepared.signature, name, self.rng)
        return any(holds(prepared.whole, prepared.signature, c, parts, 0) is False for c, parts in splits)

    def questions(self, kind: Kind, spec: OperatorSpec) -> Iterator[tuple[Choice, int, Prepared]]:
        """Yield every claim in a few ways, on calls with other sizes, and on those with their own sizes."""
        runner = self.runner(spec, kind.calls)
        signature = runner.prepare(Inputs(0, (), "normal")).signature
        assert signature.bound is not None
        for slots in signature.linear:
            for prepared in self.others(runner, kind, (), 1):
                if slots in prepared.signature.linear:
                    yield from ((RunPartial(slots), parts, prepared) for parts in SHARDS[:3])
        for name in leaders_of(signature, ones=True):
            together = signature.bound.tied.get(name, (name,))
            first: Prepared | None = None
            for prepared in self.others(runner, kind, together, 2):
                first = first or prepared
                bound = prepared.signature.bound
                if bound is not None and bound.sizes.get(name, 1) > 1 and bound.marks.get(name) != "^":
                    splits = list(_splits(prepared.signature, name, self.rng))
                    most = FEW if prepared is not first else len(splits)
                    yield from ((c, p, prepared) for c, p in self.rng.sample(splits, min(most, len(splits))))

    def others(self, runner: OperatorRunner, kind: Kind, names: Sequence[str], count: int) -> Iterator[Prepared]:
        """Return whether a split is right on other sizes, and on calls that were not verified, with other values."""
        last = len(kind.calls) - 1
        tries: list[Inputs] = []
        for size in SIZES if names else ():
            sizes = tuple((name, size * (1 + i)) for i, name in enumerate(names))
            tries.append(Inputs(self.rng.randint(0, last), sizes, "normal", 1000 + self.rng.randrange(1000)))
        own = [Inputs(i, (), "normal", 1000 + self.rng.randrange(1000)) for i in (last, self.rng.randint(0, last), 0)]
        found = 0
        for inputs in (*tries, *own):
            try:
                prepared = runner.prepare(inputs)
            except Exception:  # noqa: BLE001 - sizes are our choice: a call that does not run on them is left out
                continue
            if prepared.whole.finite or not prepared.whole.concrete.compare:
                found += 1
                yield prepared
            if found == count:
                return


def _a_part(calls: Sequence[Sample]) -> tuple[Sample, ...]:
    """Return the first half of the calls, and the first one with each choice of optional arguments: what an argument
    does that no sample gives, no verifier knows."""
    half = max(1, len(calls) // 2)
    first: dict[tuple[int, frozenset[str]], Sample] = {}
    for call in calls:
        first.setdefault((len(call.args), frozenset(call.kwargs)), call)
    return tuple(call for number, call in enumerate(calls) if number < half or call in first.values())


def _splits(signature: Signature, name: str, rng: random.Random) -> Iterator[tuple[Choice, int]]:
    """Yield splits of an identifier of this call: contiguous in three numbers of shards, strided,
    unequal, by sections."""
    assert signature.bound is not None
    size = signature.bound.sizes[name]
    usual = [p for p in SHARDS if size % p == 0][:3]
    wanted: list[tuple[Choice, int]] = [(Split(name), p) for p in usual]
    wanted += [(Split(name, outer), p) for outer, p in ((2, 3), (3, 2), (5, 2), (2, 2)) if size % (outer * p) == 0][:2]
    for parts in (2, 3):
        if size > parts:
            wanted.append((Split(name, sizes=_pieces(size, parts, rng)), parts))
        if size % parts == 0 and size > 2 * parts:
            first = parts * rng.randint(1, size // parts - 1)
            wanted.append((Split(name, sections=(first, size - first)), parts))
        if size % 2 == 0 and size // 2 > parts:
            wanted.append((Split(name, 2, sizes=_pieces(size // 2, parts, rng)), parts))
    yield from ((choice, p) for choice, p in wanted if explain_illegal_choice(signature, choice, p) is None)


def _pieces(size: int, parts: int, rng: random.Random) -> tuple[int, ...]:
    ends = sorted(rng.sample(range(1, size), parts - 1))
    return tuple(b - a for a, b in zip((0, *ends), (*ends, size), strict=True))


def _violation(kind: Kind, prepared: Prepared, how: str, verdict: str) -> Violation:
    shapes = ", ".join(str(tuple(t.shape)) for t in prepared.whole.concrete.tensors)
    assert prepared.signature.bound is not None
    return Violation(kind.spec.name, kind.text, prepared.signature.bound.text, how, shapes, verdict)


def soundness_lines(table: SoundnessTable) -> list[StyledLine]:
    """Return the counts, the violations, and the result as the last line."""
    words = ("passed", "refuted", "inconclusive")
    counts = ", ".join(f"{table.verdicts[word]:,} {word}" for word in words)
    strong = sum(n for verdict, n in table.proved.items() if verdict.startswith("PROVED"))
    lines = [
        plain(f"{table.asked:,} annotations of {table.operators} operators, seed {table.seed}: {counts}"),
        plain(f"  {table.true:,} of them the true ones; {table.verdicts['refused at once']:,} more fitted no call"),
        plain(f"  {table.judged:,} of those that passed were judged by the second opinion, on {table.splits:,} splits"),
        plain(f"  {strong:,} of {table.proved.total():,} that passed and were put to the prover are PROVED"),
        plain(f"  {table.false_asked:,} splits that values refute were put to the prover"),
    ]
    for v in table.violations:
        said = f"`{v.text}` {v.verdict} and is false: {v.how} on {v.shapes}"
        lines.append(plain(f"  VIOLATION: {v.operator} (true: `{v.true}`): {said}", "bad"))
    lines += [plain(f"  not passed although true: {text}", "bad") for text in table.true_not_passed]
    return [*lines, closing_line(table.good, f"{len(table.violations)} violations", table.seconds)]
