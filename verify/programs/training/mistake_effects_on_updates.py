"""Predict how mistakes after forward change gradients, their norm, the optimizer's states and parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from verify.programs.causes.explain_wrong_values import NARROW
from verify.programs.training.eager import updated
from verify.programs.training.rank_loop import StepRecord
from verify.programs.training.training_recipe import Batch, Course, options_of, rate_at
from verify.programs.training.training_run_pair import Alternatives, ComparedValue, Trained

# -- gradients --------------------------------------------------------------------------------------------------------


def of_gradient(trained: Trained, found: ComparedValue) -> Alternatives:
    assert found.expected is not None
    eager, step, name = trained.eager, found.step, found.name
    right = found.expected.double()
    before = None if step == 0 else eager.steps[step - 1].gradients.get(name)
    if before is not None:
        clipped = before * _clipping(trained, eager.steps[step - 1])
        yield "the clipped gradient of the step before is added to it: it was not cleared", right + clipped
    yield from _of_batches(trained, found)
    for dtype, narrow in NARROW:
        parts = [g.to(narrow) for g in _each_batch(trained, found.step, name) if g is not None]
        if len(parts) > 1:
            yield f"it is added up in {dtype}", torch.stack(parts).to(narrow).sum(0).double()
    if step:
        yield (
            "it is computed with the parameters before the last update: a stale gather",
            _sum(_each_batch(trained, step, name, eager.before(step - 1)), right),
        )
    yield "it is clipped already", right * _clipping(trained, eager.steps[step])
    yield "dropout is off in backward", _sum(_each_batch(trained, step, name, dropout=False), right)
    yield from _of_rows(trained, found)


def _of_batches(trained: Trained, found: ComparedValue) -> Alternatives:
    """The gradient where a step's batches do not add up."""
    each = _each_batch(trained, found.step, found.name)
    count = len(each)
    if count > 1 and all(g is not None for g in each):
        for position, gradient in enumerate(each):
            assert gradient is not None
            other = "first" if position else "last"
            yield f"it is that of batch {position} of the step alone: accumulation drops the {other}", gradient
            yield f"batch {position} of the step counts twice", _sum(each, gradient) + gradient
        yield f"it is divided by the {count} batches of the step", _sum(each, each[0]) / count  # type: ignore[arg-type]


def _of_rows(trained: Trained, found: ComparedValue) -> Alternatives:
    """The gradient of some rows of the batch: of one data part, or of one micro-batch."""
    course, batches = trained.course, trained.course.steps[found.step]
    if len(batches) > 1 or not course.carried:
        return
    batch = batches[0]
    parts = [course.rows(batch, part, trained.parts) for part in range(trained.parts)]
    chosen: list[tuple[str, Batch]] = []
    for micro in range(trained.micro_batches if trained.micro_batches > 1 else 0):
        pieces = [course.rows(rows, micro, trained.micro_batches) for rows in parts]
        whole = {n: torch.cat([p[n] for p in pieces]) if n in course.carried else t for n, t in batch.items()}
        chosen.append((f"of micro-batch {micro} alone: the others are not in it", whole))
    twice: Tensor | None = None
    for sentence, rows in chosen:
        mean, share = _gradient_of(trained, found, rows)
        if mean is not None:
            yield f"it is that {sentence}", mean * share
            yield f"it is the mean {sentence}", mean
            twice = mean * share if twice is None else twice * trained.parts + mean * share
    if twice is not None and trained.parts > 1:
        yield (
            "it is summed over ranks after each micro-batch, and what is summed already once more with the next",
            twice,
        )
    own = [_gradient_of(trained, found, rows) for rows in parts] if trained.parts > 1 else []
    if own and all(mean is not None for mean, _ in own):
        text = "it is that of the rank's own data part alone: the sum over ranks is missing"
        for scaled in (True, False):
            each = [mean * share if scaled else mean for mean, share in own if mean is not None]
            yield text, {r.rank: each[r.part[0]] for r in trained.ranks}


def _gradient_of(trained: Trained, found: ComparedValue, rows: Batch) -> tuple[Tensor | None, float]:
    """Return the gradient of some rows of the step's batch, and their share of it."""
    course = trained.course
    total = course.steps[found.step][0][min(course.carried)].shape[0]
    count = rows[min(course.carried)].shape[0]
    if not 0 < count < total:
        return None, 0.0
    compute = trained.model.without_draws().compute
    _, gradients = compute(trained.eager.before(found.step), rows, course.first_batch(found.step))
    return gradients.get(found.name), count / total


def _each_batch(
    trained: Trained, step: int, name: str, parameters: Mapping[str, Tensor] | None = None, dropout: bool = True
) -> list[Tensor | None]:
    first = trained.course.first_batch(step)
    right = trained.eager.before(step) if parameters is None else parameters
    return [
        trained.model.compute(right, batch, first + i, dropout=dropout)[1].get(name)
        for i, batch in enumerate(trained.course.steps[step])
    ]


def _sum(parts: list[Tensor | None], like: Tensor) -> Tensor:
    total = torch.zeros_like(like)
    for part in parts:
        total = total if part is None else total + part
    return total


def _clipping(trained: Trained, step: StepRecord) -> float:
    limit = trained.course.max_norm
    return 1.0 if limit is None or step.norm is None else min(1.0, limit / (float(step.norm) + 1e-6))


def of_norm(trained: Trained, found: ComparedValue) -> Alternatives:
    eager, step = trained.eager, found.step
    gradients = [g for g in eager.steps[step].gradients.values() if g is not None]
    for kind, text in ((1.0, "1"), (float("inf"), "infinity")):
        yield (
            f"it is the norm of type {text}",
            torch.stack([torch.linalg.vector_norm(g, kind) for g in gradients]).norm(kind),
        )
    if step and eager.steps[step - 1].norm is not None:
        norm = eager.steps[step - 1].norm
        assert norm is not None
        yield "it is the norm of the step before", norm
    if trained.course.max_norm is not None:
        yield "it is the norm after clipping", torch.tensor(trained.course.max_norm, dtype=torch.float64)
    norms = torch.stack([torch.linalg.vector_norm(g) for g in gradients])
    for name, own in zip(eager.steps[step].gradients, norms, strict=False):
        yield f"`{name}` is counted twice: a tied parameter, or a copy", (norms.square().sum() + own.square()).sqrt()
        yield f"`{name}` is not counted", (norms.square().sum() - own.square()).clamp(min=0).sqrt()


# -- the update -------------------------------------------------------------------------------------------------------


def of_state(trained: Trained, found: ComparedValue) -> Alternatives:
    key, name = found.name.partition(" of ")[0], found.parameter
    assert found.expected is not None
    right = found.expected.double()
    if not right.dim():
        yield from _counts(trained, found)
    for sentence, _, states in _updates(trained, found.step):
        if key in states.get(name, {}):
            yield sentence, states[name][key]
    yield "it is empty: the state was lost", torch.zeros_like(right)


def _counts(trained: Trained, found: ComparedValue) -> Alternatives:
    assert found.expected is not None
    like = torch.zeros_like(found.expected, dtype=torch.float64)
    step, batches = found.step, trained.course.first_batch(found.step + 1)
    if batches != step + 1:
        yield "it counts batches, and not optimizer steps: bias correction is off", like + batches
    yield "it starts again at 1: the state was lost", like + 1
    for more in range(1, 4):
        yield f"it is {more} ahead", like + step + 1 + more
        yield f"it is {more} behind", like + step + 1 - more


def of_parameter(trained: Trained, found: ComparedValue) -> Alternatives:
    name = found.name
    assert found.expected is not None
    for sentence, parameters, _ in _updates(trained, found.step):
        yield sentence, parameters[name]
    for dtype, narrow in NARROW:
        yield f"it is kept in {dtype}: there is no master copy", found.expected.to(narrow).double()
    for sentence, parameters, _ in _narrow_updates(trained, found.step):
        yield sentence, parameters[name]


States = Mapping[str, Mapping[str, Tensor]]
Gradients = Mapping[str, Tensor | None]
Update = tuple[str, Mapping[str, Tensor], States]


@dataclass(frozen=True)
class _OptimizerStep:
    """A step of the real optimizer.

    own        parameters before it
    states     of the optimizer, before it
    gradients  as they are clipped
    undecayed  parameters without decay, where they are not the course's
    """

    course: Course
    own: Mapping[str, Tensor]
    states: States
    gradients: Gradients
    rate: float
    undecayed: frozenset[str] | None = None

    def made(self, text: str, **other: Any) -> Update:
        """Return parameters and states after it, with something else in the place of what is right."""
        step = replace(self, **other)
        return text, *updated(step.course, step.own, step.states, step.gradients, step.rate, step.undecayed)


def _right(trained: Trained, step: int) -> _OptimizerStep:
    old, now = trained.eager.before(step), trained.eager.steps[step]
    own = {name: old[name] for name in now.gradients}
    clipped = _scaled(now.gradients, _clipping(trained, now))
    return _OptimizerStep(trained.course, own, trained.eager.states_before(step), clipped, now.rate)


def _updates(trained: Trained, step: int) -> Iterator[Update]:
    """Steps of the real optimizer as mistakes would make them: parameters and states after it."""
    course, eager, right = trained.course, trained.eager, _right(trained, step)
    clipped, factor = right.gradients, _clipping(trained, eager.steps[step])
    yield "no update was made of it", right.own, right.states
    yield right.made("the gradients are not clipped before the update", gradients=eager.steps[step].gradients)
    yield right.made("the gradients are clipped twice", gradients=_scaled(clipped, factor))
    if step:
        before = eager.steps[step - 1]
        stale = _scaled(before.gradients, _clipping(trained, before))
        yield right.made("the update has the gradient of the step before: a stale gather or reduction", gradients=stale)
        yield right.made("the gradient of the step before is added", gradients=_added(clipped, stale))
    _, once, states = right.made("")
    yield right.made("the update is made twice", own=once, states=states)
    if "weight_decay" in options_of(course.optimizer):
        yield from _decayed(right)
    for text, at in (("after", step + 1), ("before", max(0, step - 1))):
        told = f"the learning rate is that of the step {text}: the scheduler is off by one"
        yield right.made(told, rate=course.learning_rate * rate_at(at))
    rate = course.learning_rate * rate_at(course.first_batch(step))
    yield right.made("the scheduler steps once per batch, and not once per optimizer step", rate=rate)
    yield right.made("the optimizer's state was lost before this step", states={})
    for count in (2, 3, 4):
        yield right.made(f"the gradients are {count} times too large", gradients=_scaled(clipped, count))
        told = f"the gradients are 1/{count} of what they should be: averaged twice"
        yield right.made(told, gradients=_scaled(clipped, 1 / count))
    yield right.made("the update goes the wrong way: its sign is turned", gradients=_scaled(clipped, -1.0))
    yield from _miscounted(right, step)


def _scaled(gradients: Gradients, factor: float) -> Gradients:
    return {n: None if g is None else g * factor for n, g in gradients.items()}


def _added(one: Gradients, other: Gradients) -> Gradients:
    pairs = {n: (g, other.get(n)) for n, g in one.items()}
    return {n: a if a is None or b is None else a + b for n, (a, b) in pairs.items()}


def _decayed(right: _OptimizerStep) -> Iterator[Update]:
    """Updates with decay on other parameters; as part of the gradient, where the optimizer takes it apart (AdamW), and
    the other way round."""
    course, own, every = right.course, right.own, frozenset(right.gradients)
    wrong = "weight decay on the wrong group"
    yield right.made(f"{wrong}: all parameters are decayed", undecayed=frozenset())
    yield right.made(f"{wrong}: none is decayed", undecayed=every)
    yield right.made(f"{wrong}: the groups are exchanged", undecayed=every - course.undecayed)
    decay = float(options_of(course.optimizer)["weight_decay"])
    pairs = right.gradients.items()
    inside = {n: g if g is None or n in course.undecayed else g + decay * own[n].double() for n, g in pairs}
    text = "weight decay goes into the gradient, and the optimizer keeps them apart"
    yield right.made(text, gradients=inside, undecayed=every)
    apart = {n: p if n in course.undecayed else p * (1 - right.rate * decay) for n, p in own.items()}
    text = "weight decay is taken off the parameter, and the optimizer puts it into the gradient"
    yield right.made(text, own=apart, undecayed=every)


def _miscounted(right: _OptimizerStep, step: int) -> Iterator[Update]:
    """Updates whose bias correction has another count."""
    counts = {step + more for more in (-1, 1, 2)} | {right.course.first_batch(step), 2 * step, 0}
    for count in sorted(n for n in counts if n >= 0 and n != step):
        states = {
            n: {k: torch.full_like(v, count) if k == "step" else v for k, v in s.items()}
            for n, s in right.states.items()
        }
        if states:
            text = f"bias correction counts {count + 1} steps, and this is step {step + 1}"
            yield right.made(text, states=states)


def _narrow_updates(trained: Trained, step: int) -> Iterator[Update]:
    """Updates from states, or by gradients, that were rounded."""
    right = _right(trained, step)
    for dtype, narrow in NARROW:
        rounded = {n: None if g is None else g.to(narrow).double() for n, g in right.gradients.items()}
        yield right.made(f"the update has gradients that are rounded to {dtype}", gradients=rounded)
        kept = {n: {k: v.to(narrow).double() if v.dim() else v for k, v in s.items()} for n, s in right.states.items()}
        yield right.made(f"the update has states that are kept in {dtype}", states=kept)
