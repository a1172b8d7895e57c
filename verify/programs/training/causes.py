"""Why a training run differs: what a mistake that is known would make of the right tensors is computed, and compared.

Everything before the first difference agrees, so the right state is known there. Each alternative is a tensor with a
sentence; the first one that has what the wrong ranks have is told. Ranks that are right are left out: "on rank 1: ...".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from verify.programs.training.course import Batch, options_of, rate_at
from verify.programs.training.eager import CLOSE, updated
from verify.programs.training.ranks import StepRecord
from verify.programs.training.trained import Compared, Trained
from verify.results.tolerance import largest

Alternatives = Iterator[tuple[str, Tensor]]
NARROW = (("bfloat16", torch.bfloat16), ("float16", torch.float16), ("float32", torch.float32))
SINGLE = 64  # parameters that are tried one by one


def explain(trained: Trained, found: Compared) -> str | None:
    """Return a sentence on the cause; None where no alternative is what the ranks have."""
    if found.expected is None or found.observed.value is None:
        return None
    wrong = found.observed.wrong_ranks(found.expected, CLOSE, found.scale * 1e-3)
    if not wrong:
        return "copies differ in rounding alone: their sums were taken in different orders"
    where = "" if len(wrong) == len(found.observed.pieces) else f"on rank {', '.join(map(str, wrong))} alone: "
    told = _neighbour(found, wrong)
    for sentence, candidate in () if told else _ALTERNATIVES[found.kind](trained, found):
        if _explains(found, wrong, candidate):
            told = sentence
            break
    told = told or _factor(trained, found) or _unsummed(found)
    return f"{where}{told}" if told else None


def _explains(found: Compared, wrong: list[int], candidate: Tensor) -> bool:
    """Return whether all wrong ranks have what the candidate is there, and that is not the right tensor."""
    assert found.expected is not None
    least = max(largest(found.expected), found.scale * 1e-3)
    differs = False
    for rank in wrong:
        piece, region = found.observed.pieces[rank].double(), found.observed.regions[rank]
        other = candidate.double()[region]
        if other.shape != piece.shape or not bool(((piece - other).abs() <= CLOSE * least).all()):
            return False
        differs = differs or bool(((other - found.expected.double()[region]).abs() > CLOSE * least).any())
    return differs


def _neighbour(found: Compared, wrong: list[int]) -> str | None:
    """Test the cause that a rank has the shard of another one."""
    assert found.expected is not None
    pieces, regions = found.observed.pieces, found.observed.regions
    told: list[str] = []
    for rank in wrong:
        for other, region in regions.items():
            theirs, mine = found.expected[region].double(), pieces[rank].double()
            if other == rank or theirs.shape != mine.shape or not mine.dim() or not largest(theirs) > 0:
                continue
            own = found.expected[regions[rank]].double()
            if torch.allclose(theirs, own, rtol=CLOSE, atol=0):
                continue
            if bool(((mine - theirs).abs() <= CLOSE * largest(found.expected)).all()):
                told.append(f"rank {rank} has the shard of rank {other}")
                break
        else:
            return None
    return f"{', '.join(told)}: a neighbour's" if told else None


def _factor(trained: Trained, found: Compared) -> str | None:
    """Test the cause that it is n times, or one n-th of, the right one."""
    assert found.expected is not None and found.observed.value is not None
    if found.kind not in ("loss", "gradient", "norm"):
        return None
    value, right = found.observed.value.double(), found.expected.double()
    least = float((right * right).sum())
    if not least > 0 or found.observed.unequal:
        return None
    factor = float((value * right).sum()) / least
    if float((value - factor * right).abs().max()) > CLOSE * largest(right) * max(1.0, abs(factor)):
        return None
    ratio = factor if found.kind != "norm" else factor
    for n in range(2, 65):
        ours = f" (the number of data parts is {n})" if trained.parts == n else ""
        if abs(ratio - n) < CLOSE * n:
            return f"it is {n} times the model's{ours}: summed once too often"
        if abs(ratio * n - 1) < CLOSE:
            return f"it is 1/{n} of the model's{ours}: averaged where it should be summed, or averaged twice"
    if found.kind == "norm":
        for n in range(2, 65):
            if abs(ratio**2 - n) < CLOSE * n:
                return f"its square is {n} times the model's: elements that {n} ranks hold are counted {n} times"
            if abs(ratio**2 * n - 1) < CLOSE:
                return f"its square is 1/{n} of the model's: shards of other ranks are not counted"
        exponent = torch.tensor(ratio).log2()
        if ratio > 64 and abs(float(exponent - exponent.round())) < 1e-6:
            return f"it is {ratio:.6g} times the model's: clipped before the loss scale was taken out (clip before unscale)"
    return f"it is {ratio:.6g} times the model's"


def _unsummed(found: Compared) -> str | None:
    """Test the cause that ranks hold parts of a sum that nobody took."""
    pieces = [p.double() for p in found.observed.pieces.values()]
    if found.kind not in ("loss", "gradient") or len(pieces) < 2 or found.expected is None:
        return None
    if len({tuple(p.shape) for p in pieces}) > 1 or pieces[0].shape != found.expected.shape:
        return None
    total, right = torch.stack(pieces).sum(0), found.expected.double()
    for copies in range(1, len(pieces)):
        if bool(((total - copies * right).abs() <= CLOSE * max(largest(right), 1e-300)).all()):
            return "the ranks hold parts of a sum that nobody took: a reduction over ranks is missing"
    mean = total / len(pieces)
    if bool(((mean - right).abs() <= CLOSE * max(largest(right), 1e-300)).all()):
        return "each rank has that of its own rows: the mean over ranks is missing"
    return None


# -- learning rates and losses ----------------------------------------------------------------------------------------


def _rates(trained: Trained, found: Compared) -> Alternatives:
    base, step = trained.course.learning_rate, found.step
    batches = trained.course.first_batch(step)
    like = torch.zeros((), dtype=torch.float64)
    yield "the scheduler is off by one: it is the rate of the step after", like + base * rate_at(step + 1)
    yield "the scheduler is off by one: it is the rate of the step before", like + base * rate_at(step - 1)
    yield "the scheduler steps once per batch, and not once per optimizer step", like + base * rate_at(batches)
    yield "the scheduler steps twice per optimizer step", like + base * rate_at(2 * step)
    yield "the scheduler never steps", like + base
    for other in range(step + 3):
        yield f"the scheduler is off: it is the rate of step {other}", like + base * rate_at(other)


def _losses(trained: Trained, found: Compared) -> Alternatives:
    course, eager, compute = trained.course, trained.eager, trained.model.compute
    number = course.first_batch(found.step) + int(found.name)
    batches, right = course.batches(), eager.before(found.step)
    batch = batches[number]
    yield from _other_batches(trained, right, number)
    for back in range(1, found.step + 1):
        old = compute(eager.before(found.step - back), batch, number)[0]
        yield "it is computed with the parameters before the last update: a stale gather of them", old
    yield "dropout is off in the program", compute(right, batch, number, dropout=False)[0]
    yield "the model is in evaluation mode", compute(right, batch, number, evaluate=True)[0]
    for other in (n for n in range(len(batches) + 1) if n != number):
        drawn = compute(right, batch, other)[0]
        yield f"it has the random numbers of batch {other}, and is batch {number}", drawn
    for dtype, narrow in NARROW:
        rounded = {n: p.to(narrow).double() for n, p in right.items()}
        yield f"the parameters are rounded to {dtype}", compute(rounded, batch, number)[0]
    yield from _parts_of(trained, right, number)
    if found.step:
        old = eager.before(found.step - 1)
        for name in list(right)[:SINGLE]:
            mixed = compute({**right, name: old[name]}, batch, number)[0]
            yield f"`{name}` is read as it was before the last update: a stale gather", mixed


def _other_batches(trained: Trained, right: Mapping[str, Tensor], number: int) -> Alternatives:
    batches = trained.course.batches()
    for other, batch in enumerate(batches):
        if other == number:
            continue
        what = "replayed" if other < number else "batches before it were skipped"
        for drawn in dict.fromkeys((number, other)):
            yield (
                f"it is the loss of batch {other}, and batch {number} is due: {what}",
                trained.model.compute(right, batch, drawn)[0],
            )


def _parts_of(trained: Trained, right: Mapping[str, Tensor], number: int) -> Alternatives:
    """The batch as some data parts would have it."""
    course, count = trained.course, trained.parts
    batch = course.batches()[number]
    if count < 2 or not course.carried:
        return
    losses: list[Tensor] = []
    for part in range(count):
        rows = course.rows(batch, part, count)
        if rows[min(course.carried)].shape[0] == 0:
            return
        losses.append(trained.model.without_draws().compute(right, rows)[0])
        yield f"it is the loss of the rows of data part {part} alone: the others do not count", losses[-1]
    yield "it is the mean of the losses of the data parts, which have other numbers", torch.stack(losses).mean()
    for what, mixed in _misread(trained, batch):
        yield what, trained.model.compute(right, mixed, number)[0]


def _misread(trained: Trained, batch: Batch) -> Iterator[tuple[str, Batch]]:
    """Return what batches ranks would have read that order them on their own."""
    course, count = trained.course, trained.parts
    rows = [course.rows(batch, part, count) for part in range(count)]
    for part in range(count):
        same = {n: torch.cat([rows[part][n]] * count) if n in course.carried else t for n, t in batch.items()}
        yield f"every data part reads the rows of part {part}: the order of data depends on the rank", same
    for name in sorted(course.carried):
        for shift in range(1, count):
            moved = torch.cat([rows[(p + shift) % count][name] for p in range(count)])
            yield (
                f"the rows of `{name}` are those of another data part than the rest of the batch",
                {**batch, name: moved},
            )


# -- gradients --------------------------------------------------------------------------------------------------------


def _gradients(trained: Trained, found: Compared) -> Alternatives:
    assert found.expected is not None
    eager, step, name = trained.eager, found.step, found.name
    right = found.expected.double()
    before = None if step == 0 else eager.steps[step - 1].gradients.get(name)
    yield "it is zero: nothing was added to it", torch.zeros_like(right)
    if before is not None:
        clipped = before * _clipping(trained, eager.steps[step - 1])
        kept = "the gradient of the step before is added to it: gradients were not cleared"
        yield kept, right + before
        yield kept, right + clipped
        yield "it is the gradient of the step before: a stale reduction", before
    yield from _of_batches(trained, found)
    for dtype, narrow in NARROW:
        yield f"it is rounded to {dtype}: a gradient cast down", right.to(narrow).double()
        parts = [g.to(narrow) for g in _each_batch(trained, found.step, name) if g is not None]
        if len(parts) > 1:
            yield f"it is added up in {dtype}", torch.stack(parts).to(narrow).sum(0).double()
    if step:
        yield (
            "it is computed with the parameters before the last update: a stale gather",
            _sum(_each_batch(trained, step, name, eager.before(step - 1)), right),
        )
    yield "it is clipped already", right * _clipping(trained, eager.steps[step])
    for n in (2, 3, 4):
        yield f"it is {n} times the model's on that rank: summed once too often", right * n
        yield f"it is 1/{n} of the model's on that rank: averaged where it should be summed", right / n
    yield "dropout is off in backward", _sum(_each_batch(trained, step, name, dropout=False), right)
    yield "its sign is turned", -right
    yield from _shifted(right)


def _of_batches(trained: Trained, found: Compared) -> Alternatives:
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


def _each_batch(
    trained: Trained,
    step: int,
    name: str,
    parameters: Mapping[str, Tensor] | None = None,
    dropout: bool = True,
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


def _shifted(right: Tensor) -> Alternatives:
    for dim in range(right.dim()):
        for by in (1, -1):
            yield f"it is shifted by one along dim {dim}: shards begin one element off", right.roll(by, dim)


def _clipping(trained: Trained, step: StepRecord) -> float:
    limit = trained.course.max_norm
    return 1.0 if limit is None or step.norm is None else min(1.0, limit / (float(step.norm) + 1e-6))


def _norms(trained: Trained, found: Compared) -> Alternatives:
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


def _states(trained: Trained, found: Compared) -> Alternatives:
    key, name = found.name.partition(" of ")[0], found.parameter
    assert found.expected is not None
    right = found.expected.double()
    if not right.dim():
        yield from _counts(trained, found)
    for sentence, _, states in _updates(trained, found.step):
        if key in states.get(name, {}):
            yield sentence, states[name][key]
    for dtype, narrow in NARROW:
        yield f"it is kept in {dtype}", right.to(narrow).double()
    yield "it is empty: the state was lost", torch.zeros_like(right)
    yield from _shifted(right)


def _counts(trained: Trained, found: Compared) -> Alternatives:
    assert found.expected is not None
    like = torch.zeros_like(found.expected, dtype=torch.float64)
    step, batches = found.step, trained.course.first_batch(found.step + 1)
    if batches != step + 1:
        yield "it counts batches, and not optimizer steps: bias correction is off", like + batches
    yield "it counts two for each step: the update is made twice", like + 2 * (step + 1)
    yield "it is that of the step before: no update was made", like + step
    yield "it starts again at 1: the state was lost", like + 1
    for more in range(1, 4):
        yield f"it is {more} ahead", like + step + 1 + more
        yield f"it is {more} behind", like + step + 1 - more


def _parameters(trained: Trained, found: Compared) -> Alternatives:
    name = found.name
    assert found.expected is not None
    for sentence, parameters, _ in _updates(trained, found.step):
        yield sentence, parameters[name]
    for dtype, narrow in NARROW:
        yield f"it is kept in {dtype}: there is no master copy", found.expected.to(narrow).double()
    for sentence, parameters, _ in _narrow_updates(trained, found.step):
        yield sentence, parameters[name]
    yield from _shifted(found.expected.double())


Update = tuple[str, Mapping[str, Tensor], Mapping[str, Mapping[str, Tensor]]]


def _updates(trained: Trained, step: int) -> Iterator[Update]:
    """Steps of the real optimizer as mistakes would make them: parameters and states after it."""
    course, eager = trained.course, trained.eager
    old, states, now = eager.before(step), eager.states_before(step), eager.steps[step]
    own = {n: old[n] for n in now.gradients}
    factor = _clipping(trained, now)
    clipped = _scaled(now.gradients, factor)

    def after(sentence: str, gradients: Mapping[str, Tensor | None], **other: object) -> Update:
        rates = other.get("rates", now.rates)
        undecayed = other.get("undecayed")
        return (sentence, *updated(course, own, states, gradients, rates, undecayed))  # type: ignore[arg-type]

    yield "no update was made of it", own, states
    yield "the gradients are not clipped before the update", *after("", now.gradients)[1:]
    yield after("the gradients are clipped twice", _scaled(now.gradients, factor * factor))
    if step:
        before = eager.steps[step - 1]
        stale = _scaled(before.gradients, _clipping(trained, before))
        yield after("the update has the gradient of the step before: a stale gather or reduction", stale)
        yield after("the gradient of the step before is added", _added(clipped, stale))
    yield "the update is made twice", *_twice(trained, step, own, states, clipped)
    every = frozenset(now.gradients)
    inverse = every - course.undecayed
    if "weight_decay" in options_of(course.optimizer):
        decay = "weight decay on the wrong group"
        yield after(f"{decay}: all parameters are decayed", clipped, undecayed=frozenset())
        yield after(f"{decay}: none is decayed", clipped, undecayed=every)
        yield after(f"{decay}: the groups are exchanged", clipped, undecayed=inverse)
        yield from _coupled(trained, step, own, states, clipped)
    base = course.learning_rate
    for text, at in (("after", step + 1), ("before", max(0, step - 1))):
        rates = [base * rate_at(at)] * len(now.rates)
        yield after(f"the learning rate is that of the step {text}: the scheduler is off by one", clipped, rates=rates)
    rates = [base * rate_at(course.first_batch(step))] * len(now.rates)
    yield after("the scheduler steps once per batch, and not once per optimizer step", clipped, rates=rates)
    yield "the optimizer's state was lost before this step", *updated(course, own, {}, clipped, now.rates)
    for count in (2, 3, 4):
        yield after(f"the gradients are {count} times too large", _scaled(clipped, count))
        yield after(f"the gradients are 1/{count} of what they should be: averaged twice", _scaled(clipped, 1 / count))
    yield after("the update goes the wrong way: its sign is turned", _scaled(clipped, -1.0))
    yield from _miscounted(trained, step, own, states, clipped)


def _scaled(gradients: Mapping[str, Tensor | None], factor: float) -> dict[str, Tensor | None]:
    return {n: None if g is None else g * factor for n, g in gradients.items()}


def _added(one: Mapping[str, Tensor | None], other: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    pairs = {n: (g, other.get(n)) for n, g in one.items()}
    return {n: a if a is None or b is None else a + b for n, (a, b) in pairs.items()}


def _twice(
    trained: Trained,
    step: int,
    old: Mapping[str, Tensor],
    states: Mapping[str, Mapping[str, Tensor]],
    gradients: Mapping[str, Tensor | None],
) -> tuple[Mapping[str, Tensor], Mapping[str, Mapping[str, Tensor]]]:
    rates = trained.eager.steps[step].rates
    return updated(trained.course, *updated(trained.course, old, states, gradients, rates), gradients, rates)


def _coupled(
    trained: Trained,
    step: int,
    old: Mapping[str, Tensor],
    states: Mapping[str, Mapping[str, Tensor]],
    gradients: Mapping[str, Tensor | None],
) -> Iterator[Update]:
    """The decay as part of the gradient, where the optimizer takes it apart (AdamW), and the other way round."""
    course, rates = trained.course, trained.eager.steps[step].rates
    decay = float(options_of(course.optimizer)["weight_decay"])
    every = frozenset(gradients)
    inside = {n: g if g is None or n in course.undecayed else g + decay * old[n].double() for n, g in gradients.items()}
    text = "weight decay goes into the gradient, and the optimizer keeps them apart"
    yield text, *updated(course, old, states, inside, rates, every)
    apart = {n: p if n in course.undecayed else p * (1 - rates[0] * decay) for n, p in old.items()}
    text = "weight decay is taken off the parameter, and the optimizer puts it into the gradient"
    yield text, *updated(course, apart, states, gradients, rates, every)


def _miscounted(
    trained: Trained,
    step: int,
    old: Mapping[str, Tensor],
    states: Mapping[str, Mapping[str, Tensor]],
    gradients: Mapping[str, Tensor | None],
) -> Iterator[Update]:
    """Updates whose bias correction has another count."""
    course, rates = trained.course, trained.eager.steps[step].rates
    counts = {step + more for more in (-1, 1, 2)} | {course.first_batch(step), 2 * step, 0}
    for count in sorted(n for n in counts if n >= 0 and n != step):
        other = {
            n: {k: torch.full_like(v, count) if k == "step" else v for k, v in s.items()} for n, s in states.items()
        }
        if other:
            text = f"bias correction counts {count + 1} steps, and this is step {step + 1}"
            yield text, *updated(course, old, other, gradients, rates)


def _narrow_updates(trained: Trained, step: int) -> Iterator[Update]:
    """Updates from states, or by gradients, that were rounded."""
    course, eager = trained.course, trained.eager
    old, now = eager.before(step), eager.steps[step]
    clipped = _scaled(now.gradients, _clipping(trained, now))
    own = {n: old[n] for n in now.gradients}
    for dtype, narrow in NARROW:
        rounded = {n: None if g is None else g.to(narrow).double() for n, g in clipped.items()}
        states = eager.states_before(step)
        text = f"the update has gradients that are rounded to {dtype}"
        yield text, *updated(course, own, states, rounded, now.rates)
        kept = {n: {k: v.to(narrow).double() if v.dim() else v for k, v in s.items()} for n, s in states.items()}
        yield f"the update has states that are kept in {dtype}", *updated(course, own, kept, clipped, now.rates)


# -- buffers and evaluation -------------------------------------------------------------------------------------------


def _buffers(trained: Trained, found: Compared) -> Alternatives:
    name = found.name
    initial = dict(trained.model.model.named_buffers()).get(name)
    if initial is not None:
        yield "it never changes: its new values are not kept", initial.detach().double()
    shorter = replace(trained.course, steps=trained.course.steps[:-1], evaluation=None)
    if shorter.steps:
        yield "it is that of the step before: the last batch is not in it", trained.model.train(shorter).buffers[name]
    if found.kind == "buffer" and len(trained.course.steps) > 1:
        once = replace(trained.course, steps=tuple(s[-1:] for s in trained.course.steps), evaluation=None)
        yield "only one batch of an accumulated step is in it", trained.model.train(once).buffers[name]
    if trained.course.evaluation is not None:
        again = replace(trained.course, steps=(*trained.course.steps, (trained.course.evaluation,)), evaluation=None)
        yield (
            "the batch of the evaluation is in it: evaluation changes buffers",
            trained.model.train(again).buffers[name],
        )


def _evaluations(trained: Trained, found: Compared) -> Alternatives:
    if found.name:
        yield from _buffers(trained, found)
        return
    course, eager, batch = trained.course, trained.eager, trained.course.evaluation
    assert batch is not None
    last, count = eager.before(len(eager.steps)), len(course.batches())
    buffers = {n: b for n, b in eager.buffers.items() if b.is_floating_point()}
    compute = replace(trained.model, model=_with(trained, buffers)).compute
    for number in (count, count - 1, 0):
        yield "the model is in training mode: dropout and norms are those of a step", compute(last, batch, number)[0]
    yield "the model is in training mode, without dropout", compute(last, batch, dropout=False)[0]
    yield "its buffers are those from before training", trained.model.compute(last, batch, evaluate=True)[0]
    for back in range(1, len(eager.steps) + 1):
        old = eager.before(len(eager.steps) - back)
        yield "it has the parameters before the last update: a stale gather", compute(old, batch, evaluate=True)[0]
    for number, other in enumerate(course.batches()):
        yield f"it is the loss of batch {number} of the training", compute(last, other, evaluate=True)[0]
    for part in range(trained.parts):
        rows = course.rows(batch, part, trained.parts)
        if trained.parts > 1 and course.carried and rows[min(course.carried)].shape[0]:
            yield f"it is the loss of the rows of data part {part} alone", compute(last, rows, evaluate=True)[0]


def _with(trained: Trained, buffers: Mapping[str, Tensor]) -> torch.nn.Module:
    import copy

    model = copy.deepcopy(trained.model.model).double()
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in buffers:
                buffer.copy_(buffers[name])
    return model


_ALTERNATIVES: Mapping[str, Callable[[Trained, Compared], Alternatives]] = {
    "learning rate": _rates,
    "loss": _losses,
    "gradient": _gradients,
    "norm": _norms,
    "state": _states,
    "parameter": _parameters,
    "buffer": _buffers,
    "evaluation": _evaluations,
}
