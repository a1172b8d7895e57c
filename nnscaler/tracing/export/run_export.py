"""Run `torch.export` on the loss: quietly, with short errors that name the user's line."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses import fake_impls, meta_utils
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.distributions import Distribution
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.nn.utils.rnn import PackedSequence

from nnscaler.errors import NnscalerError, SourceLocation
from nnscaler.exception_in_one_line import in_one_line
from nnscaler.is_user_file import OURS
from nnscaler.runtime.start_autograd import start_autograd
from nnscaler.runtime.training.autocast_on_any_device import AutocastUnknown
from nnscaler.tracing.export.compute_constant_values import KnownValues
from nnscaler.tracing.export.custom_gradients import OpaqueFunction, opaque_autograd_functions
from nnscaler.tracing.export.exportable_calls import exportable_calls, vmaps_expanded
from nnscaler.tracing.export.loss_module import LossModule
from nnscaler.tracing.export.mutated_attributes_and_draws import attributes_kept, buffers_written, draws_kept
from nnscaler.tracing.export.recompute_regions import checkpoints_marked
from nnscaler.tracing.export.selected_rows import keep_rows_in_place
from nnscaler.tracing.export.user_source_locations import TORCH, is_library, location_of_exception
from nnscaler.tracing.float64_run import as_written

# Make a model's own code, and the libraries that it uses, believe that they are not being exported.
# Code that asks `torch.compiler.is_exporting()` or `is_compiling()` takes another path than the one that trains:
# `transformers` makes explicit attention masks, gives up grouped-query attention, or leaves a default mask out.
# Torch itself and registered operators still hear the truth, which they need.

_QUESTIONS = ("is_compiling", "is_exporting")
_FLAGS = ("_is_compiling_flag", "_is_exporting_flag")
_TRANSFORMERS = "transformers.utils.import_utils"


@contextmanager
def as_eager(is_known: Callable[[Any], bool]) -> Iterator[None]:
    """Open it around the model's forward, inside of the export.

    `is_known`: whether a tensor's values are known (`known_values`). `transformers` does not look at the values of
    the fake tensors of an export; it is told that those with known values are real.
    """
    with ExitStack() as stack:
        for name in _QUESTIONS:
            stack.enter_context(patch.object(torch.compiler, name, _for_torch_alone(name)))
        for name in _FLAGS:  # what `from torch.compiler import is_compiling` reads
            stack.enter_context(patch.object(torch.compiler, name, False))
        library = sys.modules.get(_TRANSFORMERS)  # not imported for a model that does without
        if library is not None and hasattr(library, "is_fake_tensor"):
            real = library.is_fake_tensor
            stack.enter_context(patch.object(library, "is_fake_tensor", lambda x: real(x) and not is_known(x)))
        yield


def _for_torch_alone(name: str) -> Callable[[], bool]:
    def answer() -> bool:
        frame = sys._getframe(1)
        while frame.f_code.co_name in _QUESTIONS and frame.f_back is not None:  # the aliases in torch
            frame = frame.f_back
        return frame.f_code.co_filename.startswith((TORCH, *OURS))

    answer.__name__ = name
    return answer


# Shapes of operators whose fake kernel in torch refuses what the real one computes.
# `_ctc_loss`: the table of path sums that it also returns is as wide as the longest target. Nothing that a model
# calls sees that table: for export it may have any width. `_grouped_mm`: the fake kernel asks for bfloat16, which
# GPUs of one kind need; float32 and float16 run on others.


@contextmanager
def more_fake_kernels() -> Iterator[None]:
    """While open, these operators can be exported."""
    aten = torch.ops.aten
    kernels: dict[Any, Any] = {aten._ctc_loss.default: _ctc_loss, aten._ctc_loss.Tensor: _ctc_loss}
    kernels[aten._grouped_mm.default] = _grouped_mm
    with patch.dict(fake_impls.op_implementations_dict, kernels):
        yield


def _ctc_loss(mode: Any, _operator: Any, log_probs: Tensor, targets: Tensor, *_rest: Any, **_named: Any) -> Any:
    """(loss, table of path sums) for `log_probs` (time, batch, classes), or (time, classes) without a batch."""
    batch = log_probs.shape[1:2] if log_probs.ndim == 3 else ()
    with mode:
        return log_probs.new_empty(batch), log_probs.new_empty((*batch, log_probs.shape[0], 2 * targets.shape[-1] + 1))


def _grouped_mm(mode: Any, _operator: Any, a: Tensor, b: Tensor, offs: Tensor | None = None, *_rest: Any) -> Any:
    """(m, k) or (g, m, k) times (k, n) or (g, k, n): a dim that all groups share is summed over, or cut by `offs`."""
    groups: tuple[int, ...] = (a.shape[0],) if a.ndim == 3 else (b.shape[0],) if b.ndim == 3 else ()
    if a.ndim != b.ndim:
        groups = ()
    elif a.ndim == 2 and offs is not None:
        groups = (offs.shape[0],)
    with mode:
        return a.new_empty((*groups, a.shape[-2], b.shape[-1]))


# Values of parameters in a draft. `draft_export` computes values beside the fake tensors, to take the branch that they
# take, but of the module's tensors it copies those alone whose class is Tensor itself: a parameter has what its memory
# held before, and a branch that depends on one is taken by chance.

_COPY = "_safe_copy"


@contextmanager
def parameters_copied() -> Iterator[None]:
    """While open, values that are computed beside fake tensors start from those of the parameters too."""
    with patch.object(meta_utils, _COPY, _copy_values):
        yield


def _copy_values(into: Tensor, source: Tensor | None) -> None:
    if source is not None and type(source) in (Tensor, nn.Parameter):  # no fake tensor: it has no values
        into.copy_(source)


_DATA_DEPENDENT = (GuardOnDataDependentSymNode, DataDependentOutputException, DynamicOutputShapeException)
_HELP_DATA = (
    "the model looks at the values of its data (`.item()`, `if tensor:`, a boolean index). Move that out of the "
    "model, or put it in a function and register it: @nnscaler.register_op"
)
_OR_SPECIALISE = (
    "; or --specialise, of the commands that compile a program, takes the branch that the sample batch takes: the "
    "program is then right for such batches only"
)
_BRANCH = "a branch on the values of data; only the one that the sample batch takes is traced"
_NOT_EAGER = "export cannot follow eager here; traced is what the model does when it is told that it is exported"
_NO_DRAFT = "A model without data (meta device) has no batch whose branch could be taken"
_LABEL = re.compile(r"label|target", re.IGNORECASE)  # in the line that looks at data
_FAKE_CONSTANT = "fake tensor in the exported program constant"
_HELP_LABELS = (
    "the model looks at the values of its labels. Compute the loss outside of it: --loss-fn file.py::loss (in Python "
    "loss_fn=loss), a function loss(outputs, batch); the model is then not given the batch's `labels`"
)
_COUNTS = re.compile(r"expression (Eq|Ne)\(u\d+, u\d+\)")
_HELP_COUNTS = (
    "the numbers of rows that two masks select are compared, and torch.export does not know that they are equal. Where "
    "the masks are one mask, compute it once and select by it twice: `keep = y != 1`, `h[keep]`, `y[keep]`"
)
_HELP_AUTOCAST = (
    "open the region inside of forward, on the device of its tensors: "
    "with torch.autocast(x.device.type, torch.bfloat16): ..."
)
_READS_NUMBER = "Could not extract specialized"
_PAST_AUTOGRAD = (
    "forward goes past autograd, by `.data` or torch.autograd.grad, and torch.export cannot follow it there"
)
_HELP_PAST = (
    "change buffers under `with torch.no_grad():`, and a parameter after the step instead; put what takes a gradient "
    "inside of forward, such as a penalty, in a function and register it: @nnscaler.register_op"
)
_PAST = re.compile(r"\.data\b|autograd\.grad\(")
_PACKED = (
    "forward packs sequences (pack_padded_sequence): how many of them a step of the recurrent layer has is read from "
    "their lengths, and a program has one size for every batch"
)
_HELP_PACKED = (
    "give the layer the padded batch, mask its outputs by the lengths, and take the last of each sequence by gather: "
    "outputs of a layer in one direction are the same; or put the layer with its packing in a function and register "
    "it: @nnscaler.register_op"
)
_HELP_OTHER = "if the model runs on this batch without nnscaler, put the part that fails in a function and register it"


@dataclass(frozen=True)
class Exported:
    """An exported loss.

    program   the training IR
    opaque    by operator, the unregistered autograd.Functions that the program calls
    notes     for the user
    changed   by name, Python attributes that forward changes
    drawn     Python's generators that it draws from
    """

    program: ExportedProgram
    opaque: Mapping[str, OpaqueFunction]
    notes: tuple[str, ...]
    changed: Mapping[str, str]
    drawn: frozenset[str]


def export_loss(module: LossModule, tensors: tuple[Tensor, ...], specialise: bool = False) -> Exported:
    """Export a module that returns its loss to training IR.

    `specialise`: where the model branches on the values of data, follow the branch that this batch takes (by
    `draft_export`), with a note. Otherwise that is an error: the program would be right for such batches only.
    Raises NnscalerError "trace_failed".
    """
    changed, drawn = dict[str, str](), set[str]()  # by the last forward that ran
    with (
        checkpoints_marked() as checkpoints,
        opaque_autograd_functions(checkpoints) as opaque,
        more_fake_kernels(),
        vmaps_expanded(),
    ):
        program, notes = _export_some_way(module, tensors, specialise, changed, drawn)
    notes = (*notes, *checkpoints.notes(), *opaque.notes())
    return Exported(program, opaque.found, notes, changed, frozenset(drawn))


def _export_some_way(
    module: LossModule, tensors: tuple[Tensor, ...], specialise: bool, changed: dict[str, str], drawn: set[str]
) -> tuple[ExportedProgram, tuple[str, ...]]:
    """Export as eager runs; where that fails, as the model runs when it is told that it is exported."""
    eager, exporting = (partial(_around, module.model, changed, drawn, eager) for eager in (True, False))
    module.around = eager
    first = _attempt(module, tensors)
    if isinstance(first, ExportedProgram):
        return first, ()
    module.around = exporting
    second = _attempt(module, tensors)
    if isinstance(second, ExportedProgram):
        return second, (f"{_place(first)}: {_NOT_EAGER} ({type(first).__name__})",)
    if _FAKE_CONSTANT in str(first):
        raise NnscalerError("trace_failed", _PAST_AUTOGRAD, _line_past_autograd(module.model), _HELP_PAST) from None
    if not isinstance(first, _DATA_DEPENDENT):
        raise _trace_failed(first, _HELP_OTHER) from None
    help_text = _help_for_data(first)
    if _READS_NUMBER in str(first):  # a draft would keep the number that this batch gives for all steps
        raise _trace_failed(first, help_text) from None
    if not specialise:
        raise _trace_failed(first, f"{help_text}{_OR_SPECIALISE}") from None
    module.around = eager
    return _draft(module, tensors, first, help_text), (f"{_place(first)}: {_BRANCH}",)


def _help_for_data(error: BaseException) -> str:
    """Return the way out for a model that looks at the values of its data."""
    if _COUNTS.search(str(error)):
        return _HELP_COUNTS
    return _HELP_LABELS if _LABEL.search(_line(error)) else _HELP_DATA


def _attempt(module: LossModule, tensors: tuple[Tensor, ...]) -> ExportedProgram | Exception:
    """Export, and return the program or the exception that export or the model raised. Raises NnscalerError."""
    try:
        with _quiet():
            program = _export(module, tensors)
        keep_rows_in_place(program)
        return program
    except NnscalerError:
        raise
    except AutocastUnknown as error:
        raise NnscalerError("trace_failed", str(error), location_of_exception(error), _HELP_AUTOCAST) from None
    except Exception as error:  # noqa: BLE001 - export raises whatever the model raises
        return error


@contextlib.contextmanager
def _around(model: nn.Module, changed: dict[str, str], drawn: set[str], eager: bool) -> Iterator[None]:
    """Around each forward of the model. Attributes are compared before export puts some of them back."""
    changed.clear()
    with contextlib.ExitStack() as stack:
        stack.enter_context(as_written())
        stack.enter_context(attributes_kept(model, changed))
        stack.enter_context(draws_kept(drawn))
        if eager:
            known = stack.enter_context(KnownValues())
            stack.enter_context(as_eager(known.is_known))
        stack.enter_context(exportable_calls())
        stack.enter_context(buffers_written(model))
        yield


def _line_past_autograd(model: nn.Module) -> SourceLocation | None:
    """Return the first line of a forward of the user's that looks as if it were the cause: export names none."""
    for kind in dict.fromkeys(type(part) for part in model.modules()):
        code = getattr(kind.forward, "__code__", None)
        if code is None or is_library(code.co_filename):
            continue
        lines, first = inspect.getsourcelines(code)
        for number, line in enumerate(lines, first):
            if _PAST.search(line):
                return SourceLocation(code.co_filename, number, line.strip())
    return None


def _line(error: BaseException) -> str:
    where = location_of_exception(error)
    return where.text if where is not None else ""


def _place(error: BaseException) -> str:
    return str(location_of_exception(error) or "the model")


def _export(module: LossModule, tensors: tuple[Tensor, ...]) -> ExportedProgram:
    """torch.export, a second time where it took a constant for a fake tensor.

    Seen once in thousands of exports, in a process that had exported many other programs; the same export passed in
    every other process. The cause is not known; what torch keeps between exports is dropped before the second try,
    and an error that comes again is raised.
    """
    start_autograd()
    try:
        return torch.export.export(module, tensors, strict=False)
    except RuntimeError as error:
        if _FAKE_CONSTANT not in str(error):
            raise
    FakeTensorMode.cache_clear()
    return torch.export.export(module, tensors, strict=False)


def _draft(module: LossModule, tensors: tuple[Tensor, ...], first: Exception, help_text: str) -> ExportedProgram:
    if any(t.is_meta for t in (*module.parameters(), *tensors)):
        raise _trace_failed(first, f"{help_text}. {_NO_DRAFT}") from None
    try:
        with _quiet(), parameters_copied():
            return torch.export.draft_export(module, tensors, strict=False)
    except NnscalerError:
        raise
    except Exception:  # noqa: BLE001 - the first error is the one to show
        raise _trace_failed(first, help_text) from None


def _trace_failed(error: BaseException, help_text: str) -> NnscalerError:
    told = f"torch.export cannot trace the model: {in_one_line(error, 300)}"
    if _packs(error):
        told, help_text = _PACKED, _HELP_PACKED
    return NnscalerError(
        "trace_failed",
        told,
        where=location_of_exception(error),
        help=help_text,
    )


def _packs(error: BaseException) -> bool:
    """Return whether what failed is a call with a packed sequence, whose sizes are numbers in its data."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(isinstance(value, PackedSequence) for frame in frames for value in frame.f_locals.values())


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
