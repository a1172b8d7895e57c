"""Rewrite equal operations to one normal form: no identities, explicit sizes, floating operands, slices of a dim as one
split."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from op_registry.call import DType, instances_in
from op_registry.infer_torch_schema import has_default_dtype
from op_registry.registry import facts_of

from nnscaler.ir.graph import Graph, Operation, Region
from nnscaler.tracing.graph_builder import Builder, TensorName, is_floating, map_references
from nnscaler.tracing.passes.in_place import DROPOUTS, slice_bounds
from nnscaler.tracing.passes.needs_grad_and_liveness import needing_grad

_GROUPED = "aten._grouped_mm.default"
_PAIRS = "aten.view_as_complex.default"
_NEUTRAL = {"aten.add.Tensor": 0, "aten.sub.Tensor": 0, "aten.mul.Tensor": 1, "aten.div.Tensor": 1}


def drop_identities(graph: Graph) -> Graph:
    """Without aliases, copies, casts to the same dtype, reshapes, slices and expansions to the same shape, adding 0,
    dropout that drops nothing, detaching of what has no gradient, and concatenation with nothing. Casts become
    `aten.to.dtype(x, dtype)`, dropouts become `nnscaler.dropout(x, p)` and its like.
    """
    differentiable = needing_grad(graph)
    builder = Builder(graph)
    for operation in graph.operations:
        kept = _identity_of(operation, builder, differentiable)
        if kept is not None:
            assert operation.outputs[0] is not None
            builder.alias(operation.outputs[0], kept)
        elif not _respelled(operation, builder):
            builder.keep(operation)
    return builder.finish()


def _identity_of(operation: Operation, builder: Builder, differentiable: frozenset[str]) -> str | None:
    """Return the input that is the operation's value, if there is one."""
    if len(operation.outputs) != 1 or operation.outputs[0] is None or not operation.inputs:
        return None
    args, kwargs = builder.references(operation)
    first = args[0].name if args and isinstance(args[0], TensorName) else None
    kind = operation.operator
    if kind == "aten.cat.default":
        return _only_part(operation, builder)
    if first is None:
        return None
    have, want = builder.tensor(first), builder.source.tensors[operation.outputs[0]]
    if have.shape != want.shape or have.dtype != want.dtype:
        return None
    facts = facts_of(kind)
    same = facts.moves in ("value", "cast", "reshape", "expand")
    if same and facts.detached:
        same = operation.inputs[0] not in differentiable
    elif kind in DROPOUTS:
        same = args[1] == 0 or not args[2]
    elif kind in _NEUTRAL:
        same = len(args) == 2 and not kwargs and isinstance(args[1], int | float) and args[1] == _NEUTRAL[kind]
    elif kind == "aten.slice.Tensor":
        same = True  # of the same shape: the whole, unless the step is negative, which torch does not have
    return first if same else None


def _parts(operation: Operation, builder: Builder) -> list[TensorName]:
    """Return the operands of a concatenation that are not empty and so make a difference."""
    args, _ = builder.references(operation)
    return [r for r in args[0] if builder.tensor(r.name).elements]


def _only_part(operation: Operation, builder: Builder) -> str | None:
    parts = _parts(operation, builder)
    result = builder.source.tensors[operation.outputs[0] or ""]
    if len(parts) != 1 or builder.tensor(parts[0].name).dtype != result.dtype:
        return None
    return parts[0].name


def _respelled(operation: Operation, builder: Builder) -> bool:
    """Emit the operation in its one spelling; False if it has only one."""
    args, kwargs = builder.references(operation)
    outputs = tuple(None if o is None else builder.source.tensors[o] for o in operation.outputs)
    kind, output = operation.operator, outputs[0] if outputs else None
    if output is None:
        return False
    if facts_of(kind).moves == "cast":
        builder.emit(
            "aten.to.dtype", (args[0], DType(output.dtype)), outputs=outputs, like=operation, name=operation.name
        )
    elif kind in DROPOUTS:
        ours = kind.replace("aten.", "nnscaler.").removesuffix(".default")
        builder.emit(ours, args[:2], outputs=outputs, like=operation, name=operation.name)
    elif kind == _GROUPED and len(builder.tensor(args[1].name).shape) == 3 and args[2:3] and not any(args[3:]):
        if len(builder.tensor(args[0].name).shape) != 2 or kwargs:
            return False
        builder.emit("nnscaler.grouped_mm", args[:3], outputs=outputs, like=operation, name=operation.name)
    elif kind == _PAIRS:  # copies that make tensors contiguous are dropped, and it asks for that
        builder.emit("nnscaler.view_as_complex", args, outputs=outputs, like=operation, name=operation.name)
    elif kind == "aten.detach_.default":
        builder.emit("aten.detach.default", args, outputs=outputs, like=operation, name=operation.name)
    elif kind == "aten.slice.Tensor":
        dim, start, stop, step = _slice_arguments(args, kwargs)
        start, stop = slice_bounds(start, stop, builder.tensor(args[0].name).shape[dim])
        last = () if step == 1 else (step,)
        builder.emit(kind, (args[0], dim, start, stop, *last), outputs=outputs, like=operation, name=operation.name)
    elif kind == "aten.cat.default" and len(_parts(operation, builder)) < len(args[0]):
        parts = tuple(_parts(operation, builder)) or args[0][:1]
        rest = args[1:] if all(builder.tensor(p.name).dtype == output.dtype for p in parts) else None
        if rest is None:
            return False
        builder.emit(kind, (parts, *rest), kwargs, outputs=outputs, like=operation, name=operation.name)
    else:
        return False
    return True


def _slice_arguments(args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[int, int | None, int | None, int]:
    values = dict(zip(("dim", "start", "end", "step"), args[1:], strict=False)) | kwargs
    given = {"dim": 0, "start": None, "end": None, "step": 1} | values
    return given["dim"], given["start"], given["end"], given["step"]  # type: ignore[return-value]


# Reshaping is spelled one way, with explicit sizes; so are expansion and the dtypes of factories. `x.new_zeros(size)`
# takes no value of x, which would yet have to be whole, also over micro-batches. One of x's own shape lies as x does.

_OF_NUMBERS = {
    "aten.new_zeros.default": "aten.zeros.default",
    "aten.new_ones.default": "aten.ones.default",
    "aten.new_empty.default": "aten.empty.memory_format",
    "aten.new_full.default": "aten.full.default",
}


def spell_shapes(graph: Graph) -> Graph:
    """Views and reshapes become `aten.reshape(x, sizes)` (strides of the traced run are not a property of shards),
    expansions `aten.expand(x, sizes)`, and factories name their dtype.
    """
    builder = Builder(graph)
    for operation in graph.operations:
        if not _spell(operation, builder):
            builder.keep(operation)
    return builder.finish()


def _spell(operation: Operation, builder: Builder) -> bool:
    kind = operation.operator
    if not operation.outputs or operation.outputs[0] is None:
        return False
    args, kwargs = builder.references(operation)
    output = builder.source.tensors[operation.outputs[0]]
    moves = facts_of(kind).moves
    if moves == "reshape":
        spelled, args, kwargs = "aten.reshape.default", (args[0], output.shape), {}
    elif moves == "expand":
        spelled, args, kwargs = "aten.expand.default", (args[0], output.shape), {}
    elif kind in _OF_NUMBERS and builder.tensor(args[0].name).shape != output.shape:
        spelled, args, kwargs = _OF_NUMBERS[kind], args[1:], {**kwargs, "dtype": DType(output.dtype)}
    elif kind.startswith("aten.") and has_default_dtype(kind):
        spelled, kwargs = kind, {**kwargs, "dtype": DType(output.dtype)}
    else:
        return False
    builder.emit(spelled, args, kwargs, outputs=(output,), like=operation, name=operation.name)
    return True


# Slices that tile a dim become one split, so that the pieces of a packed tensor are seen together.

_Key = tuple[str, int, Region]


def tile_slices(graph: Graph) -> Graph:
    """`x[:, :a], x[:, a:]` become `aten.split_with_sizes(x, (a, n - a), 1)` at the first of them."""
    slices: dict[_Key, list[Operation]] = {}
    for operation in graph.operations:
        if operation.operator == "aten.slice.Tensor" and len(operation.args) == 4 and not operation.kwargs:
            dim = operation.args[1] % len(graph.tensors[operation.inputs[0]].shape)
            slices.setdefault((operation.inputs[0], dim, operation.region), []).append(operation)
    splits: dict[str, tuple[Operation, ...]] = {}  # first slice of a tiling -> its slices in order of the dim
    twins: dict[str, str] = {}  # output of a slice -> output of the same slice of a tiling
    for (name, dim, _), group in slices.items():
        tiling = _tiling(group, graph.tensors[name].shape[dim])
        if tiling is None:
            continue
        position = {op.name: i for i, op in enumerate(group)}
        splits[min(tiling, key=lambda op: position[op.name]).name] = tiling
        by_bounds = {op.args[2:]: op for op in tiling}
        for op in group:
            if op.args[2:] in by_bounds:
                twins[_output(op)] = _output(by_bounds[op.args[2:]])
    return _rewrite(graph, splits, twins) if splits else graph


def _output(operation: Operation) -> str:
    assert operation.outputs[0] is not None
    return operation.outputs[0]


def _tiling(group: Iterable[Operation], size: int) -> tuple[Operation, ...] | None:
    """Two or more of the slices that cover the dim exactly once, if there are such."""
    starting: dict[int, list[Operation]] = {}
    for operation in group:
        if operation.args[3] > operation.args[2]:
            starting.setdefault(operation.args[2], []).append(operation)

    def cover(start: int) -> tuple[Operation, ...] | None:
        if start == size:
            return ()
        tried = set()
        for operation in starting.get(start, ()):
            stop = operation.args[3]
            if stop not in tried:
                tried.add(stop)
                rest = cover(stop)
                if rest is not None:
                    return (operation, *rest)
        return None

    found = cover(0)
    return found if found is not None and len(found) > 1 else None


def _rewrite(graph: Graph, splits: dict[str, tuple[Operation, ...]], twins: dict[str, str]) -> Graph:
    builder = Builder(graph)
    for operation in graph.operations:
        if operation.name in splits:
            tiling = splits[operation.name]
            dim = operation.args[1] % len(graph.tensors[operation.inputs[0]].shape)
            sizes = tuple(op.args[3] - op.args[2] for op in tiling)
            builder.emit(
                "aten.split_with_sizes.default",
                (TensorName(builder.current(operation.inputs[0])), sizes, dim),
                outputs=tuple(graph.tensors[_output(op)] for op in tiling),
                like=operation,
                name=builder.fresh("split"),
            )
        if operation.operator == "aten.slice.Tensor" and _output(operation) in twins:
            builder.alias(_output(operation), twins[_output(operation)])
        else:
            builder.keep(operation)
    return builder.finish()


# Operators that make floating numbers of integers get floating numbers instead.
# `indices * 0.1` has torch's default dtype, which is the process's: a rank's need not be that of the model, and an
# exact run needs float64 there. A dtype that stands in the graph is right everywhere.

_WHERE = "aten.where.Scalar"


def spell_promotions(graph: Graph) -> Graph:
    """Operators of torch with a floating result and only integers or booleans among their tensors read casts of these;
    `where(condition, 0.1, 0.2)` chooses between tensors of the result's dtype."""
    builder = Builder(graph)
    for operation in graph.operations:
        if _promotes(operation, builder):
            _as_floating(operation, builder)
        else:
            builder.keep(operation)
    return builder.finish()


def _promotes(operation: Operation, builder: Builder) -> bool:
    output = operation.outputs[0] if len(operation.outputs) == 1 else None
    if output is None or not operation.inputs or not operation.operator.startswith("aten."):
        return False
    if any(instances_in((operation.args, operation.kwargs), DType)):
        return False
    made = builder.source.tensors[output].dtype
    return is_floating(made) and not any(is_floating(builder.tensor(name).dtype) for name in operation.inputs)


def _as_floating(operation: Operation, builder: Builder) -> None:
    args, kwargs = builder.references(operation)
    output = builder.source.tensors[operation.outputs[0] or ""]
    dtype = DType(output.dtype)

    def emit(part: str, operator: str, shape: tuple[int, ...], *given: Any, **named: Any) -> TensorName:
        of = shape, output.dtype
        return builder.make(f"{operation.name}_{part}", operator, given, named, like=operation, of=of)

    def cast(ref: TensorName) -> TensorName:
        return emit("operand", "aten.to.dtype", builder.tensor(ref.name).shape, ref, dtype)

    operator = operation.operator
    if operator == _WHERE:
        condition, *choices = args
        scalars = (emit("choice", "aten.scalar_tensor.default", (), number, dtype=dtype) for number in choices)
        operator, args = "aten.where.self", (condition, *scalars)
    else:
        args = tuple(map_references(a, cast) for a in args)
        kwargs = {k: map_references(v, cast) for k, v in kwargs.items()}
    builder.emit(operator, args, kwargs, outputs=(output,), like=operation, name=operation.name)
