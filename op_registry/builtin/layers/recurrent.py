"""Recurrent networks: the batch is free. Time is a chain, and every hidden unit reads all of the step before.

One step of an LSTM or of a plain network splits by hidden units too: the state before it is read whole.
"""

from __future__ import annotations

from op_registry.builtin._dims import Dims, all_frozen, annotate, listed, tensor
from op_registry.call import Call, TensorArgument
from op_registry.spec import AnnotationFunction, OperatorSpec, Shards


def _layers(states: int) -> AnnotationFunction:
    """`lstm(x, [h, c], weights, ...)`, `gru(x, h, weights, ...)`: `5 b 4` or, batch first, `b 5 4`. All but the batch
    has the size that it has: weights of other sizes do not fit each other, and torch ends the process on some."""

    def annotation(call: Call) -> str:
        x, batch = tensor(call, 0, "input"), 0 if call.get(8, "batch_first", False) else 1
        weights = [_sizes(t) for t in listed(call.get(2, "params")) if t is not None]
        before = [_sizes(t, 1) for t in listed(call.get(1, "hx")) if t is not None]
        assert len(before) == states, call.operator
        return annotate([_sizes(x, batch), *before, *weights], [_sizes(call.outputs[0], batch), *before])

    return annotation


def _sizes(t: TensorArgument | None, batch: int | None = None) -> Dims:
    assert t is not None
    return ["b" if i == batch else str(size) for i, size in enumerate(t.shape)]


def _cell(gates: int, states: int) -> AnnotationFunction:
    """`lstm_cell(x, [h, c], w_ih, w_hh, b_ih, b_hh)`: rows of the weights are `gates` times the hidden units."""

    def annotation(call: Call) -> str:
        x, biases = tensor(call, 0, "input"), [call.get(i, n) for i, n in ((4, "b_ih"), (5, "b_hh"))]
        batch = ["b"] * (x.ndim - 1)
        rows = "h" if gates == 1 else f"({gates} h)"
        before = [[*batch, "k^"], [*batch, "h"]][:states]
        weights: list[Dims] = [[rows, "i^"], [rows, "k^"]]
        given = [[rows] for b in biases if isinstance(b, TensorArgument)]
        return annotate([[*batch, "i^"], *before, *weights, *given], [[*batch, "h"]] * states)

    return annotation


def _localize_cell(call: Call, shards: Shards) -> Call:
    """torch wants as many rows of weights as the state before has units."""
    if "h" not in shards:
        return call
    biases = (call.get(4, "b_ih"), call.get(5, "b_hh"))
    kind = call.operator.removeprefix("aten.").removesuffix("_cell.default")
    args = (kind, *call.args[:2], tensor(call, 2, "w_ih"), tensor(call, 3, "w_hh"), *biases)
    return Call("nnscaler.recurrent_cell", args, {}, call.outputs)


def _gru_cell(call: Call) -> str:
    """The new state adds a share of the old one, unit by unit, which the products read whole: units are frozen."""
    x, biases = tensor(call, 0, "input"), [call.get(i, n) for i, n in ((4, "b_ih"), (5, "b_hh"))]
    batch = ["b"] * (x.ndim - 1)
    given = [["(3 h^)"] for b in biases if isinstance(b, TensorArgument)]
    return annotate([[*batch, "i^"], [*batch, "h^"], ["(3 h^)", "i^"], ["(3 h^)", "h2^"], *given], [[*batch, "h^"]])


_NAMES = ("gru", "rnn_tanh", "rnn_relu")

SPECS: tuple[OperatorSpec, ...] = (
    OperatorSpec("aten.lstm.input", _layers(2), draws_if=(5, 6)),
    *(OperatorSpec(f"aten.{name}.input", _layers(1), draws_if=(5, 6)) for name in _NAMES),
    *(  # packed: lengths are values
        OperatorSpec(f"aten.{name}.data", all_frozen, draws_if=(6, 7)) for name in ("lstm", *_NAMES)
    ),
    OperatorSpec("aten.lstm_cell.default", _cell(4, 2), localize=_localize_cell),
    OperatorSpec("aten.gru_cell.default", _gru_cell),
    *(
        OperatorSpec(f"aten.{name}_cell.default", _cell(1, 1), localize=_localize_cell)
        for name in ("rnn_tanh", "rnn_relu")
    ),
)
