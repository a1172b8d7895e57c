"""Rewrite a call for one shard: sizes among the arguments follow the shard, then the operator's own hook."""

from __future__ import annotations

from collections.abc import Sequence

from op_registry.bind_call import size_arguments
from op_registry.call import AxisShard, Call
from op_registry.expression import Expression
from op_registry.local_size import local_size
from op_registry.spec import OperatorSpec, Refusal, Shards

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
