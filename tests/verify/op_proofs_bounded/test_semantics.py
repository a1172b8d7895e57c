"""Semantics against torch: every entry of the table, on at least 20 draws, forward and backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.verify.op_proofs_bounded.calls import CALLS, Call, draw, wants_gradient
from verify.evidence.inputs.concrete_call import dtype_name, outputs_of
from verify.evidence.smt.algebra import Numbers, literal
from verify.evidence.smt.interpret import functional_name, interpret
from verify.evidence.smt.semantics import table as semantics
from verify.evidence.smt.semantics.rule import Array
from verify.evidence.smt.semantics.table import RULES
from verify.evidence.smt.trace import Blank, Trace, record

DRAWS = 20


def elements(tensor: Tensor) -> Array:
    flat = np.empty(tensor.numel(), dtype=object)
    flat[:] = [literal(v) for v in tensor.detach().reshape(-1).tolist()]
    return flat.reshape(tuple(tensor.shape))


def traced(function: Callable[..., Any], tensors: list[Tensor], wanted: list[bool]) -> Trace:
    blanks = [Blank(tuple(t.shape), dtype_name(t.dtype), w) for t, w in zip(tensors, wanted, strict=True)]
    return record(function, blanks, lambda given: (list(given), {}))


def assert_same(found: Array | None, expected: Tensor, what: str) -> None:
    assert found is not None, what
    assert found.shape == tuple(expected.shape), what
    numbers = torch.tensor([float(e) for e in found.reshape(-1)], dtype=torch.float64)
    flat = expected.detach().reshape(-1).double()
    assert torch.allclose(numbers, flat, rtol=1e-7, atol=1e-7), f"{what}: {numbers} instead of {flat}"


def compare(trace: Trace, function: Callable[..., Any], tensors: list[Tensor], wanted: list[bool]) -> None:
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


def covered(call: Call) -> set[str]:
    function, kinds = call
    trace = traced(function, draw(kinds, 0), wants_gradient(kinds))
    return {functional_name(s.operator) if s.written else s.operator for s in trace.steps}


@pytest.mark.parametrize("number", range(len(CALLS)))
def test_equals_torch(number: int) -> None:
    function, kinds = CALLS[number]
    wanted = wants_gradient(kinds)
    trace = traced(function, draw(kinds, 0), wanted)
    for seed in range(DRAWS):
        tensors = draw(kinds, seed)
        compare(trace, function, tensors, wanted)


def test_every_entry_is_compared() -> None:
    counts = Counter(name for call in CALLS for name in covered(call))
    assert not set(RULES) - set(counts)


def test_a_wrong_entry_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A published prover had SiLU written as sigmoid."""
    wrong = {**RULES, "aten.silu.default": RULES["aten.sigmoid.default"]}
    monkeypatch.setattr(semantics, "RULES", wrong)
    tensors = draw("f2,3", 0)
    trace = traced(torch.nn.functional.silu, tensors, [True])
    with pytest.raises(AssertionError, match="output 0"):
        compare(trace, torch.nn.functional.silu, tensors, [True])
