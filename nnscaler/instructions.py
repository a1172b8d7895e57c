"""The instructions of a step: their text, what an order of them must hold, and what each waits for.

The schedules that the compiler writes, the runtime that follows them and the check that reads them in a program's text
share this file, so that none of them can accept an order that another one reads otherwise. It stands on the standard
library alone.

An instruction is a pass of one micro-batch, or of one slice of its tokens, through one stage: forward `F`, and backward
either whole, `B`, or in two halves: `I` computes the gradients of what the stage received, and `W`, any time later,
those of its parameters (Qi et al., Zero Bubble Pipeline Parallelism, 2023). Nothing waits for `W` but the update, so it
fills what would be a bubble.

A step ends with one update of all parameters. A stream (Narayanan et al., PipeDream, 2019) has no end: each batch is
one micro-batch, and `U` applies its gradient to the parameters of its stage, which makes their next version. A forward
reads the newest version, and its backward reads that one again, out of those that the stage keeps. Which versions an
order reads follows from the order alone (`versions_read`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product
from typing import Literal, cast

Kind = Literal["F", "B", "I", "W", "U"]
StageEdge = tuple[int, int]  # producer stage, consumer stage
FORM = "write F<stage>.<micro-batch>, such as F0.1; B for a backward, or I and W for its two halves; U for an update"
SLICES = "with slices, write F<stage>.<micro-batch>.<slice>, such as F0.1.2"

_WORD = re.compile(r"([FBIWU])([0-9]{1,9})((?:\.[0-9]{1,9})+)")


@dataclass(frozen=True, slots=True, order=True)
class Instruction:
    """One pass of one micro-batch through one stage, or the update that its gradient makes there.

    kind    F forward, B backward, I and W the two halves of a backward, U update
    stage   index
    at      its place on each axis in time: the micro-batch, and its slice of tokens where there are slices
    """

    kind: Kind
    stage: int
    at: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{'.'.join(map(str, self.at))}"

    @property
    def micro(self) -> int:
        """Return the micro-batch."""
        return self.at[0]

    def of(self, kind: Kind) -> Instruction:
        """Return the instruction of another kind at the same place."""
        return Instruction(kind, self.stage, self.at)


def read_instruction(word: str) -> Instruction | None:
    """Read what `str` of an instruction writes; None for anything else."""
    match = _WORD.fullmatch(word)
    if match is None:
        return None
    at = tuple(map(int, match[3][1:].split(".")))
    return Instruction(cast(Kind, match[1]), int(match[2]), at)


@dataclass(frozen=True, slots=True)
class StagePasses:
    """The passes of a stage in one step.

    times      size of each axis in time: the micro-batches, and the slices of each where there are some
    backward   "must": there are gradients to compute; "may": there are none, and a backward would do nothing;
               "never": the model has no loss
    staleness  of a stream: the updates by earlier batches that a forward goes without, once so many came before it;
               None: there are no updates in the order
    versions   of its parameters that the stage keeps at a time
    """

    times: tuple[int, ...]
    backward: Literal["must", "may", "never"] = "must"
    staleness: int | None = None
    versions: int = 1

    def places(self) -> Iterator[tuple[int, ...]]:
        """Yield every place in time."""
        return product(*map(range, self.times))

    def has(self, at: tuple[int, ...]) -> bool:
        """Return whether this is a place in time of the stage."""
        return len(at) == len(self.times) and all(a < n for a, n in zip(at, self.times, strict=True))


@dataclass(frozen=True, slots=True)
class OrderMistake:
    """A reason why an order is not one of these stages.

    kind      slices: those of a micro-batch out of their order; word: it is no instruction; foreign: of no stage here;
              unwanted: a backward without a loss; twice, missing, early: an instruction repeated, left out, or before
              what it needs on its own stage; mixed: a backward that is run whole and in halves; stale: a forward that
              reads another version than is declared; overwritten: a backward whose version is no longer kept
    word      the instruction
    message   "runs F0.1 twice": what the order does, without a subject
    """

    kind: Literal["slices", "word", "foreign", "unwanted", "twice", "missing", "early", "mixed", "stale", "overwritten"]
    word: str
    message: str


def check_order(
    words: Sequence[str], stages: Mapping[int, StagePasses]
) -> tuple[tuple[Instruction, ...], tuple[OrderMistake, ...]]:
    """Read an order of one device and check that it is complete: `stages` are those that it has.

    Every stage runs forward once at each place in time. Where it has gradients, it runs backward once, after forward:
    whole, or first I and then W. Slices of a micro-batch run forward in order, since each reads what those before it
    keep, and backward in reverse order, since each adds to the gradients of those before it. In a stream every backward
    has its update; forwards read the versions that are declared, and backwards the same ones; also where the stream
    goes on for as long as any, if the order shows how. Returns the instructions that could be read, each once, and all
    mistakes.
    """
    order, mistakes = _check(words, stages)
    stale = [passes.staleness for passes in stages.values() if passes.staleness is not None]
    if stale and not mistakes and all(shows_its_middle(passes) for passes in stages.values()):
        # its middle repeats itself: when no batch is among the first ones any more, nothing new can happen
        count = max(passes.times[0] for passes in stages.values()) + max(stale) + 2
        longer = {stage: replace(passes, times=(count,)) for stage, passes in stages.items()}
        _, mistakes = _check([str(i) for i in going_on(order, lambda batch: batch < count)], longer)
        mistakes = tuple(replace(m, message=f"{m.message}, where the stream goes on") for m in mistakes)
    return order, mistakes


def _check(
    words: Sequence[str], stages: Mapping[int, StagePasses]
) -> tuple[tuple[Instruction, ...], tuple[OrderMistake, ...]]:
    """Check an order as far as it is written."""
    position: dict[Instruction, int] = {}
    mistakes: list[OrderMistake] = []
    for word in words:
        read = read_instruction(word)
        if read is None:
            mistakes.append(OrderMistake("word", word, f"has {word!r}, which is not an instruction"))
        elif read.stage not in stages or not stages[read.stage].has(read.at):
            mistakes.append(OrderMistake("foreign", word, f"has {word!r}, a stage or micro-batch that is not its own"))
        elif read.kind != "F" and stages[read.stage].backward == "never":
            mistakes.append(OrderMistake("unwanted", word, f"runs {word}, and the model has no loss"))
        elif read.kind == "U" and stages[read.stage].staleness is None:
            mistakes.append(OrderMistake("unwanted", word, f"runs {word}, and the step ends with one update"))
        elif read in position:
            mistakes.append(OrderMistake("twice", word, f"runs {word} twice"))
        else:
            position[read] = len(position)
    for stage, passes in stages.items():
        # so many words leave out one of these places, if there are more
        for _, at in zip(range(len(words) + 1), passes.places(), strict=False):
            mistakes += _mistakes_at(Instruction("F", stage, at), passes, position)
            mistakes += _mistakes_of_slices(Instruction("F", stage, at), passes, position)
    if not mistakes:
        for stage, passes in stages.items():
            mistakes += _version_mistakes(stage, passes, tuple(position))
    return tuple(position), tuple(mistakes)


def _mistakes_at(
    forward: Instruction, passes: StagePasses, position: Mapping[Instruction, int]
) -> Iterator[OrderMistake]:
    """Yield what is wrong with the passes at one place in time."""
    whole, inputs, weights = forward.of("B"), forward.of("I"), forward.of("W")
    found = [i for i in (whole, inputs, weights) if i in position]
    if forward not in position:
        yield OrderMistake("missing", str(forward), f"never runs {forward}")
    if whole in position and len(found) > 1:
        yield OrderMistake("mixed", str(found[1]), f"runs {whole} and {found[1]}: the same gradients twice")
        return
    if not found and passes.backward == "must":
        yield OrderMistake("missing", str(whole), f"never runs {whole}")
    if len(found) == 1 and found[0] != whole:
        other = weights if found[0] == inputs else inputs
        yield OrderMistake("missing", str(other), f"runs {found[0]} and never {other}")
    update = forward.of("U")
    if passes.staleness is not None and found and update not in position:
        yield OrderMistake(
            "missing", str(update), f"never runs {update}: the gradient of {found[-1]} is applied nowhere"
        )
    if not found and update in position:
        yield OrderMistake("unwanted", str(update), f"runs {update} without a backward")
    halves = ((forward, whole), (forward, inputs), (forward, weights), (inputs, weights))
    for earlier, later in (*halves, (whole, update), (inputs, update), (weights, update)):
        if earlier in position and position.get(later, len(position)) < position[earlier]:
            what = "its forward" if earlier == forward else f"{earlier}"
            yield OrderMistake("early", str(later), f"runs {later} before {what}")
            return


_TURN: Mapping[Kind, str] = {
    "F": "forward in order, each after what the ones before it keep",
    "B": "backward in reverse order",
}


def _mistakes_of_slices(
    forward: Instruction, passes: StagePasses, position: Mapping[Instruction, int]
) -> Iterator[OrderMistake]:
    """Yield what is wrong with a slice and the one before it."""
    if len(passes.times) < 2:
        return
    for half in (forward.of("I"), forward.of("W")):
        if half in position:
            message = f"runs {half}: a slice adds to the gradients of those before it once, in a whole backward (B)"
            yield OrderMistake("slices", str(half), message)
            return
    *micro, index = forward.at
    if index == 0:
        return
    for kind in _TURN:
        this = forward.of(kind)
        before = Instruction(this.kind, this.stage, (*micro, index - 1))
        if this in position and before in position and (position[before] < position[this]) != (kind == "F"):
            word = this if kind == "F" else before
            other = before if kind == "F" else this
            yield OrderMistake("slices", str(word), f"runs {word} before {other}: slices run {_TURN[kind]}")
            return


def shows_its_middle(passes: StagePasses) -> bool:
    """Return whether the order of a stream is written for so many batches that the last two forwards are not among the
    first ones, which read what no update has changed: only then is it known how it goes on."""
    return passes.staleness is None or passes.times[0] >= passes.staleness + 2


def batches_written(words: Iterable[str]) -> int:
    """Return for how many batches, or micro-batches, an order is written."""
    return max((read.micro + 1 for word in words if (read := read_instruction(word)) is not None), default=0)


def versions_read(order: Sequence[Instruction], stage: int) -> dict[tuple[int, ...], int]:
    """Return by place in time the version of a stage's parameters that its forward reads: the updates made before."""
    own = [i for i in order if i.stage == stage]
    made = accumulate((i.kind == "U" for i in own), initial=0)
    return {i.at: version for i, version in zip(own, made, strict=False) if i.kind == "F"}


def declared_version(batch: int, staleness: int) -> int:
    """Return the version that a batch of a stream reads where this staleness is declared."""
    return max(0, batch - staleness)


def _version_mistakes(stage: int, passes: StagePasses, order: Sequence[Instruction]) -> Iterator[OrderMistake]:
    """Yield what is wrong with the versions of a stage whose passes are all there, and in order."""
    if passes.staleness is None or not any(i.kind == "U" and i.stage == stage for i in order):
        return  # no stream, or nothing of it is trained here
    read, made = versions_read(order, stage), 0
    for i in (i for i in order if i.stage == stage):
        if i.kind == "U":
            if i.micro != made:
                yield OrderMistake("early", str(i), f"runs {i} as update {made}: updates come in the order of batches")
                return
            made += 1
        elif i.kind == "F":
            right = declared_version(i.micro, passes.staleness)
            if made != right:
                message = (
                    f"runs {i} on version {made} of its parameters, and staleness {passes.staleness} reads {right}"
                )
                yield OrderMistake("stale", str(i), message)
        elif made - read[i.at] >= passes.versions:
            kept = f"{passes.versions} version{'s' * (passes.versions != 1)}"
            message = (
                f"runs {i} when version {read[i.at]}, which {i.of('F')} read, is overwritten: the stage keeps {kept}"
            )
            yield OrderMistake("overwritten", str(i), message)


def going_on(order: Sequence[Instruction], more: Callable[[int], bool]) -> Iterator[Instruction]:
    """Yield the order of one device for a stream of any length: it goes on as it does between the last two forwards
    that are written.

    `more`: whether there is a batch of this number; it is asked in order, before the forward. A stream of fewer batches
    than are written leaves out their passes.
    """
    last = max((i.micro for i in order), default=-1)
    ended = last + 1
    cut = max((n for n, i in enumerate(order) if i.kind == "F" and i.micro == last), default=-1) + 1
    for i in order[:cut]:
        if i.kind == "F" and i.micro < ended and not more(i.micro):
            ended = i.micro
        if i.micro < ended:
            yield i
    before = max((n for n, i in enumerate(order[:cut]) if i.kind == "F" and i.micro == last - 1), default=-1) + 1
    shift = 0
    while before and ended > last and more(last + shift + 1):
        shift += 1
        yield from (_later(i, shift) for i in order[before:cut])
    yield from (_later(i, shift) for i in order[cut:] if i.micro < ended)


def _later(instruction: Instruction, batches: int) -> Instruction:
    return replace(instruction, at=(instruction.micro + batches, *instruction.at[1:]))


def waits_of(
    instruction: Instruction, sources: Iterable[int], readers: Iterable[int], every: Collection[Instruction]
) -> tuple[Instruction, ...]:
    """Return what must be finished before an instruction starts, besides what its device runs before it.

    sources   the stages from which it receives tensors
    readers   the stages that send it gradients
    every     all instructions of all devices: they say which backward is run in halves

    F waits for the tensors, a backward (B or I) for its own forward and for the gradients, W for its own I, U for its
    own B or W.
    """
    if instruction.kind == "F":
        return tuple(Instruction("F", source, instruction.at) for source in sources)
    if instruction.kind == "U":
        whole = instruction.of("B")
        return (whole if whole in every else instruction.of("W"),)
    if instruction.kind == "W":
        return (instruction.of("I"),)
    halves = (Instruction("I", reader, instruction.at) for reader in readers)
    gradients = (half if half in every else half.of("B") for half in halves)
    return (instruction.of("F"), *gradients)


@dataclass(frozen=True, slots=True)
class TotalOrder:
    """The instructions of all devices in an order in which they can run.

    done    in that order; all of them, unless devices wait for ever
    stuck   by device that waits for ever: the instruction that it is at, and one that this waits for
    """

    done: tuple[Instruction, ...]
    stuck: Mapping[int, tuple[Instruction, Instruction]]


def total_order(
    orders: Sequence[Sequence[Instruction]], waits: Callable[[Instruction], Collection[Instruction]]
) -> TotalOrder:
    """Sort all instructions topologically (Kahn 1962): each device in its own order, each after what it waits for.

    An instruction in the orders of several devices is run by all of them together. That the sort ends with all of them
    is the proof that nothing waits for ever.
    """
    holders: dict[Instruction, list[int]] = {}
    for device, order in enumerate(orders):
        for instruction in order:
            holders.setdefault(instruction, []).append(device)
    needed = {instruction: tuple(waits(instruction)) for instruction in holders}
    position = [0] * len(orders)
    done: dict[Instruction, None] = {}

    def at_head(device: int, instruction: Instruction) -> bool:
        return position[device] < len(orders[device]) and orders[device][position[device]] == instruction

    moved = True
    while moved:
        moved = False
        for device, order in enumerate(orders):
            while position[device] < len(order):
                head = order[position[device]]
                if not all(w in done for w in needed[head]) or not all(at_head(d, head) for d in holders[head]):
                    break
                done[head] = None
                for together in holders[head]:
                    position[together] += 1
                moved = True
    stuck: dict[int, tuple[Instruction, Instruction]] = {}
    for device, order in enumerate(orders):
        if position[device] < len(order):
            head = order[position[device]]
            unmet = [w for w in needed[head] if w not in done]
            late = (orders[d][position[d]] for d in holders[head] if not at_head(d, head))
            stuck[device] = (head, unmet[0] if unmet else next(late))
    return TotalOrder(tuple(done), stuck)
