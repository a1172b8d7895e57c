"""Run a trace on elements instead of tensors.

Every storage is a list of elements, and every tensor a way of looking at one: views and writes through views come out
right by construction, and only what makes new values needs semantics (`semantics/`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verify.evidence.smt.element_arithmetic import Numbers, Unsupported, kind_of_dtype, literal
from verify.evidence.smt.semantics import (
    convolution_and_unfold,
    factories_copies_and_cat,
    indexing,
    pointwise,
    reductions_and_products,
    softmax_norms_and_losses,
)
from verify.evidence.smt.semantics.element_arrays import Array, Given, Rule
from verify.evidence.smt.storage_trace import StoragePlace, StorageStep, StorageTrace

# The semantics of ATen operators on elements: one table. Views need none.
# Each entry is tested against torch on random numbers: a published prover had a wrong SiLU, and nobody noticed.

RULES: Mapping[str, Rule] = MappingProxyType(
    {
        **pointwise.RULES,
        **reductions_and_products.RULES,
        **factories_copies_and_cat.RULES,
        **indexing.RULES,
        **convolution_and_unfold.RULES,
        **softmax_norms_and_losses.RULES,
    }
)


def rule_of(operator: str) -> Rule | None:
    """Return the semantics of `aten.add.Tensor`; None if there are none."""
    return RULES.get(operator)


@dataclass(frozen=True, slots=True)
class Values:
    """The results of a trace.

    outputs      one per output; None where there is no tensor
    gradients    one per input; None where there is none
    unexpressed  why gradients are missing; empty if they are not
    """

    outputs: tuple[Array | None, ...]
    gradients: tuple[Array | None, ...]
    unexpressed: str = ""


def interpret(
    trace: StorageTrace,
    algebra: Numbers,
    inputs: Sequence[Array],
    cotangents: Sequence[Array | None] = (),
    backward: bool = True,
) -> Values:
    """Return the outputs and, if `backward`, every input's gradient. `inputs` and `cotangents` have the places' shapes.

    Raises Unsupported for an operator of the forward pass that has no semantics; for one of the backward pass it says
    so in the result.
    """
    memory = _Memory(trace, algebra)
    for place, array in zip(trace.inputs, inputs, strict=True):
        memory.write(place, array)
    for step in trace.steps[: trace.forward]:
        _run(step, memory, algebra)
    outputs = tuple(memory.read(p) if p is not None else None for p in trace.outputs)
    nothing: tuple[Array | None, ...] = (None,) * len(trace.inputs)
    if not backward or all(p is None for p in trace.gradients):
        return Values(outputs, nothing)
    for end, given in zip(trace.cotangents, cotangents, strict=True):
        if end is not None and given is not None:
            memory.write(end, given)
    try:
        for step in trace.steps[trace.forward :]:
            _run(step, memory, algebra)
    except Unsupported as reason:
        return Values(outputs, nothing, str(reason))
    return Values(outputs, tuple(memory.read(p) if p is not None else None for p in trace.gradients))


class _Memory:
    """The elements of every storage; None where nothing was written."""

    def __init__(self, trace: StorageTrace, algebra: Numbers) -> None:
        self.algebra = algebra
        self.storages: dict[int, NDArray[np.object_]] = {}
        self.sizes = trace.sizes
        self.constants = trace.constants

    def _storage(self, number: int) -> NDArray[np.object_]:
        if number not in self.storages:
            flat = np.empty(self.sizes[number], dtype=object)
            if number in self.constants:
                flat[:] = [literal(value) for value in self.constants[number]]
            self.storages[number] = flat
        return self.storages[number]

    def read(self, place: StoragePlace) -> Array:
        at = positions(place.offset, place.shape, place.stride)
        return self._storage(place.storage)[at.reshape(-1)].reshape(place.shape)

    def write(self, place: StoragePlace, array: Array) -> None:
        """Write an array to a tensor. Raises Unsupported if the array's shape is not the tensor's."""
        if array.shape != place.shape:
            raise Unsupported(f"its semantics here give shape {array.shape}, torch {place.shape}")
        kind = kind_of_dtype(place.dtype)
        flat = np.empty(array.size, dtype=object)
        flat[:] = [None if e is None else self.algebra.cast(e, kind) for e in array.reshape(-1)]
        at = positions(place.offset, place.shape, place.stride)
        self._storage(place.storage)[at.reshape(-1)] = flat


@lru_cache(maxsize=4096)
def positions(offset: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> NDArray[np.int64]:
    """Return the place in its storage of each element of a tensor."""
    if not prod(shape):
        return np.zeros(shape, dtype=np.int64)
    found = np.full(shape, offset, dtype=np.int64)
    for dim, (size, step) in enumerate(zip(shape, stride, strict=True)):
        found += (np.arange(size) * step).reshape([-1 if d == dim else 1 for d in range(len(shape))])
    found.setflags(write=False)
    return found


def _run(step: StorageStep, memory: _Memory, algebra: Numbers) -> None:
    name = step.operator
    rule = rule_of(name)
    if rule is None:
        raise Unsupported(f"{name} has no semantics here")
    given = Given({key: _value(value, memory) for key, value in step.arguments.items()}, step.outputs)
    try:
        result = rule(algebra, given)
    except Unsupported as reason:
        raise Unsupported(f"{name}: {reason}") from None
    results = result if isinstance(result, tuple) else (result,)
    if step.written:
        assert results[0] is not None
        memory.write(step.arguments[step.written], results[0])
        return
    for place, array in zip(step.outputs, results, strict=True):
        if place is not None and array is not None:
            memory.write(place, array)


def _value(value: Any, memory: _Memory) -> Any:
    if isinstance(value, StoragePlace):
        return memory.read(value)
    if isinstance(value, list):
        return [_value(item, memory) for item in value]
    return literal(value) if isinstance(value, float) else value
