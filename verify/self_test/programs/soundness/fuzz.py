"""Random edits of small programs: whenever the text is proved, the run must agree with the model.

Half of the edits are blind: one to four at once. The other half is a search against the prover. It starts from an edit
that the reader refutes, and looks, where the reader found something, for another one after which it finds less while
the run is still wrong; up to six edits that fit each other. One kind of edit converts a tensor to what the reader asks
for, so that a wrong start is carried as far as the reader lets it. A wrong proof mostly takes several such edits (what
is declared, what is summed, what is converted), and single blind ones hardly ever meet.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from random import Random

from verify.programs.proof import prove_program
from verify.programs.typing import check_program
from verify.results.finding_codes import UNMATCHED
from verify.self_test.programs.judge_mutant import Answer, Execution
from verify.self_test.programs.mutants.catalogue import TEXT_OPERATORS
from verify.self_test.programs.mutants.editable_program_and_edits import MutationOperator
from verify.self_test.programs.mutants.mutant import Edits
from verify.self_test.programs.soundness.declaration_edits import DECLARED
from verify.self_test.programs.soundness.line_edits import LINES, SAME
from verify.self_test.programs.soundness.program_under_random_edits import Draft, Propose

KINDS: Mapping[str, Propose] = {**DECLARED, **LINES}
PLANTED = "planted"  # the kinds of the mutation operators, together
ASKED = "conversion asked for"  # by the reader, of which a blind edit knows nothing
BLIND = (*(k for k in KINDS if k != ASKED), PLANTED, PLANTED)
_FITTING = tuple(k for k in KINDS if k not in SAME and k not in ("instructions turned", "lines turned"))
FIRST = (*(k for k in _FITTING if k != ASKED), *(k for k in DECLARED if k.startswith("state")), PLANTED)  # of a search
NEXT = (*_FITTING, *["reduce", "conversion put in"] * 2, *[ASKED] * 8)
AT_ONCE = 4  # blind edits of one program
DEEP = 6  # edits of a search
TRIES = 40  # edits that are tried for the next step of a search
EACH = 200  # edited programs of one task
# what became of an edited program: the reader says that it is wrong, or only that lines are not the model's; it is
# proved, and the run agrees; its lemmas do not hold; the run came to no end; it is proved, and the run does not agree
REFUTED, INCONCLUSIVE, PROVED, LEMMAS = "refuted", "inconclusive", "PROVED", "lemmas"
UNDECIDED, VIOLATION = "undecided", "VIOLATION"
ENDS = (REFUTED, INCONCLUSIVE, PROVED, LEMMAS, UNDECIDED, VIOLATION)


@dataclass(frozen=True, slots=True)
class Read:
    """The reader's view of a text: how many mistakes it finds, in how many lines that it can type, and where."""

    proved: bool
    found: int
    typed: int
    codes: frozenset[str]
    lines: frozenset[tuple[str, int]] = frozenset()
    said: str = ""

    @property
    def measure(self) -> tuple[int, int]:
        """Less is nearer to a proof: a mistake hides all that depends on it, so lines that are typed count too."""
        return self.found, -self.typed


@dataclass(frozen=True)
class Violation:
    """A text that is proved, and whose run does not agree. `steps`: the kinds of its edits, in order."""

    base: str
    steps: tuple[str, ...]
    sources: Mapping[str, str]
    said: str


@dataclass
class EditTally:
    """Counts of edited programs. `ends`: (kind of edit, what became of the program); `runs`: how many programs ran."""

    tried: int = 0
    guided: int = 0
    runs: int = 0
    deepest: int = 0
    total: Counter[str] = field(default_factory=Counter)
    ends: Counter[tuple[str, str]] = field(default_factory=Counter)
    violations: list[Violation] = field(default_factory=list)

    def add(self, other: EditTally) -> None:
        self.tried, self.guided = self.tried + other.tried, self.guided + other.guided
        self.runs, self.deepest = self.runs + other.runs, max(self.deepest, other.deepest)
        self.total.update(other.total)
        self.ends.update(other.ends)
        self.violations += other.violations


class Spent(Exception):
    """The task has tried as many programs as it is for."""


@dataclass
class Fuzz:
    """A fuzz of one program by edits.

    fatal    numbers of the programs of this task whose run ended the process
    running  is told the number of each program before it runs
    """

    name: str
    execution: Execution
    chance: Random
    count: int
    guided: bool
    fatal: frozenset[int] = frozenset()
    running: Callable[[str], None] = lambda text: None
    tally: EditTally = field(default_factory=EditTally)
    _runs: dict[str, Answer] = field(default_factory=dict)
    _reads: dict[str, Read] = field(default_factory=dict)

    @cached_property
    def right(self) -> Draft:
        subject = self.execution.base.subject
        return Draft(subject, dict(subject.program.sources))

    @cached_property
    def planted(self) -> tuple[MutationOperator, ...]:
        """The mutation operators that have places in the program: those of streams have none in most."""
        return tuple(operator for operator in TEXT_OPERATORS if operator.places(self.right.subject))

    def work(self) -> EditTally:
        """Try `count` edited programs."""
        try:
            while True:
                if self.guided:
                    self._search()
                else:
                    self._blind()
        except Spent:
            return self.tally

    # -- where programs come from -------------------------------------------------------------------------------------

    def _blind(self) -> None:
        """Make one to four edits at once, none of which sees what the others do."""
        steps: list[str] = []
        edits: Edits = ()
        for _ in range(self.chance.randint(1, AT_ONCE)):
            kind, more = self._propose(self.right, BLIND)
            if more and all(one.places.isdisjoint(other.places) for one in edits for other in more):
                steps, edits = [*steps, kind], (*edits, *more)
        if edits:
            self._judge(self.right, edits, tuple(steps))

    def _search(self) -> None:
        """Edits that fit each other, each found by what the reader says of those before it."""
        draft = self.right
        steps: tuple[str, ...] = ()
        read = Read(False, 1 << 30, 0, frozenset())
        for depth in range(DEEP):
            found = self._step(draft, steps, read, TRIES if depth else 1)
            if found is None:
                return
            draft, steps, read = found
            self.tally.deepest = max(self.tally.deepest, len(steps))

    def _step(
        self, draft: Draft, steps: tuple[str, ...], before: Read, tries: int
    ) -> tuple[Draft, tuple[str, ...], Read] | None:
        """Find the next edit: one after which less is found, and the run is still wrong."""
        for _ in range(tries):
            kind, edits = self._propose(draft, NEXT if steps else FIRST)
            if not edits:
                continue
            after = (*steps, kind)
            judged = self._judge(draft, edits, after)
            if judged is None:
                continue
            sources, read = judged
            if read.proved:
                return None  # it is right again, or the search has found what it is for
            readable = read.codes and read.codes != {"program_unreadable"}
            if not readable or not read.measure < before.measure or not self._wrong(sources):
                continue
            try:
                return draft.next(sources, read.lines, read.said), after, read
            except (SyntaxError, ValueError, StopIteration):
                continue
        return None

    def _propose(self, draft: Draft, kinds: Sequence[str]) -> tuple[str, Edits]:
        kind = self.chance.choice(kinds)
        if kind != PLANTED:
            return kind, KINDS[kind](draft, self.chance) or ()
        operator = self.chance.choice(self.planted)
        places = operator.places(draft.subject)
        return PLANTED, self.chance.choice(places) if places else ()

    # -- what becomes of them -----------------------------------------------------------------------------------------

    def _judge(self, draft: Draft, edits: Edits, steps: tuple[str, ...]) -> tuple[dict[str, str], Read] | None:
        """Read the edited program, and run it where it is proved; None where the edits change nothing."""
        sources = draft.changed(edits)
        if sources == self.right.sources:
            return None
        if self.tally.tried == self.count:
            raise Spent
        self.tally.tried += 1
        self.tally.guided += self.guided
        read = self._read(sources)
        end = INCONCLUSIVE if read.codes <= UNMATCHED else REFUTED
        if read.proved:
            end, said = self._agrees(sources)
            if end == VIOLATION:
                self.tally.violations.append(Violation(self.name, steps, sources, said))
        self.tally.total[end] += 1
        for kind in dict.fromkeys(steps):
            self.tally.ends[kind, end] += 1
        return sources, read

    def _read(self, sources: Mapping[str, str]) -> Read:
        key = _digest(sources)
        if key not in self._reads:
            result = check_program(sources, self.execution.base.traced.graph)
            findings = [f for o in result.outcomes for f in o.findings]
            places = [place for f in findings for _, place in f.related]
            self._reads[key] = Read(
                result.proved,
                sum(o.check.refuted for o in result.outcomes),
                result.statements,
                frozenset(f.code for f in findings),
                frozenset((place.file.rpartition("/")[2], place.line) for place in places),
                " ".join(f.message for f in findings),
            )
        return self._reads[key]

    def _agrees(self, sources: Mapping[str, str]) -> tuple[str, str]:
        """Classify a proved text by running it.

        Where the run disagrees, the lemmas are checked too: they can take a proof back.
        """
        answer = self._run(sources)
        if not answer.refuted and not answer.undecided:
            return PROVED, ""
        proof = prove_program(sources, self.execution.base.traced.graph)
        if not proof.holds:
            return LEMMAS, ""
        if answer.codes == ("timed_out",):
            return UNDECIDED, ""
        return VIOLATION, f"{', '.join(answer.codes)}: {answer.said}"

    def _wrong(self, sources: Mapping[str, str]) -> bool:
        answer = self._run(sources)
        return answer.refuted or answer.undecided

    def _run(self, sources: Mapping[str, str]) -> Answer:
        key = _digest(sources)
        if key not in self._runs:
            number = self.tally.tried
            if number in self.fatal:
                return Answer(True, ("rank_died",), "it ends the process that runs it")
            self.running(str(number))
            self.tally.runs += 1
            self._runs[key] = self.execution.judge(sources).answer
        return self._runs[key]


def _digest(sources: Mapping[str, str]) -> str:
    return hashlib.sha256("\0".join(sources.values()).encode()).hexdigest()
