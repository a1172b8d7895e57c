"""A wrong operator is never proved, and comes with values on which it is wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from op_registry.call import Call
from op_registry.rank_expression import Expression, block_start, index
from op_registry.spec import OperatorSpec

from nnscaler.layout import Partial, State
from tests.sampling import every
from tests.verify.op_proofs_bounded.operators import (
    call_of,
    floats,
    function_spec,
    proofs_of,
    prove,
    prove_function,
    sample_call,
    spec_of,
)
from verify.evidence.inputs.concrete_call import ConcreteCall
from verify.evidence.smt import choice_equations
from verify.evidence.smt.check_choice import BoundedResult
from verify.evidence.smt.choice_equations import Pairs
from verify.evidence.smt.decide_equality import Limits
from verify.evidence.smt.element_arithmetic import Numbers
from verify.evidence.smt.semantics.element_arrays import Array

Hook = Callable[[Call, Mapping[str, Any]], Call]


def ids(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(1))


def refuted(proof: BoundedResult) -> None:
    assert not proof.proved
    assert proof.counter_example is not None, proof.reason


def hooked(name: str, hook: Hook, **changes: Any) -> OperatorSpec:
    return replace(spec_of(name), localize=hook, **changes)


def embedding_with(first: Expression | int, padding: int | None = None) -> Hook:
    def hook(call: Call, shards: Mapping[str, Any]) -> Call:
        kept = call.get(2, "padding_idx", -1) if padding is None else padding
        block = (call.args[0], call.args[1], kept, first, call.args[0].shape[0])
        return Call("nnscaler.embedding_block", block, {}, call.outputs)

    return hook


def embedding_call() -> ConcreteCall:
    return call_of("aten.embedding.default", floats(12, 5), ids(12, 4, 3), 5)


def split_vocabulary(hook: Hook) -> BoundedResult:
    return prove(hooked("aten.embedding.default", hook), embedding_call(), "v")


@pytest.mark.long
def test_vocabulary() -> None:
    right = index("shards") * 2
    three = prove(hooked("aten.embedding.default", _right_embedding), embedding_call(), "v")
    assert three.proved, three.reason
    refuted(split_vocabulary(embedding_with(right + 1)))
    refuted(split_vocabulary(embedding_with(right + (-1))))
    refuted(split_vocabulary(embedding_with(0)))  # every rank looks up the first block
    refuted(split_vocabulary(embedding_with(index("shards"))))  # right for shards of one row


def _right_embedding(call: Call, shards: Mapping[str, Any]) -> Call:
    first = block_start("v", call.args[0].shape[0], shards["v"])
    return embedding_with(first)(call, shards)


@pytest.mark.long
def test_vocabulary_without_padding_idx() -> None:
    """The forward pass is right: only the gradient shows it."""

    def hook(call: Call, shards: Mapping[str, Any]) -> Call:
        first = block_start("v", call.args[0].shape[0], shards["v"])
        return embedding_with(first, padding=-1)(call, shards)

    proof = split_vocabulary(hook)
    refuted(proof)
    assert proof.counter_example is not None
    assert proof.counter_example["tensor"].startswith("gradient of input 0")


def test_vocabulary_without_a_mask() -> None:
    """Ids of other blocks raise on the shard."""

    def looked_up(weight: Tensor, ids: Tensor, first: int = 0) -> Tensor:
        return torch.nn.functional.embedding(ids - first, weight)

    def hook(call: Call, shards: Mapping[str, Any]) -> Call:
        return Call(call.operator, (*call.args, block_start("v", call.args[0].shape[0], shards["v"])))

    spec = function_spec(looked_up, "v+ d, n -> n d", localize=hook, contiguous=frozenset({"v"}))
    proof = prove(spec, call_of("mine", floats(12, 5), ids(12, 4)), "v")
    refuted(proof)
    assert proof.counter_example is not None
    assert "in range" in proof.counter_example["shard"]


@pytest.mark.parametrize("off", [1, -1])
def test_arange_off_by_one(off: int) -> None:
    def hook(call: Call, shards: Mapping[str, Any]) -> Call:
        (size,) = call.outputs[0].shape  # type: ignore[union-attr]
        first = block_start("t", size, shards["t"]) + off
        return Call("aten.arange.start", (first, first + size // shards["t"][0].parts), {}, call.outputs)

    refuted(prove(hooked("aten.arange.default", hook), call_of("aten.arange.default", 12), "t"))


def test_arange_with_strides_is_right_for_one_element_only() -> None:
    def hook(call: Call, shards: Mapping[str, Any]) -> Call:
        (size,) = call.outputs[0].shape  # type: ignore[union-attr]
        parts, first = shards["t"][0].parts, index("shards")
        return Call("aten.arange.start_step", (first, first + size, parts), {}, call.outputs)

    refuted(prove(hooked("aten.arange.default", hook), call_of("aten.arange.default", 12), "t"))


def test_slice_of_rank_0_on_all_ranks() -> None:
    def biased(x: Tensor, bias: Tensor, first: int = 0) -> Tensor:
        return x + bias[first : first + x.shape[0]]

    def hook(first: Callable[[Expression], Expression]) -> Hook:
        def rewritten(call: Call, shards: Mapping[str, Any]) -> Call:
            start = first(block_start("n", call.args[0].shape[0], shards["n"]))
            return Call(call.operator, (*call.args, start))

        return rewritten

    def proof(first: Callable[[Expression], Expression]) -> BoundedResult:
        arguments = (floats(12), floats(12))
        given = {"localize": hook(first), "contiguous": frozenset({"n"})}
        return prove_function(biased, "n, m^ -> n", "n", *arguments, **given)

    assert proof(lambda start: start).proved
    refuted(proof(lambda start: Expression(0)))
    refuted(proof(lambda start: Expression(start.constant, tuple((a, 1) for a, _ in start.terms))))


def test_linear_sets() -> None:
    """`x y` is linear in either, not in both; `x + 1` is affine; `x + y` is linear in both, not in one."""
    cases = [
        (lambda x, y: x * y, {0}, True),
        (lambda x, y: x * y, {1}, True),
        (lambda x, y: x * y, {0, 1}, False),
        (lambda x, y: x + 1 + 0 * y, {0}, False),
        (lambda x, y: x - 2 * y, {0, 1}, True),
        (lambda x, y: x - 2 * y, {0}, False),
        (lambda x, y: torch.where(y > 0, x, 0.0), {0}, True),
        (lambda x, y: torch.where(y > 0, x, -7.0), {0}, False),
        (lambda x, y: x.relu() + 0 * y, {0}, False),
    ]
    for function, slots, holds in cases:
        slots_set = frozenset(slots)
        proof = prove_function(function, "a b, a b -> a b", slots_set, floats(6, 4), floats(6, 4), linear=(slots_set,))
        assert proof.proved == holds, (slots, proof)
        if not holds:
            refuted(proof)


WRONG: dict[str, tuple[Callable[..., Any], str, str, tuple[Any, ...]]] = {
    "a sum is missing": (
        lambda x, w, b: x @ w + b,
        "m k+, k+ n, n -> m n",
        "k",
        (floats(4, 12), floats(12, 5), floats(5)),
    ),
    "a sum where a maximum is meant": (lambda x: x.amax(1), "n c+ -> n", "c", (floats(4, 12),)),
    "a maximum where a sum is meant": (lambda x: x.sum(1), "n c+max -> n", "c", (floats(4, 12),)),
    "a mean of local means": (lambda x: x.mean(0), "n+ d -> d", "n", (floats(12, 5),)),
    "a mean that counts a mask": (
        lambda x, m: (x * m).sum() / m.sum(),
        "n+, n+ -> ()",
        "n",
        (floats(12).abs(), floats(12).abs()),
    ),
    "tanh of a partial sum": (lambda x, w: (x @ w).tanh(), "m k+, k+ n -> m n", "k", (floats(4, 12), floats(12, 5))),
    "relu of a partial sum": (lambda x, w: (x @ w).relu(), "m k+, k+ n -> m n", "k", (floats(4, 12), floats(12, 5))),
    "softmax along the split": (lambda x: x.softmax(-1), "n c -> n c", "c", (floats(4, 12),)),
    "a scan along the split": (lambda x: x.cumsum(0), "n d -> n d", "n", (floats(12, 5),)),
    "a flip along the split": (lambda x: x.flip(0), "n d -> n d", "n", (floats(12, 5),)),
    "a roll along the split": (lambda x: x.roll(1, 0), "n d -> n d", "n", (floats(12, 5),)),
    "every second entry": (lambda x: x[::2].repeat(2), "n -> n", "n", (floats(12),)),
    "a factor in the wrong order": (
        lambda x: x.view(-1, 3).t().reshape(-1),
        "(n 3) -> (n 3)",
        "n",
        (floats(36),),
    ),
    "divided by the local size": (lambda x: x / x.shape[0], "n d -> n d", "n", (floats(12, 5),)),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_annotation(name: str) -> None:
    function, annotation, target, arguments = WRONG[name]
    refuted(prove_function(function, annotation, target, *arguments))


class _ForgetsATerm(torch.autograd.Function):
    """x * rowsum(x), whose backward uses local sums in the wrong way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * x.sum(0)  # type: ignore[no-any-return]


def test_backward_that_depends_on_the_shard() -> None:
    """The forward pass is right. The backward is computed, not inferred."""
    for target, holds in (("a", False), ("b", True)):
        proof = prove_function(_ForgetsATerm.apply, "a b -> a b", target, floats(12, 5))
        assert proof.proved == holds, proof.reason
        assert (proof.counter_example is not None) != holds


def test_split_points_of_strided_shards() -> None:
    """`(2 n)` in halves: right for contiguous blocks of n, and strided ones; `(n 2)` claimed instead is wrong."""

    def swapped(x: Tensor) -> Tensor:
        a, b = x.chunk(2)
        return torch.cat([b, a])

    assert prove_function(swapped, "(2 n) -> (2 n)", "n", floats(24)).proved
    refuted(prove_function(swapped, "(n 2) -> (n 2)", "n", floats(24)))


def test_what_the_solver_does_not_know_is_not_proved() -> None:
    spec = spec_of("nnscaler.ce_pick")
    concrete = call_of("nnscaler.ce_pick", floats(6, 12), ids(12, 6), -100)
    assert prove(spec, concrete, "c").proved
    proof = prove(spec, concrete, "c", Limits(resources=1))
    assert not proof.proved
    assert proof.counter_example is None
    assert "does not know" in proof.reason or "no values are known" in proof.reason


def test_hooks_are_checked_on_three_shards() -> None:
    """Right on the first and the last rank, wrong in between."""

    def hook(call: Call, shards: Mapping[str, Any]) -> Call:
        (size,) = call.outputs[0].shape  # type: ignore[union-attr]
        parts = shards["t"][0].parts
        first = index("shards") * (size // 2 if parts == 2 else size - size // parts)
        return Call("aten.arange.start", (first, first + size // parts), {}, call.outputs)

    refuted(prove(hooked("aten.arange.default", hook), call_of("aten.arange.default", 12), "t"))


def test_mean_without_the_hook() -> None:
    spec = replace(spec_of("aten.mean.default"), localize=None)
    refuted(prove(spec, call_of("aten.mean.default", floats(6, 12)), "a"))
    from op_registry.samples import samples_of

    sample = samples_of("aten.mse_loss.default")[0]
    refuted(prove(replace(spec_of("aten.mse_loss.default"), localize=None), sample_call(sample), "a"))


ROTATED = [
    *("aten.slice.Tensor", "aten.conv1d.padding", "aten.arange.start", "nnscaler.ce_pick", "aten.mean.dim"),
    *("aten.split.Tensor", "aten.slice_scatter.default", "aten.unflatten.int", "aten.l1_loss.default"),
]


@pytest.mark.parametrize("name", every(2, ROTATED))
def test_no_proof_is_vacuous(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every rank's result taken for the next one's, and one term of every sum left out, nothing is proved."""

    def wrong(algebra: Numbers, whole: Array, ranks: Sequence[Array], state: State) -> Pairs | None:
        last = choice_equations.zeros(ranks[0].shape) if isinstance(state, Partial) else ranks[0]
        return equations(algebra, whole, [*ranks[1:], last], state)

    equations = choice_equations.equations
    monkeypatch.setattr(choice_equations, "equations", wrong)
    proofs = {key: proof for key, proof in proofs_of(name).items() if isinstance(key[1], str)}
    assert proofs
    assert not [key for key, proof in proofs.items() if proof.proved]
    assert all(proof.counter_example for proof in proofs.values() if proof.reason != "shards are too small")
