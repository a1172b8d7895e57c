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
gradient stay alone, without its weight, and without the graph, which would hold all that its leaves show.

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


@dataclass(frozen=True, slots=True)
class _Again:
    """A start that runs once more in W.

    arrived  by output, the gradient
    """

    node: Node
    arrived: Received

    def roots(self) -> list[Root]:
        """Return where W enters the graph, with the gradients there."""
        return [(GradientEdge(self.node, i), given) for i, given in enumerate(self.arrived) if given is not None]


@dataclass(frozen=True, slots=True)
class _Product:
    """A start that multiplies what is on the trunk by a matrix that is off it: a linear layer, `x @ matrix + bias`.

    The gradient of the matrix is a product of two tensors, and these are kept alone: neither the graph, which would
    hold all that its leaves show, nor the matrix, which may be a parameter that was gathered.

    x        [rows, features]
    arrived  the gradient of what the layer makes
    turned   whether the matrix is a transposed one, as that of a linear layer is: its gradient is one, too
    matrix   where its gradient goes
    bias     the same; None: there is none in the group
    """

    x: Tensor
    arrived: Tensor
    turned: bool
    matrix: GradientEdge
    bias: GradientEdge | None

    def roots(self) -> list[Root]:
        """Return where W enters the graph, with the gradients there: the products and sums that autograd makes."""
        x, arrived = self.x, self.arrived
        with torch.no_grad():
            found: list[Root] = [(self.matrix, arrived.t().mm(x).t() if self.turned else x.t().mm(arrived))]
            if self.bias is not None:
                shape = torch.Size(self.bias.node._input_metadata[self.bias.output_nr].shape)
                # Not what arrived itself: other parameters may get it, too, and each adds to its own.
                found.append((self.bias, arrived.clone() if arrived.shape == shape else arrived.sum_to_size(shape)))
        return found


@dataclass(slots=True)
class _Group:
    """A part of the graph that hangs off the trunk in one place, and is run at once.

    leaves   the parameters
    roots    outputs of the stage that lie in it: where its backward begins, with the gradient
    starts   nodes of the trunk that it hangs off, with what arrived at them in I
    """

    leaves: list[Tensor] = field(default_factory=list)
    roots: list[Root] = field(default_factory=list)
    starts: list[_Again | _Product] = field(default_factory=list)

    def run(self, hooked: bool) -> None:
        """Add the gradients to those of the parameters. `hooked`: what leads to these may have hooks."""
        if not self.leaves:
            return
        begin = [*self.roots, *(root for start in self.starts for root in start.roots())]
        if not begin:
            return
        ends = [_end_of(edge.node) for edge, _ in begin]
        reached = {id(leaf) for leaf, _ in filter(None, ends)}
        plain = not self.roots and not (hooked and any(turned for _, turned in filter(None, ends)))
        if plain and reached >= {*map(id, self.leaves)} and len(ends) == len(self.leaves):
            # nothing but additions; a run of autograd's engine takes half as long again as the products
            for (_, gradient), (leaf, turned) in zip(begin, filter(None, ends), strict=True):
                _accumulate(leaf, gradient.t() if turned else gradient)
            return
        edges, gradients = zip(*begin, strict=True)
        torch.autograd.backward(edges, gradients, inputs=self.leaves)


class SplitBackward:
    """The backward of one micro-batch through one stage, whose forward ran inside of `recording()`.

    `received`: the leaves that I computes the gradients of; `parameters`: all others. Both get them in `.grad`.
    `reads`: gathers parameters again that forward has gathered; what I gathers, and W reads too, stays until then.
    `once`: False keeps all saved values until W, as what is compiled needs: torch's checkpoint reads them in each half.
    `hooked`: whether values of the forward have hooks, as where each is observed; parameters may have some anyway.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        reads: ParameterReads | None = None,
        once: bool = True,
        hooked: bool = False,
    ) -> None:
        self._parameters, self._hooked = parameters, hooked
        self._saved = SavedValues(reads, once)
        self._later: list[_Group] = []

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
        groups, starts = _waiting(graph, halves, roots)
        now = [tensor for number, tensor in ends.items() if number in halves.trunk]
        for number, parameter in leaves.items():
            early = halves.groups[number] in halves.early
            (now if early else groups[halves.groups[number]].leaves).append(parameter)
        self._later = list(groups.values())
        begin = [(edge, gradient) for edge, gradient in roots if not halves.waits(graph.numbers[edge.node])]
        if not begin or not now:
            return
        with ExitStack() as hooks:
            for node, number in starts.items():
                hanging = [
                    n is not None and halves.groups.get(graph.numbers[n]) == number for n, _ in node.next_functions
                ]
                hooks.callback(node.register_prehook(self._keep(groups[number], node, hanging)).remove)
                hooks.callback(node.register_hook(self._kept).remove)
            edges, gradients = zip(*begin, strict=True)
            torch.autograd.backward(edges, gradients, inputs=now, retain_graph=True)

    def weights(self) -> None:
        """Compute the gradients of the parameters that are still to come: W."""
        while self._later:
            self._later.pop(0).run(self._hooked)  # which lets go of its part of the graph

    def _keep(self, group: _Group, node: Node, hanging: Sequence[bool]) -> Callable[[Any], None]:
        """Return a hook that keeps what W needs of a start, from what arrives there. `hanging`: by input, whether its
        gradient is the group's."""

        def keep(arrived: Received) -> None:
            self._saved.keep = True
            product = _product_of(node, arrived, hanging)
            self._saved.keep = product is None
            group.starts.append(product or _Again(node, tuple(arrived)))

        return keep

    def _kept(self, *_: Any) -> None:
        self._saved.keep = False


def _product_of(node: Any, arrived: Received, hanging: Sequence[bool]) -> _Product | None:
    """Return the product that a start is, by its inputs off the trunk; None for anything else."""
    kind = type(node).__name__
    added = kind == "AddmmBackward0"  # to the bias, its first input
    if not (added or kind == "MmBackward0") or list(hanging[-2:]) != [False, True]:
        return None
    (gradient,) = arrived
    if gradient is None or gradient.is_complex() or (added and not node._saved_alpha == node._saved_beta == 1):
        return None
    x, edges = node._saved_mat1 if added else node._saved_self, node.next_functions
    if x.layout != torch.strided:
        return None
    turned = node._saved_mat2_sym_strides == (1, node._saved_mat2_sym_sizes[0])
    matrix, bias = (
        # autograd alone owns a node that is written in Python: it is there as long as this one, which leads to it
        GradientEdge(n, output, node if isinstance(n, BackwardCFunction) else None)
        for n, output in (edges[-1], edges[0])
    )
    return _Product(x.detach(), gradient, turned, matrix, bias if added and hanging[0] else None)


def _end_of(node: Any) -> tuple[Tensor, bool] | None:
    """Return the parameter whose gradient arrives at a node, and whether turned; None where more than that happens."""
    turned = type(node).__name__ == "TBackward0"  # what a user writes may have any `name`
    leaf = getattr(node.next_functions[0][0] if turned else node, "variable", None)
    return (leaf, turned) if isinstance(leaf, Tensor) and _is_plain(leaf) else None


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


def _waiting(graph: _Graph, halves: Halves[int], roots: Sequence[Root]) -> tuple[dict[int, _Group], dict[Node, int]]:
    """Return the groups that wait for W, without their leaves, by number, in the order in which I comes to them, and
    the number of the group of each start."""
    groups: dict[int, _Group] = {}
    starts: dict[Node, int] = {}
    for edge, gradient in roots:
        number = graph.numbers[edge.node]
        if halves.waits(number):
            groups.setdefault(halves.groups[number], _Group()).roots.append((edge, gradient))
    for node, number in reversed(graph.numbers.items()):
        for n in graph.below[number] if number in halves.trunk else ():
            if halves.waits(n):
                starts[node] = halves.groups[n]
                groups.setdefault(halves.groups[n], _Group())
    return groups, starts
