"""The backward of a micro-batch in two halves: `I`, the gradients of what the stage received, and later `W`, those of
its parameters (Qi et al., Zero Bubble Pipeline Parallelism, 2023).

`nnscaler.backward_halves` says which part of the autograd graph each half runs. I runs the trunk, each node for its
gradients along the trunk alone, and keeps what arrives at the starts. W runs each start once more, for the gradients
that leave the trunk, and what hangs off there. So nothing is computed twice but what a start derives both gradients
from. Every collective runs once: one of an activation lies on the trunk, one of a parameter off it. A Function that is
written in Python computes all of its gradients at once. Where nothing is received there is no trunk, and W is the whole
backward.

Saved values go as backward reads them, as they do without the split; those of starts, and of what hangs off, stay until
W. The values of a recomputed region come back in I, and those of its starts stay.

torch has a helper for the same (`torch.distributed.pipelining._backward`). It is private; it runs the trunk between two
uses of a parameter again in W, collectives included, recomputes a region once for each parameter in it, and keeps every
saved value until W. This one stands on what `torch.autograd.graph` documents: nodes, their hooks, edges, and hooks of
saved tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge, saved_tensors_hooks

from nnscaler.backward_halves import Halves, halves_of
from nnscaler.runtime.communication.sharded_parameter_gathers import ParameterReads
from nnscaler.runtime.saved_tensor_hooks import GONE, SavedValues

Root = tuple[GradientEdge, Tensor]  # where backward enters the graph, and the gradient of that output
Received = tuple[Tensor | None, ...]  # by output of a node, the gradient that arrived


@dataclass(slots=True)
class _Group:
    """A part of the graph that hangs off the trunk in one place, and is run at once.

    leaves   the parameters
    roots    outputs of the stage that lie in it: where its backward begins, with the gradient
    starts   nodes of the trunk that it hangs off, with what arrived at them in I
    """

    leaves: list[Tensor] = field(default_factory=list)
    roots: list[Root] = field(default_factory=list)
    starts: dict[Node, Received] = field(default_factory=dict)

    def run(self) -> None:
        """Add the gradients to those of the parameters."""
        begin = list(self.roots)
        for node, arrived in self.starts.items():
            begin += [(GradientEdge(node, i), gradient) for i, gradient in enumerate(arrived) if gradient is not None]
        if begin and self.leaves:
            edges, gradients = zip(*begin, strict=True)
            torch.autograd.backward(edges, gradients, inputs=self.leaves)


class SplitBackward:
    """The backward of one micro-batch through one stage, whose forward ran inside of `recording()`.

    `received`: the leaves that I computes the gradients of; `parameters`: all others. Both get them in `.grad`.
    `reads`: gathers parameters again that forward has gathered; what I gathers, and W reads too, stays until then.
    """

    def __init__(self, parameters: Sequence[Tensor], reads: ParameterReads | None = None) -> None:
        self._parameters = parameters
        self._saved = SavedValues(reads, once=True)
        self._later: list[_Group] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Run a forward inside whose backward is split."""
        token = _recording.set(self._saved)
        try:
            with self._saved.hooks():
                yield
        finally:
            _recording.reset(token)

    def inputs(self, roots: Sequence[Root], received: Sequence[Tensor]) -> None:
        """Compute the gradients of `received`, from those of the `roots`: I."""
        ends = {get_gradient_edge(tensor).node: tensor for tensor in received}
        below = _below([edge.node for edge, _ in roots])
        halves = halves_of(below, ends.keys(), lambda node: isinstance(node, BackwardCFunction))
        groups = _waiting(below, halves, roots)
        now = [tensor for node, tensor in ends.items() if node in halves.trunk]
        for parameter in self._parameters:
            number = halves.groups.get(get_gradient_edge(parameter).node)
            if number is not None:  # it was read
                (now if number in halves.early else groups[number].leaves).append(parameter)
        self._later = list(groups.values())
        begin = [(edge, gradient) for edge, gradient in roots if not halves.waits(edge.node)]
        if not begin or not now:
            return
        with ExitStack() as hooks:
            for group in self._later:
                for node in group.starts:
                    hooks.callback(node.register_prehook(self._keep(group, node)).remove)
                    hooks.callback(node.register_hook(self._kept).remove)
            starts, gradients = zip(*begin, strict=True)
            torch.autograd.backward(starts, gradients, inputs=now, retain_graph=True)

    def weights(self) -> None:
        """Compute the gradients of the parameters that are still to come: W."""
        while self._later:
            self._later.pop(0).run()  # and let go of its part of the graph

    def _keep(self, group: _Group, node: Node) -> Callable[[Any], None]:
        """Return a hook that keeps what arrives at a start."""

        def keep(arrived: Received) -> None:
            group.starts[node] = tuple(arrived)
            self._saved.keep = True

        return keep

    def _kept(self, *_: Any) -> None:
        self._saved.keep = False


def _below(roots: Sequence[Node]) -> dict[Node, tuple[Node, ...]]:
    """Return the graph below some nodes: each after all those that it leads to."""
    below: dict[Node, tuple[Node, ...]] = {}
    entered: dict[Node, tuple[Node, ...]] = {}
    path = list(reversed(roots))
    while path:
        node = path[-1]
        if node in below:
            path.pop()
        elif node in entered:
            below[node] = entered.pop(node)
            path.pop()
        else:
            found = tuple(dict.fromkeys(n for n, _ in node.next_functions if n is not None))
            entered[node] = found
            path += [n for n in reversed(found) if n not in below]
    return below


def _waiting(below: dict[Node, tuple[Node, ...]], halves: Halves[Node], roots: Sequence[Root]) -> dict[int, _Group]:
    """Return the groups that wait for W, without their leaves, by number, in the order in which I comes to them."""
    groups: dict[int, _Group] = {}
    for edge, gradient in roots:
        if halves.waits(edge.node):
            groups.setdefault(halves.groups[edge.node], _Group()).roots.append((edge, gradient))
    for node in reversed(below):
        for n in below[node] if node in halves.trunk else ():
            if halves.waits(n):
                groups.setdefault(halves.groups[n], _Group()).starts[node] = ()
    return groups


# Regions that are computed again.

_recording: ContextVar[SavedValues | None] = ContextVar("recording", default=None)


def recompute_in_halves(function: Callable[..., Any], tensors: Sequence[Any]) -> tuple[Any] | None:
    """Call `function(*tensors)`, whose activations are computed again in the first half of backward that needs them.

    Returns the result in a tuple; None where no forward is recorded.
    """
    saved = _recording.get()
    if saved is None or not torch.is_grad_enabled():
        return None
    region = _Region(function, tensors, saved)
    with saved_tensors_hooks(region.pack, region.unpack):
        return (function(*tensors),)


class _Stop(Exception):
    """The last value that backward reads was computed again."""


class _Region:
    """A recomputed call: it keeps its arguments instead of its activations, as torch.utils.checkpoint does.

    That one computes a region again in each run of autograd, of which W makes several.
    """

    def __init__(self, function: Callable[..., Any], tensors: Sequence[Any], saved: SavedValues) -> None:
        self._function: Callable[..., Any] | None = function  # until it is computed again
        self._tensors = [(saved.save(t), t.requires_grad) if isinstance(t, Tensor) else (t, None) for t in tensors]
        self._saved = saved
        self._packed: list[tuple[torch.Size, torch.dtype]] = []
        self._values: dict[int, Tensor] = {}
        kinds = sorted({t.device.type for t in tensors if isinstance(t, Tensor)})  # entered in this order: "cpu" first
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in kinds
            if torch.amp.is_autocast_available(kind)
        ]

    def pack(self, value: Tensor) -> int:
        self._packed.append((value.shape, value.dtype))
        return len(self._packed) - 1

    def unpack(self, index: int) -> Tensor:
        if index not in self._values:
            self._compute_again()
        return self._values[index] if self._saved.keep else self._values.pop(index)

    def _compute_again(self) -> None:
        values: list[Tensor] = []

        def collect(value: Tensor) -> None:
            values.append(value.detach())
            if len(values) == len(self._packed):
                raise _Stop

        def refuse(_: None) -> Tensor:
            raise RuntimeError("a recomputed region runs backward itself")

        function, self._function = self._function, None
        if function is None:
            raise RuntimeError(GONE)
        take = self._saved.take
        own = [t if needs is None else take(t).detach().requires_grad_(needs) for t, needs in self._tensors]
        token = _recording.set(self._saved)
        try:
            with ExitStack() as stack:
                stack.enter_context(torch.enable_grad())
                for kind, dtype, enabled in self._autocast:
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
                stack.enter_context(saved_tensors_hooks(collect, refuse))
                function(*own)
        except _Stop:
            pass
        finally:
            _recording.reset(token)
        if [(value.shape, value.dtype) for value in values] != self._packed:
            raise RuntimeError("a recomputed region computes other tensors than in forward")
        self._values, self._tensors = dict(enumerate(values)), []
