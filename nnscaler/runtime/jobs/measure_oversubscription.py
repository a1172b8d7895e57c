"""Time steps of a program of one rank, alone and in several processes at once. A job's function: see
`launcher.launch`."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from math import inf
from statistics import median

import torch

from nnscaler.runtime.communication.benchmark_collectives import later_than
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

    The first result has each of `programs` on the first rank alone. The second has the part of these outside of the
    passes of the schedule. The third has the first program in the first `count` ranks at once, for each of `counts`:
    they begin each step together, as ranks do that communicate, and the slowest one says what it took. All are medians,
    of a machine as it is on average, and equal on all ranks. Each turn takes about `seconds`; after `within` of them
    all, no round begins.
    """
    steps = [_TimedSteps(program) for program in programs]
    alone: list[list[float]] = [[] for _ in programs]
    crowded: list[list[float]] = [[] for _ in counts]
    begin = time.perf_counter()
    for _ in range(ROUNDS):
        for step, found in zip(steps, alone, strict=True):
            found += _turn(communicator, step, 1, seconds)
        for count, found in zip(counts, crowded, strict=True):
            found += _turn(communicator, steps[0], count, seconds)
        if later_than(communicator, begin + within):
            break
    everyone = tuple(range(communicator.world_size))
    outside = [median(step.outside) if step.outside else 0.0 for step in steps]
    known = communicator.all_reduce(torch.tensor(outside, dtype=torch.float64), everyone, "max")
    return [median(times) for times in alone], known.tolist(), [median(times) for times in crowded]


class _TimedSteps:
    """A program of one rank, ready to run."""

    def __init__(self, program: str) -> None:
        directory = read_program(program)
        settings = ExecutorSettings(shapes=directory.manifest.shapes)
        self.recording = RecordingCommunicator(CommunicatorBase(0, 1))
        self.executor = RankExecutor(directory.role(0), 0, self.recording, directory.state(), settings)
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


def _turn(communicator: Communicator, steps: _TimedSteps, count: int, seconds: float) -> list[float]:
    """Run steps on the first `count` ranks, which begin each of them together, and return what each took on the slowest
    of them."""
    everyone = tuple(range(communicator.world_size))
    own = everyone[:count]
    found: list[float] = []
    if communicator.rank < count:
        steps.run()
    communicator.barrier(everyone)
    while sum(found) < seconds:
        took = torch.zeros((), dtype=torch.float64)
        if communicator.rank < count:
            communicator.barrier(own)
            took += steps.run_alone() if count == 1 else steps.run()
        found.append(communicator.all_reduce(took, everyone, "max").item())
    return found
