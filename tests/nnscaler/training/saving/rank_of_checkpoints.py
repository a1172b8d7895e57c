"""What real ranks do in test_checkpoint_processes.py. Loaded by path in each rank's process."""

from __future__ import annotations

from pathlib import Path

from nnscaler.codegen.compiled_program import Program
from nnscaler.runtime.communication.communicator import Communicator
from nnscaler.training.engine import Engine
from nnscaler.training.program_on_rank import EngineSettings
from nnscaler.training.saving.checkpoints import Checkpoints
from tests.nnscaler.training.saving.resharding import OPTIMIZERS, differences, fill


def save_twice(communicator: Communicator, program: Program, folder: str) -> list[int]:
    """Save in the background, and at once; the steps of which there are checkpoints then."""
    engine = Engine(program, communicator, EngineSettings(device="cpu"))
    optimizer = OPTIMIZERS["adamw"](list(engine.parameters.values()))
    for step, asynchronous in ((1, True), (2, False)):
        fill(engine, optimizer, f"numbers {step}")
        engine.context.step, engine.context.passes = step, 2 * step
        with Checkpoints(folder, every=1, asynchronous=asynchronous) as run:
            run.save(step, engine, optimizer)
    return run.steps()


def load_both(communicator: Communicator, program: Program, folder: str) -> int:
    """Load both; how many tensors were compared."""
    engine = Engine(program, communicator, EngineSettings(device="cpu"))
    total = 0
    for step in (2, 1):
        optimizer = OPTIMIZERS["adamw"](list(engine.parameters.values()))
        assert Checkpoints(Path(folder)).load(engine, optimizer, step=step) == step
        wrong, count = differences(engine, optimizer, f"numbers {step}")
        assert not wrong, wrong
        assert engine.context.passes == 2 * step
        total += count
    return total
