"""The plain model's state as one address space, and which of its elements a rank's tensors hold.

Every element of every parameter and buffer of the plain model has one address: tensors lie one after the other, tied
ones once. A rank's tensor is then a tensor of addresses, whatever was done to it: sharded by DTensor, cut by hand,
permuted, packed with others, renamed. The addresses come

    by layout    from the name (wrappers' parts left out) and DTensor's placements, where the values agree
    by value     else from the values at the start: parameters are disturbed at random before, so that in float64 no two
                 elements are equal, and a value says whose it is

A worked example: `qkv.weight` on tensor-parallel rank 1 of 2 is the plain model's rows 2:4 of `q`, `k` and `v` of four
rows each. No name fits and no placement says so; its 6 rows are found as addresses 8:16, 24:32 and 40:48 (4 columns).

A tensor with values of its own (made afresh by the program) is given the model's where its layout is known, and noted;
what has neither is unmatched, and nothing is decided about it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from nnscaler.runtime.tensor_bits_and_differences import FILL, as_real, bits_of, family_scale
from verify.programs.module_tensors_by_every_name import Kind, state_of

Addresses = range | Tensor  # a run of addresses, or one for each element of the local tensor, flattened
_WRAPPERS = frozenset(
    ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_flat_param", "parametrizations")
)
_SAME = 8  # elements of one value among which the right one is looked for
_REARRANGED = 0.5  # of a tensor's elements: more of them in the model's are no accident


@dataclass(frozen=True)
class StateMap:
    """Where each tensor of the plain model lies in its address space.

    starts   name -> first address; tied names have the same
    shapes   name -> shape
    kinds    name -> parameter or buffer
    size     addresses in all
    names    one name of each tensor, in the order of addresses
    """

    starts: Mapping[str, int]
    shapes: Mapping[str, torch.Size]
    kinds: Mapping[str, Kind]
    size: int
    names: tuple[str, ...]

    @staticmethod
    def of(module: nn.Module) -> StateMap:
        """Lay out the parameters and buffers of the plain model."""
        starts: dict[str, int] = {}
        shapes: dict[str, torch.Size] = {}
        kinds: dict[str, Kind] = {}
        seen: dict[int, int] = {}
        names: list[str] = []
        size = 0
        for name, tensor, kind in state_of(module):
            if id(tensor) not in seen:
                seen[id(tensor)] = size
                names.append(name)
                size += as_real(tensor).numel()
            starts[name], shapes[name], kinds[name] = seen[id(tensor)], as_real(tensor).shape, kind
        return StateMap(starts, shapes, kinds, size, tuple(names))

    def flat(self, values: Mapping[str, Tensor | None]) -> Tensor:
        """Return the values as one float64 tensor over all addresses; NaN where there is none."""
        whole = torch.full((self.size,), torch.nan, dtype=torch.float64)
        for name in self.names:
            value = values.get(name)
            if value is not None and value.numel():
                real = as_real(value.detach()).reshape(-1)
                start = self.starts[name]
                whole[start : start + len(real)] = real.to("cpu", torch.float64)
        return whole

    @cached_property
    def parameters(self) -> range:
        """Return the addresses of all parameters: those of buffers lie behind them."""
        return range(next((self.starts[name] for name in self.names if self.kinds[name] == "buffer"), self.size))

    def family_scale(self, kind: str, values: Tensor) -> float:
        """Return the scale of gradients or of parameters, given over all addresses; buffers have none in common."""
        if kind == "buffer":
            return 0.0
        return family_scale([values]) if kind == "gradient" else family_scale([taken(values, self.parameters)], FILL)

    def whole(self, name: str) -> range:
        """Return the addresses of a tensor of the plain model."""
        return range(self.starts[name], self.starts[name] + self.shapes[name].numel())

    def names_at(self, addresses: Addresses) -> tuple[str, ...]:
        """Return the tensors of which these are elements, in the order of addresses."""
        if isinstance(addresses, range):
            first, stop = addresses.start, addresses.stop
            return tuple(n for n in self.names if self.starts[n] < stop and self.whole(n).stop > first)
        bounds = torch.tensor([self.whole(n).stop for n in self.names])
        found = torch.unique(torch.bucketize(addresses.contiguous(), bounds, right=True))
        return tuple(self.names[int(i)] for i in found)

    @cached_property
    def tied(self) -> Mapping[str, tuple[str, ...]]:
        """Return, by one name of each tied parameter, all its names."""
        groups: dict[int, list[str]] = {}
        for name, start in self.starts.items():
            if self.shapes[name].numel():
                groups.setdefault(start, []).append(name)
        return {names[0]: tuple(names) for names in groups.values() if len(names) > 1}


@dataclass(frozen=True)
class RankPiece:
    """One tensor of the program on one rank, and which elements of the plain model it holds.

    local       its name in the program
    kind        parameter or buffer
    shape       of the local tensor
    names       the tensors of the plain model that it has elements of; empty where it is unmatched
    addresses   of its elements; None where it is unmatched
    found       "layout" or "value"; "given": by layout, and its values were replaced by the model's; "guessed": by its
                shape, likewise; "copy": it is part of a frozen copy beside what is trained, and not compared
    layout      DTensor's placements by mesh axis, in words; "plain" for other tensors
    trained     it requires a gradient
    started     a sum of its values before anything was replaced, to compare replicas of
    moved       it was found by value, and is a tensor of the model by another name: its elements lie as the layout says
    """

    local: str
    kind: Kind
    shape: tuple[int, ...]
    names: tuple[str, ...]
    addresses: Addresses | None
    found: str
    layout: str
    trained: bool
    started: float
    moved: bool = False

    @property
    def name(self) -> str:
        """Its name in the plain model, or in the program where it has none there."""
        return "+".join(self.names) if self.names else self.local

    @property
    def key(self) -> bytes | None:
        """Its elements, to look for copies of it; None where it is unmatched."""
        if self.addresses is None or isinstance(self.addresses, range):
            return None if self.addresses is None else repr(self.addresses).encode()
        return bits_of(self.addresses).numpy().tobytes()

    def take(self, whole: Tensor) -> Tensor:
        """Return this piece of a tensor over all addresses, in the local shape."""
        assert self.addresses is not None
        return taken(whole, self.addresses).view(self.shape)


@dataclass(frozen=True)
class Lookup:
    """The plain model's values at the start, sorted, so that a value leads to its address."""

    space: StateMap
    start: Tensor  # [addresses] float64
    ordered: Tensor  # [parameter addresses] float64, ascending
    order: Tensor  # [parameter addresses] the address of each

    @staticmethod
    def of(space: StateMap, values: Mapping[str, Tensor]) -> Lookup:
        """Sort the parameters' values."""
        flat = space.flat(values)
        ordered, order = torch.sort(taken(flat, space.parameters), stable=True)
        return Lookup(space, flat, ordered, order)

    def by_value(self, values: Tensor) -> tuple[Tensor, float]:
        """Return an address for each value, and the share of them that the model has in one place; others get any.

        Where several elements of the model have one value, as happens in thousands of float32 numbers, the one that
        continues the run of a neighbour is taken. The zeros at the end of a padded shard continue none.
        """
        wanted = values.detach().reshape(-1).double()
        if not len(self.ordered) or not len(wanted):
            return torch.zeros(len(wanted), dtype=torch.long), 0.0
        first = torch.searchsorted(self.ordered, wanted)
        after = torch.searchsorted(self.ordered, wanted, right=True)
        places = first.clamp_max(len(self.ordered) - 1)
        addresses = torch.where(after > first, self.order[places], 0)
        addresses, sure = self._settled(addresses, first, after)
        return addresses, float(sure.double().mean())

    def runs(self, values: Tensor) -> tuple[range, ...]:
        """Return where values stand in the parameters one after the other: all, or up to the end of a tensor, with
        zeros of padding behind; nothing where that is nowhere, or begins in several places. The shortest run is first.

        A worked example of two: the zeros at the end of [1, 2, 0, 0] are padding of a tensor [1, 2], or elements of the
        tensor behind it, a bias that starts at zeros.
        """
        wanted, whole = values.reshape(-1).double(), taken(self.start, self.space.parameters)
        if not len(anchors := wanted.nonzero().flatten()):
            return ()
        least, found = int(anchors[-1]) + 1, []
        for first in ((whole == wanted[anchors[0]]).nonzero().flatten() - anchors[0]).tolist():
            here = whole[first : first + len(wanted)] if first >= 0 else whole[:0]
            same = int((here == wanted[: len(here)]).long().cumprod(0).sum())
            ends = {self.space.whole(name).stop for name in self.space.names}
            stops = {end for end in ends if first + least <= end <= first + same}
            stops |= {first + same} if same == len(wanted) else set()
            found += [range(first, stop) for stop in sorted(stops)]
        return tuple(found) if len({run.start for run in found}) == 1 else ()

    def _settled(self, addresses: Tensor, first: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
        """Choose among the addresses `order[first:after]` of each value the neighbour of one that is sure; return the
        addresses, and which of them are sure."""
        sure = after - first == 1
        several = int((after - first).max())
        for step in (1, -1, 1, -1) if several > 1 else ():
            wanted, known = addresses.roll(step) + step, sure.roll(step)
            known[0 if step == 1 else -1] = False  # there is no neighbour on that side
            for number in range(min(several, _SAME)):
                candidate = self.order[(first + number).clamp_max(len(self.order) - 1)]
                hit = known & ~sure & (first + number < after) & (candidate == wanted)
                addresses, sure = torch.where(hit, candidate, addresses), sure | hit
        return addresses, sure


def clean_name(name: str) -> str:
    """Drop the parts that wrappers add (`module.`, `_orig_mod.`, ...), and the `original` of a parametrised tensor.

    A parametrisation of several tensors has `original0` and `original1`, which stay two.
    """
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    if "parametrizations" in name.split(".") and parts[-1] == "original":
        parts.pop()
    return ".".join(parts)


def local_value(tensor: Any) -> Tensor:
    """Return what this rank holds of a tensor, in real numbers."""
    value = tensor.detach()
    value = value.to_local() if isinstance(value, DTensor) else value
    # functional collectives of torch hand out tensors that wait when they are read
    waits: Any = value
    return as_real(waits.wait() if type(value).__name__ == "AsyncCollectiveTensor" else value)


def real_shape(tensor: Tensor) -> torch.Size:
    """Return the shape of a tensor, of a DTensor the whole one, in real numbers."""
    return torch.Size((*tensor.shape, 2)) if tensor.is_complex() else tensor.shape


def summed(tensor: Tensor) -> Tensor:
    """Return a DTensor of which ranks hold partial sums with these added up, which all ranks must do; any other as it
    is. A buffer may stay so for many steps: counts of the rows that each rank has seen."""
    if not isinstance(tensor, DTensor) or not any(p.is_partial() for p in tensor.placements):
        return tensor
    return tensor.redistribute(placements=[Replicate() if p.is_partial() else p for p in tensor.placements]).detach()


def layout_words(tensor: Tensor) -> str:
    """Describe where a tensor lies: `dp=Shard(0) tp=Replicate`."""
    if not isinstance(tensor, DTensor):
        return "plain"
    axes = tensor.device_mesh.mesh_dim_names or tuple(map(str, range(tensor.device_mesh.ndim)))
    return " ".join(f"{axis}={placement!r}" for axis, placement in zip(axes, tensor.placements, strict=True))


def claimed(tensor: Tensor, name: str, space: StateMap) -> Addresses | None:
    """Return the addresses that a tensor's name and layout say; None where they say nothing that fits."""
    whole, shape = space.whole(name), real_shape(tensor)
    if shape != space.shapes[name]:
        return None
    if isinstance(tensor, DTensor) and not all(p.is_replicate() for p in tensor.placements):
        if any(p.is_partial() for p in tensor.placements):
            return None
        numbers = torch.arange(whole.start, whole.stop).view(shape)
        shard = distribute_tensor(numbers, tensor.device_mesh, tensor.placements, src_data_rank=None)
        local = shard.to_local()
        return local.reshape(-1) if local.shape == local_value(tensor).shape else None
    return whole


def match(
    tensors: Sequence[tuple[str, Tensor, Kind]],
    lookup: Lookup,
    renamed: Mapping[str, str],
    known: Sequence[RankPiece] = (),
) -> tuple[RankPiece, ...]:
    """Find the addresses of a rank's tensors, and give the model's values to those that have their own.

    `renamed`: the program's name -> the model's. `known`: pieces that an earlier run in float64 found by value, for in
    narrower dtypes values are no longer unique.
    """
    tensors = [(local, summed(tensor), kind) for local, tensor, kind in tensors]
    before = {piece.local: piece for piece in known}
    pieces = [_piece(*entry, lookup, renamed, before.get(entry[0])) for entry in tensors]
    moved = moved_names(pieces, lookup.space)
    for number, (piece, entry) in enumerate(zip(pieces, tensors, strict=True)):
        name = moved.get(own_name(piece.local))
        if piece.kind == "buffer" and piece.addresses is None and name is not None:
            addresses = claimed(entry[1], name, lookup.space)
            if addresses is not None and _agrees(local_value(entry[1]), addresses, lookup):
                names = lookup.space.names_at(addresses)
                pieces[number] = replace(piece, names=names, addresses=addresses, found="layout")
    return tuple(pieces)


def own_name(local: str) -> str:
    """Return the name of a tensor of the program without what wrappers and several modules add."""
    return clean_name(local.partition(" of module ")[0])


def moved_modules(pieces: Iterable[RankPiece]) -> frozenset[tuple[str, str]]:
    """Return the program's name and the model's of the outermost modules that the program has elsewhere."""
    modules: set[tuple[str, str]] = set()
    for piece in (piece for piece in pieces if piece.moved):
        here, there = own_name(piece.local).split("."), piece.names[0].split(".")
        while here and there and here[-1] == there[-1]:
            here, there = here[:-1], there[:-1]
        modules.add((".".join(here), ".".join(there)))
    return frozenset(modules)


def moved_names(pieces: Iterable[RankPiece], space: StateMap) -> Mapping[str, str]:
    """Return the program's name -> the model's, for modules that the program has elsewhere: within a wrapper, say.

    Parameters that were found by their values tell it of all that is in their modules. What they tell in two ways is
    left out. A worked example: `net.0.bias` is the model's `0.bias`, so that `net.1.mean` may be its `1.mean`.
    """
    found: dict[str, set[str]] = {}
    for local, own in moved_modules(pieces):
        for name in space.starts:
            rest = name.removeprefix(own).lstrip(".")
            if name == ".".join(part for part in (own, rest) if part):
                found.setdefault(".".join(part for part in (local, rest) if part), set()).add(name)
    return {
        local: min(names)
        for local, names in found.items()
        if len({space.starts[name] for name in names}) == 1 and local not in names
    }


def _piece(
    local: str, tensor: Tensor, kind: Kind, lookup: Lookup, renamed: Mapping[str, str], known: RankPiece | None
) -> RankPiece:
    space, value = lookup.space, local_value(tensor)
    clean = own_name(local)
    name = renamed.get(local, renamed.get(clean, clean))
    addresses, found = None, ""
    if name in space.starts:
        addresses = claimed(tensor, name, space)
        found = "layout" if addresses is not None and _agrees(value, addresses, lookup) else ""
    if not found and known is not None and known.found == "value" and known.shape == tuple(value.shape):
        addresses, found = known.addresses, "value"
    if not found and kind == "parameter" and value.is_floating_point() and value.numel():
        looked_up, share = lookup.by_value(value)
        if share == 1.0:
            addresses, found = looked_up, "value"
        elif share > _REARRANGED:
            addresses = None  # made of the model's values and of others: nobody can say what it is
    started = float(value.double().sum()) if not value.is_meta else 0.0
    if not found and addresses is not None:
        found = "given" if kind == "parameter" else "layout"
        if kind == "parameter":
            give(tensor, lookup.start, addresses)
    names = () if addresses is None else space.names_at(addresses)
    moved = found == "value" and len(names) == 1 and same_addresses(claimed(tensor, names[0], space), addresses)
    shape, words, trained = tuple(value.shape), layout_words(tensor), tensor.requires_grad
    return RankPiece(local, kind, shape, names, addresses, found, words, trained, started, moved)


def same_addresses(one: Addresses | None, other: Addresses | None) -> bool:
    """Return whether both are known and equal."""
    return one is not None and other is not None and torch.equal(addresses_as_tensor(one), addresses_as_tensor(other))


def addresses_as_tensor(addresses: Addresses) -> Tensor:
    """Return one address for each element."""
    return torch.arange(addresses.start, addresses.stop) if isinstance(addresses, range) else addresses


def taken(whole: Tensor, addresses: Addresses) -> Tensor:
    """Return the elements of a tensor over all addresses, flat."""
    return whole[addresses.start : addresses.stop] if isinstance(addresses, range) else whole[addresses]


def _agrees(value: Tensor, addresses: Addresses, lookup: Lookup) -> bool:
    return torch.equal(value.reshape(-1), taken(lookup.start, addresses).to(value.dtype))


def give(tensor: Tensor, whole: Tensor, addresses: Addresses) -> None:
    """Give a tensor the values that a tensor over all addresses has for its elements."""
    with torch.no_grad():
        target = local_value(tensor)
        target.copy_(taken(whole, addresses).to(target.dtype).view(target.shape))
