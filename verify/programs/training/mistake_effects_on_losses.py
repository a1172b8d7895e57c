"""Predict how mistakes in data, modes and rates change losses, learning rates, buffers and evaluations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from nnscaler.tracing.export.independent_module_copies import copied
from nnscaler.tracing.float64_run import convert_floats
from verify.programs.causes.explain_wrong_values import NARROW
from verify.programs.checks.assemble_logical_tensors import indices_of
from verify.programs.eager_reference import put_state
from verify.programs.training.training_recipe import Batch, rate_at
from verify.programs.training.training_run_pair import Alternatives, ComparedValue, Trained

SINGLE = 64  # parameters that are tried one by one

# -- learning rates and losses ----------------------------------------------------------------------------------------


def of_rate(trained: Trained, found: ComparedValue) -> Alternatives:
    base, step = trained.course.learning_rate, found.step
    batches = trained.course.first_batch(step)
    like = torch.zeros((), dtype=torch.float64)
    if len(trained.course.steps[step]) > 1 or batches > step:
        for done in (batches, trained.course.first_batch(step + 1) - 1):
            yield "the scheduler steps once per batch, and not once per optimizer step", like + base * rate_at(done)
    yield "the scheduler is off by one: it is the rate of the step after", like + base * rate_at(step + 1)
    yield "the scheduler is off by one: it is the rate of the step before", like + base * rate_at(step - 1)
    yield "the scheduler steps twice per optimizer step", like + base * rate_at(2 * step)
    yield "the scheduler never steps", like + base
    for other in range(step + 3):
        yield f"the scheduler is off: it is the rate of step {other}", like + base * rate_at(other)


def of_loss(trained: Trained, found: ComparedValue) -> Alternatives:
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
    yield "it is zero: what is told is not what the stage with the loss has", torch.zeros((), dtype=torch.float64)
    yield from _parts_of(trained, right, number)
    for sentence, gathered in _gathered(trained, right, found.step):
        yield sentence, compute(gathered, batch, number)[0]


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
        every = "all parts read them (the order of data depends on the rank), or the others do not count"
        yield f"it is the loss of the rows of data part {part} alone: {every}", losses[-1]
        share = rows[min(course.carried)].shape[0] / batch[min(course.carried)].shape[0]
        yield f"it is the share of data part {part}: the sum over ranks is missing", losses[-1] * share
    yield "it is the mean of the losses of the data parts, which have other numbers", torch.stack(losses).mean()
    for what, mixed in _misread(trained, batch):
        yield what, trained.model.compute(right, mixed, number)[0]


def _gathered(trained: Trained, right: Mapping[str, Tensor], step: int) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Return parameters that were put together wrongly from their shards."""
    moves: dict[str, list[tuple[str, Tensor]]] = {}
    for name, value in right.items():
        regions = [indices_of(layout) for layout in trained.layouts(name).values()]
        if step:
            moves.setdefault("", []).append((name, trained.eager.before(step - 1)[name]))
        distinct = [r for i, r in enumerate(regions) if not any(_same(r, other) for other in regions[:i])]
        if len(distinct) < 2:
            continue
        turned = value.clone()
        for region, other in zip(distinct, (*distinct[1:], distinct[0]), strict=True):
            if value[region].shape == value[other].shape:
                turned[region] = value[other]
        moves.setdefault("in the wrong order", []).append((name, turned))
        for dim in range(value.dim()):
            later = [r for r in distinct if bool((r[dim] > 0).all())]
            moved = value.clone()
            for region in later:
                moved[(*region[:dim], region[dim] - 1, *region[dim + 1 :])] = value[region]
            if later:
                moves.setdefault("one element off", []).append((name, moved))
    for how, found in moves.items():
        for name, mixed in found[:SINGLE]:
            told = (
                f"the shards of `{name}` are gathered {how}"
                if how
                else f"`{name}` is stale: gathered before the update"
            )
            yield told, {**right, name: mixed}
        if how:
            yield f"the shards of parameters are gathered {how}", {**right, **dict(found)}


def _same(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> bool:
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _misread(trained: Trained, batch: Batch) -> Iterator[tuple[str, Batch]]:
    """Return what batches ranks would have read that order them on their own."""
    course, count = trained.course, trained.parts
    rows = [course.rows(batch, part, count) for part in range(count)]
    for part in range(count):
        same = {n: torch.cat([rows[part][n]] * count) if n in course.carried else t for n, t in batch.items()}
        yield f"all data parts read the rows of part {part}: the order of data depends on the rank", same
    whole = {n: torch.cat([r[n] for r in reversed(rows)]) if n in course.carried else t for n, t in batch.items()}
    yield "the data parts are exchanged: each rank reads the rows of another", whole
    size = max(b[min(course.carried)].shape[0] for b in course.batches())
    here = batch[min(course.carried)].shape[0]
    if here < size:
        filled = {n: t[torch.arange(size) % here] if n in course.carried else t for n, t in batch.items()}
        yield "the short batch is filled up with its own rows, which count twice", filled
        cut = {n: t[: here - here % count] if n in course.carried else t for n, t in batch.items()}
        yield "rows of the short batch that the data parts do not divide are dropped", cut
    for name in sorted(course.carried):
        for shift in range(1, count):
            moved = torch.cat([rows[(p + shift) % count][name] for p in range(count)])
            yield (
                f"the rows of `{name}` and of the other inputs are those of different data parts",
                {**batch, name: moved},
            )


# -- buffers and evaluation -------------------------------------------------------------------------------------------


def of_buffer(trained: Trained, found: ComparedValue) -> Alternatives:
    name = found.name
    initial = dict(trained.model.model.named_buffers()).get(name)
    if initial is not None:
        yield "it never changes: its new values are not kept", initial.detach().double()
    last = trained.course.steps[-1]
    if found.kind == "buffer" and len(last) == 1:
        own = trained.model.buffers_after(trained.eager.before(len(trained.eager.steps) - 1), last[0])
        for text, buffers in own:
            yield (
                f"the program for the last batch's size started from {text}: buffers are not handed over",
                buffers[name],
            )
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


def of_evaluation(trained: Trained, found: ComparedValue) -> Alternatives:
    if found.name:
        yield from of_buffer(trained, found)
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
    model = copied(trained.model.model)
    convert_floats(model, torch.float64)
    put_state(model, buffers)
    return model
