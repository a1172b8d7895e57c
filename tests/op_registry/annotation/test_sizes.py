"""Binding: every identifier gets its size, or the reason why not is told in full."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from op_registry import AnnotationError, BoundAnnotation, BoundDim, BoundOperand, Factor, bind, parse
from op_registry.annotation.syntax_tree import Concat, Dim, Group, Identifier, Integer

NAMES = "abcdef"
sizes_of_names = st.fixed_dictionaries({n: st.integers(1, 7) for n in NAMES})


def test_matmul() -> None:
    bound = bind("m k+, k+ n -> m n", [(2, 3), (3, 4)], [(2, 4)])
    m, k, n = (BoundDim((Factor(name, size),)) for name, size in (("m", 2), ("k", 3), ("n", 4)))
    assert bound == BoundAnnotation(
        "m k+, k+ n -> m n",
        (BoundOperand((m, k)), BoundOperand((k, n))),
        (BoundOperand((m, n)),),
        {"m": 2, "k": 3, "n": 4},
        {"m": "", "k": "+", "n": ""},
        {"k": "sum"},
        {"m": ("m",), "k": ("k",), "n": ("n",)},
    )


def test_wildcard_is_the_same_dims_everywhere() -> None:
    bound = bind("* k+, n k+, +n -> * n", [(2, 5, 3), (4, 3), (4,)])
    assert bound.sizes == {"*0": 2, "*1": 5, "k": 3, "n": 4}
    assert bound.outputs[0] is not None and bound.outputs[0].shape == (2, 5, 4)
    assert [o.additive for o in bound.inputs if o] == [False, False, True]
    assert bind("*+ -> ()", [(2, 5)]).reductions == {"*0": "sum", "*1": "sum"}
    assert bind("*^ -> *^", [()]).sizes == {}


def test_group_infers_one_unknown_and_keeps_literals() -> None:
    bound = bind("b (3 h d) -> b h d", [(2, 24)], None, {"h": 4})
    assert bound.inputs[0] == BoundOperand(
        (BoundDim((Factor("b", 2),)), BoundDim((Factor(None, 3), Factor("h", 4), Factor("d", 2))))
    )
    assert bind("(a b) -> a b", [(6,)], [(2, 3)]).sizes == {"a": 2, "b": 3}
    assert bind("(a b), (b c) -> a b c", [(6,), (12,)], None, {"a": 3}).sizes == {"a": 3, "b": 2, "c": 6}


def test_concatenation() -> None:
    bound = bind("t [q k v] -> t q, t k, t v", [(5, 12)], [(5, 4), (5, 2), None])
    assert bound.sizes == {"t": 5, "q": 4, "k": 2, "v": 6}
    assert bound.tied["k"] == ("q", "k", "v") and bound.tied["t"] == ("t",)
    assert bound.inputs[0] is not None and bound.inputs[0].dims[1].concat and bound.inputs[0].shape == (5, 12)
    assert bound.outputs[2] is not None and bound.outputs[2].shape == (5, 6)
    alone = bind("[a] -> a", [(3,)])
    assert alone.inputs == alone.outputs


def test_operands_without_a_tensor() -> None:
    bound = bind("a, ?, b, ? -> ?, a b", [(2,), (9,), (3,), None])
    assert [o and o.shape for o in bound.inputs] == [(2,), None, (3,)]
    assert bound.outputs[0] is None
    absent = bind("a k+, +a -> a", [(2, 3), None])
    assert len(absent.inputs) == 1


def test_an_unused_output_is_computed_where_it_can_be() -> None:
    bound = bind("a -> a t^, a", [(2,)], [None, (2,)])
    assert bound.outputs[0] is None
    assert bind("a -> a t^, a", [(2,)], [None, (2,)], {"t": 5}).outputs[0] is not None
    assert bind("-> *", [], [None]).outputs == (None,)


def test_size_one_is_a_size() -> None:
    assert bind("a 1 b -> a b", [(1, 1, 1)]).sizes == {"a": 1, "b": 1}


def test_nnscaler_writes_a_scalar_as_one() -> None:
    assert bind("n^ -> 1", [(3,)], [()]).outputs == (BoundOperand(()),)
    assert bind("n^ -> 1", [(3,)], [(1,)]).outputs == (BoundOperand((BoundDim((Factor(None, 1),)),)),)


def test_an_ast_binds_like_its_text() -> None:
    assert bind(parse("m k+, k+ n -> m n"), [(2, 3), (3, 4)]) == bind("m k+, k+ n -> m n", [(2, 3), (3, 4)])


@pytest.mark.long
@given(sizes_of_names, st.data())
def test_bind_finds_the_sizes_that_made_the_shapes(sizes: dict[str, int], data: st.DataObject) -> None:
    order = data.draw(st.permutations(NAMES))
    dims: list[Dim] = []
    position = 0
    while position < len(order):
        names = [Identifier(n) for n in order[position : position + data.draw(st.integers(1, 3))]]
        position += len(names)
        group = Group((Integer(2), *names))
        dims.append(data.draw(st.sampled_from([group, Concat(tuple(names))] if len(names) > 1 else [names[0], group])))
    shape = tuple(size_of(d, sizes) for d in dims)
    text = " ".join(show(d) for d in dims) + " -> " + " ".join(show(d) for d in dims)
    given_sizes = {n: sizes[n] for d in dims for n in names_of(d)[1:]}
    bound = bind(text, [shape], [shape], given_sizes)
    assert bound.sizes == sizes
    assert bound.inputs[0] is not None and bound.inputs[0].shape == shape


def names_of(dim: Dim) -> list[str]:
    if isinstance(dim, Identifier):
        return [dim.name]
    if isinstance(dim, Group):
        return [f.name for f in dim.factors if isinstance(f, Identifier)]
    return [p.name for p in dim.parts] if isinstance(dim, Concat) else []


def size_of(dim: Dim, sizes: dict[str, int]) -> int:
    parts = [sizes[n] for n in names_of(dim)]
    return sum(parts) if isinstance(dim, Concat) else 2 * prod(parts) if isinstance(dim, Group) else parts[0]


def show(dim: Dim) -> str:
    names = " ".join(names_of(dim))
    return f"[{names}]" if isinstance(dim, Concat) else f"(2 {names})" if isinstance(dim, Group) else names


def message(*arguments: object) -> str:
    with pytest.raises(AnnotationError) as caught:
        bind(*arguments)  # type: ignore[arg-type]
    assert caught.value.code == "annotation_does_not_fit"
    return str(caught.value)


def test_two_sizes_for_one_identifier() -> None:
    assert message("m k+, k+ n -> m n", [(2, 3), (4, 5)], [(2, 5)]) == (
        "`k` is 3 (input 0, dim 1) and 4 (input 1, dim 0)\n"
        "    m k+, k+ n -> m n\n"
        "          ^^\n"
        "  input 0: `m k+` for shape (2, 3)\n"
        "  input 1: `k+ n` for shape (4, 5)\n"
        "  output 0: `m n` for shape (2, 5)\n"
        "  bound so far: m=2, k=3"
    )


def test_a_given_size_that_does_not_fit() -> None:
    assert message("b (h d) -> b h d", [(2, 12)], None, {"h": 5}) == (
        "input 0, dim 1 is 12, which 5 does not divide (5 x ?)\n"
        "    b (h d) -> b h d\n"
        "      ^^^^^\n"
        "  input 0: `b (h d)` for shape (2, 12)\n"
        "  output 0: `b h d`\n"
        "  given: h=5\n"
        "  bound so far: b=2"
    )
    assert message("h -> h", [(4,)], None, {"h": 5}).startswith("`h` is 5 (given) and 4 (input 0, dim 0)\n")


def test_a_group_with_two_unknowns() -> None:
    assert message("b (h d) -> b h d", [(2, 12)]) == (
        "input 0, dim 1 is 12, which does not determine `h` and `d`\n"
        "    b (h d) -> b h d\n"
        "      ^^^^^\n"
        "  input 0: `b (h d)` for shape (2, 12)\n"
        "  output 0: `b h d`\n"
        "  bound so far: b=2\n"
        "  help: at most one size of a group is inferred; an argument named `h` gives its size"
    )


@pytest.mark.parametrize(
    ("arguments", "first"),
    [
        (("b 3 -> b 3", [(2, 4)]), "dim 1 of input 0 is 4, the annotation says 3"),
        (("a b -> a b", [(2,)]), "input 0 has 1 dim, its operand 2"),
        (("* a b -> * a b", [(2,)]), "input 0 has 1 dim, its operand at least 2"),
        (("*, * -> *", [(2,), (2, 3)]), "`*` is 2 dims in input 1 and 1 dim before"),
        (("a, a -> a", [(2,)]), "2 input operands, but 1 input"),
        (("a ->", [(2,)], [()]), "0 output operands, but 1 output"),
        (("(a 3) -> a", [(7,)]), "input 0, dim 0 is 7, which 3 does not divide (? x 3)"),
        (("(a b) -> a b", [(6,)], [(2, 2)]), "input 0, dim 0 is 6, not 2 x 2 = 4"),
        (("[a b] -> a, b", [(6,)], [(2,), (5,)]), "input 0, dim 0 is 6, not 2 + 5 = 7"),
        (("[a b] -> a, b", [(6,)], [(7,), None]), "input 0, dim 0 is 6, less than 7 + ?"),
        (("(a b) -> a b", [(0,)], None, {"a": 0}), "input 0, dim 0 is 0, which does not determine `b`"),
    ],
)
def test_first_line_of_the_message(arguments: tuple[object, ...], first: str) -> None:
    lines = message(*arguments).splitlines()
    assert lines[0] == first
    assert lines[1] == f"    {arguments[0]}"


def test_rules_hold_when_binding_too() -> None:
    with pytest.raises(AnnotationError, match="must agree"):
        bind("m k+, k n -> m n", [(2, 3), (3, 4)])
