"""Compare what the ranks recorded with the plain model, tensor by tensor, on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf, isnan

import torch
from torch import Tensor

from nnscaler.errors import few
from nnscaler.runtime.tensor_bits_and_differences import (
    FAMILY_SHARE,
    FILL,
    as_real,
    difference,
    family_scale,
    largest,
    same_values,
)
from verify.external.comparison.comparison_records import IN_STEP, ComparisonResult, Difference, ProgramRun
from verify.external.comparison.explain_gradient_by_shared_elements import WrongGradient
from verify.external.comparison.losses_and_norms import compare_losses, compare_norms
from verify.external.comparison.reference_in_parts_and_noise import MEAN_OF_MEANS, cause_by_micro_batches
from verify.external.comparison.wrong_state_after_step import cause_elsewhere, cause_of_state
from verify.external.observe_rank_run import ObservedStep, RankRecord
from verify.external.parameter_mapping import RankPiece, addresses_as_tensor, taken
from verify.external.reference import PlainReference, data_part
from verify.external.shards_made_anew import GUESSED
from verify.programs.causes.explain_wrong_values import cause_of
from verify.programs.causes.wrong_tensor import VAGUE, Cause, WrongTensor
from verify.results.verdict import Verdict


def compare(run: ProgramRun) -> tuple[ComparisonResult, ...]:
    """Compare everything. What follows from an earlier difference alone is left out."""
    norms, steps = compare_norms(run), len(run.reference.steps)
    # a step clips by its norm, and makes its update, after its gradients and before those of the next
    last = min(_first_refuted(norms), steps - 1)
    gradients = _gradients(run, last)
    wrong = min((d.step for d in gradients.differences if d.actual != IN_STEP), default=steps)
    losses = compare_losses(run, min(wrong, last), gradients)
    states = _states(run, "parameter", min(map(_first_refuted, (losses, gradients, norms))))
    updated = _first_refuted(states)
    if updated < last:  # what later steps compute follows from its update
        gradients = _gradients(run, updated)
        losses = compare_losses(run, updated, gradients)
        norms = replace(norms, differences=tuple(d for d in norms.differences if d.step <= updated))
    others = [result for result in (states, _states(run, "buffer", _NEVER)) if result.count]
    held = _held(run)
    results = (losses, gradients, norms, *others)
    pieces = (piece for record in run.records for piece in record.pieces)
    return (held, *(map(_undecided, results) if _begins_elsewhere(held, losses, pieces) else results))


ELSEWHERE = (
    "the first loss is not the model's, and parameters that cannot be matched, or by their shapes alone, stand in the "
    "place of the model's: they may begin with other values, so that no difference says anything"
)


def _begins_elsewhere(held: ComparisonResult, losses: ComparisonResult, pieces: Iterable[RankPiece]) -> bool:
    """Return whether the program may compute from other values: some of the model's parameters are held by nobody, some
    of the program's cannot be matched, or were by their shapes alone, and the loss of the first step differs already.
    """
    codes = {difference.code for difference in held.differences}
    unsure = {"parameter_unmatched", "parameter_not_held"} <= codes or any(piece.found == GUESSED for piece in pieces)
    return unsure and any(d.step == 0 for d in losses.differences)


def _undecided(result: ComparisonResult) -> ComparisonResult:
    if not any(d.verdict is Verdict.REFUTED for d in result.differences):
        return result
    return replace(result, differences=(Difference("not_compared", "", -1, 0, Verdict.INCONCLUSIVE, actual=ELSEWHERE),))


LATE = "gradients, added up by the optimizer's step"
_NEVER = 1 << 30  # a step that no run reaches


def _first_refuted(compared: ComparisonResult) -> int:
    return min((d.step for d in compared.differences if d.verdict is Verdict.REFUTED), default=_NEVER)


# Which elements the ranks hold.


def _held(run: ProgramRun) -> ComparisonResult:
    """Check that every parameter is held by some rank, that nothing is unmatched, and that replicas start equal."""
    space = run.reference.space
    held = torch.zeros(space.size, dtype=torch.bool)
    found: list[Difference] = []
    unmatched = False
    starts: dict[tuple[str, str, bytes | None], tuple[int, float]] = {}
    for record in run.records:
        for piece in record.pieces:
            if piece.addresses is None:
                if piece.kind == "parameter" and piece.trained:
                    unmatched = True
                    found.append(Difference("parameter_unmatched", piece.name, record.rank, 0, Verdict.INCONCLUSIVE))
                continue
            if isinstance(piece.addresses, range):
                held[piece.addresses.start : piece.addresses.stop] = True
            else:
                held[piece.addresses] = True
            if piece.kind == "parameter":
                where = (piece.local, piece.name, piece.key)
                first, started = starts.setdefault(where, (record.rank, piece.started))
                if started != piece.started and not (isnan(started) and isnan(piece.started)):
                    # shards that were made on the meta device may be left for a checkpoint to fill
                    open_still = piece.found == GUESSED or (piece.found == "given" and piece.layout != "plain")
                    verdict = Verdict.INCONCLUSIVE if open_still else Verdict.REFUTED
                    cause = Cause("not_synchronised", f"rank {first} starts from other values than rank {record.rank}")
                    found.append(Difference("replicas_differ", piece.name, record.rank, -1, verdict, cause=cause))
    parameters = [name for name in space.names if space.kinds[name] == "parameter"]
    for name in parameters:
        whole = space.whole(name)
        missing = int((~held[whole.start : whole.stop]).sum())
        if missing:
            verdict = Verdict.INCONCLUSIVE if unmatched else Verdict.REFUTED
            text = f"{missing} of {len(whole)} elements"
            found.append(Difference("parameter_not_held", name, -1, 0, verdict, actual=text))
    for name in _changed(run.reference, "buffer"):
        whole = space.whole(name)
        if missing := int((~held[whole.start : whole.stop]).sum()):
            cause = Cause("differs", "the model changes this buffer in a step, and it may be held by another name")
            text = f"{missing} of {len(whole)} elements"
            found.append(Difference("parameter_not_held", name, -1, 0, Verdict.INCONCLUSIVE, actual=text, cause=cause))
    return ComparisonResult("parameters are held", len(parameters), tuple(found))


def _changed(reference: PlainReference, kind: str) -> Iterator[str]:
    """Yield the parameters or buffers that the plain model's steps change, such as running statistics."""
    space = reference.space
    for name in space.names if reference.steps else ():
        if space.kinds[name] == kind and name in reference.start:
            after = taken(reference.steps[-1].parameters, space.whole(name))
            before = as_real(reference.start[name].detach()).flatten().to(after.dtype)
            if not same_values(before, after):
                yield name


# Gradients.


def _gradients(run: ProgramRun, last: int) -> ComparisonResult:
    """Compare every gradient on every rank, in every step up to step `last` until one is wrong."""
    found: list[Difference] = []
    count, worst, name = 0, 0.0, "gradients"
    for number, step in enumerate(run.reference.steps[: last + 1]):
        scale = run.reference.space.family_scale("gradient", step.gradients)
        seen = [record.steps[number] for record in run.records]
        read = _read(run, seen)
        for record in run.records:
            for piece in _compared(record, "parameter"):
                if piece.local in record.steps[number].replaced:
                    continue  # what its copies get is compared, or said not to be
                unread = piece.local in record.steps[number].unread
                if unread and piece.addresses is not None and bool(taken(read, piece.addresses).all()):
                    name = name if _is_read(piece, seen) else LATE
                    continue  # another rank makes its update, or that of a copy is made
                count += 1
                value = record.steps[number].gradients.get(piece.local)
                one, gap = _gradient(run, number, record, piece, value, scale)
                after = record.steps[number].late.get(piece.local)
                if one is not None and one.cause.kind == "missing_reduction" and after is not None:
                    reduced, gap_after = _gradient(run, number, record, piece, after, scale)
                    if reduced is None or reduced.cause.kind not in VAGUE:
                        one, gap, name = reduced, gap_after, LATE
                if one is not None and value is not None and unread:
                    one = _not_compared(piece, record, number, _UNREAD)
                elif one is not None and one.cause.kind == "missing_reduction" and _reduced(run, number, record, piece):
                    one = None if number else _not_compared(piece, record, number, IN_STEP)
                    count, gap = count - 1, 0.0
                worst = max(worst, gap)
                if one is not None:
                    found.append(one)
        if any(one.actual != IN_STEP for one in found):
            break
    return ComparisonResult(name, count, tuple(found), worst)


def _not_compared(piece: RankPiece, record: RankRecord, number: int, why: str) -> Difference:
    return Difference("not_compared", piece.name, record.rank, number, Verdict.INCONCLUSIVE, actual=why)


def _reduced(run: ProgramRun, number: int, record: RankRecord, piece: RankPiece) -> bool:
    """Return whether the optimizer's step leaves what the model's leaves, and not what was there before: it has reduced
    the gradient on the way, in a tensor of its own."""
    value, reference = record.steps[number].state.get(piece.local), run.reference
    earlier = reference.steps[number - 1].parameters if number else reference.space.flat(reference.start)

    def agrees(right: Tensor) -> bool:
        return value is not None and _judge(run, ("parameter", number), piece, difference(value, right).relative).passes

    return agrees(piece.take(reference.steps[number].parameters)) and not agrees(piece.take(earlier))


_UNREAD = (
    "no rank's optimizer holds parameters whose gradients differ, nor copies of them that begin with their values: "
    "what it takes for gradients was not compared"
)


def _read(run: ProgramRun, seen: Sequence[ObservedStep]) -> Tensor:
    """Return which elements of the model some rank's optimizer has."""
    read = torch.zeros(run.reference.space.size, dtype=torch.bool)
    for record, step in zip(run.records, seen, strict=True):
        for piece in record.pieces:
            if piece.addresses is not None and piece.local in step.gradients.keys() - step.unread:
                read[addresses_as_tensor(piece.addresses)] = True
    return read


def _is_read(piece: RankPiece, seen: Sequence[ObservedStep]) -> bool:
    return any(piece.local in step.gradients.keys() - step.unread for step in seen)


def _compared(record: RankRecord, kind: str) -> Iterator[RankPiece]:
    return (p for p in record.pieces if p.kind == kind and p.addresses is not None and p.shape is not None)


def _gradient(
    run: ProgramRun, number: int, record: RankRecord, piece: RankPiece, value: Tensor | None, scale: float
) -> tuple[Difference | None, float]:
    expected = piece.take(run.reference.steps[number].gradients)
    key = (piece.name, record.rank, number)
    if expected.numel() == 0:
        return None, 0.0
    if bool(expected.isnan().all()):
        if value is None or largest(value) == 0:
            return None, 0.0
        return Difference("gradient_extra", *key, Verdict.REFUTED, layout=piece.layout), 0.0
    expected = expected.nan_to_num(0.0)
    if value is None:
        if largest(expected) <= run.tolerance.bound * scale:
            return None, 0.0
        cause = Cause("zero", "the parameter has no gradient on this rank")
        return Difference("gradient_missing", *key, Verdict.REFUTED, cause=cause, layout=piece.layout), 0.0
    gap = difference(value, expected, _scale(run, piece, run.reference.steps[number].gradients, scale, inf))
    verdict = _judge(run, ("gradient", number), piece, gap.relative)
    if verdict.passes:
        return None, gap.relative
    code = "not_finite" if gap.not_finite else "gradient_differs"
    cause = _explain(run, number, record, piece, value) if not gap.problem else Cause("differs", gap.problem)
    numbers = (f"{gap.expected:.10g}", f"{gap.actual:.10g}")
    return Difference(code, *key, verdict, gap.relative, *numbers, cause, piece.layout), gap.relative


def _scale(run: ProgramRun, piece: RankPiece, values: Tensor, family: float, fill: float) -> float:
    """Return the scale that makes a difference relative to the whole tensors: a shard itself may be small."""
    space = run.reference.space
    whole = family_scale((taken(values, space.whole(name)) for name in piece.names), fill)
    return max(family, whole / FAMILY_SHARE)


def _judge(run: ProgramRun, kind: tuple[str, int], piece: RankPiece, relative: float) -> Verdict:
    """Judge a difference by the noise of the noisiest tensor that the piece has elements of."""
    keys = [(*kind, name) for name in piece.names]
    verdicts = [run.tolerance.judge(key, relative) for key in keys]
    passing = [v for v in verdicts if v.passes]
    return passing[0] if passing else (Verdict.INCONCLUSIVE if Verdict.INCONCLUSIVE in verdicts else Verdict.REFUTED)


def _explain(run: ProgramRun, number: int, record: RankRecord, piece: RankPiece, value: Tensor) -> Cause:
    steps = run.reference.steps
    whole = steps[number].gradients
    index, parts = data_part(run.program, record.coordinate)

    def own() -> Tensor:
        return piece.take(run.part_gradients(number, index)).nan_to_num(0.0)

    if parts > 1:
        each = [piece.take(run.part_gradients(number, part)).nan_to_num(0.0) for part in range(parts)]
        mean = torch.stack(each).mean(0)
        if _judge(run, ("gradient", number), piece, difference(value.double(), mean).relative).passes:
            before = None if run.unclipped is None else piece.take(run.unclipped(number)).nan_to_num(0.0)
            clipped = before is not None and _judge(run, ("gradient", number), piece, difference(before, mean).relative)
            return _NOT_CLIPPED if clipped and clipped.passes else MEAN_OF_MEANS
    values = {**_same_elements(run, piece, lambda step: step.gradients, number), record.rank: value}
    wrong = run.wrong_tensor("gradient", record.rank, values, piece.take(whole).nan_to_num(0.0))
    found = cause_of(
        replace(
            wrong,
            own=own if parts > 1 else None,
            before=piece.take(steps[number - 1].gradients).nan_to_num(0.0) if number else None,
            elements=taken(whole, run.reference.space.whole(piece.names[0])) if piece.names else None,
        )
    )
    if found.kind not in (*VAGUE, "permuted"):
        return found
    if elsewhere := cause_elsewhere(run, "gradient", whole, piece, value):
        return elsewhere

    def near(one: Tensor, other: Tensor) -> bool:
        return _judge(run, ("gradient", number), piece, difference(one, other).relative).passes

    def agrees(_loss: Tensor, gradients: Tensor) -> bool:
        return near(value.double(), piece.take(gradients).nan_to_num(0.0))

    right = wrong.expected
    if apart := _unsummed_copies(wrong, near):
        return apart
    elements = WrongGradient(run, number, record, piece, value, lambda made: near(made, right))
    return cause_by_micro_batches(run.micro_means, number, agrees) or elements.cause() or found


def _unsummed_copies(wrong: WrongTensor, near: Callable[[Tensor, Tensor], bool]) -> Cause | None:
    """Return the cause where the ranks that hold these elements make up the right one, and are the ranks of no axis."""
    values, ranks = list(wrong.pieces.values()), [rank for rank, _ in wrong.pieces]
    if len(values) < 2 or all(near(value, values[0]) for value in values):
        return None
    total = torch.stack(values).sum(0)
    ways = (("add up", "an all_reduce", total), ("average", "an averaging all_reduce", total / len(values)))
    for how, missing, made in ways:
        if near(made, wrong.expected):
            who = f"the gradients of ranks {few(list(map(str, ranks)), 8)}, which hold the same elements,"
            return Cause("missing_reduction", f"{who} {how} to the model's: {missing} over these ranks is missing")
    return None


_NOT_CLIPPED = Cause(
    "not_clipped",
    "it is the gradient as it is before it is clipped: the norm that is taken here is not that of all gradients, or "
    "the limit is another one",
)


def _same_elements(
    run: ProgramRun, piece: RankPiece, values_of: Callable[[ObservedStep], Mapping[str, Tensor | None]], number: int
) -> dict[int, Tensor]:
    """Return the values of all ranks that hold the very same elements, by rank."""
    found = {}
    for record in run.records:
        for other in _compared(record, piece.kind):
            value = values_of(record.steps[number]).get(other.local)
            if value is not None and value.shape == piece.shape and _same(other, piece):
                found[record.rank] = value.double()
                break
    return found


def _same(one: RankPiece, other: RankPiece) -> bool:
    a, b = one.addresses, other.addresses
    if isinstance(a, range) or isinstance(b, range):
        return isinstance(a, range) and isinstance(b, range) and a == b
    return a is not None and b is not None and torch.equal(a, b)


# Parameters and buffers.


def _states(run: ProgramRun, kind: str, last: int) -> ComparisonResult:
    """Compare parameters or buffers after every step before step `last` until one is wrong."""
    found: list[Difference] = []
    count, worst = 0, 0.0
    code = f"{kind}_differs"
    for number, step in enumerate(run.reference.steps[:last]):
        scale = run.reference.space.family_scale(kind, step.parameters)
        for record in run.records:
            for piece in _compared(record, kind):
                value = record.steps[number].state.get(piece.local)
                if value is None or not piece.take(step.parameters).numel():
                    continue
                count += 1
                gap, expected = min(
                    (
                        (difference(value, right, _scale(run, piece, step.parameters, scale, FILL)), right)
                        for right in _right_states(run, number, record, piece)
                    ),
                    key=lambda found: found[0].relative,
                )
                worst = max(worst, gap.relative)
                verdict = _judge(run, (kind, number), piece, gap.relative)
                if not verdict.passes:
                    values = {**_same_elements(run, piece, lambda seen: seen.state, number), record.rank: value}
                    cause = cause_of_state(run, number, record.rank, piece, values, expected)
                    numbers = (f"{gap.expected:.10g}", f"{gap.actual:.10g}")
                    key = (piece.name, record.rank, number)
                    found.append(Difference(code, *key, verdict, gap.relative, *numbers, cause, piece.layout))
        if found:
            break
    trained = {name for record in run.records for piece in record.pieces if piece.trained for name in piece.names}
    if kind == "parameter" and count and trained.isdisjoint(_changed(run.reference, kind)):
        found.append(Difference("not_compared", "", -1, 0, Verdict.INCONCLUSIVE, actual=_IDLE))
    return ComparisonResult(f"{kind}s after steps", count, tuple(found), worst)


def _right_states(run: ProgramRun, number: int, record: RankRecord, piece: RankPiece) -> Iterator[Tensor]:
    """Yield what a piece may be after a step: what the plain model has, or a statistic of the rank's data part."""
    step, (index, _) = run.reference.steps[number], data_part(run.program, record.coordinate)
    yield piece.take(step.parameters)
    if step.statistics and piece.kind == "buffer":
        yield from map(piece.take, step.statistics[index])


_IDLE = "the optimizer changes no parameter in the steps that are run: what it does was not compared"
