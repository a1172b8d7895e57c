"""A gradient as a combination of the parts that add up to it: which are missing, or counted otherwise than once."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from nnscaler.errors import few
from verify.programs.causes.wrong_tensor import Part, WrongTensor


def weighed(wrong: WrongTensor) -> str | None:
    """Return what is wrong with the weights with which the parts make the piece that is wrong.

    None where they do not make it, too little is known, or all of them are counted alike.
    """
    assert wrong.parts is not None
    place, columns = wrong.wrong[0], wrong.parts()
    piece = wrong.pieces[place]
    if not columns or piece.numel() < len(columns) + 2:
        return None
    matrix = torch.stack([column.double().reshape(-1) for column in columns.values()], 1)
    weights = torch.linalg.lstsq(matrix, piece.reshape(-1, 1), driver="gelsd").solution[:, 0]
    if not wrong.near((matrix @ weights).reshape(piece.shape), piece):
        return None
    found = {key: round(float(w), 6) for key, w in zip(columns, weights, strict=True)}
    return None if len(set(found.values())) == 1 else _words(found, place[0])


def _words(weights: Mapping[Part, float], rank: int) -> str:
    """Return which parts are missing, or counted otherwise than once."""
    used = {key for key, weight in weights.items() if weight}
    missing = [key for key in weights if key not in used]
    if not missing:
        odd = {key: weight for key, weight in weights.items() if weight != 1}
        shown = ", ".join(f"{w:g} times that of rank {k[1]}, micro-batch {k[2]}" for k, w in list(odd.items())[:3])
        return f"its parts are counted otherwise than once: {shown}"
    stages, gone = {key[0] for key in weights}, {key[0] for key in missing}
    if len(stages) > 1 and not any(key[0] in gone for key in used):
        named = " and ".join(sorted(stages))
        return f"stages {named} share it, and each has only its own part: the sum over its copies is missing"
    micros = sorted({key[2] for key in missing})
    last = max(key[2] for key in weights)
    if not any(key[2] in micros for key in used):  # of these micro-batches there is nothing
        if {key[2] for key in used} == {last}:
            return f"it has micro-batch {last} alone: each replaces what the ones before left"
        early = ": the sum over ranks does not wait for the last backward" if micros == [last] else ""
        return f"it misses micro-batch {', '.join(map(str, micros))}{early}"
    ranks = sorted({key[1] for key in missing} - {key[1] for key in used})
    if {key[1] for key in used} == {rank} and len(missing) == sum(key[1] != rank for key in weights):
        everyone = sorted({key[1] for key in weights})
        return f"rank {rank} has only its own part: the sum over ranks {everyone} is missing, or nobody waits for it"
    if ranks:
        return f"the parts of rank {', '.join(map(str, ranks))} are missing"
    shown = few([f"micro-batch {key[2]} of rank {key[1]}" for key in missing])
    early = ": the sum over ranks does not wait for every backward" if last in micros else ""
    return f"it misses {shown}{early}"
