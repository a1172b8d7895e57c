"""Run a model in float64 throughout, also where its code asks for another floating dtype: the exact run.

In float64 the rounding of two ways to compute one thing is some 1e-15, so that any real difference stands out. Random
numbers are those of a program (`eager_with_program_draws`); without one, nothing is dropped.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from nnscaler.runtime.ops.embedding_and_batch_norm import grouped_mm
from nnscaler.runtime.training.autocast_on_any_device import autocast_on
from nnscaler.tracing.export.independent_module_copies import hidden_modules
from nnscaler.tracing.passes.lower_random_draws import DRAWING, FixedDraws

Draws = AbstractContextManager[Any]  # opened around every function of torch that may draw

# function -> (position of the probability, its name, default)
_DROPOUTS: dict[Any, tuple[int, str, float]] = {
    F.scaled_dot_product_attention: (4, "dropout_p", 0.0),
    F.multi_head_attention_forward: (10, "dropout_p", 0.0),
    torch.dropout: (1, "p", 0.5),
    torch.dropout_: (1, "p", 0.5),
    torch.feature_dropout: (1, "p", 0.5),
    torch.feature_dropout_: (1, "p", 0.5),
    torch.alpha_dropout: (1, "p", 0.5),
    torch.alpha_dropout_: (1, "p", 0.5),
    torch.feature_alpha_dropout: (1, "p", 0.5),
    torch.feature_alpha_dropout_: (1, "p", 0.5),
    F.dropout: (1, "p", 0.5),
    F.dropout1d: (1, "p", 0.5),
    F.dropout2d: (1, "p", 0.5),
    F.dropout3d: (1, "p", 0.5),
    F.alpha_dropout: (1, "p", 0.5),
    F.feature_alpha_dropout: (1, "p", 0.5),
}
_GROUPED: frozenset[Any] = frozenset((F.grouped_mm, torch._grouped_mm))
_NAMED_CASTS = frozenset((Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.double))
# these turn Python numbers into tensors, which a trace records as constants of the model's own dtype
_FROM_DATA = frozenset((torch.tensor, torch.as_tensor, torch.asarray))


def exact_dtype(dtype: torch.dtype, floating: torch.dtype = torch.float64) -> torch.dtype:
    """Return the dtype that stands for `dtype` in an exact run."""
    if dtype.is_floating_point:
        return floating
    if dtype.is_complex:
        return torch.complex128 if floating == torch.float64 else torch.complex64
    return dtype


def exact_tensor(tensor: Tensor, floating: torch.dtype = torch.float64) -> Tensor:
    """Return the tensor in the dtype of an exact run; itself when it has it already."""
    return tensor.to(exact_dtype(tensor.dtype, floating))


def device_of(module: nn.Module | None) -> str:
    """Return the kind of device on which a module computes; the CPU for one without data."""
    found = None if module is None else next(itertools.chain(module.parameters(), module.buffers()), None)
    return "cpu" if found is None or found.is_meta else found.device.type


@contextmanager
def exact(
    module: nn.Module | None = None,
    *,
    dtype: str = "float64",
    dropout: bool = False,
    draws: Draws | None = None,
    generators: bool = False,
    told: torch.dtype | None = None,
    recorded: bool = True,
) -> Iterator[None]:
    """While open, every floating dtype that code asks for is `dtype`, no dropout drops anything (unless asked), and
    other random numbers are those that a program without dropout draws. `draws` gives all random numbers instead;
    `generators`: what code draws from a generator of its own stays as it is. `told`: what a tensor that is asked
    for its dtype answers. With the `own_dtype` of the module, which a trace saw, numbers that follow from it, such as
    `torch.finfo(x.dtype).eps` and those of `torch.tensor(data, dtype=x.dtype)`, are the trace's. `recorded`: Python
    numbers become what a trace records of them, constants of the default dtype; else nothing is rounded.

    `module` is converted, for good: give it a copy.
    """
    dropout = dropout or draws is not None
    floating = getattr(torch, dtype)
    default = torch.get_default_dtype()
    if module is not None:
        _convert(module, floating, dropout)
    torch.set_default_dtype(floating)
    try:
        of_data = default if recorded else floating
        with _running(module, _ExactMode(floating, of_data, dropout, draws, generators, told)):
            yield
    finally:
        torch.set_default_dtype(default)


@contextmanager
def without_dropout(module: nn.Module | None = None, *, generators: bool = False) -> Iterator[None]:
    """While open, no dropout (of `module`) drops anything and random numbers are fixed; dtypes are the model's own.

    `generators`: as for `exact`.
    """
    with _running(module, _ExactMode(None, torch.get_default_dtype(), False, None, generators)):
        yield


@contextmanager
def with_draws(draws: Draws, module: nn.Module | None = None) -> Iterator[None]:
    """While open, `draws` gives all random numbers (of `module`); dtypes are the model's own."""
    with _running(module, _ExactMode(None, torch.get_default_dtype(), True, draws)):
        yield


@contextmanager
def _running(module: nn.Module | None, mode: TorchFunctionMode) -> Iterator[None]:
    """While open, the module runs under the mode, and what its code compiles (torch.compile) runs as it is written:
    compiled code would go on in the dtypes that it was told, over tensors of others, past the end of their memory."""
    with as_written(), autocast_on(device_of(module)), mode:
        yield


def as_written() -> AbstractContextManager[Any]:
    """While open, what torch.compile made runs as it is written."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def run_backward(tensor: Tensor, gradient: Tensor) -> None:
    """`tensor.backward(gradient)` for use inside of the contexts above.

    Torch hands Tensor.backward and torch.autograd.backward to a mode, which is not open while it handles them: what
    activation checkpointing computes again would draw other numbers, in other dtypes. So this asks the engine itself.
    """
    _engine_run_backward((tensor,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def own_dtype(module: nn.Module) -> torch.dtype | None:
    """Return the floating dtype of a module's tensors; None where it has several, or none. Ask it before `exact` is
    opened, which converts them."""
    found = {t.dtype for t in itertools.chain(module.parameters(), module.buffers()) if t.is_floating_point()}
    return found.pop() if len(found) == 1 else None


def convert_floats(module: nn.Module, floating: torch.dtype) -> None:
    """Give the module's parameters and buffers of floating-point dtypes this dtype, complex ones its complex one.

    `module.to` would take the imaginary part from complex ones, such as rotary factors, and make two buffers of one
    that two modules share.
    """
    made: dict[int, tuple[Tensor, Tensor]] = {}  # with the tensor itself: the name of one that is gone may come again

    def converted(tensor: Tensor) -> Tensor:
        return made.setdefault(id(tensor), (tensor, exact_tensor(tensor, floating)))[1]

    module._apply(converted)


def _convert(module: nn.Module, floating: torch.dtype, dropout: bool) -> None:
    convert_floats(module, floating)
    for hidden in hidden_modules(module):
        _convert(hidden, floating, dropout)
    for part in module.modules():
        for name, value in list(vars(part).items()):
            if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):  # not registered
                setattr(part, name, exact_tensor(value, floating))
        if isinstance(part, nn.RNNBase) and not dropout:
            part.dropout = 0.0


class _ExactMode(TorchFunctionMode):
    """`floating` None: dtypes stay as they are. `generators`: draws from a generator that is given are left alone.
    `told`: what tensors of dtype `floating` say of their dtype; None: the truth."""

    def __init__(
        self,
        floating: torch.dtype | None,
        default: torch.dtype,
        dropout: bool,
        draws: Draws | None,
        generators: bool = False,
        told: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._told = told
        self._generators = generators
        self._draws = draws
        self._floating = floating
        self._default = default
        self._dropout = dropout

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        given = list(args)
        if self._draws is not None and (func in _DROPOUTS or func in DRAWING):
            with self._draws:
                return self._run(func, given, named)
        if not self._dropout and func in _DROPOUTS:
            _keep_everything(_DROPOUTS[func], given, named)
        own = self._generators and any(isinstance(value, torch.Generator) for value in (*given, *named.values()))
        if not self._dropout and func in DRAWING and not own:
            with FixedDraws():
                return self._run(func, given, named)
        return self._run(func, given, named)

    def _run(self, func: Callable[..., Any], given: list[Any], named: dict[str, Any]) -> Any:
        """Call `func` with the dtypes of the exact run."""
        floating = self._floating
        if floating is None:
            return func(*given, **named)
        if self._told is not None and getattr(func, "__self__", None) is Tensor.dtype:
            # what torch recomputes in backward it compares with what its hooks saw, which is the truth
            compares = sys._getframe(2).f_code.co_filename in (checkpoint.__file__, __file__)
            return func(*given, **named) if compares else exact_dtype(func(*given, **named), self._told)
        if func is Tensor.new_tensor and self._told is not None:
            named.setdefault("dtype", exact_dtype(given[0].dtype, self._told))
            return exact_tensor(func(*given, **named), floating)
        if func in _FROM_DATA and not (given and isinstance(given[0], Tensor)):
            return exact_tensor(self._as_recorded(func, given, named), floating)
        if func in _GROUPED and given[0].dtype == torch.float64 and (given[0].ndim, given[1].ndim) == (2, 3):
            ends = given[2] if len(given) > 2 else named["offs"]
            return grouped_mm(given[0], given[1], ends)  # torch has no kernel for it
        if func in _NAMED_CASTS:
            return given[0].to(exact_dtype(floating, floating), **named)
        given = [self._mapped(value, floating) for value in given]
        named = {name: self._mapped(value, floating) for name, value in named.items()}
        return _with_wide_tensors(func, given, named, floating)

    def _mapped(self, value: Any, floating: torch.dtype) -> Any:
        return exact_dtype(value, floating) if isinstance(value, torch.dtype) else value

    def _as_recorded(self, func: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Tensor:
        present = torch.get_default_dtype()
        torch.set_default_dtype(self._default)
        try:
            made: Tensor = func(*args, **kwargs)
        finally:
            torch.set_default_dtype(present)
        return made


def _with_wide_tensors(
    func: Callable[..., Any], given: Sequence[Any], named: Mapping[str, Any], floating: torch.dtype
) -> Any:
    """Call `func` with tensors in the dtype of the exact run that no mode saw being made, such as the model's
    `torch.FloatTensor(...)` and tables of its file. What is written into, or looked into, is the tensor itself."""
    wide: dict[int, Tensor] = {}

    def widened(value: Any) -> Any:
        if isinstance(value, list | tuple) and type(value) in (list, tuple):
            return type(value)(map(widened, value))
        plain = type(value) is Tensor and not value.requires_grad
        if plain and exact_dtype(value.dtype, floating) != value.dtype:
            return wide.setdefault(id(value), exact_tensor(value, floating))
        return value

    if _changes_or_describes(func, named):
        return func(*given, **named)
    made = func(*map(widened, given), **{name: widened(value) for name, value in named.items()})
    if not wide:
        return made
    stores = {tensor.untyped_storage().data_ptr() for tensor in wide.values() if tensor.numel()}
    results = made if isinstance(made, list | tuple) else [made]
    if any(type(r) is Tensor and r.untyped_storage().data_ptr() in stores for r in results):
        return func(*given, **named)  # a view: what is written into it is to arrive
    return made


def _changes_or_describes(func: Callable[..., Any], named: Mapping[str, Any]) -> bool:
    """Return whether a function of torch writes into its argument, or says something of it, as `Tensor.dtype` does."""
    name = getattr(func, "__name__", "")
    writes = (name.endswith("_") and not name.endswith("__")) or name.startswith("__i") or "out" in named
    return writes or name in ("__get__", "__set__", "__setitem__", "__delitem__")


def without_drop(func: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> bool:
    """Set the probability in the arguments of a function of torch that drops; return whether it was above 0."""
    if func not in _DROPOUTS:
        return False
    position, name, default = _DROPOUTS[func]
    probability = args[position] if position < len(args) else kwargs.get(name, default)
    _keep_everything(_DROPOUTS[func], args, kwargs)
    return bool(probability > 0)


def _keep_everything(where: tuple[int, str, float], args: list[Any], kwargs: dict[str, Any]) -> None:
    """Set the probability to 0."""
    position, name, _default = where
    if position < len(args):
        args[position] = 0.0
    else:
        kwargs[name] = 0.0
