"""Flatten the nested inputs of a sample batch into named tensors, and rebuild them around other tensors."""

from __future__ import annotations

import inspect
import keyword
import numbers
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor, nn

from op_registry.source_location import definition_of

from nnscaler.errors import NnscalerError
from nnscaler.runtime.nested_values import items_of, leaves_of, map_kind, with_items
from nnscaler.tracing.graph_builder import TensorName


@dataclass(frozen=True)
class SampleInputs:
    """A sample batch as named tensors and the module's arguments.

    The tensors are detached clones: two arguments that share one tensor stay two inputs. Everything else in the
    arguments is a constant of the trace.

    tensors   by name, in order
    args      of the module, with a `TensorName` where a tensor stood
    kwargs    of the module, with a `TensorName` where a tensor stood
    """

    tensors: Mapping[str, Tensor]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def rebuild(self, tensors: Mapping[str, Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the module's arguments with these tensors in their places."""

        def tensor(ref: TensorName) -> Tensor:
            return tensors[ref.name]

        args = map_kind(self.args, TensorName, tensor, anew=True)
        return args, map_kind(dict(self.kwargs), TensorName, tensor, anew=True)


def flatten_inputs(module: nn.Module, sample_inputs: Any) -> SampleInputs:
    """Name the tensors of a sample batch.

    A mapping is passed as keyword arguments and a tuple or list as positional ones; anything else is the only
    argument. Names come from keys, field names and the parameters of `module.forward`: `ids`, `batch_labels`.
    Raises NnscalerError("inputs_differ") where `forward` does not take these arguments.
    """
    tensors: dict[str, Tensor] = {}
    _check_arguments(module, sample_inputs)
    if isinstance(sample_inputs, Mapping):
        kwargs = {str(k): _flatten(v, str(k), tensors) for k, v in sample_inputs.items()}
        return SampleInputs(_owned(tensors), (), kwargs)
    is_plain_sequence = isinstance(sample_inputs, tuple | list) and not hasattr(sample_inputs, "_fields")
    items: Sequence[Any] = sample_inputs if is_plain_sequence else (sample_inputs,)
    names = _positional_names(module, len(items))
    args = tuple(_flatten(v, name, tensors) for v, name in zip(items, names, strict=True))
    return SampleInputs(_owned(tensors), args, {})


def _owned(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def named_tensors(batch: Any, names: Sequence[str]) -> dict[str, Tensor] | None:
    """Return the tensors of a batch that has the form of a sample batch; None where they are not as many.

    `names`: those of the sample's tensors, in order.
    """
    found: dict[str, Tensor] = {}
    items = batch.items() if isinstance(batch, Mapping) else enumerate(batch)
    for key, value in items:
        _flatten(value, str(key) if isinstance(batch, Mapping) else f"input_{key}", found)
    if isinstance(batch, Mapping):
        return {name: found[name] for name in names} if found.keys() >= set(names) else None
    return dict(zip(names, found.values(), strict=True)) if len(found) == len(names) else None


@dataclass(frozen=True)
class BatchConstants:
    """The arguments of a sample batch, whose numbers and texts are constants of the program.

    args       positional ones
    kwargs     by name
    signature  of what takes them; None: not known
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    signature: inspect.Signature | None = None

    @cached_property
    def _wanted(self) -> tuple[tuple[Mapping[str, str], ...], Mapping[str, Mapping[str, str]]]:
        """The constants of each argument, and by name: a batch is checked in every step."""
        positional = tuple(map(_constants, self.args))
        return positional, {**dict(zip(self._names, positional, strict=False)), **_each(self.kwargs)}

    @cached_property
    def _names(self) -> list[str]:
        """The names of positional arguments."""
        return [name for name, parameter in self._parameters.items() if parameter.kind in _POSITIONAL]

    @cached_property
    def _parameters(self) -> Mapping[str, inspect.Parameter]:
        return {} if self.signature is None else self.signature.parameters

    def _pairs(self, batch: Any) -> Iterator[tuple[str, Any, Mapping[str, str]]]:
        """Yield each argument with what it is in a batch, and the constants that it had: where a batch has none, or
        had none, that is forward's default. What has no default, and is left out, is what the program has."""
        positional, named = self._wanted
        if not isinstance(batch, Mapping):
            if len(batch) > len(self._names):
                yield from ((f"item {i}", *pair) for i, pair in enumerate(zip(batch, positional, strict=False)))
                return
            batch = dict(zip(self._names, batch, strict=False))
        given = [name for name in batch if name not in named and self._takes(name)]
        for name in (*named, *given):
            default = self._parameters[name].default if name in self._parameters else _NO_DEFAULT
            if name in batch or (default is not _NO_DEFAULT and _TENSOR not in named[name].values()):
                yield name, batch.get(name, default), named[name] if name in named else _constants(default)

    def _takes(self, name: Any) -> bool:
        return name in self._parameters or any(p.kind == p.VAR_KEYWORD for p in self._parameters.values())

    def check(self, batch: Any) -> None:
        """Check that another batch has the same ones. Raises NnscalerError "batch_differs"."""
        for name, given, wanted in self._pairs(batch):
            found = _constants(given)
            differs = next((path for path in {**wanted, **found} if found.get(path) != wanted.get(path)), None)
            if differs is not None:
                has, had = (constants.get(differs, "nothing") for constants in (found, wanted))
                message = f"the batch has {name}{differs} = {has}, and the program was compiled with {had}"
                help = SAME_ARGUMENTS if _TENSOR in (has, had) else _NUMBERS
                raise NnscalerError("batch_differs", message, help=help)


SAME_ARGUMENTS = (
    "a program takes the same tensors in every batch: give this one in all of them, the first too (a mask of ones, "
    "say), or in none"
)
_NUMBERS = (
    "numbers and texts are constants of a program: make a tensor of what changes (the collate function may), and leave "
    "out what forward does not read"
)
_TENSOR, _NO_DEFAULT = "a tensor", inspect.Parameter.empty
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _each(arguments: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    return {name: _constants(value) for name, value in arguments.items()}


def numbers_and_texts(value: Any) -> list[Any]:
    """Return the numbers (numpy's too) and texts of a nested value, in order."""
    return [leaf for _, leaf in leaves_of(value) if isinstance(leaf, numbers.Number | str | bytes)]


def _constants(value: Any) -> dict[str, str]:
    """Return by place what of a nested value stands in a program: a tensor is one, whatever its numbers."""
    return {
        path: _TENSOR if isinstance(leaf, Tensor) else repr(leaf.tolist() if isinstance(leaf, np.ndarray) else leaf)
        for path, leaf in leaves_of(value)
        if leaf is None or isinstance(leaf, Tensor | np.ndarray | numbers.Number | str | bytes)
    }


def _check_arguments(module: nn.Module, sample_inputs: Any) -> None:
    signature = signature_of(module)
    if signature is None:
        return
    plain = isinstance(sample_inputs, tuple | list) and not hasattr(sample_inputs, "_fields")
    try:
        if isinstance(sample_inputs, Mapping):
            signature.bind(**{str(k): v for k, v in sample_inputs.items()})
        else:
            signature.bind(*(sample_inputs if plain else (sample_inputs,)))
    except TypeError as error:
        raise NnscalerError(
            "inputs_differ",
            f"the batch does not fit {type(module).__name__}.forward{signature}: {error}",
            where=definition_of(module.forward),
            help="a batch has what forward takes and nothing else: a dict by name, or a tuple in its order; or let "
            "forward take the rest, as `**others`",
        ) from None


def signature_of(module: nn.Module) -> inspect.Signature | None:
    """Return the signature of a batch; with a loss outside of the model it is wider than that of `forward`. None where
    it is not written in Python: the call itself will tell."""
    wider: Any = getattr(type(module), "batch_signature", None)
    if isinstance(wider, inspect.Signature):
        return wider
    try:
        return inspect.signature(module.forward)
    except (TypeError, ValueError):
        return None


def _positional_names(module: nn.Module, count: int) -> list[str]:
    signature = signature_of(module)
    names = [] if signature is None else [p.name for p in signature.parameters.values() if p.kind in _POSITIONAL]
    return [names[i] if i < len(names) else f"input_{i}" for i in range(count)]


def _identifier(path: str, taken: Mapping[str, Tensor]) -> str:
    name = re.sub(r"\W", "_", path)
    if not name or name[0].isdigit() or keyword.iskeyword(name):
        name = f"input_{name}"
    number, candidate = 0, name
    while candidate in taken:
        number += 1
        candidate = f"{name}_{number}"
    return candidate


def _flatten(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        name = _identifier(path, tensors)
        tensors[name] = value
        return TensorName(name)
    items = items_of(value)
    if items is None:
        return value
    return with_items(value, {key: _flatten(item, f"{path}_{key}", tensors) for key, item in items.items()})
