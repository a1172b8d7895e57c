"""A function and one call of it, which can be made again with other tensors and other integers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd
from typing import Any

import torch
from torch import Tensor

from op_registry.call import Call
from op_registry.spec import OperatorSpec

from verify.evidence.inputs.concrete_call import ConcreteCall, make_call, outputs_of, with_tensors
from verify.evidence.inputs.meta_preflight import tried_on_meta
from verify.evidence.operator_trace import Observer
from verify.evidence.oracle.size_checked_kernels import runs_checked

Outputs = tuple[Tensor | None, ...]
Number = int | tuple[int, ...]


@dataclass(frozen=True)
class Question:
    """A function and one call of it, about which advice is asked.

    concrete  the call
    names     of the function's parameters, in order: integer arguments are known by them
    trusted   everything that it runs is known to check its sizes
    """

    function: Callable[..., Any]
    concrete: ConcreteCall
    names: tuple[str, ...] = ()
    trusted: bool = False

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors of the call by index."""
        return self.concrete.tensors

    @cached_property
    def integers(self) -> Mapping[str, int]:
        """Integer arguments of 2 and more by name: each may be a size."""
        return {n: v for n, v in self._arguments if isinstance(v, int) and not isinstance(v, bool) and v > 1}

    @cached_property
    def lists(self) -> Mapping[str, tuple[int, ...]]:
        """Arguments that list two and more positive integers, by name: the sizes of pieces, perhaps."""
        given = ((n, v) for n, v in self._arguments if isinstance(v, list | tuple) and len(v) > 1)
        return {n: tuple(v) for n, v in given if all(type(i) is int and i > 0 for i in v)}

    @property
    def _arguments(self) -> list[tuple[str, Any]]:
        call = self.concrete.call
        return [*zip(self.names, call.args, strict=False), *call.kwargs.items()]

    def number(self, name: str) -> int:
        """Return an integer argument, or the common divisor of those in a list."""
        return self.integers[name] if name in self.integers else gcd(*self.lists[name])

    def scaled(self, name: str, numerator: int, denominator: int = 1) -> Number:
        """Return an integer argument or a list of them, times a fraction."""
        if name in self.integers:
            return self.integers[name] * numerator // denominator
        return tuple(i * numerator // denominator for i in self.lists[name])

    @cached_property
    def _calls(self) -> dict[tuple[tuple[str, Number], ...], Call]:
        return {}

    def call_with(self, integers: Mapping[str, Number]) -> Call:
        """Return the call with some of its integers changed."""
        key = tuple(integers.items())
        call = self._calls.get(key)
        if call is None:
            call = self.concrete.call
            for name, value in integers.items():
                position = self.names.index(name) if name in self.names else len(call.args)
                call = call.replace(position, name, list(value) if isinstance(value, tuple) else value)
            self._calls[key] = call
        return call

    def run(self, tensors: Sequence[Tensor], integers: Mapping[str, Number]) -> Outputs:
        """Return the outputs on other tensors. Raises whatever the function raises."""
        call = self.call_with(integers)
        if not self.checked:
            self._try_shapes(call, tensors)
        args, kwargs = with_tensors(call, tensors, {})
        with torch.no_grad():
            return outputs_of(self.function(*args, **kwargs))

    @cached_property
    def checked(self) -> bool:
        """Return whether all kernels that the function runs on its own tensors check their sizes."""
        if self.trusted:
            return True
        args, kwargs = with_tensors(self.concrete.call, self.tensors, {})
        try:
            with torch.no_grad():
                return runs_checked(lambda: self.function(*args, **kwargs))
        except Exception:  # noqa: BLE001 - what does not run has shown nothing
            return False

    @cached_property
    def _known(self) -> dict[object, Exception | bool]:
        return {}

    def _try_shapes(self, call: Call, tensors: Sequence[Tensor]) -> None:
        """Try the call's shapes on the meta device. Raises what the call raises about them."""
        shapes = tuple((tuple(t.shape), t.dtype) for t in tensors)
        key = (shapes, repr(call.args), repr(call.kwargs))
        if key not in self._known:
            own = call is self.concrete.call and [s for s, _ in shapes] == [tuple(t.shape) for t in self.tensors]
            self._known[key] = own or tried_on_meta(self.function, call, shapes, {}, {})
        problem = self._known[key]
        if isinstance(problem, Exception):
            raise problem

    def steps(self, tensors: Sequence[Tensor], integers: Mapping[str, Number]) -> int | None:
        """Return how many operators run before one raises; None if none does."""
        ran: list[Any] = []
        try:
            with Observer(lambda overload, args, result: ran.append(overload)):
                self.run(tensors, integers)
        except Exception:  # noqa: BLE001 - whatever it raises, it does not run
            return len(ran)
        return None

    def changed(self, tensors: Sequence[Tensor], integers: Mapping[str, Number], trusted: bool = False) -> Question:
        """Return the same question about other tensors and integers."""
        call = self.call_with(integers)
        args, kwargs = with_tensors(call, tensors, {})
        concrete = make_call(call.operator, args, kwargs, self.concrete.kind)
        concrete = replace(concrete, constants=self.concrete.constants)
        return replace(self, concrete=concrete, trusted=trusted or self.checked)


def make_question(spec: OperatorSpec, function: Callable[..., Any], concrete: ConcreteCall) -> Question:
    """Return the question about one call of an operator: arguments in the order of its parameters, defaults written
    out."""
    args, kwargs = with_tensors(concrete.call, concrete.tensors, {})
    names = tuple(p.name for p in spec.parameters)
    try:
        signature = inspect.signature(function)
        plain = all(p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in signature.parameters.values())
        bound = signature.bind(*args, **kwargs) if plain else None
    except (TypeError, ValueError):
        bound = None
    if bound is not None:
        bound.apply_defaults()
        args, kwargs, names = list(bound.args), dict(bound.kwargs), tuple(bound.arguments)
    call = make_call(concrete.call.operator, args, kwargs, concrete.kind)
    return Question(function, replace(call, constants=concrete.constants, compare=concrete.compare), names)
