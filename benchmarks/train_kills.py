"""Kill `nnscaler train examples/gpt.toml` again and again, and compare what it prints with a run that nobody killed.

    python benchmarks/train_kills.py              # 30 kills, about eight minutes on two cores
    python benchmarks/train_kills.py --kills 6 --seed 1

Each kill (SIGKILL) is of one rank, of all processes, or of all of them while a checkpoint is written. The next plan, on
other ranks, goes on in the same folder. Every loss that any of these processes printed is compared with that of the
undisturbed run of one process, in float64: 10 digits must be equal. Exits with 1 where one is not.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STEPS = 30
PLANS = ("dp=2", "tp=2", "pp=2", "dp=2,zero=1", "dp=1", "dp=2,zero=2", "dp=2,zero=3", "dp=3,zero=1")
KINDS = ("rank", "all", "save")
_LOSS = re.compile(r"^step (\d+)  loss (\S+)$", re.MULTILINE)


def command(folder: Path, plan: str) -> list[str]:
    """Return the command line of a run."""
    words = [f"--steps={STEPS}", "--dtype=float64", "--batch_size=12", "--validation.every=0", "--checkpoints.every=2"]
    names = [f"--plan={plan}", f"--checkpoints.folder={folder}", "--schedule.total_steps=600"]
    return [sys.executable, "-m", "nnscaler", "train", str(ROOT / "examples/gpt.toml"), *words, *names]


def losses(text: str) -> dict[int, float]:
    """Return the loss of each step that a run printed."""
    return {int(step): float(loss) for step, loss in _LOSS.findall(text)}


def children(process: int) -> list[int]:
    """Return the processes that a process started."""
    return [
        int(pid) for task in Path(f"/proc/{process}/task").iterdir() for pid in (task / "children").read_text().split()
    ]


def killed(folder: Path, plan: str, kind: str, steps: int) -> tuple[dict[int, float], bool]:
    """Run, and kill after `steps` more steps; return the losses and whether there was a kill before the end."""
    with tempfile.TemporaryFile("w+") as told:
        run = subprocess.Popen(command(folder, plan), stdout=told, stderr=subprocess.STDOUT, env=environment())

        def printed() -> dict[int, float]:
            told.seek(0)
            return losses(told.read())

        try:
            while run.poll() is None and len(printed()) < steps:
                time.sleep(0.02)
            while kind == "save" and run.poll() is None and not list(folder.glob("*.saving/*")):
                pass
            alive = run.poll() is None
            if alive:
                ranks = children(run.pid)
                for pid in ranks[-1:] if kind == "rank" and ranks else [run.pid, *ranks]:
                    os.kill(pid, signal.SIGKILL)
        except (ProcessLookupError, FileNotFoundError):
            alive = False  # it had ended by itself
        code = run.wait()
        found = printed()
        if not alive and code:
            told.seek(0)
            raise SystemExit(f"{plan} ended with {code}\n{told.read()}")
    return found, alive


def environment() -> dict[str, str]:
    """Return an environment in which a rank has one thread."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def main() -> int:
    """Print the counts and the worst difference."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    counts: Counter[str] = Counter()
    worst = 0.0
    with tempfile.TemporaryDirectory() as place:
        right, _ = killed(Path(place) / "right", "dp=1", "none", 10**9)
        assert len(right) == STEPS, right
        run = 0
        while counts.total() < options.kills:
            run += 1
            folder = Path(place) / str(run)
            for attempt in range(1000):
                plan, kind = PLANS[(run + attempt) % len(PLANS)], KINDS[(run + attempt) % len(KINDS)]
                found, hit = killed(folder, plan, kind, draw.randint(1, 6))
                for step, loss in found.items():
                    worst = max(worst, abs(loss - right[step]) / abs(right[step]))
                counts[kind] += hit
                end = f"killed ({kind})" if hit else "ended"
                steps = f"steps {min(found, default=0)}-{max(found, default=0)}"
                print(f"run {run}: {plan:<12} {end:<15} {steps:<12} worst so far {worst:.1e}", flush=True)
                if not hit:
                    break
            assert max(found) == STEPS
    told = ", ".join(f"{count} of {kind}" for kind, count in sorted(counts.items()))
    print(f"{counts.total()} kills ({told}) in {run} runs, all gone on; worst relative difference {worst:.1e}")
    return int(worst > 1e-10)


if __name__ == "__main__":
    sys.exit(main())
