"""A graph as the planner sees it: its layers as items between which a pipeline may be cut, and its tables by size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from nnscaler.ir.graph import Graph
from nnscaler.ir.operation import Operation
from nnscaler.ir.placement import Choice
from nnscaler.planning.cost.model import AxisPlace, CostModel
from nnscaler.planning.sharding.memory import Kept, kept_by
from nnscaler.planning.sharding.pose import Weights, pose
from nnscaler.planning.sharding.setting import make_setting
from nnscaler.planning.sharding.strategies import Strategies, axis_options
from nnscaler.planning.sharding.tables import TableBuilder, Tables
from nnscaler.planning.solver.solve import solve
from nnscaler.transform.layers import Layer, layers_of
from nnscaler.transform.signature import Signature

Allows = Callable[[Operation, Choice], bool]


@dataclass(frozen=True, slots=True)
class Least:
    """Lower bounds for a rank of a tensor-parallel group that runs the whole graph on the whole batch, part by part.

    `seconds`, and those that running the layers forward `again` takes; bytes at rest, in all and of layers; bytes that
    all micro-batches together keep in layers, and hand on from layer to layer; bytes of gradients summed over dp;
    whether all layers are alike in these.
    """

    seconds: float
    again: float
    resting: float
    resting_of_layers: float
    kept: float
    handed: float
    summed: float
    alike: bool


@dataclass
class Subject:
    """Caches what depends on the graph, on tp, and on the size of a micro-batch. `allows`: whether a choice on tp
    may be taken."""

    graph: Graph
    signatures: Mapping[str, Signature]
    cost: CostModel
    allows: Allows | None = None
    _options: dict[int, Mapping[str, tuple[Choice, ...]]] = field(default_factory=dict)
    _tables: dict[tuple[int, int], Tables] = field(default_factory=dict)
    _least: dict[tuple[int, int], Least] = field(default_factory=dict)

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        return layers_of(self.graph)

    @cached_property
    def groups(self) -> dict[str, int]:
        """operation -> the number of its layer."""
        return {name: i for i, layer in enumerate(self.layers) for name in layer.operations}

    @cached_property
    def items(self) -> dict[str, int]:
        """operation -> 0 before the layers, i + 1 in or after layer i, one more after the last one."""
        last = max((i for i, op in enumerate(self.graph.operations) if op.name in self.groups), default=-1)
        found: dict[str, int] = {}
        here = 0
        for i, op in enumerate(self.graph.operations):
            here = max(here, self.groups.get(op.name, here - 1) + 1)
            found[op.name] = here if i <= last else len(self.layers) + 1
        return found

    @cached_property
    def kept(self) -> dict[str, tuple[Kept, ...]]:
        return kept_by(self.graph, self.signatures)

    @cached_property
    def batch(self) -> int:
        """Samples in the global batch."""
        return next((t.shape[0] for t in self.graph.with_role("input") if t.shape), 1)

    def options(self, parts: int) -> Mapping[str, tuple[Choice, ...]]:
        """The choices on a tp axis that may be taken."""
        if parts not in self._options:
            found = axis_options(self.graph, self.signatures, parts, with_batch=False, full=True)
            if self.allows is not None:
                by_name, allows = self.graph.by_name, self.allows
                found = {n: tuple(c for c in made if allows(by_name[n], c)) for n, made in found.items()}
            self._options[parts] = found
        return self._options[parts]

    def tables(self, tp: int, parts: int) -> Tables:
        """For shards of `tp` and one of `parts` of the batch. Data parallel parts and micro-batches are alike here: a
        rank sees the same shapes."""
        key = (tp, parts)
        if key not in self._tables:
            places = {"tp": AxisPlace(tp), "dp": AxisPlace(parts, tp)}
            mesh = tuple((n, s) for n, s in (("dp", parts), ("tp", tp)) if s > 1)
            setting = make_setting(self.graph, self.signatures, mesh, ("tp",), 1, places)
            options = [self.options(tp)] if tp > 1 else []
            strategies = Strategies(self.graph, self.signatures, setting, options)
            builder = TableBuilder(self.graph, self.signatures, setting, self.cost, strategies, self.kept, self.groups)
            self._tables[key] = builder.build()
        return self._tables[key]

    def least(self, tp: int, parts: int | None = None) -> Least:
        """What no choices come below, in whatever parts the batch goes through, or in `parts`."""
        parts = parts or 1
        key = (tp, parts)
        if key not in self._least:
            tables = self.tables(tp, parts)
            alone = solve(pose(tables, Weights(once=0.0)))
            pairs = [(c, group >= 0) for c, group in zip(tables.columns, tables.groups, strict=True)]
            each: dict[int, tuple[float, float, float]] = {}
            for columns, group in zip(tables.columns, tables.groups, strict=True):
                if group >= 0:
                    rest, kept, handed = each.get(group, (0.0, 0.0, 0.0))
                    least = (columns.resting.min(), columns.kept.min(), columns.handed.min())
                    each[group] = (rest + float(least[0]), kept + float(least[1]), handed + float(least[2]))
            self._least[key] = Least(
                alone.bound * parts,
                parts * sum(float(c.forward.min()) for c, inside in pairs if inside),
                sum(float(c.resting.min()) for c, _ in pairs),
                sum(float(c.resting.min()) for c, inside in pairs if inside),
                parts * sum(float(c.kept.min()) for c, inside in pairs if inside),
                parts * sum(float(c.handed.min()) for c, inside in pairs if inside),
                sum(float(c.summed["dp"].min()) for c, _ in pairs if "dp" in c.summed),
                len(set(each.values())) == 1,
            )
        return self._least[key]
