"""`torch.vmap` inside of a model, as the operators that it comes down to.

Export records what vmap does to its tensors (adding a dim that only it sees, and taking it away), not the operators on
the tensors that the model has. So while a model is exported, each outermost call of vmap is traced by itself, below
vmap, and what that gives is run in its place: the export sees plain operators on tensors with all of their dims.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

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
