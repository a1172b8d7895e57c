"""How long training steps of programs take between the ranks of a job. A job's function: see `launcher.launch`."""

from __future__ import annotations

import time
from collections.abc import Sequence

from nnscaler.runtime.communication.communicator import Communicator
from nnscaler.runtime.program.program_directory import read_program
from nnscaler.runtime.training.executor import RankExecutor
from nnscaler.runtime.training.executor_settings import ExecutorSettings

AT_ONCE = 5  # steps of one program before the next one's turn
IN_TURN = 3  # steps of a turn, as training goes on with one program


def time_steps(communicator: Communicator, programs: Sequence[str], steps: int) -> list[list[float]]:
    """Seconds of each of `steps` steps of each program on the sample batch. Programs take turns, so that what slows the
    machine for a while slows all of them, and the first step of a turn is not counted. Ranks begin each step together;
    the time of a step is that of the rank that takes longest."""
    everyone = tuple(range(communicator.world_size))
    prepared = []
    for program in programs:
        directory = read_program(program)
        role = directory.role(communicator.rank)
        settings = ExecutorSettings(shapes=directory.manifest.shapes)
        executor = RankExecutor(role, communicator.rank, communicator, directory.state(), settings)
        prepared.append((executor, directory.inputs()))
    taken: list[list[float]] = [[] for _ in programs]
    while len(taken[-1]) < steps:
        for (executor, batch), times in zip(prepared, taken, strict=True):
            for number in range(min(AT_ONCE, steps - len(times)) + 1):
                executor.zero_grad()
                communicator.barrier(everyone)
                start = time.perf_counter()
                executor.step(batch)
                if number:
                    times.append(time.perf_counter() - start)
    communicator.barrier(everyone)
    return taken


def time_turns(
    communicator: Communicator, programs: Sequence[str], ranks: Sequence[int], rounds: int
) -> list[list[float]]:
    """Return the seconds of a step of each program on this rank, in each of `rounds` in which all take a turn.

    `ranks`: of each program; others wait. A turn is a step that is not counted and IN_TURN that are. A rank that does
    not take part takes no time.
    """
    prepared = []
    for program, count in zip(programs, ranks, strict=True):
        directory = read_program(program)
        if communicator.rank < count:
            settings = ExecutorSettings(shapes=directory.manifest.shapes)
            state, rank = directory.state(), communicator.rank
            executor = RankExecutor(directory.role(rank), rank, communicator, state, settings)
            prepared.append((executor, directory.inputs()))
        else:
            prepared.append(None)
    everyone = tuple(range(communicator.world_size))
    taken: list[list[float]] = [[] for _ in programs]
    for number in range(rounds + 1):
        for one, count, times in zip(prepared, ranks, taken, strict=True):
            communicator.barrier(everyone)
            turn = [0.0] * IN_TURN
            if one is not None:
                executor, batch = one
                for step in range(-1, IN_TURN):
                    executor.zero_grad()
                    communicator.barrier(tuple(range(count)))
                    start = time.perf_counter()
                    executor.step(batch)
                    if step >= 0:
                        turn[step] = time.perf_counter() - start
            if number:
                times += turn
    communicator.barrier(everyone)
    return taken
