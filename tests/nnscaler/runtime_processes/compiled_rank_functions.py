"""Functions of ranks that compile, in a file of their own: what they import takes longer than most jobs of tests."""

from __future__ import annotations

import os

import torch

import nnscaler
from nnscaler.runtime.communication.communicator import Communicator
from nnscaler.runtime.program.import_role_and_user_files import load_user_module
from nnscaler.training.engine import Engine, EngineSettings
from tests.timings import Trained, program_of, trained_rank


def train_compiled(communicator: Communicator, plan: str, cache: str) -> tuple[dict[str, int], Trained]:
    """Returns how often torch found a graph of another process, and what was trained."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    found = trained_rank(program_of(plan), communicator, compiled=True)
    return dict(torch._dynamo.utils.counters["aot_autograd"]), found


def gradients_of_model(communicator: Communicator, file: str, cache: str) -> tuple[int, list[float], list[float]]:
    """Returns how many graphs of another process torch found, and the gradients of a user's model, compiled and not."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    batch, found = {"x": torch.arange(6.0).reshape(2, 3)}, []
    program = nnscaler.parallelize(load_user_module(file).Model(), batch, ranks=1, plan="dp=1", self_check=False)
    for compiled in (True, False):
        engine = Engine(program, communicator, EngineSettings(device="cpu", compiled=compiled))
        engine.step(batch)
        (weight,) = engine.parameters.values()
        assert weight.grad is not None
        found.append(weight.grad.flatten().tolist())
    return torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"], found[0], found[1]
