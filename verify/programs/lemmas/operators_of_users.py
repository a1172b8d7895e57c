"""The operators of users, at a program's own sizes and as a rank has them: what lemmas on small calls do not show.

A user's operator at the sizes that a program has.

A lemma is looked at on small calls. Of an operator that does something else from some size on, these say nothing: what
is proved of it takes for granted conditions on sizes. Here they are held against the program's own sizes, those of the
whole and of each shard; and what is not proved for all sizes is run there. Where that takes too much memory, the sizes
that a condition names are the program's, and all others small.

Compare the user's operators with themselves as a rank has them, which imports their files and nothing else.

What a model's file changes in another (`my_ops.SCALE = 3`, `my_ops.configure(...)`) is there in this process: in the
reference, the proofs and the ranks that run here. A rank that is launched has the operators as their files alone make
them. So a child forgets the user's modules, imports the operators' files anew, and runs each operator as it was and as
it is then, on one small call of each form. What the model's file changes in torch itself stays in the child: not seen.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product, zip_longest
from pathlib import Path

import torch

from op_registry.registry import default_registry
from op_registry.spec import OperatorSpec

from nnscaler.ir.graph import Graph
from nnscaler.ir.operation_annotations import Signature, signatures
from nnscaler.ir.operation_placement import Choice, Split
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
from verify.programs.lemmas.check_claims import Evidence, test_choices
from verify.programs.lemmas.claims_of_obligations import Claim, RunsWhole, claims_of
from verify.programs.lemmas.result import Lemma
from verify.programs.lemmas.small_call import Representative, call_of_sizes, represent
from verify.programs.lemmas.stand_in_calls_and_tensors import Unrepresented
from verify.programs.typing import Obligation
from verify.results.finding import Finding
from verify.results.report import Check
from verify.results.verdict import Condition, Verdict


def lemmas_at_sizes(
    obligation: Obligation, small: Representative | None, known: Mapping[Claim, Evidence], seed: int
) -> Iterator[Lemma]:
    """Yield a lemma where the operator is wrong at the program's sizes, or where what is known of it does not reach
    them.

    small  the call that was looked at
    known  what is known of its form
    """
    signature = obligation.signature
    claims = (*claims_of(obligation), *(c for c in known if isinstance(c, RunsWhole)))
    relied_on = [known[c] for c in dict.fromkeys(claims) if c in known]
    weaker = [e for e in relied_on if e.verdict.passes and e.verdict is not Verdict.PROVED_ALL_SIZES]
    splits, others = _choices_of(obligation)
    if small is None or not weaker or not (splits or others) or signature.bound is None:
        return
    sizes = signature.bound.sizes
    unmet = dict.fromkeys(c for e in weaker for c in e.conditions if not _holds(c, sizes, splits))
    ran: list[Mapping[str, int]] = []
    reasons: dict[str, None] = {}
    for table in _tables(signature, small, unmet, splits):
        try:
            evidence = test_choices(call_of_sizes(signature, table, seed), splits, others)
        except Unrepresented as error:
            evidence = Evidence(Verdict.INCONCLUSIVE, str(error))
        if evidence.verdict is Verdict.REFUTED:
            yield _lemma(obligation, table, splits, evidence)
            return
        if evidence.verdict.passes:
            ran.append(table)
        else:
            reasons[evidence.blocker] = None
        if table == sizes and evidence.verdict.passes:
            break
    open_ = [c for c in unmet if not any(_same(c.names, table, sizes) for table in ran)]
    shown = ", ".join(dict.fromkeys(f"`{c}`" for c in open_ or unmet))
    if open_:
        reason = "; ".join((f"what is known of it takes {shown} for granted, which does not hold", *reasons))
        yield _lemma(obligation, sizes, splits, Evidence(Verdict.INCONCLUSIVE, reason))
    elif unmet:
        yield _lemma(obligation, sizes, splits, Evidence(Verdict.TESTED_EXACT, f"its proof ends at {shown}", len(ran)))


def _choices_of(obligation: Obligation) -> tuple[dict[str, int], list[Choice]]:
    """Return into how many shards each identifier is split over all axes, and the choices that split nothing.

    What goes around an axis, or is a slice with what is before it, is run as it is anyway.
    """
    splits: dict[str, int] = {}
    others: dict[Choice, None] = {}
    for choice, (_, count) in zip(obligation.choices, obligation.axes, strict=True):
        if count == 1:
            continue
        if not isinstance(choice, Split):
            others[choice] = None
        elif not choice.circulating and not choice.prefix:
            splits[choice.identifier] = splits.get(choice.identifier, 1) * count
    return splits, list(others)


def _holds(condition: Condition, sizes: Mapping[str, int], splits: Mapping[str, int]) -> bool:
    """Return whether a condition holds of the whole and of every shard, of one axis or of several."""
    names = [name for name in condition.names if name in splits]
    each = [{sizes[n], sizes[n] // splits[n], -(-sizes[n] // splits[n])} for n in names]
    return all(condition.holds({**sizes, **dict(zip(names, local, strict=True))}) for local in product(*each))


def _tables(
    signature: Signature, small: Representative, unmet: Iterable[Condition], splits: Mapping[str, int]
) -> Iterator[Mapping[str, int]]:
    """Yield the sizes to run at: the program's; then those of them that a condition names, and each alone, beside
    small ones."""
    bound, known = signature.bound, small.signature.bound
    assert bound is not None and known is not None
    yield bound.sizes
    seen = [dict(bound.sizes)]
    for names in (*(c.names for c in unmet), *({name} for name in bound.sizes)):
        together = {n for name in names for n in bound.tied.get(name, (name,))}
        together |= {along for name, along in bound.rows.items() if name in together}
        table = {
            n: size if n in together else _small(size, known.sizes[n], splits.get(n, 1))
            for n, size in bound.sizes.items()
        }
        table.update({name: table[along] for name, along in bound.rows.items() if along in table})
        if table not in seen:
            seen.append(table)
            yield table


def _small(size: int, small: int, parts: int) -> int:
    """Return a small size that divides by the number of parts where the program's does, and does not where it does
    not."""
    even = parts * -(-small // parts)
    return min(size, even if size % parts == 0 else even + 1)


def _same(names: frozenset[str], table: Mapping[str, int], sizes: Mapping[str, int]) -> bool:
    return all(table.get(name) == sizes.get(name) for name in names)


def _lemma(obligation: Obligation, sizes: Mapping[str, int], splits: Mapping[str, int], evidence: Evidence) -> Lemma:
    call, spec, bound = obligation.signature.call, obligation.signature.spec, obligation.signature.bound
    assert spec is not None and bound is not None
    shown = ", ".join(f"{name} = {size}" for name, size in sizes.items())
    shards = " and ".join(f"{count} shards of `{name}`" for name, count in splits.items())
    does = f"makes {shards}" if shards else "runs whole"
    where = f"at the program's sizes ({shown})" if sizes == bound.sizes else f"at {shown}"
    return Lemma(
        f"`{call.operator}` (`{bound.text}`) {does} {where}",
        call.operator,
        f"{call.operator} at {shown}",
        evidence.verdict,
        evidence.blocker,
        obligation.uses,
        obligation.example,
        evidence.count,
        evidence.finding,
        spec.where,
    )


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
