"""Replace calls that torch.export cannot record by others that compute the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import get_ident
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch._functorch import apis
from torch.fx.experimental.proxy_tensor import (
    PreDispatchTorchFunctionMode,
    ProxyTorchDispatchMode,
    get_proxy_mode,
    make_fx,
)
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten


@contextmanager
def exportable_calls() -> Iterator[None]:
    """Open it around the model's forward, inside of the export."""
    with patch.object(_BatchNorm, "forward", _averaged(_BatchNorm.forward)), _Calls():
        yield


class _Calls(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = _CALLS.get(func)
        return func(*args, **(kwargs or {})) if call is None else call(func, *args, **(kwargs or {}))


def _with_lengths(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Given lengths in a tuple, torch makes a tensor of them and writes to its memory, which a fake one lacks."""
    return func(*(torch.tensor(a) if isinstance(a, list | tuple) else a for a in args), **kwargs)


def _from_a_number_on(func: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The overload of `random_` with a lower bound is called `from`, which no text of Python can name."""
    if len(args) != 2 or args[1] is None:
        return func(tensor, *args, **kwargs)
    low, high = args
    return func(tensor, high - low, **kwargs).add_(low)


def _counted(func: Callable[..., Any], numbers: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Any:
    """How long the result of `bincount` is depends on the largest number; it is taken for smaller than `minlength`,
    and the program fails where one is not."""
    if not minlength:
        return func(numbers, weights)
    if weights is None:
        weights = torch.ones_like(numbers, dtype=torch.int64)
    elif weights.dtype != torch.float32:
        weights = weights.double()
    return weights.new_zeros(minlength).index_add(0, numbers, weights)


def _unchecked(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A check of torch's own that asks whether any value is wrong computes nothing. Other threads ask as ever."""
    here, asked = get_ident(), torch.any

    def answered(*values: Any, **named: Any) -> Any:
        return False if get_ident() == here else asked(*values, **named)

    with patch.object(torch, "any", answered):
        return func(*args, **kwargs)


def _covariance(
    func: Callable[..., Any],
    numbers: Tensor,
    *,
    correction: int = 1,
    fweights: Tensor | None = None,
    aweights: Tensor | None = None,
) -> Tensor:
    """Torch looks at its weights, where there are none as well. What it does not take, it says itself."""
    rows = numbers if numbers.dim() == 2 else numbers.reshape(1, -1)
    given = [w for w in (fweights, aweights) if w is not None]
    fits = all(w.dim() <= 1 and w.numel() == rows.shape[1] for w in given)
    integral = fweights is None or _is_integral(fweights)
    fractional = aweights is None or aweights.is_floating_point()
    if numbers.dim() > 2 or numbers.dtype == torch.bool or not (fits and integral and fractional):
        return func(numbers, correction=correction, fweights=fweights, aweights=aweights)
    weights = None if not given else given[0] if len(given) == 1 else given[0] * given[1]
    if weights is None:
        centred = weighted = rows - rows.sum(1, keepdim=True) / rows.shape[1]  # whole numbers have no `mean`
        divisor: Any = max(rows.shape[1] - correction, 0)
    else:
        total = weights.sum()
        centred = rows - (rows * weights).sum(1, keepdim=True) / total
        weighted = centred * weights
        lost = correction if aweights is None else correction * (weights * aweights).sum() / total
        divisor = (total - lost).clamp(min=0)
    return (weighted @ centred.mT.conj() / divisor).squeeze()


def _is_integral(numbers: Tensor) -> bool:
    return not (numbers.is_floating_point() or numbers.is_complex() or numbers.dtype == torch.bool)


def _correlation(_func: Callable[..., Any], numbers: Tensor) -> Tensor:
    """The covariance over the deviations, within -1 and 1."""
    found = _covariance(torch.cov, numbers)
    if found.dim() == 0:
        return found / found
    deviation = found.diagonal().real.sqrt() if found.is_complex() else found.diagonal().sqrt()
    found = found / deviation[:, None] / deviation
    if not found.is_complex():
        return found.clamp(-1, 1)
    return torch.complex(found.real.clamp(-1, 1), found.imag.clamp(-1, 1))


_CALLS: Mapping[Any, Callable[..., Any]] = {
    torch.cov: _covariance,
    Tensor.cov: _covariance,
    torch.corrcoef: _correlation,
    Tensor.corrcoef: _correlation,
    torch.ctc_loss: _with_lengths,
    F.ctc_loss: _with_lengths,
    Tensor.random_: _from_a_number_on,
    torch.bincount: _counted,
    Tensor.bincount: _counted,
    F.gaussian_nll_loss: _unchecked,
}


def _averaged(forward: Callable[[_BatchNorm, Tensor], Tensor]) -> Callable[[_BatchNorm, Tensor], Tensor]:
    """Return forward of a batch norm whose statistics without a momentum are means over all batches so far: by their
    number as a tensor, where torch takes it as one of Python's."""

    def averaged(self: _BatchNorm, x: Tensor) -> Tensor:
        mean, var, count = self.running_mean, self.running_var, self.num_batches_tracked
        if self.momentum is not None or not self.training or mean is None or var is None or count is None:
            return forward(self, x)
        self._check_input_dim(x)
        count.add_(1)
        before = mean.clone(), var.clone()
        normed = F.batch_norm(x, mean, var, self.weight, self.bias, True, 1.0, self.eps)
        for held, old in zip((mean, var), before, strict=True):
            held.copy_(old + (held - old) / count)
        return normed

    return averaged


# `torch.vmap` inside of a model, as the operators that it comes down to.
# Export records what vmap does to its tensors (adding a dim that only it sees, and taking it away), not the operators
# on the tensors that the model has. So while a model is exported, each outermost call of vmap is traced by itself,
# below vmap, and what that gives is run in its place: the export sees plain operators on tensors with all of their
# dims.

_VMAP = "vmap_impl"  # what every form of vmap calls


@contextmanager
def vmaps_expanded() -> Iterator[None]:
    """Open it around an export."""
    real: Callable[..., Any] = getattr(apis, _VMAP)

    def expanded(func: Callable[..., Any], in_dims: Any, out_dims: Any, *how: Any, **rest: Any) -> Any:
        """In place of `vmap_impl`. `how`: randomness and the chunk size, then the arguments of the function."""
        if get_proxy_mode() is None or in_vmap():
            return real(func, in_dims, out_dims, *how, **rest)
        return _run(lambda args, kwargs: real(func, in_dims, out_dims, *how[:2], *args, **kwargs), how[2:], rest)

    with patch.object(apis, _VMAP, expanded):
        yield


def in_vmap() -> bool:
    """Return whether the running code is traced by itself, for a call of vmap in an export."""
    mode = get_proxy_mode()
    return isinstance(mode, ProxyTorchDispatchMode) and not mode.pre_dispatch


def needs_gradient(tensor: Tensor) -> bool:
    """Return whether the tensor that vmap has wrapped needs a gradient."""
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor.requires_grad


def _run(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Trace the call and run what was traced. Tensors that the function closes over are themselves in the trace."""
    given, form = tree_flatten((args, kwargs))
    results: list[Any] = []

    def on_tensors(*tensors: Tensor) -> list[Any]:
        remaining = iter(tensors)
        again = [next(remaining) if isinstance(value, Tensor) else value for value in given]
        leaves, shape = tree_flatten(call(*tree_unflatten(again, form)))
        results.append(shape)
        return leaves

    tensors = [value for value in given if isinstance(value, Tensor)]
    with _unrecorded():
        traced = make_fx(on_tensors)(*tensors)
    return tree_unflatten(fx.Interpreter(traced).run(*tensors), results[-1])


@contextmanager
def _unrecorded() -> Iterator[None]:
    """Hide from the export what runs inside. Modes of the user stay: they may be what makes the function run."""
    stack = _get_current_function_mode_stack()
    kept = [mode for mode in stack if not isinstance(mode, PreDispatchTorchFunctionMode)]
    _replace_modes(kept)
    try:
        with _disable_current_modes():
            yield
    finally:
        _replace_modes(stack)


def _replace_modes(modes: list[torch.overrides.TorchFunctionMode]) -> None:
    while _get_current_function_mode_stack():
        _pop_mode()
    for mode in modes:
        _push_mode(mode)
