"""Expand equal layers: put copies of a traced layer's operations where `calls` left one node for an equal layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch import Tensor

from op_registry.call import dtype_name

from nnscaler.errors import NnscalerError, few
from nnscaler.ir.graph import LogicalTensor, Operation, Slot
from nnscaler.tracing.canonical_graph import canonical, with_names
from nnscaler.tracing.export.import_exported_program import import_program
from nnscaler.tracing.export.loss_module import LossModule
from nnscaler.tracing.export.run_export import Exported, export_loss
from nnscaler.tracing.graph_builder import RawGraph
from nnscaler.tracing.repeated_layers.call_record import CannotStitch
from nnscaler.tracing.repeated_layers.follow_calls import NAMESPACE, Calls, LayerCall, following
from nnscaler.tracing.repeated_layers.repeated_call_under_way import repeated_layers
from nnscaler.tracing.strided_views import name_windows

STORED = ("parameter", "buffer")


@dataclass(frozen=True)
class Body:
    """The operations of a traced call, with tensor names in the order of the record.

    call         that was traced
    operations   in order
    given        tensors from outside
    made         results; None for one that is not used
    constants    tensors with data
    """

    call: LayerCall
    operations: tuple[Operation, ...]
    given: tuple[str, ...]
    made: tuple[str | None, ...]
    constants: tuple[str, ...]


def expand(
    raw: RawGraph, state: Mapping[str, Tensor], calls: Sequence[LayerCall]
) -> tuple[RawGraph, dict[str, Tensor]]:
    """Return the graph without marks, and the stored tensors with the constants that copies have.

    Raises CannotStitch where a copy would not be what the trace of the layer gives.
    """
    expander = _Expander(raw, dict(state), calls)
    for operation in raw.graph.operations:
        expander.add(operation)
    return expander.finish(), expander.state


@dataclass
class _Expander:
    raw: RawGraph
    state: dict[str, Tensor]
    calls: Sequence[LayerCall]
    tensors: dict[str, LogicalTensor] = field(default_factory=dict)
    storages: dict[str, int] = field(default_factory=dict)
    operations: list[Operation] = field(default_factory=list)
    _bodies: dict[int, Body] = field(default_factory=dict)
    _made: dict[int, tuple[str | None, ...]] = field(default_factory=dict)  # of copies
    _wanted: dict[int, list[tuple[int, str]]] = field(default_factory=dict)  # call -> (number, name of the mark's)
    _names: dict[str, str] = field(default_factory=dict)
    _begin: int = 0
    _stored: dict[str, str] = field(default_factory=dict)  # name in the model -> name in the graph
    _constants: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.storages = dict(self.raw.storages)
        for operation in self.raw.graph.operations:
            if operation.operator == f"{NAMESPACE}.made.default":
                call, number = operation.args
                self._wanted.setdefault(call, []).append((number, operation.outputs[0] or ""))
        marks = {name for wanted in self._wanted.values() for _, name in wanted}
        self.tensors = {n: t for n, t in self.raw.graph.tensors.items() if n not in marks}
        self._stored = {f: t.name for t in self.raw.graph.with_role(*STORED) for f in t.fqns}

    def add(self, operation: Operation) -> None:
        space, _, mark = operation.operator.removesuffix(".default").partition(".")
        if space != NAMESPACE:
            known = self._names.keys().isdisjoint(operation.inputs)
            inputs = tuple(self._names.get(n, n) for n in operation.inputs)
            self.operations.append(operation if known else replace(operation, inputs=inputs))
        elif mark == "begin":
            self._begin = len(self.operations)
        elif mark == "end":
            given, made, number = operation.args
            self._end(number, self._listed(operation, given), self._listed(operation, made))
        elif mark == "again":
            given, number = operation.args
            self._copy(number, [n or "" for n in self._listed(operation, given)])
        else:
            number, made = operation.args
            name = self._made[number][made]
            assert name is not None and operation.outputs[0] is not None
            self._names[operation.outputs[0]] = name

    def finish(self) -> RawGraph:
        graph = self.raw.graph
        loss = self._names.get(graph.loss, graph.loss)
        outputs = tuple((name, self._names.get(tensor, tensor)) for name, tensor in graph.outputs)
        made = graph.replace(tensors=self.tensors, operations=tuple(self.operations), loss=loss, outputs=outputs)
        return RawGraph(made, self.storages)

    def _listed(self, operation: Operation, values: Any) -> tuple[str | None, ...]:
        names = (operation.inputs[v.index] if isinstance(v, Slot) else None for v in values)
        return tuple(None if n is None else self._names.get(n, n) for n in names)

    def _end(self, number: int, given: tuple[str | None, ...], made: tuple[str | None, ...]) -> None:
        operations = tuple(self.operations[self._begin :])
        inputs = dict.fromkeys(n for op in operations for n in op.inputs)
        constants = tuple(n for n in inputs if self.tensors[n].role == "constant")
        if any(name is None for name in given):
            raise CannotStitch(f"{self.calls[number].site.path} reads what is not a tensor of the graph")
        names = tuple(n for n in given if n is not None)
        self._bodies[number] = Body(self.calls[number], operations, names, made, constants)

    # ---- copies ----

    def _copy(self, number: int, given: Sequence[str]) -> None:
        call = self.calls[number]
        assert call.like is not None
        body = self._bodies[call.like]
        names = dict(zip(body.given, given, strict=True))
        for operation in body.operations:
            for name in operation.inputs:
                if name not in names:
                    names[name] = self._counterpart(name, body, call)
            names.update({n: f"{n}@{number}" for n in operation.outputs if n is not None})
        self._made[number] = tuple(None if n is None else names.get(n) for n in body.made)
        self._define(number, names, body)
        for operation in body.operations:
            self.operations.append(_renamed(operation, number, names, body.call, call))

    def _counterpart(self, name: str, body: Body, call: LayerCall) -> str:
        """Return the tensor that a copy reads in place of a stored tensor or constant that the body reads."""
        tensor = self.tensors[name]
        if tensor.role in STORED:
            own = body.call.site.path + "."
            inside = next((f for f in tensor.fqns if f.startswith(own)), None)
            return name if inside is None else self._stored[f"{call.site.path}.{inside.removeprefix(own)}"]
        if tensor.role != "constant" or len(body.constants) != len(body.call.constants):
            raise CannotStitch(f"{body.call.site.path} reads {name}, which is not handed to it")
        position = body.constants.index(name)
        self._constants.setdefault(id(body.call.constants[position]), name)
        return self._constant(call.constants[position])

    def _constant(self, tensor: Tensor) -> str:
        name = self._constants.get(id(tensor))
        if name is None:
            number = sum(t.role == "constant" for t in self.tensors.values())
            name, fqn = f"constant_{number}@", f"_constants.{number}"
            self._constants[id(tensor)] = name
            self.state[fqn] = tensor
            self.tensors[name] = LogicalTensor(
                name, tuple(tensor.shape), dtype_name(tensor.dtype), "constant", fqns=(fqn,)
            )
            self.storages[name] = -len(self.storages) - 1
        return name

    def _define(self, number: int, names: Mapping[str, str], body: Body) -> None:
        """The copy's tensors and their memory: shared where the body's is, and with what the rest of the graph sees."""
        memory: dict[int, int] = {}
        made = {n for op in body.operations for n in op.outputs if n is not None}
        pairs = [(old, new) for old, new in names.items() if old not in made]
        for position, mark in self._wanted.get(number, ()):
            old = body.made[position]
            if old is None or not _same_kind(self.tensors[old], self.raw.graph.tensors[mark]):
                raise CannotStitch(f"{self.calls[number].site.path} gives another tensor than {body.call.site.path}")
            pairs.append((old, mark))
        for old, new in pairs:
            if old not in self.storages or new not in self.storages:
                continue
            if memory.setdefault(self.storages[old], self.storages[new]) != self.storages[new]:
                raise CannotStitch(f"tensors of {self.calls[number].site.path} share memory otherwise than before")
        for old in made:
            new = names[old]
            self.tensors[new] = replace(self.tensors[old], name=new)
            self.storages[new] = memory.setdefault(self.storages[old], -len(self.storages) - 1)


def _same_kind(one: LogicalTensor, other: LogicalTensor) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype)


def _renamed(operation: Operation, number: int, names: Mapping[str, str], old: LayerCall, new: LayerCall) -> Operation:
    module = operation.module
    path, other = old.site.path, new.site.path
    if module == path or module.startswith(path + "."):
        module = other + module[len(path) :]
    region = operation.region
    changed = dict(zip(old.names, new.names, strict=True))
    if changed:
        values = {f.name: getattr(region, f.name) for f in fields(region)}
        region = replace(region, **{k: changed[v] for k, v in values.items() if v in changed})
    return with_names(replace(operation, region=region), f"{operation.name}@{number}", names, module)


# Export a model and import its graph, with each of many equal layers traced once where that can be done.

_AT_LEAST = {"auto": 8, "always": 2}


@dataclass(frozen=True)
class Stitched:
    """An exported and imported loss.

    exported   the training IR
    raw        the imported graph before the passes
    state      its stored tensors
    notes      about the copies
    repeats    how many calls of layers were copied, in words
    """

    exported: Exported
    raw: RawGraph
    state: Mapping[str, Tensor]
    notes: tuple[str, ...] = ()
    repeats: str = ""


def export_graph(wrapper: LossModule, tensors: tuple[Tensor, ...], specialise: bool, repeat_layers: str) -> Stitched:
    """Export and import the graph of the loss. `repeat_layers` as in `trace`: the graph does not depend on it.

    Raises NnscalerError "trace_failed" and "no_loss"; "usage" for another word in `repeat_layers`.
    """
    if repeat_layers != "off" and repeat_layers not in _AT_LEAST:
        raise NnscalerError("usage", f"repeat_layers is {repeat_layers!r}", help='use "auto", "always" or "off"')
    sites = {} if repeat_layers == "off" else repeated_layers(wrapper.model, _AT_LEAST[repeat_layers])
    if not sites:
        return _export(wrapper, tensors, specialise)
    calls = Calls(wrapper.model, sites)
    try:
        with following(calls):
            return _export(wrapper, tensors, False, calls)
    except NnscalerError as error:
        found = _export(wrapper, tensors, specialise)
        return replace(found, notes=(f"every layer is traced by itself: {error.message}",))


def _export(wrapper: LossModule, tensors: tuple[Tensor, ...], specialise: bool, calls: Calls | None = None) -> Stitched:
    exported = export_loss(wrapper, tensors, specialise)
    name_windows(exported.program)
    results = wrapper.last.found
    assert results is not None
    imported = import_program(exported.program, wrapper.model, tuple(wrapper.sample.tensors), results)
    if calls is None:
        return Stitched(exported, *canonical(imported.raw, imported.state))
    expanded = canonical(*expand(imported.raw, imported.state, calls.calls))
    return Stitched(exported, *expanded, repeats=_describe(calls))


def _describe(calls: Calls) -> str:
    copies = sum(call.like is not None for call in calls.calls)
    if not copies:
        return ""
    return f"{copies} of {len(calls.calls)} calls of repeated layers copied from {_listed(calls)}"


def _listed(calls: Calls) -> str:
    used: Sequence[str] = [
        calls.calls[n].site.path for n in sorted({c.like for c in calls.calls if c.like is not None})
    ]
    return few(used)
