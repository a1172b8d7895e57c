"""A training step of a program beside the step that an expert writes with torch, on the same ranks, model and data.

    python benchmarks/step_against_torch.py                              # two ranks, some minutes on two cores
    python benchmarks/step_against_torch.py --ranks 4 --rows tp zero3-tp
    python benchmarks/step_against_torch.py --device cuda                # over NCCL where each rank has a GPU
    nnscaler profile benchmarks/torch_peers.py --ranks 2 --micro-batches 4 &&
        python benchmarks/step_against_torch.py --rows pp-planned        # what the planner finds with that profile

Both sides live in the same processes and take turns: in each round each makes some steps, which begin together and last
as long as the slowest rank. What is told is the median of the rounds' ratios, ours to torch's, with the quartiles;
`cpu` is the same of the processor time of all ranks. Our side is what `nnscaler train` runs: `Engine.step`, the
optimizer that it makes, `zero_grad`. Both train with torch's fused AdamW, clip nothing, and read the loss as a number.
The losses of the last steps are compared.

Memory and traffic are those of one side alone, in processes and a network of their own. `memory` is the largest peak of
a rank's resident memory while it trains, beyond what it had before the side was made, with an allocator that gives
every tensor pages of its own and returns them at once; on a GPU that of torch's allocator. Our ranks are handed the
program, as all ranks but the first are that `nnscaler train` starts: the first, which compiles, keeps 5 MiB more,
whatever the size of the model. `sent`: bytes over the
loopback device in a step, of all ranks, where a network namespace can be made; ours in one more run, in which ranks do
not read each other's memory, as they do else on one host. Exits with 1 where a row misses its target, or losses differ.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch_peers as peers
from torch import Tensor
from torch_peers import GPT, SIZES, Size, Step, model_of, sample

import nnscaler
from nnscaler.ir.operation_annotations import signatures
from nnscaler.planning.auto_plan_request import AutoPlan, Decided, search_plan
from nnscaler.planning.constraints import sizes
from nnscaler.runtime.communication import cross_memory_attach
from nnscaler.runtime.communication.communicator import Communicator
from nnscaler.runtime.communication.join_process_group import ProcessPlace
from nnscaler.runtime.jobs.job import JobSpecification
from nnscaler.runtime.jobs.launcher import launch
from nnscaler.tracing import trace
from nnscaler.training.compile_on_first_rank import pack_program, unpack_program
from nnscaler.transform.plan import Plan

MICRO_BATCHES = 4
PLANNED, PROFILE, AGAIN = "planned", Path.cwd() / "profile.json", ",recompute=1"
CLOSE = 2e-3  # of two losses, after steps in float32 that sum in other orders
WARM_UP, STEPS = 3, 4  # where memory is measured
HERE = Path(__file__).resolve()


@dataclass(frozen=True)
class Row:
    """One comparison.

    plan    ours, for N ranks; H is half of them
    peer    what torch has for it
    made    the peer's step
    ranks   for which it is made
    time    that ours may take at most, as a ratio; None: nothing is promised
    memory  the same
    micro   micro-batches; schedule: of the pipeline
    """

    plan: str
    peer: str
    made: Callable[..., Step]
    ranks: tuple[int, ...] = (2, 4)
    time: float | None = 1.0
    memory: float | None = 1.0
    micro: int = 1
    schedule: str | None = None
    compiled: bool = False


ROWS = {
    "one": Row("dp=1", "eager", peers.eager, (1,), 1.02),
    "one-compiled": Row("dp=1", "torch.compile", peers.compiled, (1,), 1.02, None, compiled=True),
    "one-again": Row(f"data:dp=1{AGAIN}", "checkpoint, compiled", peers.recomputed, (1,), 1.02, compiled=True),
    "dp": Row("dp=N", "DistributedDataParallel", peers.ddp),
    "dp-compiled": Row("dp=N", "torch.compile of it", peers.compiled_ddp, time=1.02, memory=None, compiled=True),
    "dp-again": Row(f"data:dp=N{AGAIN}", "DDP of that", peers.recomputed_ddp, time=1.02, memory=None, compiled=True),
    "zero1": Row("dp=N,zero=1", "DDP and ZeroRedundancyOptimizer", peers.zero_redundancy, time=None, memory=None),
    "zero3": Row("dp=N,zero=3", "fully_shard", peers.sharded),
    "zero3-compiled": Row(
        "dp=N,zero=3", "fully_shard, compiled", partial(peers.sharded, compiled=True), memory=None, compiled=True
    ),
    "zero2": Row(
        "dp=N,zero=2", "fully_shard, not resharded after forward", partial(peers.sharded, keep=True), (2, 4), None, None
    ),
    "tp-again": Row(
        f"megatron:tp=N{AGAIN}", "parallelize_module, not compiled", peers.recomputed_tensor_parallel, compiled=True
    ),
    "tp": Row("tp=N", "parallelize_module", peers.tensor_parallel, time=0.95),
    "tp-compiled": Row(
        "tp=N", "torch.compile of it", partial(peers.tensor_parallel, compiled=True), (2, 4), 0.95, None, compiled=True
    ),
    "pp": Row("pp=N", "Schedule1F1B", peers.pipeline, time=0.95, micro=MICRO_BATCHES, schedule="1f1b"),
    "pp-balanced": Row(
        "pp=N,balanced=1", "Schedule1F1B", peers.pipeline, time=0.95, micro=MICRO_BATCHES, schedule="1f1b"
    ),
    "1f1b-split-balanced": Row(
        "pp=N,balanced=1", "Schedule1F1B", peers.pipeline, time=0.95, micro=MICRO_BATCHES, schedule="1f1b-split"
    ),
    "zb-h1-few-balanced": Row(
        "pp=N,balanced=1", "Schedule1F1B", peers.pipeline, time=0.95, micro=MICRO_BATCHES, schedule="zb-h1-few"
    ),
    "zb-h1-half-balanced": Row(
        "pp=N,balanced=1", "Schedule1F1B", peers.pipeline, time=0.95, micro=MICRO_BATCHES, schedule="zb-h1-half"
    ),
    "1f1b-split": Row("pp=N", "Schedule1F1B", peers.pipeline, time=0.95, micro=MICRO_BATCHES, schedule="1f1b-split"),
    "zb-h1-few": Row("pp=N", "Schedule1F1B", peers.pipeline, time=0.95, micro=MICRO_BATCHES, schedule="zb-h1-few"),
    "zb-h1-half": Row("pp=N", "Schedule1F1B", peers.pipeline, time=0.95, micro=MICRO_BATCHES, schedule="zb-h1-half"),
    "zb-h1-half:1": Row(
        "pp=N", "Schedule1F1B", peers.pipeline, (4,), 0.95, micro=MICRO_BATCHES, schedule="zb-h1-half:1"
    ),
    "pp-planned": Row(PLANNED, "Schedule1F1B", peers.pipeline, time=0.95, micro=MICRO_BATCHES),
    "zb-h1": Row("pp=N", "Schedule1F1B", peers.pipeline, time=0.95, micro=MICRO_BATCHES, schedule="zb-h1"),
    "interleaved": Row(
        "pp=N", "ScheduleInterleaved1F1B", peers.interleaved, (2,), 0.95, micro=MICRO_BATCHES, schedule="interleaved"
    ),
    "zb-v": Row("pp=N", "ScheduleZBVZeroBubble", peers.zero_bubble_v, (2,), 0.95, micro=MICRO_BATCHES, schedule="zb-v"),
    "dp-tp": Row("dp=H,tp=2", "DDP of parallelize_module", peers.ddp_tensor_parallel, (4,), 0.95),
    "zero3-tp": Row("dp=H,tp=2,zero=3", "fully_shard of parallelize_module", peers.sharded_tensor_parallel, (4,), 0.95),
}  # fmt: skip


# -- in a rank --------------------------------------------------------------------------------------------------------


def program_of(row: Row, size: Size, ranks: int, device: torch.device) -> nnscaler.Program:
    model, batch = model_of(size, device), sample(size, device)
    plan: str | Plan = row.plan.replace("N", str(ranks)).replace("H", str(ranks // 2))
    if row.plan == PLANNED:
        plan = planned(model, batch, ranks, row.micro)
    return nnscaler.parallelize(model, batch, ranks=ranks, plan=plan, micro_batches=row.micro, schedule=row.schedule)


def planned(model: GPT, batch: dict[str, Tensor], ranks: int, micro_batches: int) -> Plan:
    """Return the pipeline that the planner finds within the memory of 1F1B with whole layers, as torch's are."""
    graph = trace(model, batch).graph
    wanted = AutoPlan(constraints=sizes(pp=ranks), profile=PROFILE)
    known, decided = signatures(graph), Decided(micro_batches, schedule="1f1b")
    plain = search_plan(graph, known, ranks, wanted, decided)
    layers = [found.memory for found in plain.search.solved if not found.configuration.within_layers]
    within = replace(wanted, memory=min(layers))
    return search_plan(graph, known, ranks, within, replace(decided, schedule=None)).plan


def our_side(
    row: Row, size: Size, place: ProcessPlace, device: torch.device, packed: str | None = None
) -> Callable[[], float | None]:
    """Return a step of the program. `packed`: the file of it, where another process compiled it."""
    batch = sample(size, device)
    if packed is None:
        program = program_of(row, size, place.world_size, device)
    else:
        program = unpack_program(Path(packed).read_bytes(), model_of(size, device), batch)
    several = place if place.world_size > 1 else None
    engine = nnscaler.start(program, place=several, device=str(device.type), compiled=row.compiled)
    optimizer = engine.optimizer(torch.optim.AdamW, lr=peers.RATE, fused=True)
    part = engine.data_part
    rows = {name: tensor.tensor_split(part.count)[part.index] for name, tensor in batch.items()}

    def step() -> float:
        loss = float(engine.step(rows))
        optimizer.step()
        engine.zero_grad()
        return loss

    return step


def their_side(row: Row, size: Size, place: ProcessPlace, device: torch.device) -> Callable[[], float | None]:
    """Return a step as the peer makes it."""
    made = row.made(model_of(size, device), **({"micro_batches": row.micro} if row.micro > 1 else {}))
    cut = {"dp": place.world_size, "ze": place.world_size}.get(row.plan[:2], 1)
    index = place.rank
    if "tp=2" in row.plan:
        cut, index = place.world_size // 2, place.rank // 2
    batch = sample(size, device)
    rows = [tensor.tensor_split(cut)[index if cut > 1 else 0] for tensor in (batch["ids"], batch["labels"])]
    return lambda: made(*rows)


SIDES = {"ours": our_side, "theirs": their_side}


def measured_times(
    communicator: Communicator, row: str, size: str, rounds: int, steps: int, device: str
) -> dict[str, Any]:
    """Return, by side, of each round the seconds of a step on this rank and its processor time; and the last losses. A
    job's function."""
    place, chosen = _place(communicator, device)
    sides = {name: made(ROWS[row], SIZES[size], place, chosen) for name, made in SIDES.items()}
    everyone = tuple(range(place.world_size))
    found: dict[str, Any] = {name: {"wall": [], "cpu": [], "losses": []} for name in sides}
    for _ in range(WARM_UP):
        for name, step in sides.items():
            found[name]["losses"].append(step())
    gc.collect()
    gc.freeze()
    for number in range(rounds):
        for name in list(sides)[:: 1 if number % 2 else -1]:
            sides[name]()  # what the other side has driven from caches comes back
            _meet(communicator, everyone, chosen)
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(steps):
                loss = sides[name]()
            _wait(chosen)
            found[name]["wall"].append((time.perf_counter() - wall) / steps)
            found[name]["cpu"].append((time.process_time() - cpu) / steps)
            found[name]["losses"].append(loss)
    _meet(communicator, everyone, chosen)
    return found


def measured_memory(
    communicator: Communicator, row: str, size: str, side: str, programs: dict[str, str], device: str
) -> tuple[int, int]:
    """Return the peak of this rank's memory beyond that before the side was made, and the bytes that the loopback
    device carries in a step. `programs`: files of ours by size. A job's function."""
    place, chosen = _place(communicator, device)
    everyone = tuple(range(place.world_size))
    if side == "sockets":
        side, cross_memory_attach.is_possible = "ours", lambda: False
    # what is imported when it is first needed
    our_side(ROWS[row], SIZES["tiny"], place, chosen, programs.get("tiny"))()
    their_side(ROWS[row], SIZES["tiny"], place, chosen)()
    if ROWS[row].compiled:  # as in a new process: what saw one size is compiled for any size when it sees another
        torch.compiler.reset()
    gc.collect()
    base = _resident("VmRSS")
    made = partial(our_side, packed=programs.get(size)) if side == "ours" else their_side
    step = made(ROWS[row], SIZES[size], place, chosen)
    for _ in range(WARM_UP):
        step()
    gc.collect()
    _meet(communicator, everyone, chosen)
    if chosen.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")
    before = _carried()
    for _ in range(STEPS):
        step()
    _meet(communicator, everyone, chosen)
    sent = (_carried() - before) // STEPS
    peak = torch.cuda.max_memory_allocated() if chosen.type == "cuda" else _resident("VmHWM") - base
    return peak, sent


def _place(communicator: Communicator, device: str) -> tuple[ProcessPlace, torch.device]:
    rank, ranks = communicator.rank, communicator.world_size
    here = torch.device("cuda", rank % torch.cuda.device_count()) if device == "cuda" else torch.device("cpu")
    return ProcessPlace(rank, ranks, rank, ranks), here


def _meet(communicator: Communicator, ranks: tuple[int, ...], device: torch.device) -> None:
    _wait(device)
    communicator.barrier(ranks)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def _carried() -> int:
    lines = Path("/proc/self/net/dev").read_text().splitlines()  # of this process's network, unlike /sys
    return next((int(line.split()[9]) for line in lines if line.strip().startswith("lo:")), 0)


# -- the table --------------------------------------------------------------------------------------------------------


def ratio(ours: list[float], theirs: list[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile of the rounds' ratios."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    if len(ratios) < 2:
        return ratios[0], ratios[0], ratios[0]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return low, middle, high


def alone(options: argparse.Namespace, row: str, size: str, side: str) -> tuple[int, int | None]:
    """Return the largest peak of a rank's memory, and what a step sends; None where no namespace could be made."""
    command = [sys.executable, str(HERE), "--alone", row, size, side]
    command += ["--ranks", str(options.ranks), "--device", options.device]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "16384", "MALLOC_TRIM_THRESHOLD_": "0"}
    inside = ["unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    own = subprocess.run([*inside, "true"], check=False, capture_output=True).returncode == 0
    whole = [*(inside if own else []), *command]
    done = subprocess.run(whole, check=False, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    peak, sent = json.loads(done.stdout.splitlines()[-1])
    return peak, sent if own else None


def packed_programs(row: str, size: str, ranks: int, folder: str) -> dict[str, str]:
    """Compile a row's programs here, and return their files by size."""
    files = {}
    for each in ("tiny", size):
        file = Path(folder, each)
        file.write_bytes(pack_program(program_of(ROWS[row], SIZES[each], ranks, torch.device("cpu"))))
        files[each] = str(file)
    return files


def job(options: argparse.Namespace, function: str, ranks: int, **values: Any) -> list[Any]:
    """Run a function of this file on ranks."""
    cuda = options.device == "cuda"
    devices = tuple(f"cuda:{rank}" for rank in range(ranks)) if cuda else ()
    backend = "nccl" if cuda else "gloo"
    values["device"] = options.device
    specification = JobSpecification(f"{HERE}:{function}", ranks, values, backend=backend, devices=devices)
    return launch(specification, timeout=900).results()


def compared(options: argparse.Namespace, name: str, size: str) -> bool:
    """Print one row; return whether it keeps what is promised."""
    row = ROWS[name]
    ranks = 1 if row.ranks == (1,) else options.ranks
    found = job(options, "measured_times", ranks, row=name, size=size, rounds=options.rounds, steps=options.steps)
    walls = {side: [max(r[side]["wall"][i] for r in found) for i in range(options.rounds)] for side in SIDES}
    cpus = {side: [sum(r[side]["cpu"][i] for r in found) for i in range(options.rounds)] for side in SIDES}
    losses = {}
    for side in SIDES:
        told = [[loss for r in found if (loss := r[side]["losses"][i]) is not None] for i in (0, -1)]
        losses[side] = [statistics.fmean(each) for each in told]
    apart = max(abs(a - b) for a, b in zip(losses["ours"], losses["theirs"], strict=True))
    wall, cpu = ratio(walls["ours"], walls["theirs"]), ratio(cpus["ours"], cpus["theirs"])
    text = f"{name:13} {ranks} {size:13} {1e3 * statistics.median(walls['ours']):7.1f}"
    text += f" {1e3 * statistics.median(walls['theirs']):7.1f} ms"
    text += f"  {wall[1]:5.3f} ({wall[0]:5.3f}-{wall[2]:5.3f})  cpu {cpu[1]:5.3f} ({cpu[0]:5.3f}-{cpu[2]:5.3f})"
    memory = None
    if not options.times:
        (ours, _), (theirs, their_bytes) = (alone(options, name, size, side) for side in SIDES)
        our_bytes = alone(options, name, size, "sockets")[1] if ranks > 1 and options.device == "cpu" else None
        memory = ours / theirs
        text += f"  memory {memory:5.3f} ({ours / 2**20:.0f} / {theirs / 2**20:.0f} MiB)"
        if our_bytes is not None and their_bytes:
            text += f"  sent {our_bytes / 2**20:.1f} / {their_bytes / 2**20:.1f} MiB"
    slow = row.time is not None and wall[1] > row.time
    large = row.memory is not None and memory is not None and memory > row.memory
    wrong = apart > CLOSE and not SIZES[size].dropped  # by other draws
    told = [f"above {row.time}"] * slow + ["MEMORY"] * large + [f"LOSSES {apart:.1e} APART"] * wrong
    print(text + f"  {row.peer}" + "".join(f"  {word}" for word in told), flush=True)
    return not (slow or large or wrong)


def main() -> int:
    """Print a row for each comparison and size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, choices=(1, 2, 4))
    parser.add_argument("--rows", nargs="+", choices=list(ROWS))
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["compute", "communication"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=3, help="of each side in a round")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--times", action="store_true", help="measure neither memory nor traffic")
    parser.add_argument("--alone", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        row, size, side = options.alone
        ranks = 1 if ROWS[row].ranks == (1,) else options.ranks
        with tempfile.TemporaryDirectory() as folder:
            programs = {} if options.device == "cuda" else packed_programs(row, size, ranks, folder)
            found = job(options, "measured_memory", ranks, row=row, size=size, side=side, programs=programs)
        print(json.dumps([max(peak for peak, _ in found), found[0][1]]))
        return 0
    rows = options.rows or [n for n, row in ROWS.items() if row.ranks == (1,) or options.ranks in row.ranks]
    rows = [n for n in rows if ROWS[n].plan != PLANNED or PROFILE.exists() or options.rows]
    print(f"row, ranks, size, a step of ours and of torch's, ratio (quartiles); torch {torch.__version__}")
    kept = [compared(options, name, size) for name in rows for size in options.sizes]
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
