"""Operators that return their input's value disappear; casts are spelled one way."""

from __future__ import annotations

from op_registry.call import DType
from op_registry.registry import facts_of
from op_registry.schema import has_default_dtype

from nnscaler.ir.graph import Graph, Operation
from nnscaler.tracing.passes.in_place import DROPOUTS, slice_bounds
from nnscaler.tracing.passes.needs_grad import needing_grad
from nnscaler.tracing.rewrite import Builder, Ref

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
    first = args[0].name if args and isinstance(args[0], Ref) else None
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


def _parts(operation: Operation, builder: Builder) -> list[Ref]:
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


# Reshaping is spelled one way, with explicit sizes; so are expansion and the dtypes of factories.


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
    elif kind.startswith("aten.") and has_default_dtype(kind):
        spelled, kwargs = kind, {**kwargs, "dtype": DType(output.dtype)}
    else:
        return False
    builder.emit(spelled, args, kwargs, outputs=(output,), like=operation, name=operation.name)
    return True
