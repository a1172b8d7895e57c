"""The backward of a micro-batch in two halves: `I`, the gradients of what the stage received, and later `W`, those of
its parameters (Qi et al., Zero Bubble Pipeline Parallelism, 2023).

Of the autograd graph, the nodes that lead to a received tensor are the *trunk*; what hangs off it leads to parameters
only. I runs the trunk, each node for its gradients along the trunk alone, and keeps what arrives at the nodes that
parameters hang off (`starts`). W runs each start once more, for the gradients that leave the trunk, and what hangs off.
So nothing is computed twice but what a start derives both gradients from, and every collective runs once: one of an
activation lies on the trunk, one of a parameter off it.

What hangs off falls into groups that share no node. A group can wait for W if none of its starts leads to another one
along the trunk: autograd started at the upper one would run through the lower one again and count it twice. A group
that cannot (a parameter that is used again further down), or that hangs off a Function written in Python, which
computes all of its gradients at once, is run whole in I. Those that can and share a start are one. Where nothing is
received there is no trunk, and W is the whole backward.

Saved values go as backward reads them, as they do without the split; those of starts, and of what hangs off, stay until
W. The values of a recomputed region come back in I, and those of its starts stay.

torch has a helper for the same (`torch.distributed.pipelining._backward`). It is private; it runs the trunk between two
uses of a parameter again in W, collectives included, recomputes a region once for each parameter in it, and keeps every
saved value until W. This one stands on what `torch.autograd.graph` documents: nodes, their hooks, edges, and hooks of
saved tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge, saved_tensors_hooks

Root = tuple[Tensor, Tensor]  # an output and its gradient
Received = tuple[Tensor | None, ...]  # by output of a node, the gradient that arrived


@dataclass(slots=True)
class _Group:
    """What hangs off the trunk in one place, and is run at once.

    leaves   the parameters
    roots    outputs of the stage that lie in it: where its backward begins, with the gradient
    starts   nodes of the trunk that it hangs off, with what arrived at them in I
    """

    leaves: list[Tensor] = field(default_factory=list)
    roots: list[tuple[GradientEdge, Tensor]] = field(default_factory=list)
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
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._saved = _SavedValues()
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
        leaves = {get_gradient_edge(p).node: p for p in self._parameters if p.requires_grad}
        trunk_ends = {get_gradient_edge(tensor).node: tensor for tensor in received}
        edges = [(get_gradient_edge(value), gradient) for value, gradient in roots]
        graph = _Graph([edge.node for edge, _ in edges], trunk_ends)
        groups = _groups(graph, leaves, edges)
        now = [tensor for node, tensor in trunk_ends.items() if node in graph.trunk]
        now += [leaf for group in groups if not group.starts and not group.roots for leaf in group.leaves]
        self._later = [group for group in groups if group.starts or group.roots]
        waiting = {edge.node for group in self._later for edge, _ in group.roots}
        begin = [(edge, gradient) for edge, gradient in edges if edge.node not in waiting]
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


class _Graph:
    """The part of autograd's graph below some nodes.

    nodes  all, each after those that it leads to
    trunk  those that lead to one of the `ends`
    """

    def __init__(self, roots: Sequence[Node], ends: Mapping[Node, Tensor]) -> None:
        self.below: dict[Node, tuple[Node, ...]] = {}  # in the order of `nodes`
        open_nodes: dict[Node, tuple[Node, ...]] = {}
        path = list(reversed(roots))
        while path:
            node = path[-1]
            if node in self.below:
                path.pop()
            elif node in open_nodes:
                self.below[node] = open_nodes.pop(node)
                path.pop()
            else:
                found = tuple(dict.fromkeys(n for n, _ in node.next_functions if n is not None))
                open_nodes[node] = found
                path += [n for n in reversed(found) if n not in self.below]
        self.trunk: set[Node] = set()
        for node, found in self.below.items():
            if node in ends or any(n in self.trunk for n in found):
                self.trunk.add(node)


def _groups(graph: _Graph, leaves: Mapping[Node, Tensor], roots: Sequence[tuple[GradientEdge, Tensor]]) -> list[_Group]:
    """Return what hangs off the trunk; groups that cannot wait have neither roots nor starts."""
    numbers = _numbered(graph, lambda _: False)
    apart = _early(graph, numbers)  # or a shared bias would hold back the weights beside it
    numbers = _numbered(graph, lambda node: not apart >> numbers[node] & 1)
    early = _early(graph, numbers)
    groups: dict[int, _Group] = {}
    for node, number in numbers.items():
        group = groups.setdefault(number, _Group())
        if node in leaves:
            group.leaves.append(leaves[node])
    for node in reversed(graph.below):  # in which I comes to them
        for n in graph.below[node] if node in graph.trunk else ():
            if n not in graph.trunk and not early >> numbers[n] & 1:
                groups[numbers[n]].starts[node] = ()
    for edge, gradient in roots:
        if edge.node not in graph.trunk and not early >> numbers[edge.node] & 1:
            groups[numbers[edge.node]].roots.append((edge, gradient))
    return list(reversed(groups.values()))


def _early(graph: _Graph, numbers: Mapping[Node, int]) -> int:
    """Return the groups that cannot wait for W, each as a bit."""
    early = 0
    reach: dict[Node, int] = {}  # node of the trunk -> the groups that it leads to
    for node, found in graph.below.items():
        if node in graph.trunk:
            own = below = 0
            for n in found:
                if n in graph.trunk:
                    below |= reach[n]
                else:
                    own |= 1 << numbers[n]
            early |= own if isinstance(node, BackwardCFunction) else own & below
            reach[node] = own | below
    return early


def _numbered(graph: _Graph, joins: Callable[[Node], bool]) -> dict[Node, int]:
    """Return the number of the group of each node off the trunk, where nodes with an edge between them are in one.

    So are those that `joins` holds of and that hang off one start. Disjoint sets, with path halving (Tarjan and van
    Leeuwen 1984).
    """
    parent: dict[Node, Node] = {}

    def top(node: Node) -> Node:
        while parent[node] is not node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    for node, found in graph.below.items():
        together = [n for n in found if n not in graph.trunk]
        if node in graph.trunk:
            together = [n for n in together if joins(n)]
        else:
            parent[node] = node
            together.append(node)
        for n in together[1:]:
            parent[top(n)] = top(together[0])
    numbers: dict[Node, int] = {}
    return {node: numbers.setdefault(top(node), len(numbers)) for node in parent}


# Values that forward saves for backward.


class _SavedValues:
    """The saved values of one micro-batch. Each goes when backward reads it, unless `keep` is set: it is read again."""

    def __init__(self) -> None:
        self.keep = False

    def hooks(self) -> saved_tensors_hooks:
        """Return what forward runs inside of."""
        return saved_tensors_hooks(_Saved, self._take)

    def _take(self, saved: _Saved) -> Tensor:
        value = saved.value
        if value is None:
            raise RuntimeError("backward reads a saved value again that it had done with")
        if value._version != saved.version:  # autograd's own check is not made of values that hooks save
            raise RuntimeError(f"a tensor of shape {list(value.shape)} that backward needs was modified in place")
        if not self.keep:
            saved.value = None
        return value


class _Saved:
    """A value, and the number of changes in place at the time."""

    __slots__ = ("value", "version")

    def __init__(self, value: Tensor) -> None:
        self.value: Tensor | None = value.detach()
        self.version = value._version


_recording: ContextVar[_SavedValues | None] = ContextVar("recording", default=None)


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

    def __init__(self, function: Callable[..., Any], tensors: Sequence[Any], saved: _SavedValues) -> None:
        self._function, self._tensors, self._saved = function, tensors, saved
        self._packed: list[tuple[torch.Size, torch.dtype]] = []
        self._values: dict[int, Tensor] = {}
        kinds = sorted({t.device.type for t in tensors if isinstance(t, Tensor)} | {"cpu"})
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

        own = [t.detach().requires_grad_(t.requires_grad) if isinstance(t, Tensor) else t for t in self._tensors]
        token = _recording.set(self._saved)
        try:
            with ExitStack() as stack:
                stack.enter_context(torch.enable_grad())
                for kind, dtype, enabled in self._autocast:
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
                stack.enter_context(saved_tensors_hooks(collect, refuse))
                self._function(*own)
        except _Stop:
            pass
        finally:
            _recording.reset(token)
        if [(value.shape, value.dtype) for value in values] != self._packed:
            raise RuntimeError("a recomputed region computes other tensors than in forward")
        self._values = dict(enumerate(values))
