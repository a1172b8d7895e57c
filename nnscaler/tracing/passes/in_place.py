"""Turn in-place operators into values: a write makes new values of the written tensor and of everything that aliases
it.

Memory that is written has a *root*, the tensor that allocated it; every other tensor in it is a view of another
(its parent). A write gives the view a new value, carries it back to the root through the views' inverses, and
outdates the other aliases, which are viewed again when next used. What the root of a buffer is worth at the end is
an update of the buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from op_registry.call import instances_in
from op_registry.registry import facts_of

from nnscaler.ir.graph import Graph, LogicalTensor, Operation
from nnscaler.tracing.graph_builder import (
    Builder,
    RawGraph,
    TensorName,
    map_references,
    references,
    written_inputs,
)
from nnscaler.tracing.passes.decompositions import RUNNING_STATISTIC, statistic_written
from nnscaler.tracing.passes.functional_forms_of_inplace import functional_form, unwritable

# How to write through a view: the viewed tensor's new value, from a new value of the view.

# A dropout that shares its operand's memory has dropped nothing.
_DROPOUTS = "dropout feature_dropout alpha_dropout feature_alpha_dropout"
DROPOUTS = frozenset(f"aten.{name}.default" for name in _DROPOUTS.split())

_REAL = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}  # dtypes of the parts
Emit = Callable[[str, tuple[Any, ...], LogicalTensor], str]


def write_through(view: Operation, output: int, base: LogicalTensor, value: LogicalTensor, emit: Emit) -> str:
    """Return the name of `base` after the `output`-th result of `view` became `value`.

    `base` and `value` are named tensors of the graph under construction; `emit(operator, args, like)` adds an
    operation whose result is shaped like `like` and gives its name. Raises NnscalerError "trace_failed" for views
    that cannot be written through.
    """
    args, kwargs = references(view)
    kind = view.operator
    moves = facts_of(kind).moves
    same = moves in ("value", "cast", "expand") or kind in DROPOUTS
    if same and base.shape == value.shape and base.dtype == value.dtype:
        return value.name
    if moves in ("reshape", "unit dims"):
        return emit("aten.reshape.default", (TensorName(value.name), base.shape), base)
    if moves == "transpose":
        return emit(kind, (TensorName(value.name), *args[1:]), base)
    if kind == "aten.permute.default":
        dims = [d % len(args[1]) for d in args[1]]
        inverse = tuple(dims.index(d) for d in range(len(dims)))
        return emit(kind, (TensorName(value.name), inverse), base)
    scattered = _scatter(kind, args, kwargs, output, base, value, emit)
    if scattered is not None:
        return scattered
    raise unwritable(view, f"an in-place change through {kind} cannot be traced")


def _scatter(
    kind: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: int,
    base: LogicalTensor,
    value: LogicalTensor,
    emit: Emit,
) -> str | None:
    """Return the base with `value` in the part of it that the view shows."""

    def get(position: int, name: str, default: Any) -> Any:
        return args[position] if position < len(args) else kwargs.get(name, default)

    old, new = TensorName(base.name), TensorName(value.name)

    def scatter(operator: str, dim: int, *rest: Any) -> str:
        dim %= len(base.shape)
        if base.dtype not in _REAL:
            return emit(operator, (old, new, dim, *rest), base)
        # of complex numbers torch gives these no backward
        pairs = [replace(t, shape=(*t.shape, 2), dtype=_REAL[base.dtype]) for t in (base, value)]
        parts = [
            TensorName(emit("aten.view_as_real.default", (name,), pair))
            for name, pair in zip((old, new), pairs, strict=True)
        ]
        return emit("nnscaler.view_as_complex", (TensorName(emit(operator, (*parts, dim, *rest), pairs[0])),), base)

    def slice_scatter(dim: int, start: int, stop: int, step: int = 1) -> str:
        return scatter("aten.slice_scatter.default", dim, start, stop, step)

    if kind == "aten.slice.Tensor":
        dim = get(1, "dim", 0) % len(base.shape)
        start, stop = slice_bounds(get(2, "start", None), get(3, "end", None), base.shape[dim])
        return slice_scatter(dim, start, stop, get(4, "step", 1))
    if kind == "aten.narrow.default":
        dim, start, length = args[1] % len(base.shape), args[2], args[3]
        start %= max(base.shape[dim], 1)
        return slice_scatter(dim, start, start + length)
    if kind == "aten.select.int":
        return scatter("aten.select_scatter.default", args[1], args[2])
    if kind == "aten.unbind.int":
        return scatter("aten.select_scatter.default", get(1, "dim", 0), output)
    if kind == "aten.diagonal.default":
        rest = (get(1, "offset", 0), get(2, "dim1", 0), get(3, "dim2", 1))
        return emit("aten.diagonal_scatter.default", (old, new, *rest), base)
    if kind in ("aten.split.Tensor", "aten.chunk.default", "aten.split_with_sizes.default", "aten.split.sizes"):
        dim = get(2, "dim", 0) % len(base.shape)
        if isinstance(args[1], tuple):
            start = sum(args[1][:output])
        elif kind == "aten.chunk.default":
            start = output * -(-base.shape[dim] // args[1])
        else:
            start = output * args[1]
        return slice_scatter(dim, start, start + value.shape[dim])
    return None


def slice_bounds(start: int | None, stop: int | None, size: int) -> tuple[int, int]:
    """Python's slice bounds on a dim of this size, both in 0..size."""
    first, last, _ = slice(start, stop).indices(size)
    return first, max(first, last)


def to_values(raw: RawGraph) -> Graph:
    """Replace in-place operators by ones that return values, with `updates` of the buffers that the model writes.

    Raises NnscalerError "trace_failed" for a parameter that is written, for operators without a functional form,
    and for writes through views that have no inverse.
    """
    written = {raw.storages[name] for op in raw.graph.operations for name in _written_names(op)}
    if not written:
        return raw.graph
    state = _Values(raw, Builder(raw.graph), written)
    for operation in raw.graph.operations:
        state.step(operation)
    return state.finish()


def _written_names(operation: Operation) -> list[str]:
    if operation.operator == RUNNING_STATISTIC:
        return [statistic_written(operation)[0]]
    args, kwargs = references(operation)
    positions = written_inputs(operation.operator)
    written = (*(args[p] for p in positions if p < len(args)), *(kwargs["out"] for _ in positions if "out" in kwargs))
    return [r.name for argument in written for r in instances_in(argument, TensorName)]


@dataclass(frozen=True, slots=True)
class _View:
    """`tensor` is the `output`-th result of `operation` (of the source graph) on `parent`."""

    parent: str
    operation: Operation | None  # None: the same tensor (an in-place operator returns its input)
    output: int = 0


@dataclass
class _Values:
    raw: RawGraph
    builder: Builder
    written: set[int]
    views: dict[str, _View] = field(default_factory=dict)  # source tensor -> how it views its parent
    roots: dict[int, str] = field(default_factory=dict)  # storage -> source tensor that allocated it
    values: dict[int, dict[str, str]] = field(default_factory=dict)  # storage -> source tensor -> present value
    changed: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        for name in self.builder.tensors:
            self._define(name, None)

    # ---- reading ----

    def value(self, name: str) -> str:
        """Return the present value of a tensor of the source graph, viewed again when a write outdated it."""
        storage = self.raw.storages.get(name)
        if storage is None or storage not in self.written:
            return name
        present = self.values[storage]
        if name not in present:
            view = self.views[name]
            parent = self.value(view.parent)
            if view.operation is None:
                present[name] = parent
            else:
                self._view_again(view.operation, view.parent, parent, present)
        return present[name]

    def _view_again(self, operation: Operation, parent: str, value: str, present: dict[str, str]) -> None:
        source, outputs = self.raw.graph.tensors, list[LogicalTensor | None]()
        for name in operation.outputs:
            if name is None:
                outputs.append(None)
            else:
                present[name] = self.builder.fresh(name)
                outputs.append(replace(source[name], name=present[name]))
        args, kwargs = references(operation)

        def current(ref: TensorName) -> TensorName:
            return TensorName(value if ref.name == parent else self.value(ref.name))

        new_args = tuple(map_references(a, current) for a in args)
        new_kwargs = {k: map_references(v, current) for k, v in kwargs.items()}
        self.builder.emit(operation.operator, new_args, new_kwargs, outputs=tuple(outputs), like=operation)

    # ---- stepping ----

    def step(self, operation: Operation) -> None:
        names = _written_names(operation)
        if names and operation.operator != RUNNING_STATISTIC:
            self._write_in_place(operation, names)
            return
        inputs = tuple(self.value(n) for n in operation.inputs)
        self.builder.keep(replace(operation, inputs=inputs))
        for index, name in enumerate(operation.outputs):
            if name is not None:
                self._define(name, operation, index)
        if operation.operator == RUNNING_STATISTIC:
            self._assign(*statistic_written(operation), operation)

    def _define(self, name: str, operation: Operation | None, output: int = 0) -> None:
        """Record a tensor: as the root of its memory, or as a view of an input of the operation that made it."""
        storage = self.raw.storages.get(name)
        if storage is None or storage not in self.written:
            return
        parent = next((n for n in (operation.inputs if operation else ()) if self.raw.storages.get(n) == storage), None)
        if parent is None:
            if storage in self.roots:  # made by an operator that hides what it views
                raise unwritable(operation, "memory that an operator shares without saying how is changed in place")
            self.roots[storage] = name
            self.values[storage] = {}
        else:
            self.views[name] = _View(parent, operation, output)
        self.values[storage][name] = name

    def _write_in_place(self, operation: Operation, names: list[str]) -> None:
        if len(names) != 1 or len(operation.outputs) > 1:
            raise unwritable(operation, f"{operation.operator} changes several tensors in place")
        target = names[0]
        args, kwargs = references(operation)

        def current(ref: TensorName) -> TensorName:
            return TensorName(self.value(ref.name))

        new_args = tuple(map_references(a, current) for a in args)
        new_kwargs = {k: map_references(v, current) for k, v in kwargs.items()}
        source, value = self.raw.graph.tensors, self.value(target)
        form = functional_form(operation, new_args, new_kwargs, self.builder.tensor)
        for operator, form_args, form_kwargs in form:
            ready = tuple(TensorName(value) if a is ... else a for a in form_args)
            value = self.builder.make(operation.name, operator, ready, form_kwargs, like=operation).name
        result = operation.outputs[0] if operation.outputs else None
        if result is not None and source[result].shape != source[target].shape:
            # `x.unsqueeze_(0)` changes no element: its result is a view, and later uses name the result
            self.views[result] = _View(target, replace(operation, operator=form[0][0]))
            self.values[self.raw.storages[result]][result] = value
            return
        self._assign(target, value, operation)
        if result is not None:
            self.views[result] = _View(target, None)
            self.values[self.raw.storages[result]][result] = value

    # ---- writing ----

    def _assign(self, name: str, value: str, operation: Operation) -> None:
        """Let the tensor be worth `value`, and its root, and outdate every other alias."""
        storage = self.raw.storages[name]
        path = {name: value}
        while name in self.views:
            view = self.views[name]
            if view.operation is not None:
                base = self.builder.tensor(self.value(view.parent))
                value = write_through(
                    view.operation, view.output, base, self.builder.tensor(value), self._emitter(operation)
                )
            name = view.parent
            path[name] = value
        root = self.raw.graph.tensors[name]
        if root.role == "constant" and operation.operator == "aten.detach_.default":
            return  # it has no gradient, and keeps its value: `torch.tensor([], device="meta")`
        if root.role in ("parameter", "constant"):
            what = f"the parameter {root.fqns[0]}" if root.role == "parameter" else "a tensor that is no buffer"
            raise unwritable(operation, f"{what} is changed in forward")
        self.values[storage] = path
        self.changed.add(storage)

    def _emitter(self, operation: Operation) -> Any:
        def emit(operator: str, args: tuple[Any, ...], like: LogicalTensor) -> str:
            made = replace(like, name=self.builder.fresh(operation.name), role="activation", fqns=(), needs_grad=False)
            self.builder.emit(operator, args, outputs=(made,), like=operation)
            return made.name

        return emit

    def finish(self) -> Graph:
        updates = []
        for storage in self.changed:
            root = self.raw.graph.tensors[self.roots[storage]]
            if root.role == "buffer":
                updates.append((root.name, self.value(root.name)))
        order = {name: i for i, name in enumerate(self.builder.tensors)}
        updates.sort(key=lambda pair: order[pair[0]])
        raw = self.raw.graph
        loss = self.value(raw.loss) if raw.loss else ""
        outputs = tuple((name, self.value(tensor)) for name, tensor in raw.outputs)  # before the end: it may view again
        return self.builder.finish(tuple(updates)).replace(loss=loss, outputs=outputs)
