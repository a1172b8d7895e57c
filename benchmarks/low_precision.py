"""Right and wrong programs in bfloat16 and float16: is every right one let through, is every wrong one caught?

    python benchmarks/low_precision.py [--models gpt ...] [--plans dp=2,tp=2 ...] [--seeds 0 1 2] [--bug-seeds 0]

Prints, per model and dtype, the ratio to noise of right programs (each tensor's, and the worst of each program); per
planted bug, how many programs with it were refuted, how many undecided and how many passed, and the worst ratio; and
beside it what a fixed tolerance would have said: torch's defaults for the dtype (every element against the eager model
in the same dtype), and the least bound on the relative error that lets all right programs through, known in hindsight.
A bug that changes nothing in float64 is left out. Exits 1 if a right program is not let through, or a bug that is not
`small` passes in every dtype.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch

from nnscaler.compile import parallelize
from nnscaler.runtime.communication.communicator import CommunicationError, ProgramError
from nnscaler.runtime.communication.simulator import Simulator
from nnscaler.runtime.program.import_role_and_user_files import load_role, load_user_module
from nnscaler.runtime.training.executor import RankExecutor
from nnscaler.runtime.training.executor_settings import ExecutorSettings
from nnscaler.tracing.sample_inputs import SampleInputs, flatten_inputs
from verify.programs.checks.assemble_logical_tensors import by_rank, holdings_of, put_together
from verify.programs.checks.input_and_outcome import Comparison
from verify.programs.eager_reference import Trajectory, logical_state, names_of, randomise_parameters, run_reference
from verify.programs.execution.record_rank_steps import RankResult, role_file
from verify.programs.low_precision.judge_against_noise import measured
from verify.programs.low_precision.noise_statistics import draw, targets_of
from verify.programs.low_precision.run import Calibration, LowPrecisionResult, calibrate, compare
from verify.programs.opened_program import OpenedProgram, open_program
from verify.results.float64_tolerance import Tolerance
from verify.results.verdict import Verdict, merge

from low_precision_bugs import BUGS, Bug, plant  # isort: skip

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
# `.half`: built in float16, so that the model's own float32 islands stay (without them this Llama overflows)
MODELS = ("gpt", "llama_hf", "llama_hf.half", "t5_hf", "vit_hf", "moe", "custom_op")
PLANS = (("dp=2,tp=2", 4, 1), ("dp=3", 3, 1), ("tp=4", 4, 1), ("pp=2", 2, 2))  # plan, ranks, micro-batches
DTYPES = ("bfloat16", "float16")
TORCH = {"bfloat16": (1.6e-2, 1e-5), "float16": (1e-3, 1e-5)}  # rtol, atol of torch.testing.assert_close
STEPS = 2
EXACT = 1e-9


@dataclass(frozen=True)
class Case:
    """A case to verify: a model with its parameters, and a program of it.."""

    model: torch.nn.Module
    sample: SampleInputs
    program: OpenedProgram
    reference: Trajectory
    seed: int

    def progress(self, phase: str, seconds: float, text: str) -> None:
        """Says nothing."""


@dataclass(frozen=True)
class Score:
    """The judgement on one program.

    ratios     error over noise, by tensor
    explained  undecided because the model itself overflows in the dtype
    fixed      torch's fixed tolerance raises an alarm
    greatest   the largest relative error
    draws      draws of noise that were made
    """

    verdict: Verdict
    ratios: tuple[float, ...] = ()
    explained: bool = False
    fixed: bool = True
    greatest: float = float("inf")
    draws: int = 0
    worst: str = ""


@dataclass
class Table:
    right: dict[tuple[str, str], list[Score]] = field(default_factory=lambda: defaultdict(list))
    wrong: dict[tuple[str, str], list[Score]] = field(default_factory=lambda: defaultdict(list))
    missed: int = 0  # programs with a bug, not a small one, that passed in every dtype


@dataclass(frozen=True)
class Shared(Calibration):
    """Further draws are made once for all programs of a case."""

    further: list[Calibration] = field(default_factory=list)

    def with_more_draws(self) -> Calibration:
        if not self.further:
            more = super().with_more_draws()
            self.further.append(Shared(more.subject, more.targets, more.noise))
        return self.further[0]


def calibrated(case: Case, dtype: str) -> Shared:
    found = calibrate(case.seed, case, case.reference, dtype)
    return Shared(found.subject, found.targets, found.noise)


def dtypes_of(name: str) -> tuple[str, ...]:
    return ("float16",) if name.endswith(".half") else DTYPES


def build(name: str, plan: str, ranks: int, micro_batches: int, seed: int, folder: Path) -> Case:
    file, _, half = name.partition(".")
    module = load_user_module(str(EXAMPLES / f"{file}.py"))
    model, inputs = module.build_model(), module.sample_inputs()
    if half:
        model = model.half()
    randomise_parameters(model, seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = parallelize(model, inputs, ranks=ranks, plan=plan, micro_batches=micro_batches)
    sample = flatten_inputs(model, inputs)
    reference = run_reference(model, sample, steps=STEPS)
    return Case(model, sample, open_program(program.save(folder)), reference, seed)


def run(case: Case, precision: str | None, loss_scale: float) -> Comparison:
    """Raises ProgramError or CommunicationError where a rank does."""
    state = {**case.program.state(), **logical_state(case.model)}

    def rank(communicator: object) -> RankResult:
        return train(case, communicator, state, precision, loss_scale)

    results = Simulator(case.program.ranks).run(rank)
    parameters, buffers = holdings_of(load_role(case.program.path / file) for file in case.program.role_files)
    names = names_of(case.model)
    return Comparison(case.reference, tuple(results), parameters, buffers, names, {}, Tolerance(), STEPS)


def train(
    case: Case, communicator: object, state: Mapping[str, torch.Tensor], precision: str | None, scale: float
) -> RankResult:
    module = load_role(role_file(case.program.path, communicator.rank))
    settings = ExecutorSettings(precision=precision, dropout=False, loss_scale=scale)
    executor = RankExecutor(module, communicator.rank, communicator, state, settings)

    def entries(kind: str) -> tuple:
        found = executor.local_tensors(kind)
        return tuple((s, a, n, None if t is None else t.detach().clone()) for s, a, n, t in found)

    losses, gradients = [], []
    for _ in range(STEPS):
        executor.zero_grad()
        losses.append(executor.step(dict(case.sample.tensors)))
        gradients.append(entries("gradient"))
        with torch.no_grad():
            for parameter in {id(p): p for p in executor.parameters.values()}.values():
                if parameter.grad is not None:
                    parameter.add_(parameter.grad.to(parameter.dtype), alpha=-case.reference.learning_rate)
    return RankResult(communicator.rank, tuple(losses), tuple(gradients), entries("parameter"), entries("buffer"))


def score(calibration: Calibration, eager: Trajectory, comparison: Comparison) -> Score:
    result: LowPrecisionResult = compare(calibration, comparison)
    verdict = merge(outcome.check.verdict for outcome in result.outcomes)
    rows = result.rows
    greatest = max((one.error[0] for one in measured(comparison, calibration.targets)), default=0.0)
    worst = max(rows, key=lambda row: row.ratio, default=None)
    text = "" if worst is None else f"{worst.kind} {worst.step} {worst.name} {worst.statistic} {worst.ratio:.3g}"
    ratios = tuple(row.ratio for row in rows)
    codes = {finding.code for outcome in result.outcomes for finding in outcome.findings}
    explained = codes == {"reference_not_finite"}
    return Score(
        verdict, ratios, explained, not all(close(comparison, eager, calibration.dtype)), greatest, result.draws, text
    )


def close(comparison: Comparison, eager: Trajectory, dtype: str) -> Iterator[bool]:
    """Of each tensor, whether torch's default tolerance lets it through."""
    rtol, atol = TORCH[dtype]
    for (kind, step, name), target in targets_of(eager).items():
        if kind == "loss":
            values = [r.losses[step] for r in comparison.results if r.losses[step] is not None]
        else:
            entries = by_rank(comparison.results, kind, step)
            held = (comparison.buffers if kind == "buffer" else comparison.parameters).values()
            values = [put_together(h, entries).value for h in held if h.name == name]
        for value in values:
            same = value is not None and value.shape == target.value.shape
            yield same and torch.allclose(value.double(), target.value.double(), rtol=rtol, atol=atol)


def is_equivalent(case: Case, exact: Comparison) -> bool:
    """Return whether nothing differs in float64."""
    return all(one.error[0] <= EXACT and not one.problem for one in measured(exact, targets_of(case.reference)))


def variants(case: Case, seeds: Sequence[int], folder: Path) -> Iterator[tuple[Bug, Case]]:
    """The case with each bug in it, at one place per seed."""
    sources = {file: (case.program.path / file).read_text() for file in case.program.role_files}
    for number, (bug, seed) in enumerate((bug, seed) for bug in BUGS for seed in seeds):
        changed = plant(bug, sources, seed)
        if changed is None:
            continue
        path = folder / f"bug{number}"
        path.mkdir()
        for file in ("manifest.json", "state.pt"):
            if (case.program.path / file).exists():
                (path / file).write_bytes((case.program.path / file).read_bytes())
        for file, text in changed.items():
            (path / file).write_text(text)
        yield bug, Case(case.model, case.sample, open_program(path), case.reference, case.seed)


def one_case(table: Table, name: str, case: Case, bug_seeds: Sequence[int], folder: Path) -> None:
    calibrations = {dtype: calibrated(case, dtype) for dtype in dtypes_of(name)}
    eager = {dtype: draw(calibration.subject, 0) for dtype, calibration in calibrations.items()}
    for dtype, calibration in calibrations.items():
        found = score(calibration, eager[dtype], run(case, calibration.precision, calibration.subject.loss_scale))
        table.right[name, dtype].append(found)
        if not found.verdict.passes and not found.explained:
            print(f"  FALSE ALARM {name} {case.program.summary} {case.seed} {dtype}: {found.verdict} {found.worst}")
    for bug, wrong in variants(case, bug_seeds, folder):
        try:
            if is_equivalent(case, run(wrong, "float64", 1.0)) and len(bug.dtypes) == len(DTYPES):
                continue
        except (ProgramError, CommunicationError):
            pass
        seen = []
        for dtype in sorted(set(bug.dtypes) & set(calibrations)):
            calibration = calibrations[dtype]
            if calibration.noise.overflowed is not None:
                continue
            try:
                found = score(
                    calibration, eager[dtype], run(wrong, calibration.precision, calibration.subject.loss_scale)
                )
            except (ProgramError, CommunicationError) as error:
                found = Score(Verdict.REFUTED, worst=str(error).splitlines()[0])
            table.wrong[bug.name, dtype].append(found)
            seen.append(found)
        if seen and all(found.verdict.passes for found in seen):
            table.missed += not bug.small
            note = "missed" if bug.small else "MISSED"
            print(f"  {note} {bug.name}: {name} {case.program.summary} {case.seed}: {seen[0].worst}")


def print_right(table: Table) -> None:
    print(
        f"\n{'right programs':12} {'dtype':9} {'programs':>8} {'tensors':>8} {'median':>7} {'99 %':>6} {'max':>6}",
        end="",
    )
    print(f" {'passed':>7} {'undecided':>9} {'refuted':>8} {'draws':>6} {'torch: alarms':>14}")
    for (name, dtype), scores in sorted(table.right.items()):
        overflowed = sum(s.explained for s in scores)
        if overflowed:
            print(f"{name:14} {dtype:9} {overflowed:8} undecided: the model itself overflows")
            continue
        ratios = sorted(r for s in scores for r in s.ratios)
        counts = counted(scores)
        print(
            f"{name:14} {dtype:9} {len(scores):8} {len(ratios):8} {median(ratios):7.2f} "
            f"{ratios[int(0.99 * (len(ratios) - 1))]:6.2f} {ratios[-1]:6.2f} {counts[0]:7} {counts[1]:9} {counts[2]:8} "
            f"{max(s.draws for s in scores):6} {sum(s.fixed for s in scores):14}"
        )


def bound_of(table: Table, dtype: str) -> float:
    scores = [s for (_, d), found in table.right.items() if d == dtype for s in found if not s.explained]
    return max((s.greatest for s in scores), default=0.0)


def print_wrong(table: Table) -> None:
    if not table.wrong:
        return
    bounds = {d: bound_of(table, d) for d in DTYPES}
    print("\nfixed bound in hindsight: " + ", ".join(f"{d} {b:.2g}" for d, b in bounds.items()))
    print(f"{'bug':32} {'dtype':9} {'programs':>8} {'refuted':>8} {'undecided':>9} {'passed':>7} ", end="")
    print(f"{'median ratio':>12} {'least':>7} {'missed by torch':>15} {'by hindsight':>12}")
    totals: dict[tuple[bool, str], list[Score]] = defaultdict(list)
    small = {bug.name: bug.small for bug in BUGS}
    for name, dtype in ((bug.name, dtype) for bug in BUGS for dtype in bug.dtypes):
        scores = table.wrong.get((name, dtype), [])
        totals[small[name], dtype] += scores
        line(f"{name}{' (small)' * small[name]}", dtype, scores, bounds[dtype])
    for (is_small, dtype), scores in totals.items():
        line(f"all {'small' if is_small else 'others'}", dtype, scores, bounds[dtype])


def line(name: str, dtype: str, scores: Sequence[Score], bound: float) -> None:
    if not scores:
        return
    passed, undecided, refuted = counted(scores)
    worst = [max(s.ratios, default=float("inf")) for s in scores]
    torch_missed, hindsight = sum(not s.fixed for s in scores), sum(s.greatest <= bound for s in scores)
    print(
        f"{name:32} {dtype:9} {len(scores):8} {refuted:8} {undecided:9} {passed:7} "
        f"{median(worst):12.3g} {min(worst):7.3g} {torch_missed:15} {hindsight:12}"
    )


def counted(scores: Iterable[Score]) -> tuple[int, int, int]:
    """How many passed, were undecided, were refuted."""
    verdicts = [s.verdict for s in scores]
    refuted = sum(v is Verdict.REFUTED for v in verdicts)
    passed = sum(v.passes for v in verdicts)
    return passed, len(verdicts) - passed - refuted, refuted


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--plans", nargs="*", default=[plan for plan, _, _ in PLANS])
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2], help="of parameters and draws")
    parser.add_argument("--bug-seeds", nargs="*", type=int, default=[0], help="places of each bug; none: no bugs")
    parser.add_argument("--bugs-of", type=int, default=1, metavar="N", help="bugs are planted for the first N seeds")
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = Table()
    started = time.perf_counter()
    for name in options.models:
        for plan, ranks, micro_batches in (row for row in PLANS if row[0] in options.plans):
            for seed in options.seeds:
                with tempfile.TemporaryDirectory() as folder:
                    case = build(name, plan, ranks, micro_batches, seed, Path(folder) / "program")
                    bugs = options.bug_seeds if seed in options.seeds[: options.bugs_of] else []
                    one_case(table, name, case, bugs, Path(folder))
            print(f"{name} {plan}: {time.perf_counter() - started:.0f} s", flush=True)
    print_right(table)
    print_wrong(table)
    alarms = sum(not s.verdict.passes and not s.explained for scores in table.right.values() for s in scores)
    seconds = time.perf_counter() - started
    print(f"\n{alarms} right programs not let through, {table.missed} bugs missed in every dtype, {seconds:.0f} s")
    return 1 if alarms or table.missed else 0


if __name__ == "__main__":
    sys.exit(main())
