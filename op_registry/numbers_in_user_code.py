"""Find the numbers that stand in a user's code: sizes, steps and values beyond which it may do something else."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from types import CodeType, FunctionType
from typing import Any

import torch


def numbers_in(target: Any) -> tuple[int | float, ...]:
    """Return the numbers of an operator's code, without signs, in order: of a function and of those of its module
    that it calls; of the methods of a class (both passes of an autograd function or a torch.library operator).

    A number stands in the code, is a default of an argument, or is read from around it.
    """
    return tuple(sorted({abs(n) for n in signed_numbers_in(target)}))


def signed_numbers_in(target: Any) -> tuple[int | float, ...]:
    """Return the same numbers with the signs that they have in the code: ids such as -100 have one."""
    return tuple(sorted({n for value in _values(functions_of(target)) for n in _numbers(value)}))


def deciding_numbers_in(target: Any) -> frozenset[int | float]:
    """Return the numbers of an operator's code, without signs, by which it may decide: in comparisons and remainders,
    as arguments of calls (`clamp`, `topk`) and in slices. All of a function whose source is not there."""
    found: set[int | float] = set()
    for function in reached_from(functions_of(target)):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        except (OSError, TypeError, SyntaxError):
            read, held = _around(function)
            values: list[Any] = [*_constants(function.__code__), *read, *held]
            found |= {abs(n) for n in _numbers([*values, function.__defaults__, function.__kwdefaults__])}
            continue
        found |= {abs(n) for n in _numbers(_deciding_values(function, tree))}
    return frozenset(found)


def _deciding_values(function: Any, tree: ast.Module) -> list[Any]:
    """Return the values that stand at such places in a function, and those that the names there may have."""
    nodes: list[ast.AST] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            nodes += ast.walk(node)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod | ast.FloorDiv):
            nodes.append(node.right)
        elif isinstance(node, ast.Call):
            for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
                listed = isinstance(argument, ast.List | ast.Tuple)
                nodes += [argument, *(ast.walk(argument) if listed else ())]
        elif isinstance(node, ast.Slice):
            nodes += [bound for bound in (node.lower, node.upper, node.step) if bound is not None]
    names = {n.id for n in nodes if isinstance(n, ast.Name)} | {n.attr for n in nodes if isinstance(n, ast.Attribute)}
    values = [n.value for n in nodes if isinstance(n, ast.Constant)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id in names for t in node.targets):
            values += [n.value for n in ast.walk(node.value) if isinstance(n, ast.Constant)]
    return [*values, *(value for name, value in _named_values(function) if name in names)]


def _named_values(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names that a function knows from outside, its arguments by their defaults, with what they stand for."""
    closure = inspect.getclosurevars(function)
    outside = {**closure.globals, **closure.nonlocals}
    yield from outside.items()
    for name in names_in(function.__code__):
        yield from ((name, vars(value)[name]) for value in outside.values() if name in getattr(value, "__dict__", {}))
    yield from ((p.name, p.default) for p in inspect.signature(function).parameters.values())


def numbers_of(values: Sequence[Any]) -> tuple[int | float, ...]:
    """Return the numbers among the values, and within tuples, lists and mappings of them, without signs, in order."""
    return tuple(sorted({abs(n) for value in values for n in _numbers(value)}))


def functions_of(target: Any) -> tuple[Any, ...]:
    """Return the functions that a user wrote for an operator, or in a class. A class of torch has none."""
    owner = target if inspect.isclass(target) else getattr(target, "__self__", None)
    if inspect.isclass(owner):
        if owner is not target and not issubclass(owner, torch.autograd.Function):
            return (target,)
        members = (m for c in owner.__mro__ if not _of_torch(c.__module__) for m in vars(c).values())
        return tuple(getattr(m, "__func__", m) for m in members if callable(getattr(m, "__func__", m)))
    return tuple(f for f in (getattr(target, n, None) for n in ("_init_fn", "_backward_fn")) if f) or (target,)


def _of_torch(module: str | None) -> bool:
    return (module or "").partition(".")[0] in ("torch", "builtins")


def reached_from(functions: Sequence[Any]) -> Iterator[Any]:
    """Yield functions and those that they call: of their own package, and those that a closure holds."""
    waiting, seen = [*functions], set()
    while waiting:
        function = inspect.unwrap(waiting.pop())
        code = getattr(function, "__code__", None)
        if code is None or code in seen:
            continue
        seen.add(code)
        read, held = _around(function)
        waiting += [f for value in read if _beside(value, function) for f in _called(value)]
        waiting += [f for value in held for f in _called(value)]
        yield function


def _around(function: Any) -> tuple[list[Any], list[Any]]:
    """Return what a function reads from its module, and what its closure holds; with the numbers that are attributes of
    these (`Config.block`)."""
    names = [*names_in(function.__code__)]
    read = [getattr(function, "__globals__", {}).get(name) for name in names]
    held = list(inspect.getclosurevars(function).nonlocals.values())
    attributes = [getattr(value, "__dict__", {}).get(name) for value in (*read, *held) for name in names]
    return [*read, *(value for value in attributes if isinstance(value, int | float | tuple))], held


def _values(functions: Sequence[Any]) -> Iterator[Any]:
    """Yield the constants of these functions and of those that they call, and what they read from around them."""
    for function in reached_from(functions):
        read, held = _around(function)
        yield from (*_constants(function.__code__), *read, *held, function.__defaults__, function.__kwdefaults__)


def _beside(value: Any, function: Any) -> bool:
    """Return whether a value is defined in the package of a function."""
    ours, theirs = (getattr(v, "__module__", None) or "" for v in (function, value))
    return ours.partition(".")[0] == theirs.partition(".")[0]


def _called(value: Any) -> Sequence[Any]:
    """Return the functions that a call of the value runs; none of torch's."""
    if _of_torch(getattr(value, "__module__", None)):
        return ()
    if isinstance(value, FunctionType):
        return (value,)
    if isinstance(getattr(value, "__wrapped__", None), FunctionType):  # of functools.cache
        return (value.__wrapped__,)
    return functions_of(value) if inspect.isclass(value) and issubclass(value, torch.autograd.Function) else ()


def names_in(code: CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes, those of functions inside included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)


def _constants(code: CodeType) -> Iterator[Any]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _constants(constant)
        else:
            yield constant


def _numbers(value: Any) -> Iterator[int | float]:
    if type(value) in (int, float) and isfinite(value):
        yield value
    elif isinstance(value, tuple | list | frozenset):
        for part in value:
            yield from _numbers(part)
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _numbers(part)
