"""What training by the engine costs and is worth: prints ratios against a baseline of the same run.

    python benchmarks/training.py overhead     # Engine.step beside RankExecutor.step, one rank and two
    python benchmarks/training.py precision    # 300 steps: float32, bfloat16 over masters, bfloat16 alone

`overhead`: medians of steps that alternate, so that a loaded machine slows both. `precision`: the mean loss of the last
50 steps beside that of a float32 run with another order of the data, whose distance is the noise.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import nnscaler
from nnscaler.model_file import import_user_file
from nnscaler.runtime.communication.simulator import Simulator
from nnscaler.runtime.program.import_role_and_user_files import load_role
from nnscaler.runtime.training.executor import RankExecutor
from nnscaler.runtime.training.executor_settings import ExecutorSettings
from nnscaler.training.engine import Engine
from nnscaler.training.program_on_rank import EngineSettings
from nnscaler.training.programs_by_batch_size import folder_of

ROOT = Path(__file__).resolve().parents[1]
GPT = import_user_file(ROOT / "examples" / "gpt.py")
REPEATS = 60
STEPS = 300


def overhead() -> None:
    """Print the time of an engine's step, as a ratio to that of its executor."""
    config = GPT.GPTConfig(vocabulary=512, context=64, width=192, heads=4, layers=4)
    for plan, ranks in (("dp=1", 1), ("dp=2", 2), ("tp=2", 2)):
        torch.manual_seed(0)
        program = nnscaler.parallelize(GPT.GPT(config), _tokens(config, 16, 0), ranks=ranks, plan=plan)
        batch = _tokens(config, 16, 1)

        def work(communicator: Any, program: Any = program, batch: Any = batch) -> list[float]:
            engine = Engine(program, communicator, EngineSettings(device="cpu"))
            role = load_role(folder_of(program.sources, None) / program.manifest.role_of(engine.rank).file)
            settings = ExecutorSettings(shapes=program.manifest.shapes)
            bare = RankExecutor(role, engine.rank, engine.communicator, program.state, settings)
            part = {name: t.tensor_split(engine.data_part.count)[engine.data_part.index] for name, t in batch.items()}
            return _alternating(lambda: engine.step(part), lambda: bare.step(batch), engine.zero_grad, bare.zero_grad)

        first = [work(None)] if ranks == 1 else Simulator(ranks).run(work)
        engine, bare = first[0]
        print(f"{plan:8} engine {engine * 1e3:7.2f} ms   executor {bare * 1e3:7.2f} ms   ratio {engine / bare:.3f}")


def _alternating(a: Callable[[], Any], b: Callable[[], Any], clear_a: Callable[[], Any], clear_b: Any) -> list[float]:
    """Return the median seconds of two steps that take turns."""
    times: list[list[float]] = [[], []]
    for repeat in range(REPEATS):
        for i, (step, clear) in enumerate(((a, clear_a), (b, clear_b))):
            clear()
            start = time.perf_counter()
            step()
            if repeat >= 5:
                times[i].append(time.perf_counter() - start)
    return [statistics.median(found) for found in times]


def precision() -> None:
    """Print the loss that runs in several precisions reach."""
    runs = {
        "float32, seed 0": _trained(None, 0, nn.Module.float),
        "float32, seed 1": _trained(None, 1, nn.Module.float),
        "bfloat16 over float32 masters, seed 0": _trained("bfloat16", 0, nn.Module.float),
        "bfloat16 without masters, seed 0": _trained("bfloat16", 0, nn.Module.bfloat16),
    }
    base = runs["float32, seed 0"]
    noise = abs(runs["float32, seed 1"] - base)
    for name, loss in runs.items():
        print(f"{name:38} loss {loss:.4f}   distance / noise {abs(loss - base) / noise:.2f}")


def _trained(precision: str | None, seed: int, cast: Callable[[nn.Module], nn.Module]) -> float:
    """Return the mean loss of the last 50 of STEPS steps on the text of the documents."""
    text = torch.tensor(
        list("".join(f.read_text() for f in sorted((ROOT / "docs").glob("*.md"))).encode("ascii", "ignore"))
    )
    config = GPT.GPTConfig(vocabulary=128, context=32, width=64, heads=4, layers=3)
    torch.manual_seed(0)
    model = cast(GPT.GPT(config))
    generator = torch.Generator().manual_seed(seed)

    def draw() -> dict[str, Tensor]:
        starts = torch.randint(0, len(text) - 33, (32,), generator=generator)
        rows = text[starts[:, None] + torch.arange(33)]
        return {"ids": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}

    program = nnscaler.parallelize(model, draw(), ranks=1, plan="dp=1", precision=precision)
    engine = Engine(program, None, EngineSettings(device="cpu"))
    optimizer = torch.optim.AdamW(engine.parameters.values(), lr=3e-4)
    losses = []
    for _ in range(STEPS):
        losses.append(float(engine.step(draw())))
        optimizer.step()
        optimizer.zero_grad()
    return statistics.fmean(losses[-50:])


def _tokens(config: Any, rows: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(0, config.vocabulary, (rows, config.context + 1), generator=generator)
    return {"ids": text[:, :-1].contiguous(), "labels": text[:, 1:].contiguous()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"overhead": overhead, "precision": precision}[sys.argv[1]]()
