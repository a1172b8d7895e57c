"""A hook that is right for equal contiguous blocks, and not for every split, leaves nothing proved for all sizes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from torch import Tensor

from op_registry.call import AxisShard, Call
from op_registry.rank_expression import local_size
from op_registry.spec import OperatorSpec, Refusal, SchemaParameter, Shards

from nnscaler.ir.operation_placement import Split
from tests.verify.op_proofs.proving import floats, signature_of
from verify.evidence.dimension_types.localize_hooks_on_irregular_shards import left_alone
from verify.evidence.dimension_types.prove import Proof, prove
from verify.evidence.inputs.concrete_call import make_call

Hook = Callable[[Call, Shards], Call]


def _doubled(x: Tensor, flip: bool = False) -> Tensor:
    return -x if flip else x * 2


def _first(shards: Shards) -> AxisShard:
    return shards.get("a", (AxisShard("axis", 1),))[0]


def _flips(when: Callable[[Call, Shards], bool]) -> Hook:
    return lambda call, shards: call.replace(1, "flip", True) if when(call, shards) else call


def _raises_for_strides(call: Call, shards: Shards) -> Call:
    if _first(shards).outer > 1:
        raise ValueError("no such thing")
    return call


WRONG: dict[str, Hook] = {
    "eight parts": _flips(lambda call, shards: _first(shards).parts == 8),
    "sixteen parts": _flips(lambda call, shards: _first(shards).parts == 16),
    "four strided parts": _flips(lambda call, shards: _first(shards).parts == 4 and _first(shards).outer > 1),
    "three blocks": _flips(lambda call, shards: _first(shards).outer == 3),
    "sections": _flips(lambda call, shards: len(set(_first(shards).sections)) == 1),
    "unequal sections": _flips(lambda call, shards: len(set(_first(shards).sections)) > 1),
    "three sections": _flips(lambda call, shards: len(_first(shards).sections) > 2),
    "unequal sizes": _flips(lambda call, shards: bool(_first(shards).sizes)),
    "nested axes": _flips(lambda call, shards: len(shards.get("a", ())) > 1),
    "beside another": _flips(lambda call, shards: shards.keys() >= {"a", "b"}),
    "beside a strided one": _flips(
        lambda call, shards: "a" in shards and any(s.outer > 1 for s in shards.get("b", ()))
    ),
    "large tensors": _flips(lambda call, shards: "a" in shards and call.tensors()[0].shape[0] >= 48),
    "all dims large": _flips(lambda call, shards: "a" in shards and call.tensors()[0].shape[1] >= 48),
    "it raises": _raises_for_strides,
}


def _spec(function: Callable[..., Tensor], hook: Hook) -> OperatorSpec:
    given = (SchemaParameter("x", True), SchemaParameter("flip", False, False))
    return OperatorSpec("tested", "a b -> a b", target=function, localize=hook, uneven=True, parameters=given)


def _proof(function: Callable[..., Tensor], hook: Hook) -> Proof:
    concrete = make_call("tested", (floats(12, 6),), {})
    spec = _spec(function, hook)
    proofs = prove(spec, signature_of(spec, concrete), concrete).proofs
    return next(proof for proof in proofs if proof.target == Split("a"))


@pytest.mark.parametrize("name", WRONG)
def test_a_hook_that_does_otherwise_for_other_shards_is_not_proved(name: str) -> None:
    proof = _proof(_doubled, WRONG[name])
    assert not proof.proved and "split a" in proof.blocker


def _as_it_is(call: Call, shards: Shards) -> Call:
    return call


def _refusing(call: Call, shards: Shards) -> Call:
    if not _first(shards).contiguous:
        raise Refusal("contiguous blocks only")
    return call


@pytest.mark.parametrize("hook", [_as_it_is, _refusing])
def test_a_hook_that_does_the_same_or_refuses_is_proved(hook: Hook) -> None:
    assert _proof(_doubled, hook).proved


def _viewed(x: Tensor, n: int) -> Tensor:
    return x.view(n, x.shape[1]) * 2


def _following(call: Call, shards: Shards, always: bool) -> Call:
    if "a" not in shards or (not always and _first(shards).sizes):
        return call
    return call.replace(1, "n", local_size(call.get(1, "n"), shards["a"]))


@pytest.mark.parametrize("always", [True, False])
def test_a_size_has_to_follow_every_shard(always: bool) -> None:
    """The shard's size is a number of its call, also where it depends on the rank's place."""
    concrete = make_call("tested", (floats(12, 6), 12), {})
    spec = _spec(_viewed, partial(_following, always=always))
    (proof,) = (p for p in prove(spec, signature_of(spec, concrete), concrete).proofs if p.target == Split("a"))
    assert proof.proved is always
    assert always or "split a sizes" in proof.blocker


def test_unequal_shards_are_asked_for_in_more_parts_than_two() -> None:
    concrete = make_call("tested", (floats(12, 6),), {})
    wrong = _flips(lambda call, shards: len(_first(shards).sizes) == 3)
    for hook, alone in ((_as_it_is, True), (wrong, False)):
        assert left_alone(signature_of(_spec(_doubled, hook), concrete), "a") is alone
