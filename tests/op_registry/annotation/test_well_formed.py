"""Annotations that parse but say something impossible are refused, with the corrected text."""

from __future__ import annotations

import pytest

from op_registry import AnnotationError, check, parse
from op_registry.annotation.well_formed import parse_checked, tied_identifiers

REFUSED = {
    "m k+, k n -> m n": (
        "the marks of `k` must agree on every occurrence",
        "      ^^  ^",
        "`m k+, k+ n -> m n` agrees, and `verify-op` tests it; `m k^, k^ n -> m n` splits nothing",
    ),
    "m+ -> m": (
        "the marks of `m` must agree on every occurrence",
        "    ^^    ^",
        "`m -> m` agrees, and `verify-op` tests it; `m^ -> m^` splits nothing",
    ),
    "m k^, k+ n -> m n": (
        "the marks of `k` must agree on every occurrence",
        "      ^^  ^^",
        "`m k^, k^ n -> m n`",
    ),
    "n c+max, c+ -> n": (
        "the marks of `c` must agree on every occurrence",
        "      ^^^^^  ^^",
        "`n c+max, c+max -> n` agrees, and `verify-op` tests it; `n c^, c^ -> n` splits nothing",
    ),
    "m+ k -> m+ k": ("the mark of `m+` has no effect: every output has `m`", "    ^^      ^^", "`m k -> m k`"),
    "n n -> n": (
        "`n` twice in one operand",
        "    ^ ^",
        "no layout splits a diagonal: `n^ n^ -> n^`",
    ),
    "n (n k) -> n k": (
        "`n` twice in one operand",
        "    ^  ^",
        "no layout splits a diagonal: `n^ (n^ k) -> n^ k`",
    ),
    "m k -> m": (
        "`k` has no mark, but output 0 `m` lacks it",
        "      ^",
        "`m k^ -> m` freezes it; `m k+ -> m` says that splitting it gives partial sums",
    ),
    "a b -> a b, a": (
        "`b` has no mark, but output 1 `a` lacks it",
        "      ^      ^",
        "`a b^ -> a b^, a` freezes it; `a b+ -> a b+, a` says that splitting it gives partial sums",
    ),
    "* -> ()": (
        "`*` has no mark, but output 0 `()` lacks it",
        "    ^",
        "`*^ -> ()` freezes it; `*+ -> ()` says that splitting it gives partial sums",
    ),
    "m n, +n -> m n": (
        "`+n` has an additive mark without effect: there is no sum that it lacks",
        "         ^^",
        "`m n, n -> m n`",
    ),
    "m k+, +k+ -> m": (
        "`+k+` has an additive mark without effect: there is no sum that it lacks",
        "          ^^^",
        "`m k+, k+ -> m`",
    ),
    "m k+, +m -> m, m k+": (
        "`+m` is additive under a split of `k`, but output 1 keeps `k`",
        "          ^^         ^^",
        "`m k^, m -> m, m k^` freezes `k`",
    ),
    "n c+max k+, +n -> n": (
        "`+n` is additive, but `c+max` is no sum",
        "      ^^^^^     ^^",
        "`n c+max k^, n -> n`",
    ),
    "m k+ -> +m": (
        "`+` before an output",
        "            ^^",
        "an output becomes a partial sum by itself where it lacks a reduction identifier",
    ),
    "[q k^] -> q, k^": (
        "`q`, `k` are split together, so they have the same mark",
        "     ^ ^^     ^  ^^",
        "`[q^ k^] -> q^, k^`",
    ),
    "[q k] -> q k": (
        "`q`, `k` are split together, so one operand cannot have two of them",
        "             ^ ^",
        "`[q^ k^] -> q^ k^`",
    ),
}


@pytest.mark.parametrize("text", REFUSED)
def test_refused(text: str) -> None:
    message, carets, hint = REFUSED[text]
    with pytest.raises(AnnotationError) as caught:
        parse_checked(text)
    assert caught.value.code == "annotation_illegal"
    assert str(caught.value).splitlines() == [message, f"    {text}", carets, f"  help: {hint}"]


@pytest.mark.parametrize("text", [t for t in REFUSED if REFUSED[t][2].count("`") == 2])
def test_the_corrected_text_is_legal(text: str) -> None:
    parse_checked(REFUSED[text][2].split("`")[1])


@pytest.mark.parametrize(
    "text",
    [
        "m k+, k+ n -> m n",
        "* k+, n k+, +n -> * n",
        "n c+max -> n",
        "n c+, n -> n",
        "n+, n+, n+, n+ -> ()",
        "a k+ -> a, a k+",
        "* n^ n^ -> * n^ n^",
        "b t [q k v] -> b t q, b t k, b t v",
        "[q k v] -> q",
        "[q+ k+] -> ()",
        "a b ->",
        "a b -> ?",
        "a, ? -> a, ?",
        "() -> ()",
        "N C^ *, ? -> N C^ *",
    ],
)
def test_accepted(text: str) -> None:
    check(parse(text), text, output_only=False)


def test_identifiers_of_outputs_only() -> None:
    text = "a -> a t"
    with pytest.raises(AnnotationError) as caught:
        check(parse(text), text, output_only=False)
    assert str(caught.value) == (
        "`t` is in an output only: nothing says how a call for one shard of it looks\n"
        "    a -> a t\n"
        "           ^\n"
        "  help: `a -> a t^` freezes it; else the operator needs an argument named `t`, a shape argument"
        " or a localize function"
    )
    check(parse(text), text, output_only=True)
    check(parse(text), text, output_only=frozenset({"t"}))
    check(parse("a -> a t^"), "a -> a t^", output_only=False)
    with pytest.raises(AnnotationError):
        check(parse(text), text, output_only=frozenset({"u"}))


def test_ties_are_transitive() -> None:
    ties = tied_identifiers(parse("[a b], [b c] -> a, d"))
    assert ties == {"a": ("a", "b", "c"), "b": ("a", "b", "c"), "c": ("a", "b", "c"), "d": ("d",)}
