"""The causes of wrong tensors, in the order in which they are tried: each is told where it is true up to rounding.

What comes first is what says more: a rank that alone is right before a sum that is missing, a sum before a factor (any
two numbers have one), a factor before elements in other places. Where several axes explain the same, all are told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import prod

import torch
from torch import Tensor

from nnscaler.layout import IN_STEP, Invariant, Sharded, State
from nnscaler.runtime.shards import local_shape, shard
from nnscaler.runtime.tensor_bits_and_differences import largest
from verify.programs.causes.wrong_tensor import STAGES, Cause, Make, Place, WrongTensor, weighed

NARROW = (("bfloat16", torch.bfloat16), ("float16", torch.float16), ("float32", torch.float32))
SHOWN = 6
SHORT = 16


@dataclass(frozen=True)
class CauseCandidate:
    """A cause that a wrong tensor may have.

    kind    its name
    find    say how it is true of a tensor; None where it is not
    needs   fields of a tensor without which it cannot be tested
    placed  its sentence is of the wrong ranks by themselves, and says which they are
    """

    kind: str
    find: Callable[[WrongTensor], Cause | str | None]
    needs: tuple[str, ...] = ()
    placed: bool = True


def cause_of(*views: WrongTensor | None) -> Cause:
    """Return the first cause that is true of a tensor, of which there may be several views."""
    for candidate in CANDIDATES:
        for wrong in views:
            if wrong is None or not wrong.wrong or any(getattr(wrong, name) is None for name in candidate.needs):
                continue
            found = candidate.find(wrong)
            if found is not None:
                cause = found if isinstance(found, Cause) else Cause(candidate.kind, found)
                where = wrong.where if candidate.placed else ""
                return replace(cause, text=f"{where}: {cause.text}") if where else cause
    return Cause("differs", "")


# -- sums over ranks --------------------------------------------------------------------------------------------------


def _axes(sizes: Mapping[str, int]) -> Iterator[list[tuple[str, ...]]]:
    """Yield the axes with more than one rank, each by itself, then pairs of them, and so on."""
    names = [axis for axis, size in sizes.items() if size > 1]
    for count in range(1, len(names) + 1):
        yield list(combinations(names, count))


def _named(axes: Sequence[tuple[str, ...]]) -> str:
    return " or ".join(",".join(names) for names in axes)


def _unsummed(wrong: WrongTensor) -> Cause | None:
    ranks = {axis: len(wrong.at) for axis in next(iter(wrong.at.values())) if axis not in IN_STEP}
    for several in _axes(ranks):
        for how, averaged in (("add up", False), ("average", True)):
            axes = [names for names in several if _makes_up(wrong, names, wrong.rights.get, averaged)]
            if axes:
                return Cause("missing_reduction", _missing(wrong, axes, how), ",".join(axes[0]))
    return None


def _makes_up(wrong: WrongTensor, axes: tuple[str, ...], right: Make, averaged: bool = False) -> bool:
    """Return whether the pieces of the ranks of these axes, which are not equal, make up the right one."""
    lines = wrong.lines(axes)
    for line in lines:
        values, rights = [wrong.pieces[place] for place in line], [right(place) for place in line]
        if len({value.shape for value in values}) > 1:
            return False
        total = torch.stack(values).sum(0) / (len(line) if averaged else 1)
        if not all(one is not None and wrong.near(total, one) for one in rights):
            return False
    return any(not wrong.near(wrong.pieces[p], wrong.pieces[line[0]]) for line in lines for p in line)


def _missing(wrong: WrongTensor, axes: Sequence[tuple[str, ...]], how: str) -> str:
    name, first = _named(axes), axes[0]
    if name == STAGES:
        return "the stages share it, and each has only its own part: the sum over its copies is missing"
    having = {wrong.at[p][first[0]] for line in wrong.lines(first) for p in line if largest(wrong.pieces[p])}
    if len(having) == 1 and (name,) == first:
        which = "the first rank" if having == {0} else f"rank {having.pop()}"
        return f"only {which} of {name} is right: it has all of it, and the others have zeros"
    declared = wrong.reduce is None or all(axis in wrong.reduce for axis in first)
    unnamed = "" if declared else f", and its reduce={wrong.reduce} does not name {name}"
    nouns = f"{wrong.noun}es" if wrong.noun.endswith("s") else f"{wrong.noun}s"
    missing = "an all_reduce" if how == "add up" else "an averaging all_reduce"
    return f"the {nouns} of the ranks of {name} {how} to the model's: {missing} over {name} is missing{unnamed}"


def _unscattered(wrong: WrongTensor) -> Cause | None:
    for axis in wrong.states or {}:
        if axis not in IN_STEP and _makes_up(wrong, (axis,), _cut(wrong, {**(wrong.states or {}), axis: Invariant()})):
            text = f"it is right once summed over {axis} and cut: a reduce_scatter over {axis} is missing"
            return Cause("missing_reduce_scatter", text, axis)
    return None


def _cut(wrong: WrongTensor, states: Mapping[str, State]) -> Make:
    """Return what makes the pieces of another layout; None where it does not divide."""

    def make(place: Place) -> Tensor | None:
        try:
            return shard(wrong.expected, states, wrong.sizes, wrong.at[place])
        except (ValueError, IndexError):
            return None

    return make


# -- factors, and other steps, rows and tensors -----------------------------------------------------------------------


def _scaled(wrong: WrongTensor) -> Cause | None:
    factor = wrong.factor(lambda place: wrong.rights[place])
    if factor is None or abs(factor - 1) < 1e-3:
        return None
    for n, often in ((factor, True), (1 / factor, False)):
        if abs(n - round(n)) > wrong.close * abs(n):
            continue
        for several in _axes(wrong.sizes):
            axes = [names for names in several if prod(wrong.sizes[axis] for axis in names) == round(n)]
            if axes:
                return Cause("scaled", _times(wrong, round(n), axes, often), _named(axes), factor)
    told = _fraction(factor, wrong.close)
    if "." in told and all(right.numel() == 1 for right in wrong.rights.values()):
        return None  # any two numbers have a ratio
    if told == "-1":
        # the first updates of Adam are of one size: signs of a few are others by chance
        return None if _is_short_of_one_size(wrong) else Cause("scaled", "its sign is wrong", "", factor)
    return Cause("scaled", f"it is {told} {'of' if told.startswith('1/') else 'times'} the model's", "", factor)


def _is_short_of_one_size(wrong: WrongTensor) -> bool:
    sizes = torch.cat([wrong.rights[place].flatten().abs() for place in wrong.wrong])
    return len(sizes) < SHORT and bool((sizes > (1 - wrong.close) * largest(sizes)).all())


def _times(wrong: WrongTensor, n: int, axes: Sequence[tuple[str, ...]], often: bool) -> str:
    same = [names[0] for names in axes if len(names) == 1 and wrong.terms.get(names[0])]
    if often and same:
        whole = f"every rank of {same[0]} holds all of it where each should hold a part of a sum"
        return f"{whole}: it counts {n} times, summed once too often"
    if often:
        times, how = f"{n} times", "summed once too often, or summed where it should be averaged"
    else:
        times, how = f"1/{n} of", "averaged where it should be summed, averaged once too often, or not summed"
    return f"it is {times} the model's, the size of {_named(axes)}: {how}"


def _fraction(factor: float, close: float) -> str:
    for below in range(1, 65):
        above = round(factor * below)
        if above and abs(factor * below / above - 1) < close and (below == 1 or abs(above) <= 64):
            return str(above) if below == 1 else f"{above}/{below}"
    return f"{factor:.6g}"


def _zero(wrong: WrongTensor) -> str | None:
    if any(largest(wrong.pieces[place]) for place in wrong.wrong):
        return None
    return f"the {wrong.noun} is zero everywhere: nothing was added to it"


def _not_finite(wrong: WrongTensor) -> Cause | None:
    if all(bool(torch.isfinite(wrong.pieces[place]).all()) for place in wrong.wrong):
        return None
    return Cause("differs", f"the {wrong.noun} has values that are NaN or infinite")


def _stale(wrong: WrongTensor) -> str | None:
    before = wrong.before
    assert before is not None
    old = {place: wrong.cut(before, place) for place in wrong.wrong}
    if all(wrong.near(piece, wrong.rights[place]) for place, piece in old.items()):
        return None
    if wrong.is_made(old.get):
        return f"it is the {wrong.noun} of the step before"
    if wrong.is_made(lambda place: old[place] + wrong.rights[place]):
        return f"the {wrong.noun} of the step before is added to it: it was not cleared"
    return None


def _own_rows(wrong: WrongTensor) -> Cause | None:
    assert wrong.own is not None
    own = wrong.own()
    factor = wrong.factor(lambda _: own)
    if factor is None or abs(factor) < 1e-9:
        return None
    one, told = abs(factor - 1) < wrong.close, _fraction(factor, wrong.close)
    if not one and "." in told and own is not None and own.numel() == 1:
        return None  # any two numbers have a ratio
    times = "" if one else f", times {told}"
    rows = f"it is the {wrong.noun} of this rank's own rows of the batch{times}"
    return Cause("own_rows", f"{rows}: it was not averaged over the data parts", "", 0.0 if one else factor)


def _swapped(wrong: WrongTensor) -> str | None:
    for name, other in (wrong.others or {}).items():
        if other.shape == wrong.expected.shape and largest(other) and wrong.is_made(_cut_of(wrong, other)):
            return f"it is the {wrong.noun} of `{name}`: read from the place of another"
    return None


def _rounded(wrong: WrongTensor) -> str | None:
    for dtype, narrow in NARROW:
        rounded = {place: wrong.rights[place].to(narrow).double() for place in wrong.wrong}
        if wrong.is_made(rounded.get):
            return f"it is rounded to {dtype}: cast down, or kept in {dtype}"
    return None


def _added(wrong: WrongTensor) -> str | None:
    gap = _gap(wrong)
    if gap is None:
        return None
    for name, operand in (wrong.operands or {}).items():
        try:
            whole = operand.double().expand_as(wrong.expected)
        except RuntimeError:
            continue
        times = gap.factor(_cut_of(wrong, whole))
        if times is not None and round(times) and abs(times - round(times)) < wrong.close:
            much = f"{abs(round(times))} times too {'often' if times > 0 else 'seldom'}"
            return f"`{name}` is added {much}: on every rank, or on none"
    return None


def _gap(wrong: WrongTensor) -> WrongTensor | None:
    """Return by how much the wrong pieces are too large, as a tensor that should be zero."""
    if any(wrong.pieces[place].shape != wrong.rights[place].shape for place in wrong.wrong):
        return None
    gaps = {place: wrong.pieces[place] - wrong.rights[place] for place in wrong.wrong}
    return replace(wrong, pieces=gaps, judged=wrong.wrong, expected=torch.zeros_like(wrong.expected))


def _offset(wrong: WrongTensor) -> str | None:
    gap = _gap(wrong)
    more = None if gap is None else gap.factor(lambda place: torch.ones_like(wrong.rights[place]))
    if more is None or wrong.expected.numel() < 2:
        return None
    return f"it is {abs(more):.6g} too {'large' if more > 0 else 'small'} everywhere: a constant differs"


# -- elements in other places -----------------------------------------------------------------------------------------


def misplaced(wrong: WrongTensor) -> str | None:
    """Test whether every wrong piece is the right one of another place."""
    first = None
    for place in wrong.wrong:
        near = (p for p, right in wrong.rights.items() if largest(right) and wrong.near(wrong.pieces[place], right))
        owner = next(near, None)
        if owner is None:
            return None
        first = first or (place, owner)
    assert first is not None
    here, there = map(wrong.name, first)
    return f"the right pieces at wrong places{'' if wrong.terms else f': {here} has the piece of {there}'}"


def _other_cut(wrong: WrongTensor) -> str | None:
    assert wrong.states is not None
    for axis, state in wrong.states.items():
        for other in cuts(tuple(wrong.expected.shape), wrong.states, axis, wrong.sizes):
            if wrong.is_made(_cut(wrong, {**wrong.states, axis: other})):
                return f"it is cut as {other} over {axis} where the layout is {state}{_strided(other, state)}"
    return None


def cuts(shape: tuple[int, ...], states: Mapping[str, State], axis: str, sizes: Mapping[str, int]) -> Iterator[Sharded]:
    """Yield every other even cut over an axis that cuts which gives the first rank a piece of the same shape."""
    state = states[axis]
    if not isinstance(state, Sharded):
        return
    first = dict.fromkeys(sizes, 0)
    local = local_shape(shape, states, sizes, first)
    for dim, size in enumerate(shape):
        for outer in range(1, size // sizes[axis] + 1):
            if size % (outer * sizes[axis]) == 0:
                other = Sharded(dim, outer)
                if other != state and local_shape(shape, {**states, axis: other}, sizes, first) == local:
                    yield other


def _strided(one: Sharded, other: State) -> str:
    assert isinstance(other, Sharded)
    if one.dim != other.dim:
        return ": another dim"
    return ": contiguous for strided" if one.outer == 1 else ": strided for contiguous" if other.outer == 1 else ""


def _moved(wrong: WrongTensor) -> str | None:
    """Test whether the tensor is transposed, or shifted."""
    right = wrong.expected
    for i, j in combinations(range(right.dim()), 2):
        if right.shape[i] == right.shape[j] and wrong.is_made(_cut_of(wrong, right.transpose(i, j))):
            return f"it is transposed: dims {i} and {j} are exchanged"
    for dim in range(right.dim()):
        if any(wrong.is_made(_cut_of(wrong, right.roll(by, dim))) for by in (1, -1)):
            return f"it is shifted by one along dim {dim}: shards begin one element off"
    return None


def _cut_of(wrong: WrongTensor, whole: Tensor) -> Make:
    return lambda place: wrong.cut(whole, place)


def _permuted(wrong: WrongTensor) -> str | None:
    assert wrong.elements is not None
    finite = wrong.elements[torch.isfinite(wrong.elements)]
    known = torch.unique(finite)
    if len(known) < 2 or len(known) * 2 < int((finite != 0).sum()):
        return None  # few different ones: those of any tensor would be among them
    for place in wrong.wrong:
        flat = wrong.pieces[place].flatten()
        if len(flat) < 2:
            return None
        right = torch.searchsorted(known, flat).clamp(0, len(known) - 1)
        gap = torch.minimum((known[right] - flat).abs(), (known[(right - 1).clamp_min(0)] - flat).abs())
        if not float(gap.max()) < wrong.close * largest(known) * 1e-2:
            return None
    return "its elements are the model's, in other places: a wrong layout, order or slice"


def _some_ranks(wrong: WrongTensor) -> str | None:
    if not wrong.where:
        return None
    right = sorted({rank for rank, _ in wrong.pieces} - {rank for rank, _ in wrong.wrong})
    return f"only rank {right[0]} is right" if len(right) == 1 else f"it is wrong {wrong.where}"


def _partly(wrong: WrongTensor) -> str | None:
    """Test whether the tensor is right outside of some rows or columns. Those that are zero show nothing."""
    bad = torch.zeros(wrong.expected.shape, dtype=torch.bool)
    places = torch.arange(bad.numel()).reshape(bad.shape)
    for place in wrong.wrong:
        value, right = wrong.pieces[place], wrong.rights[place]
        if value.shape != right.shape or not value.dim():
            return None
        off = (value - right).abs() > wrong.close * largest(wrong.expected)
        bad.view(-1)[wrong.cut(places, place)[off]] = True
    seen = bad | (wrong.expected.reshape(bad.shape) != 0)
    for dim in range(bad.dim()):
        others = [d for d in range(bad.dim()) if d != dim]
        lines, shown_in = (mask.any(others) if others else mask for mask in (bad, seen))
        count = int(lines.sum())
        if 0 < count <= int(shown_in.sum()) // 2:
            shown = ", ".join(map(str, lines.nonzero().flatten().tolist()[:SHOWN])) + (", ..." if count > SHOWN else "")
            return f"of {lines.numel()} indices of dim {dim} only {shown} are wrong"
    return None


CANDIDATES = (
    CauseCandidate("parts", weighed, ("parts",), placed=False),
    CauseCandidate("missing_reduction", _unsummed, placed=False),
    CauseCandidate("zero", _zero),
    CauseCandidate("differs", _not_finite),
    CauseCandidate("stale", _stale, ("before",)),
    CauseCandidate("missing_reduce_scatter", _unscattered, ("states",), placed=False),
    CauseCandidate("scaled", _scaled),
    CauseCandidate("own_rows", _own_rows, ("own",)),
    CauseCandidate("permuted", misplaced, placed=False),
    CauseCandidate("swapped", _swapped, ("others",)),
    CauseCandidate("rounded", _rounded),
    CauseCandidate("cut", _other_cut, ("states",)),
    CauseCandidate("permuted", _moved),
    CauseCandidate("added", _added, ("operands",)),
    CauseCandidate("offset", _offset),
    CauseCandidate("permuted", _permuted, ("elements",)),
    CauseCandidate("some_ranks", _some_ranks, placed=False),
    CauseCandidate("partly_wrong", _partly),
)
