"""Find side effects and hidden inputs of an operator.

Each probe has a code of its own, because each has another remedy:

    input_mutated        a tensor that it is given is changed: its values, its version, its shape or `requires_grad`
    random_operator      global generators are drawn from, seeded, or used and put back
    not_repeatable       two runs differ for another reason: a generator of its own, a counter, whether gradients are on
                         or which rank it is
    asks_ranks           torch.distributed is asked: what it computes on several ranks is not known
    output_dtype_wrong   an output's dtype follows torch's default dtype
    strides_matter       the same values, laid out otherwise in memory, give another result

Outputs that share memory with inputs or with each other are notes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from op_registry.spec import OperatorSpec

from nnscaler.exception_in_one_line import in_one_line
from nnscaler.global_random_generators import generators_kept, moved, seed_all, states
from verify.evidence.inputs.concrete_call import ConcreteCall, function_of
from verify.evidence.oracle.run_whole_operator import as_leaves
from verify.operators.audit.earlier_call_dependence import depends_on_history
from verify.operators.audit.handwritten_backward import plain
from verify.operators.audit.memory_layout_dependence import depends_on_layout
from verify.operators.audit.rank_and_mode_dependence import (
    as_second_rank,
    asked_of_surroundings,
    asks_distributed,
    in_other_modes,
)
from verify.operators.audit.watch_effects_on_tensors import (
    BackwardRaised,
    Change,
    Facts,
    Probed,
    Watched,
    apart,
    shapes_of,
    tensor_names,
    watch,
    watch_forward,
)
from verify.results.finding import Finding
from verify.results.report import Check
from verify.results.verdict import Verdict

NAME = "audit"
ASKS_RANKS = "asks_ranks"  # the one code that refutes nothing
ROUNDING = 1e-13  # relative; what threads that add in another order can make of float64
OTHER_ALGORITHM = 1e-6  # relative; torch's optimizers count steps in float32 where they are compiled
PAIRS = 3  # of inputs of one shape, which may be one tensor
_GENERATORS = {"torch": "torch's generator", "random": "Python's `random`", "numpy.random": "`numpy.random`"}
SEEDS = 0x5EED0000  # seeds of global generators start here: an operator that seeds them itself uses another one


@dataclass
class _Audit:
    """Collects what the probes find."""

    spec: OperatorSpec
    concrete: ConcreteCall
    function: Callable[..., Any]
    names: tuple[str, ...]
    seed: int
    compare: bool
    count: int = 0
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def find(self, code: str, message: str, facts: dict[str, str], cause: str | None = None, help: str = "") -> None:
        """Add a finding; one of each code is enough."""
        if all(f.code != code for f in self.findings):
            shown = {"shapes": shapes_of(self.concrete.tensors), "dtype": "float64", **facts}
            self.findings.append(Finding(code, message, self.spec.where, shown, cause, help or None))

    def found(self, *codes: str) -> bool:
        """Return whether one of these codes was found."""
        return any(f.code in codes for f in self.findings)

    def run(self, seed: int) -> Watched:
        """Run forward and backward, with the global generators seeded; always the same cotangents."""
        seed_all(SEEDS + seed)
        return watch(self.function, self.concrete, torch.Generator().manual_seed(self.seed))


def audit(
    spec: OperatorSpec,
    concrete: ConcreteCall,
    seed: int,
    *,
    compare: bool = True,
    strides: bool = True,
    function: Callable[..., Any] | None = None,
) -> Probed:
    """Run the operator some six times on the same inputs, with and without gradients.

    `compare`: whether the values of its outputs are defined. `strides`: whether to try non-contiguous inputs.
    `function`: what to run instead of the operator's own callable. Open where it raises on the inputs as they are.
    """
    started = time.perf_counter()
    run = plain(function or function_of(concrete.call.operator, spec))
    names = tensor_names(spec, concrete.call, run)
    subject = _Audit(spec, concrete, run, names, seed, compare and concrete.compare)
    reason = ""
    with generators_kept():
        try:
            _probe(subject, strides)
        except Exception as error:  # noqa: BLE001 - whatever the operator raises is the answer
            reason = in_one_line(error.error if isinstance(error, BackwardRaised) else error, 200)
    seconds = time.perf_counter() - started
    refuted = sum(f.code != ASKS_RANKS for f in subject.findings)
    open_ = bool(reason) or len(subject.findings) > refuted
    verdict = Verdict.REFUTED if refuted else Verdict.INCONCLUSIVE if open_ else Verdict.TESTED_EXACT
    raised = f"it raises {reason}" if reason else "it asks for other ranks" if open_ else ""
    detail = raised or "side effects, repeatability, dtypes, memory layout"
    check = Check(NAME, verdict, max(subject.count, refuted), refuted, seconds, detail, supporting=True)
    return Probed((check,), tuple(subject.findings), tuple(subject.notes))


def _probe(subject: _Audit, strides: bool) -> None:
    seed_all(SEEDS + subject.seed)
    unrecorded = _without_gradients(subject)
    seed_all(SEEDS + subject.seed)
    before = states()
    first, asked = asks_distributed(lambda: subject.run(subject.seed))
    drew = [_GENERATORS[name] for name in moved(before, states())]
    _changed(subject, first.changes)
    _repeats(subject, first, drew)
    subject.count += 1
    if unrecorded is not None and subject.compare and not subject.found("random_operator", "not_repeatable"):
        _depends_on_grad_mode(subject, unrecorded, first)
    if subject.spec.target is not None:
        _depends_on_modes(subject)
        _depends_on_rank(subject, first, asked)
        _depends_on_history(subject)
        _depends_on_identity(subject)
        _depends_on_class(subject, first)
        run, function = partial(subject.run, subject.seed), subject.function
        subject.notes += asked_of_surroundings(subject.spec.name, run, function, subject.concrete)
    _dtypes(subject)
    if strides and subject.compare and not subject.found("random_operator", "not_repeatable"):
        _strides(subject, first)


def _without_gradients(subject: _Audit) -> Watched | None:
    try:
        found = watch_forward(subject.function, subject.concrete)
    except Exception as error:  # noqa: BLE001 - an operator may need gradients to be recorded
        subject.notes.append(f"`{subject.spec.name}` raises when no gradients are recorded: {in_one_line(error, 200)}")
        return None
    subject.count += 1
    _changed(subject, found.changes)
    if subject.spec.target is not None:
        subject.notes += _shared_memory(subject, found)
    return found


def _changed(subject: _Audit, changes: Sequence[Change]) -> None:
    for change in changes:
        name = subject.names[change.index] if change.what == "input" else f"the cotangent of output {change.index}"
        if change.what == "input":
            message = f"`{subject.spec.name}` changes its input `{name}`"
            help = f"clone it first: `{name} = {name}.clone()`" if name.isidentifier() else "clone it first"
        else:
            message = f"the backward of `{subject.spec.name}` changes {name}, which other gradients may need"
            help = "compute with a new tensor: `g = g * 2`, not `g.mul_(2)`"
        facts = {"tensor": name, "pass": change.when, "change": change.how}
        subject.find("input_mutated", message, facts, help=help)


def _shared_memory(subject: _Audit, run: Watched) -> list[str]:
    """Return one note for each output that shares memory with an input, or with an output before it."""
    held = {_address(t): f"its input `{n}`" for t, n in zip(run.given, subject.names, strict=True) if t.numel()}
    notes: list[str] = []
    for number, output in enumerate(run.outputs):
        if output is None or not output.numel():
            continue
        other = held.setdefault(_address(output), f"output {number}")
        if other != f"output {number}":
            notes.append(f"output {number} of `{subject.spec.name}` shares memory with {other}")
    return notes


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _repeats(subject: _Audit, first: Watched, moved: list[str]) -> None:
    """Compare two runs from different seeds; a third where they differ tells hidden seeds from hidden state."""
    name = subject.spec.name
    help = "give it the random numbers as an input"
    try:
        other = subject.run(subject.seed + 1)
    except Exception as error:  # noqa: BLE001 - it ran before
        subject.find("not_repeatable", f"`{name}` raises when it runs again", {"error": in_one_line(error, 200)})
        return
    found = _apart(subject, first, other)
    facts = {"runs": "the same inputs twice, global generators seeded differently", **found}
    if moved:
        source = " and ".join(moved)
        message = f"`{name}` draws random numbers from {source}, or seeds it"
        cause = f"the state of {source} is another one after the run"
        subject.find("random_operator", message, facts if found else {}, cause, help)
        return
    if not found:
        return
    if not _apart(subject, first, other, ROUNDING):
        subject.notes.append(f"two runs of `{name}` differ by rounding: {found['difference']}")
        return
    third = subject.run(subject.seed)
    if _apart(subject, first, third):
        facts["runs"] = "the same inputs twice, global generators seeded alike"
        cause = "it keeps something between runs, or draws from elsewhere: a generator of its own, a counter, the time"
        subject.find("not_repeatable", f"two runs of `{name}` on the same inputs differ", facts, cause)
        return
    cause = "its result follows the seed of a global generator, whose state it puts back"
    subject.find("random_operator", f"`{name}` draws random numbers", facts, cause, help)


def _apart(subject: _Audit, a: Watched, b: Watched, bound: float | None = None) -> Facts:
    """Return the first tensor in which two runs differ by more than `bound`, or bitwise without one."""
    return apart(a, b, subject.names, bound) if subject.compare else {}


def _depends_on_grad_mode(subject: _Audit, unrecorded: Watched, first: Watched) -> None:
    runs = {"torch.no_grad()": unrecorded}
    seed_all(SEEDS + subject.seed)
    with suppress(Exception):  # it ran without gradients: that it cannot in this mode is no wrong result
        inference = watch_forward(subject.function, subject.concrete, unrecorded=torch.inference_mode)
        runs["torch.inference_mode()"] = inference
    subject.count += len(runs)
    for mode, run in runs.items():
        facts = _apart(subject, first, run, ROUNDING)
        if facts:
            facts = {"runs": f"the same inputs, with and without `{mode}`", **facts}
            message = f"`{subject.spec.name}` computes something else when no gradients are recorded"
            subject.find("not_repeatable", message, facts, "it asks `torch.is_grad_enabled()` or `requires_grad`")


def _depends_on_modes(subject: _Audit) -> None:
    if subject.found("random_operator", "not_repeatable") or not subject.compare:
        return
    subject.count += 1
    mode, facts = in_other_modes(lambda: subject.run(subject.seed), subject.names, OTHER_ALGORITHM)
    if facts:
        facts = {"runs": f"the same inputs, with and without {mode}", **facts}
        message = f"`{subject.spec.name}` computes something else with {mode}"
        help = "give it what it asks for as an argument"
        subject.find("not_repeatable", message, facts, "it asks in which mode torch is", help)


def _depends_on_rank(subject: _Audit, first: Watched, asked: str) -> None:
    name = subject.spec.name
    if asked:
        message = f"`{name}` asks torch.distributed (`{asked}`): what it computes on several ranks is not known"
        help = "give it what it needs as an argument; communication between shards is for the compiler to insert"
        subject.find(ASKS_RANKS, message, {}, help=help)
    if subject.found("random_operator", "not_repeatable") or not subject.compare:
        return
    subject.count += 1
    try:
        with as_second_rank():
            other = subject.run(subject.seed)
    except Exception as error:  # noqa: BLE001 - it ran as the only rank
        message = f"`{name}` raises where the environment says that there are two ranks"
        subject.find("not_repeatable", message, {"error": in_one_line(error, 200)})
        return
    facts = _apart(subject, first, other, ROUNDING)
    if facts:
        facts = {"runs": "the same inputs, as the only rank and as the second of two", **facts}
        message = f"`{name}` computes something else on another rank"
        subject.find("not_repeatable", message, facts, "it reads `RANK` or a variable like it")


def _depends_on_history(subject: _Audit) -> None:
    if subject.found("random_operator", "not_repeatable") or not subject.compare:
        return
    subject.count += 1
    if depends_on_history(subject.spec, subject.concrete, subject.seed):
        facts = {"runs": "the same inputs, as the first call of a process and after calls of other sizes and values"}
        message = f"`{subject.spec.name}` computes something else after other calls"
        cause = "it keeps something of the calls before, and on ranks these are of shards"
        help = "compute it anew, or key what is kept by all that it depends on"
        subject.find("not_repeatable", message, facts, cause, help)


def _depends_on_identity(subject: _Audit) -> None:
    """Compare calls in which two inputs are one tensor with calls in which they are equal."""
    if subject.found("input_mutated", "random_operator", "not_repeatable") or not subject.compare:
        return
    tensors, constants = subject.concrete.tensors, subject.concrete.constants
    alike = [
        (i, j)
        for i, j in combinations(range(len(tensors)), 2)
        if tensors[i].shape == tensors[j].shape and tensors[i].dtype == tensors[j].dtype
    ]
    for i, j in alike[:PAIRS]:
        equal = replace(subject.concrete, tensors=(*tensors[:j], tensors[i], *tensors[j + 1 :]))
        leaves = list(as_leaves(equal.tensors, torch.float64, constants))
        leaves[j] = leaves[i]
        with suppress(Exception):  # it may refuse either
            two = watch(subject.function, equal, torch.Generator().manual_seed(subject.seed))
            one = watch(subject.function, equal, None, leaves, two.cotangents)
            subject.count += 1
            facts = apart(_added(two, i, j), one, subject.names, ROUNDING, two.gradients)  # whose sum may be rounding
            if facts:
                names = f"`{subject.names[i]}` and `{subject.names[j]}`"
                facts = {"runs": f"the same inputs, {names} being two equal tensors and one tensor", **facts}
                message = f"`{subject.spec.name}` computes something else where {names} are one tensor"
                subject.find("not_repeatable", message, facts, "it asks whether two inputs are one object")
                return


def _depends_on_class(subject: _Audit, first: Watched) -> None:
    """Compare with a call on parameters, which weights are in a model, and shards of them in a program."""
    if subject.found("input_mutated", "random_operator", "not_repeatable") or not subject.compare:
        return
    leaves = as_leaves(subject.concrete.tensors, torch.float64, subject.concrete.constants)
    given = [torch.nn.Parameter(t) if t.requires_grad else t for t in leaves]
    seed_all(SEEDS + subject.seed)
    with suppress(Exception):  # nobody may write to a parameter in place
        facts = _apart(
            subject, first, watch(subject.function, subject.concrete, None, given, first.cotangents), ROUNDING
        )
        subject.count += 1
        if facts:
            facts = {"runs": "the same inputs, as results of other operations and as parameters", **facts}
            message = f"`{subject.spec.name}` computes something else on parameters"
            cause = "it asks whether a tensor is a `torch.nn.Parameter`, or a leaf"
            subject.find("not_repeatable", message, facts, cause, "give it what it asks for as an argument")


def _added(run: Watched, i: int, j: int) -> Watched:
    """Return the run with the sum of two gradients in place of each."""
    found = list(run.gradients)
    both = [g for g in (found[i], found[j]) if g is not None]
    found[i] = found[j] = sum(both[1:], both[0]) if both else None
    return replace(run, gradients=tuple(found))


def _dtypes(subject: _Audit) -> None:
    """Check that float32 inputs give the same dtypes under either default dtype, and no float64."""
    floating = [t for t in subject.concrete.tensors if t.is_floating_point()]
    if not floating or subject.spec.target is None:
        return  # what makes tensors of its own, and torch itself, may make them in the default dtype
    kept = torch.get_default_dtype()
    found: list[tuple[torch.dtype | None, ...]] = []
    try:
        for default in (torch.float32, torch.float64):
            torch.set_default_dtype(default)
            outputs = watch_forward(subject.function, subject.concrete, torch.float32).outputs
            found.append(tuple(None if o is None else o.dtype for o in outputs))
    except Exception as error:  # noqa: BLE001 - not every operator has float32 kernels for its inputs
        if len(found) == 1:  # that is loud, and says nothing of shards: programs run under one default dtype
            name = subject.spec.name
            subject.notes.append(f"`{name}` raises when torch's default dtype is float64: {in_one_line(error, 200)}")
        return
    finally:
        torch.set_default_dtype(kept)
    subject.count += 1
    for number, (narrow, wide) in enumerate(zip(*found, strict=True)):
        facts = {"dtype": "float32", "tensor": f"output {number}", "found": f"{narrow}, {wide} under default float64"}
        if narrow != wide:
            message = f"the dtype of output {number} of `{subject.spec.name}` follows torch's default dtype"
            subject.find("output_dtype_wrong", message, facts, "it makes a tensor without saying its dtype", _DTYPES)
        elif narrow in (torch.float64, torch.complex128) and not any(t.is_complex() for t in subject.concrete.tensors):
            facts["found"] = str(narrow)
            message = f"output {number} of `{subject.spec.name}` is {narrow} on float32 inputs"
            subject.find("output_dtype_wrong", message, facts, help=_DTYPES)


_DTYPES = "make tensors in the dtype of an input: `torch.zeros(n, dtype=x.dtype)`"


def _strides(subject: _Audit, first: Watched) -> None:
    """Compare with runs on the same inputs and cotangents, laid out otherwise in memory."""
    seed_all(SEEDS + subject.seed)
    users = subject.spec.target is not None
    facts, raised, runs = depends_on_layout(subject.function, subject.concrete, first, subject.names, users=users)
    subject.count += runs
    if raised:
        subject.notes.append(f"`{subject.spec.name}` raises {raised[0]}on non-contiguous tensors: {raised[1]}")
    if facts:
        message = f"`{subject.spec.name}` gives another result on non-contiguous tensors of the same values"
        cause = "it takes a tensor's memory for contiguous"
        subject.find("strides_matter", message, facts, cause, "call `.contiguous()` on inputs and cotangents")
