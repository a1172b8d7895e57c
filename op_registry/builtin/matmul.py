"""Annotations of products: of matrices, by `einsum`, by groups of rows. Contracted dims are reductions, biases then
partial sums."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from op_registry.builtin._name_and_broadcast_dims import (
    Dims,
    aligned,
    annotate,
    broadcast,
    broadcast_shape,
    letters,
    linear_in,
    linear_in_each,
    operand,
    tensor,
    whole,
)
from op_registry.call import Call
from op_registry.rank_expression import block_start
from op_registry.spec import LinearSets, OperatorSpec, Shards

_EITHER = linear_in({0}, {1})
_EITHER_AND_FIRST = linear_in({0, 1}, {0, 2})


def product_flops(sizes: Mapping[str, int]) -> int:
    """Two per multiply-add: every identifier is a loop."""
    return 2 * prod(sizes.values())


def _linear(call: Call) -> str:
    """`linear(x, weight, bias)`; a weight without `n` makes a matrix-vector product."""
    n = ["n"] * (tensor(call, 1, "weight").ndim - 1)
    inputs = [["*", "k+"], [*n, "k+"]]
    if len(call.tensors()) == 3:
        return annotate([*inputs, operand(n, additive=True)], [["*", *n]])
    return annotate(inputs, [["*", *n]])


def _linear_sets(call: Call) -> LinearSets:
    return (linear_in({0, 2}, {1, 2}) if len(call.tensors()) == 3 else _EITHER)(call)


def _matmul(call: Call) -> str:
    """`matmul(x, y)` of any ranks: the batch dims broadcast."""
    x, y = tensor(call, 0, "self"), tensor(call, 1, "other")
    x_batch, y_batch = x.shape[:-2], y.shape[:-2]
    target = broadcast_shape([x_batch, y_batch])
    names = letters(len(target), avoid="kmn")
    rows = ["m"] * (x.ndim > 1)
    columns = ["n"] * (y.ndim > 1)
    left = [*aligned(x_batch, target, names), *rows, "k+"]
    right = [*aligned(y_batch, target, names), "k+", *columns]
    return annotate([left, right], [[*names, *rows, *columns]])


def _added(call: Call, left: Dims, right: Dims, result: Dims, shape: tuple[int, ...]) -> str:
    """`beta * self + alpha * (left @ right)`, where self broadcasts to the result."""
    bias = aligned(tensor(call, 0, "self").shape, shape, result)
    return annotate([operand(bias, additive=True), left, right], [result])


def _addmm(call: Call) -> str:
    shape = (tensor(call, 1, "mat1").shape[0], tensor(call, 2, "mat2").shape[1])
    return _added(call, ["m", "k+"], ["k+", "n"], ["m", "n"], shape)


def _baddbmm(call: Call) -> str:
    b, m, _ = tensor(call, 1, "batch1").shape
    return _added(call, ["b", "m", "k+"], ["b", "k+", "n"], ["b", "m", "n"], (b, m, tensor(call, 2, "batch2").shape[2]))


def _addmv(call: Call) -> str:
    return _added(call, ["m", "k+"], ["k+"], ["m"], tensor(call, 1, "mat").shape[:1])


def _addbmm(call: Call) -> str:
    """The products of a batch, summed: both the batch and the contracted dim are reductions."""
    shape = (tensor(call, 1, "batch1").shape[1], tensor(call, 2, "batch2").shape[2])
    return _added(call, ["b+", "m", "k+"], ["b+", "k+", "n"], ["m", "n"], shape)


def _addr(call: Call) -> str:
    """`beta * self + alpha * outer(vec1, vec2)`: nothing is summed, so self is no partial sum."""
    shape = (*tensor(call, 1, "vec1").shape, *tensor(call, 2, "vec2").shape)
    return annotate([aligned(tensor(call, 0, "self").shape, shape, "mn"), ["m"], ["n"]], [["m", "n"]])


def _inner(call: Call) -> str:
    """The last dims are contracted: `a k+, b k+ -> a b`; with a scalar it is a product."""
    x, y = tensor(call, 0, "self"), tensor(call, 1, "other")
    names = letters(max(x.ndim - 1, 0) + max(y.ndim - 1, 0), avoid="k")
    if not x.ndim or not y.ndim:
        names = letters(x.ndim + y.ndim)
        return annotate([names[: x.ndim], names[: y.ndim]], [names])
    rows, columns = names[: x.ndim - 1], names[x.ndim - 1 :]
    return annotate([[*rows, "k+"], [*columns, "k+"]], [names])


def _tensordot(call: Call) -> str:
    """`tensordot(x, y, dims_x, dims_y)`: the paired dims are contracted; one of size 1 sums the other."""
    x, y = tensor(call, 0, "self"), tensor(call, 1, "other")
    names = letters(x.ndim + y.ndim)
    left, right = names[: x.ndim], names[x.ndim :]
    gone = set()
    for i, j in zip(call.get(2, "dims_self"), call.get(3, "dims_other"), strict=True):
        i, j = whole(i, x.ndim), whole(j, y.ndim)
        gone |= {(0, i), (1, j)}
        same = x.shape[i] == y.shape[j]
        left[i], right[j] = f"{names[i]}+", f"{names[i]}+" if same else f"{right[j]}+"
        if not same:
            left[i] = "1" if x.shape[i] == 1 else left[i]
            right[j] = "1" if y.shape[j] == 1 else right[j]
    kept = [n for i, n in enumerate(left) if (0, i) not in gone] + [
        n for j, n in enumerate(right) if (1, j) not in gone
    ]
    return annotate([left, right], [kept])


def _bilinear(call: Call) -> str:
    """`x1 W x2 + bias`, entry by entry of the leading dims."""
    bias = [operand(["o"], additive=True)] if len(call.tensors()) == 4 else []
    return annotate(["* i+", "* j+", "o i+ j+", *bias], ["* o"])


def _bilinear_sets(call: Call) -> LinearSets:
    return (linear_in({0, 3}, {1, 3}, {2, 3}) if len(call.tensors()) == 4 else linear_in({0}, {1}, {2}))(call)


def _chain(call: Call) -> str:
    """A product of many matrices; the first and the last may be vectors."""
    tensors = call.tensors()
    names = letters(len(tensors) + 1)
    inputs = [[f"{names[i]}+", f"{names[i + 1]}+"] for i in range(len(tensors))]
    ends: list[str] = []
    if tensors[0].ndim == 1:
        inputs[0] = inputs[0][1:]
    else:
        inputs[0][0] = names[0]
        ends.append(names[0])
    if tensors[-1].ndim == 1:
        inputs[-1] = inputs[-1][:1]
    else:
        inputs[-1][-1] = names[-1]
        ends.append(names[-1])
    return annotate(inputs, [ends])


def _vecdot(call: Call) -> str:
    """Products summed along one dim of two tensors that broadcast."""
    operands, result = broadcast([t.shape for t in call.tensors()])
    name = result[whole(call.get(2, "dim", -1), len(result))]
    spelled = [[f"{n}+" if n == name else n for n in dims] for dims in operands]
    return annotate(spelled, [[n for n in result if n != name]])


def _kron(call: Call) -> str:
    """Every dim is `(a b)`; the one with fewer dims gets dims of size 1 in front."""
    x, y = tensor(call, 0, "self"), tensor(call, 1, "other")
    ndim = max(x.ndim, y.ndim)
    names = letters(2 * ndim)
    left, right = names[ndim - x.ndim : ndim], names[2 * ndim - y.ndim :]
    pairs = zip([*[""] * (ndim - x.ndim), *left], [*[""] * (ndim - y.ndim), *right], strict=True)
    return annotate([left, right], [[f"({a} {b})" if a and b else a or b for a, b in pairs]])


# `einsum` in every spelling: blanks, capitals, `...`, no arrow, one letter twice in a term.
# Letters that the result lacks are reductions. A letter twice in one term is a diagonal: no layout splits one, so
# that letter is frozen and the others stay free.

_DOTS = "..."


def _terms(equation: str) -> tuple[list[str], str]:
    """The operands' letters and the result's; without `->` those that occur once, in alphabetical order."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    if not arrow:
        used = left.replace(",", "").replace(".", "")
        right = (_DOTS if _DOTS in left else "") + "".join(sorted(c for c in set(used) if used.count(c) == 1))
    return left.split(","), right


def _spelled(term: str, common: list[str]) -> list[str]:
    """The names of a term's dims, `...` being those in `common`."""
    head, dots, tail = term.partition(_DOTS)
    return [*head, *(common if dots else ()), *tail]


def _einsum(call: Call) -> str:
    """`einsum("b i k, k j -> b i j", [x, y])`; dims of `...` broadcast, aligned at the right."""
    tensors = call.tensors()
    terms, result = _terms(str(call.get(0, "equation")))
    rests = [t.ndim - len(term.replace(_DOTS, "")) for t, term in zip(tensors, terms, strict=True)]
    common = [f"e{i}" for i in range(max(rests))]
    spelled = [_spelled(term, common[len(common) - rest :]) for term, rest in zip(terms, rests, strict=True)]
    output = _spelled(result, common)
    twice = {name for names in spelled for name in names if names.count(name) > 1}
    sizes: dict[str, int] = {}
    for t, names in zip(tensors, spelled, strict=True):
        for name, size in zip(names, t.shape, strict=True):
            sizes[name] = size if sizes.get(name, 1) == 1 else sizes[name]

    def dim(name: str, size: int) -> str:
        if size != sizes[name]:
            return "1"  # expanded
        return f"{name}^" if name in twice else name if name in output else f"{name}+"

    inputs = [
        [dim(n, size) for n, size in zip(names, t.shape, strict=True)]
        for t, names in zip(tensors, spelled, strict=True)
    ]
    return annotate(inputs, [[dim(n, sizes[n]) for n in output]])


_EINSUM: tuple[OperatorSpec, ...] = (
    OperatorSpec("aten.einsum.default", _einsum, linear=linear_in_each, flops=product_flops),
)


# Products by groups: rows sorted by expert, one matrix per expert, and a list of where each expert's rows end.
# Rows split into contiguous blocks (the ends are counted from the block's first row), experts into blocks whose
# other rows are zero, and hidden dims as in any product.


def _flops(sizes: Mapping[str, int]) -> int:
    """Every row meets the matrix of one group."""
    return product_flops({name: size for name, size in sizes.items() if name not in ("e", "g")})


def _localize(call: Call, shards: Shards) -> Call:
    """The first row and the first group of this block."""
    if "m" not in shards and "g" not in shards:
        return call
    a, b, ends = call.tensors()
    row = block_start("m", a.shape[0], shards["m"]) if "m" in shards else 0
    group = block_start("g", b.shape[0], shards["g"]) if "g" in shards else 0
    return Call("nnscaler.grouped_mm", (a, b, ends, row, group), {}, call.outputs)


_GROUPED: tuple[OperatorSpec, ...] = tuple(
    OperatorSpec(
        name,
        "m k+, g+ k+ n, e^ -> m n",
        linear=linear_in({0}, {1}),
        contiguous=frozenset({"m", "g"}),
        localize=_localize,
        uneven=True,
        flops=_flops,
    )
    for name in ("transformers.grouped_mm_fallback.default", "nnscaler.grouped_mm")
)


SPECS: tuple[OperatorSpec, ...] = (
    OperatorSpec("aten.linear.default", _linear, linear=_linear_sets, flops=product_flops),
    *(
        OperatorSpec(f"aten.{name}.default", _matmul, linear=_EITHER, flops=product_flops)
        for name in ("matmul", "linalg_matmul")
    ),
    OperatorSpec("aten.mm.default", "m k+, k+ n -> m n", linear=_EITHER, flops=product_flops),
    OperatorSpec("aten.bmm.default", "b m k+, b k+ n -> b m n", linear=_EITHER, flops=product_flops),
    OperatorSpec("aten.mv.default", "m k+, k+ -> m", linear=_EITHER, flops=product_flops),
    *(
        OperatorSpec(f"aten.{name}.default", "k+, k+ -> ()", linear=_EITHER, flops=product_flops)
        for name in ("dot", "vdot")
    ),
    *(
        OperatorSpec(f"aten.{name}.default", "m, n -> m n", linear=_EITHER, flops=product_flops)
        for name in ("outer", "ger")
    ),
    OperatorSpec("aten.addmm.default", _addmm, linear=_EITHER_AND_FIRST, flops=product_flops),
    OperatorSpec("aten.baddbmm.default", _baddbmm, linear=_EITHER_AND_FIRST, flops=product_flops),
    OperatorSpec("aten.addmv.default", _addmv, linear=_EITHER_AND_FIRST, flops=product_flops),
    OperatorSpec("aten.addbmm.default", _addbmm, linear=_EITHER_AND_FIRST, flops=product_flops),
    OperatorSpec("aten.addr.default", _addr, linear=_EITHER_AND_FIRST, flops=product_flops),
    OperatorSpec("aten.inner.default", _inner, linear=_EITHER, flops=product_flops),
    OperatorSpec("aten.tensordot.default", _tensordot, linear=_EITHER, flops=product_flops),
    OperatorSpec("aten.linalg_vecdot.default", _vecdot, linear=_EITHER, flops=product_flops),
    OperatorSpec("aten.kron.default", _kron, linear=_EITHER),
    OperatorSpec("aten.bilinear.default", _bilinear, linear=_bilinear_sets, flops=product_flops),
    *(
        OperatorSpec(f"aten.{name}.default", _chain, linear=linear_in_each)
        for name in ("chain_matmul", "linalg_multi_dot")
    ),
    *_EINSUM,
    *_GROUPED,
)
