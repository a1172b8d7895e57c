"""Semantics against torch: every entry of the table, on at least 20 draws, forward and backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from math import isclose, pi
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._decomp import core_aten_decompositions

from op_registry.call import dtype_name

from tests.sampling import every
from tests.verify.op_proofs_bounded.calls import CALLS, Call, draw, wants_gradient
from verify.evidence.inputs.concrete_call import outputs_of
from verify.evidence.smt import interpret as interpreter
from verify.evidence.smt.element_arithmetic import Numbers, Unsupported, literal
from verify.evidence.smt.interpret import RULES, interpret
from verify.evidence.smt.semantics.element_arrays import Array
from verify.evidence.smt.storage_trace import DECOMPOSED, Blank, StorageTrace, decomposition_of, record

DRAWS = 20


def elements(tensor: Tensor) -> Array:
    flat = np.empty(tensor.numel(), dtype=object)
    flat[:] = [literal(v) for v in tensor.detach().reshape(-1).tolist()]
    return flat.reshape(tuple(tensor.shape))


def traced(function: Callable[..., Any], tensors: list[Tensor], wanted: list[bool]) -> StorageTrace:
    blanks = [Blank(tuple(t.shape), dtype_name(t.dtype), w) for t, w in zip(tensors, wanted, strict=True)]
    return record(function, blanks, lambda given: (list(given), {}))


def assert_same(found: Array | None, expected: Tensor, what: str) -> None:
    assert found is not None, what
    assert found.shape == tuple(expected.shape), what
    numbers = torch.tensor([float(e) for e in found.reshape(-1)], dtype=torch.float64)
    flat = expected.detach().reshape(-1).double()
    assert torch.allclose(numbers, flat, rtol=1e-7, atol=1e-7), f"{what}: {numbers} instead of {flat}"


def compare(trace: StorageTrace, function: Callable[..., Any], tensors: list[Tensor], wanted: list[bool]) -> None:
    leaves = [t.clone().requires_grad_(w) for t, w in zip(tensors, wanted, strict=True)]
    outputs = outputs_of(function(*leaves))
    assert outputs
    seeds = [torch.randn_like(o) if o is not None and o.requires_grad else None for o in outputs]
    found = interpret(
        trace, Numbers(), list(map(elements, tensors)), [None if s is None else elements(s) for s in seeds]
    )
    for i, output in enumerate(outputs):
        assert output is not None
        assert_same(found.outputs[i], output, f"output {i}")
    assert not found.unexpressed
    pairs = [(o, s) for o, s in zip(outputs, seeds, strict=True) if o is not None and s is not None]
    asked = [t for t in leaves if t.requires_grad]
    if pairs and asked:
        gradients = torch.autograd.grad([o for o, _ in pairs], asked, [s for _, s in pairs], allow_unused=True)
        of_leaf = iter(gradients)
        for i, leaf in enumerate(leaves):
            gradient = next(of_leaf) if leaf.requires_grad else None
            if gradient is not None:
                assert_same(found.gradients[i], gradient, f"gradient of input {i}")


@cache
def covered(call: Call) -> frozenset[str]:
    function, kinds = call
    trace = traced(function, draw(kinds, 0), wants_gradient(kinds))
    return frozenset(name for s in trace.steps for name in (s.operator, s.called))


@pytest.mark.parametrize("number", every(3, range(len(CALLS))))
def test_equals_torch(number: int) -> None:
    function, kinds = CALLS[number]
    wanted = wants_gradient(kinds)
    trace = traced(function, draw(kinds, 0), wanted)
    for seed in range(DRAWS):
        tensors = draw(kinds, seed)
        compare(trace, function, tensors, wanted)


@pytest.mark.long
def test_every_entry_is_compared() -> None:
    counts = Counter(name for call in CALLS for name in covered(call))
    assert not (set(RULES) | DECOMPOSED) - set(counts)
    assert not set(RULES) & DECOMPOSED


def on_grid(tensor: Tensor) -> Tensor:
    """Halves: thresholds, zeros and equal numbers, which random numbers never meet."""
    return (tensor * 2).round() / 2 if tensor.is_floating_point() else tensor


def test_decompositions_equal_torch_where_numbers_meet() -> None:
    followed = [call for call in CALLS if call[1][0] in "fgb" and covered(call) & DECOMPOSED]
    assert len(followed) > 50
    for function, kinds in followed:
        trace = traced(function, draw(kinds, 0), wants_gradient(kinds))
        for seed in range(DRAWS):
            compare(trace, function, list(map(on_grid, draw(kinds, seed))), wants_gradient(kinds))


# Floats in decompositions that do not depend on sizes: constants, and what the calls above pass.
CONSTANT = (0.5**0.5, (2 * pi) ** -0.5, 1e-12, 0.01, 0.1, 0.3, 0.3 / 2, 0.7)


@pytest.mark.long
def test_decompositions_round_no_size() -> None:
    """`1.0 / x.numel()` is rounded, in another way on a shard: what is equal in real numbers would be refuted."""

    def floats(value: Any) -> list[float]:
        if isinstance(value, list):
            return [number for item in value for number in floats(item)]
        return [abs(value)] if isinstance(value, float) else []

    def exact(number: float) -> bool:
        return number * 64 == int(number * 64) or any(isclose(number, c) for c in CONSTANT)

    steps = [s for function, kinds in CALLS for s in traced(function, draw(kinds, 0), wants_gradient(kinds)).steps]
    followed = [s for s in steps if s.called in DECOMPOSED]
    assert len(followed) > 100
    assert not {s.called for s in followed if not all(map(exact, floats(list(s.arguments.values()))))}


def test_a_wrong_entry_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {**RULES, "aten.tanh.default": RULES["aten.sigmoid.default"]}
    monkeypatch.setattr(interpreter, "RULES", wrong)
    tensors = draw("f2,3", 0)
    trace = traced(torch.tanh, tensors, [True])
    with pytest.raises(AssertionError, match="output 0"):
        compare(trace, torch.tanh, tensors, [True])


def follow_silu(monkeypatch: pytest.MonkeyPatch, into: Callable[[Tensor], Tensor]) -> StorageTrace:
    monkeypatch.setattr(
        "verify.evidence.smt.storage_trace.decomposition_of",
        lambda overload, inside: into if str(overload) == "aten.silu.default" else None,
    )
    return traced(torch.nn.functional.silu, draw("f2,3", 0), [False])


def test_a_wrong_decomposition_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A published prover had SiLU written as sigmoid."""
    trace = follow_silu(monkeypatch, torch.sigmoid)
    with pytest.raises(AssertionError, match="output 0"):
        compare(trace, torch.nn.functional.silu, draw("f2,3", 0), [False])


@pytest.mark.parametrize("into", [lambda x: x.float().sigmoid(), lambda x: x.sum(0)])
def test_a_decomposition_to_another_dtype_or_shape_is_refused(
    monkeypatch: pytest.MonkeyPatch, into: Callable[[Tensor], Tensor]
) -> None:
    with pytest.raises(Unsupported, match="another dtype or shape"):
        follow_silu(monkeypatch, into)


@pytest.mark.parametrize("into", [lambda x: x, lambda x: (x.t() * x.t().sigmoid()).t()])
def test_a_result_has_memory_and_strides_of_the_kernel(
    monkeypatch: pytest.MonkeyPatch, into: Callable[[Tensor], Tensor]
) -> None:
    trace = follow_silu(monkeypatch, into)
    assert trace.outputs[0] is not None
    assert trace.outputs[0].storage != trace.inputs[0].storage
    assert trace.outputs[0].stride == (3, 1)


def test_no_decomposition_reads_an_index() -> None:
    """`index_add` refuses a negative index, and torch's decomposition takes it from the end: a shard would raise."""
    taken = [o for o in core_aten_decompositions() if str(o) in DECOMPOSED]
    assert {a.name for o in taken for a in o._schema.arguments if "ind" in a.name and "Tensor" in str(a.type)} == set()


def test_torch_has_every_decomposition() -> None:
    """A name that torch no longer decomposes would have no semantics, and be proved by nobody."""
    known = {str(overload): overload for overload in core_aten_decompositions()}
    assert not DECOMPOSED - set(known)
    assert all(decomposition_of(known[name], False) is not None for name in DECOMPOSED)
    composite = torch.ops.aten.matmul.default
    assert decomposition_of(composite, True) is not None
    assert decomposition_of(composite, False) is None
    assert decomposition_of(torch.ops.aten.mm.default, True) is None
