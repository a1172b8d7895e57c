"""The sharding problem of a graph in a setting, as data: what every strategy costs, and what every conversion does.

There is one node per operation, one per tensor that several places read, and one per parameter that several places
read. A tensor's node says in which layout its readers find it: it is converted to that layout once, and from there by
each reader that needs another. A parameter's says how its leaf lies; gradients that are partial sums there are added
up once per step.

Costs are seconds of one step: of all micro-batches, forward and backward. Operations of equal layers share their
arrays, by which the solver knows that they are equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nnscaler.ir.graph import Graph
from nnscaler.ir.layout import INVARIANT, REPLICATED, Invariant, Layout, Replicated, Sharded, without_gradient
from nnscaler.ir.operation import Operation
from nnscaler.ir.tensor import LogicalTensor
from nnscaler.planning.cost.model import CostModel
from nnscaler.planning.sharding.conversions import Conversions
from nnscaler.planning.sharding.memory import HALF, Kept, bytes_of_parameter
from nnscaler.planning.sharding.setting import Setting
from nnscaler.planning.sharding.strategies import Strategies, Strategy
from nnscaler.planning.solver.problem import Edge, Node, Problem
from nnscaler.transform.signature import Signature

BUCKET = 25 * 2**20  # bytes of one reduction of gradients
Column = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Columns:
    """Per strategy: seconds of all micro-batches forward and backward, seconds once per step, bytes at rest (values,
    gradients, optimizer), and bytes that one micro-batch keeps from forward to backward."""

    forward: Column
    backward: Column
    once: Column
    resting: Column
    kept: Column


@dataclass(frozen=True)
class ShardingProblem:
    """`strategies`: by operation; `layouts`: by tensor with a node of its own, what its choices mean. The first nodes
    are the operations, in order."""

    problem: Problem
    strategies: Mapping[str, tuple[Strategy, ...]]
    layouts: Mapping[str, tuple[Layout, ...]]
    columns: tuple[Columns, ...]


@dataclass
class Builder:
    """Poses problems for one graph in one setting. `kept`: what `memory.kept_by` found; `groups`: the number of an
    operation's layer; `live`: micro-batches between forward and backward at once."""

    graph: Graph
    signatures: Mapping[str, Signature]
    setting: Setting
    cost: CostModel
    strategies: Strategies
    kept: Mapping[str, tuple[Kept, ...]]
    groups: Mapping[str, int]
    itemsize: Mapping[str, int]
    live: int = 1
    _columns: dict[Any, Columns] = field(default_factory=dict)
    _nodes: dict[Any, tuple[Column, Column]] = field(default_factory=dict)
    _edges: dict[Any, Column] = field(default_factory=dict)
    _layouts: dict[Any, tuple[Layout, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.conversions = Conversions(self.setting, self.cost, self.itemsize)

    def build(self) -> ShardingProblem:
        """The problem of the whole graph."""
        graph = self.graph
        nodes: list[Node] = []
        columns: list[Columns] = []
        edges: list[Edge] = []
        index = {op.name: i for i, op in enumerate(graph.operations)}
        chosen = {op.name: self.strategies.of(op) for op in graph.operations}
        for op in graph.operations:
            found = self._of_operation(op, chosen[op.name])
            columns.append(found)
            nodes.append(self._node(op.name, found, self.groups.get(op.name, -1)))
        layouts: dict[str, tuple[Layout, ...]] = {}
        for tensor in graph.tensors.values():
            uses = graph.consumers[tensor.name]
            producer = graph.producers.get(tensor.name)
            if producer is not None and len(uses) == 1:
                op, slot = uses[0]
                made = _made(chosen[producer.name], producer.outputs.index(tensor.name))
                table = self._edge(tensor, made, tuple(s.needs[slot] for s in chosen[op.name]))
                edges.append(Edge(index[producer.name], index[op.name], table))
            elif len(uses) > 1 and (producer is not None or tensor.role == "parameter"):
                own = self._meeting(tensor, chosen) if producer is not None else self._leaves(tensor, chosen)
                layouts[tensor.name] = own
                at = len(nodes)
                found = self._of_tensor(tensor, own)
                columns.append(found)
                nodes.append(self._node(tensor.name, found, self._group_of(tensor)))
                if producer is not None:
                    made = _made(chosen[producer.name], producer.outputs.index(tensor.name))
                    edges.append(Edge(index[producer.name], at, self._edge(tensor, made, own)))
                for op in dict.fromkeys(op for op, _ in uses):
                    slots = tuple(i for i, name in enumerate(op.inputs) if name == tensor.name)
                    edges.append(Edge(at, index[op.name], self._uses(tensor, own, chosen[op.name], slots)))
        return ShardingProblem(Problem(tuple(nodes), tuple(edges)), chosen, layouts, tuple(columns))

    def _node(self, name: str, columns: Columns, group: int) -> Node:
        key = id(columns)
        if key not in self._nodes:
            cost = columns.forward + columns.backward + columns.once
            self._nodes[key] = (cost, columns.resting + self.live * columns.kept)
        return Node(name, *self._nodes[key], group)

    def _group_of(self, tensor: LogicalTensor) -> int:
        producer = self.graph.producers.get(tensor.name)
        if producer is not None:
            return self.groups.get(producer.name, -1)
        found = {self.groups.get(op.name, -1) for op, _ in self.graph.consumers[tensor.name]}
        return found.pop() if len(found) == 1 else -1

    # -- operations

    def _of_operation(self, op: Operation, strategies: tuple[Strategy, ...]) -> Columns:
        graph = self.graph
        inputs = tuple((graph.tensors[n], len(graph.consumers[n]) == 1) for n in op.inputs)
        about = tuple((t.role, t.shape, t.dtype, t.needs_grad, alone) for t, alone in inputs)
        key = (id(strategies), id(self.signatures[op.name]), about, self.kept[op.name])
        if key not in self._columns:
            rows = [self._row(op, s, inputs) for s in strategies]
            self._columns[key] = Columns(*(np.array(column) for column in zip(*rows, strict=True)))
        return self._columns[key]

    def _row(
        self, op: Operation, strategy: Strategy, inputs: Sequence[tuple[LogicalTensor, bool]]
    ) -> tuple[float, float, float, float, float]:
        graph, setting = self.graph, self.setting
        outputs = [(graph.tensors[n], m) for n, m in zip(op.outputs, strategy.makes, strict=True) if n is not None]
        shapes_in = [setting.local(n, t.shape) for (t, _), n in zip(inputs, strategy.needs, strict=True)]
        shapes_out = [setting.local(m, t.shape) for t, m in outputs]
        dtype = next((t.dtype for t, _ in outputs), "float32")
        forward, backward = self.cost.compute(self.signatures[op.name], shapes_in, shapes_out, dtype)
        if not any(t.needs_grad for t, _ in outputs):
            backward = 0.0
        times = setting.micro_batches
        converted = once = resting = 0.0
        for (tensor, alone), need in zip(inputs, strategy.needs, strict=True):
            if tensor.role == "parameter" and alone:
                leaf = _leaf_of(tensor, need)
                converted += self.conversions.seconds(tensor, leaf, need)
                once += self._reduced(tensor, leaf)
                resting += self._rests(tensor, leaf)
            elif tensor.role in ("buffer", "constant") or (tensor.role == "input"):
                fed = tuple(s if isinstance(s, Sharded) and tensor.role == "input" else INVARIANT for s in need)
                converted += self.conversions.seconds(tensor, fed, need)
                resting += self._rests(tensor, fed) if tensor.role != "input" and alone else 0.0
        kept = sum(
            prod(shapes_in[k.slot]) * k.ratio * self.itemsize[inputs[k.slot][0].dtype] for k in self.kept[op.name]
        )
        return times * forward, times * (backward + converted), once, resting, kept

    # -- tensors and parameters that several places read

    def _of_tensor(self, tensor: LogicalTensor, layouts: tuple[Layout, ...]) -> Columns:
        key = (tensor.role, tensor.shape, tensor.dtype, tensor.needs_grad, id(layouts))
        if key not in self._columns:
            zero = np.zeros(len(layouts))
            stored = tensor.role == "parameter"
            once = np.array([self._reduced(tensor, leaf) for leaf in layouts]) if stored else zero
            rests = np.array([self._rests(tensor, leaf) for leaf in layouts]) if stored else zero
            self._columns[key] = Columns(zero, zero, once, rests, zero)
        return self._columns[key]

    def _meeting(self, tensor: LogicalTensor, chosen: Mapping[str, tuple[Strategy, ...]]) -> tuple[Layout, ...]:
        """The layouts in which readers may find a tensor: those made, and those needed."""
        producer = self.graph.producers[tensor.name]
        found = dict.fromkeys(_made(chosen[producer.name], producer.outputs.index(tensor.name)))
        for op, slot in self.graph.consumers[tensor.name]:
            found.update(dict.fromkeys(s.needs[slot] for s in chosen[op.name]))
        return self._shared(tuple(found))

    def _leaves(self, tensor: LogicalTensor, chosen: Mapping[str, tuple[Strategy, ...]]) -> tuple[Layout, ...]:
        """The layouts in which the leaf of a parameter may lie, given what its readers need."""
        found: dict[Layout, None] = {}
        for op, slot in self.graph.consumers[tensor.name]:
            for strategy in chosen[op.name]:
                leaf = _leaf_of(tensor, strategy.needs[slot])
                options = [
                    tuple(dict.fromkeys((s, INVARIANT, REPLICATED if tensor.needs_grad else INVARIANT))) for s in leaf
                ]
                found.update(dict.fromkeys(product(*options)))
        return self._shared(tuple(found))

    def _shared(self, layouts: tuple[Layout, ...]) -> tuple[Layout, ...]:
        return self._layouts.setdefault(layouts, layouts)

    def _edge(self, tensor: LogicalTensor, made: tuple[Layout, ...], needed: tuple[Layout, ...]) -> Column:
        """[made, needed] over choices: layouts may stand more than once."""
        made, needed = self._shared(made), self._shared(needed)
        key = (id(made), id(needed), tensor.shape, tensor.dtype, tensor.needs_grad)
        if key not in self._edges:
            sources, targets = tuple(dict.fromkeys(made)), tuple(dict.fromkeys(needed))
            table = self.conversions.table(tensor, sources, targets)
            rows, columns = [sources.index(m) for m in made], [targets.index(n) for n in needed]
            self._edges[key] = table[np.ix_(rows, columns)]
        return self._edges[key]

    def _uses(
        self, tensor: LogicalTensor, own: tuple[Layout, ...], strategies: tuple[Strategy, ...], slots: tuple[int, ...]
    ) -> Column:
        """From where a tensor lies to what a reader needs; the same layout in two slots is made once."""
        if len(slots) == 1:
            return self._edge(tensor, own, tuple(s.needs[slots[0]] for s in strategies))
        key = (id(own), id(strategies), slots, tensor.shape, tensor.dtype, tensor.needs_grad)
        if key not in self._edges:
            total = np.zeros((len(own), len(strategies)))
            for number, slot in enumerate(slots):
                table = self._edge(tensor, own, tuple(s.needs[slot] for s in strategies))
                again = [s.needs[slot] in [s.needs[before] for before in slots[:number]] for s in strategies]
                total = total + np.where(np.array(again)[None, :], 0.0, table)
            self._edges[key] = total
        return self._edges[key]

    # -- parameters

    def _rests(self, tensor: LogicalTensor, leaf: Layout) -> float:
        layout = tuple(s if isinstance(s, Sharded) else INVARIANT for s in leaf)
        each = bytes_of_parameter(tensor.dtype, self.itemsize[tensor.dtype], tensor.needs_grad)
        return float(each * prod(self.setting.local(layout, tensor.shape)))

    def _reduced(self, tensor: LogicalTensor, leaf: Layout) -> float:
        """Seconds of the sums of a gradient at the end of a step, at the rate of a full bucket."""
        if not tensor.needs_grad:
            return 0.0
        each = 4 if tensor.dtype in HALF else self.itemsize[tensor.dtype]
        size = each * prod(self.setting.local(leaf, tensor.shape))
        total = 0.0
        for (name, _), state in zip(self.setting.axes[:-1], leaf[:-1], strict=True):
            if isinstance(state, Replicated):
                total += self.cost.collective("all_reduce", BUCKET, self.setting.places[name]) * size / BUCKET
        return total


def _made(strategies: Sequence[Strategy], output: int) -> tuple[Layout, ...]:
    return tuple(s.makes[output] for s in strategies)


def _leaf_of(tensor: LogicalTensor, need: Layout) -> Layout:
    """The leaf of a parameter that one place alone reads so: shards rest as shards, and sums of gradients wait for the
    end of the step."""
    leaf = tuple(s if isinstance(s, Sharded | Replicated) else INVARIANT for s in need[:-1])
    last = REPLICATED if isinstance(need[-1], Replicated) else INVARIANT
    return (*leaf, last) if tensor.needs_grad else without_gradient((*leaf, last))


def is_whole(layout: Layout) -> bool:
    """Whether every rank holds all of it."""
    return all(isinstance(state, Invariant | Replicated) for state in layout)
