"""Rewriting a call for one shard."""

from __future__ import annotations

from typing import Any

import pytest

from op_registry import AxisShard, Call, OperatorSpec, Refusal, SchemaParameter, TensorArgument, index, localise
from op_registry.spec import Shards

X = TensorArgument(0, (4, 6), "float32")
TP = (AxisShard("tp", 2),)


def test_nothing_split_changes_nothing() -> None:
    def refuse(call: Call, shards: Shards) -> Call:
        raise AssertionError

    spec = OperatorSpec("op", "a b -> a b", shape_argument=(1, "size", 0), localize=refuse)
    call = Call("op", (X, [4, -1]), {}, (X,))
    assert localise(spec, call, {}, [(4, 6)]) is call
    assert localise(spec, call, {"a": (AxisShard("tp", 1),)}, [(4, 6)]) is call


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (Call("op", (X, [4, -1]), {}, (X,)), Call("op", (X, [2, 6]), {}, (X,))),
        (Call("op", (X, (4, 6)), {}, (X,)), Call("op", (X, (2, 6)), {}, (X,))),
        (Call("op", (X,), {"size": [4, 6]}, (X,)), Call("op", (X,), {"size": [2, 6]}, (X,))),
        (Call("op", (X,), {}, (X,)), Call("op", (X,), {}, (X,))),
    ],
)
def test_shape_argument_follows_the_local_output(call: Call, expected: Call) -> None:
    spec = OperatorSpec("op", "a b -> a b", shape_argument=(1, "size", 0))
    assert localise(spec, call, {"a": TP}, [(2, 6)]) == expected


def test_shape_argument_of_a_whole_output_is_kept() -> None:
    spec = OperatorSpec("op", "a+ b -> b", shape_argument=(1, "size", 0))
    call = Call("op", (X, [-1]), {}, (TensorArgument(0, (6,), "float32"),))
    assert localise(spec, call, {"a": TP}, [(6,)]) is call


def test_a_single_size() -> None:
    spec = OperatorSpec("op", "-> t", shape_argument=(0, "size", 0))
    output = (TensorArgument(0, (8,), "float32"),)
    assert localise(spec, Call("op", (8,), {}, output), {"t": TP}, [(4,)]).args == (4,)
    square = (TensorArgument(0, (8, 8), "float32"),)
    with pytest.raises(Refusal, match="does not list the 2 sizes"):
        localise(spec, Call("op", (8,), {}, square), {"t": TP}, [(4, 8)])


PARAMETERS = (
    SchemaParameter("x", tensor=True),
    SchemaParameter("h", tensor=False, default=6),
    SchemaParameter("d", tensor=False),
)


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        ((X, 6), {}, ((X, 3), {})),
        ((X,), {"h": 6}, ((X,), {"h": 3})),
        ((X,), {}, ((X,), {"h": 3})),
    ],
)
def test_sizes_among_the_arguments_are_divided(args: Any, kwargs: Any, expected: Any) -> None:
    spec = OperatorSpec("op", "b (h d) -> b h d", parameters=PARAMETERS)
    call = localise(spec, Call("op", args, kwargs), {"h": TP}, [(4, 3, 1)])
    assert (call.args, call.kwargs) == expected


def test_several_axes_divide_by_all_their_parts() -> None:
    spec = OperatorSpec("op", "b (h d) -> b h d", parameters=PARAMETERS)
    axes = (AxisShard("dp", 3), AxisShard("tp", 2, outer=3))
    assert localise(spec, Call("op", (X, 12)), {"h": axes}, [None]).args == (X, 2)
    with pytest.raises(Refusal, match=r"`h=7` of `op` does not divide by 6"):
        localise(spec, Call("op", (X, 7)), {"h": axes}, [None])


def test_the_hook_comes_last_and_sees_only_what_is_split() -> None:
    seen: list[Any] = []

    def hook(call: Call, shards: Shards) -> Call:
        seen.append((call, dict(shards)))
        return call.replace(2, "start", 3 * index("tp"))

    spec = OperatorSpec("op", "-> t", shape_argument=(0, "size", 0), localize=hook)
    call = Call("op", ([8],), {}, (TensorArgument(0, (8,), "int64"),))
    result = localise(spec, call, {"t": TP, "u": (AxisShard("dp", 1),), "v": ()}, [(4,)])
    assert seen == [(Call("op", ([4],), {}, call.outputs), {"t": TP})]
    assert result.kwargs["start"].evaluate({"tp": 2}) == 6


def test_contiguous_identifiers() -> None:
    spec = OperatorSpec("op", "a b -> a b", contiguous=frozenset({"a"}), localize=lambda call, _: call)
    call = Call("op", (X,))
    assert localise(spec, call, {"a": TP, "b": (AxisShard("dp", 2, outer=3),)}, [(2, 3)]) is call
    for axes in ((AxisShard("tp", 2, outer=2),), (AxisShard("dp", 2), AxisShard("tp", 2, outer=2))):
        with pytest.raises(Refusal, match="only splits into contiguous blocks, over one axis"):
            localise(spec, call, {"a": axes}, [(2, 6)])
