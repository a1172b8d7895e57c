"""Semantics of convolutions and of unfolding windows, written out as sums over links.

A link says that place s of the small side (the output of a convolution, the input of a transposed one) meets place l of
the large side through entry k of the kernel: l = s * stride - padding + k * dilation, in every dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType
from typing import Any

import numpy as np

from verify.evidence.smt.element_arithmetic import Element, Numbers
from verify.evidence.smt.semantics.element_arrays import Array, Given, Rule, array, each

At = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KernelWindow:
    """How a kernel moves, one number per spatial dim."""

    kernel: At
    stride: At
    padding: At
    dilation: At

    def links(self, small: Sequence[int], large: Sequence[int]) -> Iterator[tuple[At, At, At]]:
        """Yield every (s, k, l) with l inside the large side."""
        for s in product(*map(range, small)):
            for k in product(*map(range, self.kernel)):
                steps = zip(s, k, self.stride, self.padding, self.dilation, strict=True)
                at = tuple(a * stride - pad + b * dilation for a, b, stride, pad, dilation in steps)
                if all(0 <= a < size for a, size in zip(at, large, strict=True)):
                    yield s, k, at


@dataclass(frozen=True)
class Convolution:
    """Channels of a convolution: `weight` is [small channels, large channels of a group, *kernel]."""

    al: Numbers
    window: KernelWindow
    groups: int

    def to_small(self, large: Array, weight: Array, small: Sequence[int]) -> Array:
        """[batch, large channels, *] -> [batch, small channels, *small]."""
        links = list(self.window.links(small, large.shape[2:]))
        terms: dict[At, list[Element]] = {
            (b, c, *s): [] for b in range(len(large)) for c in range(len(weight)) for s in product(*map(range, small))
        }
        for c, inner, outer in self._channels(weight):
            for b in range(len(large)):
                for s, k, at in links:
                    terms[b, c, *s].append(self.al.multiply(large[b, outer, *at], weight[c, inner, *k]))
        return self._summed(terms, (len(large), len(weight), *small))

    def to_large(self, small: Array, weight: Array, large: Sequence[int]) -> Array:
        """[batch, small channels, *] -> [batch, large channels, *large]."""
        channels = weight.shape[1] * self.groups
        links = list(self.window.links(small.shape[2:], large))
        terms: dict[At, list[Element]] = {
            (b, c, *s): [] for b in range(len(small)) for c in range(channels) for s in product(*map(range, large))
        }
        for c, inner, outer in self._channels(weight):
            for b in range(len(small)):
                for s, k, at in links:
                    terms[b, outer, *at].append(self.al.multiply(small[b, c, *s], weight[c, inner, *k]))
        return self._summed(terms, (len(small), channels, *large))

    def to_weight(self, small: Array, large: Array, weight: Array) -> Array:
        """Return the gradient of the weight."""
        links = list(self.window.links(small.shape[2:], large.shape[2:]))
        terms: dict[At, list[Element]] = {at: [] for at in np.ndindex(weight.shape)}
        for c, inner, outer in self._channels(weight):
            for b in range(len(small)):
                for s, k, at in links:
                    terms[c, inner, *k].append(self.al.multiply(small[b, c, *s], large[b, outer, *at]))
        return self._summed(terms, weight.shape)

    def _channels(self, weight: Array) -> Iterator[tuple[int, int, int]]:
        """(small channel, large channel within the group, large channel)."""
        per_group = len(weight) // self.groups
        for c in range(len(weight)):
            for inner in range(weight.shape[1]):
                yield c, inner, c // per_group * weight.shape[1] + inner

    def _summed(self, terms: Mapping[At, list[Element]], shape: Sequence[int]) -> Array:
        return array([self.al.sum(found) for found in terms.values()], shape)


def _convolution_of(al: Numbers, given: Given) -> Convolution:
    spatial = given["weight"].ndim - 2
    window = KernelWindow(
        given["weight"].shape[2:],
        _per_dim(given["stride"], spatial),
        _per_dim(given["padding"], spatial),
        _per_dim(given["dilation"], spatial),
    )
    return Convolution(al, window, given["groups"])


def _per_dim(value: Sequence[int], spatial: int) -> At:
    """Expand one number to all dims."""
    return tuple(value) * spatial if len(value) == 1 else tuple(value)


def _convolution(al: Numbers, given: Given) -> Array:
    convolution, bias = _convolution_of(al, given), given["bias"]
    run = convolution.to_large if given["transposed"] else convolution.to_small
    result = run(given["input"], given["weight"], given.shape[2:])
    if bias is None:
        return result
    return each(al.add, result, bias.reshape(1, -1, *(1,) * (result.ndim - 2)))


def _convolution_backward(al: Numbers, given: Given) -> tuple[Array | None, ...]:
    convolution, grad, x, weight = _convolution_of(al, given), given["grad_output"], given["input"], given["weight"]
    wanted = given["output_mask"]
    grad_x = grad_weight = grad_bias = None
    if wanted[0]:
        run = convolution.to_small if given["transposed"] else convolution.to_large
        grad_x = run(grad, weight, x.shape[2:])
    if wanted[1]:
        small, large = (x, grad) if given["transposed"] else (grad, x)
        grad_weight = convolution.to_weight(small, large, weight)
    if wanted[2]:
        grad_bias = array([al.sum(list(grad[:, c].reshape(-1))) for c in range(grad.shape[1])], (grad.shape[1],))
    return grad_x, grad_weight, grad_bias


def _unfold_window(given: Given) -> KernelWindow:
    return KernelWindow(*(tuple(given[key]) for key in ("kernel_size", "stride", "padding", "dilation")))


def _columns(window: KernelWindow, size: Sequence[int]) -> At:
    """Return the number of positions of the window in each dim."""
    every = zip(size, window.kernel, window.stride, window.padding, window.dilation, strict=True)
    return tuple((n + 2 * pad - dilation * (k - 1) - 1) // stride + 1 for n, k, stride, pad, dilation in every)


def _last(*places: At) -> Any:
    """Return an index into the last dims."""
    return (..., *(i for place in places for i in place))


def _im2col(_al: Numbers, given: Given) -> Array:
    """[*, c, h, w] -> [*, c kh kw, windows]."""
    window, x = _unfold_window(given), given["self"]
    size, steps = x.shape[-2:], _columns(_unfold_window(given), x.shape[-2:])
    result = np.full((*x.shape[:-2], *window.kernel, *steps), 0, dtype=object)
    for s, k, at in window.links(steps, size):
        result[_last(k, s)] = x[_last(at)]
    return result.reshape(given.shape)


def _col2im(al: Numbers, given: Given) -> Array:
    """Return the sum of overlapping windows: [*, c kh kw, windows] -> [*, c, h, w]."""
    window, size = _unfold_window(given), tuple(given["output_size"])
    steps = _columns(window, size)
    x = given["self"].reshape(*given.shape[:-2], *window.kernel, *steps)
    result = np.full(given.shape, 0, dtype=object)
    for s, k, at in window.links(steps, size):
        result[_last(at)] = each(al.add, result[_last(at)], x[_last(k, s)])
    return result


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "aten.convolution.default": _convolution,
        "aten.convolution_backward.default": _convolution_backward,
        "aten.im2col.default": _im2col,
        "aten.col2im.default": _col2im,
    }
)
