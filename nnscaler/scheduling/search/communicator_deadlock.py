"""Communicators of messages: whether the orders of devices can deadlock on them, and how to keep a search from that.

Operations on one communicator run one after another on each rank, in the order in which its program issues them, above
all when a captured graph is replayed. A message then moves when it is the next operation of all that take part. Sends
and receives of two ranks in orders that differ wait for each other for ever, although no pass does (PyTorch keeps
looped pipelines from this with a communicator for each direction: pytorch/torchtitan#4591, pytorch/pytorch#186173).

A device receives what a block needs directly before the block, and sends what it makes directly after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import Literal

from nnscaler.errors import NnscalerError
from nnscaler.instructions import Instruction
from nnscaler.scheduling.search.problem import ScheduleProblem


@dataclass(frozen=True, slots=True)
class Route:
    """The message of a dependency.

    index       of the dependency
    senders     devices
    receivers   devices
    """

    index: int
    senders: tuple[int, ...]
    receivers: tuple[int, ...]


def routes_of(problem: ScheduleProblem, named: bool = True) -> tuple[Route, ...]:
    """Return the messages. `named`: only those that have a communicator.

    Devices that run both blocks take part where nobody else would: they share what the others need, or collect it.
    """
    found = []
    for index, edge in enumerate(problem.dependencies):
        before, after = set(problem.blocks[edge.before].devices), set(problem.blocks[edge.after].devices)
        if before != after and (edge.communicator or not named):
            senders, receivers = before - after or before, after - before or after
            found.append(Route(index, tuple(sorted(senders)), tuple(sorted(receivers - senders))))
    return tuple(found)


def name_messages(problem: ScheduleProblem, each: Literal["pair", "direction"]) -> ScheduleProblem:
    """Return the problem with a communicator for each pair of devices, or for each direction of a pair."""
    edges = list(problem.dependencies)
    for route in routes_of(problem, named=False):
        ends = [",".join(map(str, route.senders)), ",".join(map(str, route.receivers))]
        name = ">".join(ends) if each == "direction" else "-".join(sorted(ends))
        edges[route.index] = replace(edges[route.index], communicator=name)
    return replace(problem, dependencies=tuple(edges))


def check_communicators(problem: ScheduleProblem, orders: Sequence[Sequence[Instruction]]) -> None:
    """Check that the orders of all devices finish if each communicator serves one message after another.

    Raises NnscalerError("communicator_deadlock") with the messages that wait for each other.
    """
    routes = routes_of(problem)
    blocks = {(b.kind, b.stage): i for i, b in enumerate(problem.blocks)}
    arriving: dict[tuple[int, int], list[Route]] = {}
    leaving: dict[tuple[int, int], list[Route]] = {}
    for route in routes:
        edge = problem.dependencies[route.index]
        for device in route.receivers:
            arriving.setdefault((device, edge.after), []).append(route)
        for device in route.senders:
            leaving.setdefault((device, edge.before), []).append(route)
    sorter: TopologicalSorter[Instruction | tuple[int, Instruction]] = TopologicalSorter()
    for instruction in dict.fromkeys(i for order in orders for i in order):
        for edge in problem.dependencies:
            if edge.after == blocks[instruction.kind, instruction.stage]:
                sorter.add(instruction, problem.blocks[edge.before].at(instruction.micro))
    for device, order in enumerate(orders):
        queues: dict[str, list[tuple[int, Instruction]]] = {}
        for instruction in order:
            block = blocks[instruction.kind, instruction.stage]
            sorter.add(instruction)
            for route in (*arriving.get((device, block), ()), *leaving.get((device, block), ())):
                edge = problem.dependencies[route.index]
                before, after = (problem.blocks[b].at(instruction.micro) for b in (edge.before, edge.after))
                message = (route.index, before)
                sorter.add(message, before)
                sorter.add(after, message)
                queues.setdefault(edge.communicator, []).append(message)
        for earlier, later in pairwise(order):
            sorter.add(later, earlier)
        for queue in queues.values():
            for first, second in pairwise(queue):
                sorter.add(second, first)
    try:
        sorter.prepare()
    except CycleError as error:
        raise _deadlock(problem, [node for node in error.args[1] if isinstance(node, tuple)]) from error


def _deadlock(problem: ScheduleProblem, cycle: Sequence[tuple[int, Instruction]]) -> NnscalerError:
    routes = {route.index: route for route in routes_of(problem)}
    lines = []
    for index, before in dict.fromkeys(cycle):
        edge, route = problem.dependencies[index], routes[index]
        after = problem.blocks[edge.after].at(before.micro)
        ends = " to ".join(",".join(map(str, devices)) for devices in (route.senders, route.receivers))
        lines.append(f"{before} to {after} (device {ends}, communicator {edge.communicator!r})")
    if not lines:
        return NnscalerError(
            "schedule_deadlock",
            "the passes wait for each other for ever, whatever their messages do",
            help="change the order of one device so that what is waited for comes first",
        )
    return NnscalerError(
        "communicator_deadlock",
        "these messages wait for each other for ever: " + "; ".join(lines),
        help="give each direction of a pair of devices a communicator of its own, or let both ends run these messages "
        "in the same order",
    )


class MessageQueues:
    """The messages that are sent and not received, by device and communicator, in a step as it runs.

    A message is received when it is the first of its senders' queues and the receivers wait for nobody. So the order of
    receiving is one in which all queues advance, and nothing waits for ever. `ahead`: the most messages of a queue that
    may wait, so that what nobody can take yet does not stand before what is needed. Changes as blocks start.
    """

    def __init__(self, problem: ScheduleProblem, ahead: int) -> None:
        self.ahead = ahead
        self.arriving: dict[int, list[tuple[Route, str]]] = {}
        self.leaving: dict[int, list[tuple[Route, str]]] = {}
        for route in routes_of(problem):
            edge = problem.dependencies[route.index]
            self.arriving.setdefault(edge.after, []).append((route, edge.communicator))
            self.leaving.setdefault(edge.before, []).append((route, edge.communicator))
        self.queues: dict[tuple[int, str], list[tuple[Route, int]]] = {}

    def may_start(self, block: int, micro: int) -> bool:
        """Return whether a block can receive what it needs, and send without being waited for itself."""
        received: set[tuple[int, int]] = set()
        for route, name in self.arriving.get(block, ()):
            for device in route.senders:
                waiting = [m for m in self.queues.get((device, name), ()) if (m[0].index, m[1]) not in received]
                if not waiting or waiting[0] != (route, micro):
                    return False
            if any(self.queues.get((device, name)) for device in route.receivers):
                return False
            received.add((route.index, micro))
        for route, name in self.leaving.get(block, ()):
            if any(len(self.queues.get((device, name), ())) >= self.ahead for device in route.senders):
                return False
            for (_, other), queue in self.queues.items():
                if other == name and any(
                    not set(route.senders).isdisjoint(sent.receivers)
                    for sent, number in queue
                    if (sent.index, number) not in received
                ):
                    return False
        return True

    def start(self, block: int, micro: int) -> None:
        """Receive what a block needs, and send what it makes."""
        for route, name in self.arriving.get(block, ()):
            for device in route.senders:
                self.queues[device, name].pop(0)
        for route, name in self.leaving.get(block, ()):
            for device in route.senders:
                self.queues.setdefault((device, name), []).append((route, micro))
