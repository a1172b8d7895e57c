"""The second oracle: a backward written by hand must be the derivative of its forward.

The whole operator and its shards run the same backward, so that comparing them says nothing about a backward that is
wrong in the same way everywhere. It runs in float64. A straight-through estimator or a reversed gradient is meant to
be no derivative: `register_op(..., gradient="custom")` says so, and the comparison becomes a note.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from op_registry.call import dtype_name
from op_registry.numbers_in_user_code import numbers_in
from op_registry.spec import OperatorSpec

from nnscaler.exception_in_one_line import in_one_line
from nnscaler.runtime.tensor_bits_and_differences import TensorDifference, difference, family_scale
from verify.evidence.inputs.concrete_call import ConcreteCall, function_of
from verify.operators.audit.backward_culprit import Blame, as_undefined_as_forward, find_wrong
from verify.operators.audit.backward_in_narrow_dtypes import Deviation, deviation
from verify.operators.audit.central_differences import (
    BESIDE,
    NoGradient,
    Place,
    Point,
    Slope,
    Survey,
    around,
    direction_of,
    gradients_at,
    make_point,
    make_run,
    measure,
    survey,
    with_gradients,
)
from verify.operators.audit.handwritten_backward import Handwritten, handwritten, plain
from verify.operators.audit.watch_effects_on_tensors import Probed, shapes_of, tensor_names
from verify.results.finding import Finding
from verify.results.report import Check
from verify.results.verdict import Verdict

NAME = "derivative"
NUMBERS = (1e-2, 1e4)  # in the code: about which inputs are drawn
MOST_NUMBERS = 8
SCALES = (20, -20)  # powers of two of cotangents
LINEAR = 0.01  # relative; what is not linear is off by a good part
OVERFLOWS = 1e3  # what exponentials of do not fit in float64
ZEROS = "zeros among them"
ABOUT = "values"  # the fact of a finding that has other inputs than the given ones


@dataclass(frozen=True)
class _Differentiated:
    """The operator and call whose derivative is checked, with the names of its inputs."""

    spec: OperatorSpec
    concrete: ConcreteCall
    function: Callable[..., Any]
    found: tuple[Handwritten, ...]
    names: tuple[str, ...]
    seed: int


def check_derivative(
    spec: OperatorSpec,
    concrete: ConcreteCall,
    seed: int,
    further: Callable[[], Iterable[tuple[str, ConcreteCall]]] = tuple,
    *,
    always: bool = False,
) -> Probed:
    """Compare gradients with differences, per input, where a backward is written by hand (or `always`); there also for
    the `further` calls, each with the reason for it.

    No check where there is nothing to compare: torch's own derivatives only, or no gradients at all. Open where the
    operator has no smooth point near the given inputs.
    """
    started = time.perf_counter()
    run = plain(function_of(concrete.call.operator, spec))
    with torch.random.fork_rng(devices=[]):
        try:
            found = handwritten(spec, concrete, run)
        except Exception as error:  # noqa: BLE001 - whatever the operator raises is the answer
            return _open(f"it raises {in_one_line(error, 200)}", started)
        if not found and not always:
            return Probed()
        names = tensor_names(spec, concrete.call, run)
        return _compare(_Differentiated(spec, concrete, run, found, names, seed), started, further)


def _compare(
    subject: _Differentiated, started: float, others: Callable[[], Iterable[tuple[str, ConcreteCall]]]
) -> Probed:
    spec, concrete = subject.spec, subject.concrete
    wanted = [
        i
        for i, t in enumerate(concrete.tensors)
        if (t.is_floating_point() or t.is_complex()) and t.numel() and i not in concrete.constants
    ]
    if not wanted:
        return Probed(notes=(f"no input of `{spec.name}` has a gradient: nothing to compare with differences",))
    surveyed = _surveyed(subject, wanted)
    if isinstance(surveyed.error, NoGradient):
        return Probed(notes=(f"no output of `{spec.name}` has a gradient: nothing to compare with differences",))
    wrong, undecided = _wrong(surveyed), _undecided(surveyed, wanted)
    count = sum(s.judgement != "unclear" for s in surveyed.slopes)
    refuted = sum(s.judgement == "wrong" for s in surveyed.slopes)
    if spec.gradient == "custom":
        return Probed(notes=(_custom_note(subject, surveyed, wrong, undecided),))
    if wrong:
        seconds = time.perf_counter() - started
        check = Check(NAME, Verdict.REFUTED, count, refuted, seconds, supporting=True)
        return Probed((check,), (_finding(subject, surveyed, wrong),))
    if undecided:
        return _open(_why_open(subject, surveyed, undecided), started, count)
    elsewhere: tuple[tuple[str, _Differentiated, Place], ...] = (
        *((about, moved, "at") for about, moved in _with_zeros(subject, wanted)),
        *((about, moved, "far") for about, moved in _about_numbers(subject, wanted)),
        *((about, replace(subject, concrete=call), "near") for about, call in others()),
    )
    for about, moved, place in elsewhere:
        further = _surveyed(moved, wanted, place)
        count += sum(s.judgement != "unclear" for s in further.slopes)
        wrong = _wrong(further)
        undefined = place == "far" and not any(isfinite(s.found) for i in wrong for s in further.of(i, "wrong"))
        if wrong and not (undefined and as_undefined_as_forward(moved.function, moved.concrete, moved.found)):
            refuted = sum(s.judgement == "wrong" for s in further.slopes)
            check = Check(NAME, Verdict.REFUTED, count, refuted, time.perf_counter() - started, supporting=True)
            return Probed((check,), (_finding(moved, further, wrong, about),))
    low = deviation(subject.function, concrete, wanted, subject.seed)
    found = _nonlinear(subject, wanted) if low is None else _low_finding(subject, low)
    if found is not None:
        check = Check(NAME, Verdict.REFUTED, count + 1, 1, time.perf_counter() - started, supporting=True)
        return Probed((check,), (found,))
    detail = f"gradients of {', '.join(f'`{subject.names[i]}`' for i in wanted)} against differences"
    seconds = time.perf_counter() - started
    return Probed((Check(NAME, Verdict.TESTED_EXACT, count, 0, seconds, detail, supporting=True),))


def _surveyed(subject: _Differentiated, wanted: Sequence[int], place: Place = "near") -> Survey:
    """Measure slopes near the inputs. float32 inside the operator hides slopes and makes up some: what is wrong
    must be so without it."""
    tensors, call, seed = subject.concrete.tensors, subject.concrete.call, subject.seed
    found = survey(make_run(subject.function, call), tensors, wanted, seed, place=place)
    if isinstance(found.error, NoGradient) or not (_wrong(found) or _undecided(found, wanted)):
        return found
    wide = survey(make_run(subject.function, call, wide=True), tensors, wanted, seed, True, place)
    return _better(found, wide, wanted)


def _undecided(surveyed: Survey, wanted: Sequence[int]) -> list[int]:
    wrong = _wrong(surveyed)
    return [i for i in wanted if i not in wrong and not surveyed.of(i, "agrees")]


def _with_zeros(subject: _Differentiated, wanted: Sequence[int]) -> Iterator[tuple[str, _Differentiated]]:
    """Yield the call with zeros among one input: a backward that divides by what it was given, or has made of it, gives
    NaN there."""
    for index in wanted:
        tensors = list(subject.concrete.tensors)
        order = torch.rand(tensors[index].shape, generator=torch.Generator().manual_seed(subject.seed))
        tensors[index] = torch.where(order <= order.flatten().median(), torch.zeros(()), tensors[index])
        moved = replace(subject, concrete=replace(subject.concrete, tensors=tuple(tensors)))
        if _defined(moved, wanted):
            yield ZEROS, moved


def _about_numbers(subject: _Differentiated, wanted: Sequence[int]) -> Iterator[tuple[str, _Differentiated]]:
    """Yield the call with other inputs: on both sides of each number in the code of forward and backward, and of one at
    which exponentials overflow, in all inputs and in each alone. What saturates there, or has a branch of its own,
    shows at no small value."""
    classes = [h.function_class for h in subject.found if h.function_class is not None]
    targets = (subject.function, subject.spec.target, *classes)
    own = sorted({n for t in targets if t is not None for n in numbers_in(t) if NUMBERS[0] <= n <= NUMBERS[1]})
    numbers = dict.fromkeys((*own[-MOST_NUMBERS:], OVERFLOWS))
    groups = [tuple(wanted), *((i,) for i in wanted if len(wanted) > 1)]
    tensors = subject.concrete.tensors
    for number, group, shift in product(numbers, groups, (1, 4)):
        if shift > 1 and all(tensors[i].numel() >= 2 * len(BESIDE) for i in group):
            continue  # one draw has values of all kinds
        for positive in (False, True):
            generator = torch.Generator().manual_seed(subject.seed)
            drawn = [around(t, number, shift, generator, positive) if i in group else t for i, t in enumerate(tensors)]
            moved = replace(subject, concrete=replace(subject.concrete, tensors=tuple(drawn)))
            if _defined(moved, wanted):
                why = f"{number:g} stands in its code" if number in own else "exponentials overflow there"
                yield f"about {number:g} and -{number:g}, since {why}", moved
                break


def _defined(subject: _Differentiated, wanted: Sequence[int]) -> bool:
    """Return whether the operator runs there, and gives no NaN."""
    return _point(subject, subject.seed, wanted) is not None


def _wrong(surveyed: Survey) -> tuple[int, ...]:
    return surveyed.inputs("wrong")


def _better(first: Survey, wide: Survey, wanted: Sequence[int]) -> Survey:
    """Return, per input, the second survey where it decides, else the first."""
    if wide.error is not None:
        return first
    decided = {s.index for s in wide.slopes if s.judgement != "unclear"}
    slopes = [s for i in wanted for s in (wide if i in decided else first).slopes if s.index == i]
    return Survey(tuple(slopes), max(first.points, wide.points), first.error)


def _open(reason: str, started: float, count: int = 0) -> Probed:
    seconds = time.perf_counter() - started
    check = Check(NAME, Verdict.INCONCLUSIVE, count, 0, seconds, reason, supporting=True)
    return Probed((check,), (), (f"whether its own backward is the derivative is open: {reason}",))


def _why_open(subject: _Differentiated, surveyed: Survey, undecided: Sequence[int]) -> str:
    if not surveyed.points:
        if surveyed.error is not None:
            return f"near the given inputs it raises {in_one_line(surveyed.error, 200)}"
        return "near the given inputs its outputs are not finite"
    names = ", ".join(f"`{subject.names[i]}`" for i in undecided)
    return f"along {names}, difference quotients depend on the step: kinks, jumps or rounding at every point tried"


def _custom_note(subject: _Differentiated, surveyed: Survey, wrong: Sequence[int], undecided: Sequence[int]) -> str:
    name = subject.spec.name
    if wrong:
        texts = [f"{_off(surveyed.of(i, 'wrong')[0])} for `{subject.names[i]}`" for i in wrong]
        return f'the gradient of `{name}` is not the derivative, as gradient="custom" says: {", ".join(texts)}'
    if undecided:
        return f'gradient="custom" of `{name}`: {_why_open(subject, surveyed, undecided)}'
    return f'the gradient of `{name}` is the derivative: gradient="custom" is not needed'


def _off(slope: Slope) -> str:
    return f"slope {slope.found:.6g} instead of {slope.expected:.6g}"


def _finding(subject: _Differentiated, surveyed: Survey, wrong: Sequence[int], about: str = "") -> Finding:
    """`about`: where other inputs than the given ones lie, and why there."""
    concrete = subject.concrete
    slope = surveyed.of(wrong[0], "wrong")[0]
    blamed = find_wrong(subject.function, concrete, subject.found, subject.seed)
    names = " and ".join(f"`{subject.names[i]}`" for i in wrong)
    facts = {
        "input": subject.names[slope.index],
        "shapes": shapes_of(concrete.tensors),
        "dtype": "float64",
        "expected": f"{slope.expected:.10g} (slope along a random direction, by differences)",
        "found": "None" if slope.missing else f"{slope.found:.10g} (by the backward)",
    }
    if about:
        facts[ABOUT] = about
    scale = max(abs(slope.expected), abs(slope.found))
    if isfinite(slope.found):
        facts["relative difference"] = f"{abs(slope.expected - slope.found) / scale:.2g}" if scale else "0"
    if blamed and blamed[0].exact:
        facts["by autograd through its forward"] = blamed[0].exact
    what = f"{names} is not the derivative of what it computes"
    cause = _cause(subject, surveyed, wrong, blamed)
    return _not_derivative(subject, what, facts, cause, [b.by for b in blamed] or subject.found)


def _not_derivative(
    subject: _Differentiated,
    what: str,
    facts: Mapping[str, str],
    cause: str | None,
    guilty: Sequence[Handwritten],
    help: str = 'correct the backward; if it is meant to be no derivative: register_op(..., gradient="custom")',
) -> Finding:
    """Return the finding on the gradient for an input; `what`: its name, and what is wrong."""
    message = f"the gradient of `{subject.spec.name}` for {what}"
    related = tuple((f"backward of {h}", h.where) for h in guilty if h.where is not None)
    return Finding("gradient_is_not_derivative", message, subject.spec.where, facts, cause, help, related=related)


def _nonlinear(subject: _Differentiated, wanted: Sequence[int]) -> Finding | None:
    """Look for cotangents in which a gradient is not linear. Where the backward raises for some, nothing is wrong."""
    point = _point(subject, subject.seed, wanted)
    if point is None:
        return None
    expected = [torch.zeros(()) if g is None else g for g in point.gradients]
    scale = family_scale(expected)
    for which, factor, together in _cotangents_like(point):
        try:
            runs = [gradients_at(point, wanted, cotangents) for cotangents in together]
        except Exception:  # noqa: BLE001 - as above
            continue
        for index in wanted:
            found = torch.zeros_like(expected[index])
            for gradient in (run[index] for run in runs):
                found = found if gradient is None else found + gradient * factor
            apart = difference(found, expected[index], scale)
            if apart.relative > LINEAR:
                return _nonlinear_finding(subject, which, index, apart)
    return None


def _cotangents_like(point: Point) -> Iterator[tuple[str, float, list[list[Tensor | None]]]]:
    """Yield others whose gradients, added up and times a factor, are those of the point's: larger and smaller ones, by
    powers of two, which round nothing; and those of each output alone, as where a model does not use the others."""
    for power in SCALES:
        yield f"times 2^{power}", 2.0**-power, [[None if c is None else c * 2.0**power for c in point.cotangents]]
    used = [i for i, c in enumerate(point.cotangents) if c is not None]
    if len(used) > 1:
        alone = [[c if i == n else None for i, c in enumerate(point.cotangents)] for n in used]
        yield "of each output alone, where the others are not used, added up", 1.0, alone


def _nonlinear_finding(subject: _Differentiated, which: str, index: int, apart: TensorDifference) -> Finding:
    name, shapes = subject.names[index], shapes_of(subject.concrete.tensors)
    facts = {"input": name, "shapes": shapes, "dtype": "float64"}
    facts |= {"gradients of the outputs": which, "difference": str(apart)}
    what = f"`{name}` is not linear in the gradients that its backward is given"
    cause = "a derivative is linear in them: the backward cuts them off, or is wrong where some are None"
    return _not_derivative(subject, what, facts, cause, subject.found)


def _low_finding(subject: _Differentiated, low: Deviation) -> Finding:
    name, dtype = subject.names[low.index], dtype_name(low.dtype)
    facts = {"input": name, "shapes": shapes_of(subject.concrete.tensors), "dtype": dtype}
    facts["difference"] = f"{low.relative:.2g} of the gradient's norm; outputs agree"
    what = f"`{name}` is another one in {dtype} than in float64"
    cause = "in float64 the gradient is the derivative: the backward treats dtypes differently"
    return _not_derivative(subject, what, facts, cause, subject.found, "correct the backward")


def _cause(subject: _Differentiated, surveyed: Survey, wrong: Sequence[int], blamed: Sequence[Blame]) -> str | None:
    """Explain how the gradient is wrong, where a simple pattern (missing, swapped, scaled) fits; None elsewhere."""
    who = f"the backward of {blamed[0].by}" if blamed else "the backward"
    slopes = surveyed.of(wrong[0], "wrong")
    if all(s.missing for s in slopes):
        return f"{who} returns None for `{(blamed[0].names[0] if blamed else subject.names[wrong[0]])}`"
    if len(wrong) > 1 and _swapped(subject, wrong):
        first, second = (subject.names[i] for i in wrong)
        return f"{who} returns the gradients of `{first}` and `{second}` in each other's place"
    ratio = _ratio(surveyed, wrong[0])
    if ratio is not None:
        return f"{who} gives {ratio:.6g} times the derivative"
    habit = _of_cotangents(subject, wrong[0])
    if habit:
        return f"{who} {habit}"
    return f"{who} is wrong in {' and '.join(f'`{n}`' for n in blamed[0].names)}" if blamed else None


def _ratio(surveyed: Survey, index: int) -> float | None:
    """Return the one factor between gradient and derivative; None where there is none."""
    slopes = [s for s in surveyed.slopes if s.index == index and s.judgement != "unclear"]
    if len(slopes) < 3 or any(s.expected == 0 for s in slopes):
        return None
    ratios = [s.found / s.expected for s in slopes]
    return ratios[0] if max(ratios) - min(ratios) <= 1e-5 * max(abs(r) for r in ratios) else None


def _point(subject: _Differentiated, seed: int | None, wanted: Sequence[int]) -> Point | None:
    inputs = tuple(
        t.to(torch.complex128) if t.is_complex() else t.double() if t.is_floating_point() else t
        for t in subject.concrete.tensors
    )
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    try:
        return make_point(make_run(subject.function, subject.concrete.call), inputs, wanted, generator)
    except Exception:  # noqa: BLE001 - it need not run on exactly these; then the cause stays unnamed
        return None


def _of_cotangents(subject: _Differentiated, index: int) -> str:
    first, second, ones = (_point(subject, seed, [index]) for seed in (subject.seed, subject.seed + 1, None))
    if first is None or second is None or ones is None:
        return ""
    a, b = first.gradients[index], second.gradients[index]
    if a is not None and b is not None and bool(a.any()) and torch.equal(a, b):
        return "does not use its cotangent"
    directions = [direction_of(ones, index, torch.Generator().manual_seed(s)) for s in range(2)]
    if all(measure(ones, index, d).judgement == "agrees" for d in directions):
        return "is right for a cotangent of all ones only"
    return ""


def _swapped(subject: _Differentiated, wrong: Sequence[int]) -> bool:
    """Return whether two gradients are exchanged: each is right for the other input."""
    point = _point(subject, subject.seed, wrong)
    if point is None or len(wrong) != 2 or point.inputs[wrong[0]].shape != point.inputs[wrong[1]].shape:
        return False
    gradients = list(point.gradients)
    gradients[wrong[0]], gradients[wrong[1]] = gradients[wrong[1]], gradients[wrong[0]]
    other = with_gradients(point, gradients)
    generator = torch.Generator().manual_seed(subject.seed)
    return all(measure(other, i, direction_of(other, i, generator)).judgement == "agrees" for i in wrong)
