"""How an error reads, and that it survives a process boundary."""

from __future__ import annotations

import pickle

from op_registry import AnnotationError, NnscalerError, SourceLocation
from op_registry.errors import annotation_error, excerpt

import nnscaler.errors


def test_text() -> None:
    where = SourceLocation("model.py", 12, "y = my_op(x)")
    error = NnscalerError("plan_illegal", "no such axis", where, help="axes are dp, tp")
    assert str(error) == "no such axis\n  --> model.py:12   y = my_op(x)\n  help: axes are dp, tp"
    assert str(NnscalerError("a", "b")) == "b"
    assert error.code == "plan_illegal"


def test_pickle() -> None:
    error = AnnotationError("annotation_syntax", "bad", SourceLocation("f.py", 1), "better")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is AnnotationError and str(copy) == str(error) and copy.where == error.where


def test_at_keeps_the_first_place() -> None:
    first, second = SourceLocation("a.py", 1), SourceLocation("b.py", 2)
    error = AnnotationError("c", "m").at(first, "operator `f`: ")
    assert error.message == "operator `f`: m" and error.at(second).where == first
    assert isinstance(error, AnnotationError)


def test_one_type_on_every_floor() -> None:
    assert nnscaler.errors.NnscalerError is NnscalerError
    assert issubclass(AnnotationError, NnscalerError)


def test_carets() -> None:
    assert excerpt("a b -> c", [(0, 1), (7, 8)]) == ["    a b -> c", "    ^      ^"]
    assert excerpt("a\tb", [(3, 4)]) == ["    a b", "       ^"]
    assert excerpt("a", []) == ["    a"]
    error = annotation_error("c", "m", "a -> b", [(5, 6)], notes=["n"], hint="h")
    assert str(error) == "m\n    a -> b\n         ^\n  n\n  help: h"
