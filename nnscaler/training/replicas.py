"""Are copies of a tensor equal on all ranks, bit for bit? A cheap check while training goes on."""

from __future__ import annotations

from hashlib import sha256

import torch
from torch import Tensor

from nnscaler.errors import NnscalerError
from nnscaler.runtime.layout import Sharded
from nnscaler.runtime.training.stored import StoredTensor
from nnscaler.training.engine import Engine

_CHUNK = 2**22  # elements that are taken together


def check_replicas(engine: Engine, step: int) -> int:
    """Compare checksums of all tensors between steps; return how many of this rank's have a copy elsewhere.

    Every rank calls it. Raises NnscalerError("replicas_differ") on every rank where two copies are not the same bits.
    """
    mine = engine.stored()
    rows = torch.tensor([[_key(entry), checksum(entry.tensor)] for entry in mine], dtype=torch.int64).reshape(-1, 2)
    everyone = tuple(range(engine.world_size))
    counts = engine.communicator.all_gather(torch.tensor([len(mine)], device=engine.device), everyone)
    shapes = [(int(count), 2) for count in counts]
    found = engine.communicator.all_gather(rows.to(engine.device), everyone, shapes)
    seen: dict[int, tuple[int, int]] = {}
    copies: set[int] = set()
    differing: list[tuple[int, int, int]] = []
    for rank, table in enumerate(found):
        for key, total in table.tolist():
            first, value = seen.setdefault(key, (rank, total))
            if first != rank:
                copies.add(key)
                if value != total:
                    differing.append((key, first, rank))
    if differing:
        names = {_key(entry): entry.fqn for entry in mine}
        key, first, other = next((d for d in differing if d[0] in names), differing[0])
        name = f"`{names[key]}`" if key in names else "a parameter of another stage"
        message = f"after step {step}, {name} is not the same on ranks {first} and {other}, which hold copies of it"
        help = "a device that computes wrongly, or an optimizer that draws; the newest checkpoint before is still good"
        raise NnscalerError("replicas_differ", message, help=help)
    return sum(_key(entry) in copies for entry in mine)


def checksum(tensor: Tensor) -> int:
    """Return a number that another bit anywhere, or elements in another order, change: all but surely."""
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    data = tensor.detach().contiguous().flatten()
    data = data.view(words.get(data.element_size(), torch.uint8))
    total = 0
    for start in range(0, data.numel(), _CHUNK):
        piece = data[start : start + _CHUNK].long()
        places = torch.arange(start + 1, start + 1 + len(piece), device=piece.device) * 2654435761 % 1000003
        total = (total * 31 + int((piece * places).sum())) % 2**62
    return total


def _key(entry: StoredTensor) -> int:
    """Return a number for the tensor and the part of it: that of its copies as well."""
    cut = sorted((a, str(s), entry.coordinates[a]) for a, s in entry.states.items() if isinstance(s, Sharded))
    return int.from_bytes(sha256(repr((entry.names, cut)).encode()).digest()[:8]) >> 1
