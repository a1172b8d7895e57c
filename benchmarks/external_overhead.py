"""Measure what the simulated backend of torch.distributed costs: processor time of a step over that of its eager parts.

    python benchmarks/external_overhead.py [--steps 5] [--tokens 64]

50 M parameters, 4 ranks, float32, SGD, one thread. The eager parts are the steps that the ranks would take without
communication: the batch's part of a rank, and the whole model where data is divided (times the number of parts); where
only the model is divided, the whole batch once. While ranks run, memory that they free is kept (`kept_memory`), which
makes eager steps faster too: the second ratio is over eager steps with kept memory. Each program is measured in a fresh
process, its eager parts first, and the step counts that was disturbed least by what else the machine does.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from nnscaler.runtime.keep_freed_memory import kept_memory
from verify.child_processes import Done, run_forked
from verify.external.ranks.run_ranks_here_or_in_child import run_ranks

RANKS = 4
WIDTH = 1024
BLOCKS = 6


@dataclass(frozen=True)
class Program:
    """A parallel program.

    name         for the table
    mesh         sizes of the axes dp and tp
    parallelize  the module of a rank
    limit        of the ratio
    """

    name: str
    mesh: tuple[int, int]
    parallelize: Callable[[nn.Sequential, DeviceMesh], nn.Module]
    limit: float


def build_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(BLOCKS))
    )


def tensor_parallel(model: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    for block in model:
        parallelize_module(block, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return model


def data_parallel(model: nn.Sequential, _: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(model)


def sharded(model: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    for block in model:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


def both(model: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    return sharded(tensor_parallel(model, mesh), mesh)  # type: ignore[arg-type]


PROGRAMS = (
    Program("TP 4", (1, 4), tensor_parallel, 1.2),
    Program("DDP 4", (4, 1), data_parallel, 1.4),
    Program("FSDP2 4", (4, 1), sharded, 2.0),
    Program("TP 2 x FSDP2 2", (2, 2), both, 2.0),
)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    optimizer.zero_grad()
    model(batch).pow(2).mean().backward()
    optimizer.step()


def measure(model: nn.Module, batch: Tensor, steps: int, meet: Callable[[], None]) -> tuple[float, float]:
    """Return the least seconds of a step, of the processor and on the wall, after one that is not counted."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    times = []
    for _ in range(steps + 1):
        meet()
        begin = time.process_time(), time.perf_counter()
        step(model, optimizer, batch)
        meet()
        times.append((time.process_time() - begin[0], time.perf_counter() - begin[1]))
    return min(times[1:])


def compare(program: Program, tokens: int, steps: int) -> tuple[float, float, float, float]:
    """Return processor seconds: of a step, of its eager parts, and of these with kept memory; and its wall seconds."""
    parts = program.mesh[0]
    torch.manual_seed(1)
    batch = torch.randn(tokens, WIDTH)
    eager, _ = measure(build_model(), batch.chunk(parts)[0], steps, lambda: None)
    with kept_memory():
        kept, _ = measure(build_model(), batch.chunk(parts)[0], steps, lambda: None)

    def run(_: int) -> tuple[float, float]:
        mesh = init_device_mesh("cpu", program.mesh, mesh_dim_names=("dp", "tp"))
        model = program.parallelize(build_model(), mesh)
        return measure(model, batch.chunk(parts)[mesh["dp"].get_local_rank()], steps, dist.barrier)

    processor, wall = run_ranks(run, RANKS, timeout=600).results[0]
    return processor, eager * parts, kept * parts, wall


def in_child(task: Callable[[], tuple[float, ...]]) -> tuple[float, ...]:
    """Return what the task returns in a forked process."""
    (event,) = run_forked([lambda _: task()], 1, 1000.0)
    assert isinstance(event, Done), event
    return event.result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    count = sum(p.numel() for p in build_model().parameters())
    print(f"{count / 1e6:.1f} M parameters, {options.tokens} tokens, {RANKS} ranks; seconds a step")
    print(f"{'program':16} {'CPU':>6} {'eager':>6} {'kept':>6} {'wall':>6} {'ratio':>6} {'limit':>6} {'to kept':>8}")
    for program in PROGRAMS:
        processor, eager, kept, wall = in_child(partial(compare, program, options.tokens, options.steps))
        figures = f"{processor:6.2f} {eager:6.2f} {kept:6.2f} {wall:6.2f} {processor / eager:6.2f} {program.limit:6.1f}"
        print(f"{program.name:16} {figures} {processor / kept:8.2f}")


if __name__ == "__main__":
    main()
