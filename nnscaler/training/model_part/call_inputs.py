"""The tensors in a call of a module, by the names that they have in the sample batch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nnscaler.errors import NnscalerError
from nnscaler.runtime.nested_values import items_of
from nnscaler.tracing.graph_builder import TensorName
from nnscaler.tracing.sample_inputs import SampleInputs


@dataclass(frozen=True)
class CallInputs:
    """The form that every call of a module must have.

    name       of the module
    signature  of its forward
    wanted     by argument, with a `TensorName` where a tensor stood in the sample
    kinds      of these tensors: number of dims and dtype
    """

    name: str
    signature: inspect.Signature
    wanted: Mapping[str, Any]
    kinds: Mapping[str, tuple[int, torch.dtype]]

    def named(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the tensors of a call by name. Raises NnscalerError("inputs_differ") for a call of another form."""
        try:
            given = _bound(self.signature, args, kwargs)
        except TypeError as error:
            raise self._differs(f"takes {self.signature}: {error}") from None
        found: dict[str, Tensor] = {}
        self._match(self.wanted, given, "", found)
        return {name: found[name] for name in self.kinds}

    def _match(self, wanted: Any, given: Any, path: str, found: dict[str, Tensor]) -> None:
        if isinstance(wanted, TensorName):
            if not isinstance(given, Tensor):
                raise self._differs(f"takes a tensor as {path}, and was given {type(given).__name__}")
            dims, dtype = self.kinds[wanted.name]
            if given.dim() != dims:
                raise self._differs(f"was compiled for {path} of {dims} dims, and was given {list(given.shape)}")
            if (given.is_floating_point(), given.is_complex()) != (dtype.is_floating_point, dtype.is_complex):
                raise self._differs(f"was compiled for {path} of {dtype}, and was given {given.dtype}")
            found[wanted.name] = given
            return
        pairs, others = items_of(wanted), items_of(given)
        if isinstance(given, Tensor) or (pairs is None) != (others is None):
            raise self._differs(f"was compiled for {path} = {_brief(wanted)}, and was given {_brief(given)}")
        if pairs is None or others is None:
            if type(wanted) is not type(given) or (wanted is not given and wanted != given):
                raise self._differs(f"was compiled for {path} = {wanted!r}, and was given {given!r}")
            return
        if pairs.keys() != others.keys():
            raise self._differs(f"was compiled for {path or 'arguments'} {_keys(pairs)}, and was given {_keys(others)}")
        for key, value in pairs.items():
            self._match(value, others[key], f"{path}[{key!r}]" if path else f"`{key}`", found)

    def _differs(self, why: str) -> NnscalerError:
        help_text = "call it as the sample inputs say; for another form parallelize another part"
        return NnscalerError("inputs_differ", f"the part {self.name} {why}", help=help_text)


def call_inputs(module: nn.Module, sample: SampleInputs) -> CallInputs:
    """Return what a call of the module looks like that has the tensors of the sample."""
    signature = inspect.signature(module.forward)
    kinds = {name: (tensor.dim(), tensor.dtype) for name, tensor in sample.tensors.items()}
    return CallInputs(type(module).__name__, signature, _bound(signature, sample.args, sample.kwargs), kinds)


def _bound(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def _keys(items: Mapping[Any, Any]) -> list[Any]:
    return sorted(items, key=str)


def _brief(value: Any) -> str:
    if isinstance(value, TensorName):
        return "a tensor"
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)}"
    return type(value).__name__
