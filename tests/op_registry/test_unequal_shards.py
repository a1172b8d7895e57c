"""Expressions with tables, sizes and starts of unequal shards, and what hooks make of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from op_registry.annotation.bind_sizes import bind
from op_registry.annotation.splits import Shard, balanced, shard_of, splittable
from op_registry.bind_and_localise_call import localise
from op_registry.call import AxisShard, Call, TensorArgument
from op_registry.rank_expression import Expression, block_start, by_index, index, local_size
from op_registry.registry import default_registry
from op_registry.spec import OperatorSpec, Refusal, SchemaParameter

THREE = AxisShard("tp", 3, 1, (4, 2, 1))


def at(value: Any, sizes: int = 3) -> list[Any]:
    """The values of a number on every rank."""
    return [value.evaluate({"tp": i}) if isinstance(value, Expression) else value for i in range(sizes)]


def test_tables_add_and_multiply() -> None:
    table = by_index("tp", (4, 2, 1))
    assert at(table * 3 + 5) == [17, 11, 8]
    assert at(table + index("tp") * 10) == [4, 12, 21]
    assert at(table + table) == [8, 4, 2]
    assert (table * 0).terms == ()
    assert str(table + 1) == "1 + (4, 2, 1)[index of tp]"


def test_expressions_of_the_same_values_are_one() -> None:
    sizes = {"tp": 3}
    assert by_index("tp", (0, 5, 10)).over(sizes) == (index("tp") * 5).over(sizes)
    assert (by_index("tp", (7, 12, 17))).over(sizes) == (index("tp") * 5 + 7).over(sizes)
    assert by_index("tp", (0, 5, 11)).over(sizes) != (index("tp") * 5).over(sizes)
    assert by_index("tp", (0, 5)).over(sizes) is None  # a rank without an entry
    assert index("dp").over(sizes) is None


def test_sizes_and_starts() -> None:
    assert at(local_size(7, [THREE])) == [4, 2, 1]
    assert at(local_size(35, [THREE])) == [20, 10, 5]  # of five times as much
    assert at(local_size(14, [AxisShard("tp", 3, 2, (4, 2, 1))])) == [8, 4, 2]
    assert at(block_start("v", 7, [THREE])) == [0, 4, 6]
    assert local_size(12, [AxisShard("dp", 2), AxisShard("tp", 3)]) == 2
    with pytest.raises(Refusal, match="second axis"):
        local_size(14, [AxisShard("dp", 2), THREE])
    with pytest.raises(Refusal, match="does not divide into the sizes"):
        local_size(8, [THREE])


@pytest.mark.parametrize(
    ("size", "parts", "sizes"),
    [(7, 3, (3, 2, 2)), (50257, 8, (6283, *[6282] * 7)), (28, 8, (4, 4, 4, 4, 3, 3, 3, 3)), (8, 4, ()), (3, 4, ())],
)
def test_balanced(size: int, parts: int, sizes: Sequence[int]) -> None:
    assert balanced(size, parts) == tuple(sizes)


def test_operands_scale_the_sizes_by_what_lies_inside() -> None:
    bound = bind("b (p h d) -> b p h d", [(2, 42)], [(2, 3, 7, 2)])
    given, made = bound.inputs[0], bound.outputs[0]
    assert given is not None and made is not None
    assert shard_of(bound, given, "h", 1, (4, 3)) == Shard(1, 3, (), (8, 6))
    assert shard_of(bound, made, "h", 1, (4, 3)) == Shard(2, 1, (), (4, 3))
    assert splittable(bound, "h", 2, 1, (4, 3)) is None
    assert "do not add up to 7" in str(splittable(bound, "h", 2, 1, (5, 3)))
    tied = bind("[q k] -> [q k]", [(9,)], sizes={"q": 5, "k": 4})
    assert "part of" in str(splittable(tied, "q", 2, 1, (3, 2)))


def test_a_hook_that_does_not_know_of_sizes_is_not_asked() -> None:
    """A hook that divides by the number of parts would be wrong on unequal shards."""
    spec = OperatorSpec("op", "a -> a", localize=lambda call, shards: call)
    call = Call("op", (TensorArgument(0, (7,), "float32"),), {}, (TensorArgument(0, (7,), "float32"),))
    with pytest.raises(Refusal, match="does not know shards of unequal sizes"):
        localise(spec, call, {"a": (THREE,)}, [(by_index("tp", THREE.sizes),)])
    plain = OperatorSpec("op", "a -> a")
    assert localise(plain, call, {"a": (THREE,)}, [(by_index("tp", THREE.sizes),)]) == call


def test_an_argument_named_like_an_identifier_follows() -> None:
    spec = OperatorSpec("op", "(h d) -> h d", parameters=(SchemaParameter("x", True), SchemaParameter("h", False)))
    out = TensorArgument(0, (7, 3), "float32")
    call = Call("op", (TensorArgument(0, (21,), "float32"), 7), {}, (out,))
    local = localise(spec, call, {"h": (THREE,)}, [(by_index("tp", THREE.sizes), 3)])
    assert at(local.args[1]) == [4, 2, 1]


def called(name: str, *args: Any, out: Sequence[int], shards: dict[str, AxisShard]) -> Call:
    spec = default_registry().lookup(name)
    assert spec is not None
    call = Call(name, args, {}, (TensorArgument(0, tuple(out), "float32"),))
    local = [by_index("tp", (4, 2, 1)) if size == 7 else size for size in out]
    return localise(spec, call, {k: (v,) for k, v in shards.items()}, [tuple(local)])


def test_hooks_of_built_in_operators() -> None:
    made = called("aten.arange.start_step", 3, 24, 3, out=(7,), shards={"t": THREE})
    assert [at(a) for a in made.args] == [[3, 15, 21], [15, 21, 24], [3, 3, 3]]
    weight, ids = TensorArgument(0, (7, 5), "float32"), TensorArgument(1, (2,), "int64")
    made = called("aten.embedding.default", weight, ids, out=(2, 5), shards={"v": THREE})
    assert made.operator == "nnscaler.embedding_block" and at(made.args[3]) == [0, 4, 6]
    x = TensorArgument(0, (2, 21), "float32")
    made = called("aten.chunk.default", x, 3, 1, out=(2, 7), shards={"b": THREE})
    assert [[at(size)[i] for size in made.args[1]] for i in range(3)] == [[4] * 3, [2] * 3, [1] * 3]
    x = TensorArgument(0, (2, 14, 5), "float32")
    made = called("aten.group_norm.default", x, 7, out=(2, 14, 5), shards={"g": THREE})
    assert at(made.args[1]) == [4, 2, 1]
    made = called(
        "aten.view.default", TensorArgument(0, (2, 35), "float32"), [2, 7, 5], out=(2, 7, 5), shards={"b": THREE}
    )
    assert [at(size) for size in made.args[1]] == [[2] * 3, [4, 2, 1], [5] * 3]
