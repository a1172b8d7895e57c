"""Bind an operator's annotation to one call, and rewrite the call for one shard."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from op_registry.annotation.bind_sizes import BoundAnnotation, bind
from op_registry.annotation.explain_mismatch import Mismatch, misfit
from op_registry.annotation.syntax_tree import Annotation, Opaque, Operand
from op_registry.annotation.well_formed import parse_checked
from op_registry.call import AxisShard, Call, TensorArgument, instances_in
from op_registry.errors import AnnotationError
from op_registry.rank_expression import Expression, local_size
from op_registry.registry import output_only
from op_registry.spec import LinearSets, OperatorSpec, Refusal, SchemaParameter, Shards

_UNKNOWN = SchemaParameter("", tensor=False)  # of an operator whose schema was not recorded


def bind_call(spec: OperatorSpec, call: Call) -> BoundAnnotation:
    """Bind the operator's annotation to a call. `inputs` of the result has one entry per tensor of the call, by
    index; without `call.outputs`, the outputs are computed. Raises `AnnotationError` at the operator's place."""
    try:
        result = spec.annotation if isinstance(spec.annotation, str) else spec.annotation(call)
        text, sizes = (result, {}) if isinstance(result, str) else result
        annotation = parse_checked(text, output_only(spec, call.kwargs))
        tensors = call.tensors()
        operands = _match(spec, call, annotation, text, tensors)
        outputs = tuple(None if o is None else o.shape for o in call.outputs) if call.outputs else None
        integers = size_arguments(spec, call)
        if integers:
            names = {i.name for i in annotation.identifiers()}
            sizes = {**{n: s for n, s in integers.items() if n in names}, **sizes}
        bound = bind(text, [None if t is None else t.shape for t in operands], outputs, sizes)
    except AnnotationError as error:
        raise error.at(spec.where, f"operator `{spec.name}`: ") from None
    present = [t for t in operands if t is not None]
    if len(present) == len(tensors) and all(t.index == i for i, t in enumerate(present)):
        return bound
    by_index = {t.index: operand for t, operand in zip(present, bound.inputs, strict=True)}
    return replace(bound, inputs=tuple(by_index.get(t.index) for t in tensors))


def linear_sets(spec: OperatorSpec, call: Call) -> LinearSets:
    """Return the sets of tensors (by index) in which this call is jointly linear."""
    return spec.linear(call) if callable(spec.linear) else spec.linear


def size_arguments(spec: OperatorSpec, call: Call) -> Mapping[str, int]:
    """Return the call's integer arguments by name: one that is named like an identifier gives its size."""
    found = named_values(spec, call)
    return {n: value for n, value in found if n and isinstance(value, int) and not isinstance(value, bool)}


def named_values(spec: OperatorSpec, call: Call) -> Iterator[tuple[str, Any]]:
    """Yield the call's arguments by name, empty where none is known, and the defaults of those left out."""
    yield from ((parameter.name, value) for parameter, value in _named_arguments(spec, call))


def _named_arguments(spec: OperatorSpec, call: Call) -> Iterator[tuple[SchemaParameter, Any]]:
    """Yield the call's arguments in the order of the schema with their parameters; the default for those left out.

    Without a schema: the arguments in the order of the call, positional ones without a name.
    """
    if not spec.parameters:
        for value in call.args:
            yield _UNKNOWN, value
        for name, value in call.kwargs.items():
            yield SchemaParameter(name, tensor=False), value
    for position, parameter in enumerate(spec.parameters):
        if position < len(call.args):
            yield parameter, call.args[position]
        else:
            yield parameter, call.kwargs.get(parameter.name, parameter.default)


def _match(
    spec: OperatorSpec, call: Call, annotation: Annotation, text: str, tensors: tuple[TensorArgument, ...]
) -> list[TensorArgument | None]:
    """Return the tensor of each operand of the annotation; None where there is none, and for every `?`.

    Tensors take operands in turn. When the next operand is `?`, whatever argument comes takes it (a list of tensors
    as a whole). None in an optional tensor's place takes the tensor's operand.
    """
    matcher = _Matcher(annotation.inputs, len(tensors), known=bool(spec.parameters))
    for parameter, value in _named_arguments(spec, call):
        matcher.argument(parameter, value)
    if matcher.fits():
        return matcher.taken
    wanted = sum(isinstance(o, Operand) for o in annotation.inputs)
    message = f"annotated for {wanted} tensor{'s' * (wanted != 1)}, called with {len(tensors)}"
    outputs = [None if o is None else o.shape for o in call.outputs]
    raise misfit(Mismatch(message, {}), text, annotation, [t.shape for t in tensors], outputs, {})


class _Matcher:
    """Walks the arguments of a call and the operands of an annotation side by side."""

    def __init__(self, operands: tuple[Operand | Opaque, ...], tensors: int, known: bool) -> None:
        self.operands = operands
        self.tensors_left = tensors
        self.known = known
        self.taken: list[TensorArgument | None] = []

    @property
    def next(self) -> Operand | Opaque | None:
        position = len(self.taken)
        return self.operands[position] if position < len(self.operands) else None

    def argument(self, parameter: SchemaParameter, value: Any) -> None:
        tensors = list(instances_in(value, TensorArgument))
        self.tensors_left -= len(tensors)
        if isinstance(self.next, Opaque):
            self.taken.append(None)
        elif tensors:
            self.taken.extend(tensors if isinstance(value, TensorArgument) else _elements(value))
        elif value is None and self.next is not None and self.absent(parameter):
            self.taken.append(None)

    def absent(self, parameter: SchemaParameter) -> bool:
        """Return whether a None stands for a tensor. Without a schema: if operands are left over."""
        if self.known:
            return parameter.tensor
        operands_left = sum(isinstance(o, Operand) for o in self.operands[len(self.taken) :])
        return operands_left > self.tensors_left

    def fits(self) -> bool:
        """Return whether every tensor got an operand, and every operand a tensor (or an argument, for `?`)."""
        while isinstance(self.next, Opaque):
            self.taken.append(None)
        return len(self.taken) == len(self.operands)


def _elements(value: Any) -> Iterator[TensorArgument | None]:
    """Yield the tensors of a list, and its Nones, which keep the place of an optional tensor."""
    for item in value.values() if isinstance(value, Mapping) else value:
        if isinstance(item, TensorArgument) or item is None:
            yield item
        elif isinstance(item, list | tuple | Mapping):
            yield from _elements(item)


# Rewrite a call for one shard: sizes among the arguments follow the shard, then the operator's own hook.

Shape = tuple[int | Expression, ...]


def localise(spec: OperatorSpec, call: Call, shards: Shards, local_output_shapes: Sequence[Shape | None]) -> Call:
    """Rewrite a call into the one that one rank makes.

    `shards`: how axes split each identifier of the call; `local_output_shapes`: one per output, None where it is
    not a tensor. In order: the shape argument becomes the local output's shape, integer arguments named like a split
    identifier are divided, and the operator's `localize` sees the identifiers that are split. Raises `Refusal`.
    """
    split = {name: axes for name, axes in shards.items() if any(a.parts > 1 for a in axes)}
    if not split:
        return call
    for name, axes in split.items():
        _refuse_strided(spec, name, axes)
        if any(a.sizes for a in axes) and not spec.allows_uneven:
            raise Refusal(
                f"the hook of `{spec.name}` does not know shards of unequal sizes (`uneven=True` says that it does)"
            )
    call = _with_local_shape(spec, call, local_output_shapes)
    call = _with_divided_sizes(spec, call, split)
    return call if spec.localize is None else spec.localize(call, split)


def _refuse_strided(spec: OperatorSpec, name: str, axes: tuple[AxisShard, ...]) -> None:
    if len(axes) == 1 and axes[0].circulates:  # what communicates is told which entries every rank has
        return
    if name in spec.contiguous and (len([a for a in axes if a.parts > 1]) > 1 or not all(a.contiguous for a in axes)):
        raise Refusal(f"`{name}` of `{spec.name}` only splits into contiguous blocks, over one axis")


def _with_local_shape(spec: OperatorSpec, call: Call, shapes: Sequence[Shape | None]) -> Call:
    if spec.shape_argument is None:
        return call
    position, name, output = spec.shape_argument
    given = call.get(position, name)
    local = shapes[output]
    if given is None or local is None:
        return call
    logical = call.outputs[output] if output < len(call.outputs) else None
    if logical is not None and logical.shape == tuple(local):
        return call  # this output is whole: the argument stays as the model has it (`-1` too)
    if isinstance(given, list | tuple):
        return call.replace(position, name, type(given)(local))
    if len(local) != 1:
        raise Refusal(f"`{name}={given}` of `{spec.name}` does not list the {len(local)} sizes of its output")
    return call.replace(position, name, local[0])


def _with_divided_sizes(spec: OperatorSpec, call: Call, shards: Shards) -> Call:
    positions = {p.name: i for i, p in enumerate(spec.parameters)}
    for name, size in size_arguments(spec, call).items():
        if name not in shards:
            continue
        try:
            local = local_size(size, shards[name])
        except Refusal as refusal:
            reason = str(refusal).removeprefix(f"{size} ")
            raise Refusal(f"the argument `{name}={size}` of `{spec.name}` {reason}") from None
        call = call.replace(positions.get(name, len(call.args)), name, local)
    return call
