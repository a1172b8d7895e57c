"""How often the first finding names the line that was edited, and why: `python benchmarks/localise.py`.

Bugs are planted one by one in generated programs, then two at once. The baseline names the first tensor that differs.
"""

from __future__ import annotations

import sys
import tempfile
import time
from itertools import combinations
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.verify.localise.planted import Bench, Planted, Score, programs, score
from tests.verify.localise.planted_gradients import BACKWARD
from tests.verify.localise.planted_values import FORWARD
from verify.programs.localise import first_divergent, localise_all

EVERY = (*FORWARD, *BACKWARD)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        made = {name: make() for name, make in programs(work).items()}
        totals: dict[str, list[Score]] = {"baseline": [], "taught": []}
        seconds = {"baseline": 0.0, "taught": 0.0}
        for number, bug in enumerate(EVERY):
            row = []
            for name, localiser in (("baseline", first_divergent.first_difference), ("taught", localise_all)):
                started = time.perf_counter()
                found = score(made[bug.program], [bug], work / f"{name}_{number}", localiser)
                seconds[name] += time.perf_counter() - started
                totals[name].append(found)
                row.append(f"{name}: line {_mark(found.line)} cause {_mark(found.cause)}")
            print(f"{bug.program:10} {bug.name:45} {'   '.join(row)}", flush=True)
        for name, scores in totals.items():
            count = len(scores)
            right = f"line named right: {sum(s.line for s in scores)} of {count}"
            causes = f"cause right: {sum(s.cause for s in scores)} of {count}"
            print(f"{name}: {right}, {causes}, {seconds[name] / count:.2f} s each")
        _two_at_once(made, work)
    return 0


def _two_at_once(made: dict[str, Bench], work: Path) -> None:
    """Every fifth pair of bugs that do not touch the same line."""
    pairs = [pair for pair in combinations(EVERY, 2) if pair[0].program == pair[1].program == "sharded"][::17]
    both = count = 0
    for number, pair in enumerate(pairs):
        if not _apart(*pair):
            continue
        found = score(made["sharded"], pair, work / f"pair_{number}", localise_all)
        named, edited = found.edited
        count += 1
        both += named == min(edited, 5)
    print(f"two bugs at once: every edited line named in {both} of {count} pairs")


def _apart(one: Planted, other: Planted) -> bool:
    return one.old != other.old and not (one.line and one.line == other.line)


def _mark(right: bool) -> str:
    return "yes" if right else "NO "


if __name__ == "__main__":
    sys.exit(main())
