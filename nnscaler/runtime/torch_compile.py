"""Compile the forward of stages with torch.compile, around what it cannot look into.

What communicates, and what draws random numbers, stays as it is written: torch.compile ends a graph before it and
begins another one after it. So every call is made, by the communicator that the executor was given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Function = Callable[..., Any]


def _call(function: Function, *arguments: Any) -> Any:
    return function(*arguments)


# What `apart` calls with. Another one comes in when something is compiled: to import the compiler takes seconds.
_call_with: dict[str, Function] = {"apart": _call}


def apart(function: Function, *arguments: Any) -> Any:
    """Call `function(*arguments)` outside of what is compiled."""
    return _call_with["apart"](function, *arguments)


def unseen(function: Function) -> Function:
    """Return the function as torch.compile leaves it alone, where something is compiled."""
    return function if _call_with["apart"] is _call else torch.compiler.disable(function)


def compiled(forward: Function, *constant: Function, several: bool) -> Function:
    """Return a compiled forward. `constant`: functions whose results are constants of it.

    `several`: other ranks compile the same. What ranks hold in common must stay equal bit for bit, and kernels that
    each rank chooses by its own timings sum in orders of their own: none is chosen so then.
    """
    if _call_with["apart"] is _call:
        _call_with["apart"] = torch.compiler.disable(_call)
    for function in constant:
        torch.compiler.assume_constant_result(function)
    return torch.compile(forward, dynamic=False, options={"deterministic": True} if several else None)
