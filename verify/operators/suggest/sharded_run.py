"""A call run whole and in pieces, and how the outputs of the pieces make the output of the whole.

Pieces are cut as a layout says: equal (R), a shard of a dim, or random terms of a sum (P). What comes out is read off:
the outputs are equal, shards of a dim, terms of a sum, or nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from nnscaler.layout import PARTIAL, REPLICATED, Partial, Sharded, State
from nnscaler.runtime.cut_tensors import join_pieces, pieces_of
from nnscaler.runtime.tensor_bits_and_differences import FLOAT64_BOUND, difference, is_finite, is_whole
from verify.evidence.inputs.draw_values import random_terms, refill
from verify.evidence.verify_op_options import Kind
from verify.operators.suggest.call_with_other_tensors_and_integers import Number, Outputs, Question

States = tuple[State | None, ...]
DRAWS: tuple[Kind, ...] = ("normal", "positive", "given")
_ROUNDING = dict.fromkeys((torch.float64, torch.complex128), FLOAT64_BOUND)
_COARSE = 2e-2  # of outputs in a dtype that the function chose itself


@dataclass(frozen=True)
class Trial:
    """A question on drawn values: `tensors` are what it is asked on, `outputs` are the whole's."""

    question: Question
    tensors: tuple[Tensor, ...]
    outputs: Outputs
    seed: int
    kept: dict[tuple[int, State, int], list[Tensor]]

    def pieces(self, index: int, state: State, parts: int) -> list[Tensor]:
        """Return the piece of one tensor on each rank."""
        found = self.kept.get((index, state, parts))
        if found is None:
            tensor = self.tensors[index]
            if isinstance(state, Sharded):
                found = [piece.contiguous() for piece in pieces_of(tensor, state, parts)]
            elif isinstance(state, Partial):
                generator = torch.Generator().manual_seed(self.seed + 7 * index + parts)
                found = random_terms(tensor, parts, generator, real=True)
            else:
                found = [tensor] * parts
            self.kept[index, state, parts] = found
        return found

    def run(self, states: Sequence[State], parts: int, integers: Mapping[str, Number]) -> list[Outputs] | None:
        """Return the outputs of every rank; None where one raises."""
        columns = [self.pieces(i, state, parts) for i, state in enumerate(states)]
        try:
            return [self.question.run([c[rank] for c in columns], integers) for rank in range(parts)]
        except Exception:  # noqa: BLE001 - shapes that do not fit are the usual answer
            return None

    def run_unevenly(self, states: Sequence[State], outputs: States, length: int) -> bool:
        """Return whether the outputs are in these states for unequal shards too: one of `length` units first, then the
        rest."""
        columns: list[list[Tensor]] = []
        for index, state in enumerate(states):
            if isinstance(state, Sharded):
                cut = _one_and_rest(state, self.tensors[index].shape[state.dim], length)
                if cut is None:
                    return False
                columns.append([piece.contiguous() for piece in pieces_of(self.tensors[index], cut, 2)])
            else:
                columns.append(self.pieces(index, state, 2))
        try:
            ranks = [self.question.run([c[rank] for c in columns], {}) for rank in (0, 1)]
        except Exception:  # noqa: BLE001 - as above
            return False
        for index, (made, whole) in enumerate(zip(outputs, self.outputs, strict=True)):
            pieces = [r[index] for r in ranks]
            if whole is not None and not _makes(pieces, made, whole, length):
                return False
        return True

    def read(self, ranks: Sequence[Outputs], sections: Sequence[tuple[int, ...]] = ()) -> States | None:
        """Return the state of every output (None for what is no tensor); None where one is in none."""
        found: list[State | None] = []
        for index, whole in enumerate(self.outputs):
            pieces = [outputs[index] if index < len(outputs) else None for outputs in ranks]
            if whole is None:
                found.append(None)
                continue
            if any(p is None for p in pieces):
                return None
            state = read_state([p for p in pieces if p is not None], whole, sections)
            if state is None:
                return None
            found.append(state)
        return tuple(found)


def make_trial(question: Question, seed: int = 0, kind: Kind | None = None) -> Trial | None:
    """Return the question on random values on which the outputs are finite and not all zero; None
    where there are none."""
    for drawn in DRAWS if kind is None else (kind, *DRAWS):
        generator = torch.Generator().manual_seed(seed)
        tensors = tuple(refill(t, drawn if not is_whole(t) else "given", generator) for t in question.tensors)
        tensors = tuple(t.to(torch.complex128) if t.is_complex() else t for t in tensors)
        try:
            outputs = question.run(tensors, {})
        except Exception:  # noqa: BLE001 - values were our choice
            continue
        present = [o for o in outputs if o is not None]
        if all(is_finite(o) for o in present) and any(bool(o.any()) for o in present):
            return Trial(question, tensors, outputs, seed, {})
    return None


def read_state(pieces: Sequence[Tensor], whole: Tensor, sections: Sequence[tuple[int, ...]] = ()) -> State | None:
    """Return how the pieces make the whole; None if they do not."""
    shapes = {tuple(p.shape) for p in pieces}
    if len(shapes) > 1 or any(p.dtype != whole.dtype for p in pieces):
        return None
    shape, parts = shapes.pop(), len(pieces)
    if shape == tuple(whole.shape):
        return _read_full(pieces, whole)
    if len(shape) != whole.dim():
        return None
    differs = [d for d, (a, b) in enumerate(zip(shape, whole.shape, strict=True)) if a != b]
    if len(differs) != 1 or shape[differs[0]] * parts != whole.shape[differs[0]]:
        return None
    dim = differs[0]
    for outer in divisors(shape[dim]):
        if close(join_pieces(pieces, Sharded(dim, outer)), whole):
            return Sharded(dim, outer)
    for sizes in sections:
        if sum(sizes) == whole.shape[dim] and all(s % parts == 0 for s in sizes):
            state = Sharded(dim, 1, sizes)
            if close(join_pieces(pieces, state), whole):
                return state
    return None


def _makes(pieces: Sequence[Tensor | None], state: State | None, whole: Tensor, length: int) -> bool:
    """Return whether pieces in the given state assemble to the whole."""
    present = [p for p in pieces if p is not None]
    if len(present) < len(pieces):
        return False
    if not isinstance(state, Sharded):
        return all(p.shape == whole.shape for p in present) and _read_full(present, whole) == state
    cut = _one_and_rest(state, whole.shape[state.dim], length)
    if cut is None or [p.shape[state.dim] for p in present] != [state.outer * size for size in cut.sizes]:
        return False
    others = [[n for d, n in enumerate(t.shape) if d != state.dim] for t in (*present, whole)]
    if any(o != others[-1] for o in others):
        return False
    return close(join_pieces(present, cut), whole)


def _one_and_rest(state: Sharded, size: int, length: int) -> Sharded | None:
    """Return the cut of each block of a dim of `size` into the first of `length` units, and the rest of them.

    None where the blocks do not divide into units.
    """
    inner, rest = divmod(size, state.outer * length)
    return None if rest else Sharded(state.dim, state.outer, (), (inner, inner * (length - 1)))


def _read_full(pieces: Sequence[Tensor], whole: Tensor) -> State | None:
    if all(close(p, whole) for p in pieces):
        return REPLICATED
    if whole.dtype == torch.bool:
        return None
    total, greatest = pieces[0], pieces[0]
    for piece in pieces[1:]:
        total = total + piece
        if not whole.is_complex():
            greatest = torch.maximum(greatest, piece)
    if close(total, whole):
        return PARTIAL
    return Partial("max") if not whole.is_complex() and close(greatest, whole) else None


def close(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors differ by rounding alone."""
    bound = 0.0 if is_whole(b) else _ROUNDING.get(b.dtype, _COARSE)
    return a.dtype == b.dtype and difference(a, b).relative <= bound


def divides(state: State, shape: Sequence[int], parts: int) -> bool:
    """Return whether a tensor of this shape can be cut into that many parts."""
    if not isinstance(state, Sharded):
        return True
    if state.sections:
        return all(s % parts == 0 for s in state.sections)
    return shape[state.dim] % (state.outer * parts) == 0


@lru_cache(maxsize=1024)
def divisors(number: int) -> tuple[int, ...]:
    """Return every divisor, ascending."""
    return tuple(_divisors(number))


def _divisors(number: int) -> Iterator[int]:
    for candidate in range(1, number + 1):
        if number % candidate == 0:
            yield candidate
