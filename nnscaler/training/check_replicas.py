"""Check that ranks that should hold equal bits still do, in production: one small message for all tensors.

Copies of a parameter are updated on each rank by itself. A sum in another order, a step that one rank skips or a memory
error makes them drift apart, and no loss shows it for long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from nnscaler.codegen.compiled_program import Program
from nnscaler.errors import NnscalerError
from nnscaler.manifest import Manifest
from nnscaler.runtime.communication.communicator import Communicator
from nnscaler.runtime.shards import logical_coordinates
from nnscaler.runtime.tensor_bits_and_differences import values_of
from nnscaler.runtime.training.saving.rank_tensors_as_boxes import StoredTensor

_ODD = 6364136223846793005  # of Knuth's generator: what each place is weighted with
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Holder(Protocol):
    """The holder of a rank's tensors: an Engine."""

    communicator: Communicator
    device: torch.device

    @property
    def manifest(self) -> Manifest: ...
    def stored(self) -> list[StoredTensor]: ...


@dataclass(frozen=True)
class _Entry:
    """A local tensor that other ranks may hold too.

    place   of the tensor among those of the manifest
    region  where this shard lies in it
    what    "", or the optimizer's name for its own tensor
    """

    place: int
    region: int
    what: str
    tensor: Tensor


def check_replicas(engine: Holder, optimizer: torch.optim.Optimizer | None = None) -> int:
    """Compare checksums of every copy; return how many tensors of this rank have one elsewhere. Every rank calls it.

    `optimizer`: its tensors are compared as well. Raises NnscalerError("replicas_differ") on every rank, with the
    tensor's name and the ranks that differ from most.
    """
    names = _names(engine.manifest)
    entries = list(_entries(engine, names, optimizer))
    rows = [torch.tensor([e.place, e.region, _number(e.what)]) for e in entries]
    sums = [checksum(e.tensor) for e in entries]
    own = torch.stack([torch.cat(pair) for pair in zip(rows, sums, strict=True)]) if rows else torch.zeros(0, 5).long()
    everyone = tuple(range(engine.communicator.world_size))
    counts = engine.communicator.all_gather(torch.tensor([len(own)], device=engine.device), everyone)
    found = engine.communicator.all_gather(own.to(engine.device), everyone, [(int(count), 5) for count in counts])
    copies: dict[tuple[int, ...], dict[int, tuple[int, ...]]] = {}
    for rank, table in enumerate(found):
        for place, region, what, *found_sums in table.tolist():
            copies.setdefault((place, region, what), {})[rank] = tuple(found_sums)
    wrong = {key: ranks for key, held in copies.items() if (ranks := _odd_ones(held))}
    if wrong:
        raise _differ(wrong, copies, names)
    here = engine.communicator.rank
    return sum(here in held and len(held) > 1 for held in copies.values())


def check_same_model(program: Program, communicator: Communicator, device: torch.device) -> None:
    """Compare program and model of all ranks, each of which made its own. Every rank calls it, before the first step.

    Raises NnscalerError("replicas_differ") on every rank, with the ranks that differ from rank 0.
    """
    names = [name for name, tensor in sorted(program.state.items()) if not tensor.is_meta]
    text = "\0".join(f"{file}\0{source}" for file, source in sorted(program.sources.items()))
    sums = [checksum(program.state[name]) for name in names]
    own = torch.cat([torch.tensor([_number(text), _number("\0".join(names))]), *sums]).to(device)
    everyone = tuple(range(communicator.world_size))
    counts = communicator.all_gather(torch.tensor([len(own)], device=device), everyone)
    found = communicator.all_gather(own, everyone, [(int(count),) for count in counts])
    differ = [rank for rank in everyone if not torch.equal(found[rank], found[0])]
    if not differ:
        return
    other = found[differ[0]]
    if len(other) != len(found[0]) or not torch.equal(other[:2], found[0][:2]):
        message = f"rank {_listed(differ)} compiled another program than rank 0: their models or batches differ"
        raise NnscalerError("replicas_differ", message, help="make model and sample batch alike on every rank")
    pairs = zip(names, other[2:].view(-1, 2), found[0][2:].view(-1, 2), strict=True)
    unequal = [name for name, its, right in pairs if not torch.equal(its, right)]
    more = f", and {len(unequal) - 1} more tensors" if len(unequal) > 1 else ""
    raise NnscalerError(
        "replicas_differ",
        f"rank {_listed(differ)} begins with other values of `{unequal[0]}` than rank 0{more}",
        help="torch.manual_seed(...) before the model is made, or load the same weights on every rank",
    )


def _names(manifest: Manifest) -> list[str]:
    return [entry.fqns[0] for entry in manifest.parameters] + [entry.fqns[0] for entry in manifest.buffers]


def _entries(engine: Holder, names: Sequence[str], optimizer: torch.optim.Optimizer | None) -> Iterator[_Entry]:
    places = {name: place for place, name in enumerate(names)}
    for stored in engine.stored():
        place = next((places[name] for name in stored.names if name in places), -1)
        region = _region(stored)
        yield _Entry(place, region, "", stored.tensor)
        states: Mapping[str, object] = {} if optimizer is None else optimizer.state.get(stored.tensor, {})
        for what, tensor in states.items():
            if isinstance(tensor, Tensor):
                yield _Entry(place, region, what, tensor)


def _region(stored: StoredTensor) -> int:
    """Return a number for the elements that a rank holds: equal for equal ones."""
    held = logical_coordinates(stored.shape, stored.states, stored.sizes, stored.coordinates)
    return _number(b"\0".join(indices.numpy().tobytes() for indices in held))


def _number(text: str | bytes) -> int:
    data = text.encode() if isinstance(text, str) else text
    return int.from_bytes(sha256(data).digest()[:8], "big", signed=True)


def checksum(tensor: Tensor) -> Tensor:
    """Return two sums over the bits: as they are, and weighted by place, so that exchanged elements show."""
    flat = values_of(tensor).reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    bits = flat.view(_INTEGERS[flat.element_size()]).long()
    weights = torch.arange(1, len(bits) + 1, device=bits.device) * _ODD
    return torch.stack([bits.sum(), (bits * weights).sum()]).cpu()


def row_checksum(tensor: Tensor) -> Tensor:
    """Return one sum over the bits, weighted by the place in dim 0, for a look at every batch: in one pass."""
    flat = values_of(tensor)
    flat = torch.view_as_real(flat) if flat.is_complex() else flat
    count = flat.shape[0] if flat.ndim else 1
    rows = flat.reshape(count, prod(flat.shape[1:])).view(_INTEGERS[flat.element_size()]).sum(1)
    weights = torch.arange(1, len(rows) + 1, device=rows.device) * _ODD
    return (rows * weights).sum().reshape(1).cpu()


def check_same_stream(communicator: Communicator, checksum: int) -> None:
    """Check that all ranks read one stream of samples. Every rank calls it, with a checksum of what it read.

    Raises NnscalerError("batch_differs").
    """
    told = communicator.all_gather(torch.tensor([checksum]), tuple(range(communicator.world_size)))
    other = next((rank for rank, found in enumerate(told) if int(found) != checksum), None)
    if other is not None:
        raise NnscalerError(
            "batch_differs",
            f"rank {other} reads other samples of the stream than rank {communicator.rank}",
            help=ONE_STREAM,
        )


def check_same_objects(communicator: Communicator, states: Mapping[str, Any]) -> None:
    """Check that the tensors in states by name are those of rank 0 on every rank, which all call this.

    Raises NnscalerError("replicas_differ").
    """
    sums = []
    for state in states.values():
        tensors = [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]
        each = [checksum(t) + _number(str(t.shape)) % 2**32 for t in tensors]
        sums.append(torch.stack(each).sum(0) if each else torch.zeros(2, dtype=torch.int64))
    told = communicator.all_gather(torch.stack(sums), tuple(range(communicator.world_size)))
    for rank, found in enumerate(told):
        for number, name in enumerate(states):
            if not torch.equal(found[number], told[0][number]):
                message = f"{name!r} has other tensors on rank {rank} than on rank 0, whose a checkpoint has"
                raise NnscalerError("replicas_differ", message, help=_SHARDS)


_SHARDS = (
    "register what all ranks have alike, such as averages of `engine.state_dict()`; an optimizer of yours can keep "
    "those of a rank's shards: `self.state[p]['average']` is saved like moments"
)
ONE_STREAM = (
    "every data part reads the whole stream and takes its rows of each batch: give the dataset no part of it by rank, "
    "and shuffle with a generator of a fixed seed"
)


def _odd_ones(held: Mapping[int, tuple[int, ...]]) -> list[int]:
    """Return the ranks that differ from what most have; of as many on both sides, from the first rank."""
    counted = Counter(held.values())
    if len(counted) < 2:
        return []
    most = max(counted.values())
    right = next(checksum for checksum in held.values() if counted[checksum] == most)
    return [rank for rank, checksum in held.items() if checksum != right]


def _differ(
    wrong: Mapping[tuple[int, ...], list[int]],
    copies: Mapping[tuple[int, ...], Mapping[int, tuple[int, ...]]],
    names: Sequence[str],
) -> NnscalerError:
    key, ranks = next(iter(wrong.items()))
    tensors = list(dict.fromkeys(names[place] for place, _, _ in wrong))
    others = [rank for rank in copies[key] if rank not in ranks]
    of = "" if key[2] == _number("") else "the optimizer's state of "
    more = f", and {len(tensors) - 1} more tensors differ" if len(tensors) > 1 else ""
    message = f"{of}`{names[key[0]]}` on rank {_listed(ranks)} is not what rank {_listed(others)} has{more}"
    help = (
        "go on from the last checkpoint. Same ranks again: look at that machine; others: at what is done on some ranks"
    )
    return NnscalerError("replicas_differ", message, help=f"{help} only")


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
