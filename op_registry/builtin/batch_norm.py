"""The parts of batch norm in training: the batch is a sum in its statistics, and free where they are used."""

from __future__ import annotations

from op_registry.builtin._dims import annotate, linear_in, tensor
from op_registry.call import Call
from op_registry.spec import OperatorSpec


def _mean(call: Call) -> str:
    """`batch_mean(x, count)`."""
    return annotate([["b+", "c", *_places(call, "+")]], [["c"]])


def _variance(call: Call) -> str:
    """`batch_variance(x, mean, count)`."""
    return annotate([["b+", "c", *_places(call, "+")], ["c"]], [["c"]])


def _normalise(call: Call) -> str:
    """`batch_normalise(x, mean, variance, weight, bias, eps)`: nothing is summed."""
    dims = ["b", "c", *_places(call)]
    return annotate([dims, *[["c"]] * (len(call.tensors()) - 1)], [dims])


def _places(call: Call, mark: str = "") -> list[str]:
    return [f"s{i}{mark}" for i in range(tensor(call, 0, "x").ndim - 2)]


SPECS: tuple[OperatorSpec, ...] = (
    OperatorSpec("nnscaler.batch_mean", _mean, linear=linear_in({0})),
    OperatorSpec("nnscaler.batch_variance", _variance),
    OperatorSpec("nnscaler.batch_normalise", _normalise),
    OperatorSpec("nnscaler.running_statistic", "c, c -> c"),
)
