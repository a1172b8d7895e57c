"""Looking up, registering, and refusing what is taken."""

from __future__ import annotations

import subprocess
import sys

import pytest

from op_registry import AnnotationError, NnscalerError, OperatorSpec, Registry, SourceLocation, default_registry


def spec(name: str = "op", line: int | None = 3, file: str = "ops.py", **fields: object) -> OperatorSpec:
    where = None if line is None else SourceLocation(file, line, "def op(x):")
    return OperatorSpec(name, "a -> a", where=where, **fields)  # type: ignore[arg-type]


def test_lookup_and_names() -> None:
    registry = Registry(lambda: [spec("b", None)])
    first = registry.register(spec("a"))
    assert registry.lookup("a") is first
    assert registry.lookup("c") is None
    assert registry.names() == ("a", "b")


def test_a_taken_name_is_refused_with_both_places() -> None:
    registry = Registry()
    registry.register(spec(line=3))
    with pytest.raises(NnscalerError) as caught:
        registry.register(spec(line=9))
    assert caught.value.code == "operator_registered_twice"
    assert str(caught.value) == (
        "the operator name `op` is taken: first registered at ops.py:3, again at ops.py:9\n"
        "  --> ops.py:9   def op(x):\n"
        '  help: register_op(..., name="...") gives another name than `op`'
    )


def test_a_builtin_name_is_refused() -> None:
    registry = Registry(lambda: [spec("aten.f.default", None)])
    with pytest.raises(NnscalerError, match=r"an operator of op_registry.builtin has it, again at ops.py:3"):
        registry.register(spec("aten.f.default"))


def test_the_same_line_again_replaces() -> None:
    registry = Registry()
    registry.register(spec(line=3))
    again = registry.register(spec(line=3))
    assert registry.lookup("op") is again


def test_a_notebook_cell_run_again_replaces() -> None:
    registry = Registry()
    registry.register(spec(line=1, file="<ipython-input-1-ab>", qualname="op"))
    registry.register(spec(line=2, file="<ipython-input-2-cd>", qualname="op"))
    with pytest.raises(NnscalerError):
        registry.register(spec(line=2, file="<ipython-input-3-cd>", qualname="other"))


def test_annotations_are_checked_at_registration() -> None:
    registry = Registry()
    where = SourceLocation("ops.py", 3)
    with pytest.raises(AnnotationError) as caught:
        registry.register(OperatorSpec("op", "m k+, k n -> m n", where=where))
    assert caught.value.where == where
    assert caught.value.message.startswith("operator `op`: the marks of `k` must agree on every occurrence\n")
    with pytest.raises(AnnotationError, match="in an output only"):
        registry.register(OperatorSpec("op", "-> t"))
    registry.register(OperatorSpec("op", "-> t", localize=lambda call, _: call))


def test_built_in_operators_are_there() -> None:
    names = default_registry().names()
    assert len(names) > 200
    linear = default_registry().lookup("aten.linear.default")
    assert linear is not None and linear.where is None


def test_neither_import_nor_lookup_needs_torch() -> None:
    code = (
        "import sys, op_registry; assert op_registry.default_registry().lookup('aten.linear.default');"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)
