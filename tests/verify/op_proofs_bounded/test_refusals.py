"""Where a trace is not the whole story, nothing is proved; and nothing raises."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.verify.op_proofs_bounded.operators import (
    bound,
    call_of,
    floats,
    function_spec,
    prove,
    prove_function,
    spec_of,
)
from verify.evidence.inputs.concrete_call import ConcreteCall
from verify.evidence.smt.prove import prove_bounded

_BUFFER = torch.zeros(1, dtype=torch.float64)


def _remembers(x: Tensor) -> Tensor:
    _BUFFER.add_(x.detach().sum())
    return x * 2


def _hooked(x: Tensor) -> Tensor:
    y = torch.nn.functional.softplus(x)
    if y.requires_grad:
        y.register_hook(lambda g: g * g.shape[0])
    return y


def _loss(x: Tensor) -> Tensor:
    """Its logarithms are clamped, and their gradients are not."""
    return torch.ops.aten.binary_cross_entropy(x, torch.ones_like(x), None, 0)  # type: ignore[no-any-return]


class _Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.nn.functional.softplus(g * x.sum(0)).logsumexp(0, keepdim=True) + g * 0


REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "an item": (lambda x: x * x.sum().item(), "local_scalar_dense"),
    "a branch on a value": (lambda x: x if x.sum() > 0 else -x, "local_scalar_dense"),
    "a list": (lambda x: x * x.sum(1).tolist()[0], ""),
    "numpy": (lambda x: x * float(x.detach().numpy().sum()), ""),
    "a data-dependent shape": (lambda x: x[x > 0].sum() + x, "nonzero"),
    "random numbers": (lambda x: x + 0 * torch.rand_like(x), "random"),
    "no semantics": (lambda x: x + torch.linalg.vector_norm(x) * 0, "no semantics"),
    "memory that was not written": (lambda x: x + torch.empty_like(x) * 0, "never written"),
    "infinity": (lambda x: torch.where(x > 0, x, float("inf")), "inf"),
    "another dtype's view": (lambda x: x.view(torch.int64).view(torch.float64) * 1.0, "another dtype"),
    "complex numbers": (lambda x: torch.view_as_real(torch.complex(x, x)).sum(-1), "complex"),
    "a view that negates": (lambda x: torch._neg_view(x) * 1.0, "negates"),
    "short integers": (lambda x: (x > 0).to(torch.uint8).sum(1, keepdim=True) + x, "uint8"),
    "a write to a captured tensor": (_remembers, "not an argument"),
    "a hook": (_hooked, "register_hook"),
    "a detached factor": (lambda x: torch.nn.functional.softplus(x) + x.detach().sum(0) * 0, "detach"),
    "an autograd.Function": (_Straight.apply, "written by hand"),
    "a detached view": (lambda x: torch.nn.functional.softplus(x) + x.data * 0, ".data"),
    "a gradient of its own": (
        lambda x: torch.nn.functional.softplus(x) + _loss(x.sigmoid()),
        "a gradient of its own",
    ),
    "no_grad": (lambda x: torch.nn.functional.softplus(x) + _without_grad(x) * 0, "without recording"),
}


def _without_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x * 2


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    function, reason = REFUSED[name]
    proof = prove_function(function, "a b -> a b", "a", floats(12, 5))
    assert not proof.proved
    assert proof.reason
    assert reason in proof.reason
    assert proof.counter_example is None


def test_whole_that_always_raises() -> None:
    """Nothing follows from assumptions that nothing fulfils."""

    def out_of_range(x: Tensor, i: Tensor) -> Tensor:
        return x[torch.where(i > 0, x.shape[0] + 3, -x.shape[0] - 5)] * 0

    spec = function_spec(out_of_range, "n^ d, m -> m d")
    concrete = call_of("mine", floats(12, 5), torch.tensor([0, 1, 1, 0, 1, 0]))
    signature = bound(function_spec(lambda x, i: x[i], "n^ d, m -> m d"), concrete)
    proof = prove_bounded(spec, signature, concrete, ["m"])["m"]
    assert not proof.proved
    assert "whole" in proof.reason


def test_a_shard_that_raises() -> None:
    proof = prove_function(
        lambda x: x.view(6, -1) * 1.0 if x.shape[0] > 4 else x.view(5, -1), "a b -> a b", "a", floats(6, 4)
    )
    assert not proof.proved
    assert "raises" in proof.reason


def test_unknown_identifier_and_no_annotation() -> None:
    concrete = call_of("mine", floats(12, 5))
    spec = function_spec(lambda x: x * 2, "a b -> a b")
    signature = bound(spec, concrete)
    assert "identifier" in prove_bounded(spec, signature, concrete, ["z"])["z"].reason
    from dataclasses import replace

    nothing = replace(signature, bound=None)
    assert not prove_bounded(spec, nothing, concrete, ["a"])["a"].proved


def test_undefined_outputs_and_random_operators() -> None:
    spec = spec_of("aten.empty_like.default")
    concrete = call_of("aten.empty_like.default", floats(12, 6))
    undefined = ConcreteCall(concrete.call, concrete.tensors, compare=False)
    assert not prove(spec, undefined, "*0").proved
    assert not prove(spec, concrete, "*0").proved
    random = function_spec(lambda x: x, "a b -> a b", random=True)
    assert "random" in prove(random, call_of("mine", floats(12, 6)), "a").reason


def test_mutation_through_a_view_is_followed() -> None:
    """A write to a column through a view: right for rows, wrong for columns."""

    def written(x: Tensor) -> Tensor:
        y = x.clone()
        y[:, 0].mul_(7)
        return y

    assert prove_function(written, "a b -> a b", "a", floats(12, 6)).proved
    proof = prove_function(written, "a b -> a b", "b", floats(6, 12))
    assert not proof.proved
    assert proof.counter_example is not None


def test_a_captured_tensor_is_a_constant() -> None:
    table = torch.arange(5, dtype=torch.float64)
    assert prove_function(lambda x: x * table, "a 5 -> a 5", "a", floats(12, 5)).proved


def test_work_is_limited() -> None:
    spec = spec_of("aten.mm.default")
    concrete = call_of("aten.mm.default", floats(12, 18), floats(18, 6))
    proof = prove_bounded(spec, bound(spec, concrete), concrete, ["m"], steps=100)["m"]
    assert not proof.proved
    assert "too many steps" in proof.reason


@pytest.mark.long
def test_a_slow_machine_proves_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour passes whenever a clock is looked at."""
    for name in ("thread_time", "process_time", "monotonic", "perf_counter"):
        monkeypatch.setattr(time, name, count(0.0, 3600.0).__next__)
    spec = spec_of("aten.embedding.default")
    concrete = call_of("aten.embedding.default", floats(24, 18), torch.randint(0, 24, (6, 12)))
    assert prove_bounded(spec, bound(spec, concrete), concrete, ["v"])["v"].proved


SCATTERED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a row": lambda x, s: torch.select_scatter(x, s.flip(0), 1, 4),
    "rows": lambda x, s: torch.slice_scatter(x, s.flip(0).unsqueeze(1), 1, 4, 5),
}


@pytest.mark.parametrize("function", SCATTERED.values(), ids=SCATTERED)
def test_sizes_at_which_torch_does_not_run_it_prove_nothing(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    """With three rows there is no fourth one, and nothing would come of what is in the wrong order."""
    x, s = torch.arange(144).view(6, 12, 2), torch.arange(12).view(6, 2)
    proof = prove_function(function, "a b^ c, a c -> a b^ c", "a", x, s)
    assert not proof.proved and proof.counter_example is not None
    assert prove_function(lambda x, s: function(x, s.flip(0)), "a b^ c, a c -> a b^ c", "a", x, s).proved
