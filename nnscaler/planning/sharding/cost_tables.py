"""The cost tables of a graph in a setting: what every strategy of an operation costs, and what every conversion does.

There is one node per operation, one per tensor that several places read, and one per parameter that several places
read. A tensor's node says in which layout its readers find it: it is converted to that layout once, and from there by
each reader that needs another. A parameter's node says how its leaf lies; gradients that are partial sums there are
added up once per step.

Operations of equal layers share their arrays, by which the solver knows that they are equal.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nnscaler.ir.gradients_and_kept_values import kept_by, records
from nnscaler.ir.graph import Graph, LogicalTensor, Operation, element_bytes
from nnscaler.ir.operation_annotations import Signature
from nnscaler.ir.ring_rotation_calls import as_computed, circulation
from nnscaler.layout import INVARIANT, REPLICATED, Layout, Sharded
from nnscaler.planning.cost.flops_and_memory_traffic import computes_in
from nnscaler.planning.cost.model_protocol import CostModel
from nnscaler.planning.sharding.conversion_costs import Conversions
from nnscaler.planning.sharding.parameter_and_activation_memory import OPTIMIZER_BYTES, Kept, parameter_memory
from nnscaler.planning.sharding.settings_and_strategies import Setting, Strategies, Strategy, alike
from nnscaler.planning.sharding.zero_stages import AT_REST_WHOLE, AtRest, PlacedParameter, leaf_of, placed

Column = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """The figures of a node's strategies on one rank; each column is [strategies].

    forward    seconds of one micro-batch
    backward   seconds of one micro-batch
    once       seconds of a step in which parameters and gradients go between where they rest and where they are read
    resting    bytes of values, gradients and optimizer states
    kept       bytes that one micro-batch keeps from forward to backward
    handed     bytes of one micro-batch that are handed to another layer
    arriving   bytes of gradients that are whole when a backward ends, and then rest in shards
    summed     by axis, bytes of gradients that are added up over it once per step
    weights    seconds of `backward` that its second half, W, takes
    again      seconds of one micro-batch beside these where its layer is recomputed
    gathered   bytes of parameters that are whole while its layer is recomputed
    cheap      bytes of one micro-batch that are kept beside these, if they are not computed again
    """

    forward: Column
    backward: Column
    once: Column
    resting: Column
    kept: Column
    handed: Column
    arriving: Column
    summed: Mapping[str, Column]
    weights: Column
    again: Column
    gathered: Column
    cheap: Column


@dataclass(frozen=True, eq=False)
class Tables:
    """The tables of a graph: nodes are the operations in their order, then tensors.

    names        by node
    groups       by node, the number of its layer; -1 for none
    columns      by node
    edges        (node, node, seconds of one micro-batch [k of first, k of second])
    strategies   by operation, the meaning of its choices
    layouts      by tensor that has a node, the meaning of its choices
    """

    names: tuple[str, ...]
    groups: tuple[int, ...]
    columns: tuple[Columns, ...]
    edges: tuple[tuple[int, int, Column], ...]
    strategies: Mapping[str, tuple[Strategy, ...]]
    layouts: Mapping[str, tuple[Layout, ...]]


def when_backward_ends(tables: Tables) -> Tables:
    """Return the tables whose memory is that of the moment when the backward of a micro-batch ends.

    What arrives is there, as if it rested; the activations of the micro-batch are gone, so that one fewer is alive.
    """
    each = {id(own): own for own in tables.columns}
    made = {key: replace(own, resting=own.resting + own.arriving) for key, own in each.items()}
    return replace(tables, columns=tuple(made[id(own)] for own in tables.columns))


@dataclass
class TableBuilder:
    """Makes the tables of one graph in one setting.

    kept       by operation, the slots that are kept for it and for no earlier one
    groups     by operation, the number of its layer
    together   pairs of operations whose choices on the first axis are to be the same
    rests      how parameters rest over dp
    optimizer  bytes that the optimizer keeps of an element
    left_out   operations that cost nothing, with the parameters that only they read: others run them
    halves     by operation, the share of its backward that W takes; 0 where it is not there
    """

    graph: Graph
    signatures: Mapping[str, Signature]
    setting: Setting
    cost: CostModel
    strategies: Strategies
    kept: Mapping[str, tuple[Kept, ...]]
    groups: Mapping[str, int]
    together: tuple[tuple[str, str], ...] = ()
    rests: AtRest = AT_REST_WHOLE
    optimizer: float = OPTIMIZER_BYTES
    left_out: frozenset[str] = frozenset()
    halves: Mapping[str, float] = field(default_factory=dict)
    _columns: dict[Any, Columns] = field(default_factory=dict)
    _edges: dict[Any, Column] = field(default_factory=dict)
    _layouts: dict[Any, tuple[Layout, ...]] = field(default_factory=dict)
    _made: dict[Any, tuple[Layout, ...]] = field(default_factory=dict)
    _met: dict[Any, tuple[Layout, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.conversions = Conversions(self.setting, self.cost)

    def resting(self, rests: AtRest) -> TableBuilder:
        """Return a builder for parameters that rest so, which shares what does not depend on it with this one."""
        other = replace(self, rests=rests, _columns={})
        other.conversions = self.conversions
        return other

    def build(self, only: Collection[str] | None = None) -> Tables:
        """Return the tables of the whole graph, or of `only` these operations and the tensors between them."""
        graph = self.graph
        operations = [op for op in graph.operations if only is None or op.name in only]
        names = [op.name for op in operations]
        index = {name: i for i, name in enumerate(names)}
        chosen = {op.name: self.strategies.of(op) for op in operations}
        columns = [self._charged(self._of_operation(op, chosen[op.name]), (op.name,)) for op in operations]
        groups = [self.groups.get(name, -1) for name in names]
        edges: list[tuple[int, int, Column]] = []
        layouts: dict[str, tuple[Layout, ...]] = {}
        touched = {n for op in operations for n in (*op.inputs, *op.outputs)}
        for tensor in (t for t in graph.tensors.values() if t.name in touched):
            uses = graph.consumers[tensor.name]
            producer = graph.producers.get(tensor.name)
            here = producer is not None and producer.name in index
            readers = [op for op in dict.fromkeys(op for op, _ in uses) if op.name in index]
            if not readers:
                continue
            if producer is not None and len(uses) == 1:
                if here:
                    made = self._layouts_of(chosen[producer.name], False, producer.outputs.index(tensor.name))
                    table = self._edge(tensor, made, self._layouts_of(chosen[readers[0].name], True, uses[0][1]))
                    edges.append((index[producer.name], index[readers[0].name], table))
            elif len(uses) > 1 and (producer is not None or tensor.role == "parameter"):
                own = self._meeting(tensor) if producer is not None else self._leaves(tensor)
                layouts[tensor.name] = own
                at = len(names)
                names.append(tensor.name)
                reads = [op.name for op, _ in uses] if tensor.role == "parameter" else [""]
                columns.append(self._charged(self._of_tensor(tensor, own), reads))
                groups.append(self._group_of(tensor))
                if producer is not None and here:
                    made = self._layouts_of(chosen[producer.name], False, producer.outputs.index(tensor.name))
                    edges.append((index[producer.name], at, self._edge(tensor, made, own)))
                for op in readers:
                    slots = tuple(i for i, name in enumerate(op.inputs) if name == tensor.name)
                    edges.append((at, index[op.name], self._uses(tensor, own, chosen[op.name], slots)))
        if only is None and self.setting.searched:  # what some layers are to do is no bound for all
            for first, second in self.together:
                edges.append((index[first], index[second], self._alike(chosen[first], chosen[second])))
        return Tables(tuple(names), tuple(groups), tuple(columns), tuple(edges), chosen, layouts)

    def _charged(self, columns: Columns, operations: Collection[str]) -> Columns:
        """Return these columns, or as many that cost nothing where all of the operations are left out."""
        if not self.left_out.issuperset(operations):
            return columns
        key = ("free", id(columns))
        if key not in self._columns:
            nothing = np.zeros(len(columns.forward))
            self._columns[key] = Columns(*(nothing,) * 7, {}, *(nothing,) * 4)
        return self._columns[key]

    def _group_of(self, tensor: LogicalTensor) -> int:
        producer = self.graph.producers.get(tensor.name)
        if producer is not None:
            return self.groups.get(producer.name, -1)
        found = {self.groups.get(op.name, -1) for op, _ in self.graph.consumers[tensor.name]}
        return found.pop() if len(found) == 1 else -1

    def _of_operation(self, op: Operation, strategies: tuple[Strategy, ...]) -> Columns:
        graph = self.graph
        inputs = tuple((graph.tensors[n], len(graph.consumers[n]) == 1) for n in op.inputs)
        about = tuple((t.role, t.shape, t.dtype, t.needs_grad, alone) for t, alone in inputs)
        own = self.groups.get(op.name, -1)
        leaving = tuple(  # what several places read is handed on by its own node
            name is not None
            and len(graph.consumers[name]) == 1
            and self.groups.get(graph.consumers[name][0][0].name, -1) != own
            for name in op.outputs
        )
        known = id(strategies), id(self.signatures[op.name]), self.kept[op.name], records(self.graph, op)
        key = (*known, about, leaving, self.halves.get(op.name, 0.0))
        if key not in self._columns:
            self._columns[key] = self._make_columns(op, strategies, inputs, leaving)
        return self._columns[key]

    def _make_columns(
        self,
        op: Operation,
        strategies: tuple[Strategy, ...],
        inputs: Sequence[tuple[LogicalTensor, bool]],
        leaving: tuple[bool, ...],
    ) -> Columns:
        outputs = [None if n is None else self.graph.tensors[n] for n in op.outputs]
        numbers, sums = zip(*(self._row(op, s, inputs, outputs, leaving) for s in strategies), strict=True)
        axes = [name for name, _ in self.setting.axes[:-1]]
        summed = {name: np.array([sum(one.get(name, 0.0) for one in found) for found in sums]) for name in axes}
        forward, backward, once, resting, kept, handed, arriving, twice, gathered, cheap = np.array(numbers).T.copy()
        summed = {name: column for name, column in summed.items() if column.any()}
        again = forward - twice  # seconds in which backward gathers parameters in any case
        weights = self.halves.get(op.name, 0.0) * backward
        made = forward, backward, once, resting, kept, handed, arriving, summed, weights, again
        return Columns(*made, gathered, cheap)

    def _row(
        self,
        op: Operation,
        strategy: Strategy,
        inputs: Sequence[tuple[LogicalTensor, bool]],
        outputs: Sequence[LogicalTensor | None],
        leaving: tuple[bool, ...],
    ) -> tuple[tuple[float, ...], list[Mapping[str, float]]]:
        """Return the figures of `Columns` for one strategy, and the bytes summed of parameters read here alone."""
        setting = self.setting
        shapes_in = [setting.local(n, t.shape) for (t, _), n in zip(inputs, strategy.needs, strict=True)]
        shapes_out = [
            None if t is None else setting.local(m, t.shape) for t, m in zip(outputs, strategy.makes, strict=True)
        ]
        made = [t for t in outputs if t is not None]
        dtype = computes_in(t.dtype for t in (*(t for t, _ in inputs), *made))
        signature = self.signatures[op.name]
        around = circulation(signature, (*strategy.choices, *setting.made[op.name]))
        operands = [tensor for tensor, _ in inputs]
        every = zip(inputs, as_computed(around, strategy.needs), strict=True)
        computed = [setting.local(n, t.shape) for (t, _), n in every]
        forward, backward = self.cost.compute(signature, computed, shapes_out, dtype)
        forward += self.conversions.rotated(around, operands, shapes_in, "forward")
        backward += self.conversions.rotated(around, operands, shapes_in, "backward")
        if not any(t.needs_grad for t in made):
            backward = 0.0
        once = resting = kept = gathered = arriving = twice = cheap = 0.0
        read_back = self._kept_slots(op) if self.rests.placement.forward is not None else ()
        sums: list[Mapping[str, float]] = []
        for slot, ((tensor, alone), need) in enumerate(zip(inputs, strategy.needs, strict=True)):
            if tensor.role == "parameter" and alone:
                leaf = leaf_of(tensor, need)
                backward += self.conversions.seconds(tensor, leaf, need)
                found = self._placed(tensor, leaf)
                sums.append(found.summed)
                once, resting, arriving = once + found.once, resting + found.resting, arriving + found.arriving
                forward, backward = forward + found.forward, backward + found.backward
                if slot in read_back:
                    kept, gathered, twice = kept + found.kept, gathered + found.gathered, twice + found.again
            elif tensor.role in ("buffer", "constant", "input"):
                fed = tuple(s if isinstance(s, Sharded) and tensor.role == "input" else INVARIANT for s in need)
                forward += self.conversions.seconds(tensor, fed, need)
                resting += self._rests(tensor, fed) if tensor.role != "input" and alone else 0.0
        for k in self.kept[op.name]:
            size = prod(shapes_in[k.slot]) * k.ratio * element_bytes(operands[k.slot].dtype)
            kept, cheap = (kept, cheap + size) if k.cheap else (kept + size, cheap)
        handed = sum(
            prod(shape) * element_bytes(t.dtype)
            for t, shape, leaves_layer in zip(outputs, shapes_out, leaving, strict=True)
            if t is not None and shape is not None and leaves_layer
        )
        return (forward, backward + twice, once, resting, kept, handed, arriving, twice, gathered, cheap), sums

    def _kept_slots(self, op: Operation) -> tuple[int, ...]:
        return kept_by(self.graph, op, self.signatures[op.name])

    def _of_tensor(self, tensor: LogicalTensor, layouts: tuple[Layout, ...]) -> Columns:
        producer = self.graph.producers.get(tensor.name)
        own = None if producer is None else self.groups.get(producer.name, -1)
        leaves = own is not None and any(
            self.groups.get(user.name, -1) != own for user, _ in self.graph.consumers[tensor.name]
        )
        readers = self.graph.consumers[tensor.name] if tensor.role == "parameter" else ()
        read_back = any(slot in self._kept_slots(op) for op, slot in readers)
        key = (tensor.role, tensor.shape, tensor.dtype, tensor.needs_grad, id(layouts), leaves, read_back)
        if key not in self._columns:
            summed: dict[str, Column] = {}
            forward, backward, once, resting, kept, handed, arriving, twice, gathered = np.zeros((9, len(layouts)))
            if leaves:
                each = element_bytes(tensor.dtype)
                handed = np.array([float(prod(self.setting.local(x, tensor.shape)) * each) for x in layouts])
            if tensor.role == "parameter":
                found = [self._placed(tensor, leaf) for leaf in layouts]
                forward, backward, once, resting, arriving = np.array(
                    [(p.forward, p.backward, p.once, p.resting, p.arriving) for p in found]
                ).T.copy()
                if read_back:
                    kept, twice, gathered = np.array([(p.kept, p.again, p.gathered) for p in found]).T.copy()
                    backward += twice
                names = {name for one in found for name in one.summed}
                summed = {name: np.array([one.summed.get(name, 0.0) for one in found]) for name in sorted(names)}
            # only a parameter's gradient takes time here: it goes to where it rests
            made = forward, backward, once, resting, kept, handed, arriving, summed, backward, forward - twice
            self._columns[key] = Columns(*made, gathered, np.zeros(len(layouts)))
        return self._columns[key]

    def _meeting(self, tensor: LogicalTensor) -> tuple[Layout, ...]:
        """Return the layouts in which readers may find a tensor: those made, and those needed."""
        producer = self.graph.producers[tensor.name]
        made = self._layouts_of(self.strategies.of(producer), False, producer.outputs.index(tensor.name))
        wanted = dict.fromkeys(
            id(self._layouts_of(self.strategies.of(op), True, slot)) for op, slot in self.graph.consumers[tensor.name]
        )
        key = (id(made), *wanted)
        if key not in self._met:
            found = dict.fromkeys(made)
            for op, slot in self.graph.consumers[tensor.name]:
                found.update(dict.fromkeys(self._layouts_of(self.strategies.of(op), True, slot)))
            self._met[key] = self._shared(tuple(found))
        return self._met[key]

    def _leaves(self, tensor: LogicalTensor) -> tuple[Layout, ...]:
        """Return the layouts in which the leaf of a parameter may lie, given the layouts that its readers need."""
        found: dict[Layout, None] = {}
        whole = (INVARIANT, REPLICATED) if tensor.needs_grad else (INVARIANT,)
        for op, slot in self.graph.consumers[tensor.name]:
            for need in self._layouts_of(self.strategies.of(op), True, slot):
                options = [tuple(dict.fromkeys((state, *whole))) for state in leaf_of(tensor, need)]
                found.update(dict.fromkeys(product(*options)))
        return self._shared(tuple(found))

    def _shared(self, layouts: tuple[Layout, ...]) -> tuple[Layout, ...]:
        return self._layouts.setdefault(layouts, layouts)

    def _layouts_of(self, strategies: tuple[Strategy, ...], needed: bool, position: int) -> tuple[Layout, ...]:
        """Return the layout of one slot or output under every strategy."""
        key = (id(strategies), needed, position)
        if key not in self._made:
            self._made[key] = self._shared(tuple((s.needs if needed else s.makes)[position] for s in strategies))
        return self._made[key]

    def _edge(self, tensor: LogicalTensor, made: tuple[Layout, ...], needed: tuple[Layout, ...]) -> Column:
        """Return the seconds between choices of two nodes: [made, needed]; the same layout may stand there more than
        once."""
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
        """Return the seconds from a tensor's layout to those that a reader needs; the same layout in two slots is made
        once."""
        if len(slots) == 1:
            return self._edge(tensor, own, self._layouts_of(strategies, True, slots[0]))
        key = (id(own), id(strategies), slots, tensor.shape, tensor.dtype, tensor.needs_grad)
        if key not in self._edges:
            total = np.zeros((len(own), len(strategies)))
            for number, slot in enumerate(slots):
                table = self._edge(tensor, own, self._layouts_of(strategies, True, slot))
                again = [s.needs[slot] in [s.needs[before] for before in slots[:number]] for s in strategies]
                total = total + np.where(np.array(again)[None, :], 0.0, table)
            self._edges[key] = total
        return self._edges[key]

    def _alike(self, first: tuple[Strategy, ...], second: tuple[Strategy, ...]) -> Column:
        """Return 0 where two operations make the same choice, else infinity: [choices of first, choices of second]."""
        key = ("alike", id(first), id(second))
        if key not in self._edges:
            rows = [[0.0 if alike(a.choices[0], b.choices[0]) else inf for b in second] for a in first]
            self._edges[key] = np.array(rows, dtype=np.float64)
        return self._edges[key]

    def _rests(self, tensor: LogicalTensor, leaf: Layout) -> float:
        """Return the bytes of a buffer or a constant."""
        layout = tuple(s if isinstance(s, Sharded) else INVARIANT for s in leaf)
        elements = prod(self.setting.local(layout, tensor.shape))
        return float(parameter_memory(elements, tensor.dtype, trainable=False).total)

    def _placed(self, tensor: LogicalTensor, leaf: Layout) -> PlacedParameter:
        return placed(tensor, leaf, self.setting, self.rests, self.cost, self.optimizer)
