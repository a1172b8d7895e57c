"""Find the sets of tensor operands in which an operator is jointly linear: terms in all of them give terms of every
output.

Found by running the operator on terms, never taken from a declaration. A call that adds a constant is not linear: it
adds it once per rank, by however little. Nor is one that rounds to another dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from op_registry.call import Call, DType, instances_in

from nnscaler.runtime.tensor_bits_and_differences import is_finite, is_whole, largest
from verify.evidence.inputs.concrete_call import ConcreteCall, outputs_of, with_tensors
from verify.evidence.inputs.draw_values import random_terms, refill
from verify.evidence.oracle.run_whole_operator import as_leaves, draw_cotangent, gradients_of
from verify.evidence.oracle.size_checked_kernels import checked_kernels
from verify.evidence.verify_op_options import Kind
from verify.operators.suggest.call_with_other_tensors_and_integers import Outputs, Question

RANKS = 3
EXACT = 1e-12  # of the largest term: float64 sums in another order, and nothing more
ALL_SUBSETS = 7  # operands up to which every set is tried
DRAWS: tuple[Kind, ...] = ("integers", "normal", "positive", "given")


@dataclass(frozen=True)
class _Draw:
    """Values of a call's tensors, its outputs on them, and for each tensor terms that sum to it."""

    question: Question
    tensors: tuple[Tensor, ...]
    outputs: Outputs
    terms: tuple[list[Tensor], ...]

    def with_terms(self, slots: frozenset[int], rank: int) -> list[Tensor]:
        return [self.terms[i][rank] if i in slots else t for i, t in enumerate(self.tensors)]


def derive_linear(function: Callable[..., Any], concrete: ConcreteCall) -> tuple[frozenset[int], ...]:
    """Return the maximal sets of tensors (by index) in which the call is jointly linear, smaller ones first."""
    question = Question(function, concrete)
    if _casts(question.concrete.call):
        return ()
    candidates = [i for i, t in enumerate(question.tensors) if t.dtype != torch.bool]
    found: list[frozenset[int]] = []
    with checked_kernels():
        draws = _draws(question)
        for slots in _sets(candidates) if draws else ():
            if not any(slots < larger for larger in found) and all(_is_linear(draw, slots) for draw in draws):
                found.append(slots)
    return tuple(sorted(found, key=lambda s: (len(s), sorted(s))))


def is_linear(function: Callable[..., Any], concrete: ConcreteCall, slots: frozenset[int]) -> bool:
    """Return whether the call is jointly linear in these tensors."""
    question = Question(function, concrete)
    with checked_kernels():
        draws = [] if _casts(question.concrete.call) else _draws(question)
        return bool(draws) and all(_is_linear(draw, slots) for draw in draws)


def _sets(candidates: Sequence[int]) -> Iterator[frozenset[int]]:
    """Yield sets to try, larger ones first: all of them, or the largest and the smallest where there are too many."""
    count = len(candidates)
    sizes = range(count, 0, -1) if count <= ALL_SUBSETS else (count, count - 1, 2, 1)
    for size in sizes:
        for chosen in combinations(candidates, size):
            yield frozenset(chosen)


def _draws(question: Question) -> list[_Draw]:
    """Return the call on two kinds of values on which it is finite."""
    found: list[_Draw] = []
    for number, kind in enumerate(DRAWS):
        generator = torch.Generator().manual_seed(number)
        tensors = tuple(refill(t, kind if not is_whole(t) else "given", generator) for t in question.tensors)
        tensors = tuple(t.to(torch.complex128) if t.is_complex() else t for t in tensors)
        try:
            outputs = question.run(tensors, {})
        except Exception:  # noqa: BLE001 - values were our choice
            continue
        if all(o is None or is_finite(o) for o in outputs):
            terms = tuple(_terms(t, kind, generator) for t in tensors)
            found.append(_Draw(question, tensors, outputs, terms))
        if len(found) == 2:
            break
    return found


def _terms(tensor: Tensor, kind: Kind, generator: torch.Generator) -> list[Tensor]:
    """Return terms of both signs.

    Integers sum exactly; real ones also tell a function that rounds from a linear one.
    """
    if tensor.dtype == torch.bool:
        return [tensor] * RANKS
    return random_terms(tensor, RANKS, generator, real=kind != "integers")


def _is_linear(draw: _Draw, slots: frozenset[int]) -> bool:
    """Return whether outputs on terms sum to the outputs, and gradients are as such sums have them."""
    try:
        nothing = draw.question.run([torch.zeros_like(t) if i in slots else t for i, t in enumerate(draw.tensors)], {})
        if any(o is not None and (o.dtype == torch.bool or bool(o.any())) for o in nothing):
            return False
        ranks = [draw.question.run(draw.with_terms(slots, rank), {}) for rank in range(RANKS)]
    except Exception:  # noqa: BLE001 - an operator that raises on terms does not take them
        return False
    for index, whole in enumerate(draw.outputs):
        pieces = [outputs[index] for outputs in ranks]
        if whole is not None and not _sum_to(whole, pieces):
            return False
    return _gradients_agree(draw, slots)


def _sum_to(whole: Tensor, pieces: Sequence[Tensor | None]) -> bool:
    """Return whether the pieces sum to the whole, up to the rounding of the sum."""
    terms = [p for p in pieces if p is not None and p.shape == whole.shape and p.dtype == whole.dtype]
    if len(terms) < len(pieces) or whole.dtype == torch.bool:
        return False
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    if is_whole(whole):
        return torch.equal(total, whole)
    scale = max(largest(t) for t in (*terms, whole))
    return bool(((total - whole).abs() <= EXACT * scale).all())


def _gradients_agree(draw: _Draw, slots: frozenset[int]) -> bool:
    """Check that every rank has the whole gradient of what it has a term of, and a term of every other gradient."""
    whole, cotangents = _gradients(draw, draw.tensors, [])
    columns = [_gradients(draw, draw.with_terms(slots, rank), cotangents)[0] for rank in range(RANKS)]
    for index, expected in enumerate(whole):
        pieces = [column[index] for column in columns]
        if expected is None:
            continue
        if any(p is None for p in pieces):
            return False
        if index in slots:
            scale = EXACT * largest(expected)
            if any(p is not None and bool(((p - expected).abs() > scale).any()) for p in pieces):
                return False
        elif not _sum_to(expected, pieces):
            return False
    return True


def _gradients(
    draw: _Draw, tensors: Sequence[Tensor], cotangents: Sequence[Tensor | None]
) -> tuple[tuple[Tensor | None, ...], list[Tensor | None]]:
    """Return the gradient of every tensor (zero where nothing depends on it), and the cotangents, drawn if none are
    given."""
    leaves = as_leaves(tensors, without_gradient=draw.question.concrete.constants)
    args, kwargs = with_tensors(draw.question.concrete.call, leaves, {})
    with torch.enable_grad():
        outputs = outputs_of(draw.question.function(*args, **kwargs))
    generator = torch.Generator().manual_seed(5)
    chosen = list(cotangents) or [None if o is None else draw_cotangent(o, generator) for o in outputs]
    found = gradients_of([outputs], [chosen], [leaves])[0]
    filled = [torch.zeros_like(t) if g is None and t.requires_grad else g for g, t in zip(found, leaves, strict=True)]
    return tuple(filled), chosen


def _casts(call: Call) -> bool:
    """Return whether an argument names a floating dtype, to which the call may round."""
    return any(getattr(torch, d.name).is_floating_point for d in instances_in((call.args, call.kwargs), DType))
