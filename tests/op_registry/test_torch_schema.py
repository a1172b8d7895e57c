"""The torch schema of a function, from its types, its defaults and its annotation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Annotated, Any, List, Optional, Tuple  # noqa: UP035 (users write them)

import pytest
import torch
from torch import Tensor

from op_registry.annotation.parser import parse
from op_registry.infer_torch_schema import SchemaError, infer_schema


def untyped(x, w): ...


def untyped_default(x, w=None, h=8, scale=0.5, mode="up", causal=False, sizes=(1, 2), out=torch.float32): ...


def untyped_two(x): ...


def size_between(x, h, w): ...


def tensors_named_like_identifiers(m, n): ...


def typed(x: Tensor, h: int, *, eps: float = 1e-5) -> Tensor: ...


def optional(x: Tensor, w: Optional[Tensor] = None, b: Tensor | None = None) -> Tensor: ...  # noqa: UP045


def lists(xs: List[Tensor], ws: Sequence[Tensor], s: list[int]) -> List[Tensor]: ...  # noqa: UP006


def tuples(x: Tensor, s: tuple[int, ...], p: Tuple[int, int] = (1, 1)) -> Tuple[Tensor, Tensor]: ...  # noqa: UP006


def any_number(x: Tensor) -> tuple[Tensor, ...]: ...


def annotated(x: Annotated[Tensor, "b d"]) -> Tensor: ...


def positional_only(x, /, y): ...


def nothing(x: Tensor) -> None: ...


def tensor_and_integer(x: Tensor) -> tuple[Tensor, int]: ...


def optional_integer(x: Tensor, h: int | None = None, dtype: torch.dtype | None = None) -> Tensor: ...


@pytest.mark.parametrize(
    ("function", "annotation", "schema"),
    [
        (untyped, "m k+, k+ n -> m n", "(Tensor x, Tensor w) -> Tensor"),
        (untyped, None, "(Tensor x, Tensor w) -> Tensor"),
        (
            untyped_default,
            "m k+, k+ -> m",
            (
                '(Tensor x, Tensor? w=None, SymInt h=8, float scale=0.5, str mode="up", bool causal=False, '
                "SymInt[] sizes=[1, 2], ScalarType out=float32) -> Tensor"
            ),
        ),
        (untyped_two, "a b -> a b, a b", "(Tensor x) -> (Tensor, Tensor)"),
        (untyped_two, "a b ->", "(Tensor x) -> ()"),
        (size_between, "b (h d), d -> b h d", "(Tensor x, SymInt h, Tensor w) -> Tensor"),
        (tensors_named_like_identifiers, "m n, n -> m n", "(Tensor m, Tensor n) -> Tensor"),
        (typed, "b (h d) -> b h d", "(Tensor x, SymInt h, *, float eps=1e-05) -> Tensor"),
        (optional, "a -> a", "(Tensor x, Tensor? w=None, Tensor? b=None) -> Tensor"),
        (lists, "a, a -> a, a", "(Tensor[] xs, Tensor[] ws, SymInt[] s) -> Tensor[]"),
        (tuples, "a -> a, a", "(Tensor x, SymInt[] s, SymInt[] p=[1, 1]) -> (Tensor, Tensor)"),
        (any_number, "a -> a, a, a", "(Tensor x) -> (Tensor, Tensor, Tensor)"),
        (annotated, "b d -> b d", "(Tensor x) -> Tensor"),
        (positional_only, "a, a -> a", "(Tensor x, Tensor y) -> Tensor"),
        (nothing, "a ->", "(Tensor x) -> ()"),
        (tensor_and_integer, "a -> a, ?", "(Tensor x) -> (Tensor, SymInt)"),
        (optional_integer, "a -> a", "(Tensor x, SymInt? h=None, ScalarType? dtype=None) -> Tensor"),
    ],
)
def test_schema(function: Callable[..., Any], annotation: str | None, schema: str) -> None:
    found = infer_schema(function, None if annotation is None else parse(annotation))
    assert found == schema
    torch._C.parse_schema(f"op{found}")


def test_the_schema_is_of_the_wrapped_function() -> None:
    @functools.wraps(typed)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return typed(*args, **kwargs)

    assert infer_schema(wrapper, parse("b (h d) -> b h d")).startswith("(Tensor x, SymInt h")


def test_types_of_an_enclosing_scope() -> None:
    Size = int

    def local(x: Tensor, h: Size) -> Tensor:
        return x * Size(h)

    assert infer_schema(local, None) == "(Tensor x, SymInt h) -> Tensor"


def with_arguments(x, *rest): ...


def with_dict(x: Tensor, options: dict[str, int]) -> Tensor: ...


def unresolved(x: Missing) -> Tensor: ...  # type: ignore[name-defined]  # noqa: F821


def extra(x, flag): ...


def returns_two(x: Tensor) -> tuple[Tensor, Tensor]: ...


@pytest.mark.parametrize(
    ("function", "annotation", "message", "hint"),
    [
        (with_arguments, "a -> a", "`*rest` is not a fixed parameter", "one by one"),
        (with_dict, "a -> a", "Parameter options has unsupported type", None),
        (unresolved, "a -> a", "the type `Missing` cannot be resolved (NameError", "module scope"),
        (extra, "a -> a", "the annotation has no operand for the parameter `flag`, which has no type", "`flag: int`"),
        (extra, "a, ? -> a", "the parameter `flag` is `?` in the annotation, and has no type", "`flag: int`"),
        (returns_two, "a -> a", "the function returns 2 results, the annotation has 1 output", "one output per"),
        (nothing, "a -> ()", "the function returns 0 results, the annotation has 1 output", "one output per"),
        (untyped_two, "a -> a, ?", "the annotation does not determine the type of the function's result", "-> "),
        (any_number, None, "the number of results of", "write every result"),
    ],
)
def test_errors(function: Callable[..., Any], annotation: str | None, message: str, hint: str | None) -> None:
    with pytest.raises(SchemaError) as caught:
        infer_schema(function, None if annotation is None else parse(annotation))
    assert message in str(caught.value)
    assert caught.value.hint is None if hint is None else hint in str(caught.value.hint)
