"""Run the backward of a micro-batch in two halves: `I`, the gradients of what the stage received, and later `W`, those
of its parameters (Qi et al., Zero Bubble Pipeline Parallelism, 2023).

`nnscaler.split_backward_graph` says which part of the autograd graph each half runs. I runs the trunk, each node for
its gradients along the trunk alone, and keeps what arrives at the starts. W runs each start once more, for the
gradients that leave the trunk, and what hangs off there. So nothing is computed twice but what a start derives both
gradients from. Every collective runs once: one of an activation lies on the trunk, one of a parameter off it. A
Function that is written in Python computes all of its gradients at once. Where nothing is received there is no trunk,
and W is the whole backward.

Saved values go as backward reads them, as they do without the split; those of starts, and of what hangs off, stay until
W. The values of a recomputed region come back in I, and those of its starts stay. Of a linear layer its input and the
gradient stay alone, without the graph, which would hold all that its leaves show.

torch has a helper for the same (`torch.distributed.pipelining._backward`). It is private; it runs the trunk between two
uses of a parameter again in W, collectives included, recomputes a region once for each parameter in it, and keeps every
saved value until W. This one stands on what `torch.autograd.graph` documents: nodes, their hooks, edges, and hooks of
saved tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from nnscaler.runtime.communication.sharded_parameter_gathers import ParameterReads
from nnscaler.runtime.recompute_in_backward import SavedValues, regions_in
from nnscaler.split_backward_graph import Halves, halves_of

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


@dataclass(frozen=True, slots=True)
class _Product:
    """A group that is the weight, and the bias, of one linear layer: `x @ weight.t() + bias`, as autograd records it.

    A run of autograd's engine takes half as long again. The products and sums are those that it would make.

    x        the layer's input, [rows, features]
    arrived  the gradient of what the layer makes
    """

    x: Tensor
    arrived: Tensor
    weight: Tensor
    bias: Tensor | None = None

    def run(self) -> None:
        """Add the gradients to those of the parameters."""
        with torch.no_grad():
            _accumulate(self.weight, self.arrived.t().mm(self.x))
            if self.bias is not None:
                _accumulate(self.bias, self.arrived.sum(0))


class SplitBackward:
    """The backward of one micro-batch through one stage, whose forward ran inside of `recording()`.

    `received`: the leaves that I computes the gradients of; `parameters`: all others. Both get them in `.grad`.
    `reads`: gathers parameters again that forward has gathered; what I gathers, and W reads too, stays until then.
    `once`: False keeps all saved values until W, as what is compiled needs: torch's checkpoint reads them in each half.
    """

    def __init__(self, parameters: Sequence[Tensor], reads: ParameterReads | None = None, once: bool = True) -> None:
        self._parameters = parameters
        self._saved = SavedValues(reads, once)
        self._later: list[_Group | _Product] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Run a forward inside whose backward is split."""
        with regions_in(self._saved), self._saved.hooks():
            yield

    def inputs(self, roots: Sequence[Root], received: Sequence[Tensor]) -> None:
        """Compute the gradients of `received`, from those of the `roots`: I."""
        graph = _below([edge.node for edge, _ in roots])
        ends, leaves = (_numbered(graph, tensors) for tensors in (received, self._parameters))
        halves = graph.halves(ends, [number for number, leaf in leaves.items() if leaf.dim() <= 1])
        groups = _waiting(graph, halves, roots)
        now = [tensor for number, tensor in ends.items() if number in halves.trunk]
        for number, parameter in leaves.items():
            early = halves.groups[number] in halves.early
            (now if early else groups[halves.groups[number]].leaves).append(parameter)
        self._later = list(groups.values())
        begin = [(edge, gradient) for edge, gradient in roots if not halves.waits(graph.numbers[edge.node])]
        if not begin or not now:
            return
        with ExitStack() as hooks:
            for group in groups.values():
                for node in group.starts:
                    hooks.callback(node.register_prehook(self._keep(group, node)).remove)
                    hooks.callback(node.register_hook(self._kept).remove)
            starts, gradients = zip(*begin, strict=True)
            torch.autograd.backward(starts, gradients, inputs=now, retain_graph=True)
        if self._saved.reads is None:  # else what is gathered again comes in W
            self._later = [_product_of(group) or group for group in groups.values()]

    def weights(self) -> None:
        """Compute the gradients of the parameters that are still to come: W."""
        while self._later:
            part = self._later.pop(0)  # which lets go of its part of the graph
            (part if isinstance(part, _Product) else _product_of(part) or part).run()

    def _keep(self, group: _Group, node: Node) -> Callable[[Any], None]:
        """Return a hook that keeps what arrives at a start."""

        def keep(arrived: Received) -> None:
            group.starts[node] = tuple(arrived)
            self._saved.keep = True

        return keep

    def _kept(self, *_: Any) -> None:
        self._saved.keep = False


def _product_of(group: _Group) -> _Product | None:
    """Return the linear layer that a group is; None for anything else."""
    if group.roots or len(group.starts) != 1:
        return None
    node: Any
    ((node, (arrived, *more)),) = group.starts.items()
    edges = [n for n, _ in node.next_functions]
    added = node.name() == "AddmmBackward0"  # to the bias, its first edge
    if arrived is None or more or not (added or node.name() == "MmBackward0"):
        return None
    turned, ends = edges[-1], edges[:1] if added else []
    if turned is None or turned.name() != "TBackward0":
        return None
    found: list[Any] = [getattr(n, "variable", None) for n in (turned.next_functions[0][0], *ends)]
    if {*map(id, found)} != {*map(id, group.leaves)} or not all(map(_is_plain, group.leaves)):
        return None
    if added and not (found[1].dim() == node._saved_alpha == node._saved_beta == 1):
        return None  # the bias is not added as it is, to each row
    x = node._saved_mat1 if added else node._saved_self
    return _Product(x.detach(), arrived, *found)  # autograd gives it the graph that it comes from


def _is_plain(parameter: Tensor) -> bool:
    """Return whether nothing but an addition happens when its gradient arrives."""
    hooks = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    return not any(hooks) and parameter.layout == torch.strided and not parameter.is_complex()


def _accumulate(parameter: Tensor, gradient: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad += gradient


@dataclass(frozen=True, slots=True)
class _Graph:
    """The graph below some nodes, each after all those that it leads to.

    numbers  by node, its place
    below    by number, those of the nodes that it leads to directly
    """

    numbers: dict[Node, int]
    below: tuple[tuple[int, ...], ...]

    def halves(self, ends: Iterable[int], vectors: Iterable[int]) -> Halves[int]:
        """Return what I and W run. `ends`: the nodes of what was received; `vectors`: as `halves_of` has them."""
        at_once = (number for node, number in self.numbers.items() if isinstance(node, BackwardCFunction))
        return _halves(self.below, tuple(ends), tuple(at_once), tuple(vectors))


@lru_cache(maxsize=64)  # the graph of a stage is the same for each micro-batch
def _halves(
    below: tuple[tuple[int, ...], ...], ends: tuple[int, ...], at_once: tuple[int, ...], vectors: tuple[int, ...]
) -> Halves[int]:
    return halves_of(dict(enumerate(below)), frozenset(ends), at_once.__contains__, frozenset(vectors))


def _below(roots: Sequence[Node]) -> _Graph:
    """Return the graph below some nodes."""
    numbers: dict[Node, int] = {}
    below: list[tuple[int, ...]] = []
    entered: dict[Node, tuple[Node, ...]] = {}
    path = list(reversed(roots))
    while path:
        node = path[-1]
        if node in numbers:
            path.pop()
        elif node in entered:
            numbers[node] = len(below)
            below.append(tuple(numbers[n] for n in entered.pop(node)))
            path.pop()
        else:
            found = tuple(dict.fromkeys(n for n, _ in node.next_functions if n is not None))
            entered[node] = found
            path += [n for n in reversed(found) if n not in numbers]
    return _Graph(numbers, tuple(below))


def _numbered(graph: _Graph, tensors: Iterable[Tensor]) -> dict[int, Tensor]:
    """Return the leaves in a graph by the number of their node."""
    found = ((graph.numbers.get(get_gradient_edge(tensor).node), tensor) for tensor in tensors)
    return {number: tensor for number, tensor in found if number is not None}


def _waiting(graph: _Graph, halves: Halves[int], roots: Sequence[Root]) -> dict[int, _Group]:
    """Return the groups that wait for W, without their leaves, by number, in the order in which I comes to them."""
    groups: dict[int, _Group] = {}
    for edge, gradient in roots:
        number = graph.numbers[edge.node]
        if halves.waits(number):
            groups.setdefault(halves.groups[number], _Group()).roots.append((edge, gradient))
    for node, number in reversed(graph.numbers.items()):
        for n in graph.below[number] if number in halves.trunk else ():
            if halves.waits(n):
                groups.setdefault(halves.groups[n], _Group()).starts[node] = ()
    return groups
