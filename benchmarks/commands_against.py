"""Whether compiling, verifying and planning got slower: commands of this state beside those of another commit.

    python benchmarks/commands_against.py 8a03e6f7 [--rounds 5] [--rows compile verify-plan]

Checks the other commit out into a temporary worktree. In each round each command runs once with either state, in an
order that alternates, in a folder of its own and with no cache. What is told is the median of the rounds' ratios, this
state to the other, with the quartiles: of the processor's time of the command and its processes, which other work on
the machine changes little, and of the wall clock. Both states have this state's model files. Exits with 1 where the
median of a row's processor time is above 1.05.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST = 1.05
ROWS = {
    "start": ["list", "plans"],
    "compile": ["compile", "gpt.py", "--ranks", "8", "--plan", "dp=2,tp=2,pp=2", "--out", "build"],
    "compile-t5": ["compile", "t5_hf.py", "--ranks", "4", "--plan", "dp=2,tp=2", "--out", "build"],
    "static": ["verify-plan", "gpt.py", "--ranks", "8", "--plan", "dp=2,tp=2,pp=2", "--level", "static"],
    "verify-plan": ["verify-plan", "gpt.py", "--ranks", "8", "--plan", "dp=2,tp=2,pp=2", "--backend", "simulator"],
    "gloo": ["verify-plan", "gpt.py", "--ranks", "2", "--plan", "dp=2,zero=3", "--backend", "gloo", "--quick"],
    "verify-op": ["verify-op", "aten.scaled_dot_product_attention.default", "--no-cache"],
    "plan": ["plan", "llama_long.py", "--ranks", "32", "--cluster", "h100x8"],
}  # fmt: skip


def run(state: Path, words: list[str]) -> tuple[float, float]:
    """Return the processor's and the wall clock's seconds of a command of a state."""
    with tempfile.TemporaryDirectory() as folder:
        for file in (ROOT / "examples").glob("*.py"):
            shutil.copy(file, folder)
        environment = {**os.environ, "PYTHONPATH": str(state), "XDG_CACHE_HOME": f"{folder}/cache"}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # else only files that are compiled already start fast
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "nnscaler", *words], check=False,
            cwd=folder, env=environment, capture_output=True, text=True,
        )  # fmt: skip
        wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{state}: nnscaler {' '.join(words)}\n{done.stdout}{done.stderr}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall


def compared(name: str, other: Path, rounds: int) -> bool:
    """Print a row; return whether this state is no slower than is allowed."""
    sides = {"here": ROOT, "there": other}
    found: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
    for number in range(rounds + 1):  # the first one compiles Python's files, and reads them from the disk
        for side in list(sides)[:: 1 if number % 2 else -1]:
            found[side].append(run(sides[side], ROWS[name]))
    text, medians = f"{name:12}", []
    for which, unit in ((0, "cpu"), (1, "wall")):
        here, there = ([seconds[which] for seconds in found[side][1:]] for side in sides)
        low, middle, high = statistics.quantiles([a / b for a, b in zip(here, there, strict=True)], n=4)
        medians.append(middle)
        text += f"  {unit} {statistics.median(here):6.2f} / {statistics.median(there):6.2f} s"
        text += f" {middle:5.3f} ({low:5.3f}-{high:5.3f})"
    print(text + ("" if medians[0] <= MOST else f"  above {MOST}"), flush=True)
    return medians[0] <= MOST


def main() -> int:
    """Print a row for each command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="of the other state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder, "other")
        subprocess.run(["git", "-C", ROOT, "worktree", "add", "-q", "--detach", other, options.commit], check=True)
        try:
            print(f"command, this state / {options.commit}: seconds, median ratio (quartiles)")
            kept = [compared(name, other, options.rounds) for name in options.rows]
        finally:
            subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", other], check=True)
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
