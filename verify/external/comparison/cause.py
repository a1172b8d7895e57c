"""Name the cause of a wrong value by arithmetic on what is there: the ranks' values, and the right one.

mean_of_means      it is the mean over the data parts, each by itself
micro_batches      it is the mean over micro-batches, each by itself
missing_reduction  the values of the ranks of an axis add up to the right one (or average to it)
own_rows           it is the value of the rank's own rows of the batch
scaled             it is a constant times the right one: summed or averaged once too often
stale              it is the value of the step before, or has it added
permuted           its elements are the right ones in other places, or another rank's
partly_wrong       only some rows or columns of it are wrong
zero               nothing was added to it
differs            none of these
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import prod

import torch
from torch import Tensor

from verify.results.tolerance import difference, largest

VAGUE = ("differs", "partly_wrong")  # kinds of cause beside which another one is looked for
CLOSE = 1e-6  # relative; far above rounding in float64 and far below any cause


@dataclass(frozen=True)
class Cause:
    """A reason for a wrong value.

    kind    one of those above
    text    a sentence for people
    axis    of the mesh; several joined by a comma; empty where none is known
    factor  that the value is too large by; 0 where it is none
    """

    kind: str
    text: str
    axis: str = ""
    factor: float = 0.0


MEAN_OF_MEANS = Cause(
    "mean_of_means",
    "it is the mean over the data parts, each by itself, and that is not the loss of the whole batch: the parts have "
    'unequal numbers of terms, or couple their rows; if it is meant, say `reference = "parts"`',
)


def mean_of_micro_batches(count: int) -> Cause:
    """Return the cause of a value that is the mean over that many micro-batches."""
    text = (
        f"it is the mean over {count} micro-batches, each by itself, and that is not the loss of the whole batch: they "
        "couple their rows (a batch norm, or dim 0 is not the batch), or have unequal numbers of terms; if it is "
        "meant, let `reference_step` do the same"
    )
    return Cause("micro_batches", text)


@dataclass(frozen=True)
class Wrong:
    """A wrong value, and what it can be compared with. Tensors are float64 and of the local shape.

    noun      "gradient", "loss" or "parameter"
    value     found on this rank
    expected  the right one
    rank      where it was found
    sizes     mesh axis -> size
    others    rank -> value, for the ranks that hold the same elements, this one included
    at        rank -> coordinate, for all ranks
    own       make the right value of the rank's own rows; None where there is one data part
    before    the right value of the step before; None in the first step
    whole     the right values of the whole tensor, in any order; None where it is not known
    """

    noun: str
    value: Tensor
    expected: Tensor
    rank: int
    sizes: Mapping[str, int]
    others: Mapping[int, Tensor]
    at: Mapping[int, Mapping[str, int]]
    own: Callable[[], Tensor] | None = None
    before: Tensor | None = None
    whole: Tensor | None = None
    close: float = field(default=CLOSE)

    def agrees(self, value: Tensor, other: Tensor) -> bool:
        """Return whether two values are one, up to rounding."""
        return value.shape == other.shape and difference(value, other).relative < self.close


def cause_of(wrong: Wrong) -> Cause:
    """Return the first cause that the arithmetic shows."""
    if largest(wrong.value) == 0 and largest(wrong.expected) > 0:
        return Cause("zero", f"the {wrong.noun} is zero everywhere: nothing was added to it")
    if not bool(torch.isfinite(wrong.value).all()):
        return Cause("differs", f"the {wrong.noun} has values that are NaN or infinite")
    if wrong.agrees(wrong.value, wrong.expected):
        return Cause("differs", "")  # too little to say more
    return (
        _unsummed(wrong)
        or _stale(wrong)
        or _factor(wrong)
        or _own_rows(wrong)
        or _permuted(wrong)
        or _partly(wrong)
        or Cause("differs", "")
    )


def _axes(wrong: Wrong) -> list[tuple[str, ...]]:
    """Return the axes with more than one rank, then pairs of them, and so on."""
    names = [axis for axis, size in wrong.sizes.items() if size > 1]
    return [axes for count in range(1, len(names) + 1) for axes in combinations(names, count)]


def _unsummed(wrong: Wrong) -> Cause | None:
    """Test whether the values of the ranks of an axis add up, or average, to the right one."""
    here = wrong.at[wrong.rank]
    for axes in _axes(wrong):
        group = [r for r, c in wrong.at.items() if all(c[a] == here[a] for a in wrong.sizes if a not in axes)]
        if any(rank not in wrong.others for rank in group):
            continue
        values = [wrong.others[rank] for rank in group]
        if all(torch.equal(value, values[0]) for value in values):
            continue  # equal values: a factor
        total, size = torch.stack(values).sum(0), prod(wrong.sizes[axis] for axis in axes)
        name = ",".join(axes)
        for divisor, how in ((1, "add up"), (size, "average")):
            if wrong.agrees(total / divisor, wrong.expected):
                missing = "an all_reduce" if divisor == 1 else "an averaging all_reduce"
                ranks = f"the {_plural(wrong.noun)} of the ranks of {name}"
                text = f"{ranks} {how} to the model's: {missing} over {name} is missing"
                return Cause("missing_reduction", text, name)
    return None


def _plural(noun: str) -> str:
    return f"{noun}es" if noun.endswith("s") else f"{noun}s"


def _stale(wrong: Wrong) -> Cause | None:
    if wrong.before is None or wrong.agrees(wrong.before, wrong.expected):
        return None
    if wrong.agrees(wrong.value, wrong.before):
        return Cause("stale", f"the {wrong.noun} is that of the step before")
    if wrong.agrees(wrong.value, wrong.before + wrong.expected):
        return Cause("stale", f"the {wrong.noun} of the step before is added to it: it was not cleared")
    return None


def _factor(wrong: Wrong) -> Cause | None:
    """Test whether the value is a constant times the right one, and name an axis of that size."""
    square = float((wrong.expected * wrong.expected).sum())
    if not square > 0:
        return None
    factor = float((wrong.value * wrong.expected).sum()) / square
    if abs(factor - 1) < 1e-3 or not wrong.agrees(wrong.value, factor * wrong.expected):
        return None
    for axes in _axes(wrong):
        size, name = prod(wrong.sizes[axis] for axis in axes), ",".join(axes)
        if abs(factor / size - 1) < CLOSE:
            text = f"it is {size} times the model's, and {name} has {size} ranks: summed over {name} once too often"
            return Cause("scaled", f"{text}, or summed where it should be averaged", name, factor)
        if abs(factor * size - 1) < CLOSE:
            text = f"it is 1/{size} of the model's, and {name} has {size} ranks: averaged over {name} where it should"
            return Cause("scaled", f"{text} be summed, or averaged once too often", name, factor)
    told = _fraction(factor)
    if wrong.expected.numel() == 1 and "." in told:
        return None  # any two numbers have a ratio
    return Cause("scaled", f"it is {told} times the model's", "", factor)


def _fraction(factor: float) -> str:
    for below in range(1, 65):
        above = round(factor * below)
        if above and abs(factor * below / above - 1) < CLOSE:
            return str(above) if below == 1 else f"{above}/{below}"
    return f"{factor:.6g}"


def _own_rows(wrong: Wrong) -> Cause | None:
    """Test whether the value is that of the rank's own rows, or a multiple of it."""
    if wrong.own is None:
        return None
    own = wrong.own()
    square = float((own * own).sum())
    if not square > 0:
        return None
    factor = float((wrong.value * own).sum()) / square
    if abs(factor) < 1e-9 or not wrong.agrees(wrong.value, factor * own):
        return None
    times = "" if abs(factor - 1) < CLOSE else f", times {_fraction(factor)}"
    text = (
        f"it is the {wrong.noun} of this rank's own rows of the batch{times}: it was not averaged over the data parts"
    )
    return Cause("own_rows", text, "", 0.0 if not times else factor)


def _permuted(wrong: Wrong) -> Cause | None:
    """Test whether the elements are those of the right tensor, in other places."""
    for rank, other in sorted(wrong.others.items()):
        if rank != wrong.rank and wrong.agrees(wrong.value, other) and wrong.agrees(other, wrong.expected):
            return Cause("permuted", f"it is the piece of rank {rank}")
    if wrong.whole is None or wrong.value.numel() < 2 or largest(wrong.expected) == 0:
        return None
    known = torch.sort(wrong.whole[torch.isfinite(wrong.whole)]).values
    if not len(known):
        return None
    flat = wrong.value.reshape(-1)
    right = torch.searchsorted(known, flat).clamp(0, len(known) - 1)
    left = (right - 1).clamp_min(0)
    gap = torch.minimum((known[right] - flat).abs(), (known[left] - flat).abs())
    if float(gap.max()) < wrong.close * largest(known) * 1e-2:
        return Cause("permuted", "its elements are the model's, in other places: a wrong layout, order or slice")
    return None


def _partly(wrong: Wrong) -> Cause | None:
    """Test whether the value is right outside of some rows or columns."""
    scale = largest(wrong.expected)
    if wrong.value.dim() == 0 or not scale > 0:
        return None
    bad = (wrong.value - wrong.expected).abs() > wrong.close * scale
    for dim in range(bad.dim()):
        others = [d for d in range(bad.dim()) if d != dim]
        lines = bad.any(others) if others else bad
        count = int(lines.sum())
        if 0 < count <= lines.numel() // 2:
            places = lines.nonzero().flatten().tolist()
            shown = ", ".join(map(str, places[:6])) + (", ..." if count > 6 else "")
            return Cause("partly_wrong", f"of {lines.numel()} indices of dim {dim} only {shown} are wrong")
    return None


def common(causes: Sequence[Cause]) -> Cause:
    """Return the cause that most of these share; the first of them where several do."""
    kinds = [(cause.kind, cause.axis) for cause in causes]
    best = max(dict.fromkeys(kinds), key=kinds.count)
    return causes[kinds.index(best)]
