"""Leave out the copies of a model that a program keeps beside the one that it trains: averages of its weights, say.

Such a copy begins with the model's values and gets no gradient, and nobody but its author knows what it becomes. It is
known by this: it is frozen, and the same rank trains the elements that it holds. A parameter that is frozen by mistake
is no copy, for no other tensor of the rank trains its elements; and where a forward pass takes the frozen copy, the
trained one has no gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from verify.external.parameter_mapping import RankPiece, StateMap, addresses_as_tensor

COPY = "copy"  # how a piece of it is found


def without_copies(pieces: Sequence[RankPiece], space: StateMap) -> tuple[RankPiece, ...]:
    """Leave a rank's frozen copies unmatched, which then are not compared, with the buffers of their modules."""
    trained = torch.zeros(space.size, dtype=torch.bool)
    for piece in pieces:
        if piece.trained and piece.addresses is not None:
            trained[addresses_as_tensor(piece.addresses)] = True
    copies = {piece.local for piece in pieces if _is_copy(piece, trained)}
    if not copies:
        return tuple(pieces)
    alone: dict[str, bool] = {}  # module -> it has parameters of copies alone
    for piece in (piece for piece in pieces if piece.kind == "parameter"):
        for module in _modules(piece.local):
            alone[module] = alone.get(module, True) and piece.local in copies
    for piece in (piece for piece in pieces if piece.kind == "buffer"):
        if next((alone[module] for module in _modules(piece.local) if module in alone), False):
            copies.add(piece.local)
    return tuple(
        replace(piece, names=(), addresses=None, found=COPY, moved=False) if piece.local in copies else piece
        for piece in pieces
    )


def _is_copy(piece: RankPiece, trained: torch.Tensor) -> bool:
    if piece.kind == "buffer" or piece.trained or piece.addresses is None:
        return False
    return bool(trained[addresses_as_tensor(piece.addresses)].any())


def _modules(local: str) -> Iterator[str]:
    """Yield the modules that a tensor is in, the innermost first: `a.b` and `a` of `a.b.weight`, then the whole."""
    name, _, number = local.partition(" of module ")
    while name:
        name = name.rpartition(".")[0]
        yield f"{name} of module {number}"
