"""Operators without annotation: where a model calls them, whether it matters, and the calls with their values.

Where the model has no data, or the tensors are large, calls get smaller tensors of the same kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from op_registry.call import DType, instances_in, map_instances
from op_registry.registry import default_registry
from op_registry.spec import OperatorSpec, SchemaParameter

from nnscaler.ir.graph import Graph, Operation, Slot
from nnscaler.is_user_file import from_package_on
from nnscaler.model_file import shown_path
from nnscaler.tracing import Traced
from nnscaler.tracing.export.custom_gradients import OpaqueFunction
from nnscaler.tracing.graph_builder import dtype_of, torch_operator
from nnscaler.tracing.run_graph import run_graph
from verify.evidence.inputs.concrete_call import ConcreteCall, function_of, make_call
from verify.evidence.inputs.find_operator import record_of
from verify.operators.suggest.call_with_other_tensors_and_integers import Number, Question, make_question
from verify.operators.suggest.coupled_sizes import Group, find_groups, size_of

# The operators of a graph that have no annotation: where they are called, and whether it matters.

Kind = Literal["aten", "library", "function"]


@dataclass(frozen=True)
class Missing:
    """An operator without annotation.

    operators  its names in the graph: one, or one for each way in which an `autograd.Function` is called
    kind       an operator of torch, of somebody's torch.library, or an unregistered `autograd.Function`
    calls      the operations that call it, in order
    depends    a parameter reaches one of its calls: only then does a plan lose by it
    function   the class, of a "function"
    """

    operators: tuple[str, ...]
    kind: Kind
    calls: tuple[Operation, ...]
    depends: bool
    function: OpaqueFunction | None = None

    @property
    def operator(self) -> str:
        return self.operators[0]

    @property
    def name(self) -> str:
        """As a user knows it: the class of a function, the operator's name otherwise."""
        return self.operator if self.function is None else self.function.function.__name__


@dataclass(frozen=True)
class CallSite:
    """Calls from one line of one class of module: `modules` are the paths of those that ran it."""

    where: str
    module_type: str
    modules: tuple[str, ...]
    calls: int

    def __str__(self) -> str:
        """`model.py:31 in blocks.0.mlp (Mlp) and 7 more`."""
        inside = f" in {self.modules[0]}" if self.modules[0] else ""
        kind = f" ({self.module_type})" if self.module_type else ""
        more = f" and {len(self.modules) - 1} more" if len(self.modules) > 1 else ""
        return f"{self.where}{inside}{kind}{more}"


def find_missing(traced: Traced) -> tuple[Missing, ...]:
    """Return every operator that the graph calls and the registry does not know: those that a parameter reaches first,
    then by number of calls."""
    registry = default_registry()
    calls: dict[object, list[Operation]] = {}
    for operation in traced.graph.operations:
        if registry.lookup(operation.operator) is None:
            opaque = traced.functions.get(operation.operator)
            calls.setdefault(operation.operator if opaque is None else opaque.function, []).append(operation)
    reached = reached_by_parameters(traced.graph) if calls else frozenset()
    found = [_missing(traced, operations, reached) for operations in calls.values()]
    return tuple(sorted(found, key=lambda m: (not m.depends, -len(m.calls), m.operator)))


def reached_by_parameters(graph: Graph) -> frozenset[str]:
    """Return the names of the operations whose inputs depend on a parameter.

    The others compute the same on every rank, from what every rank has.
    """
    tensors = {t.name for t in graph.with_role("parameter")}
    operations: set[str] = set()
    for operation in graph.operations:
        if tensors.intersection(operation.inputs):
            operations.add(operation.name)
            tensors.update(name for name in operation.outputs if name is not None)
    return frozenset(operations)


def places(calls: Iterable[Operation]) -> tuple[CallSite, ...]:
    """Return the calls by line and class of module, in order."""
    grouped: dict[tuple[str, str], list[str]] = {}
    for operation in calls:
        grouped.setdefault((_where(operation), operation.module_type), []).append(operation.module)
    return tuple(
        CallSite(where, kind, tuple(dict.fromkeys(modules)), len(modules)) for (where, kind), modules in grouped.items()
    )


def _where(operation: Operation) -> str:
    if operation.where is None:
        return "?"
    return f"{shown(operation.where.file)}:{operation.where.line}"


def shown(file: str) -> str:
    """Return the path, relative to the current folder where it is inside; an installed one from its package on."""
    return from_package_on(file) or shown_path(Path(file))


def _missing(traced: Traced, calls: Sequence[Operation], reached: Collection[str]) -> Missing:
    operators = tuple(dict.fromkeys(op.operator for op in calls))
    function = traced.functions.get(operators[0])
    kind: Kind = "function" if function else "aten" if operators[0].startswith("aten.") else "library"
    return Missing(operators, kind, tuple(calls), any(op.name in reached for op in calls), function)


# A call on smaller tensors of the same kinds: sizes that belong together shrink together, found on the meta device.

LARGE = 1 << 20  # elements of a call; one with more is shrunk
SIZES = (12, 24, 6, 36, 18, 30, 48, 8, 10, 4, 2)


def shrink(spec: OperatorSpec, concrete: ConcreteCall) -> ConcreteCall:
    """Return the call with sizes of our own choice, as far as the function takes them, on tensors with data: the
    beginnings of those given, random numbers for those on the meta device. Raises what the function raises on meta
    tensors of its own shapes."""
    function = function_of(concrete.call.operator, spec)
    question = make_question(spec, function, concrete)
    question = question.changed([t.to("meta") for t in question.tensors], {}, trusted=True)
    question.run(question.tensors, {})
    groups = find_groups(question)
    taken: set[int] = set()
    for group in (g for g in groups if not any(g < other for other in groups)):
        common = gcd(*(size_of(question, e) for e in group))
        for size in sorted((s for s in SIZES if s < common), key=lambda s: s in taken):
            other = _scaled(question, group, size, common)
            if other is not None:
                question = other
                taken.add(size)
                break
    tensors = [_filled(small, given) for small, given in zip(question.tensors, concrete.tensors, strict=True)]
    return question.changed(tensors, {}).concrete


def _scaled(question: Question, group: Group, size: int, common: int) -> Question | None:
    """Return with the group's sizes in proportion, `size` for each `common`; None where that does not run."""
    shapes = [list(t.shape) for t in question.tensors]
    integers: dict[str, Number] = {}
    for element in group:
        if isinstance(element, str):
            integers[element] = question.scaled(element, size, common)
        else:
            index, dim = element
            shapes[index][dim] = shapes[index][dim] // common * size
    other = question.changed([_meta(s, t) for s, t in zip(shapes, question.tensors, strict=True)], integers)
    try:
        other.run(other.tensors, {})
    except Exception:  # noqa: BLE001 - the size was our choice
        return None
    return other


def _meta(shape: Sequence[int], like: Tensor) -> Tensor:
    return torch.empty(tuple(shape), dtype=like.dtype, device="meta")


def _filled(small: Tensor, given: Tensor) -> Tensor:
    """Return a tensor with data, of the shape of `small`.

    Whole numbers that are not known are 0 or 1: few operators take none of them.
    """
    if not given.is_meta:
        for dim, size in enumerate(small.shape):
            given = given.narrow(dim, 0, size) if size <= given.shape[dim] else given
        if given.shape == small.shape:
            return given.detach().clone()
    generator = torch.Generator().manual_seed(0)
    if small.dtype.is_floating_point or small.dtype.is_complex:
        return torch.randn(tuple(small.shape), generator=generator, dtype=small.dtype)
    return torch.randint(0, 2, tuple(small.shape), generator=generator).to(small.dtype)


MOST_FORMS = 8  # calls that differ in more than sizes are looked at


@dataclass(frozen=True)
class Form:
    """One way in which an operator is called: ranks of its tensors, and its other arguments.

    call  has tensors to run it on
    own   these have the model's own shapes
    """

    call: ConcreteCall
    own: bool


def tensors_of(traced: Traced, operations: Sequence[Operation]) -> Mapping[str, Tensor]:
    """Return the inputs of these operations on the sample batch; on the meta device where the model
    has no data there."""
    wanted = {name for op in operations for name in op.inputs}
    state = {name: tensor.detach() for name, tensor in traced.state.items()}
    meta = any(t.is_meta for t in state.values()) or any(t.is_meta for t in traced.inputs.values())
    if not meta:
        with torch.no_grad():
            values = run_graph(traced.graph, state, traced.inputs)
        return {name: values[name] for name in wanted}
    found = {}
    for name in wanted:
        tensor = traced.graph.tensors[name]
        given = traced.inputs.get(name) if tensor.role == "input" else None
        empty = torch.empty(tensor.shape, dtype=dtype_of(tensor.dtype), device="meta")
        found[name] = empty if given is None else given
    return found


def record(missing: Missing) -> OperatorSpec:
    """Return the operator's record, without annotation, as `verify-op` takes it."""
    if missing.function is None:
        spec = record_of(torch_operator(missing.operator))
        assert spec is not None
        return spec
    spec = record_of(missing.function.function)
    assert spec is not None
    names = parameter_names(missing.function.function)
    call = missing.calls[0].args
    tensors = [index < len(call) and any(instances_in(call[index], Slot)) for index in range(len(names))]
    return OperatorSpec(
        missing.operator,
        "",
        target=spec.target,
        where=missing.function.where,
        qualname=spec.qualname,
        parameters=tuple(SchemaParameter(n, t) for n, t in zip(names, tensors, strict=True)),
    )


def parameter_names(function: type[torch.autograd.Function]) -> tuple[str, ...]:
    """Return the parameters of an `autograd.Function`'s forward, without ctx."""
    code = function.forward.__code__
    skip = 1 if function.setup_context is torch.autograd.Function.setup_context else 0
    return tuple(code.co_varnames[skip : code.co_argcount])


def forms(missing: Missing, spec: OperatorSpec, values: Mapping[str, Tensor]) -> tuple[Form, ...]:
    """Return the operator's calls that differ in more than sizes, at most `MOST_FORMS` of them."""
    found: dict[str, Operation] = {}
    for operation in missing.calls:
        found.setdefault(form_key(operation, values), operation)
    return tuple(_form(op, spec, values) for op in list(found.values())[:MOST_FORMS])


def form_key(operation: Operation, values: Mapping[str, Tensor]) -> str:
    """Return a key that is equal for calls with tensors of the same ranks and dtypes, and the same other arguments."""

    def kind(slot: Any) -> Any:
        tensor = values[operation.inputs[slot.index]]
        return f"{tensor.dim()}-d {tensor.dtype}"

    args = map_instances(operation.args, Slot, kind)
    return repr((args, [(k, map_instances(v, Slot, kind)) for k, v in operation.kwargs]))


def _form(operation: Operation, spec: OperatorSpec, values: Mapping[str, Tensor]) -> Form:
    def tensor(slot: Any) -> Any:
        return values[operation.inputs[slot.index]]

    def plain(leaf: Any) -> Any:
        return dtype_of(leaf.name) if isinstance(leaf, DType) else leaf

    args = [_ready(a, tensor, plain) for a in operation.args]
    kwargs = {k: _ready(v, tensor, plain) for k, v in operation.kwargs}
    call = make_call(spec.name, args, kwargs)
    small = not any(t.is_meta for t in call.tensors) and sum(t.numel() for t in call.tensors) <= LARGE
    return Form(call, own=True) if small else Form(shrink(spec, call), own=False)


def _ready(value: Any, tensor: Callable[[Any], Tensor], plain: Callable[[Any], Any]) -> Any:
    """Return an argument of an operation, with its tensors."""
    if isinstance(value, list | tuple):
        return [_ready(v, tensor, plain) for v in value]
    found = map_instances(value, Slot, tensor)
    return found if isinstance(found, Tensor) else plain(found)
