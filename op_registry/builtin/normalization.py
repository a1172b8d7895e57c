"""Normalisations: the dims that statistics run over are frozen, the others free."""

from __future__ import annotations

from op_registry.builtin._dims import annotate, letters, local, tensor, whole
from op_registry.call import Call, TensorArgument
from op_registry.spec import AnnotationResult, OperatorSpec, Shards


def _present(call: Call, *arguments: tuple[int, str]) -> int:
    """How many of these optional tensor arguments are given."""
    return sum(isinstance(call.get(position, name), TensorArgument) for position, name in arguments)


def _over_last(call: Call) -> str:
    """`layer_norm`, `rms_norm`: the last dims are normalised; weight and bias have just those."""
    x = tensor(call, 0, "input")
    names = letters(x.ndim)
    count = len(call.get(1, "normalized_shape"))
    last = [f"{n}^" for n in names[x.ndim - count :]]
    dims = [*names[: x.ndim - count], *last]
    given = len(call.tensors()) - 1
    return annotate([dims, *[last] * given], [dims])


def _group_norm(call: Call) -> AnnotationResult:
    """`group_norm(x, groups, weight, bias)`: whole groups may be split, and their number follows."""
    dims = ["b", "(g c^)", *(f"s{i}^" for i in range(tensor(call, 0, "input").ndim - 2))]
    text = annotate([dims, *["(g c^)"] * (len(call.tensors()) - 1)], [dims])
    return text, {"g": call.get(1, "num_groups")}


def _localize_group_norm(call: Call, shards: Shards) -> Call:
    return call.replace(1, "num_groups", local(call.get(1, "num_groups"), shards, "g"))


def _batch_norm_training(call: Call) -> str:
    """`nnscaler.batch_norm`: statistics of the whole batch, so only channels are free; y, new mean, new var."""
    x = tensor(call, 0, "x")
    dims = ["b^", "c", *(f"s{i}^" for i in range(x.ndim - 2))]
    return annotate([dims, *["c"] * (len(call.tensors()) - 1)], [dims, "c", "c"])


def _batch_norm(call: Call) -> str:
    """`aten.batch_norm`: with stored statistics (`training` false) every dim is free."""
    x = tensor(call, 0, "input")
    mark = "^" if call.get(5, "training") or _present(call, (3, "running_mean"), (4, "running_var")) < 2 else ""
    dims = [f"b{mark}", "c", *(f"s{i}{mark}" for i in range(x.ndim - 2))]
    return annotate([dims, *["c"] * (len(call.tensors()) - 1)], [dims])


def _weight_norm(call: Call) -> str:
    """`_weight_norm(v, g, dim)`: each entry of `dim` has a norm of its own."""
    v = tensor(call, 0, "v")
    kept = whole(call.get(2, "dim", 0), v.ndim)
    names = [n if i == kept else f"{n}^" for i, n in enumerate(letters(v.ndim))]
    return annotate([names, [n if i == kept else "1" for i, n in enumerate(names)]], [names])


SPECS: tuple[OperatorSpec, ...] = (
    OperatorSpec("aten.layer_norm.default", _over_last),
    OperatorSpec("aten.rms_norm.default", _over_last),
    OperatorSpec("aten.group_norm.default", _group_norm, localize=_localize_group_norm, uneven=True),
    OperatorSpec("aten.batch_norm.default", _batch_norm),
    OperatorSpec("aten._weight_norm.default", _weight_norm),
    OperatorSpec("nnscaler.batch_norm", _batch_norm_training),
)
