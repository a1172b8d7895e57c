"""Compare a user's operators with what their files alone make of them, as a rank imports these and nothing else.

What a model's file changes in another (`my_ops.SCALE = 3`, `my_ops.configure(...)`) is there in this process: in the
reference, the proofs and the ranks that run here. A rank that is launched has the operators as their files alone make
them. So a child forgets the user's modules, imports the operators' files anew, and runs each operator as it was and as
it is then, on one small call of each form. What the model's file changes in torch itself stays in the child: not seen.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path

import torch

from op_registry.registry import default_registry
from op_registry.spec import OperatorSpec

from nnscaler.ir.graph import Graph
from nnscaler.ir.operation_annotations import signatures
from nnscaler.manifest import Manifest
from nnscaler.runtime.communication.communicator import ProgramError
from nnscaler.runtime.program.user_operators import locate
from nnscaler.runtime.tensor_bits_and_differences import FLOAT64_BOUND, difference, family_scale
from verify import child_processes
from verify.child_processes import Died, TimedOut
from verify.evidence.inputs.concrete_call import ConcreteCall, function_of
from verify.evidence.inputs.import_user_code import end_where_loaded_anew, load_anew
from verify.evidence.oracle.run_whole_operator import WholeRun, run_whole
from verify.evidence.verify_op_options import Kind
from verify.programs.checks.input_and_outcome import CheckOutcome, outcome_of
from verify.programs.lemmas.small_call import represent
from verify.programs.lemmas.stand_in_calls_and_tensors import Unrepresented
from verify.results.finding import Finding
from verify.results.report import Check
from verify.results.verdict import Verdict

NAME = "operators loaded alone"
_KINDS: tuple[Kind, ...] = ("integers", "normal")
_SECONDS = 60.0  # for the imports and the calls
_CAUSE = "the model's file changed, after the import, what it refers to; a rank that is launched does not import that"
_NEITHER = "no file registers it when it is imported, as a launched rank needs it, or the call raises here"
_HELP = "set it in the operator's own file, or give it to the operator as an argument"


@dataclass(frozen=True)
class _SmallCall:
    """One small call of an operator. `seed`: of cotangents, and of what the operator draws itself."""

    spec: OperatorSpec
    call: ConcreteCall
    seed: int

    def run(self, spec: OperatorSpec) -> WholeRun | str:
        """Run the call by the operator of this record; return the error where it raises."""
        torch.manual_seed(self.seed)
        try:
            return run_whole(function_of(spec.name, spec), self.call, torch.Generator().manual_seed(self.seed))
        except Exception as error:  # noqa: BLE001 - whatever it raises is its result
            return f"{type(error).__name__}: {error}"


def check_operators_alone(
    manifest: Manifest, graph: Graph, folder: Path, seed: int
) -> tuple[CheckOutcome | None, str | None]:
    """Return the check, and a note on what could not be compared; None each where there is nothing.

    `folder`: of the program.
    """
    end_where_loaded_anew()
    files = [f for f in (_located(name, folder) for name in manifest.operator_files) if f is not None]
    trials = list(_trials(graph, seed)) if files else []
    if not trials:
        return None, None
    found = _apart(files, trials)
    if not isinstance(found, list):
        unknown = "operators were not compared with those of a process that imports their files alone"
        return None, f"{unknown}: {_why(found)}"
    mistakes: dict[str, tuple[OperatorSpec, str]] = {}  # the first of each operator
    for trial, text in zip(trials, found, strict=True):
        if text:
            mistakes.setdefault(trial.spec.name, (trial.spec, text))
    left = ", ".join(dict.fromkeys(f"`{t.spec.name}`" for t, text in zip(trials, found, strict=True) if text is None))
    note = f"{left} was not compared with what its file alone makes of it: {_NEITHER}" if left else None
    compared = sum(text is not None for text in found)
    if not compared:
        return None, note
    verdict = Verdict.REFUTED if mistakes else Verdict.TESTED_EXACT
    check = Check(NAME, verdict, compared, len(mistakes), supporting=True)
    return outcome_of(check, [_finding(spec, text) for spec, text in mistakes.values()]), note


def _apart(files: Sequence[Path], trials: Sequence[_SmallCall]) -> list[str | None] | Died | TimedOut | str:
    if not child_processes.can_run_apart():
        return "no child process can be forked here"
    try:
        return child_processes.run_apart(partial(_compare, files, trials), _SECONDS)
    except Exception as error:  # noqa: BLE001 - a file of the user's may raise anything
        return str(error)


def _why(found: Died | TimedOut | str) -> str:
    if isinstance(found, str):
        return found.splitlines()[0] if found else "importing them failed"
    return f"importing them, {found.how}" if isinstance(found, Died) else f"{_SECONDS:g} s were not enough"


def _located(name: str, folder: Path) -> Path | None:
    """Return the file; None for what is none, for a script that runs (it would run again), and where none is found."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        path = locate(name, folder) if name.endswith(".py") else None
    except ProgramError:
        return None  # the check of the files says so
    return None if path is not None and main is not None and Path(main).resolve() == path else path


def _trials(graph: Graph, seed: int) -> Iterator[_SmallCall]:
    """Yield two draws of one small call of each form in which the model calls an operator of the user's."""
    seen: set[tuple[int, str]] = set()
    for signature in {id(s): s for s in signatures(graph).values()}.values():  # layers that repeat share theirs
        spec = signature.spec
        if spec is None or spec.target is None:
            continue
        try:
            small = represent(signature, seed)
        except Unrepresented:
            continue  # its lemma says why
        if (id(spec), small.form) in seen:
            continue
        seen.add((id(spec), small.form))
        for kind in _KINDS:
            inputs = replace(small.inputs, kind=kind)
            yield _SmallCall(spec, small.runner.concrete(inputs), inputs.seed)


def _compare(files: Sequence[Path], trials: Sequence[_SmallCall]) -> list[str | None]:
    """Say of each trial how its result differs once the user's modules are forgotten and the files imported; "" where
    it does not, None where it cannot be compared. For a child process, which ends then."""
    before = [trial.run(trial.spec) for trial in trials]
    for trial in trials:
        default_registry().forget(trial.spec.name)
    load_anew(files)
    return [_differs(trial, result) for trial, result in zip(trials, before, strict=True)]


def _differs(trial: _SmallCall, before: WholeRun | str) -> str | None:
    spec = default_registry().lookup(trial.spec.name)
    if isinstance(before, str) or spec is None:
        return None
    after = trial.run(spec)
    if isinstance(after, str):
        return f"it raises {after}"
    pairs = list(zip_longest((*before.outputs, *before.gradients), (*after.outputs, *after.gradients)))
    scale = family_scale(t for t, _ in pairs)
    for right, wrong in pairs:
        if (right is None) != (wrong is None):
            return "it has another number of results or gradients"
        if right is not None and wrong is not None:
            found = difference(wrong, right, scale)
            if found.relative > FLOAT64_BOUND:
                return str(found)
    return ""


def _finding(spec: OperatorSpec, text: str) -> Finding:
    message = f"`{spec.name}` computes something else where its file alone is imported, as ranks of the program do"
    return Finding("record_differs", f"{message}: {text}", spec.where, {"operator": spec.name}, _CAUSE, _HELP)
