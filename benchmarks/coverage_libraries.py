"""Models of public libraries, each through `verify-plan`: a table of verdicts by library, and each failure.

    python benchmarks/coverage_libraries.py [NAME | LIBRARY ...] [--plans tp=2 dp=2 pp=2] [--jobs 1] [--json FILE]

Models of `benchmarks/library_models`, with small settings of their own libraries' code, go through the whole of
`verify-plan` on the simulator: proved, run, and compared with the model. What a library gives for a micro-batch and
what it gives for a batch differ where a norm or a loss looks at all rows: such a pipeline is refused, and runs once
more with one micro-batch, as the refusal says; the column `1 micro` counts what is then verified.

None of the libraries is a dependency: those that are missing are named and left out. `library_models/wheels.txt` has
all of them, pinned, for an environment of their own: `pip install --no-deps -r`, for some ask for another torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.append(str(Path(__file__).resolve().parent.parent))

from coverage_report import Case, Told, show, summary, sweep
from library_models import audio, decoders, images, losses, science, sequences, tables
from library_models.rows import ROWS, installed

TABLES = (audio, decoders, images, losses, science, sequences, tables)  # each adds its rows to ROWS
WHEELS = "benchmarks/library_models/wheels.txt"
PLANS = ("tp=2", "dp=2", "pp=2")
ALONE = "pp=2 1 micro-batch"  # the plan's name where it ran so


def cases_of(names: Sequence[str], plans: Sequence[str]) -> list[Case]:
    """Return the rows of the names, models or libraries, under each plan; all that is installed without names."""
    unknown = set(names) - set(ROWS) - {row.library for row in ROWS.values()}
    if unknown:
        raise SystemExit(f"no model or library: {', '.join(sorted(unknown))}")
    wanted = [row for row in ROWS.values() if not names or {row.name, row.library} & set(names)]
    missing = sorted({row.library for row in wanted if not installed(row.library)})
    if missing:
        print(f"not installed, and left out: {', '.join(missing)}")
        print(f"  pip install --no-deps -r {WHEELS}")
    return [
        Case(row.name, row.library, plan, row.build) for row in wanted if row.library not in missing for plan in plans
    ]


def table(told: Sequence[Told]) -> Iterator[str]:
    """Yield a line a library: models, and how many of them are verified under each plan."""
    plans = list(dict.fromkeys(t.plan for t in told))
    yield f"{'library':<32}{'models':>7}" + "".join(f"{plan:>20}" for plan in plans)
    for library in [*dict.fromkeys(t.family for t in told), ""]:
        mine = [t for t in told if t.family == library or not library]
        line = f"{library or 'all':<32}{len({t.name for t in mine}):>7}"
        for plan in plans:
            under = [t for t in mine if t.plan == plan]
            passed, proved = (sum(t.reached == step for t in under) for step in ("verified", "proved"))
            text = f"{passed} of {len(under)}" if under else "-"
            line += f"{text + (f', {proved} not run' if proved else ''):>20}"
        yield line


def again(told: Sequence[Told], cases: Sequence[Case]) -> list[Case]:
    """Return the pipelines that were refused because of their micro-batches, with one."""
    refused = {(t.name, t.plan) for t in told if t.code == "micro_batches_coupled"}
    return [replace(case, micro_batches=1) for case in cases if (case.name, case.plan) in refused]


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="models or libraries; all that are installed without")
    parser.add_argument("--plans", nargs="+", default=PLANS)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--depth", choices=("quick", "default", "deep"), default="quick")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--limit", type=float, default=900.0, help="seconds of a case, waiting for a processor not counted"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(None if arguments is None else list(arguments))
    cases = cases_of(options.names, options.plans)
    sys.path.remove(
        str(Path(__file__).resolve().parent)
    )  # a library that imports `coverage` does not mean the file beside this one
    told = show(sweep(cases, options.jobs, options.depth, options.seed, options.limit), len(cases), options.json)
    repeated = again(told, cases)
    more = show(sweep(repeated, options.jobs, options.depth, options.seed, options.limit), len(repeated), None)
    told += [replace(t, plan=ALONE) for t in more]
    for line in [*table(told), "", *summary(told)]:
        print(line)
    return 0 if all(t.reached == "verified" for t in told) else 1


if __name__ == "__main__":
    raise SystemExit(main())
