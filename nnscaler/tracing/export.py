"""Runs `torch.export` on the loss: quietly, with short errors that name the user's line."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.distributions import Distribution
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from nnscaler.errors import NnscalerError
from nnscaler.tracing.autograd_functions import OpaqueFunction, opaque_autograd_functions
from nnscaler.tracing.locations import location_of_exception

_DATA_DEPENDENT = (GuardOnDataDependentSymNode, DataDependentOutputException, DynamicOutputShapeException)
_HELP_DATA = (
    "the model looks at the values of its data (`.item()`, `if tensor:`, a boolean index). Move that out of the "
    "model, or put it in a function and register it: @nnscaler.register_op"
)
_HELP_BRANCH = "to take the branch that the sample batch takes: the program is then right for such batches only"
_FAKE_CONSTANT = "fake tensor in the exported program constant"
_READS_NUMBER = "Could not extract specialized"
_HELP_OTHER = "if the model runs on this batch without nnscaler, put the part that fails in a function and register it"


def export_loss(
    module: nn.Module, tensors: tuple[Tensor, ...], specialise: bool = False
) -> tuple[ExportedProgram, Mapping[str, OpaqueFunction], tuple[str, ...]]:
    """The training IR of a module that returns its loss, its unregistered autograd.Functions, and notes for the user.

    `specialise`: where the model branches on the values of data, follow the branch that this batch takes (by
    `draft_export`), with a note. Otherwise that is an error: the program would be right for such batches only.
    Raises NnscalerError "trace_failed".
    """
    with opaque_autograd_functions() as opaque:
        try:
            with _quiet():
                program = _export(module, tensors)
            return program, opaque.found, opaque.notes()
        except NnscalerError:
            raise
        except _DATA_DEPENDENT as error:
            if _READS_NUMBER in str(error):  # a draft would keep the number that this batch gives for all steps
                raise _trace_failed(error, _HELP_DATA) from None
            if not specialise:
                raise _trace_failed(error, f"{_HELP_DATA}; or pass --specialise {_HELP_BRANCH}") from None
            first = error
        except Exception as error:  # noqa: BLE001 - export raises whatever the model raises
            raise _trace_failed(error, _HELP_OTHER) from None
        program = _draft(module, tensors, first)
        place = location_of_exception(first)
        branch = "a branch on the values of data; only the one that the sample batch takes is traced"
        note = f"{place or 'the model'}: {branch}"
        return program, opaque.found, (note, *opaque.notes())


def _export(module: nn.Module, tensors: tuple[Tensor, ...]) -> ExportedProgram:
    """torch.export, a second time where it took a constant for a fake tensor.

    Seen once in thousands of exports, in a process that had exported many other programs; the same export passed in
    every other process. The cause is not known; what torch keeps between exports is dropped before the second try,
    and an error that comes again is raised.
    """
    try:
        return torch.export.export(module, tensors, strict=False)
    except RuntimeError as error:
        if _FAKE_CONSTANT not in str(error):
            raise
    FakeTensorMode.cache_clear()
    return torch.export.export(module, tensors, strict=False)


def _draft(module: nn.Module, tensors: tuple[Tensor, ...], first: Exception) -> ExportedProgram:
    if any(t.is_meta for t in (*module.parameters(), *tensors)):
        raise _trace_failed(first, _HELP_DATA) from None
    try:
        with _quiet():
            return torch.export.draft_export(module, tensors, strict=False)
    except NnscalerError:
        raise
    except Exception:  # noqa: BLE001 - the first error is the one to show
        raise _trace_failed(first, _HELP_DATA) from None


def _trace_failed(error: BaseException, help_text: str) -> NnscalerError:
    return NnscalerError(
        "trace_failed",
        f"torch.export cannot trace the model: {_first_line(error)}",
        where=location_of_exception(error),
        help=help_text,
    )


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else ""
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Swallow what export prints and logs: on errors it is the whole graph, thousands of lines."""
    sink: Any = io.StringIO()
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    # checks of torch.distributions look at data, and compute nothing
    validates = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        with contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
        Distribution.set_default_validate_args(validates)
