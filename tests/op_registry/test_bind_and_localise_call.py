"""Matching the tensors of a call with the operands of an annotation."""

from __future__ import annotations

from typing import Any

import pytest

from op_registry import (
    AnnotationError,
    Call,
    OperatorSpec,
    SchemaParameter,
    SourceLocation,
    TensorArgument,
    bind_call,
    linear_sets,
)


def tensor(index: int, *shape: int) -> TensorArgument:
    return TensorArgument(index, shape, "float32")


def spec(annotation: Any, *parameters: SchemaParameter, **fields: Any) -> OperatorSpec:
    return OperatorSpec("op", annotation, parameters=parameters, **fields)


X = SchemaParameter("x", tensor=True)
W = SchemaParameter("w", tensor=True)
BIAS = SchemaParameter("bias", tensor=True)
FLAG = SchemaParameter("flag", tensor=False)
H = SchemaParameter("h", tensor=False, default=2)


def shapes(found: Any) -> list[tuple[int, ...] | None]:
    return [None if o is None else o.shape for o in found]


def test_tensors_take_operands_in_turn() -> None:
    call = Call("op", (tensor(0, 2, 3), 7, tensor(1, 3, 4), "sum"), {"eps": 0.5}, (tensor(0, 2, 4),))
    bound = bind_call(spec("m k+, k+ n -> m n"), call)
    assert bound.sizes == {"m": 2, "k": 3, "n": 4}
    assert shapes(bound.inputs) == [(2, 3), (3, 4)] and shapes(bound.outputs) == [(2, 4)]


def test_outputs_are_computed_for_a_call_without_them() -> None:
    bound = bind_call(spec("m k+, k+ n -> m n"), Call("op", (tensor(0, 2, 3), tensor(1, 3, 4))))
    assert shapes(bound.outputs) == [(2, 4)]


def test_lists_of_tensors() -> None:
    call = Call("op", ([tensor(0, 2), tensor(1, 3)], 0), {}, (tensor(0, 5),))
    assert bind_call(spec("a, b -> [a b]"), call).tied["a"] == ("a", "b")


def test_annotation_function_with_sizes() -> None:
    def annotation(call: Call) -> tuple[str, dict[str, int]]:
        return "(a b) -> a b", {"a": call.get(1, "a")}

    assert bind_call(spec(annotation, shape_argument=(1, "a", 0)), Call("op", (tensor(0, 6), 3))).sizes["b"] == 2


@pytest.mark.parametrize("value", [True, "mean", 3, None, tensor(1, 9)])
def test_question_mark_takes_whatever_comes(value: Any) -> None:
    index = 2 if isinstance(value, TensorArgument) else 1
    call = Call("op", (tensor(0, 2), value, tensor(index, 3)))
    bound = bind_call(spec("a, ?, b -> a b"), call)
    assert shapes(bound.inputs) == [(2,), *([None] if index == 2 else []), (3,)]


def test_question_mark_takes_a_list_as_a_whole() -> None:
    call = Call("op", (tensor(0, 2), [tensor(1, 9), tensor(2, 8)], tensor(3, 3)))
    assert shapes(bind_call(spec("a, ?, b -> a b"), call).inputs) == [(2,), None, None, (3,)]


def test_question_marks_at_the_end_need_no_argument() -> None:
    assert shapes(bind_call(spec("a, ?, ? -> a"), Call("op", (tensor(0, 2), 1))).inputs) == [(2,)]


def test_none_takes_the_operand_of_an_optional_tensor() -> None:
    annotated = spec("* k+, n k+, +n -> * n", X, W, BIAS)
    with_bias = Call("op", (tensor(0, 2, 3), tensor(1, 4, 3), tensor(2, 4)))
    assert len(bind_call(annotated, with_bias).inputs) == 3
    for call in (
        Call("op", (tensor(0, 2, 3), tensor(1, 4, 3), None)),
        Call("op", (tensor(0, 2, 3), tensor(1, 4, 3))),
        Call("op", (tensor(0, 2, 3), tensor(1, 4, 3)), {"bias": None}),
    ):
        assert len(bind_call(annotated, call).inputs) == 2


def test_the_schema_tells_which_none_is_a_tensor() -> None:
    annotated = spec("a, b, c -> a b c", X, FLAG, W, BIAS)
    call = Call("op", (tensor(0, 2), None, tensor(1, 3), tensor(2, 4)))
    assert shapes(bind_call(annotated, call).inputs) == [(2,), (3,), (4,)]
    call = Call("op", (tensor(0, 2), None, None, tensor(1, 4)))
    assert shapes(bind_call(spec("a, a, b -> a b", X, FLAG, W, BIAS), call).inputs) == [(2,), (4,)]


def test_without_a_schema_none_counts_if_operands_are_left_over() -> None:
    annotated = spec("a, a, b -> a b")
    assert len(bind_call(annotated, Call("op", (tensor(0, 2), None, tensor(1, 3)))).inputs) == 2
    assert len(bind_call(annotated, Call("op", (tensor(0, 2), tensor(1, 2), None, tensor(2, 3)))).inputs) == 3


def test_inputs_are_by_index_also_when_keywords_are_out_of_order() -> None:
    call = Call("op", (tensor(0, 2, 3),), {"bias": tensor(1, 4), "w": tensor(2, 4, 3)})
    bound = bind_call(spec("* k+, n k+, +n -> * n", X, W, BIAS), call)
    assert shapes(bound.inputs) == [(2, 3), (4,), (4, 3)]


@pytest.mark.parametrize(
    "call",
    [
        Call("op", (tensor(0, 2, 12), 3)),
        Call("op", (tensor(0, 2, 12),), {"h": 3}),
    ],
)
def test_an_argument_named_like_an_identifier_gives_its_size(call: Call) -> None:
    assert bind_call(spec("b (h d) -> b h d", X, H), call).sizes["h"] == 3


def test_so_does_its_default() -> None:
    assert bind_call(spec("b (h d) -> b h d", X, H), Call("op", (tensor(0, 2, 12),))).sizes["h"] == 2


def test_only_integers_give_sizes() -> None:
    flag = SchemaParameter("a", tensor=False, default=True)
    assert bind_call(spec("a -> a", X, flag), Call("op", (tensor(0, 2),))).sizes == {"a": 2}


def test_linear_sets() -> None:
    call = Call("op", (tensor(0, 2), tensor(1, 2)))
    sets = (frozenset({0, 1}),)
    assert linear_sets(spec("a, a -> a"), call) == ()
    assert linear_sets(spec("a, a -> a", linear=sets), call) == sets
    assert linear_sets(spec("a, a -> a", linear=lambda c: sets if len(c.args) > 1 else ()), call) == sets


def test_too_many_tensors() -> None:
    annotated = spec("m k+, k+ n -> m n", where=SourceLocation("ops.py", 3, "def op(x, w):"))
    with pytest.raises(AnnotationError) as caught:
        bind_call(annotated, Call("op", (tensor(0, 2, 3), tensor(1, 3, 4), tensor(2, 4))))
    assert caught.value.code == "annotation_does_not_fit"
    assert str(caught.value) == (
        "operator `op`: annotated for 2 tensors, called with 3\n"
        "    m k+, k+ n -> m n\n"
        "  input 0: `m k+` for shape (2, 3)\n"
        "  input 1: `k+ n` for shape (3, 4)\n"
        "  input 2: no operand for shape (4,)\n"
        "  output 0: `m n`\n"
        "  --> ops.py:3   def op(x, w):\n"
        "  help: one operand per tensor; `?` for an argument that is not one; an empty side has no operands"
    )


def test_too_few_tensors() -> None:
    with pytest.raises(AnnotationError, match="annotated for 2 tensors, called with 1"):
        bind_call(spec("m k+, k+ n -> m n"), Call("op", (tensor(0, 2, 3),)))


def test_a_misfit_has_the_place_of_the_registration() -> None:
    annotated = spec("m k+, k+ n -> m n", where=SourceLocation("ops.py", 3))
    with pytest.raises(AnnotationError) as caught:
        bind_call(annotated, Call("op", (tensor(0, 2, 3), tensor(1, 5, 4))))
    assert caught.value.where == SourceLocation("ops.py", 3)
    assert str(caught.value).startswith("operator `op`: `k` is 3 (input 0, dim 1) and 5 (input 1, dim 0)\n")


def test_an_identifier_of_outputs_only_needs_a_rewritten_call() -> None:
    call = Call("op", (tensor(0, 2),), {}, (tensor(0, 2, 5),))
    with pytest.raises(AnnotationError, match="in an output only"):
        bind_call(spec(lambda _: "a -> a t"), call)
    assert bind_call(spec(lambda _: "a -> a t", localize=lambda c, _: c), call).sizes["t"] == 5
    assert bind_call(spec("a -> a t", X, SchemaParameter("t", tensor=False, default=5)), call).sizes["t"] == 5
