"""Checks before kernels of torch that do not check what they are given.

A wrong program may hand them anything, and what they then do is not what a deployment would do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from nnscaler.runtime.communicator import ProgramError

_ATTENTION = frozenset({"scaled_dot_product_attention", "_scaled_dot_product_flash_attention_for_cpu"})


class CheckedKernels(TorchFunctionMode):
    """While it is active in a thread, attention raises ProgramError where key and value differ in length.

    On CPUs torch takes the number of keys from the value: with a longer one it reads past the end of the key, and in
    backward it writes there. Where the key is a slice of a longer one, the rows that it lacks lie just there: the loss
    would be right. Other devices, and torch's own fallback, raise.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "").partition(".")[0] in _ATTENTION:
            _check_attention(*args[1:3], **{k: v for k, v in (kwargs or {}).items() if k in ("key", "value")})
        return func(*args, **(kwargs or {}))


def _check_attention(key: Any, value: Any) -> None:
    if isinstance(key, Tensor) and isinstance(value, Tensor) and min(key.dim(), value.dim()) > 1:
        keys, values = key.shape[-2], value.shape[-2]
        if keys != values:
            message = f"attention of {keys} keys and {values} values: {tuple(key.shape)}, {tuple(value.shape)}"
            raise ProgramError(f"{message}; torch does not check this on CPUs")
