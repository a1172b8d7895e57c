"""How long a training step of a program takes between the ranks of a job. A job's function: see `launcher.launch`."""

from __future__ import annotations

import time

from nnscaler.runtime.communicator import Communicator
from nnscaler.runtime.executor import RankExecutor
from nnscaler.runtime.program_directory import read_program


def time_steps(communicator: Communicator, program: str, steps: int) -> list[float]:
    """Seconds of each of `steps` steps on the sample batch, after one that is not counted. Ranks begin each together;
    the time of a step is that of the rank that takes longest."""
    directory = read_program(program)
    executor = RankExecutor(
        directory.role(communicator.rank), communicator.rank, communicator, directory.state(), shapes=directory.shapes
    )
    batch = directory.inputs()
    everyone = tuple(range(communicator.world_size))
    taken = []
    for _ in range(steps + 1):
        executor.zero_grad()
        communicator.barrier(everyone)
        start = time.perf_counter()
        executor.step(batch)
        taken.append(time.perf_counter() - start)
    communicator.barrier(everyone)
    return taken[1:]
