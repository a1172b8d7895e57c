"""Gradients that lie in one memory, apart.

Of `p.view(2, 2) + q.view(2, 2)` autograd leaves two views of one tensor in `p.grad` and `q.grad`, and whatever then
changes the one in place, changes both: the next backward adds to them twice, and clipping scales them twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import itemgetter

import torch
from torch import Tensor


def separate_gradients(leaves: Iterable[Tensor]) -> None:
    """Give each of the leaves' gradients memory of its own."""
    given = ((leaf, leaf.grad) for leaf in leaves)
    placed = {id(leaf): (g.data_ptr(), leaf, g) for leaf, g in given if g is not None and g.layout is torch.strided}
    end = 0
    for start, leaf, gradient in sorted(placed.values(), key=itemgetter(0)):
        if start < end and gradient.nbytes:
            leaf.grad = gradient.clone()
        end = max(end, start + gradient.nbytes)
