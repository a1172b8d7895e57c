"""Look-ups, positions and masks on a shard of a larger tensor: wrong functions, and wrong hooks for its call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from op_registry.builtin import SPECS
from op_registry.call import AxisShard, Call
from op_registry.rank_expression import Expression, block_start, index
from op_registry.spec import OperatorSpec, Shards

from verify.self_test.operators.mutants.mutant import (
    EITHER,
    FIT,
    SHARDS,
    Family,
    Function,
    Hook,
    OperatorMutant,
    spec_of,
)

_FAMILY = "index"
_PLAIN = Family(_FAMILY)
IGNORED = -100
PADDING = 4
HARMLESS = frozenset({"aten.slice.Tensor", "aten.slice_scatter.default"})  # torch clamps their ends by itself
Axes = Sequence[AxisShard]
Start = Callable[[int, Axes], Expression | int]  # (logical size, axes of the split) -> the first entry of the shard


def _start(size: int, axes: Axes) -> Expression:
    return block_start("the split identifier", size, axes)


def _careless(size: int, axes: Axes) -> Expression:
    """Take a strided shard for one block; refuse sections, and a second axis."""
    strided = len(axes) == 1 and axes[0].outer > 1
    return index(axes[0].axis) * (size // axes[0].parts) if strided else _start(size, axes)


def _careless_of_sections(size: int, axes: Axes) -> Expression:
    """Take a shard of each section for one block; refuse strided ones, and a second axis."""
    of_sections = len(axes) == 1 and axes[0].sections
    return index(axes[0].axis) * (size // axes[0].parts) if of_sections else _start(size, axes)


def _hook(identifier: str, dim: int, argument: tuple[int, str], start: Start) -> Hook:
    """Rewrite one argument to where the shard begins."""

    def localize(call: Call, shards: Shards) -> Call:
        axes = shards.get(identifier)
        if not axes:
            return call
        size = call.tensors()[0].shape[dim]
        return call.replace(*argument, start(size, axes))

    return localize


def lookup(weight: Tensor, ids: Tensor, start: int = 0) -> Tensor:
    """The rows of `ids`; zeros where an id is not in this block of rows."""
    local = ids - start
    here = (local >= 0) & (local < weight.shape[0])
    return weight[torch.where(here, local, 0)] * here[:, None]


def _wraps(weight: Tensor, ids: Tensor, start: int = 0) -> Tensor:
    local = ids - start
    here = local < weight.shape[0]
    return weight[torch.where(here, local, 0).clamp(min=-weight.shape[0])] * here[:, None]


def _clamps(weight: Tensor, ids: Tensor, start: int = 0) -> Tensor:
    return weight[(ids - start).clamp(0, weight.shape[0] - 1)]


def _modulo(weight: Tensor, ids: Tensor, start: int = 0) -> Tensor:
    return weight[(ids - start) % weight.shape[0]]


def _misses_first(weight: Tensor, ids: Tensor, start: int = 0) -> Tensor:
    local = ids - start
    here = (local > 0) & (local < weight.shape[0])
    return weight[torch.where(here | (local == 0) & (start == 0), local, 0)] * (here | (ids == 0))[:, None]


def _misses_last(weight: Tensor, ids: Tensor, start: int = 0) -> Tensor:
    local = ids - start
    here = (local >= 0) & (local < weight.shape[0] - (start > 0))
    return weight[torch.where(here, local, 0)] * here[:, None]


def _unmasked(weight: Tensor, ids: Tensor, start: int = 0) -> Tensor:
    local = ids - start
    here = (local >= 0) & (local < weight.shape[0])
    return weight[torch.where(here, local, 0)]


def _ones_outside(weight: Tensor, ids: Tensor, start: int = 0) -> Tensor:
    return torch.where(((ids >= start) & (ids < start + weight.shape[0]))[:, None], lookup(weight, ids, start), 1.0)


def padded(weight: Tensor, ids: Tensor, start: int = 0) -> Tensor:
    """As `lookup`, with a row that gives zeros."""
    return lookup(weight, ids, start) * (ids != PADDING)[:, None]


def _padding_is_local(weight: Tensor, ids: Tensor, start: int = 0) -> Tensor:
    return lookup(weight, ids, start) * (ids - start != PADDING)[:, None]


def _padding_frozen_locally(weight: Tensor, ids: Tensor, start: int = 0) -> Tensor:
    rows = lookup(weight, ids, start)
    return torch.where((ids - start == PADDING)[:, None], rows.detach(), rows)


def _padding_frozen(weight: Tensor, ids: Tensor, start: int = 0) -> Tensor:
    rows = lookup(weight, ids, start)
    return torch.where((ids == PADDING)[:, None], rows.detach(), rows)


def _vocabulary() -> dict[str, Any]:
    return {"weight": torch.randn(12, 5), "ids": torch.tensor([0, 11, 3, 4, 4, 6, 9, 0, 5, 7, 11, 1, 2, 8, 10, 3])}


def pick(logits: Tensor, labels: Tensor, first: int = 0) -> Tensor:
    """The logit of each label; 0 where it is ignored or not in this block of classes."""
    local = labels - first
    here = (labels != IGNORED) & (local >= 0) & (local < logits.shape[1])
    return logits.gather(1, torch.where(here, local, 0)[:, None])[:, 0] * here


def _picks_clamped(logits: Tensor, labels: Tensor, first: int = 0) -> Tensor:
    local = (labels - first).clamp(0, logits.shape[1] - 1)
    return logits.gather(1, local[:, None])[:, 0] * (labels != IGNORED)


def _picks_negative(logits: Tensor, labels: Tensor, first: int = 0) -> Tensor:
    local = labels - first
    here = (labels != IGNORED) & (local < logits.shape[1]) & (local >= -logits.shape[1])
    return logits.gather(1, (torch.where(here, local, 0) % logits.shape[1])[:, None])[:, 0] * here


def _picks_one_hot(logits: Tensor, labels: Tensor, first: int = 0) -> Tensor:
    classes = torch.arange(logits.shape[1]) + 0 * first
    return (logits * (labels[:, None] == classes)).sum(1)


def _labels() -> dict[str, Any]:
    labels = torch.tensor([0, 11, IGNORED, 3, 4, 6, IGNORED, 9, 11, 0, 7, 5])
    return {"logits": torch.randn(12, 12), "labels": labels}


def positions(x: Tensor, start: int = 0) -> Tensor:
    """Add its logical row number to every row."""
    return x + torch.arange(start, start + x.shape[0], dtype=x.dtype)[:, None]


def deep_positions(x: Tensor, start: int = 0) -> Tensor:
    """The same, whatever the number of dims."""
    rows = torch.arange(start, start + x.shape[0], dtype=x.dtype)
    return x + rows.view(-1, *[1] * (x.ndim - 1))


def _deep() -> tuple[Tensor, ...]:
    return (torch.randn(12, 2, 2, 2, 2, 2),)


def causal(scores: Tensor, start: int = 0) -> Tensor:
    """Zeros where a key comes after its query; queries begin at `start`."""
    queries = torch.arange(start, start + scores.shape[0])[:, None]
    return scores * (torch.arange(scores.shape[1]) <= queries)


def _causal_strict(scores: Tensor, start: int = 0) -> Tensor:
    queries = torch.arange(scores.shape[0])[:, None] + start + (start > 0)
    return scores * (torch.arange(scores.shape[1]) <= queries)


def grid(x: Tensor, row: int = 0, column: int = 0) -> Tensor:
    """Add what depends on the logical row and column."""
    rows = torch.arange(row, row + x.shape[0], dtype=x.dtype)[:, None]
    return x * (1 + rows * torch.arange(column, column + x.shape[1], dtype=x.dtype))


def _grid_hook(only_first: bool) -> Hook:
    def localize(call: Call, shards: Shards) -> Call:
        shape = call.tensors()[0].shape
        for number, (identifier, argument) in enumerate((("a", "row"), ("b", "column"))):
            if identifier in shards:
                call = call.replace(number + 1, argument, _start(shape[number], shards[identifier]))
                if only_first:
                    return call
        return call

    return localize


@dataclass(frozen=True, slots=True)
class HookedOperator:
    """A right operator whose call is rewritten for a shard.

    hook    rewrites it
    inputs  its arguments, where the annotation alone cannot give them
    blocks  identifiers of which a shard is one block
    """

    name: str
    annotation: str
    function: Function
    hook: Hook
    inputs: Callable[[], Any] | None = None
    blocks: frozenset[str] = frozenset()

    def with_hook(self, what: str, hook: Hook | None) -> OperatorMutant:
        """Return the mutant whose call is rewritten otherwise, or not at all."""
        return self._mutant(what, (self.function, self.function), hook)

    def with_function(self, what: str, wrong: Function, right: Function | None = None) -> OperatorMutant:
        """Return the mutant that computes something else, beside the host or another right function."""
        return self._mutant(what, (wrong, right or self.function), self.hook)

    def _mutant(self, what: str, functions: tuple[Function, Function], hook: Hook | None) -> OperatorMutant:
        name = f"{self.name}: {what}"
        wrong = spec_of(f"index/{name}", self.annotation, functions[0], self.inputs, hook, self.blocks)
        right = spec_of(f"index/twin of {name}", self.annotation, functions[1], self.inputs, self.hook, self.blocks)
        return OperatorMutant(f"index/{name}", _FAMILY, wrong, right)


def _from_end(size: int, axes: Axes) -> Expression:
    length = size // axes[0].parts
    return index(axes[0].axis) * -length + (size - length)


_STARTS: tuple[tuple[str, Start], ...] = (
    ("one block too far", lambda size, axes: _start(size, axes) + size // axes[0].parts),
    ("one row too far", lambda size, axes: _start(size, axes) + 1),
    ("in steps of the parts", lambda size, axes: index(axes[0].axis) * axes[0].parts),
    ("in steps of the whole size", lambda size, axes: index(axes[0].axis) * size),
    ("for two parts only", lambda size, axes: index(axes[0].axis) * (size // 2)),
    ("counted from the end", _from_end),
)


def _scores() -> tuple[Tensor, ...]:
    return (torch.randn(12, 14),)


_LOOKUP = HookedOperator(
    "lookup", "v+ d, t -> t d", lookup, _hook("v", 0, (2, "start"), _start), _vocabulary, frozenset("v")
)
_PICK = HookedOperator("pick", "t c+, t -> t", pick, _hook("c", 1, (2, "first"), _start), _labels, frozenset("c"))
_POSITIONS = HookedOperator(
    "positions", "a b -> a b", positions, _hook("a", 0, (1, "start"), _start), None, frozenset("a")
)
_DEEP = HookedOperator("positions", "a b c d e f -> a b c d e f", deep_positions, _POSITIONS.hook, _deep)
_CAUSAL = HookedOperator("causal", "q k^ -> q k^", causal, _hook("q", 0, (1, "start"), _start), _scores, frozenset("q"))
_GRID = HookedOperator("grid", "a b -> a b", grid, _grid_hook(False), None, frozenset("ab"))


def _lookups() -> Iterator[OperatorMutant]:
    yield _LOOKUP.with_hook("offset dropped", None)
    for name, start in _STARTS:
        yield _LOOKUP.with_hook(f"offset {name}", _hook("v", 0, (2, "start"), start))
    yield _LOOKUP.with_function("negative ids wrap around", _wraps)
    yield _LOOKUP.with_function("ids clamped", _clamps)
    yield _LOOKUP.with_function("ids modulo the block", _modulo)
    yield _LOOKUP.with_function("first row of a block missed", _misses_first)
    yield _LOOKUP.with_function("last row of a block missed", _misses_last)
    yield _LOOKUP.with_function("rows outside not zeroed", _unmasked)
    yield _LOOKUP.with_function("ones outside", _ones_outside)
    yield _LOOKUP.with_function("no offset in the function", lambda weight, ids, start=0: lookup(weight, ids))
    yield _LOOKUP.with_function("padding row counted in the block", _padding_is_local, padded)
    yield _LOOKUP.with_function("padding row's gradient kept", _padding_frozen_locally, _padding_frozen)
    strided = replace(_LOOKUP, blocks=frozenset())
    yield strided.with_hook("strided shard taken for a block", _hook("v", 0, (2, "start"), _careless))


def _picks() -> Iterator[OperatorMutant]:
    yield _PICK.with_hook("offset dropped", None)
    yield _PICK.with_hook("offset of the other dim", _hook("t", 0, (2, "first"), _start))
    yield _PICK.with_function("labels clamped", _picks_clamped)
    yield _PICK.with_function("negative labels wrap around", _picks_negative)
    yield _PICK.with_function("one-hot without the offset", _picks_one_hot)


def _places() -> Iterator[OperatorMutant]:
    yield _POSITIONS.with_hook("offset dropped", None)
    careless = _hook("a", 0, (1, "start"), _careless)
    yield replace(_POSITIONS, blocks=frozenset()).with_hook("strided shard taken for a block", careless)
    yield _DEEP.with_hook("strided shard of one of six dims taken for a block", careless)
    of_sections = _hook("a", 0, (1, "start"), _careless_of_sections)
    yield _DEEP.with_hook("shard of each section of one of six dims taken for a block", of_sections)
    yield _POSITIONS.with_hook("offset of the other dim", _hook("b", 1, (1, "start"), _start))
    yield _CAUSAL.with_hook("offset dropped", None)
    yield _CAUSAL.with_function("one too far", _causal_strict)
    yield _GRID.with_hook("second offset dropped", _grid_hook(True))


def _plain() -> Iterator[OperatorMutant]:
    make = _PLAIN.mutant
    table = _table
    yield make("lookup without a hook", "v+ d, t -> t d", _clamps, _lookup_by_sum, SHARDS, table)
    yield make("gather over a split dim", "t c, t -> t c", _gathered_over_rows, lambda x, ids: x * ids[:, None])
    yield make("lookup in reverse", "v^ d, t -> t d", lambda w, i: w[i.flip(0)], lambda w, i: w[i], SHARDS, table)
    yield make("lookup of neighbours", "v^ d, t -> t d", lambda w, i: w[i.roll(1)], lambda w, i: w[i], SHARDS, table)
    yield make("lookup of sorted ids", "v^ d, t -> t d", lambda w, i: w[i.sort()[0]], lambda w, i: w[i], SHARDS, table)
    yield make("lookup of ranks of ids", "v^ d, t -> t d", _ranked, lambda w, i: w[i], SHARDS, table)
    yield make("counts repeats", "v^ d, t -> t d", _by_frequency, lambda w, i: w[i], SHARDS, table)


def _table() -> tuple[Any, ...]:
    return tuple(_vocabulary().values())


def _lookup_by_sum(weight: Tensor, ids: Tensor) -> Tensor:
    return weight.sum(0) * (ids > 2)[:, None]


def _gathered_over_rows(x: Tensor, ids: Tensor) -> Tensor:
    return x[ids.detach().abs().long() % x.shape[0]]


def _ranked(weight: Tensor, ids: Tensor) -> Tensor:
    return weight[ids.argsort() % weight.shape[0]]


def _by_frequency(weight: Tensor, ids: Tensor) -> Tensor:
    return weight[ids] / torch.bincount(ids, minlength=weight.shape[0])[ids][:, None]


def _hooks_dropped() -> Iterator[OperatorMutant]:
    """Built-in operators whose call should be rewritten for a shard, and is not: one for each hook."""
    seen: dict[object, OperatorSpec] = {}
    for spec in SPECS:
        if spec.name in HARMLESS or spec.random:
            continue
        if spec.localize is not None:
            seen.setdefault(spec.localize.__code__, spec)
        elif spec.shape_argument is not None:
            seen.setdefault(spec.shape_argument, spec)
    for spec in seen.values():
        wrong = replace(spec, localize=None, shape_argument=None)
        name = f"index/hook dropped: {spec.name}"
        yield OperatorMutant(name, _FAMILY, wrong, spec, EITHER | FIT)


def mutants() -> tuple[OperatorMutant, ...]:
    """Every wrong look-up."""
    return (*_lookups(), *_picks(), *_places(), *_plain(), *_hooks_dropped())
