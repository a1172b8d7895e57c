"""Decide whether a choice is right, another way than the oracle under test does.

Every rank runs by itself with its own backward pass, inputs and cotangents are real numbers, and partial sums random.
Shards are cut as everywhere (`nnscaler.runtime.cut_tensors`), for that is what the claim is about.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from op_registry.bind_and_localise_call import localise
from op_registry.spec import Refusal

from nnscaler.ir.conversion_table_and_paths import shape_of_rank
from nnscaler.ir.derive_operand_layouts import input_states, output_states, shards_of
from nnscaler.ir.operation_annotations import Signature
from nnscaler.ir.operation_placement import Choice
from nnscaler.layout import Partial, Sharded, State, gradient_state
from nnscaler.runtime.cut_tensors import piece_of
from verify.evidence.inputs.concrete_call import function_of, outputs_of, with_tensors
from verify.evidence.inputs.draw_values import random_terms
from verify.evidence.oracle.compare_partition import make_partition
from verify.evidence.oracle.run_whole_operator import WholeRun

AXIS = "shards"
BOUND = 1e-9  # relative to the largest value: rounding in float64 is far below, a wrong claim far above
Values = Sequence[Tensor | None]


@dataclass(frozen=True)
class _SplitQuestion:
    whole: WholeRun
    signature: Signature
    choice: Choice
    inputs: tuple[State, ...]
    outputs: tuple[State, ...]
    parts: int
    generator: torch.Generator


def holds(
    whole: WholeRun,
    signature: Signature,
    choice: Choice,
    parts: int,
    seed: int,
    inputs: tuple[State, ...] | None = None,
) -> bool | None:
    """Return whether the choice is right on this run of the whole; None where the operator's hook refuses it.

    `inputs`: states to give the operands instead of those that follow from the annotation.
    """
    generator = torch.Generator().manual_seed(seed)
    given = input_states(signature, choice) if inputs is None else inputs
    outputs = output_states(signature, choice, len(signature.call.outputs))
    question = _SplitQuestion(whole, signature, choice, given, outputs, parts, generator)
    try:
        return _decide(question)
    except Refusal:
        return None
    except Exception:  # noqa: BLE001 - whatever a shard raises, the claim is not true
        return False


def _shard(tensor: Tensor, state: State, parts: int, rank: int) -> Tensor:
    return piece_of(tensor, state, parts, rank) if isinstance(state, Sharded) else tensor


def _decide(q: _SplitQuestion) -> bool:
    tensors = q.whole.concrete.tensors
    columns = [
        random_terms(t, q.parts, q.generator, real=True)
        if isinstance(state, Partial)
        else [_shard(t, state, q.parts, r) for r in range(q.parts)]
        for t, state in zip(tensors, q.inputs, strict=True)
    ]
    spec = q.signature.spec
    assert spec is not None
    axes = [(AXIS, q.parts)]
    shards = shards_of(q.signature, [q.choice], axes)
    shapes = [
        None if o is None else shape_of_rank((s,), axes, tuple(o.shape))
        for o, s in zip(q.whole.outputs, q.outputs, strict=True)
    ]
    call = localise(spec, q.signature.call, shards, shapes)
    function: Callable[..., Any] = function_of(call.operator, spec)
    outputs: list[Values] = []
    gradients: list[Values] = []
    for rank in range(q.parts):
        leaves = [_leaf(q, i, column[rank]) for i, column in enumerate(columns)]
        args, kwargs = with_tensors(call, leaves, {AXIS: rank})
        if spec.random:
            kwargs = {**kwargs, **make_partition(q.signature, [q.choice], [q.parts]).random_arguments((rank,))}
        found = outputs_of(function(*args, **kwargs))
        outputs.append([None if o is None else o.detach() for o in found])
        gradients.append(_gradients(q, found, leaves, rank))
    return _outputs_agree(q, outputs) and _gradients_agree(q, gradients)


def _leaf(q: _SplitQuestion, index: int, value: Tensor) -> Tensor:
    leaf = value.detach().clone(memory_format=torch.contiguous_format)
    floating = leaf.is_floating_point() or leaf.is_complex()
    return leaf.requires_grad_(floating and index not in q.whole.without_gradient)


def _gradients(q: _SplitQuestion, found: Values, leaves: Sequence[Tensor], rank: int) -> Values:
    """Cotangents lie as outputs do; of a partial sum, every rank gets the whole one."""
    ends, seeds = [], []
    for output, cotangent, state in zip(found, q.whole.cotangents, q.outputs, strict=True):
        if output is not None and cotangent is not None and output.requires_grad:
            ends.append(output)
            seeds.append(_shard(cotangent, state, q.parts, rank))
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if not ends or not wanted:
        return [None] * len(leaves)
    grads = iter(torch.autograd.grad(ends, wanted, seeds, allow_unused=True))
    return [next(grads) if leaf.requires_grad else None for leaf in leaves]


def _outputs_agree(q: _SplitQuestion, outputs: Sequence[Values]) -> bool:
    for index, (expected, state) in enumerate(zip(q.whole.outputs, q.outputs, strict=True)):
        if expected is None:
            continue
        pieces = [part[index] for part in outputs]
        if not q.whole.concrete.compare:
            if any(p is None or p.shape != _shard(expected, state, q.parts, r).shape for r, p in enumerate(pieces)):
                return False
            continue
        if not _agree(pieces, expected, state, q.parts):
            return False
    return True


def _gradients_agree(q: _SplitQuestion, gradients: Sequence[Values]) -> bool:
    """Check gradients: that of a copy is a partial sum, that of a partial sum a copy."""
    if any(isinstance(s, Partial) and s.reduction != "sum" for s in q.outputs):
        return True
    for index, state in enumerate(q.inputs):
        expected = q.whole.gradients[index]
        pieces = [part[index] for part in gradients]
        if expected is None:
            if any(p is not None and bool(p.any()) for p in pieces):
                return False
            continue
        filled = [_like(q, expected, state, r) if p is None else p for r, p in enumerate(pieces)]
        if not _agree(filled, expected, gradient_state(state), q.parts):
            return False
    return True


def _like(q: _SplitQuestion, expected: Tensor, state: State, rank: int) -> Tensor:
    return torch.zeros_like(_shard(expected, state, q.parts, rank))


def _agree(pieces: Values, expected: Tensor, state: State, parts: int) -> bool:
    if any(p is None or p.dtype != expected.dtype for p in pieces):
        return False
    tensors = [p for p in pieces if p is not None]
    if isinstance(state, Partial):
        if any(p.shape != expected.shape for p in tensors):
            return False
        stacked = torch.stack(tensors)
        if state.reduction == "max":
            return _close(stacked.amax(0), expected)
        return _close(stacked.sum(0).to(expected.dtype), expected)
    return all(_close(p, _shard(expected, state, parts, rank)) for rank, p in enumerate(tensors))


def _close(found: Tensor, expected: Tensor) -> bool:
    if found.shape != expected.shape:
        return False
    if not (found.is_floating_point() or found.is_complex()) or not found.numel():
        return torch.equal(found, expected)
    same = (found == expected) | (found.isnan() & expected.isnan())
    finite = expected[expected.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    return bool((same | ((found - expected).abs() <= BOUND * max(scale, 1.0))).all())
