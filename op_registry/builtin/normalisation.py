"""Annotations of normalisations, batch norm's parts included: dims of the statistics are frozen or sums, the others
free."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from op_registry.builtin._name_and_broadcast_dims import annotate, letters, linear_in, local, tensor, whole
from op_registry.call import Call, TensorArgument
from op_registry.spec import AnnotationResult, LinearSets, OperatorSpec, Shards


def _weight_linear(call: Call) -> LinearSets:
    """In the weight, where there is one."""
    return linear_in({1})(call) if len(call.tensors()) == 2 else ()


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


def _batch_norm(call: Call) -> str:
    """`aten.batch_norm`: with stored statistics (`training` false) every dim is free."""
    x = tensor(call, 0, "input")
    mark = "^" if call.get(5, "training") or _present(call, (3, "running_mean"), (4, "running_var")) < 2 else ""
    dims = [f"b{mark}", "c", *(f"s{i}{mark}" for i in range(x.ndim - 2))]
    return annotate([dims, *["c"] * (len(call.tensors()) - 1)], [dims])


def _native_norm(call: Call) -> str:
    """`native_layer_norm`: the result, then the statistics, one for each place of the free dims."""
    x = tensor(call, 0, "input")
    names = letters(x.ndim)
    free = names[: x.ndim - len(call.get(1, "normalized_shape"))]
    last = [f"{n}^" for n in names[len(free) :]]
    statistics = [*free, *("1" for _ in last)]
    given = len(call.tensors()) - 1
    return annotate([[*free, *last], *[last] * given], [[*free, *last], *[statistics] * (len(call.outputs) - 1)])


def _native_group_norm(call: Call) -> str:
    """`native_group_norm(x, weight, bias, N, C, HxW, group)`: the batch alone; sizes are arguments."""
    x = tensor(call, 0, "input")
    dims = ["b", "c^", *(f"s{i}^" for i in range(x.ndim - 2))]
    group = str(call.get(6, "group"))
    return annotate([dims, *[["c^"]] * (len(call.tensors()) - 1)], [dims, ["b", group], ["b", group]])


def _localize_native_group_norm(call: Call, shards: Shards) -> Call:
    return call.replace(3, "N", local(call.get(3, "N"), shards, "b"))


def _native_batch_norm(call: Call) -> str:
    """`native_batch_norm` and its kin: the result and the statistics of each channel; empty ones when evaluating."""
    x = tensor(call, 0, "input")
    training = call.get(5, "training") if "no_training" not in call.operator else False
    mark = "^" if training else ""
    dims = [f"b{mark}", "c", *(f"s{i}{mark}" for i in range(x.ndim - 2))]
    outputs = [["c"] if o is not None and o.shape == x.shape[1:2] else "?" for o in call.outputs[1:]]
    return annotate([dims, *[["c"]] * (len(call.tensors()) - 1)], [dims, *outputs])


def _instance_norm(call: Call) -> str:
    """`instance_norm`: statistics of every channel of every sample, unless stored ones are used.

    Stored ones that are renewed are means over the batch.
    """
    x = tensor(call, 0, "input")
    own = bool(call.get(5, "use_input_stats"))
    stored = _present(call, (3, "running_mean"), (4, "running_var"))
    batch = "b^" if own and stored else "b"
    dims = [batch, "c", *(f"s{i}^" if own else f"s{i}" for i in range(x.ndim - 2))]
    return annotate([dims, *[["c"]] * (len(call.tensors()) - 1)], [dims])


def _renorm(call: Call) -> str:
    """`renorm(x, p, dim, maxnorm)`: only the one dim whose entries are normalised each by itself is free."""
    x = tensor(call, 0, "self")
    kept = whole(call.get(2, "dim"), x.ndim)
    names = [n if i == kept else f"{n}^" for i, n in enumerate(letters(x.ndim))]
    return annotate([names], [names])


def _norm_except(call: Call) -> str:
    """`norm_except_dim(v, pow, dim)`: the norms of `_weight_norm`."""
    v, dim = tensor(call, 0, "v"), call.get(2, "dim", 0)
    names = [n if i == dim else f"{n}^" for i, n in enumerate(letters(v.ndim))]
    return annotate([names], [[n if i == dim else "1" for i, n in enumerate(names)] if dim >= 0 else []])


def _weight_norm(call: Call) -> str:
    """`_weight_norm(v, g, dim)`: each entry of `dim` has a norm of its own."""
    v = tensor(call, 0, "v")
    kept = whole(call.get(2, "dim", 0), v.ndim)
    names = [n if i == kept else f"{n}^" for i, n in enumerate(letters(v.ndim))]
    return annotate([names, [n if i == kept else "1" for i, n in enumerate(names)]], [names])


def _weight_norm_interface(call: Call) -> str:
    """`_weight_norm_interface(v, g, dim)`: the result and the norms."""
    text = _weight_norm(call)
    return f"{text}, {text.partition(' ->')[0].rpartition(', ')[2]}"


_STATISTICS = frozenset({1, 2})  # outputs that hold a mean and a deviation
_NATIVE = ("native_batch_norm.default", "_native_batch_norm_legit_no_training.default")


# The parts of batch norm in training: the batch is a sum in its statistics, and free where they are used.


def _mean(call: Call) -> str:
    """`batch_mean(x)`."""
    return annotate([["b+", "c", *_places(call, "+")]], [["c"]])


def _variance(call: Call) -> str:
    """`batch_variance(x, mean)`: over the number of values, and over one less."""
    return annotate([["b+", "c", *_places(call, "+")], ["c"]], [["2", "c"]])


def _normalise(call: Call) -> str:
    """`batch_normalise(x, mean, variance, weight, bias, eps)`: nothing is summed."""
    dims = ["b", "c", *_places(call)]
    return annotate([dims, ["c"], ["2", "c"], *[["c"]] * (len(call.tensors()) - 3)], [dims])


def _normalise_linear(call: Call) -> LinearSets:
    """In what is shifted and its bias together, and in weight and bias."""
    weight, bias = (call.get(3, "weight"), call.get(4, "bias"))
    last = {bias.index} if isinstance(bias, TensorArgument) else set()
    sets = [frozenset({0, 1} | last)]
    if isinstance(weight, TensorArgument):
        sets.append(frozenset({weight.index} | last))
    return tuple(sets)


def _places(call: Call, mark: str = "") -> list[str]:
    return [f"s{i}{mark}" for i in range(tensor(call, 0, "x").ndim - 2)]


def _with_count(position: int) -> Callable[[Call, Shards], Call]:
    """A shard of the batch or of places divides by the logical number of values."""

    def localize(call: Call, shards: Shards) -> Call:
        x = tensor(call, 0, "x")
        if not any(shards.get(name) for name in ("b", *_places(call))):
            return call
        return call.replace(position, "count", prod(x.shape) // x.shape[1])

    return localize


_BATCH_NORM: tuple[OperatorSpec, ...] = (
    OperatorSpec("nnscaler.batch_mean", _mean, linear=linear_in({0}), localize=_with_count(1), uneven=True),
    OperatorSpec("nnscaler.batch_variance", _variance, localize=_with_count(2), uneven=True),
    OperatorSpec("nnscaler.batch_normalise", _normalise, linear=_normalise_linear),
    OperatorSpec("nnscaler.running_statistic", "c, c -> c", detached=True),
)


SPECS: tuple[OperatorSpec, ...] = (
    OperatorSpec("aten.layer_norm.default", _over_last),
    OperatorSpec("aten.rms_norm.default", _over_last, linear=_weight_linear),
    OperatorSpec("aten.group_norm.default", _group_norm, localize=_localize_group_norm, uneven=True),
    OperatorSpec("aten.batch_norm.default", _batch_norm),
    OperatorSpec("aten._weight_norm.default", _weight_norm),
    OperatorSpec("aten._weight_norm_interface.default", _weight_norm_interface, detached=frozenset({1})),
    OperatorSpec("aten.instance_norm.default", _instance_norm),
    OperatorSpec("aten.renorm.default", _renorm),
    OperatorSpec("aten.norm_except_dim.default", _norm_except),
    OperatorSpec("aten.native_layer_norm.default", _native_norm, detached=_STATISTICS),
    OperatorSpec("aten._fused_rms_norm.default", _native_norm),
    OperatorSpec(
        "aten.native_group_norm.default", _native_group_norm, localize=_localize_native_group_norm, uneven=True
    ),
    *(OperatorSpec(f"aten.{name}", _native_batch_norm, detached=_STATISTICS) for name in _NATIVE),
    *_BATCH_NORM,
)
