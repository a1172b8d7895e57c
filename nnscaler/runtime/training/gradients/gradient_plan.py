"""Plan which gradients of a rank travel together, over which ranks, and in which order.

A gradient is summed over the ranks that differ from this one only on the parameter's `reduce` axes, in every stage that
holds a copy of it. Gradients with the same group and dtype share buckets, the last parameters of the program in the
first one, for backward comes to them first. All ranks of a group find the same buckets in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeVar

import torch
from torch.nn import Parameter as Leaf

from nnscaler.communication_buckets import in_buckets
from nnscaler.runtime.shards import unravel
from nnscaler.runtime.stage_base_class import Parameter, Stage, is_trained
from nnscaler.runtime.training.autocast_on_any_device import dtype_named
from nnscaler.runtime.training.zero_1_2_and_master_weights import AtRest, Division

T = TypeVar("T")
HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Holding:
    """One local tensor of a parameter: which one, and the ranks (in order) whose gradients add up to its gradient."""

    fqn: str
    group: tuple[int, ...]


def holding(stage: Stage, description: Parameter) -> Holding:
    """Return where the gradient of this stage's shard of a parameter at rest is summed."""
    here = unravel(stage.ranks.index(stage.rank), stage.axes)
    kept = [axis for axis in stage.axes if axis not in description.summed]
    positions = [
        position
        for position in range(len(stage.ranks))
        if all(unravel(position, stage.axes)[axis] == here[axis] for axis in kept)
    ]
    copies = description.copies or (tuple(stage.ranks),)
    return Holding(description.fqn, tuple(sorted({copy[position] for copy in copies for position in positions})))


@dataclass(eq=False, slots=True)
class WantedGradient:
    """A leaf whose gradient is wanted.

    rest     its tensor at rest, which gets the gradient
    held     where that is summed
    dtype    in which it is summed over ranks
    entry    how it is divided before, if it is
    late     its sum begins after all backwards: another stage adds to it, or it is divided before
    at_once  it is divided after each backward, and not after the last
    stages   in whose backwards the leaf gets its gradient
    """

    leaf: Leaf
    rest: Leaf
    held: Holding
    dtype: torch.dtype
    entry: AtRest | None
    late: bool
    at_once: bool = False
    stages: set[int] = field(default_factory=set)

    @property
    def divisions(self) -> tuple[Division, ...]:
        return () if self.entry is None else self.entry.divisions

    @property
    def travels(self) -> bool:
        """Say if its division begins with a sum over ranks."""
        return bool(self.divisions) and self.divisions[0].sums

    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype of the last sum over ranks: of what is divided at once, that in which parts are added up."""
        return widened(self.dtype) if self.at_once else self.dtype


def wanted(stages: Mapping[int, Stage], resting: Sequence[AtRest], precision: str | None) -> dict[Leaf, WantedGradient]:
    """Return the leaves of this rank whose gradients are wanted, in the order of the program."""
    entries = {entry.leaf: entry for entry in resting}
    found: dict[Leaf, WantedGradient] = {}
    for stage in stages.values():
        for name, description in stage.parameters.items():
            leaf = getattr(stage, name)
            if not description.used:
                continue
            dtype = dtype_named(description.sums, precision) if description.sums else widened(leaf.dtype)
            made = WantedGradient(
                leaf, stage.at_rest[name], holding(stage, description), dtype, entries.get(leaf),
                bool(description.copies or description.rest),
            )  # fmt: skip
            one = found.setdefault(leaf, made)
            one.stages.add(stage.index)
            one.at_once |= bool(description.rest) and description.scatter == "micro_batch" and is_trained(stage)
    return found


def widened(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients of this one are added up over micro-batches."""
    return torch.float32 if dtype in HALF else dtype


def is_plain(one: WantedGradient, passes: Mapping[int, int]) -> bool:
    """Say if a gradient may stay where autograd leaves it. One of half precision may if a single backward makes it:
    there is nothing to add up in float32."""
    if one.leaf.dtype in HALF:
        right = one.dtype == widened(one.leaf.dtype) and sum(passes.get(stage, 2) for stage in one.stages) == 1
    else:
        right = one.dtype == one.leaf.dtype
    still = right and one.leaf is one.rest
    return still and len(one.held.group) == 1 and not one.travels and not one.at_once


Slot = list[WantedGradient]  # local copies of one shard, whose gradients are added before they are summed over ranks
Key = tuple[Any, ...]


def sums_of(leaves: Iterable[WantedGradient]) -> list[list[Slot]]:
    """Return the slots of each bucket of gradients that are summed over ranks, in the order of waiting.

    Those that begin late have buckets of their own, and come in the order of names: stages hold them in different ones.
    """
    slots: dict[Key, Slot] = {}
    for one in leaves:
        if len(one.held.group) > 1:
            slots.setdefault((one.held.group, str(one.sum_dtype), one.late, one.held.fqn), []).append(one)
    runs: dict[Key, list[Slot]] = {}
    for key, slot in reversed(slots.items()):
        runs.setdefault(key[:3], []).append(slot)
    for key, run in runs.items():
        if key[2]:
            run.sort(key=lambda slot: slot[0].held.fqn)
    return _in_buckets(runs, lambda slot: slot[0].rest.numel() * slot[0].sum_dtype.itemsize)


def divisions_of_leaves(leaves: Iterable[WantedGradient], depth: int) -> list[list[WantedGradient]]:
    """Return the leaves of each bucket of gradients that are summed and divided over the axis at a depth, in the order
    of waiting."""
    runs: dict[Key, list[WantedGradient]] = {}
    for one in reversed(list(leaves)):
        if len(one.divisions) > depth and one.divisions[depth].sums:
            runs.setdefault((one.divisions[depth].group, str(one.dtype)), []).append(one)
    return _in_buckets(runs, lambda one: prod(one.divisions[depth].whole) * one.dtype.itemsize)


def _in_buckets(runs: Mapping[Key, Sequence[T]], weight: Callable[[T], int]) -> list[list[T]]:
    return [
        [run[i] for i in bucket]
        for _, run in sorted(runs.items(), key=lambda pair: pair[0])
        for bucket in in_buckets([weight(one) for one in run])
    ]
