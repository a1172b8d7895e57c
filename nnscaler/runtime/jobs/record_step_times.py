"""Record one step of a program on this rank. A job's function: see `launcher.launch`."""

from __future__ import annotations

from nnscaler.runtime.communication.communicator import Communicator
from nnscaler.runtime.communication.recording_communicator import RecordedEvent, RecordingCommunicator
from nnscaler.runtime.program.program_directory import ProgramDirectory, read_program
from nnscaler.runtime.stage_base_class import LOSS
from nnscaler.runtime.training.executor import RankExecutor
from nnscaler.runtime.training.executor_settings import ExecutorSettings

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
