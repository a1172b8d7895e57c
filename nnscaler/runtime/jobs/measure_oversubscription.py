"""Time steps of a program of one rank, alone and in several processes at once. A job's function: see
`launcher.launch`."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from math import inf, nan
from statistics import fmean, median

from nnscaler.runtime.communication.benchmark_collectives import later_than, lower_quartile
from nnscaler.runtime.communication.communicator import Communicator, CommunicatorBase
from nnscaler.runtime.communication.recording import RecordingCommunicator
from nnscaler.runtime.program.program_directory import read_program
from nnscaler.runtime.training.executor import RankExecutor
from nnscaler.runtime.training.executor_settings import ExecutorSettings

_PASS = re.compile(r"[FBIW]\d")  # an instruction, as the executor names it
ROUNDS = 7  # in which everything takes a turn, so that what disturbs the machine for a while disturbs all alike


def time_crowded(
    communicator: Communicator, programs: Sequence[str], counts: Sequence[int], seconds: float, within: float = inf
) -> tuple[list[float], list[float], list[float]]:
    """Time steps, in seconds: alone, and while other ranks compute.

    The first result has each of `programs` on the first rank alone: the lower quartile, since whatever else the machine
    does only adds to it. The second has the part of these outside of the passes of the schedule. The third has the
    first program in the first `count` ranks at once, for each of `counts`, on this rank: the median of the turns'
    means, since a rank that waits for a core takes longer by what others get. nan where this rank did not take part.
    Each turn takes about `seconds`; after `within` of them all, no round begins.
    """
    steps = [_TimedSteps(program) for program in programs]
    alone: list[list[float]] = [[] for _ in programs]
    crowded: list[list[float]] = [[] for _ in counts]
    begin = time.perf_counter()
    for _ in range(ROUNDS):
        for step, found in zip(steps, alone, strict=True):
            found += _turn(communicator, step, 1, seconds)
        for count, means in zip(counts, crowded, strict=True):
            means.append(fmean(_turn(communicator, steps[0], count, seconds)))
        if later_than(communicator, begin + within):
            break
    outside = [lower_quartile(step.outside) if step.outside else nan for step in steps]
    return [lower_quartile(times) for times in alone], outside, [median(means) for means in crowded]


class _TimedSteps:
    """A program of one rank, ready to run."""

    def __init__(self, program: str) -> None:
        directory = read_program(program)
        settings = ExecutorSettings(shapes=directory.manifest.shapes)
        self.recording = RecordingCommunicator(CommunicatorBase(0, 1))
        self.executor = RankExecutor(directory.role(0), 0, self.recording, directory.state(), settings)
        self.batch = directory.inputs()
        self.outside: list[float] = []  # seconds of each step outside of its passes

    def run(self) -> None:
        self.executor.zero_grad()
        self.recording.events.clear()
        start = time.perf_counter()
        self.executor.step(self.batch)
        passes = (e.end - e.start for e in self.recording.events if _PASS.match(e.instruction))
        self.outside.append(time.perf_counter() - start - sum(passes))


def _turn(communicator: Communicator, steps: _TimedSteps, count: int, seconds: float) -> list[float]:
    """Run steps on the first `count` ranks, which go on for a while after they are done, so that none of several has
    the machine for itself."""
    everyone = tuple(range(communicator.world_size))
    found: list[float] = []
    communicator.barrier(everyone)
    if communicator.rank < count:
        steps.run()
        begin = now = time.perf_counter()
        while not found or now < begin + seconds:
            before = now
            steps.run()
            now = time.perf_counter()
            found.append(now - before)
        while count > 1 and time.perf_counter() < now + seconds / 5:
            steps.run()
    communicator.barrier(everyone)
    return found or [nan]
