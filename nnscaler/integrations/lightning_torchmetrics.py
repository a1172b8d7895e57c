"""Metrics of torchmetrics in the steps of a LightningModule: what they are given is a result of the compiled step, and
they are called with it afterwards, on every rank, for the global batch."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter, methodcaller
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from nnscaler.errors import NnscalerError
from nnscaler.runtime.nested_values import leaves_of, map_kind, map_tensors
from nnscaler.tracing.export.user_source_locations import location_of_frames

_METHODS = ("forward", "update", "compute", "reset")


@dataclass(frozen=True)
class MetricCall:
    """A call of a metric in a step, as it was traced.

    path    of the metric in the module
    method  that is called
    given   positional arguments and those by name, with a `MeasuredTensor` in the place of each tensor
    """

    path: str
    method: str
    given: tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class MeasuredTensor:
    """A tensor that a metric is given, by its name among the results of the step."""

    name: str


class MetricValue:
    """A value that a metric returns in a step, or that the step computes of such alone. It is known after the step,
    which can log it and return it.

    path      of the metric
    function  of the values that the calls of the step have returned
    """

    def __init__(self, path: str, function: Callable[[Sequence[Any]], Any]) -> None:
        self.path, self.function = path, function

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> MetricValue:
        return _computed(function, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in _TENSOR_METHODS:
            raise self.refused()
        return lambda *args, **kwargs: _computed(methodcaller(name, *args, **kwargs), (self,), {})

    def refused(self) -> NnscalerError:
        """Return the error for a step that has to know it."""
        message = f"the step computes with what the metric `{self.path}` returns, which is known after the step alone"
        help = "log it or return it; to compute with it, call its function of torchmetrics.functional"
        return NnscalerError("trace_failed", message, help=help)


@dataclass(frozen=True)
class _Computed:
    """A function of the values of a step, which can be sent: `function` of arguments, some of which are such values."""

    function: Callable[..., Any]
    args: Any
    kwargs: Any

    def __call__(self, values: Sequence[Any]) -> Any:
        args, kwargs = map_kind((self.args, self.kwargs), MetricValue, lambda value: value.function(values))
        return self.function(*args, **kwargs)


def _computed(function: Any, args: Any, kwargs: Any) -> MetricValue:
    """Return what comes of values of metrics. Raises NnscalerError("trace_failed") where a tensor is among them."""
    leaves = [leaf for _, leaf in leaves_of((args, kwargs))]
    first = next(leaf for leaf in leaves if isinstance(leaf, MetricValue))
    if any(isinstance(leaf, Tensor) for leaf in leaves):
        raise first.refused()
    return MetricValue(first.path, _Computed(function, args, kwargs))


def _operator(name: str) -> Callable[..., MetricValue]:
    function = getattr(operator, name, None)
    if function is not None:
        return lambda self, *others: _computed(function, (self, *others), {})
    swapped = getattr(operator, name.replace("__r", "__", 1))
    return lambda self, other: _computed(swapped, (other, self), {})


def _refusing(self: MetricValue, *_: Any) -> Any:
    raise self.refused()


for _use in "add radd sub rsub mul rmul truediv rtruediv pow neg abs getitem lt le gt ge".split():
    setattr(MetricValue, f"__{_use}__", _operator(f"__{_use}__"))
for _use in "bool float int index format len iter contains".split():
    setattr(MetricValue, f"__{_use}__", _refusing)
_TENSOR_METHODS = frozenset("item tolist detach clone cpu to float double mean sum max min abs sqrt log exp".split())


@contextmanager
def metrics_recorded(module: nn.Module, calls: list[MetricCall], measured: dict[str, Tensor]) -> Iterator[None]:
    """Take down calls of the module's metrics, in the place of making them. `measured` gets the tensors that they are
    given, by name. Raises NnscalerError "trace_failed" for a metric that is made here."""

    def recording(path: str, metric: Metric | MetricCollection, method: str) -> Callable[..., Any]:
        def record(*args: Any, **kwargs: Any) -> Any:
            def slot(value: Tensor) -> MeasuredTensor:
                name = f"{len(measured)} of {path}"
                measured[name] = value.detach()
                return MeasuredTensor(name)

            calls.append(MetricCall(path, method, map_tensors((args, kwargs), slot)))
            if method in ("update", "reset"):
                return None
            number = len(calls) - 1
            found = MetricValue(path, itemgetter(number))
            if isinstance(metric, Metric):
                return found
            return {str(key): found[str(key)] for key in metric.keys(keep_base=False)}  # type: ignore[index]

        return record

    found = [(path, part) for path, part in module.named_modules() if isinstance(part, Metric | MetricCollection)]
    before = [{name: vars(part)[name] for name in _METHODS if name in vars(part)} for _, part in found]
    for path, part in found:
        vars(part).update({name: recording(path, part, name) for name in _METHODS})
    try:
        with patch.object(Metric, "__init__", _made_in_step):
            yield
    finally:
        for (_, part), kept in zip(found, before, strict=True):
            for name in _METHODS:
                del vars(part)[name]
            vars(part).update(kept)


def _made_in_step(metric: Metric, *_: Any, **__: Any) -> None:
    kind = type(metric).__name__
    message = f"the step makes a {kind}, which is a new one in every step and keeps nothing of the others"
    help = (
        f"make it in the module's __init__, as `self.metric = {kind}(...)`, or call its function of "
        "torchmetrics.functional"
    )
    raise NnscalerError("trace_failed", message, location_of_frames(), help)


class Metrics:
    """The metrics of a module that is trained: each rank gives them the global batch."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._alone: list[tuple[Any, Any]] = []  # a metric, and what it asked for other ranks before

    def run(self, calls: Sequence[MetricCall], measured: Mapping[str, Tensor]) -> list[Any]:
        """Make the calls of a step, and return what each returns. `measured`: the tensors that they are given."""
        return [self._run(call, measured) for call in calls]

    def _run(self, call: MetricCall, measured: Mapping[str, Tensor]) -> Any:
        metric = self._module.get_submodule(call.path)
        parts: list[Any] = [part for part in metric.modules() if isinstance(part, Metric)]
        for part in parts:
            if part.distributed_available_fn is not _nobody:
                self._alone.append((part, part.distributed_available_fn))
                part.distributed_available_fn = _nobody

        def tensor(given: MeasuredTensor) -> Tensor:
            return measured[given.name].to(parts[0].device)

        args, kwargs = map_kind(call.given, MeasuredTensor, tensor)
        return getattr(metric, "__call__" if call.method == "forward" else call.method)(*args, **kwargs)

    def release(self) -> None:
        """Let the metrics add up over ranks again."""
        for part, asked in self._alone:
            part.distributed_available_fn = asked
        self._alone = []


def _nobody() -> bool:
    """Return that there are no other ranks whose counts are to be added."""
    return False
