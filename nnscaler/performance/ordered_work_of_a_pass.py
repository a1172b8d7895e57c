"""List what a device does in a pass in order, in pieces, with the calls of the communication profile that each makes.

Lines follow each other as the program has them; in backward the other way round, as autograd runs them: by the number
of a node, the last one first, and a node has a larger number than those that it leads to. What is computed again comes
before the first gradient that needs it. Messages are received before all that and sent after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby

from nnscaler.communication.communicated_graph import (
    CommunicatedGraph,
    Compute,
    Convert,
    StageMessage,
    StageProgram,
    again_in,
    repeated_in_backward,
)
from nnscaler.communication.communication_volume import call_sites
from nnscaler.communication.parameter_layouts import gathered_again
from nnscaler.communication.stage_communication_calls import CallSite, Part
from nnscaler.instructions import Kind
from nnscaler.performance.predict_step_time import Prediction
from nnscaler.performance.stage_prices import in_turn
from nnscaler.performance.timeline_events import RECEIVED, SENT, Ranks


@dataclass(frozen=True, slots=True)
class PieceCall:
    """The calls that ranks of one device make at one place.

    number      of the place among all of the program
    site        the place
    kind        of the event: of the collective, or the end of a message
    ranks       that call
    start, end  seconds since the piece began
    """

    number: int
    site: CallSite
    kind: str
    ranks: Ranks
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Piece:
    """What a device does without a break. `seconds`: that it takes; `calls`: that are made in it."""

    seconds: float
    calls: tuple[PieceCall, ...] = ()

    def longer(self, times: float) -> Piece:
        """Return the piece as it is where all of it takes so many times longer."""
        calls = tuple(replace(call, start=call.start * times, end=call.end * times) for call in self.calls)
        return Piece(self.seconds * times, calls)


class Pieces:
    """The pieces of a predicted step. Nothing of it changes."""

    def __init__(self, communicated: CommunicatedGraph, prediction: Prediction) -> None:
        self.communicated, self.prediction = communicated, prediction
        self.ranks = communicated.partitioned.devices
        self._own = tuple(map(frozenset, self.ranks))
        self._places: dict[tuple[int, Part, int], list[tuple[int, CallSite]]] = {}
        for number, site in enumerate(call_sites(communicated)):
            stage = site.call.stage
            if site.part == "message" and site.call.direction == "backward":
                assert site.call.to_stage is not None  # its place is that of the tensor whose gradient it is
                stage = site.call.to_stage
            self._places.setdefault((stage, site.part, site.at[0]), []).append((number, site))

    def around(self, device: int, part: Part, stage: int | None = None) -> Piece:
        """Return the calls of parameters at rest, or of the loss, of one part of a step."""
        calls = [c for c in self.prediction.around[device] if c[0].part == part and stage in (None, c[0].call.stage)]
        turns = in_turn(calls, self.ranks[device])
        made = tuple(self._call(device, i, site, start, end) for i, (site, start, end) in enumerate(turns))
        return Piece(max((call.end for call in made), default=0.0), made)

    def prepare(self, device: int, program: StageProgram) -> list[Piece]:
        """Return the pieces of what a device does once for a stage, before its first pass."""
        price = self.prediction.prices[program.stage.index]
        return [self._line(device, program, "prepare", i, seconds) for i, seconds in enumerate(price.prepare)]

    def of_pass(self, device: int, program: StageProgram, kind: Kind) -> list[Piece]:
        """Return the pieces of a pass of one micro-batch through a stage, as one of its devices runs them.

        An update sums its gradients.
        """
        if kind == "U":
            return [self.around(device, "gradient")]
        if kind == "F":
            return self._forward(device, program)
        longer = 1.0 if kind == "B" else self.prediction.halved
        return [piece.longer(longer) for piece in self._backward(device, program, kind)]

    def _forward(self, device: int, program: StageProgram) -> list[Piece]:
        price = self.prediction.prices[program.stage.index]
        arriving = zip(program.receives, price.arriving, strict=True)
        received = [self._end(device, message, "forward", RECEIVED, seconds) for message, seconds in arriving]
        lines = [self._line(device, program, "forward", i, seconds) for i, seconds in enumerate(price.forward)]
        return [*received, *lines, *(self._end(device, message, "forward", SENT, 0.0) for message in program.sends)]

    def _backward(self, device: int, program: StageProgram, kind: Kind) -> Iterator[Piece]:
        """Yield the pieces of B, or of one of its halves: gradients of what does not depend on received tensors are for
        W."""
        price = self.prediction.prices[program.stage.index]
        if kind != "W":
            for message, seconds in zip(program.sends, price.back, strict=True):
                if message.needs_grad:
                    yield self._end(device, message, "backward", RECEIVED, seconds)
        again = _again_before(self.communicated, program)
        for i in reversed(range(len(program.forward))):
            for repeated in again.get(i, ()):
                line = partial(self._line, device, program, "recompute", repeated)
                yield from _half(line, price.again[repeated], price.halves[repeated].again, kind)
            line = partial(self._line, device, program, "backward", i)
            yield from _half(line, price.backward[i], price.halves[i].gradients, kind)
        if kind != "I":
            yield self.around(device, "scatter", program.stage.index)
            yield Piece(price.added)
        if kind != "W":
            for message in program.receives:
                if message.needs_grad:
                    yield self._end(device, message, "backward", SENT, 0.0)

    def _line(self, device: int, program: StageProgram, part: Part, at: int, seconds: float) -> Piece:
        """Return a line; a call that it makes several times in a pass takes an equal part of it each time."""
        found = self._places.get((program.stage.index, part, at), ())
        passes = 1 if part == "prepare" else program.stage.passes
        calls = []
        of_ranks: dict[tuple[Ranks, ...], int] = {}  # the calls of the same ranks are made one after another
        for _, site in found:
            of_ranks[site.call.members] = of_ranks.get(site.call.members, 0) + site.times // passes
        made = dict.fromkeys(of_ranks, 0)
        for number, site in found:
            each, before = seconds / of_ranks[site.call.members], made[site.call.members]
            span = range(before, before + site.times // passes)
            calls += [self._call(device, number, site, i * each, (i + 1) * each) for i in span]
            made[site.call.members] = span.stop
        return Piece(seconds, tuple(call for call in calls if call.ranks))

    def _call(self, device: int, number: int, site: CallSite, start: float, end: float) -> PieceCall:
        own = self._own[device]
        ranks = tuple(sorted({rank for group in site.call.members for rank in group if rank in own}))
        return PieceCall(number, site, site.call.kind, ranks, start, end)

    def _end(self, device: int, message: StageMessage, direction: str, kind: str, seconds: float) -> Piece:
        """Return one end of a message, or of its gradient, on a device."""
        own = self._own[device]
        at = self.communicated.stages[message.source_stage].sends.index(message)
        position = 0 if kind == SENT else 1
        found = (
            (n, site, tuple(sorted(own.intersection(pair[position] for pair in site.call.members))))
            for n, site in self._places.get((message.source_stage, "message", at), ())
            if site.call.direction == direction
        )
        return Piece(seconds, tuple(PieceCall(n, site, kind, ranks, 0.0, seconds) for n, site, ranks in found if ranks))


def _half(line: Callable[[float], Piece], seconds: float, share: float, kind: Kind) -> Iterator[Piece]:
    """Yield what a pass runs of a line of backward that takes so long. `share`: of W in it; calls belong to W where it
    has any."""
    if kind == "B":
        yield line(seconds)
    elif kind == ("W" if share else "I"):
        yield line(seconds * (share or 1.0))
    elif kind == "I":
        yield Piece(seconds * (1.0 - share))


def _again_before(communicated: CommunicatedGraph, program: StageProgram) -> Mapping[int, Sequence[int]]:
    """Return by statement those that are computed again before its gradient is: all of its group, at the last
    operation of it that runs before no conversion which is not made again; and parameters that it reads."""
    graph, statements = communicated.partitioned.graph, program.forward
    repeated = repeated_in_backward(graph, statements)
    found: dict[int, Sequence[int]] = {}
    groups = ((again_in(graph, statements, i), i) for i in range(len(statements)))
    for group, members in groupby(groups, key=lambda entry: entry[0]):
        if group is None:
            continue
        run = [i for _, i in members]
        last = max((i for i in run if i in repeated), default=run[0])
        left = [i for i in run if i > last and isinstance(statements[i], Convert) and i not in repeated]
        end = min(left, default=run[-1] + 1)
        at = max((i for i in run if last <= i < end and isinstance(statements[i], Compute)), default=last)
        found[at] = run
    computed = {i for run in found.values() for i in run}
    for gather, readers in gathered_again(graph, program).items():
        if gather not in computed:
            found[max(readers)] = [*found.get(max(readers), ()), gather]
    return found
