"""The strategies of an operation: one legal choice per searched axis, each with the layouts that it needs and makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from op_registry.annotation.splits import balanced

from nnscaler.ir.graph import Graph
from nnscaler.ir.layout import Layout, Sharded
from nnscaler.ir.operation import Operation
from nnscaler.ir.placement import Choice, RunInvariant, RunPartial, RunReplicated, Split
from nnscaler.planning.sharding.setting import Setting
from nnscaler.transform.candidates import all_candidates, reach
from nnscaler.transform.rules import explain_illegal_choices, input_layouts, output_layouts
from nnscaler.transform.signature import Signature

AxisOptions = Mapping[str, tuple[Choice, ...]]  # operation -> choices on one axis


@dataclass(frozen=True, slots=True)
class Strategy:
    """`choices`: per searched axis. `needs`, `makes`: layouts on all axes of the setting, of input slots and outputs."""

    choices: tuple[Choice, ...]
    needs: tuple[Layout, ...]
    makes: tuple[Layout, ...]


def axis_options(
    graph: Graph, signatures: Mapping[str, Signature], parts: int, with_batch: bool
) -> dict[str, tuple[Choice, ...]]:
    """The choices of every operation on an axis of `parts`. `with_batch`: also splits that the dims of the inputs
    reach; an axis beside one that has the batch leaves them to it."""
    candidates = all_candidates(graph, signatures, parts)
    taken: dict[str, set[Split]] = {op.name: set() for op in graph.operations}
    if not with_batch:
        inputs = graph.with_role("input")
        for dim in range(max((len(tensor.shape) for tensor in inputs), default=0)):
            carried = [t for t in inputs if dim < len(t.shape) and t.shape[dim] >= parts]
            states = {t.name: Sharded(dim, 1, (), balanced(t.shape[dim], parts)) for t in carried}
            for name, found in reach(graph, signatures, parts, states).items():
                taken[name].update(found)
    result: dict[str, tuple[Choice, ...]] = {}
    for op in graph.operations:
        grads = any(graph.tensors[n].needs_grad for n in (*op.inputs, *op.outputs) if n is not None)
        choices: list[Choice] = [RunInvariant()]
        if grads:
            choices.append(RunReplicated())
        kept = (c for c in candidates[op.name] if c not in taken[op.name])
        choices += [c for c in kept if not c.sizes or (grads and not with_batch)]
        choices += [RunPartial(slots) for slots in signatures[op.name].linear]
        result[op.name] = tuple(choices)
    return result


class Strategies:
    """The strategies of operations in one setting. Equal operations of repeated layers share theirs."""

    def __init__(
        self,
        graph: Graph,
        signatures: Mapping[str, Signature],
        setting: Setting,
        options: Sequence[AxisOptions],
    ) -> None:
        self._graph, self._signatures, self._setting, self._options = graph, signatures, setting, options
        self._known: dict[object, tuple[Strategy, ...]] = {}

    def of(self, op: Operation) -> tuple[Strategy, ...]:
        """Those with distinct layouts, what runs whole first."""
        graph, signature = self._graph, self._signatures[op.name]
        options = tuple(per_axis[op.name] for per_axis in self._options)
        made = self._setting.made[op.name]
        grads = tuple(None if n is None else graph.tensors[n].needs_grad for n in (*op.inputs, *op.outputs))
        key = (id(signature), options, made, grads)
        if key not in self._known:
            self._known[key] = tuple(self._make(op, signature, options, made))
        return self._known[key]

    def _make(
        self, op: Operation, signature: Signature, options: Sequence[tuple[Choice, ...]], made: tuple[Choice, ...]
    ) -> list[Strategy]:
        found: dict[object, Strategy] = {}
        for choices in product(*options):
            every = (*choices, *made)
            if explain_illegal_choices(self._graph, op, signature, every, self._setting.axes):
                continue
            needs = input_layouts(self._graph, op, signature, every)
            makes = output_layouts(self._graph, op, signature, every)
            found.setdefault((needs, makes), Strategy(choices, needs, makes))
        return list(found.values())
