"""Prove claims that passed their tests, cheapest proof first. A proof only ever strengthens a verdict.

Dimension types prove a split for all sizes and values; Z3 proves, for all values at small sizes, what a shard's
rewritten call computes. A claim is as strong as its weakest sample call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from op_registry.call import dtype_name

from nnscaler.errors import NnscalerError
from nnscaler.ir.operation_placement import RunPartial, Split
from nnscaler.training.functional_optimizer import Update
from verify.evidence.dimension_types.prove import prove
from verify.evidence.oracle.annotation_claims import Slices, Target
from verify.evidence.oracle.case_runner import OperatorRunner, WholeRaised
from verify.evidence.oracle.enumerate_cases import Base
from verify.evidence.oracle.run_whole_operator import WholeRun, run_whole
from verify.evidence.smt.decide_equality import Limits
from verify.evidence.smt.prove import prove_bounded
from verify.evidence.user_code_path_on_fake_tensors import Places, other_way_on_fake_tensors, places_on_values
from verify.results.verdict import Condition, Strength, Verdict

BOUNDED_STEPS = 2_500_000  # for one target of one sample call
SPENT = "the limit of processor time was reached before it was proved"


def prove_base(
    runner: OperatorRunner, base: Base, deadline: float, skip: frozenset[Target] = frozenset()
) -> Mapping[Target, Strength]:
    """Return how strong each claim about one sample call is.

    `deadline`: of `time.thread_time`; what is not proved by then is open. `skip`: claims that failed. Never raises.
    """
    targets = [t for t in base.targets if t not in skip and not isinstance(t, Slices)]
    followed = _followed(runner, base, deadline)
    if isinstance(followed, Strength):
        return dict.fromkeys(targets, followed)
    whole, way = followed
    found: dict[Target, Strength] = {}
    steps = (*_steps_traced(runner.spec.target), *_dtypes_traced(runner, whole))
    for proof in prove(runner.spec, base.signature, whole.concrete, way=way).proofs:
        choice = proof.target
        target: Target | None = None
        if isinstance(choice, Split):
            target = choice.identifier
        elif isinstance(choice, RunPartial):
            target = choice.slots
        if target not in targets or target is None:
            continue
        conditions = (*proof.conditions, *steps)
        if proof.proved and not conditions:
            found[target] = Strength(Verdict.PROVED_ALL_SIZES)
        else:
            verdict = Verdict.PROVED_BOUNDED if proof.proved else Verdict.TESTED_EXACT
            found[target] = Strength(verdict, proof.blocker, conditions=conditions)
    for target in targets:
        strength = found.get(target, Strength(Verdict.TESTED_EXACT, "no proof was tried"))
        if strength.verdict is Verdict.TESTED_EXACT and time.thread_time() > deadline:
            strength = replace(strength, blocker=SPENT, open=True)
        elif strength.verdict is Verdict.TESTED_EXACT:
            limits = Limits(deadline=deadline)
            bounded = prove_bounded(runner.spec, base.signature, whole.concrete, [target], limits, BOUNDED_STEPS)
            if target in bounded and bounded[target].proved:
                strength = replace(strength, verdict=Verdict.PROVED_BOUNDED)
            elif target in bounded and bounded[target].counter_example:
                counter_example = bounded[target].counter_example
                strength = replace(strength, verdict=Verdict.REFUTED, counter_example=counter_example)
            elif time.thread_time() > deadline:
                strength = replace(strength, blocker=SPENT, open=True)
        found[target] = strength
    return found


def _followed(runner: OperatorRunner, base: Base, deadline: float) -> tuple[WholeRun, Places | None] | Strength:
    """Return the run of the whole operator that proofs follow, with its way through a user's code, or how strong its
    claims are where none can: one that draws, does not run, or runs other code on the fake tensors of a trace."""
    if runner.spec.random:
        return Strength(Verdict.TESTED_EXACT, "it draws random numbers")
    if time.thread_time() > deadline:
        return Strength(Verdict.TESTED_EXACT, SPENT, open=True)
    try:
        whole = runner.prepare(base.inputs).whole
    except (WholeRaised, NnscalerError) as error:
        return Strength(Verdict.TESTED_EXACT, str(error))
    if runner.spec.target is None or isinstance(runner.spec.target, Update):
        return whole, None
    function = runner.function(whole.concrete)
    way = places_on_values(function, whole)
    parted = other_way_on_fake_tensors(function, whole, way)
    return Strength(Verdict.TESTED_EXACT, parted) if parted else (whole, way)


def _steps_traced(target: object) -> tuple[Condition, ...]:
    """Return what the proof of an optimizer that counts its steps takes for granted. The trace has one number of steps
    in the place of all: the code may do something else at another one."""
    if not (isinstance(target, Update) and target.counts):
        return ()
    *some, last = (str(steps + 1) for steps in (0, *target.pasts))
    return (Condition(f"the optimizer counts its steps, and steps {', '.join(some)} and {last} are followed"),)


def _dtypes_traced(runner: OperatorRunner, whole: WholeRun) -> tuple[Condition, ...]:
    """Return what the proof of a user's operator takes for granted of dtypes. It follows the code in float64, and the
    code may do something else in another one."""
    if runner.spec.target is None or isinstance(runner.spec.target, Update):
        return ()
    function = runner.function(whole.concrete)
    followed = _calls_in(torch.float64, function, whole)
    ways = {dtype: _calls_in(dtype, function, whole) for dtype in (torch.float32, torch.bfloat16, torch.float16)}
    other = [dtype_name(dtype) for dtype, calls in ways.items() if None not in (calls, followed) and calls != followed]
    return (Condition(f"it is followed in float64, and calls other functions in {', '.join(other)}"),) if other else ()


def _calls_in(dtype: torch.dtype, function: Callable[..., Any], whole: WholeRun) -> tuple[object, ...] | None:
    """Return what an operator calls of torch in a dtype, without changes of dtype; None where it does not run in it."""
    for _ in range(2):  # the first run may fill what is kept for the second
        calls = _Calls()
        try:
            with calls:
                run_whole(function, whole.concrete, torch.Generator().manual_seed(0), dtype, whole.without_gradient)
        except Exception:  # noqa: BLE001 - then no shard runs either
            return None
    return tuple(calls.made)


_OF_DTYPES = frozenset(("to", "type", "type_as", "float", "double", "half", "bfloat16", "is_floating_point", "finfo"))


class _Calls(TorchFunctionMode):
    """While open, the functions of torch that are called, with the whole numbers that they are given: dims, and not
    the least number of a dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[object] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name != "__get__" and name not in _OF_DTYPES:  # an attribute, such as a shape or the dtype
            self.made.append((name, *(n for n in tree_leaves((args, kwargs)) if isinstance(n, int))))
        return func(*args, **(kwargs or {}))
