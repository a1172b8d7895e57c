"""Semantics of reading and writing through indices. A symbolic index is a chain of cases, one per entry it may mean.

That an index is in range is a condition: assumed of the whole operator, which raises otherwise, and to be proved of the
shards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from math import prod
from types import MappingProxyType

import numpy as np

from op_registry.builtin._name_and_broadcast_dims import whole

from verify.evidence.smt.element_arithmetic import Element, Numbers, Unsupported
from verify.evidence.smt.semantics.element_arrays import Array, Given, Rule, array, each, filled


def cases(al: Numbers, index: Element, size: int, wraps: bool = False) -> list[Element]:
    """Return, for each entry of a dim of `size`, the condition that `index` means it.

    With `wraps`, -1 is the last one.
    """
    if size == 0:
        raise Unsupported("an index into a dim of size 0")
    low = -size if wraps else 0
    al.require(al.both(al.less_equal(low, index), al.less(index, size)), "an index is in range")
    if wraps:
        index = al.where(al.less(index, 0), al.add(index, size), index)
    return [al.equal(index, k) for k in range(size)]


def pick(al: Numbers, chosen: Sequence[Element], rows: Array) -> Array:
    """Return the row (along the first dim) whose case holds; at most one does, and if none does it is the last one.

    Written as a sum of differences to the last row, which has one term per case.
    """
    flat = rows.reshape(len(rows), -1)
    items = [_picked(al, chosen, list(flat[:, j])) for j in range(flat.shape[1])]
    return array(items, rows.shape[1:])


def _picked(al: Numbers, chosen: Sequence[Element], column: list[Element]) -> Element:
    last = column[-1]
    if any(al.kind(e) == "bool" for e in column):
        for condition, e in zip(reversed(chosen[:-1]), reversed(column[:-1]), strict=True):
            last = al.where(condition, e, last)
        return last
    cases = zip(chosen[:-1], column[:-1], strict=True)
    return al.sum([last, *(al.where(condition, al.subtract(e, last), 0) for condition, e in cases)])


def _embedding(al: Numbers, given: Given) -> Array:
    weight, ids = given["weight"], given["indices"]
    rows = [pick(al, cases(al, i, len(weight)), weight) for i in ids.reshape(-1)]
    return _stacked(rows, ids.shape, weight.shape[1:])


def _stacked(rows: Sequence[Array], lead: Sequence[int], rest: Sequence[int]) -> Array:
    return array([e for row in rows for e in row.reshape(-1)], [*lead, *rest])


def _embedding_backward(al: Numbers, given: Given) -> Array:
    """Rows of ids that are equal add up; the row of `padding_idx` gets nothing."""
    if given["scale_grad_by_freq"]:
        raise Unsupported("gradients divided by counts of ids")
    grad, ids, padding = given["grad_output"], given["indices"].reshape(-1), given["padding_idx"]
    count, width = given["num_weights"], given["grad_output"].shape[-1]
    rows = grad.reshape(-1, width)
    chosen = [cases(al, i, count) for i in ids]
    items: list[Element] = []
    for k in range(count):
        for j in range(width):
            terms = [al.where(c[k], row[j], 0) for c, row in zip(chosen, rows, strict=True)]
            items.append(0 if k == padding else al.sum(terms))
    return array(items, (count, width))


def _index_select(al: Numbers, given: Given) -> Array:
    x, index = given["self"], given["index"]
    dim = whole(given["dim"], x.ndim)
    rows = np.moveaxis(x, dim, 0)
    taken = [pick(al, cases(al, i, len(rows)), rows) for i in index.reshape(-1)]
    return np.moveaxis(_stacked(taken, (len(taken),), rows.shape[1:]), 0, dim)


def _index_add(al: Numbers, given: Given) -> Array:
    x, dim = given["self"], whole(given["dim"], given["self"].ndim)
    rows, source = np.moveaxis(x, dim, 0).copy(), np.moveaxis(given["source"], dim, 0)
    alpha = given.get("alpha", 1)
    chosen = [cases(al, i, len(rows)) for i in given["index"].reshape(-1)]
    for k in range(len(rows)):
        added = [each(lambda s, c=c[k]: al.where(c, al.multiply(alpha, s), 0), row) for c, row in _zip(chosen, source)]
        _put(rows, k, each(lambda *terms: al.sum(terms), rows[k], *added))
    return np.moveaxis(rows, 0, dim)


def _put(rows: Array, at: int | tuple[int, ...], new: Array) -> None:
    """Assign `rows[at] = new`, where numpy would make an array without dims an element."""
    rows[at] = new if new.ndim else new[()]


def _zip(chosen: Sequence[list[Element]], rows: Array) -> list[tuple[list[Element], Array]]:
    return list(zip(chosen, rows, strict=True))


def _index_copy(al: Numbers, given: Given) -> Array:
    """Where two indices are equal, which of the two is kept is not defined: they are required to differ."""
    x, dim = given["self"], whole(given["dim"], given["self"].ndim)
    rows, source = np.moveaxis(x, dim, 0).copy(), np.moveaxis(given["source"], dim, 0)
    index = given["index"].reshape(-1)
    _require_distinct(al, list(index))
    for c, row in _zip([cases(al, i, len(rows)) for i in index], source):
        for k in range(len(rows)):
            _put(rows, k, each(lambda a, b, c=c[k]: al.where(c, a, b), row, rows[k]))
    return np.moveaxis(rows, 0, dim)


def _index_fill(al: Numbers, given: Given) -> Array:
    x, dim = given["self"], whole(given["dim"], given["self"].ndim)
    rows, value = np.moveaxis(x, dim, 0).copy(), given["value"]
    for i in given["index"].reshape(-1):
        for k, c in enumerate(cases(al, i, len(rows), wraps=True)):
            _put(rows, k, each(lambda a, b, c=c: al.where(c, a, b), value, rows[k]))
    return np.moveaxis(rows, 0, dim)


def _require_distinct(al: Numbers, index: Sequence[Element]) -> None:
    for a, b in combinations(index, 2):
        al.require(al.opposite(al.equal(a, b)), "indices that are written to differ")


def _gather(al: Numbers, given: Given) -> Array:
    x, index = given["self"], given["index"]
    if x.ndim == 0 or index.ndim == 0:
        raise Unsupported("a tensor without dims")
    dim = whole(given["dim"], x.ndim)
    items = []
    for at in np.ndindex(index.shape):
        row = x[_along(at, dim)]
        items.append(_picked(al, cases(al, index[at], len(row)), list(row)))
    return array(items, index.shape)


def _along(at: tuple[int, ...], dim: int) -> tuple[int | slice, ...]:
    """Return all entries along `dim` at a position of the other dims."""
    return (*at[:dim], slice(None), *at[dim + 1 :])


def _scatter_add(al: Numbers, given: Given) -> Array:
    x, index, src = given["self"], given["index"], given["src"]
    if x.ndim == 0 or index.ndim == 0:
        raise Unsupported("a tensor without dims")
    dim = whole(given["dim"], x.ndim)
    added: dict[tuple[int, ...], list[Element]] = {at: [x[at]] for at in np.ndindex(x.shape)}
    for at in np.ndindex(index.shape):
        for k, c in enumerate(cases(al, index[at], x.shape[dim])):
            added[(*at[:dim], k, *at[dim + 1 :])].append(al.where(c, src[at], 0))
    return array([al.sum(terms) for terms in added.values()], x.shape)


def _scatter(al: Numbers, given: Given) -> Array:
    """Where two indices are equal, which of the two is kept is not defined: they are required to differ."""
    result: Array = given["self"].copy()
    index = given["index"]
    if result.ndim == 0 or index.ndim == 0:
        raise Unsupported("a tensor without dims")
    dim = whole(given["dim"], result.ndim)
    src = given.get("src")
    if src is not None:
        for at in np.ndindex(*index.shape[:dim], 1, *index.shape[dim + 1 :]):
            _require_distinct(al, list(index[_along(at, dim)]))
    for at in np.ndindex(index.shape):
        new = given["value"] if src is None else src[at]
        for k, c in enumerate(cases(al, index[at], result.shape[dim])):
            to = (*at[:dim], k, *at[dim + 1 :])
            result[to] = al.where(c, new, result[to])
    return result


class _Indexed:
    """`x[indices]`: the indexed dims first, the common shape of the indices, and where its dims belong."""

    def __init__(self, x: Array, indices: Sequence[Array | None]) -> None:
        self.at = [d for d, i in enumerate(indices) if i is not None]
        given = [i for i in indices if i is not None]
        if not given:
            raise Unsupported("an index without indices")
        self.full = np.broadcast_arrays(*given)
        self.common: tuple[int, ...] = self.full[0].shape
        self.rows = np.moveaxis(x, self.at, range(len(self.at)))
        self.rest: tuple[int, ...] = self.rows.shape[len(self.at) :]
        adjacent = self.at == list(range(self.at[0], self.at[-1] + 1))
        self.first = self.at[0] if adjacent else 0

    def chosen(self, al: Numbers, at: tuple[int, ...]) -> list[list[Element]]:
        """Return, for each indexed dim, which entry is meant at one position of the common shape."""
        return [cases(al, i[at], size, wraps=True) for i, size in zip(self.full, self.rows.shape, strict=False)]

    def placed(self, x: Array) -> Array:
        """Move the common dims, which lead, to where the result has them."""
        lead = list(range(len(self.common)))
        return np.moveaxis(x, lead, [self.first + d for d in lead])

    def unplaced(self, x: Array) -> Array:
        lead = list(range(len(self.common)))
        return np.moveaxis(x, [self.first + d for d in lead], lead)


def _index(al: Numbers, given: Given) -> Array:
    indexed = _Indexed(given["self"], given["indices"])
    taken = []
    for at in np.ndindex(indexed.common):
        rows = indexed.rows
        for chosen in indexed.chosen(al, at):
            rows = pick(al, chosen, rows)
        taken.append(rows)
    return indexed.placed(_stacked(taken, indexed.common, indexed.rest))


def _index_put(al: Numbers, given: Given) -> Array:
    x = given["self"]
    indexed = _Indexed(x, given["indices"])
    rows = indexed.rows.copy()
    shape = indexed.placed(filled([*indexed.common, *indexed.rest], 0)).shape
    values = indexed.unplaced(np.broadcast_to(given["values"], shape))
    accumulate = given["accumulate"]
    if not accumulate and prod(indexed.common) > 1:
        _require_distinct_places(al, indexed)
    for at in np.ndindex(indexed.common):
        every = indexed.chosen(al, at)
        for to in product(*(range(len(c)) for c in every)):
            condition: Element = True
            for chosen, k in zip(every, to, strict=True):
                condition = al.both(condition, chosen[k])
            new = each(al.add, rows[to], values[at]) if accumulate else values[at]
            _put(rows, to, each(lambda a, b, c=condition: al.where(c, a, b), new, rows[to]))
    return np.moveaxis(rows, range(len(indexed.at)), indexed.at)


def _require_distinct_places(al: Numbers, indexed: _Indexed) -> None:
    """Require that no two positions of the common shape mean the same entry."""
    wrapped = [
        each(lambda i, n=size: al.where(al.less(i, 0), al.add(i, n), i), full)
        for full, size in zip(indexed.full, indexed.rows.shape, strict=False)
    ]
    for a, b in combinations(list(np.ndindex(indexed.common)), 2):
        alike: Element = True
        for index in wrapped:
            alike = al.both(alike, al.equal(index[a], index[b]))
        al.require(al.opposite(alike), "places that are written to differ")


def _slice_of(given: Given, x: Array) -> tuple[int | slice, ...]:
    dim = whole(given["dim"], x.ndim)
    return (slice(None),) * dim + (slice(given["start"], given["end"], given["step"]),)


def _slice_scatter(_al: Numbers, given: Given) -> Array:
    return _with_part(given["self"], _slice_of(given, given["self"]), given["src"])


def _with_part(x: Array, at: tuple[int | slice, ...], part: Array) -> Array:
    """Return `x` with this part. Raises IndexError or ValueError where it does not fit, as torch does; numpy would
    broadcast it."""
    if x[at].shape != part.shape:
        raise ValueError(f"a part of shape {x[at].shape} is given {part.shape}")
    result: Array = x.copy()
    result[at] = part
    return result


def _select_scatter(_al: Numbers, given: Given) -> Array:
    before = (slice(None),) * whole(given["dim"], given["self"].ndim)
    return _with_part(given["self"], (*before, given["index"]), given["src"])


def _with_diagonal(x: Array, given: Given, source: Array) -> Array:
    places = np.arange(x.size).reshape(x.shape)
    at = np.diagonal(places, given["offset"], given["dim1"], given["dim2"])
    if at.shape != source.shape:
        raise ValueError(f"a diagonal of shape {at.shape} is given {source.shape}")
    flat = x.reshape(-1).copy()
    flat[at.reshape(-1)] = source.reshape(-1)
    return flat.reshape(x.shape)


def _diagonal_scatter(_al: Numbers, given: Given) -> Array:
    return _with_diagonal(given["self"], given, given["src"])


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "aten.embedding.default": _embedding,
        "aten.embedding_dense_backward.default": _embedding_backward,
        "aten.index_select.default": _index_select,
        "aten.index_add.default": _index_add,
        "aten.index_copy.default": _index_copy,
        "aten.index_fill.int_Scalar": _index_fill,
        "aten.gather.default": _gather,
        "aten.scatter_add.default": _scatter_add,
        "aten.scatter.src": _scatter,
        "aten.scatter.value": _scatter,
        "aten.index.Tensor": _index,
        "aten.index_put.default": _index_put,
        "aten.slice_scatter.default": _slice_scatter,
        "aten.select_scatter.default": _select_scatter,
        "aten.diagonal_scatter.default": _diagonal_scatter,
    }
)
