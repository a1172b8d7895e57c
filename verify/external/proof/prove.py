"""Prove an external program: one rank's traced graph against the plain model's.

`docs` of the package (`__init__`) has the idea and a worked example. Here is the order of things: trace, align, follow,
compare the ends, and say what was found.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from op_registry.call import instances_in
from op_registry.source_location import SourceLocation

from nnscaler.layout import Axis
from nnscaler.runtime.nested_values import tensors_in
from nnscaler.without_garbage_collection import without_garbage_collection
from verify.external.program import ExternalProgram
from verify.external.proof.facts import Fact, NoFact
from verify.external.proof.follow_layouts_in_rank_graph import Followed, Follower, Lost
from verify.external.proof.premises_and_goals import (
    EndClaim,
    EndDifference,
    beginning,
    compare,
    layout_of,
    loss_of_parts,
)
from verify.external.proof.rank_graph import Aligned, CallOutput, HeldInGraph, RankGraph, align
from verify.external.proof.reference_as_terms import ProofReference, read_reference
from verify.external.proof.result_states_of_rank_call import Lifting
from verify.external.proof.terms import WholeTerm
from verify.external.proof.trace import NotTraced, trace_rank, trace_whole
from verify.results.finding import Finding
from verify.results.verdict import Verdict, merge

ASSUMED = (
    "all ranks make the calls of those that were traced, with numbers that follow their coordinates",
    "parameters and buffers begin with the model's values, laid out as their placements say",
    "torch's operators, their derivatives and the collectives do what they are documented to do",
)


@dataclass(frozen=True)
class ExternalProof:
    """
    verdict     PROVED (bounded): at the traced sizes, for every value; INCONCLUSIVE; or REFUTED
    findings    what is wrong, or could not be decided, with the line
    reason      why it is not proved, in one sentence; None where it is
    calls       of the rank's graph that the loss and the gradients depend on, and of which something is known
    collectives those among them that communicate
    classes     different calls that the rules were asked about
    compared    losses, gradients and buffers that are the model's
    ranks       that were traced
    conditions  on the data
    assumed     what else it rests on
    seconds     by phase
    """

    verdict: Verdict
    findings: tuple[Finding, ...] = ()
    reason: str | None = None
    calls: int = 0
    collectives: int = 0
    classes: int = 0
    compared: int = 0
    ranks: tuple[int, ...] = ()
    conditions: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ASSUMED
    seconds: Mapping[str, float] = field(default_factory=dict)


def probes(program: ExternalProgram) -> tuple[int, ...]:
    """Return the ranks to trace: the first, and for each axis the one that is last along it alone."""
    strides = [prod(size for _, size in program.mesh[i + 1 :]) for i in range(len(program.mesh))]
    return 0, *((size - 1) * stride for (_, size), stride in zip(program.mesh, strides, strict=True) if size > 1)


def few_probes(program: ExternalProgram) -> tuple[int, ...]:
    """Return the first rank and the last: enough, where every number that differs can only follow one axis.

    It may not be enough on several axes: `align` then finds numbers that could follow two of them.
    """
    return (0, program.ranks - 1) if program.ranks > 1 else (0,)


def _aligned(program: ExternalProgram) -> Aligned:
    """Return the graphs side by side, of as few ranks as will do."""
    few = {rank: trace_rank(program, rank) for rank in few_probes(program)}
    found = align(list(few.values()))
    if found.differs is not None or all(f is not None for own in found.varies.values() for f in own.values()):
        return found
    first, *rest = probes(program)
    return align([few[first], *(few.get(rank) or trace_rank(program, rank) for rank in rest)])


def prove_external(program: ExternalProgram) -> ExternalProof:
    """Trace as few ranks of the program as will do, and its model, and prove that they agree."""
    with without_garbage_collection():
        return _proved(program)


def _proved(program: ExternalProgram) -> ExternalProof:
    seconds: dict[str, float] = {}
    started = time.perf_counter()

    def lap(phase: str) -> None:
        nonlocal started
        now = time.perf_counter()
        seconds[phase], started = now - started, now

    if program.reference == "parts" and any(size > 1 for axis, size in program.mesh if axis in program.data_axes):
        return _undecided(
            "the mean over the data parts is the reference, and the proof has the whole batch", (), seconds
        )
    try:
        whole = trace_whole(program)
        lap("trace of the model")
        aligned = _aligned(program)
        lap("trace of ranks")
    except NotTraced as no:
        return _undecided(str(no), (), seconds)
    if aligned.differs is not None:
        return _undecided(aligned.differs, aligned.ranks, seconds)
    axes = tuple(Axis(name, size) for name, size in program.mesh if size > 1)
    reference = read_reference(whole)
    lap("terms of the model")
    lifting = Lifting(axes)
    follower = Follower(aligned, reference, axes, lifting)
    found = follower.run(beginning(aligned.graph, reference, axes, program.data_axes, program.names))
    lap("rank")
    ends = _Ends(program, whole, reference, aligned, axes, found)
    ends.compare_all()
    conditions = [_condition(program, axes, label) for label in sorted(ends.ignored)]
    findings = (*ends.findings(), *(c for c in conditions if isinstance(c, Finding)))
    verdicts = [*ends.verdicts(), *(Verdict.INCONCLUSIVE for c in conditions if isinstance(c, Finding))]
    lap("ends")
    return ExternalProof(
        merge(verdicts),
        findings,
        findings[0].message if findings else None,
        found.typed,
        found.collectives,
        lifting.asked,
        ends.compared,
        aligned.ranks,
        tuple(c for c in conditions if isinstance(c, str)),
        seconds=seconds,
    )


def _undecided(reason: str, ranks: tuple[int, ...], seconds: Mapping[str, float]) -> ExternalProof:
    finding = Finding("program_unreadable", reason)
    return ExternalProof(Verdict.INCONCLUSIVE, (finding,), reason, ranks=ranks, seconds=seconds)


def _condition(program: ExternalProgram, axes: Sequence[Axis], label: int) -> str | Finding:
    """Return what the proof says of labels that do not count; a finding where the batch is not so."""
    text = f"every data part has as many labels that are not {label} as every other"
    parts = prod(axis.size for axis in axes if axis.name in program.data_axes)
    for tensor in tensors_in(program.batch()):
        if tensor.ndim and not tensor.is_floating_point():
            ignored = [piece == label for piece in torch.tensor_split(tensor, parts)]
            if any(not torch.equal(ignored[0], other) for other in ignored[1:]):
                return Finding("loss_differs", f"it holds only if {text}, which is not seen of this batch")
    return text


@dataclass
class _Ends:
    """Compares what is there when the step is over; `compared` counts what is the model's."""

    program: ExternalProgram
    whole: RankGraph
    reference: ProofReference
    aligned: Aligned
    axes: tuple[Axis, ...]
    found: Followed
    compared: int = 0
    ignored: set[int] = field(default_factory=set)
    refuted: list[Finding] = field(default_factory=list)
    undecided: list[Finding] = field(default_factory=list)
    roots: dict[Lost, list[str]] = field(default_factory=dict)
    renamed: list[str] = field(default_factory=list)

    def compare_all(self) -> None:
        """Compare the loss, every gradient, and what the step wrote to."""
        graph, names = self.aligned.graph, self.program.names
        self._compare("the loss", graph.loss, self.reference.loss, self.whole.loss is not None, is_loss=True)
        for what, ours, theirs in (
            ("the gradient of", graph.gradients, self.reference.gradients),
            ("after the step,", graph.changed, self.reference.changed),
        ):
            ours = {names.get(name, name): held for name, held in ours.items()}
            for name in sorted({*ours, *theirs}):
                if (name in ours) != (name in theirs) and self._may_be_renamed(name, name in ours):
                    self.renamed.append(f"{what} `{name}`")
                    continue
                self._compare(f"{what} `{name}`", ours.get(name), theirs.get(name), name in theirs)

    def _may_be_renamed(self, name: str, here: bool) -> bool:
        """Return whether what one side alone has may be a tensor that the other has by another name."""
        strange = self._strange_names()
        return name in strange if here else bool(strange) and name not in self._held_names()

    def _held_names(self) -> set[str]:
        return {self.program.names.get(own, own) for own in self.aligned.graph.stored}

    def _strange_names(self) -> list[str]:
        """Return the names of the program that the model lacks."""
        return sorted(own for own in self._held_names() if f"stored {own}" not in self.reference.values)

    def _compare(
        self, what: str, held: HeldInGraph | None, whole: WholeTerm | None, there: bool, is_loss: bool = False
    ) -> None:
        if held is None or not there:
            if held is None and not there:
                self.undecided.append(Finding("loss_missing", f"neither the program nor the model has {what}"))
                return
            code = "loss_missing" if is_loss else "gradient_missing" if held is None else "gradient_extra"
            has = "the program has none" if held is None else "the model has none"
            self.refuted.append(Finding(code, f"{what}: {has}"))
            return
        if whole is None:
            reason = f"nothing is known of the model's own: no rule for `{self.reference.lost}`"
            self.undecided.append(Finding("program_unreadable", f"{what}: {reason}"))
            return
        lost = self.found.lost.get(held.ref)
        facts: Sequence[Fact] = self.found.facts.get(held.ref, ())
        if lost is not None and not facts:
            self.roots.setdefault(lost, []).append(what)
            return
        try:
            wanted = layout_of(held, self.axes)
        except NoFact as no:
            self.undecided.append(Finding("program_unreadable", f"{what}: {no.reason}"))
            return
        self._judge(what, held, facts, whole, wanted, is_loss)

    def _judge(
        self, what: str, held: HeldInGraph, facts: Sequence[Fact], whole: WholeTerm, wanted: EndClaim, is_loss: bool
    ) -> None:
        if is_loss:
            facts = loss_of_parts(facts, self.program.data_axes, self.axes)
        found = compare(facts, whole, wanted, self.axes)
        where = self._where(held)
        if isinstance(found, Fact):
            self.compared += 1
            self.ignored |= found.ignored
        elif isinstance(found, EndDifference):
            code = "loss_differs" if is_loss else "gradient_reduced_wrongly"
            self.refuted.append(Finding(code, f"{what}: a rank {found.text}", where))
        else:
            terms = self.reference.terms
            is_ = terms.describe(facts[0].term) if facts else "nothing known"
            text = f"{what}: a rank has {is_}, and it should be {terms.describe(whole.term)}"
            self.undecided.append(Finding("operation_differs", text, where))

    def _where(self, held: HeldInGraph) -> SourceLocation | None:
        """Return the line that made a tensor, or else what it was made of."""
        calls, number = self.aligned.graph.calls, held.ref.call
        while calls[number].where is None:
            read = next(instances_in(calls[number].arguments, CallOutput), None)
            if read is None:
                return None
            number = read.call
        return calls[number].where

    def findings(self) -> tuple[Finding, ...]:
        """Return what is wrong, then what is open: one finding for all that come of one call."""
        certain = [self._of_root(root, what) for root, what in self.roots.items() if root.certain]
        open_ = [self._of_root(root, what) for root, what in self.roots.items() if not root.certain]
        return (*certain, *self.refuted, *open_, *self.undecided, *self._of_renamed())

    def _of_renamed(self) -> tuple[Finding, ...]:
        if not self.renamed:
            return ()
        more = f" and {len(self.renamed) - 1} more" if len(self.renamed) > 1 else ""
        text = f"the model has no `{self._strange_names()[0]}`, which may be a tensor of its by another name"
        help = "`names` of a check file says which tensor of the program is which of the model"
        return (Finding("program_unreadable", f"{self.renamed[0]}{more}: {text}", help=help),)

    def verdicts(self) -> list[Verdict]:
        """Return one verdict for each thing compared, the worst for those that are open or wrong."""
        found = [Verdict.PROVED_BOUNDED] * self.compared
        if self.refuted or any(root.certain for root in self.roots):
            found.append(Verdict.REFUTED)
        if self.undecided or self.renamed or any(not root.certain for root in self.roots):
            found.append(Verdict.INCONCLUSIVE)
        return found

    def _of_root(self, root: Lost, what: Sequence[str]) -> Finding:
        call = self.aligned.graph.calls[root.call]
        more = f" and {len(what) - 1} more" if len(what) > 1 else ""
        if not root.certain:
            over = f" (over {root.axis})" if root.axis else ""
            backward = " in the backward pass" if call.backward else ""
            return Finding("operation_differs", f"{what[0]}{more}: {root.reason}{over}{backward}", call.where)
        name = call.name.removeprefix("aten.").partition(".")[0]
        text = f"`{name}` reads a tensor whole of which each rank of {root.axis} has only its own term of a sum"
        related = () if root.made is None else (("the terms are made here", root.made),)
        return Finding(
            "layouts_disagree",
            f"{text} ({what[0]}{more})",
            call.where,
            cause=f"an all_reduce (or reduce_scatter) over {root.axis} is missing before it",
            related=related,
        )
