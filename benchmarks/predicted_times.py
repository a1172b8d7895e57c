"""How far predicted steps are from measured ones: 30 plans of two models, after `nnscaler profile` of this machine.

    python benchmarks/predicted_times.py                      # some minutes on two cores
    python benchmarks/predicted_times.py --models gpt --rounds 3 --keep FOLDER

The models are a GPT and a Swin transformer at sizes where a step takes 100 ms or more. Plans are for 1, 2 and 4 ranks,
which are processes over gloo: data, tensor and pipeline parallelism, their products, schedules, ZeRO, recomputation and
coshard. For each model `nnscaler profile` runs once; what it wrote is all that predictions are made from. A step is
forward, backward and the sums of gradients, without an optimizer. Programs take turns; a measured time is the median
of the rounds, of the rank that takes longest. `--keep`: a folder for profiles and times.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
RANKS, MICRO_BATCHES = 4, 4  # what is profiled
_HEAD = f"""import sys
import torch
sys.path.append({str(EXAMPLES)!r})
"""
MODELS: Mapping[str, str] = {
    "gpt": """from gpt import GPT, GPTConfig

def build_model():
    torch.manual_seed(0)
    return GPT(GPTConfig(vocabulary=2048, context=128, width=256, heads=8, layers=4))

def sample_inputs():
    text = torch.randint(0, 2048, (8, 129), generator=torch.Generator().manual_seed(0))
    return {"ids": text[:, :-1].contiguous(), "labels": text[:, 1:].contiguous()}
""",
    "swin": """from transformers import SwinConfig, SwinForImageClassification

def build_model():
    torch.manual_seed(0)
    return SwinForImageClassification(SwinConfig(
        image_size=64, patch_size=4, embed_dim=96, depths=[2, 2, 2], num_heads=[4, 8, 16], window_size=4,
        mlp_ratio=4.0, drop_path_rate=0.0, num_labels=32, problem_type="single_label_classification"))

def sample_inputs():
    generator = torch.Generator().manual_seed(0)
    return {"pixel_values": torch.randn(16, 3, 64, 64, generator=generator),
            "labels": torch.randint(0, 32, (16,), generator=generator)}
""",
}


@dataclass(frozen=True)
class Asked:
    """A plan: what the command line says of it."""

    ranks: int
    plan: str
    micro_batches: int = 1
    schedule: str | None = None

    def __str__(self) -> str:
        more = f" m={self.micro_batches}" if self.micro_batches > 1 else ""
        return f"{self.plan}{more}" + (f" {self.schedule}" if self.schedule else "")


PLANS = (
    Asked(1, "dp=1"),
    Asked(1, "dp=1", 4),
    Asked(1, "megatron:dp=1,recompute=1"),
    Asked(2, "dp=2"),
    Asked(2, "tp=2"),
    Asked(2, "dp=2,zero=3"),
    Asked(2, "pp=2", 4, "1f1b"),
    Asked(2, "coshard:dp=2"),
    Asked(4, "dp=4"),
    Asked(4, "tp=4"),
    Asked(4, "dp=2,tp=2"),
    Asked(4, "dp=2,pp=2", 4, "zb-h1"),
    Asked(4, "tp=2,pp=2", 4, "1f1b"),
    Asked(4, "dp=4,zero=1", 2),
    Asked(4, "dp=4,zero=2", 2),
)


# Times of a model's plans.


@dataclass(frozen=True)
class Row:
    """One plan: seconds of a step, predicted and measured."""

    model: str
    plan: str
    ranks: int
    predicted: float
    measured: float


def time_of(model: str, folder: Path, rounds: int) -> tuple[float, list[Row]]:
    """Return the seconds that profiling took, and the times of all plans."""
    from nnscaler.cli.main import main as command
    from nnscaler.compile import WantedPlan, compile_traced, make
    from nnscaler.ir.operation_annotations import signatures
    from nnscaler.model_file import load_model_file
    from nnscaler.performance.predict_step_time import replay
    from nnscaler.planning.cost.measured_profile import load_profile
    from nnscaler.planning.cost.profile_cost import TableCost
    from nnscaler.runtime.jobs.job import JobSpecification
    from nnscaler.runtime.jobs.launcher import ForkServer, launch
    from nnscaler.tracing import trace

    file, profile = folder / f"{model}_sized.py", folder / f"{model}.profile.json"
    file.write_text(_HEAD + MODELS[model])
    start = time.perf_counter()
    options = ["--ranks", str(RANKS), "--micro-batches", str(MICRO_BATCHES), "--out", str(profile)]
    if command(["profile", str(file), *options]) != 0:
        raise SystemExit(f"{model} was not profiled")
    took = time.perf_counter() - start
    cost = TableCost(load_profile(profile))
    loaded = load_model_file(str(file), 0)
    traced = trace(loaded.build(), loaded.inputs)
    predicted, programs = [], []
    for number, asked in enumerate(PLANS):
        wanted = WantedPlan(asked.ranks, asked.plan, asked.schedule, asked.micro_batches)
        plan = make(traced.graph, wanted).plan
        predicted.append(replay(traced.graph, signatures(traced.graph), plan, cost).seconds)
        program = compile_traced(traced, WantedPlan(asked.ranks, plan, micro_batches=None), model={"name": model})
        programs.append(str(program.save(folder / f"{model}.{number}")))
    print(f"{model}: {cost.coverage().describe()}")
    target = f"{Path(__file__).with_name('step_times.py')}:time_turns"
    arguments = {"programs": programs, "ranks": [asked.ranks for asked in PLANS], "rounds": rounds}
    with ForkServer() as server:
        outcome = launch(JobSpecification(target, RANKS, arguments), timeout=1200, server=server)
    if not outcome.ok:
        raise SystemExit(outcome.describe())
    by_program = list(zip(*outcome.results(), strict=True))  # of each, its rounds on each rank
    measured = [median(max(turn) for turn in zip(*rows, strict=True)) for rows in by_program]
    rows = [Row(model, str(a), a.ranks, p, m) for a, p, m in zip(PLANS, predicted, measured, strict=True)]
    return took, rows


def summary(rows: Sequence[Row]) -> tuple[float, float]:
    """Return the median of |predicted / measured - 1| and Spearman's rank correlation."""
    places = [np.argsort(np.argsort(v)) for v in ([r.predicted for r in rows], [r.measured for r in rows])]
    return median(abs(r.predicted / r.measured - 1) for r in rows), float(np.corrcoef(*places)[0, 1])


@contextmanager
def _folder(kept: Path | None) -> Iterator[Path]:
    if kept is None:
        with TemporaryDirectory(prefix="predicted-") as folder:
            yield Path(folder)
    else:
        kept.mkdir(parents=True, exist_ok=True)
        yield kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--keep", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows: list[Row] = []
    profiled: dict[str, float] = {}
    with _folder(options.keep) as folder:
        for model in options.models:
            profiled[model], found = time_of(model, folder, options.rounds)
            rows += found
        values = {"profiled": profiled, "rows": [asdict(row) for row in rows]}
        (folder / "times.json").write_text(json.dumps(values))
    for row in rows:
        ratio = row.predicted / row.measured
        told = f"predicted {row.predicted * 1e3:7.1f} ms, measured {row.measured * 1e3:7.1f} ms"
        print(f"{row.model:<5} {row.ranks} {row.plan:<28} {told}: {ratio:.2f}")
    for name in [*options.models, "all"] if len(options.models) > 1 else options.models:
        own = [row for row in rows if name in (row.model, "all")]
        off, correlation = summary(own)
        told = f"; profiled in {profiled[name]:.0f} s" if name in profiled else ""
        print(f"{name:<5} {len(own)} plans: off by {off:.1%} (median), rank correlation {correlation:.3f}{told}")


if __name__ == "__main__":
    main()
