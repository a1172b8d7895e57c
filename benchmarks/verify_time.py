"""How long a cold `nnscaler verify-plan` takes, process start to verdict.

    python benchmarks/verify_time.py [--model examples/gpt.py] [--ranks 2 8] [--backend gloo simulator]

Prints, for each number of ranks and backend, the seconds of the whole command, its ratio to merely starting Python and
importing torch (the floor of any such command), and when each phase was reported.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from pathlib import Path

PLANS = {2: "tp=2", 8: "dp=2,tp=2,pp=2"}  # of other numbers the plan is searched
ROOT = Path(__file__).resolve().parents[1]
PROGRESS = re.compile(r"^\[\s*([\d.]+) s\] (.*)$", re.MULTILINE)


def timed(command: list[str]) -> tuple[float, subprocess.CompletedProcess[str]]:
    """Seconds that the command took, and what it printed."""
    start = time.perf_counter()
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return time.perf_counter() - start, result


def verify(model: str, ranks: int, backend: str) -> tuple[float, subprocess.CompletedProcess[str]]:
    """One cold run. Exits when it does not verify: a time without a verdict means nothing."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "nnscaler",
        "verify-plan",
        model,
        "--ranks",
        str(ranks),
        "--backend",
        backend,
        "--plan",
        PLANS.get(ranks, "auto"),
    ]
    seconds, result = timed(command)
    if result.returncode != 0:
        sys.exit(f"{' '.join(command)}\nexit {result.returncode}\n{result.stdout}{result.stderr}")
    return seconds, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="examples/gpt.py")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--backend", nargs="+", default=["gloo", "simulator"], choices=["gloo", "simulator", "nccl"])
    options = parser.parse_args()

    floor, _ = timed([sys.executable, "-c", "import torch"])
    print(f"python and torch alone: {floor:.1f} s\n")
    print(f"{'ranks':>5}  {'backend':<10} {'seconds':>8} {'vs torch':>9}   verdict")
    runs = [
        (ranks, backend, *verify(options.model, ranks, backend))
        for ranks in options.ranks
        for backend in options.backend
    ]
    for ranks, backend, seconds, result in runs:
        verdict = result.stdout.strip().splitlines()[-1]
        print(f"{ranks:>5}  {backend:<10} {seconds:>8.1f} {seconds / floor:>9.1f}   {verdict}")
    for ranks, backend, seconds, result in runs:
        print(f"\n{ranks} ranks, {backend}: reported at")
        for at, text in PROGRESS.findall(result.stderr):
            print(f"{float(at):8.1f} s  {text}")
        print(f"{seconds:8.1f} s  end of the process")


if __name__ == "__main__":
    main()
