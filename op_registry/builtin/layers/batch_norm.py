"""The parts of batch norm in training: the batch is a sum in its statistics, and free where they are used."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from op_registry.builtin._dims import annotate, linear_in, tensor
from op_registry.call import Call, TensorArgument
from op_registry.spec import LinearSets, OperatorSpec, Shards


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


SPECS: tuple[OperatorSpec, ...] = (
    OperatorSpec("nnscaler.batch_mean", _mean, linear=linear_in({0}), localize=_with_count(1), uneven=True),
    OperatorSpec("nnscaler.batch_variance", _variance, localize=_with_count(2), uneven=True),
    OperatorSpec("nnscaler.batch_normalise", _normalise, linear=_normalise_linear),
    OperatorSpec("nnscaler.running_statistic", "c, c -> c", detached=True),
)
