"""Products of matrices. The contracted dim is a reduction; a bias is then a partial sum itself (`+n`)."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from op_registry.builtin._dims import (
    Dims,
    aligned,
    all_frozen,
    annotate,
    broadcast_shape,
    letters,
    linear_in,
    operand,
    tensor,
)
from op_registry.call import Call
from op_registry.spec import LinearSets, OperatorSpec

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


def _einsum_terms(equation: str) -> tuple[list[str], str]:
    """The operands' letters and the result's; without `->` those that occur once, in alphabetical order."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow:
        used = left.replace(",", "").replace(".", "")
        right = ("..." if "..." in left else "") + "".join(sorted(c for c in set(used) if used.count(c) == 1))
    return terms, right


def _einsum(call: Call) -> str:
    """`einsum("b i k, k j -> b i j", [x, y])`: letters that the result lacks are reductions; `...` broadcasts."""
    equation = call.get(0, "equation")
    tensors = call.tensors()
    terms, result = _einsum_terms(str(equation))
    if any(len(set(term.replace("...", ""))) != len(term.replace("...", "")) for term in terms):
        return all_frozen(call)  # a diagonal: no layout holds one identifier twice
    rests = [len(t.shape) - len(term.replace("...", "")) for t, term in zip(tensors, terms, strict=True)]
    common = [f"e{i}" for i in range(max(rests))]
    sizes: dict[str, int] = {}
    spelled: list[list[str]] = []
    for t, term, rest in zip(tensors, terms, rests, strict=True):
        head, dots, tail = term.partition("...")
        names = [*head, *(common[len(common) - rest :] if dots else ()), *tail]
        spelled.append(names)
        for name, size in zip(names, t.shape, strict=True):
            sizes[name] = size if sizes.get(name, 1) == 1 else sizes[name]
    head, dots, tail = result.partition("...")
    output = [*head, *(common if dots else ()), *tail]
    inputs = [
        [("1" if size != sizes[n] else n if n in output else f"{n}+") for n, size in zip(names, t.shape, strict=True)]
        for t, names in zip(tensors, spelled, strict=True)
    ]
    return annotate(inputs, [output])


def _multilinear(call: Call) -> LinearSets:
    return tuple(frozenset({t.index}) for t in call.tensors())


SPECS: tuple[OperatorSpec, ...] = (
    OperatorSpec("aten.linear.default", _linear, linear=_linear_sets, flops=product_flops),
    OperatorSpec("aten.matmul.default", _matmul, linear=_EITHER, flops=product_flops),
    OperatorSpec("aten.mm.default", "m k+, k+ n -> m n", linear=_EITHER, flops=product_flops),
    OperatorSpec("aten.bmm.default", "b m k+, b k+ n -> b m n", linear=_EITHER, flops=product_flops),
    OperatorSpec("aten.mv.default", "m k+, k+ -> m", linear=_EITHER, flops=product_flops),
    OperatorSpec("aten.dot.default", "k+, k+ -> ()", linear=_EITHER, flops=product_flops),
    OperatorSpec("aten.outer.default", "m, n -> m n", linear=_EITHER, flops=product_flops),
    OperatorSpec("aten.addmm.default", _addmm, linear=_EITHER_AND_FIRST, flops=product_flops),
    OperatorSpec("aten.baddbmm.default", _baddbmm, linear=_EITHER_AND_FIRST, flops=product_flops),
    OperatorSpec("aten.einsum.default", _einsum, linear=_multilinear, flops=product_flops),
)
