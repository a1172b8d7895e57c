"""Everything that is tested of one operator: each identifier split in 2 and 3 parts, each declared linear set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from op_registry.bind_call import bind_call, linear_sets
from op_registry.spec import OperatorSpec, Refusal

from nnscaler.errors import NnscalerError
from nnscaler.ir.placement import Choice, RunPartial, Split
from nnscaler.transform.rules import explain_illegal_choice
from nnscaler.transform.signature import Signature
from verify.op_checks.builtin_samples import SAMPLES
from verify.op_checks.concrete import ConcreteCall, function_of, make_call, with_outputs
from verify.op_checks.draw import SPLIT_SIZE, Kind, Style, from_annotation, refill, resize, sample_calls
from verify.op_checks.partition import Mismatch, ShardRaised, compare_partition
from verify.op_checks.whole import Whole, run_whole

PARTS = (2, 3)
OUTERS = (1, 2)
KINDS: tuple[Kind, ...] = ("integers", "normal")


@dataclass(frozen=True, slots=True)
class Failure:
    """A counter-example: what was split how, on which shapes, and what went wrong."""

    choice: Choice
    parts: int
    signature: Signature
    mismatch: Mismatch | None = None
    raised: ShardRaised | None = None


@dataclass(slots=True)
class Outcome:
    """What testing one identifier (or linear set) gave. `skipped` has the reasons of partitions that could not run."""

    count: int = 0
    failures: list[Failure] = field(default_factory=list)
    skipped: dict[str, None] = field(default_factory=dict)
    kinds: dict[str, None] = field(default_factory=dict)


class Unusable(Exception):
    """The whole operator cannot be tested on these inputs; `code` is a finding code of the catalogue.

    `refuted`: it runs on other shapes, so that what it raises on the annotation's shapes is a counter-example.
    """

    def __init__(self, code: str, message: str, refuted: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.refuted = refuted


@dataclass(frozen=True)
class Source:
    """Where inputs come from: sample calls if there are any, otherwise drawn from the annotation."""

    spec: OperatorSpec
    samples: tuple[ConcreteCall, ...]
    seed: int

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)

    def wholes(self, identifier: str | None) -> Iterator[tuple[Whole, Signature]]:
        """Runs of the whole operator fit for splitting `identifier`. Raises Unusable when there is none."""
        if self.samples:
            for sample in self.samples:
                yield from self._from_sample(sample, identifier)
        else:
            yield from self._from_annotation(identifier)

    def _from_annotation(self, identifier: str | None) -> Iterator[tuple[Whole, Signature]]:
        style, first_error = self._style(identifier)
        if style is None:
            raise Unusable("annotation_does_not_fit", first_error, self._runs_on(identifier, "equal"))
        kinds: list[Kind] = [*KINDS]
        found = 0
        while kinds:
            kind = kinds.pop(0)
            whole = self._run(from_annotation(self.spec, identifier, style, kind, self.generator()))
            if whole.informative:
                found += 1
                yield whole, self.signature(whole)
            elif kind != "positive" and "positive" not in kinds:
                kinds.append("positive")
        if not found:
            raise Unusable("uninformative", f"`{self.spec.name}` gives NaN, infinity or only zeros on all inputs tried")

    def _style(self, identifier: str | None) -> tuple[Style | None, str]:
        """The first style of sizes on which the operator runs, or why it runs on none."""
        error = ""
        styles: tuple[Style, ...] = ("distinct", "smooth")
        for style in styles:
            concrete = from_annotation(self.spec, identifier, style, "integers", self.generator())
            try:
                self._run(concrete)
                return style, ""
            except Exception as raised:  # noqa: BLE001 - whatever the user's operator raises is the answer
                shapes = ", ".join(str(tuple(t.shape)) for t in concrete.tensors)
                error = error or f"on inputs of shapes {shapes} `{self.spec.name}` raises {_first_line(raised)}"
        return None, error

    def _runs_on(self, identifier: str | None, style: Style) -> bool:
        try:
            self._run(from_annotation(self.spec, identifier, style, "integers", self.generator()))
        except Exception:  # noqa: BLE001 - as above
            return False
        return True

    def _from_sample(self, sample: ConcreteCall, identifier: str | None) -> Iterator[tuple[Whole, Signature]]:
        given = self._run(refill(sample, "given", self.generator()))
        signature = self.signature(given)
        if identifier is not None and signature.bound is not None:
            size = signature.bound.sizes.get(identifier, 0)
            other = resize(sample, signature.bound, identifier, SPLIT_SIZE) if size % SPLIT_SIZE else None
            try:
                if other is not None:
                    given = self._run(refill(other, "given", self.generator()))
                    signature = self.signature(given)
                    sample = other
            except Exception:  # noqa: BLE001 - the size was our choice: the sample's own will do
                pass
        if given.informative:
            yield given, signature
        try:
            drawn = self._run(refill(sample, "normal", self.generator()))
        except Exception:  # noqa: BLE001 - values were our choice: the sample's own will do
            return
        if drawn.informative:
            yield drawn, self.signature(drawn)
        elif not given.informative:
            raise Unusable(
                "uninformative", f"`{self.spec.name}` gives NaN, infinity or only zeros on its sample inputs"
            )

    def _run(self, concrete: ConcreteCall) -> Whole:
        function: Any = function_of(concrete.call.operator, self.spec)
        return run_whole(function, concrete, self.generator())

    def signature(self, whole: Whole) -> Signature:
        """The annotation bound to this run, outputs included. Raises AnnotationError if it does not fit."""
        call = with_outputs(whole.concrete.call, whole.outputs)
        bound = bind_call(self.spec, call)
        return Signature(call, self.spec, bound, tuple(frozenset(s) for s in linear_sets(self.spec, call)))


def run_choices(source: Source, identifier: str | None, choices: Sequence[Choice]) -> Outcome:
    """Runs every choice in 2 and 3 parts on every input; stops at the first failure of the kind."""
    outcome = Outcome()
    for whole, signature in source.wholes(identifier):
        if not whole.repeatable:
            raise Unusable("random_operator", f"two runs of `{source.spec.name}` on the same inputs differ")
        outcome.kinds[whole.concrete.kind] = None
        for choice in choices:
            for parts in PARTS:
                _run_one(outcome, source, whole, signature, choice, parts)
                if outcome.failures:
                    return outcome
    return outcome


def _run_one(outcome: Outcome, source: Source, whole: Whole, signature: Signature, choice: Choice, parts: int) -> None:
    reason = explain_illegal_choice(signature, choice, parts)
    if reason is not None:
        outcome.skipped[reason] = None
        return
    try:
        whole = _without_maxima(whole, signature, choice)
        count, mismatches = compare_partition(whole, source.spec, signature, choice, parts, source.generator())
    except Refusal as refusal:
        outcome.skipped[str(refusal)] = None
        return
    except ShardRaised as raised:
        outcome.count += 1
        outcome.failures.append(Failure(choice, parts, signature, raised=raised))
        return
    outcome.count += count
    if mismatches:
        outcome.failures.append(Failure(choice, parts, signature, mismatch=mismatches[0]))


def _without_maxima(whole: Whole, signature: Signature, choice: Choice) -> Whole:
    """Partial maxima have no gradient: neither side gets one."""
    bound = signature.bound
    if isinstance(choice, Split) and bound is not None and bound.reductions.get(choice.identifier, "sum") != "sum":
        nothing = tuple(None for _ in whole.outputs)
        return Whole(whole.concrete, whole.outputs, nothing, (None,) * len(whole.gradients), whole.repeatable)
    return whole


def splits_of(identifier: str) -> tuple[Choice, ...]:
    """The ways in which one identifier is split."""
    return tuple(Split(identifier, outer) for outer in OUTERS)


def linear_choices(sets: Sequence[frozenset[int]]) -> tuple[Choice, ...]:
    """Partial sums in all tensors of each set."""
    return tuple(RunPartial(s) for s in sets)


def make_source(spec: OperatorSpec, seed: int) -> Source:
    """Raises NnscalerError `sample_inputs_needed` where nothing says what to call the operator with."""
    if spec.sample_inputs is not None:
        return Source(spec, tuple(sample_calls(spec)), seed)
    if spec.name in SAMPLES and spec.target is None:
        return Source(spec, tuple(make_call(spec.name, arguments, {}) for arguments in SAMPLES[spec.name]()), seed)
    if not isinstance(spec.annotation, str):
        raise NnscalerError(
            "sample_inputs_needed",
            f"the annotation of `{spec.name}` is a function of the call, so a call is needed to test it with",
            spec.where,
            help="register_op(..., sample_inputs=lambda: dict(...)) gives one",
        )
    return Source(spec, (), seed)


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200] if text else ''}"
