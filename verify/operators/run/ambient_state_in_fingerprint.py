"""Collect the ambient state that a fingerprint holds: torch's flags, modes and hooks, and what users put into torch."""

from __future__ import annotations

import functools
import operator
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules import module as hooks
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from nnscaler.is_user_file import is_users
from verify.operators.run.code_identified_by_version import (
    DESCRIPTORS,
    NATIVE,
    has_version,
    is_own_class,
    users_kernels,
)
from verify.operators.run.fingerprint import Opaque

# not the number of threads: operators are verified on one
_FLAGS = (
    "get_default_dtype is_grad_enabled is_inference_mode_enabled is_autocast_cache_enabled is_anomaly_enabled"
    " _get_backcompat_broadcast_warn _get_blas_preferred_backend _get_cpu_allow_fp16_reduced_precision_reduction"
    " _get_cublas_allow_bf16_reduced_precision_reduction _get_cublas_allow_fp16_accumulation"
    " _get_cublas_allow_fp16_reduced_precision_reduction _get_cublas_allow_tf32 _get_cudnn_allow_tf32"
    " _get_cudnn_benchmark _get_cudnn_deterministic _get_cudnn_enabled _get_cudnn_sdp_enabled"
    " _get_deterministic_algorithms _get_deterministic_algorithms_warn_only"
    " _get_deterministic_fill_uninitialized_memory _get_flash_sdp_enabled _get_float32_matmul_precision"
    " _get_linalg_preferred_backend _get_math_sdp_allow_fp16_bf16_reduction _get_math_sdp_enabled"
    " _get_mem_efficient_sdp_enabled _get_miopen_immediate _get_mkldnn_deterministic _get_mkldnn_enabled"
    " _get_nnpack_enabled _get_onednn_allow_tf32 _get_overrideable_sdp_enabled _get_qengine"
).split()
_DEVICES = ("cpu", "cuda")
# modules of torch that compute: what they hold is looked through
_COMPUTING = ("torch.nn.", "torch.autograd.", "torch._C.")
_ALSO = frozenset("torch torch.nn torch.autograd torch.functional torch.linalg torch.fft torch.special".split())
_RENAMED = ("torch", "torch.functional", "torch.nn.functional", "torch._C._nn")  # loaded with torch, always


def surroundings() -> tuple[Any, ...]:
    """Return all of it, for a digest. Raises Opaque where some of it cannot be seen."""
    _check_kernels()
    modes = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
    shown = [f"{type(m)} {getattr(m, 'device', '')}" if is_own_class(type(m)) else m for m in modes]
    computing = {name: vars(sys.modules[name]) for name in _RENAMED} | {"torch.Tensor": vars(torch.Tensor)}
    renamed = {name: ", ".join(_inside(name, held).renamed) for name, held in computing.items()}
    set_hooks = {name: value for name, value in vars(hooks).items() if name.startswith("_global_")}
    return flags(), shown, set_hooks, dict(_of_users()), renamed


def flags() -> dict[str, str]:
    """Return torch's global settings by name."""
    found = {}
    for name in _FLAGS:
        with suppress(AttributeError, RuntimeError):  # of another version of torch; set in two ways that disagree
            found[name] = str(getattr(torch._C, name)())
    for device in _DEVICES:
        found[device] = f"{torch.is_autocast_enabled(device)} {torch.get_autocast_dtype(device)}"
    return found


def _of_users() -> Iterator[tuple[str, Any]]:
    """Yield what a user has put into modules and classes of torch, by name."""
    for name in sorted(name for name in list(sys.modules) if name in _ALSO or name.startswith(_COMPUTING)):
        module = sys.modules.get(name)
        if isinstance(module, types.ModuleType):
            inside = _inside(name, vars(module))
            for attribute in inside.users:
                yield f"{name}.{attribute}", vars(module)[attribute]
            for cls in inside.classes:
                for attribute in _inside(f"{name}.{cls.__qualname__}", vars(cls)).users:
                    yield f"{name}.{cls.__qualname__}.{attribute}", vars(cls)[attribute]


@dataclass(frozen=True, slots=True)
class _Inside:
    """
    values   that a module or class held
    users    the names of a user's among them
    renamed  functions under another name than their own: also those that somebody exchanged
    classes  that the module defines
    """

    values: tuple[Any, ...]
    users: tuple[str, ...]
    renamed: tuple[str, ...]
    classes: tuple[type, ...]


_KNOWN: dict[str, _Inside] = {}  # by name: torch is large, and changes little


def _inside(name: str, held: Mapping[str, Any]) -> _Inside:
    known = _KNOWN.get(name)
    values = tuple(held.values())
    if known is None or len(known.values) != len(values) or not all(map(operator.is_, known.values, values)):
        users = tuple(attribute for attribute, value in list(held.items()) if _is_users(value))
        classes = tuple(value for value in values if isinstance(value, type) and value.__module__ == name)
        functions = ((n, v) for n, v in sorted(held.items()) if isinstance(v, (types.FunctionType, *NATIVE)))
        renamed = tuple(f"{n}: {v.__qualname__}" for n, v in functions if v.__name__ != n)
        known = _KNOWN[name] = _Inside(values, users, renamed, classes)
    return known


def _is_users(value: Any) -> bool:
    while isinstance(value, (*DESCRIPTORS, functools.partial, types.MethodType)):
        value = next((getattr(value, n) for n in ("__func__", "fget", "func") if hasattr(value, n)), None)
    if isinstance(value, types.FunctionType):
        return _is_users_file(value.__code__.co_filename, value.__globals__.get("__name__", ""))
    cls = value if isinstance(value, type) else type(value)
    return _is_users_module(cls.__module__)


@functools.cache
def _is_users_file(file: str, module: str) -> bool:
    typed = file.startswith("<") and module == "__main__"  # in a session of Python
    return typed or is_users(file)


def _is_users_module(name: str) -> bool:
    if name == "__main__":
        return True
    return not has_version(name) and _is_users_file(getattr(sys.modules.get(name), "__file__", None) or "<>", name)


def _check_kernels() -> None:
    """Raise Opaque where a user has given an operator of torch another kernel: nothing tells what it does."""
    for name in _given_kernels(frozenset(torch.library._impls)):
        if users_kernels(name):
            raise Opaque(f"the kernel that was registered for {name}")


@functools.lru_cache(maxsize=1)
def _given_kernels(registered: frozenset[str]) -> tuple[str, ...]:
    """Return the operators of torch that Python code has given kernels, from `aten/relu/CPU` and the like."""
    parts = (entry.split("/") for entry in registered)
    return tuple(sorted({f"aten::{name}" for space, name, *key in parts if space == "aten" and key != ["Meta"]}))
