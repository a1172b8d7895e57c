"""The annotation language: text -> AST -> text, and what is said about text that is not in the language."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from op_registry import AnnotationError, parse, print_annotation
from op_registry.annotation.syntax_tree import Annotation, Concat, Group, Identifier, Integer, Opaque, Operand

names = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_]{0,4}", fullmatch=True)
unmarked = st.builds(Identifier, names, st.sampled_from(["", "^"]))
marked = st.one_of(unmarked, st.builds(Identifier, names, st.just("+"), st.sampled_from(["sum", "max"])))
wildcards = st.builds(Identifier, st.just("*"), st.sampled_from(["", "^", "+"]))
integers = st.builds(Integer, st.integers(0, 99))
groups = st.builds(Group, st.lists(st.one_of(marked, integers), min_size=1, max_size=3).map(tuple))
concats = st.builds(Concat, st.lists(marked, min_size=1, max_size=3).map(tuple))
dims = st.one_of(marked, wildcards, integers, groups, concats)


def one_wildcard(operand: list[object]) -> bool:
    return sum(isinstance(d, Identifier) and d.is_wildcard for d in operand) < 2


operands = st.one_of(
    st.builds(Opaque),
    st.builds(Operand, st.lists(dims, max_size=4).filter(one_wildcard).map(tuple), st.booleans()),
)
sides = st.lists(operands, max_size=3).map(tuple)
annotations = st.builds(Annotation, sides, sides)


@pytest.mark.long
@given(annotations)
def test_printing_and_parsing_are_inverse(annotation: Annotation) -> None:
    assert parse(print_annotation(annotation)) == annotation


@pytest.mark.long
@given(annotations)
def test_spaces_do_not_matter_between_tokens(annotation: Annotation) -> None:
    text = print_annotation(annotation)
    wide = re.sub(r"([,()\[\]]|->)", r"  \1  ", text)
    assert parse(wide) == annotation


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("m k+, k+ n -> m n", "m k+, k+ n -> m n"),
        ("a+,b->a+", "a+, b -> a+"),
        ("*->*", "* -> *"),
        ("-> t", "-> t"),
        ("a ->", "a ->"),
        ("->", "->"),
        ("+ n, k+ -> n", "+n, k+ -> n"),
        ("+(), k+ -> ()", "+(), k+ -> ()"),
        ("( ) -> ()", "() -> ()"),
        ("b (h 3 d^), ? -> b [ q k ] (a)", "b (h 3 d^), ? -> b [q k] (a)"),
        ("c+sum, d+max, 4^ ->", "c+, d+max, 4 ->"),
        ("N C^ *, ? -> N C^ *", "N C^ *, ? -> N C^ *"),
    ],
)
def test_canonical_text(text: str, canonical: str) -> None:
    assert print_annotation(parse(text)) == canonical


def test_marks() -> None:
    (operand,) = parse("a b+ c^ d+max ->").inputs
    assert isinstance(operand, Operand)
    assert [(d.mark, d.reduction) for d in operand.dims if isinstance(d, Identifier)] == [
        ("", "sum"),
        ("+", "sum"),
        ("^", "sum"),
        ("+", "max"),
    ]


def test_nodes_know_their_place() -> None:
    text = "b (h d), +n -> b"
    first, second = parse(text).inputs
    assert isinstance(first, Operand) and isinstance(second, Operand)
    group = first.dims[1]
    assert text[group.start : group.end] == "(h d)"
    assert text[second.start : second.end] == "+n"


ERRORS = {
    "a b": """\
an annotation has one `->` between its inputs and its outputs
    a b
       ^
  help: `m k+, k+ n -> m n`""",
    "a -> b -> c": """\
a second `->`
    a -> b -> c
           ^^
  help: an annotation has one `->` between its inputs and its outputs""",
    "a, , b -> a": """\
an empty operand
    a, , b -> a
       ^
  help: a scalar tensor is written `()`; a side without operands is empty""",
    "m +n -> m": """\
a `+` that belongs to nothing
    m +n -> m
      ^
  help: a mark touches its name (`k+`); a `+` that makes an operand additive comes first in it (`, +n`)""",
    "m k+n -> m": """\
unknown reduction `n` of `k`
    m k+n -> m
      ^^^
  help: reductions are sum, max; a space separates dims: `k+ n`""",
    "a % b -> a": """\
unexpected character '%'
    a % b -> a
      ^
  help: after a name may follow a mark (`+`, `^`, `<`), a dim, `,` or `->`""",
    "(a (b c)) -> a": """\
`(` inside `( )`
    (a (b c)) -> a
       ^
  help: a group holds names and integers only: `(a 3)`""",
    "b (a c, d -> b": """\
this `(` is never closed
    b (a c, d -> b
      ^
  help: `(a b)`""",
    "[a 3] -> a": """\
`3` inside `[ ]`
    [a 3] -> a
       ^
  help: a concatenation holds names only: `[q k v]`""",
    "[a -> a": """\
this `[` is never closed
    [a -> a
    ^
  help: `[a b]`""",
    "(a b)+ -> a": """\
a mark on a group
    (a b)+ -> a
         ^
  help: marks stand on the identifiers inside: `(a+ b)`""",
    "a ? -> a": """\
`?` stands alone: it is a whole operand
    a ? -> a
      ^
  help: `a b, ? -> a b`""",
    "? a -> a": """\
`?` stands alone: it is a whole operand
    ? a -> a
      ^
  help: `a b, ? -> a b`""",
    "+ -> a": """\
`+` before an operand needs the operand's dims
    + -> a
      ^^
  help: `+n`, or `+()` for a scalar""",
    "* * -> *": """\
`*` twice in one operand
    * * -> *
      ^
  help: one `*` stands for any number of dims""",
    "a () -> a": """\
an empty group among dims
    a () -> a
      ^
  help: a scalar tensor is an operand of its own: `, ()`""",
    "() a -> a": """\
`()` is a whole operand: a scalar tensor has no dims
    () a -> a
       ^
  help: separate operands with `,`""",
    "[] -> a": """\
an empty concatenation
    [] -> a
    ^
  help: `[q k v]`""",
    "a b) -> a": """\
unexpected `)`
    a b) -> a
       ^
  help: a dim is a name, `*`, an integer, `(a b)` or `[a b]`""",
}


@pytest.mark.parametrize("text", ERRORS)
def test_errors_point_into_the_text(text: str) -> None:
    with pytest.raises(AnnotationError) as caught:
        parse(text)
    assert caught.value.code == "annotation_syntax"
    assert str(caught.value) == ERRORS[text]


@given(st.text("ab+^*?()[]->, 13", max_size=14))
def test_any_text_parses_or_is_refused(text: str) -> None:
    try:
        annotation = parse(text)
    except AnnotationError as error:
        assert "^" in str(error).splitlines()[2]
    else:
        assert parse(print_annotation(annotation)) == annotation
