"""The same sums in another order: what p ranks, or p micro-batches, do to a run in low precision.

A rank program computes a long sum in parts, rounds each part to the dtype, and adds the parts. The mode below does so
to the eager model, below autograd, forward and backward: it permutes the terms of a sum at random, cuts them into
parts, and adds the parts in the dtype. In exact arithmetic nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
Cut = Callable[[int], list[Tensor]]  # number of terms -> the indices of each part, a random partition of all
LOW = frozenset((torch.bfloat16, torch.float16, torch.float32))


class RulesMode(TorchDispatchMode):
    """While open, every operator of `rules` with a first tensor in low precision runs as its rule says, which is called
    with `aid`, the operator and its arguments."""

    def __init__(self, rules: Mapping[Any, Callable[..., Any]], aid: Callable[..., Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rules, self._aid = rules, aid

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if DTensor in types:
            return NotImplemented  # it calls the operators of its local tensors, which come here
        rule = self._rules.get(func)
        # a mode of functions around this one (`exact`) has had its say: it must not see what autograd asks for
        with torch._C.DisableTorchFunction():
            if rule is None or not _is_low(args):
                return func(*args, **(kwargs or {}))
            return rule(self._aid, func, *args, **(kwargs or {}))


class Reassociated(RulesMode):
    """While open, every sum that has a rule is computed in parts.

    `parts`: the numbers of parts to choose from; a sum of fewer terms than parts is left alone.
    """

    def __init__(self, generator: torch.Generator, parts: Sequence[int]) -> None:
        super().__init__(_RULES, self._cut)
        self._generator = generator
        self._parts = tuple(parts) or (1,)

    def _cut(self, terms: int) -> list[Tensor]:
        choice = int(torch.randint(len(self._parts), (), generator=self._generator))
        parts = min(self._parts[choice], max(terms, 1))
        order = torch.randperm(terms, generator=self._generator)
        return [order[i::parts] for i in range(parts)]


def _is_low(args: Sequence[Any]) -> bool:
    first = next((a for a in args if isinstance(a, Tensor)), None)
    if first is None or isinstance(first, FakeTensor):  # of DTensor, which asks for the shape of a result
        return False
    return first.dtype in LOW and first.device.type != "meta"


def _total(parts: Iterator[Tensor]) -> Tensor:
    total = next(parts)
    for part in parts:
        total = total + part
    return total


def _mm(cut: Cut, func: Any, a: Tensor, b: Tensor) -> Tensor:
    dim = a.dim() - 1
    return _total(func(a.index_select(dim, i), b.index_select(dim - 1, i)) for i in cut(a.shape[dim]))


def _addmm(cut: Cut, func: Any, bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """The bias goes with the first part, as it does where ranks hold parts of the sum."""
    if alpha != 1:
        return func(bias, a, b, beta=beta, alpha=alpha)  # type: ignore[no-any-return]
    plain = aten.mm.default if a.dim() == 2 else aten.bmm.default
    first, *others = cut(a.shape[-1])
    dim = a.dim() - 1

    def parts() -> Iterator[Tensor]:
        yield func(bias, a.index_select(dim, first), b.index_select(dim - 1, first), beta=beta)
        yield from (plain(a.index_select(dim, i), b.index_select(dim - 1, i)) for i in others)

    return _total(parts())


def _reduced(cut: Cut, func: Any, x: Tensor, dim: Sequence[int] | None = None, *rest: Any, **named: Any) -> Tensor:
    """Compute a sum or mean over `dim` (all where there is none), in parts along the longest of these dims.

    A mean is the mean of the parts' means, each with its share of the terms.
    """
    dims = [d % x.dim() for d in dim] if dim else list(range(x.dim()))
    if not dims or x.numel() == 0:
        return func(x, dim, *rest, **named)  # type: ignore[no-any-return]
    along = max(dims, key=lambda d: x.shape[d])
    order = cut(x.shape[along])
    parts = [func(x.index_select(along, i), dims, *rest, **named) for i in order]
    if "mean" in str(func):
        parts = [part * (len(i) / x.shape[along]) for part, i in zip(parts, order, strict=True)]
    return _total(iter(parts))


def _reduced_all(cut: Cut, func: Any, x: Tensor, **named: Any) -> Tensor:
    over = aten.mean.dim if "mean" in str(func) else aten.sum.dim_IntList
    return func(x, **named) if x.dim() == 0 else _reduced(cut, over, x, None, **named)


def _norm(cut: Cut, func: Any, x: Tensor, power: float = 2, dim: Any = None, *rest: Any, **named: Any) -> Tensor:
    """Take the norm of parts along the longest dim, and of these norms another."""
    dims = list(range(x.dim())) if dim is None else [d % x.dim() for d in ([dim] if isinstance(dim, int) else dim)]
    if not dims or x.numel() == 0 or power <= 0:
        return func(x, power, dim, *rest, **named)  # type: ignore[no-any-return]
    along = max(dims, key=lambda d: x.shape[d])
    parts = [func(x.index_select(along, i), power, dims, *rest, **named) for i in cut(x.shape[along])]
    return func(torch.stack(parts), power, [0])  # type: ignore[no-any-return]


def _nll_loss(
    cut: Cut, func: Any, x: Tensor, labels: Tensor, weight: Tensor | None, reduction: int, ignored: int
) -> Any:
    if reduction == 0 or x.dim() != 2:
        return func(x, labels, weight, reduction, ignored)
    parts = [func(x[i], labels[i], weight, reduction, ignored) for i in cut(x.shape[0])]
    parts = [(loss, count) for loss, count in parts if reduction == 2 or float(count) != 0]
    if not parts:
        return func(x, labels, weight, reduction, ignored)
    counted = torch.stack([count for _, count in parts]).sum()
    if reduction == 2:
        return _total(loss for loss, _ in parts), counted
    return _total(loss * float(count / counted) for loss, count in parts), counted


def _embedding_backward(
    cut: Cut, func: Any, gradient: Tensor, indices: Tensor, rows: int, padding: int, by_frequency: bool
) -> Tensor:
    if by_frequency:
        return func(gradient, indices, rows, padding, by_frequency)  # type: ignore[no-any-return]
    flat, where = gradient.reshape(-1, gradient.shape[-1]), indices.reshape(-1)
    return _total(func(flat[i], where[i], rows, padding, False) for i in cut(len(where)))


def _layer_norm_backward(
    cut: Cut, func: Any, gradient: Tensor, x: Tensor, shape: Sequence[int], mean: Tensor, rstd: Tensor, *rest: Any
) -> Any:
    """Cut the rows. `rest`: weight, bias, and which gradients are asked for."""
    if x.dim() == len(shape):
        return func(gradient, x, shape, mean, rstd, *rest)
    order = cut(x.shape[0])
    parts = [func(gradient[i], x[i], shape, mean[i], rstd[i], *rest) for i in order]
    return _by_rows(parts, order)


def _convolution_backward(cut: Cut, func: Any, gradient: Tensor, x: Tensor, *rest: Any) -> Any:
    order = cut(x.shape[0])
    return _by_rows([func(gradient[i], x[i], *rest) for i in order], order)


def _by_rows(parts: Sequence[Sequence[Tensor | None]], order: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Return of each part (gradient of the rows, gradients that are sums over rows): rows put back, sums added."""
    rows = [part[0] for part in parts]
    back = torch.argsort(torch.cat(list(order)))
    first = None if rows[0] is None else torch.cat([r for r in rows if r is not None])[back]
    others = [[part[k] for part in parts] for k in range(1, len(parts[0]))]
    return (first, *(None if o[0] is None else _total(t for t in o if t is not None) for o in others))


_RULES: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        aten.mm.default: _mm,
        aten.bmm.default: _mm,
        aten.addmm.default: _addmm,
        aten.baddbmm.default: _addmm,
        aten.sum.dim_IntList: _reduced,
        aten.mean.dim: _reduced,
        aten.sum.default: _reduced_all,
        aten.mean.default: _reduced_all,
        aten.linalg_vector_norm.default: _norm,
        aten.nll_loss_forward.default: _nll_loss,
        aten.embedding_dense_backward.default: _embedding_backward,
        aten.native_layer_norm_backward.default: _layer_norm_backward,
        aten.convolution_backward.default: _convolution_backward,
    }
)
