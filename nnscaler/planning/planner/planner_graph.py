"""The planner's view of a graph: layers as items between which a pipeline may be cut, and its cost tables by size."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from math import gcd

from nnscaler.ir.graph import Graph, LogicalTensor, element_bytes, gradient_dtype
from nnscaler.ir.operation_annotations import Signature
from nnscaler.ir.operation_placement import Choice
from nnscaler.planning.constraints.size_and_choice_constraints import Constraint
from nnscaler.planning.context_and_expert_parallel import find_experts
from nnscaler.planning.cost.model_protocol import AxisPlace, CostModel
from nnscaler.planning.parallel_configurations import Configuration, configurations
from nnscaler.planning.planner.bounds.equal_layer_pipeline import Layered
from nnscaler.planning.planner.bounds.rough_equal_layer_pipeline import Least, Rough
from nnscaler.planning.planner.equal_layer_chain import Chain, find_chain, shown
from nnscaler.planning.planner.layer_items_and_parameters import (
    ParametersByLayer,
    Repeated,
    halves_of_items,
    items_of_operations,
)
from nnscaler.planning.sharding.build_problem import LayerWindow, Weights, pose
from nnscaler.planning.sharding.cost_tables import TableBuilder, Tables
from nnscaler.planning.sharding.parameter_and_activation_memory import OPTIMIZER_BYTES, KeptActivations, read_back
from nnscaler.planning.sharding.settings_and_strategies import Setting, Strategies, axis_options, given_axes
from nnscaler.planning.sharding.zero_stages import AT_REST_WHOLE, AtRest, ParameterPlacement
from nnscaler.planning.solver.solve import solve
from nnscaler.scheduling.interlaced import INTERLACED
from nnscaler.scheduling.registry import DEFAULT, planned_schedules
from nnscaler.scheduling.schedule import Ramp, ScheduleKind
from nnscaler.transform.balanced_cuts_at_module_borders import Block
from nnscaler.transform.complete_plan import batch_of
from nnscaler.transform.partition_stages import parts_of
from nnscaler.transform.plan import CP, DP, EP, TP
from nnscaler.transform.select_operations import Layer

MANY = 8  # layers, from which on some stand for all

FREE = Constraint("none")


@dataclass(frozen=True)
class EndsEstimate:
    """The shared ends of a pipeline on one rank.

    seconds  of one micro-batch, forward and backward, and of the messages between them and the layers
    once     seconds once per step
    resting  bytes of parameters, gradients and optimizer states
    kept     bytes of activations of all live micro-batches
    choices  by operation, its choice over all ranks
    """

    seconds: float
    once: float
    resting: float
    kept: float
    choices: Mapping[str, Choice]


@dataclass
class PlanningCache:
    """A graph with everything that the planner derives from it, cached by tp and by the size of a micro-batch.

    constraint     what a plan keeps to
    optimizer      bytes that the optimizer keeps of an element
    within_layers  whether pipelines are cut within layers
    layered        the chain in a configuration and within a limit of memory (bytes), by moment
    gathering      by how parameters rest, the place of a dp axis, tp, and layer: seconds to gather and to scatter them
    left_out       operations that cost nothing here, with the parameters that only they read: others run them
    axes           by axis, where its groups lie among the ranks; None: as in a configuration of these sizes
    ends           what the shared ends of a pipeline cost (`shared_ends`), by sizes
    """

    graph: Graph
    signatures: Mapping[str, Signature]
    cost: CostModel
    constraint: Constraint = FREE
    optimizer: float = OPTIMIZER_BYTES
    cp: int = 1
    within_layers: bool = False
    layered: dict[tuple[Configuration, float], tuple[Layered, ...]] = field(default_factory=dict)
    gathering: dict[tuple[ParameterPlacement, AxisPlace, int, int | None], float] = field(default_factory=dict)
    left_out: frozenset[str] = frozenset()
    axes: Mapping[str, AxisPlace] | None = None
    ends: dict[tuple[int, int, int, int, AtRest], EndsEstimate] = field(default_factory=dict)
    _options: dict[int, Mapping[str, tuple[Choice, ...]]] = field(default_factory=dict)
    _settings: dict[tuple[int, int], Setting] = field(default_factory=dict)
    _builders: dict[tuple[int, int, AtRest], TableBuilder] = field(default_factory=dict)
    _alike: dict[tuple[int, int, int], TableBuilder] = field(default_factory=dict)
    _tables: dict[tuple[int, int, AtRest, bool], Tables] = field(default_factory=dict)
    _least: dict[int, Least] = field(default_factory=dict)
    _fastest: dict[tuple[int, int, int, Ramp | None], float] = field(default_factory=dict)
    _chains: dict[tuple[int, int, AtRest], Chain | None] = field(default_factory=dict)
    _repeated: dict[int, Repeated | None] = field(default_factory=dict)
    _rough: dict[tuple[int, int, bool], Rough] = field(default_factory=dict)
    _shrinks: dict[tuple[AtRest, bool], float] = field(default_factory=dict)

    @cached_property
    def layers(self) -> tuple[Layer | Block, ...]:
        """The layers; where pipelines are cut within them, and of a model that has no two numbered ones, blocks of
        modules."""
        return parts_of(self.graph, self.signatures, self.within_layers)

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """`layers` where these are blocks; empty where they are layers."""
        return tuple(part for part in self.layers if isinstance(part, Block))

    def cut_within_layers(self) -> PlanningCache | None:
        """Return the same graph with pipelines that are cut within layers; None where that makes none much more even.
        What bounds the whole graph is shared."""
        if self.blocks or len(self.layers) >= MANY or self.constraint.ends is not None or self.cost.overheads.shared:
            return None
        fresh = PlanningCache(self.graph, self.signatures, self.cost, self.constraint, self.optimizer, self.cp, True)
        fresh._fastest, fresh._options = self._fastest, self._options
        fresh.halves = self.halves
        return fresh

    @cached_property
    def schedules(self) -> tuple[ScheduleKind, ...]:
        """The schedules that are searched: those that split few backwards where it is known how long halves take, or
        where they are asked for."""
        measured, asked = self.cost.measured, self.constraint.schedules
        known = [(kind, kind.figures) for kind in planned_schedules()]
        return tuple(k for k, figures in known if figures and (not figures.few or measured or k.name in asked))

    def space(self, ranks: int, each: bool = False) -> Iterator[Configuration]:
        """Yield the configurations of so many ranks. Blocks are cut for balance, and too small to be recomputed."""
        interlaced = self.constraint.ends is not None  # its ends divide what is not experts over all ranks
        if ranks % self.cp or (interlaced and self.cp > 1):
            return
        experts = 1 if interlaced else self.experts
        count, recomputing = len(self.layers), not self.blocks
        for c in configurations(ranks // self.cp, self.batch, count, self.schedules, each, recomputing, experts):
            if interlaced and c.pp > 1:
                if c.schedule is DEFAULT:
                    yield replace(c, schedule=INTERLACED)
            elif c.pp > 1 or not self.within_layers:
                yield replace(c, cp=self.cp, within_layers=self.within_layers)

    @cached_property
    def experts(self) -> int:
        """The greatest number that divides the experts of every layer; 1 for a model without experts."""
        return gcd(*(one.experts for one in find_experts(self.graph, self.signatures))) or 1

    @property
    def described(self) -> str:
        """`12 layers`, `40 blocks of modules`."""
        return f"{len(self.layers)} {'blocks of modules' if self.blocks else 'layers'}"

    @cached_property
    def groups(self) -> dict[str, int]:
        """By operation in a layer, the number of the layer."""
        return {name: i for i, layer in enumerate(self.layers) for name in layer.operations}

    @cached_property
    def items(self) -> dict[str, int]:
        return items_of_operations(self.graph, self.groups, len(self.layers))

    @cached_property
    def activations(self) -> KeptActivations:
        """Values that backward reads; where pipelines are cut within layers, with those that may be computed again."""
        return KeptActivations.of(self.graph, self.signatures, bool(self.blocks))

    @cached_property
    def halves(self) -> dict[str, float]:
        return halves_of_items(self.graph, self.items)

    @cached_property
    def batch(self) -> int:
        """Samples in the global batch."""
        return batch_of(self.graph)

    @cached_property
    def repeated(self) -> Repeated | None:
        """The equal layers between the first and the last; None where they differ or are fewer than `MANY` in all."""
        count, kept = len(self.layers), self.constraint
        if count < MANY or self.blocks or kept.also or kept.together or kept.at:
            return None
        by_name = self.graph.by_name
        looks = {
            tuple((id(self.signatures[n]), by_name[n].region, len(by_name[n].inputs)) for n in layer.operations)
            for layer in self.layers[1:-1]
        }
        if len(looks) > 1:
            return None
        middle, size = count // 2, 2 if count % 2 == 0 else 1
        return Repeated(range(middle, middle + size), range(middle - 1, middle + 2), (count - 2) // size)

    def repeated_on(self, tp: int) -> Repeated | None:
        """Return `repeated` where the constraints leave all of these layers the same choices on tp, else None."""
        if self.repeated is None or tp == 1 or self.constraint is FREE:
            return self.repeated
        if tp not in self._repeated:
            options = self.options(tp)
            looks = {tuple(id(options[name]) for name in layer.operations) for layer in self.layers[1:-1]}
            self._repeated[tp] = self.repeated if len(looks) == 1 else None
        return self._repeated[tp]

    def window(self, tp: int) -> LayerWindow | None:
        """Return the layers that stand for all equal layers in bounds; None where layers differ."""
        found = self.repeated_on(tp)
        return None if found is None else LayerWindow(frozenset(found.window), float(found.times))

    def _short(self, layers: range) -> frozenset[str]:
        """Return the operations outside of layers, of the first and the last layer, and of `layers`."""
        kept = {0, len(self.layers) - 1, *layers}
        return frozenset(op.name for op in self.graph.operations if self.groups.get(op.name, 0) in kept)

    def options(self, parts: int) -> Mapping[str, tuple[Choice, ...]]:
        """Return, by operation, the choices that it may take on a tp axis of `parts`.

        Layers that are alike share those of one of them.
        """
        if parts in self._options:
            return self._options[parts]
        graph, repeated = self.graph, self.repeated
        if repeated is not None:
            short = self._short(repeated.around)
            operations = tuple(op for op in graph.operations if op.name in short)
            named = {name for op in operations for name in (*op.inputs, *op.outputs)}
            tensors = {name: t for name, t in graph.tensors.items() if name in named or t.role == "input"}
            graph = graph.replace(tensors=tensors, operations=operations)
        found = axis_options(graph, self.signatures, parts)
        if repeated is not None:
            model = self.layers[repeated.window[0]].operations
            for layer in self.layers[1:-1]:
                found.update((name, found[same]) for name, same in zip(layer.operations, model, strict=True))
        if self.constraint is FREE:
            self._options[parts] = found
            return found
        by_name, allows, also = self.graph.by_name, self.constraint.allows, self.constraint.also
        same: dict[tuple[Choice, ...], tuple[Choice, ...]] = {}
        found = {n: (*made, also[n]) if n in also and also[n] not in made else made for n, made in found.items()}
        left = {n: tuple(c for c in made if allows(by_name[n], c)) for n, made in found.items()}
        self._options[parts] = {n: same.setdefault(made, made) for n, made in left.items()}
        return self._options[parts]

    def _builder(self, tp: int, parts: int, rests: AtRest = AT_REST_WHOLE) -> TableBuilder:
        key, ep = (tp, parts, rests), rests.experts
        like = self._alike.get((tp, parts, ep))
        if key not in self._builders and like is not None:
            self._builders[key] = like.resting(rests)
        elif key not in self._builders:
            places = self.axes or {
                TP: AxisPlace(tp),
                CP: AxisPlace(self.cp, tp),
                EP: AxisPlace(ep, tp * self.cp),
                DP: AxisPlace(parts // ep, tp * self.cp * ep),
            }
            if (parts, ep) not in self._settings:
                self._settings[parts, ep] = given_axes(self.graph, self.signatures, parts, ep, self.cp, places)
            searched = ((TP, tp),) if tp > 1 else ()
            setting = replace(self._settings[parts, ep], searched=searched, places=places)
            options = [self.options(tp)] if tp > 1 else []
            strategies = Strategies(self.graph, self.signatures, setting, options)
            pairs = tuple(pair for group in self.constraint.together for pair in pairwise(group))
            self._builders[key] = TableBuilder(
                self.graph,
                self.signatures,
                setting,
                self.cost,
                strategies,
                self.activations.by_operation,
                self.groups,
                pairs,
                rests,
                self.optimizer,
                self.elsewhere,
                self.halves,
            )
            self._alike[tp, parts, ep] = self._builders[key]
        return self._builders[key]

    def tokens(self, c: Configuration) -> Mapping[str, Choice]:
        """Return, by operation, its choice on the axis that splits tokens."""
        if self.cp == 1:
            return {}
        setting = self._builder(c.tp, c.parts, c.rests).setting
        return {name: made[-2] for name, made in setting.made.items()}

    @property
    def elsewhere(self) -> frozenset[str]:
        """Operations that cost nothing in the tables: those that are left out, and the shared ends of a pipeline."""
        ends = self.constraint.ends
        return self.left_out if ends is None else self.left_out | ends.both

    def tables_of(self, tp: int, parts: int, rests: AtRest, only: Collection[str]) -> Tables:
        """Return the cost tables of these operations."""
        return self._builder(tp, parts, rests).build(only)

    def tables(self, tp: int, parts: int, rests: AtRest = AT_REST_WHOLE, short: bool = False) -> Tables:
        """Return the cost tables for operators split over `tp`, with one of `parts` of the batch.

        Data-parallel parts and micro-batches are alike here: a rank sees the same shapes. `rests` says how
        parameters rest over dp. `short` leaves out the layers that the window stands for, where there is one.
        """
        repeated = self.repeated_on(tp) if short else None
        key = (tp, parts, rests, repeated is not None)
        if key not in self._tables:
            only = None if repeated is None else self._short(repeated.window)
            self._tables[key] = self._builder(tp, parts, rests).build(only)
        return self._tables[key]

    def chain(self, tp: int, parts: int, rests: AtRest = AT_REST_WHOLE) -> Chain | None:
        """Return the tables as a chain of three pieces where all layers but the first and the last are alike, else
        None."""
        key = (tp, parts, rests)
        if self.repeated_on(tp) is None:
            return None
        if key not in self._chains:
            count = len(self.layers)
            tables = self._builder(tp, parts, rests).build(shown(self.graph, self.groups, count))
            self._chains[key] = find_chain(tables, self.items_of(tables), count)
        return self._chains[key]

    def rough(self, tp: int, parts: int, inside: bool = False) -> Rough | None:
        """Return bounds from the chain whose shapes are those of one of `parts` of the batch; None where the graph is
        no chain. `inside`: without what is kept outside of layers."""
        chain = self.chain(tp, parts)
        if chain is None:
            return None
        key = (tp, parts, inside)
        if key not in self._rough:
            kept = chain.with_kept_outside(0.0, 0.0) if inside else chain
            self._rough[key] = Rough(kept, len(self.layers), self.batch, parts)
        return self._rough[key]

    def items_of(self, tables: Tables) -> list[int]:
        """Return the item of every node: that of its operation, of the tensor's producer, or of the tensor's first
        reader."""
        graph, found = self.graph, []
        for name in tables.names:
            op = graph.by_name.get(name) if name in tables.strategies else graph.producers.get(name)
            found.append(self.items[(op or graph.consumers[name][0][0]).name])
        return found

    @cached_property
    def parameters_by_layer(self) -> ParametersByLayer:
        back = read_back(self.graph, self.signatures)
        return ParametersByLayer(self.graph, self.groups, self.items, len(self.layers), self.elsewhere, back)

    @cached_property
    def trained(self) -> tuple[LogicalTensor, ...]:
        """One parameter with a gradient of each dtype and each dtype at rest."""
        found = {(t.dtype, t.master): t for t in self.graph.with_role("parameter") if t.needs_grad}
        return tuple(found.values())

    def shrinks(self, rests: AtRest, late: bool = False) -> float:
        """Return how many times fewer bytes rest on a rank, at most, than where all parameters rest whole.

        `late` counts the whole gradients when a backward ends, too.
        """
        if (rests, late) not in self._shrinks:
            self._shrinks[rests, late] = rests.shrinks(self.trained, self.optimizer, late)
        return self._shrinks[rests, late]

    @cached_property
    def values(self) -> float:
        """The least bytes of a parameter per byte of its gradient."""
        sizes = (element_bytes(t.dtype) / element_bytes(gradient_dtype(t.dtype)) for t in self.trained)
        return min(sizes, default=1.0)

    def least(self, tp: int) -> Least:
        """Return lower bounds of time and memory that hold for every choice on tp, whatever parts the batch goes
        through in."""
        if tp in self._least:
            return self._least[tp]
        rough = self.rough(tp, 1)
        if rough is not None:
            self._least[tp] = rough.least
            return rough.least
        tables, window = self.tables(tp, 1, short=True), self.window(tp)
        nodes = [
            (c, g >= 0, window.times if window is not None and g in window.groups else 1.0)
            for c, g in zip(tables.columns, tables.groups, strict=True)
        ]
        self._least[tp] = Least(
            self.fastest(tp, 1),
            sum(often * float(c.again.min()) for c, inside, often in nodes if inside),
            sum(often * float(c.resting.min()) for c, _, often in nodes),
            sum(often * float(c.kept.min()) for c, inside, often in nodes if inside),
            sum(often * float(c.handed.min()) for c, inside, often in nodes if inside),
            sum(often * float(c.summed[DP].min()) for c, _, often in nodes if DP in c.summed),
        )
        return self._least[tp]

    def fastest(self, tp: int, parts: int, passes: Ramp | None = None, ep: int = 1) -> float:
        """Return a lower bound of the seconds of one of `parts` of the batch, forward and backward, without a limit of
        memory. `passes`: how often F, I and W count; None: once."""
        key = (tp, parts, ep, passes)
        if key not in self._fastest:
            tables = self.tables(tp, parts, AtRest(experts=ep), short=True)
            self._fastest[key] = solve(pose(tables, Weights(once=0.0, passes=passes), self.window(tp))).bound
        return self._fastest[key]
