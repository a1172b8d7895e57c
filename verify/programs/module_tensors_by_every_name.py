"""Yield a module's parameters and buffers by each of their names, whatever a wrapper makes of torch's own ways."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

Kind = Literal["parameter", "buffer"]


def every_parameter(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield every parameter by each of its names. A wrapper may have a `named_parameters` of its own, without torch's
    arguments."""
    named: Any = module.named_parameters
    try:
        inspect.signature(named).bind(remove_duplicate=False)
    except TypeError:
        named = partial(nn.Module.named_parameters, module)
    yield from named(remove_duplicate=False)


def state_of(module: nn.Module) -> Iterator[tuple[str, Tensor, Kind]]:
    """Yield every parameter, then every buffer, by each of its names."""
    for name, parameter in every_parameter(module):
        yield name, parameter, "parameter"
    for name, buffer in module.named_buffers(remove_duplicate=False):
        yield name, buffer, "buffer"
