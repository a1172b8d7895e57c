"""Measure on ranks: collectives, steps that share processors, and the activities of a step."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from statistics import median

import torch

from nnscaler.runtime.communication.communicator import Communicator, Pending
from nnscaler.runtime.communication.recording_communicator import RecordedEvent, RecordingCommunicator
from nnscaler.runtime.program.program_directory import ProgramDirectory, read_program
from nnscaler.runtime.stage_base_class import LOSS
from nnscaler.runtime.training.executor import RankExecutor
from nnscaler.runtime.training.executor_settings import ExecutorSettings

REPEATS = 6
TOGETHER = 3  # calls between two barriers, which ranks leave at different times
ALONE = 12  # turns of computing alone between them: more, since no call keeps ranks together that share cores
LEAST = 1e-6  # seconds of a call that is lost in the noise
SENT = object()  # returned where a call is no more than the begin of it: it ends on another rank
BETWEEN = 4e-3  # seconds of computing before each call, while all ranks compute
_HIDDEN = (1 << 17, 1 << 20)  # bytes of the tensors that are under way while ranks compute


def time_collectives(
    communicator: Communicator, calls: Sequence[tuple[str, int, int, int]], seconds: float = inf
) -> tuple[list[float], dict[int, float]]:
    """Time each call (kind, ranks of a group, bytes, ranks that call at once), in seconds, the same on every rank; and,
    for each number of ranks that call at once, the share of a sum of all of them which computing hides on this rank,
    see `hidden_share`.

    A call is timed as a step sees it, between products of matrices: what a rank that computes and calls in turn takes
    more than one that only computes. Where ranks share cores, one that waits for a message lets another compute, and
    has to wait for a core when the message is there. All calls take turns, in rounds: what disturbs the machine for a
    while disturbs all alike. A turn takes as long as on its slowest rank: one that computes alone may have a core for
    itself while the others wait, and seem to be fast. A time is the lower quartile of its turns, since whatever else
    the machine does only adds to them. Groups of consecutive ranks call at the same time. Bytes are those of the tensor
    whole along the group; of the message, for `send`. All sizes are rounded up to elements of float32. `seconds`: after
    which no round begins, but for the first that counts.

    Where something else holds the cores, the two that are subtracted may have met more or less of it. So a call takes
    no less than the rank that is in it for the shortest time: this one came last, and waited for no other.
    """
    everyone, products = tuple(range(communicator.world_size)), Products(communicator)
    turns: list[tuple[int, int, Callable[[], object]]] = []
    for number, (kind, size, count, at_once) in enumerate(calls):
        first = communicator.rank // size * size
        group = tuple(range(first, first + size))
        takes_part = communicator.rank < at_once
        function = _call(communicator, kind, group, -(-count // 4), number) if takes_part else _nothing
        turns.append((at_once, TOGETHER, function))
    counts = sorted({at_once for at_once, _, _ in turns})
    turns += [(count, ALONE, _nothing) for count in counts]
    taken: list[list[float]] = [[] for _ in turns]
    inside: list[list[float]] = [[] for _ in turns]  # negative, since the shortest one counts
    begin = time.perf_counter()
    for number in range(REPEATS + 1):
        for (at_once, repeats, function), times, called in zip(turns, taken, inside, strict=True):
            communicator.barrier(everyone)
            start, calling = time.perf_counter(), 0.0
            for _ in range(repeats if communicator.rank < at_once else 0):
                products.run()
                before = time.perf_counter()
                ends = function() is not SENT
                calling += time.perf_counter() - before if ends else inf
            times.append((time.perf_counter() - start) / repeats)
            called.append(-calling / repeats if communicator.rank < at_once else -inf)
        if number and later_than(communicator, begin + seconds):
            break
    both = communicator.all_reduce(torch.tensor([taken, inside], dtype=torch.float64), everyone, "max")
    usual = [lower_quartile(times[1:]) for times in both[0].tolist()]
    least = [lower_quartile([-called for called in turn[1:]]) for turn in both[1].tolist()]
    computing = dict(zip(counts, usual[len(calls) :], strict=True))
    hidden = {count: hidden_share(communicator, count, products) for count in counts}
    found = zip(turns[: len(calls)], usual, least, strict=False)
    return [max(LEAST, shortest, seconds - computing[at_once]) for (at_once, _, _), seconds, shortest in found], hidden


class Products:
    """Products of matrices, as many as take about `BETWEEN` seconds while all ranks compute."""

    def __init__(self, communicator: Communicator) -> None:
        everyone = tuple(range(communicator.world_size))
        self._matrix, self.count = torch.full((128, 128), 1e-3), 20
        self.run()
        communicator.barrier(everyone)
        start = time.perf_counter()
        self.run()
        took = torch.tensor([time.perf_counter() - start])
        slowest = float(communicator.all_reduce(took, everyone, "max").item())
        self.count = max(1, round(self.count * BETWEEN / slowest))

    def run(self) -> None:
        for _ in range(self.count):
            torch.mm(self._matrix, self._matrix)


def hidden_share(communicator: Communicator, count: int, products: Products) -> float:
    """Return the share of a collective over the first `count` ranks that takes none of their time where they begin it,
    compute, and wait for it afterwards, as they do with the buckets of gradients and with parameters in shards.

    Products alone, a call after products, and a call under them are timed in turn: what is hidden is what the last
    takes less than the one before. 0 on other ranks.
    """
    everyone, group = tuple(range(communicator.world_size)), tuple(range(count))
    if communicator.rank >= count:
        begins: list[Callable[[], Pending]] = [_no_call] * len(_begun(communicator, everyone))
    else:
        begins = _begun(communicator, group)
    after = under = 0.0
    for begin in begins:
        found: list[list[float]] = [[], [], []]
        for _ in range(REPEATS + 1):
            for way, times in enumerate(found):
                communicator.barrier(everyone)
                if communicator.rank < count:
                    times.append(_timed(begin, products, way))
        if communicator.rank < count:
            nothing, one, other = (lower_quartile(times[1:]) for times in found)
            after, under = after + one - nothing, under + other - nothing
    return min(1.0, max(0.0, 1 - under / after)) if after > 0 else 0.0


def _timed(begin: Callable[[], Pending], products: Products, way: int) -> float:
    """Return the seconds of products alone (0), with a call after them (1), or under them (2)."""
    start = time.perf_counter()
    pending = begin() if way == 2 else None
    products.run()
    products.run()
    if way == 1:
        pending = begin()
    if pending is not None:
        pending.wait()
    return time.perf_counter() - start


def _begun(communicator: Communicator, group: tuple[int, ...]) -> list[Callable[[], Pending]]:
    """Return what begins each kind of call that is waited for later, on tensors of both sizes."""
    found: list[Callable[[], Pending]] = []
    for size in _HIDDEN:
        whole, part = torch.ones(size // 4), torch.ones(size // 4 // len(group))
        parts = [torch.empty_like(part) for _ in group]
        found.append(partial(communicator.start_all_reduce, whole, group))
        found.append(partial(communicator.start_all_gather, part, parts, group))
        found.append(partial(communicator.start_reduce_scatter, [torch.ones_like(part) for _ in group], part, group))
    return found


def _no_call() -> Pending:
    raise AssertionError("a rank that takes no part begins nothing")


def lower_quartile(times: Sequence[float]) -> float:
    return sorted(times)[len(times) // 4]


def later_than(communicator: Communicator, when: float) -> bool:
    """Return on all ranks alike whether a moment of the clock has passed on one of them."""
    passed = torch.tensor([float(time.perf_counter() > when)])
    return bool(communicator.all_reduce(passed, tuple(range(communicator.world_size)), "max").item())


def _nothing() -> None:
    """Take no part in a call."""


def _call(
    communicator: Communicator, kind: str, group: tuple[int, ...], elements: int, number: int
) -> Callable[[], object]:
    size = len(group)
    shard = torch.ones(max(1, elements // size))
    if kind == "all_reduce":
        whole = torch.ones(max(1, elements))
        return lambda: communicator.all_reduce(whole, group)
    if kind == "all_gather":
        return lambda: communicator.all_gather(shard, group)
    if kind == "reduce_scatter":
        return lambda: communicator.reduce_scatter([shard] * size, group)
    if kind == "all_to_all":
        piece = torch.ones(max(1, elements // size**2))
        return lambda: communicator.all_to_all([piece] * size, group)
    assert kind == "send", kind
    message = torch.ones(max(1, elements))
    place = communicator.rank - group[0]

    def pass_on() -> object:
        """Even ranks send to the next; a rank without a partner waits at the barrier."""
        if place % 2 == 1:
            return communicator.recv(message.shape, message.dtype, communicator.rank - 1, ("timed", number))
        if place + 1 < size:
            communicator.send(message, communicator.rank + 1, ("timed", number))
            communicator.finish()
        return SENT

    return pass_on


# Time steps of programs of one rank, alone and in several processes at once, and of programs of several ranks. A job's
# function: see `launcher.launch`.

_PASS = re.compile(r"[FBIW]\d")  # an instruction, as the executor names it
ROUNDS = 7  # in which everything takes a turn, so that what disturbs the machine for a while disturbs all alike
Times = tuple[list[float], list[float], list[float], list[float]]


def time_crowded(
    communicator: Communicator,
    programs: Sequence[str],
    counts: Sequence[int],
    shared: Sequence[tuple[str, int]],
    seconds: float,
    within: float = inf,
) -> Times:
    """Time steps, in seconds: alone, and while other ranks compute.

    The first result has each of `programs` on the first rank alone. The second has the part of these outside of the
    passes of the schedule. The third has the first program in the first `count` ranks at once, for each of `counts`:
    they begin each step together, as ranks do that communicate, and the slowest one says what it took. The fourth has
    each of the `shared` programs, between as many ranks as are given with it. All are medians, of a machine as it is on
    average, and equal on all ranks. Each turn takes about `seconds`; after `within` of them all, no round begins.
    """
    rank = communicator.rank
    # what a rank has no turn in, it does not load
    steps = [
        _TimedSteps(program) if rank < (max(counts, default=1) if i == 0 else 1) else None
        for i, program in enumerate(programs)
    ]
    between = [(_TimedSteps(program, communicator) if rank < count else None, count) for program, count in shared]
    crowd = [(steps[0], count) for count in counts]
    alone: list[list[float]] = [[] for _ in programs]
    crowded: list[list[float]] = [[] for _ in (*crowd, *between)]
    begin = time.perf_counter()
    for _ in range(ROUNDS):
        for step, found in zip(steps, alone, strict=True):
            found += _turn(communicator, step, 1, seconds)
        for (step, count), found in zip((*crowd, *between), crowded, strict=True):
            found += _turn(communicator, step, count, seconds)
        if later_than(communicator, begin + within):
            break
    everyone = tuple(range(communicator.world_size))
    outside = [median(step.outside) if step is not None and step.outside else 0.0 for step in steps]
    known = communicator.all_reduce(torch.tensor(outside, dtype=torch.float64), everyone, "max")
    slowest = [median(times) for times in crowded]
    return [median(times) for times in alone], known.tolist(), slowest[: len(crowd)], slowest[len(crowd) :]


class _TimedSteps:
    """A program ready to run: of one rank, or this rank's role of it, over the `communicator` of all."""

    def __init__(self, program: str, communicator: Communicator | None = None) -> None:
        directory = read_program(program)
        settings = ExecutorSettings(shapes=directory.manifest.shapes)
        self.recording = RecordingCommunicator(Communicator(0, 1))  # of a rank that is alone
        over: Communicator = self.recording if communicator is None else communicator
        self.executor = RankExecutor(directory.role(over.rank), over.rank, over, directory.state(), settings)
        self.batch = directory.inputs()
        self.outside: list[float] = []  # seconds of each timed step outside of its passes, on a rank that is alone

    def run(self) -> float:
        """Run a step; return the seconds that it took."""
        self.executor.zero_grad()
        self.recording.events.clear()
        start = time.perf_counter()
        self.executor.step(self.batch)
        return time.perf_counter() - start

    def run_alone(self) -> float:
        """Run a step as `run` does, and remember what of it was outside of its passes."""
        took = self.run()
        self.outside.append(took - sum(e.end - e.start for e in self.recording.events if _PASS.match(e.instruction)))
        return took


def _turn(communicator: Communicator, steps: _TimedSteps | None, count: int, seconds: float) -> list[float]:
    """Run steps on the first `count` ranks, which begin each of them together, and return what each took on the slowest
    of them. `steps`: None on a rank that is not of these."""
    everyone = tuple(range(communicator.world_size))
    own = everyone[:count]
    found: list[float] = []
    if steps is not None and communicator.rank < count:
        steps.run()
    communicator.barrier(everyone)
    while sum(found) < seconds:
        took = torch.zeros((), dtype=torch.float64)
        if steps is not None and communicator.rank < count:
            communicator.barrier(own)
            took += steps.run_alone() if count == 1 else steps.run()
        found.append(communicator.all_reduce(took, everyone, "max").item())
    return found


# Record one step of a program on this rank. A job's function: see `launcher.launch`.

WARM_UP = 2  # steps: the first ones allocate, and make connections


def record_step(communicator: Communicator, program: str, warm_up: int = WARM_UP) -> list[RecordedEvent]:
    """Run a saved program on its sample batch, and return what this rank did in the step after `warm_up` others.

    All ranks start that step together. Times are by the clock of the machine.
    """
    return recorded_step(read_program(program), communicator, warm_up)


def recorded_step(program: ProgramDirectory, communicator: Communicator, warm_up: int) -> list[RecordedEvent]:
    """Record as `record_step`, of a program that is open."""
    rank, recording = communicator.rank, RecordingCommunicator(communicator)
    settings = ExecutorSettings(
        shapes=program.manifest.shapes, tied=program.manifest.tied, returns=program.manifest.returns
    )
    executor = RankExecutor(program.role(rank), rank, recording, program.state(), settings)
    batch = program.inputs()
    results = program.manifest.returns.results
    run = executor.step if not results or results[0].name == LOSS else executor.forward_only
    for _ in range(warm_up):
        run(batch)
        executor.zero_grad()
    recording.begin()
    run(batch)
    return list(recording.events)
