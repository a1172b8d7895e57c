"""Divide a backward into what its first half, I, runs, and what can wait for the second, W.

The runtime asks it of the graph that autograd recorded, and the compiler of the statements of a program, so that what
is predicted is what runs. It stands on the standard library alone.

The nodes that lead to a received tensor are the *trunk*: I runs them. What hangs off it leads to parameters only, and
falls into groups that share no node. A *start* is a node of the trunk that something hangs off: it is run once more in
W, for the gradients that leave the trunk. A group can wait for W if none of its starts leads to another one along the
trunk: what is started at the upper one would run through the lower one again, and count it twice. A group that cannot,
since its parameter is used again further down, or that hangs off a node which computes all of its gradients at once, is
*early*: I runs it. Groups that can wait and share a start are one, so that the start runs once more, and not twice.

So is a group that hangs off the trunk and leads to nothing but vectors, such as the scale and the shift of a norm: its
gradients are sums over what arrives, and to keep that, and what the norm read, costs more than to add it up at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True)
class Halves(Generic[T]):
    """The halves of a graph.

    trunk   nodes that lead to what was received
    groups  number of the group of each other node
    early   numbers of the groups that I runs
    """

    trunk: frozenset[T]
    groups: Mapping[T, int]
    early: frozenset[int]

    def waits(self, node: T) -> bool:
        """Return whether a node is run in W alone."""
        return node not in self.trunk and self.groups[node] not in self.early


def halves_of(
    below: Mapping[T, Sequence[T]], received: Collection[T], at_once: Callable[[T], bool], vectors: Collection[T] = ()
) -> Halves[T]:
    """Divide a graph.

    below     each node, after all those that it leads to -> those that it leads to directly
    received  the nodes that are gradients of received tensors
    at_once   whether a node computes all of its gradients at once
    vectors   the nodes that are gradients of parameters with one dim, or none
    """
    trunk: set[T] = set()
    for node, found in below.items():
        if node in received or any(n in trunk for n in found):
            trunk.add(node)
    groups = _groups(below, trunk, lambda _: False)
    apart = _early(below, trunk, groups, at_once)  # or a shared bias would hold back the weights beside it
    groups = _groups(below, trunk, lambda node: not apart >> groups[node] & 1)
    early = _early(below, trunk, groups, at_once)
    hanging = {groups[n] for node in trunk for n in below[node] if n not in trunk}
    larger = {groups[node] for node, found in below.items() if not found and node not in trunk and node not in vectors}
    now = {g for g in groups.values() if early >> g & 1}
    return Halves(frozenset(trunk), groups, frozenset(now | (hanging - larger)))


def _early(
    below: Mapping[T, Sequence[T]], trunk: Collection[T], groups: Mapping[T, int], at_once: Callable[[T], bool]
) -> int:
    """Return the groups that cannot wait, each as a bit."""
    early = 0
    reach: dict[T, int] = {}  # node of the trunk -> the groups that it leads to, as bits
    for node, found in below.items():
        if node in trunk:
            own = further = 0
            for n in found:
                if n in trunk:
                    further |= reach[n]
                else:
                    own |= 1 << groups[n]
            early |= own if own and at_once(node) else own & further
            reach[node] = own | further
    return early


def _groups(below: Mapping[T, Sequence[T]], trunk: Collection[T], joins: Callable[[T], bool]) -> dict[T, int]:
    """Return the number of the group of each node off the trunk, where nodes with an edge between them are in one.

    So are those that `joins` holds of and that hang off one start. Disjoint sets, with path halving (Tarjan and van
    Leeuwen 1984).
    """
    parent: dict[T, T] = {}

    def top(node: T) -> T:
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    for node, found in below.items():
        together = [n for n in found if n not in trunk]
        if node in trunk:
            together = [n for n in together if joins(n)]
        else:
            parent[node] = node
            together.append(node)
        for n in together[1:]:
            parent[top(n)] = top(together[0])
    numbers: dict[T, int] = {}
    return {node: numbers.setdefault(top(node), len(numbers)) for node in parent}
