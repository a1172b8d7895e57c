"""How much of a step's communication lies under its compute, where links are slow.

    python benchmarks/overlap.py                                   # about a minute on two cores
    python benchmarks/overlap.py --plans dp=2 dp=2,zero=3 --mbps 600 --trace traces
    python benchmarks/overlap.py --plans dp=2 dp=2,zero=2 --compile

Ranks are processes over gloo. What is waited for is there when a link of `--mbps` megabits a second, which carries one
message of a rank after another, would have brought it; that takes no time of a core. Communication counts from when the
link begins to carry something to when it ends, and is hidden while the rank computes: whatever it waits for is not.
`--trace`: a folder for files that chrome://tracing and Perfetto show. Exits with 1 where less than 70 % of a plan's
communication is hidden.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nnscaler
from nnscaler.runtime.communication import cross_memory_attach
from nnscaler.runtime.communication.async_gloo import Arrival, OneRound
from nnscaler.runtime.communication.communicator import CommunicationCall, Communicator
from nnscaler.runtime.communication.gloo import GlooCommunicator
from nnscaler.runtime.jobs.job import JobSpecification
from nnscaler.runtime.jobs.launcher import launch
from nnscaler.runtime.program.program_directory import read_program
from nnscaler.runtime.training.executor import RankExecutor
from nnscaler.runtime.training.executor_settings import ExecutorSettings

WIDTH, LAYERS, HEADS, WORDS, TOKENS, ROWS = 256, 8, 8, 1024, 128, 16
WANTED = 0.7
WARM_UP, STEPS = 2, 3
Span = tuple[float, float, str]  # start, end, what


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        parts = self.qkv(self.first(x)).chunk(3, -1)
        q, k, v = (part.view(batch, tokens, HEADS, width // HEADS).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, tokens, width))
        result: Tensor = x + self.down(F.gelu(self.up(self.second(x))))
        return result


class GPT(nn.Module):
    """A decoder of 7 M parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


class SlowArrival(Arrival):
    """A message over a slow link, which is there at a time."""

    def __init__(self, time_of_arrival: float) -> None:
        super().__init__()
        self._time = time_of_arrival

    def wait(self) -> None:
        time.sleep(max(0.0, self._time - time.monotonic()))


class SlowCommunicator(GlooCommunicator):
    """Messages over a link of some bytes a second, one after another; notes when it carries something, and when the
    rank waits."""

    def __init__(self, rank: int, ranks: int, speed: float) -> None:
        super().__init__(rank, ranks, torch.device("cpu"))
        self.speed = speed
        self.carried: list[Span] = []
        self.waited: list[Span] = []
        self._main, self._lock, self._free = threading.get_ident(), threading.Lock(), 0.0

    def _carries(
        self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], call: CommunicationCall
    ) -> SlowArrival:
        sent, arrived = (
            sum(t.nbytes for rank, t in side.items() if rank != self.rank) for side in (outgoing, incoming)
        )
        with self._lock:
            start = max(time.monotonic(), self._free)
            self._free = start + max(sent, arrived) / self.speed
            self.carried.append((start, self._free, f"{call.kind} {call.context}".strip()))
            return SlowArrival(self._free)

    def _exchange(
        self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], call: CommunicationCall
    ) -> None:
        start, arrival = time.monotonic(), self._carries(outgoing, incoming, call)
        super()._exchange(outgoing, incoming, call)
        arrival.wait()
        if threading.get_ident() == self._main:
            self.waited.append((start, time.monotonic(), f"{call.kind} {call.context}".strip()))

    def _post(self, exchanges: Sequence[OneRound]) -> None:
        super()._post(exchanges)
        for exchange in exchanges:
            exchange.arrivals.append(self._carries(exchange.outgoing, exchange.incoming, exchange.call))

    def _begin(self, call: CommunicationCall, given: list[Tensor], into: list[Tensor]) -> Callable[[], None]:
        finish = super()._begin(call, given, into)

        def wait() -> None:
            start = time.monotonic()
            finish()
            self.waited.append((start, time.monotonic(), f"waits for {call.kind}"))

        return wait


@dataclass(frozen=True)
class Traced:
    """One step of a rank."""

    start: float
    end: float
    carried: tuple[Span, ...]
    waited: tuple[Span, ...]


def traced_steps(communicator: Communicator, program: str, speed: float, compiled: bool) -> list[tuple[Any, ...]]:
    """Run steps over slow links; return the fields of `Traced` of each. A job's function."""
    cross_memory_attach.is_possible = lambda: False  # as between two hosts
    slow = SlowCommunicator(communicator.rank, communicator.world_size, speed)
    directory = read_program(program)
    settings = ExecutorSettings(shapes=directory.manifest.shapes, compiled=compiled)
    executor = RankExecutor(directory.role(slow.rank), slow.rank, slow, directory.state(), settings)
    found = []
    for number in range(WARM_UP + STEPS):
        executor.zero_grad()
        communicator.barrier(tuple(range(communicator.world_size)))
        slow.carried.clear()
        slow.waited.clear()
        start = time.monotonic()
        executor.step(directory.inputs())
        if number >= WARM_UP:
            found.append((start, time.monotonic(), tuple(slow.carried), tuple(slow.waited)))
    slow.close()
    return found


def length(spans: list[tuple[float, float]]) -> float:
    """Return how long at least one of the spans lasts."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def hidden(step: Traced) -> tuple[float, float]:
    """Return the seconds in which links carry something, and those of them in which the rank computes."""
    carried, waited = ([span[:2] for span in side] for side in (step.carried, step.waited))
    both = length(carried) + length(waited) - length([*carried, *waited])
    return length(carried), length(carried) - both


def write_trace(folder: Path, name: str, ranks: list[list[Traced]]) -> None:
    """Write the last step of each rank in the form of Chrome's traces."""
    events: list[dict[str, Any]] = []
    for rank, steps in enumerate(ranks):
        step = steps[-1]
        for lane, spans in (("links", step.carried), ("waits", step.waited)):
            events += [
                {"ph": "X", "pid": rank, "tid": lane, "name": what, "ts": a * 1e6, "dur": (b - a) * 1e6}
                for a, b, what in spans
            ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name.replace(',', '-')}.json").write_text(json.dumps({"traceEvents": events}))


def main() -> int:
    """Print a row for each plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", nargs="+", default=["dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3"])
    parser.add_argument("--mbps", type=float, default=1000.0)
    parser.add_argument("--compile", action="store_true", help="compile stages with torch.compile")
    parser.add_argument("--trace", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    ids = torch.randint(WORDS, (ROWS, TOKENS + 1))
    batch = {"ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
    print(f"{'plan':14} {'step':>9} {'links':>9} {'waits':>9} {'under compute':>14}")
    least = 1.0
    for plan in arguments.plans:
        program = nnscaler.parallelize(GPT(), batch, ranks=2, plan=plan)
        with TemporaryDirectory() as folder:
            program.save(folder)
            values = {"program": folder, "speed": arguments.mbps * 125e3, "compiled": arguments.compile}
            outcome = launch(JobSpecification(f"{Path(__file__).resolve()}:traced_steps", 2, values), timeout=300)
        ranks = [[Traced(*step) for step in steps] for steps in outcome.results()]
        steps = [step for rank in ranks for step in rank]
        parts = sorted(under / carried for carried, under in map(hidden, steps))
        middle = parts[len(parts) // 2]
        took, links, waits = (
            sum(values) / len(steps)
            for values in zip(
                *((s.end - s.start, hidden(s)[0], length([w[:2] for w in s.waited])) for s in steps), strict=True
            )
        )
        print(f"{plan:14} {took:7.3f} s {links:7.3f} s {waits:7.3f} s {middle:13.1%}", flush=True)
        if arguments.trace is not None:
            write_trace(arguments.trace, plan, ranks)
        if plan in ("dp=2", "dp=2,zero=3"):
            least = min(least, middle)
    return 0 if least >= WANTED else 1


if __name__ == "__main__":
    sys.exit(main())
