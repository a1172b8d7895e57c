"""Time steps of programs of one rank, alone and in several processes at once, and of programs of several ranks. A job's
function: see `launcher.launch`."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from math import inf
from statistics import median

import torch

from nnscaler.runtime.communication.benchmark_collectives import later_than
from nnscaler.runtime.communication.communicator import Communicator
from nnscaler.runtime.communication.recording_communicator import RecordingCommunicator
from nnscaler.runtime.program.program_directory import read_program
from nnscaler.runtime.training.executor import RankExecutor
from nnscaler.runtime.training.executor_settings import ExecutorSettings

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
