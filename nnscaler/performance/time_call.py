"""Time one call of an operator on this machine, on random tensors, forward and backward."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from op_registry.call import Call, DType, TensorArgument

from nnscaler.ir.operation import Operation
from nnscaler.tracing.infer import dtype_of, is_floating
from nnscaler.tracing.interpret import callable_of

AT_LEAST, AT_MOST = 5, 50  # repetitions
ENOUGH = 0.02  # seconds of forward and backward together, after which no more are made
SMALLEST = 1e-6  # seconds of a backward that is lost in the noise


def time_call(call: Call, needs_grad: Sequence[bool], device: str = "cpu") -> tuple[float, float]:
    """Time forward and backward, in seconds: each the median of some repetitions after one that does not count.

    Of backward, what it takes to start autograd is left out: a step does it once, not for each operator. `needs_grad`:
    of each tensor. Raises what the operator raises.
    """
    place = torch.device(device)
    generator = torch.Generator().manual_seed(0)
    described = call.tensors()
    bound = min((size for t in described if is_floating(t.dtype) for size in t.shape), default=2)
    tensors = [_random(t, bound, generator, place) for t in described]
    leaves = [t.requires_grad_() for t, wanted in zip(tensors, needs_grad, strict=True) if wanted]

    def argument(value: Any) -> Any:
        if isinstance(value, TensorArgument):
            return tensors[value.index]
        if isinstance(value, list | tuple):
            return type(value)(argument(v) for v in value)
        return dtype_of(value.name) if isinstance(value, DType) else value

    args = [argument(a) for a in call.args]
    kwargs = {name: argument(a) for name, a in call.kwargs.items()}
    names = tuple(str(i) for i in range(len(tensors)))
    function = callable_of(Operation("timed", call.operator, names, (), (), ()), True, place)
    with torch.set_grad_enabled(bool(leaves)):
        forward, backward = _repeat(lambda: function(*args, **kwargs), leaves, place)
        return forward, max(SMALLEST, backward - _start_of_autograd(place)) if backward else 0.0


def _start_of_autograd(device: torch.device) -> float:
    """Return the seconds of a backward pass that does nothing."""
    leaf = torch.ones((), device=device, requires_grad=True)
    return _repeat(lambda: leaf.view(()), [leaf], device)[1]


def _repeat(function: Callable[[], Any], leaves: list[Tensor], device: torch.device) -> tuple[float, float]:
    forward: list[float] = []
    backward: list[float] = []
    while len(forward) <= AT_LEAST or (len(forward) <= AT_MOST and sum(forward) + sum(backward) < ENOUGH):
        start = _now(device)
        result = function()
        between = _now(device)
        outputs = result if isinstance(result, list | tuple) else (result,)
        made = [o for o in outputs if isinstance(o, Tensor) and o.requires_grad]
        cotangents = [torch.ones_like(o) for o in made]
        begin = _now(device)
        if made:
            torch.autograd.grad(made, leaves, cotangents, allow_unused=True)
        end = _now(device)
        forward.append(between - start)
        backward.append(end - begin if made else 0.0)
    return median(forward[1:]), median(backward[1:])


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _random(described: TensorArgument, bound: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """Normal numbers; whole ones below every size of the call, so that they are indices of any dim; true."""
    dtype = dtype_of(described.dtype)
    if is_floating(described.dtype):
        return torch.randn(described.shape, generator=generator).to(device, dtype)
    if dtype == torch.bool:
        return torch.ones(described.shape, dtype=dtype, device=device)
    return torch.randint(0, max(bound, 1), described.shape, generator=generator).to(device, dtype)
