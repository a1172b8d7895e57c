"""Wrong lemmas are refuted where they are stated, with the operator and its place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from op_registry.call import Call
from op_registry.registry import default_registry
from op_registry.spec import OperatorSpec, Shards

from nnscaler.ir.operation_placement import Choice, RunInvariant, RunPartial, RunReplicated, Split
from tests.sampling import every
from tests.verify.lemmas.planted import called, floats, integers, proved, stated, users
from verify.programs.lemmas import LemmaResult
from verify.results.verdict import Verdict


def of(result: LemmaResult, claim: str) -> Any:
    """The lemma that ends so."""
    return next(m for m in result.lemmas if m.text.endswith(claim))


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def total(x: Tensor) -> Tensor:
    return (x * x).sum(-1)


@pytest.mark.parametrize(
    ("function", "annotation", "identifier", "shape"),
    [
        (softmax, "a b -> a b", "b", (4096, 16384)),
        (total, "a b+max -> a", "b", (4096,)),
        (lambda x: x.mean(-1), "a b+ -> a", "b", (4096,)),
        (lambda x: x.cumsum(0), "a b -> a b", "a", (4096, 16384)),
    ],
)
def test_a_wrong_annotation_of_a_user_is_refuted(
    function: Any, annotation: str, identifier: str, shape: tuple[int, ...]
) -> None:
    spec = users(function, annotation)
    result = proved(stated(spec, called("planted", [shape], floats(4096, 16384)), Split(identifier)))
    lemma = of(result, f"splits `{identifier}`")
    assert lemma.strength is Verdict.REFUTED and str(lemma.where) == "my_ops.py:7"
    (outcome,) = result.outcomes
    assert outcome.check.verdict is Verdict.REFUTED and outcome.check.refuted == 1
    (finding,) = outcome.findings
    assert finding.code == "annotation_wrong" and "`planted`" in finding.message
    assert str(finding.where) == "my_ops.py:7"


def test_a_right_annotation_of_the_same_operator_is_proved() -> None:
    spec = users(softmax, "a b^ -> a b^")
    result = proved(stated(spec, called("planted", [(4096, 16384)], floats(4096, 16384)), Split("a")))
    assert {m.strength for m in result.lemmas} == {Verdict.PROVED_ALL_SIZES}
    assert {m.text.rpartition(") ")[2] for m in result.lemmas} == {"splits `a`", "runs whole, with equal gradients"}


def test_a_built_in_annotation_that_is_changed_is_refuted() -> None:
    spec = default_registry().lookup("aten.layer_norm.default")
    assert spec is not None
    wrong = replace(spec, annotation="a b c, c, c -> a b c")
    shape = (8, 4096, 16384)
    call = called("aten.layer_norm.default", [shape], floats(*shape), [16384], floats(16384), floats(16384))
    result = proved(stated(wrong, call, Split("c")), stated(wrong, call, Split("a")))
    assert of(result, "splits `c`").strength is Verdict.REFUTED
    assert of(result, "splits `a`").strength.passes


def dropping(call: Call, shards: Shards) -> Call:
    """The hook of the embedding, without what it does with `padding_idx`."""
    spec = default_registry().lookup("aten.embedding.default")
    assert spec is not None and spec.localize is not None
    made = spec.localize(call, shards)
    if made.operator == call.operator:
        return made
    return Call(made.operator, (*made.args[:2], -1, *made.args[3:]), made.kwargs, made.outputs)


@pytest.mark.long
@pytest.mark.parametrize("padding", every(2, [3, 128001]))
def test_a_hook_that_drops_an_argument_is_refuted(padding: int) -> None:
    """Also where the argument is a number beyond all small sizes."""
    spec = default_registry().lookup("aten.embedding.default")
    assert spec is not None
    call = called("aten.embedding.default", [(8, 512, 4096)], floats(128256, 4096), integers(8, 512), padding)
    right = proved(stated(spec, call, Split("v")))
    wrong = proved(stated(replace(spec, localize=dropping), call, Split("v")))
    lemma = of(right, "splits `v`")
    assert lemma.strength is Verdict.PROVED_BOUNDED
    assert ("with other numbers" in lemma.blocker) == (padding > 1000)
    assert of(wrong, "splits `v`").strength is Verdict.REFUTED


def shifted(call: Call, shards: Shards) -> Call:
    """A hook of `arange` that forgets where a shard starts."""
    (axis,) = shards["t"]
    return Call("aten.arange.default", (call.args[0] // axis.parts,), call.kwargs, call.outputs)


@pytest.mark.long
def test_a_hook_that_forgets_where_a_shard_starts_is_refuted() -> None:
    spec = default_registry().lookup("aten.arange.default")
    assert spec is not None
    call = called("aten.arange.default", [(131072,)], 131072)
    assert of(proved(stated(spec, call, Split("t"))), "splits `t`").strength is Verdict.PROVED_BOUNDED
    assert of(proved(stated(replace(spec, localize=shifted), call, Split("t"))), "`t`").strength is Verdict.REFUTED


@pytest.mark.parametrize("slots", [{0}, {1}, {0, 1}])
def test_a_wrong_linear_set_is_refuted(slots: set[int]) -> None:
    spec = default_registry().lookup("aten.mul.Tensor")
    assert spec is not None
    wrong = replace(spec, linear=(frozenset(slots),))
    call = called("aten.mul.Tensor", [(64, 64)], floats(64, 64), floats(64, 64))
    lemma = of(proved(stated(wrong, call, RunPartial(frozenset(slots)))), f"in inputs {sorted(slots)}")
    assert (lemma.strength is Verdict.REFUTED) == (slots == {0, 1})
    assert lemma.strength is Verdict.PROVED_ALL_SIZES or lemma.finding.code == "linear_set_wrong"


class Clipped(torch.autograd.Function):
    """A backward that is not linear in the gradient that it is given."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return (2 * gradient).clamp(-3, 3)


class Plain(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


@pytest.mark.parametrize(
    ("function", "choice", "strength"),
    [
        (Plain.apply, RunInvariant(), Verdict.PROVED_ALL_SIZES),
        (Plain.apply, RunReplicated(), Verdict.PROVED_ALL_SIZES),
        (Clipped.apply, RunInvariant(), Verdict.TESTED_EXACT),  # every rank clips the whole's gradient
        (Clipped.apply, RunReplicated(), Verdict.REFUTED),
    ],
)
def test_a_backward_that_is_not_linear_takes_no_partial_sums(function: Any, choice: Choice, strength: Verdict) -> None:
    spec = users(function, "a -> a")
    (lemma,) = proved(stated(spec, called("planted", [(64,)], floats(64)), choice)).lemmas
    assert lemma.text.partition(") ")[2].startswith("runs whole")
    assert lemma.strength is strength


def noisy(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


def counting(x: Tensor) -> Tensor:
    CALLS.append(1)
    return x * len(CALLS)


CALLS: list[int] = []


@pytest.mark.parametrize(("function", "code"), [(noisy, "random_operator"), (counting, "not_repeatable")])
def test_what_is_no_function_of_its_inputs_cannot_run_whole(function: Any, code: str) -> None:
    spec = users(function, "a -> a")
    result = proved(stated(spec, called("planted", [(64,)], floats(64)), RunInvariant()))
    (lemma,) = result.lemmas
    assert lemma.strength is Verdict.REFUTED and result.outcomes[0].findings[0].code == code


def test_torch_draws_from_its_generator_on_every_rank() -> None:
    call = called("aten.rand_like.default", [(64,)], floats(64))
    result = proved(stated(OperatorSpec("aten.rand_like.default", "* -> *"), call, RunInvariant()))
    assert result.verdict is Verdict.REFUTED and result.outcomes[0].findings[0].code == "random_operator"


def test_attention_without_dropout_runs_whole() -> None:
    """torch says of it that it may draw."""
    operator, shape = "aten.scaled_dot_product_attention.default", (8, 32, 512, 128)
    call = called(operator, [shape], floats(*shape), floats(*shape), floats(*shape), None, 0.0, True)
    (lemma,) = proved(stated(operator, call, RunReplicated())).lemmas
    assert lemma.text.endswith("runs whole") and lemma.strength is Verdict.PROVED_ALL_SIZES


def test_position_based_draws_are_tested_and_no_more() -> None:
    call = called("nnscaler.dropout", [(64, 32)], floats(64, 32), 0.5)
    result = proved(stated("nnscaler.dropout", call, Split("*0"), Split("*1"), axes=(("dp", 2), ("tp", 2))))
    assert {m.strength for m in result.lemmas} == {Verdict.TESTED_EXACT}
    assert all("random" in m.blocker for m in result.lemmas)


@pytest.mark.long
def test_what_cannot_be_run_is_not_decided() -> None:
    def refuses(x: Tensor) -> Tensor:
        raise ValueError("only on our cluster")

    spec = users(refuses, "a -> a")
    result = proved(stated(spec, called("planted", [(64,)], floats(64)), Split("a")))
    assert result.verdict is Verdict.INCONCLUSIVE
    (outcome,) = result.outcomes
    assert outcome.findings[0].code == "nothing_checked" and "only on our cluster" in str(outcome.findings[0].cause)
