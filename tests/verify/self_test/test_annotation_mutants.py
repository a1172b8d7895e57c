from __future__ import annotations

import pytest

from op_registry.annotation.parser import parse
from op_registry.annotation.syntax_tree import print_annotation

from verify.self_test.operators.annotation_mutants import annotation_mutants

MATMUL = "m k+, k+ n -> m n"


def _texts(text: str, kind: str) -> set[str]:
    return {m.text for m in annotation_mutants(text) if m.kind == kind}


@pytest.mark.parametrize(
    ("text", "kind", "mutant"),
    [
        (MATMUL, "mark", "m k, k+ n -> m n"),
        (MATMUL, "mark", "m k+max, k+max n -> m n"),
        (MATMUL, "mark", "m^ k+, k+ n -> m^ n"),
        (MATMUL, "identifier", "m k+, m n -> m n"),
        (MATMUL, "identifier", "n k+, k+ n -> m n"),
        (MATMUL, "swapped", "m k+, k+ n -> n m"),
        (MATMUL, "dropped", "m k+, k+ n -> m"),
        (MATMUL, "duplicated", "m k+, k+ n -> m m n"),
        (MATMUL, "additive", "m k+, +k+ n -> m n"),
        ("m k+, n k+, +n -> m n", "additive", "m k+, n k+, n -> m n"),
        ("a (h d) -> a h d", "swapped", "a (d h) -> a h d"),
        ("a (h 3) -> a h 3", "integer", "a (h 4) -> a h 3"),
        ("a (h 3) -> a h 3", "dropped", "a (h) -> a h 3"),
        ("a [p q] -> a p, a q", "swapped", "a [q p] -> a p, a q"),
        ("a -> a", "dropped", "() -> a"),
        ("*, * -> *", "mark", "*^, *^ -> *^"),
    ],
)
def test_mutants_of_each_kind(text: str, kind: str, mutant: str) -> None:
    assert mutant in _texts(text, kind)


@pytest.mark.parametrize("text", [MATMUL, "b s^ (3 h d^) -> b s^ (h d^)", "m [p q] -> m p, m q", "a, ? -> a", "-> t^"])
def test_every_mutant_differs_and_comes_once(text: str) -> None:
    texts = [m.text for m in annotation_mutants(text)]
    assert len(texts) == len(set(texts)) > 0
    assert print_annotation(parse(text)) not in texts


def test_a_mutant_may_be_none_of_the_language() -> None:
    assert "* *, * -> *" in _texts("*, * -> *", "duplicated")


def test_the_order_is_that_of_the_text() -> None:
    assert annotation_mutants(MATMUL) == annotation_mutants("m  k+,k+ n->m n")
