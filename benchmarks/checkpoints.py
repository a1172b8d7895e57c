"""What checkpoints cost: the stop of a save in the background against one at once, peak memory of a sharded load, and
the time of 288 reshards.

    python benchmarks/checkpoints.py              # about two minutes
    python benchmarks/checkpoints.py --megabytes 800 --folder /mnt/shared

The stop is the time that `save` takes; the first save in the background, which makes room for the copy, is told apart.
Memory is the largest resident size during the load beyond that of before, over the bytes of the rank's own shards: each
rank is a process of its own, which loads a quarter of what one rank saved. Folders are on a disk, not in memory.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import nnscaler
from nnscaler.layout import Sharded
from nnscaler.runtime.communication.communicator import Communicator
from nnscaler.runtime.training.saving.checkpoint import SAVING, RunRecord, begin, model_shards, publish, run_objects
from nnscaler.runtime.training.saving.dcp import Folder, whole, write_part
from nnscaler.runtime.training.saving.rank_tensors_as_boxes import StoredTensor
from nnscaler.training.engine import Engine
from nnscaler.training.program_on_rank import EngineSettings
from nnscaler.training.saving.checkpoints import Checkpoints

WIDTH = 1024
REPEATS = 5


class Model(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.sum()


def stops(megabytes: int, folder: Path) -> None:
    """Print the ratio of the stops."""
    layers = max(2, megabytes * 2**20 // (WIDTH * WIDTH * 4 * 3))  # values and two moments
    program = nnscaler.parallelize(Model(layers), (torch.randn(8, WIDTH),), ranks=1, plan="dp=1", self_check=False)
    engine = Engine(program, Communicator(0, 1), EngineSettings(device="cpu"))
    optimizer = torch.optim.AdamW(list(engine.parameters.values()))
    batch = {program.manifest.inputs[0].name: torch.randn(8, WIDTH)}
    engine.step(batch)
    optimizer.step()
    taken: dict[bool, list[float]] = {False: [], True: []}
    for asynchronous, times in taken.items():
        run = Checkpoints(folder / str(asynchronous), every=1, keep=1, asynchronous=asynchronous)
        for step in range(1, REPEATS + 2):
            began = time.perf_counter()
            run.save(step, engine, optimizer)
            times.append(time.perf_counter() - began)
            run.finish()
    size = sum(p.numel() for p in engine.parameters.values()) * 12 / 2**20
    at_once, behind = statistics.median(taken[False]), statistics.median(taken[True][1:])
    print(f"saved              {size:.0f} MiB")
    print(f"at once            {at_once * 1e3:.0f} ms")
    print(f"in the background  {behind * 1e3:.0f} ms, the first {taken[True][0] * 1e3:.0f} ms")
    print(f"ratio              {behind / at_once:.3f}  (0.10 or less is wanted)")


def shards_of(rank: int, ranks: int, layers: int) -> list[StoredTensor]:
    """The shards of one rank: rows, columns, and heads of a packed matrix, by turns."""
    states = [Sharded(0), Sharded(1), Sharded(0, outer=4)]
    found = []
    for i in range(layers):
        state, shape = states[i % 3], [WIDTH, WIDTH]
        shape[state.dim] //= ranks
        found.append(
            StoredTensor(
                f"layers.{i}.weight",
                (f"layers.{i}.weight",),
                (WIDTH, WIDTH),
                {"tp": state},
                {"tp": ranks},
                {"tp": rank},
                torch.ones(shape),
                "parameter",
                True,
            )
        )
    return found


def load_here(checkpoint: Path, layers: int) -> None:
    """Load a quarter, and print the largest resident size beyond that of before, and the bytes of the shards."""
    opened = Folder(checkpoint)
    opened.read(model_shards(shards_of(0, WIDTH // 4, 1), to_write=False))  # what the first read makes once
    before = _resident()
    Path("/proc/self/clear_refs").write_text("5")  # forget the highest resident size
    entries = shards_of(1, 4, layers)
    opened.read(model_shards(entries, to_write=False))
    own = sum(entry.tensor.nbytes for entry in entries)
    print(_highest() - before, own)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _highest() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def memory(megabytes: int, folder: Path) -> None:
    """Print the ratio for a quarter of a checkpoint that one rank wrote."""
    layers = max(2, megabytes * 2**20 // (WIDTH * WIDTH * 4))
    checkpoint = folder / "memory"
    shards = [whole(("model", f"layers.{i}.weight"), torch.randn(WIDTH, WIDTH)) for i in range(layers)]
    write_part(begin(checkpoint), 0, shards, run_objects(RunRecord(1, 1)))
    publish(checkpoint.with_name(checkpoint.name + SAVING), checkpoint, 1)
    command = [sys.executable, "-P", __file__, "--load", str(checkpoint), "--layers", str(layers)]
    peak, own = map(int, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
    print(f"a rank's shards    {own / 2**20:.0f} MiB, at most {peak / 2**20:.0f} MiB resident while they are read")
    print(f"ratio              {peak / own:.3f}  (1.3 or less is wanted)")


def reshards() -> None:
    """Time the reshards of tests/nnscaler/training, bit by bit."""
    sys.path.append(str(Path(__file__).parents[1]))
    from tests.nnscaler.training.saving.resharding import PLANS, compiled
    from tests.nnscaler.training.saving.test_resharding import reshard

    for plan in PLANS:
        compiled(plan)
    began, processor = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        count = reshard(tuple(PLANS), Path(folder))
    seconds, used = time.perf_counter() - began, time.process_time() - processor
    print(f"{count} reshards       {seconds:.0f} s, {used:.0f} s of a processor  (90 s or less is wanted)")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--megabytes", type=int, default=400, help="of model and optimizer state")
    parser.add_argument("--folder", help="on the disk to be measured (default: the temporary folder)")
    parser.add_argument("--load", help=argparse.SUPPRESS)
    parser.add_argument("--layers", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.load:
        load_here(Path(options.load), options.layers)
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        stops(options.megabytes, Path(folder))
        memory(options.megabytes, Path(folder))
    reshards()


if __name__ == "__main__":
    main()
