"""Test a hand-written backward in narrow dtypes: its gradients in float32 and bfloat16 against those in float64.

Differences show nothing in these dtypes, but the formula is the same one: with inputs that every dtype can represent,
and outputs that agree, gradients agree up to rounding. How much rounding can do is measured: the float64 run is
repeated with every intermediate result rounded to the narrow dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from verify.evidence.inputs.concrete_call import ConcreteCall, outputs_of, with_tensors
from verify.evidence.oracle.run_whole_operator import draw_cotangent, gradients_of
from verify.operators.audit.central_differences import moved_from

LIMITS = ((torch.float32, 0.05), (torch.bfloat16, 0.25))  # of the gradient's norm; a halved gradient is off by 0.5
NOISE = 4.0  # times what rounding alone does
SHARE = 0.1  # outputs agree to this share of the limit, or the dtype is too narrow for these inputs
POINTS = ("shrunk", "grown")

Outputs = tuple[Tensor | None, ...]


@dataclass(frozen=True, slots=True)
class Deviation:
    """The gradient of input `index` in `dtype` is off by `relative` of its norm."""

    index: int
    dtype: torch.dtype
    relative: float


@dataclass(frozen=True)
class _NarrowRun:
    function: Callable[..., Any]
    concrete: ConcreteCall
    wanted: frozenset[int]
    seed: int


@dataclass(frozen=True)
class _Reference:
    """The float64 run at one point: its inputs, which every dtype can represent, outputs and gradients."""

    tensors: tuple[Tensor, ...]
    outputs: Outputs
    gradients: Outputs


def deviation(
    function: Callable[..., Any], concrete: ConcreteCall, wanted: Sequence[int], seed: int
) -> Deviation | None:
    """Return the worst deviation beyond the limit at every point; None if there is none, or a dtype cannot be run."""
    subject = _NarrowRun(function, concrete, frozenset(wanted), seed)
    references: dict[str, _Reference] = {}
    for dtype, limit in LIMITS:
        worst: Deviation | None = None
        for way in POINTS:
            try:
                reference = references.get(way) or _reference(subject, way)
                references[way] = reference
                worst = _at(subject, reference, dtype, limit)
            except Exception:  # noqa: BLE001 - kernels need not exist for every dtype
                worst = None
            if worst is None:
                break
        if worst is not None:
            return worst
    return None


def _reference(subject: _NarrowRun, way: str) -> _Reference:
    generator = torch.Generator().manual_seed(subject.seed)
    tensors = tuple(
        moved_from(t, way, generator).to(torch.bfloat16) if t.is_floating_point() else t
        for t in subject.concrete.tensors
    )
    return _Reference(tensors, *_run(subject, tensors, torch.float64))


def _at(subject: _NarrowRun, exact: _Reference, dtype: torch.dtype, limit: float) -> Deviation | None:
    outputs, gradients = _run(subject, exact.tensors, dtype)
    pairs = [(a, b) for a, b in zip(exact.outputs, outputs, strict=False) if a is not None and b is not None]
    if any(not _relative(a, b) <= SHARE * limit for a, b in pairs if a.is_floating_point() and a.numel()):
        return None
    scale = max((float(g.norm()) for g in exact.gradients if g is not None), default=0.0)
    found = [Deviation(i, dtype, _relative(exact.gradients[i], gradients[i], scale)) for i in subject.wanted]
    beyond = [d for d in found if d.relative > limit]
    if not beyond:
        return None
    with _Rounded(dtype):
        _, rounded = _run(subject, exact.tensors, torch.float64)
    noise = {d.index: _relative(exact.gradients[d.index], rounded[d.index], scale) for d in beyond}
    return max((d for d in beyond if d.relative > NOISE * noise[d.index]), key=lambda d: d.relative, default=None)


class _Rounded(TorchDispatchMode):
    """Rounds the float64 results of every operator to another dtype's precision."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.dtype == torch.float64:
                tensor.data.copy_(tensor.to(self.dtype))  # `data`: autograd need not know
        return result


def _run(subject: _NarrowRun, tensors: Sequence[Tensor], dtype: torch.dtype) -> tuple[Outputs, Outputs]:
    """Return outputs and gradients, with the same random numbers and cotangents each time."""
    torch.default_generator.manual_seed(subject.seed)
    cast = [t.to(dtype, copy=True) if t.is_floating_point() else t.clone() for t in tensors]
    leaves = [t.requires_grad_() if i in subject.wanted else t for i, t in enumerate(cast)]
    args, kwargs = with_tensors(subject.concrete.call, [t.clone() for t in leaves], {}, dtype)
    with torch.enable_grad():
        outputs = outputs_of(subject.function(*args, **kwargs))
    generator = torch.Generator().manual_seed(subject.seed)
    cotangents = [None if o is None else draw_cotangent(o, generator) for o in outputs]
    gradients = gradients_of([outputs], [cotangents], [leaves])[0]
    return tuple(None if o is None else o.detach() for o in outputs), gradients


def _relative(exact: Tensor | None, low: Tensor | None, scale: float = 0.0) -> float:
    """Return the norm of the difference, relative to the exact norm or a thousandth of `scale`."""
    if exact is None and low is None:
        return 0.0
    right = torch.zeros_like(low, dtype=torch.float64) if exact is None and low is not None else exact
    found = torch.zeros_like(right) if low is None or right is None else low.to(right.dtype)  # type: ignore[arg-type]
    assert right is not None
    held = torch.isfinite(right)
    gap = float(torch.where(held, found - right, 0.0).norm())
    reference = max(float(torch.where(held, right, 0.0).norm()), 1e-3 * scale)
    return gap / reference if gap and reference else gap
