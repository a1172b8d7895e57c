"""The comparison of a training run with the eager model's: what is compared, and the checks that come of it.

Later differences follow from earlier ones. So findings are told of the first step that differs, and there of what comes
first: learning rate, loss, gradients, norm, optimizer state, parameters, buffers, evaluation. Counts are of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf

from torch import Tensor

from op_registry.source_location import SourceLocation

from nnscaler.runtime.tensor_bits_and_differences import FILL, TensorDifference, difference, family_scale
from verify.programs.checks.assemble_logical_tensors import JoinedTensor, UnequalElements, join, unequal
from verify.programs.checks.input_and_outcome import CheckOutcome, Tally
from verify.programs.checks.replicas import copies_differ
from verify.programs.eager_reference import gradient_value
from verify.programs.training import causes
from verify.programs.training.eager import EagerRun
from verify.programs.training.rank_loop import StepRecord
from verify.programs.training.training_run_pair import ComparedValue, Trained
from verify.results.finding import Finding
from verify.results.float64_tolerance import Key, Tolerance
from verify.results.verdict import Verdict

# name of the check -> its finding's code; in the order in which one thing leads to another
CHECKS: Mapping[str, str] = {
    "learning rate": "learning_rate_differs",
    "loss": "loss_differs",
    "gradient": "gradient_differs",
    "norm": "gradient_norm_differs",
    "state": "optimizer_state_differs",
    "parameter": "parameter_differs",
    "buffer": "buffer_differs",
    "evaluation": "evaluation_differs",
}
NAMES: Mapping[str, str] = {
    "learning rate": "training: learning rates",
    "loss": "training: loss of each batch",
    "gradient": "training: gradients",
    "norm": "training: gradient norm",
    "state": "training: optimizer state",
    "parameter": "training: parameters after each step",
    "buffer": "training: buffers",
    "evaluation": "training: evaluation",
}
LOOKED_AT = 8  # tensors that differ first, whose causes are looked for
REPLICAS, OWNERS = "training: replicas bitwise equal", "training: owners of the optimizer state"


def compare(
    trained: Trained, again: Callable[[], EagerRun], place: Callable[[str], SourceLocation | None]
) -> list[CheckOutcome]:
    """Return the outcomes. `again`: the eager run from parameters moved by one unit of rounding, for where something
    differs; `place`: where the model uses a parameter."""
    every = list(everything(trained))
    tolerance = Tolerance()
    off = [_relative(entry) for entry in every]
    if any(not tolerance.judge(e.key, relative).passes for e, relative in zip(every, off, strict=True)):
        tolerance = Tolerance(_noise(trained, again()))
    verdicts = [tolerance.judge(e.key, relative) for e, relative in zip(every, off, strict=True)]
    wrong = {e.key: (e, v) for e, v in zip(every, verdicts, strict=True) if not v.passes}
    told = _first([entry for entry, _ in wrong.values()])
    causes_of = dict(zip((e.key for e in told), causes.explain_all(trained, told), strict=True))
    tallies = {kind: Tally(NAMES[kind], tolerance.level, tolerance) for kind in CHECKS}
    for entry, verdict, relative in zip(every, verdicts, off, strict=True):
        finding = None
        if entry.key in causes_of:
            finding = _finding(trained, entry, verdict, tolerance, place, causes_of[entry.key])
        tallies[entry.kind].add(verdict, finding, relative, entry.key)
    outcomes = [tally.outcome() for tally in tallies.values()]
    return [o for o in (*outcomes, _replicas(trained, every, place), _owners(trained, every, place)) if o.check.count]


def _first(wrong: Sequence[ComparedValue]) -> list[ComparedValue]:
    """Return what differs first, some of it: the others follow from it."""
    order = list(CHECKS)
    first = min(((e.step, order.index(e.kind)) for e in wrong), default=None)
    found = [e for e in wrong if (e.step, order.index(e.kind)) == first]
    tensors = {e.parameter for e in found if e.expected is not None and e.expected.dim()}
    if found and found[0].kind == "state":  # the count of a parameter's updates follows what became of its tensors
        found = [e for e in found if e.parameter not in tensors or (e.expected is not None and e.expected.dim())]
    return found[:LOOKED_AT]


def everything(trained: Trained) -> Iterator[ComparedValue]:
    """Yield all that is compared, in order."""
    eager, idle = trained.eager, _idle(trained)
    for number, expected in enumerate(eager.steps):
        steps = {r.rank: r.steps[number] for r in trained.ranks}
        expected = replace(
            expected,
            rates={name: rate for name, rate in expected.rates.items() if name not in idle},
            parameters={name: tensor for name, tensor in expected.parameters.items() if name not in idle},
        )
        yield from _scalars(number, expected, steps)
        yield from _tensors(trained, "gradient", number, expected.gradients, {r: s.gradients for r, s in steps.items()})
        yield from _states(trained, number, expected, steps)
        yield from _tensors(
            trained, "parameter", number, expected.parameters, {r: s.parameters for r, s in steps.items()}
        )
    last = len(eager.steps)
    held = {name for r in trained.ranks for name in r.buffers}
    buffers = {name: tensor for name, tensor in eager.buffers.items() if name in held}
    yield from _tensors(trained, "buffer", last, buffers, {r.rank: r.buffers for r in trained.ranks})
    if eager.evaluation is not None:
        found = {r.rank: r.evaluation for r in trained.ranks if r.evaluation is not None}
        yield ComparedValue("evaluation", last, "", _alike(found), eager.evaluation, 0.0)
        yield from _tensors(trained, "evaluation", last, buffers, {r.rank: r.after for r in trained.ranks})


def _idle(trained: Trained) -> frozenset[str]:
    """Return the parameters that the model never gives a gradient, though they ask for one, and no rank trains: torch's
    optimizers leave them alone."""
    named = {name for step in trained.eager.steps for name in step.gradients}
    moved = {name for step in trained.eager.steps for name, gradient in step.gradients.items() if gradient is not None}
    return frozenset(named - moved - {name for rank in trained.ranks for step in rank.steps for name in step.rates})


def _scalars(number: int, expected: StepRecord, steps: Mapping[int, StepRecord]) -> Iterator[ComparedValue]:
    like = expected.losses[0]
    for name, rate in expected.rates.items():
        found = {rank: like.new_tensor(s.rates[name]) for rank, s in steps.items() if name in s.rates}
        yield ComparedValue("learning rate", number, name, _alike(found), like.new_tensor(rate), 0.0)
    scale = family_scale(expected.losses)
    for position, loss in enumerate(expected.losses):
        found = {rank: s.losses[position] for rank, s in steps.items() if position < len(s.losses)}
        yield ComparedValue("loss", number, str(position), _alike(found), loss, scale)
    if expected.norm is not None:
        yield ComparedValue(
            "norm", number, "", _alike({r: s.norm for r, s in steps.items() if s.norm is not None}), expected.norm, 0.0
        )


def _states(
    trained: Trained, number: int, expected: StepRecord, steps: Mapping[int, StepRecord]
) -> Iterator[ComparedValue]:
    keys = dict.fromkeys(key for states in expected.states.values() for key in states)
    for key in keys:
        right = {name: states[key] for name, states in expected.states.items() if key in states}
        scale = family_scale(right.values())
        for name, tensor in right.items():
            found = {rank: s.states.get(name, {}).get(key) for rank, s in steps.items()}
            shape = tuple(trained.eager.initial[name].shape)
            if tuple(tensor.shape) == shape and shape:
                whole = join(trained.layouts(name), found)
            else:  # a count, or what is no part of any shard: every owner has all of it
                whole = _alike({r: t for r, t in found.items() if t is not None}, set(trained.layouts(name)))
            yield ComparedValue("state", number, f"{key} of {name}", whole, tensor, scale)


def _tensors(
    trained: Trained,
    kind: str,
    number: int,
    expected: Mapping[str, Tensor | None],
    found: Mapping[int, Mapping[str, Tensor | None]],
) -> Iterator[ComparedValue]:
    scale = family_scale(expected.values(), inf if kind == "gradient" else FILL)
    for name, right in expected.items():
        whole = join(trained.layouts(name), {rank: entries.get(name) for rank, entries in found.items()})
        if kind == "gradient":
            whole = replace(whole, value=gradient_value(whole.value))
        yield ComparedValue(kind, number, name, whole, right, scale)


def _alike(found: Mapping[int, Tensor], holders: set[int] | None = None) -> JoinedTensor:
    """Return what every rank has whole."""
    absent = sorted((holders or set()) - set(found))
    if not found:
        return JoinedTensor(None)
    if absent:
        return JoinedTensor(None, found, problem=f"rank {absent[0]} has none, rank {next(iter(found))} has one")
    first, value = next(iter(found.items()))
    differing: list[UnequalElements] = []
    for rank, other in found.items():
        if other.shape != value.shape:
            return JoinedTensor(
                None, found, problem=f"rank {rank} has {tuple(other.shape)}, rank {first} {tuple(value.shape)}"
            )
        differing += unequal(value, other, first, rank)
    regions: dict[int, tuple[Tensor, ...]] = dict.fromkeys(found, ())
    return JoinedTensor(value, found, regions, tuple(differing), len(found) - 1)


def _relative(entry: ComparedValue) -> float:
    """Return how far the worst rank is off: of all ranks, for copies may differ."""
    if entry.observed.value is None or entry.expected is None:
        same = entry.observed.value is None and entry.expected is None and not entry.observed.problem
        return 0.0 if same else float("inf")
    return _worst(entry)[0].relative


def _worst(entry: ComparedValue) -> tuple[TensorDifference, str]:
    """Return the difference, and where copies differ the rank on which it is largest, in words."""
    assert entry.expected is not None and entry.observed.value is not None
    if not entry.observed.unequal:
        return difference(entry.observed.value, entry.expected, entry.scale), ""
    apart = entry.observed.apart(entry.expected, entry.scale)
    rank = max(apart, key=lambda r: apart[r].relative)
    return apart[rank], f"on rank {rank}, "


def _noise(trained: Trained, moved: EagerRun) -> dict[Key, float]:
    """Return how far the model itself moves where its parameters move by one unit of rounding."""
    other = replace(trained, eager=moved)
    pairs = zip(everything(trained), everything(other), strict=True)
    return {
        one.key: difference(two.expected, one.expected, one.scale).relative
        for one, two in pairs
        if one.expected is not None and two.expected is not None
    }


def _finding(
    trained: Trained,
    entry: ComparedValue,
    verdict: Verdict,
    tolerance: Tolerance,
    place: Callable[[str], SourceLocation | None],
    cause: str | None,
) -> Finding:
    subject = _subject(trained, entry)
    name = entry.parameter
    facts = {"tensor": name or entry.kind, "step": str(entry.step)}
    code = CHECKS[entry.kind]
    value = entry.observed.value
    if value is None or entry.expected is None:
        why = entry.observed.problem or ("no rank has it" if entry.expected is not None else "the model has none")
        message = f"{subject}: {why}"
        if entry.kind == "gradient":
            code = "gradient_missing" if value is None and not entry.observed.problem else code
            code = "gradient_extra" if entry.expected is None else code
        if entry.kind == "state" and entry.observed.problem:
            code = "optimizer_state_owner"
    else:
        found, where = _worst(entry)
        message = f"{subject} differs: {where}{found}"
        code = "not_finite" if found.not_finite else code
        allowed = tolerance.bound
        apart = entry.observed.apart(entry.expected, entry.scale)
        ranks = [rank for rank, gap in apart.items() if gap.relative > allowed]
        facts |= {"ranks": ", ".join(map(str, ranks)), "allowed": f"{allowed:.3g}"}
    if verdict is not Verdict.REFUTED:
        code = "near_threshold"
    return Finding(code, f"training: {message}", place(name), facts, cause)


def _subject(trained: Trained, entry: ComparedValue) -> str:
    step = f"step {entry.step}"
    match entry.kind:
        case "learning rate":
            return f"the learning rate of `{entry.name}` at {step}"
        case "loss":
            return f"the loss of batch {entry.name} of {step}"
        case "gradient":
            return f"the gradient of `{entry.name}` at {step}"
        case "norm":
            return f"the norm of all gradients of {step}"
        case "state":
            key, _, name = entry.name.partition(" of ")
            return f"the optimizer's `{key}` of `{name}` after {step}"
        case "parameter":
            return f"the parameter `{entry.name}` after {step}"
        case "buffer":
            return f"the buffer `{entry.name}` after {len(trained.eager.steps)} steps"
    if entry.name:
        return f"the buffer `{entry.name}` after an evaluation, which should change nothing,"
    return "the loss in evaluation mode"


# -- copies and owners ------------------------------------------------------------------------------------------------


def _replicas(
    trained: Trained, every: Sequence[ComparedValue], place: Callable[[str], SourceLocation | None]
) -> CheckOutcome:
    """Check that copies have equal bits: of gradients, states and parameters, at every step."""
    tally = Tally(REPLICAS, Verdict.TESTED_EXACT)
    step: int | None = None
    for entry in every:
        for _ in range(entry.observed.copies - len(entry.observed.unequal)):
            tally.add(Verdict.TESTED_EXACT)
        for found in entry.observed.unequal:
            step = entry.step if step is None else step
            tally.add(Verdict.REFUTED, _unlike(trained, entry, found, place) if entry.step == step else None)
    return tally.outcome()


def _unlike(
    trained: Trained, entry: ComparedValue, found: UnequalElements, place: Callable[[str], SourceLocation | None]
) -> Finding:
    name = entry.parameter
    told = copies_differ(found, _subject(trained, entry), name or entry.kind, entry.step, place(name))
    (cause,) = causes.explain_all(trained, [entry])
    return replace(told, message=f"training: {told.message}", cause=cause)


def _owners(
    trained: Trained, every: Sequence[ComparedValue], place: Callable[[str], SourceLocation | None]
) -> CheckOutcome:
    """Check that the state of each element is with the ranks that update it, and with no other: no gap, no overlap."""
    tally = Tally(OWNERS, Verdict.TESTED_EXACT)
    sizes: dict[int, int] = {r.rank: 0 for r in trained.ranks}
    total = 0
    last = len(trained.eager.steps) - 1
    for entry in every:
        if entry.kind != "state" or entry.step != last or entry.expected is None or not entry.expected.dim():
            continue
        total += entry.expected.numel() * entry.expected.element_size()
        for rank, piece in entry.observed.pieces.items():
            sizes[rank] += piece.numel() * piece.element_size()
        name = entry.parameter
        verdict, finding = Verdict.TESTED_EXACT, None
        if entry.observed.problem:
            message = f"training: {_subject(trained, entry)} has not its owners: {entry.observed.problem}"
            verdict = Verdict.REFUTED
            finding = Finding("optimizer_state_owner", message, place(name), {"tensor": name, "step": str(last)})
        tally.add(verdict, finding)
    fullest = max(sizes.values(), default=0)
    return tally.outcome(f"{fullest:,} bytes on the fullest rank, {total:,} in all" if total else "")
