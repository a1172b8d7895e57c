"""Make deliberately wrong results out of a right one: inputs on which they pass as well show nothing.

They are made from tensors that are there already, with no run of the operator:

    swapped   shards put together in another order
    strided   shards interleaved instead of concatenated
    dropped   the first rank's partial result taken for the whole

A variant that equals the right result is *void* where the right result is constant along the split (then no input of
this kind can tell), and has *survived* otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from nnscaler.layout import Prefix, Sharded
from nnscaler.runtime.cut_tensors import piece_of
from verify.evidence.inputs.cut_and_join_operands import Lay


@dataclass(frozen=True, slots=True)
class Variant:
    """`killed`: it differs from the right result. `void`: the right result is constant along the split."""

    what: str
    name: str
    killed: bool
    void: bool


def variants_of(what: str, pieces: Sequence[Tensor], expected: Tensor, lay: Lay) -> list[Variant]:
    """Return the wrong variants of one result, for every axis along which there is one."""
    found: list[Variant] = []
    if not expected.numel():
        return found
    for held, parts in zip(lay.held, lay.parts, strict=True):
        if isinstance(held, Sharded):
            found += _of_cut(what, expected, held, parts, single=len(lay.held) == 1)
        elif isinstance(held, Prefix):
            if held.terms and len(lay.held) == 1:  # without the terms of all slices but the last one
                killed = not torch.equal(pieces[-1], expected)
                found.append(Variant(what, "dropped", killed, killed or _nothing(pieces, expected)))
        elif held != "copy" and len(lay.held) == 1:
            killed = not torch.equal(pieces[0], expected)
            found.append(Variant(what, "dropped", killed, killed or _nothing(pieces, expected)))
    return found


def _of_cut(what: str, expected: Tensor, cut: Sharded, parts: int, single: bool) -> list[Variant]:
    if not single:  # `outer` is in local units on a mesh of two axes: single splits have shown it
        return []
    shards = (piece_of(expected, cut, parts, rank) for rank in range(parts))
    differ = any(a.shape != b.shape or not torch.equal(a, b) for a, b in pairwise(shards))  # the first two mostly do
    found = [Variant(what, "swapped", differ, True)]
    inner = expected.shape[cut.dim] // (cut.outer * parts)
    if inner > 1 and not cut.sections and not cut.sizes:
        shape = tuple(expected.shape)
        view = expected.reshape(*shape[: cut.dim], cut.outer, parts, inner, *shape[cut.dim + 1 :])
        other = view.transpose(cut.dim + 1, cut.dim + 2).reshape(shape)
        killed = not torch.equal(other, expected)
        found.append(Variant(what, "strided", killed, killed or not differ or _constant(view, cut.dim)))
    return found


def _constant(view: Tensor, dim: int) -> bool:
    """Return whether the values are constant along the split dim."""
    flat = view.flatten(dim + 1, dim + 2)
    first = flat.narrow(dim + 1, 0, 1)
    return bool(((flat == first) | (flat.isnan() & first.isnan())).all()) if not flat.is_complex() else False


def _nothing(pieces: Sequence[Tensor], expected: Tensor) -> bool:
    """Return whether all terms and their total are zero, so that a sum shows nothing."""
    return not bool(expected.any()) and not any(bool(p.any()) for p in pieces)
