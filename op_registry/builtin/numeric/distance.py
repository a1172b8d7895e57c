"""Distances between vectors: the dim that vectors run along is frozen, but for norms whose parts add up."""

from __future__ import annotations

from op_registry.builtin._dims import (
    aligned,
    all_frozen,
    annotate,
    broadcast,
    broadcast_shape,
    letters,
    linear_in,
    tensor,
    whole,
)
from op_registry.builtin.numeric.reduction import norm_mark
from op_registry.call import Call
from op_registry.spec import OperatorSpec, Shards


def _compared(call: Call, dim: int, mark: str, keepdim: bool) -> str:
    """Two tensors that broadcast, compared along a dim."""
    operands, result = broadcast([t.shape for t in call.tensors()])
    if not result:
        return annotate(operands, [result])
    along = result[whole(dim, len(result))]
    spelled = [[f"{n}{mark}" if n == along else n for n in dims] for dims in operands]
    return annotate(spelled, [["1" if n == along else n for n in result if keepdim or n != along]])


def _cosine_similarity(call: Call) -> str:
    return _compared(call, call.get(2, "dim", 1), "^", False)


def _pairwise_distance(call: Call) -> str:
    """Of vectors along the last dim; `eps` is added to each difference, so that parts of a 1-norm add up as well."""
    mark = norm_mark(2, "p")(call) if call.get(2, "p") is not None else "^"
    return _compared(call, -1, mark, bool(call.get(4, "keepdim", False)))


def _cdist(call: Call) -> str:
    """`cdist(x[*, p, m], y[*, r, m])`: every row with every row; the batch dims broadcast."""
    x, y = tensor(call, 0, "x1"), tensor(call, 1, "x2")
    target = broadcast_shape([x.shape[:-2], y.shape[:-2]])
    names = letters(len(target), avoid="pmr")
    m = "m" + (norm_mark(2, "p")(call) if call.get(2, "p") is not None else "^")
    left, right = ([*aligned(t.shape[:-2], target, names), rows, m] for t, rows in ((x, "p"), (y, "r")))
    return annotate([left, right], [[*names, "p", "r"]])


def _cross(call: Call) -> str:
    """The cross product along a dim of size 3; without a dim, the first of that size."""
    operands, result = broadcast([t.shape for t in call.tensors()])
    sizes = broadcast_shape([t.shape for t in call.tensors()])
    dim = call.get(2, "dim", -1 if "linalg" in call.operator else None)
    along = result[sizes.index(3) if dim is None else whole(dim, len(result))]
    mark = {along: f"{along}^"}
    return annotate([[mark.get(n, n) for n in dims] for dims in operands], [[mark.get(n, n) for n in result]])


def _localize_cross(call: Call, shards: Shards) -> Call:
    """Say which dim it is: in a shard another dim may be the first of size 3."""
    if call.get(2, "dim") is not None or "linalg" in call.operator:
        return call
    sizes = broadcast_shape([t.shape for t in call.tensors()])
    return call.replace(2, "dim", sizes.index(3))


_EITHER = linear_in({0}, {1})

SPECS: tuple[OperatorSpec, ...] = (
    OperatorSpec("aten.cosine_similarity.default", _cosine_similarity),
    OperatorSpec("aten.pairwise_distance.default", _pairwise_distance),
    OperatorSpec("aten.cdist.default", _cdist),
    OperatorSpec("aten.pdist.default", all_frozen),
    OperatorSpec("aten.dist.default", all_frozen),
    OperatorSpec("aten.linalg_cross.default", _cross, linear=_EITHER),
    OperatorSpec("aten.cross.default", _cross, linear=_EITHER, localize=_localize_cross),
)
