"""Views: the same entries under other dims; and tensors made from numbers: constants, and sequences that no rank has a
part of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from types import MappingProxyType

from verify.evidence.dimension_types.rules.call_with_states import Operand, Rule, RuleCall, everywhere, unknown
from verify.evidence.dimension_types.states import (
    CONSTANT,
    SAME,
    ZERO,
    Constant,
    PartialMax,
    Shard,
    State,
    Unknown,
    Zero,
    equal,
    quotient,
    split_dims,
)


def _viewed(call: RuleCall) -> tuple[State, ...]:
    """`view`: with `before` entries ahead of the part that is split, the dim of the result that has it begins after
    the product of the dims ahead of it, and what is left is its outer."""
    x, out = call.tensor("self"), call.output
    if not isinstance(x.state, Shard):
        return everywhere(call, x.state)
    dims = split_dims(out.sizes, call.split)
    if len(dims) != 1:
        return unknown(call, "the dim that is split is not in just one dim of the result")
    (dim,) = dims
    ahead = prod(out.sizes[:dim])
    if x.state.sections:
        return _of_sections(call, x.state, dim)
    uniform = _stays_uniform(x, out, dim) if x.state.outer is None else False
    before = prod(x.sizes[: x.state.dim]) * (1 if x.state.outer is None else x.state.outer)
    outer = quotient(before, ahead)
    if uniform:
        return everywhere(call, Shard(dim, None))
    if outer is None:
        return unknown(call, "the part that is split straddles dims of the result")
    return everywhere(call, Shard(dim, outer))


def _stays_uniform(x: Operand, out: Operand, dim: int) -> bool:
    """Return whether the result's dim lies within the dim of `x` along which all entries are equal."""
    assert isinstance(x.state, Shard)
    start, ahead = prod(x.sizes[: x.state.dim]), prod(out.sizes[:dim])
    end, after = start * x.sizes[x.state.dim], ahead * out.sizes[dim]
    return quotient(ahead, start) is not None and quotient(end, after) is not None


def _of_sections(call: RuleCall, state: Shard, dim: int) -> tuple[State, ...]:
    """A concatenated dim stays as it is, with the same number of entries ahead of it."""
    x, out = call.tensor("self"), call.output
    same = equal(prod(x.sizes[: state.dim]), prod(out.sizes[:dim])) and equal(x.sizes[state.dim], out.sizes[dim])
    if not same:
        return unknown(call, "a concatenation is regrouped")
    return everywhere(call, Shard(dim, state.outer, state.sections))


def moved(call: RuleCall, x: Operand, where: Sequence[int | None]) -> tuple[State, ...]:
    """`where[d]`: the dim of the result that dim d of `x` becomes; None: it is gone, or read at one place."""
    if not isinstance(x.state, Shard):
        gone = any(where[d] is None for d in split_dims(x.sizes, call.split))
        return unknown(call, "of a dim that is split") if gone else everywhere(call, x.state)
    to = where[x.state.dim]
    if to is None:
        return unknown(call, "of a dim that is split")
    return everywhere(call, Shard(to, x.state.outer, x.state.sections))


def _by_dims(where: Callable[[RuleCall, int], Sequence[int | None]]) -> Rule:
    def rule(call: RuleCall) -> tuple[State, ...]:
        x = call.tensor("self")
        return moved(call, x, where(call, x.ndim))

    return rule


def _permuted(call: RuleCall, ndim: int) -> list[int | None]:
    order = [d % max(ndim, 1) for d in call["dims"]]
    return [order.index(d) for d in range(ndim)]


def _transposed(call: RuleCall, ndim: int) -> list[int | None]:
    a, b = call["dim0"] % max(ndim, 1), call["dim1"] % max(ndim, 1)
    return [b if d == a else a if d == b else d for d in range(ndim)]


def _reversed(_: RuleCall, ndim: int) -> list[int | None]:
    return [ndim - 1 - d for d in range(ndim)]


def _unsqueezed(call: RuleCall, ndim: int) -> list[int | None]:
    at = call["dim"] % (ndim + 1)
    return [d + (d >= at) for d in range(ndim)]


def _squeezed(call: RuleCall, ndim: int) -> list[int | None]:
    """A dim that is split may have size 1 on some rank, and would then go: it must not be among those named."""
    dim = call.arguments.get("dim")
    named = range(ndim) if dim is None else [d % max(ndim, 1) for d in ([dim] if isinstance(dim, int) else dim)]
    sizes = call.tensor("self").sizes
    gone = [d for d in named if d < ndim and (sizes[d] == 1 or call.is_split(sizes[d]))]
    return [None if d in gone else d - sum(g < d for g in gone) for d in range(ndim)]


def _selected(call: RuleCall, ndim: int) -> list[int | None]:
    at = call["dim"] % max(ndim, 1)
    return [None if d == at else d - (d > at) for d in range(ndim)]


def _expanded(call: RuleCall) -> tuple[State, ...]:
    x, out = call.tensor("self"), call.output
    added = out.ndim - x.ndim
    if isinstance(x.state, Shard):
        return everywhere(call, Shard(x.state.dim + added, x.state.outer, x.state.sections))
    dims = split_dims(out.sizes, call.split)
    if not dims or isinstance(x.state, Constant | Zero | Unknown):
        return everywhere(call, x.state)
    if x.state == SAME and len(dims) == 1:
        at = dims[0] - added
        if at < 0 or x.sizes[at] == 1:
            return everywhere(call, Shard(dims[0], None))
    return unknown(call, f"{x.state} is expanded to a size that is split")


def _unbound(call: RuleCall) -> tuple[State, ...]:
    x = call.tensor("self")
    return moved(call, x, _selected(call, x.ndim))


def _sliced(call: RuleCall) -> tuple[State, ...]:
    x, dim = call.tensor("self"), call["dim"] % max(call.tensor("self").ndim, 1)
    start, end, step = call["start"] or 0, call["end"], call["step"]
    if not call.is_split(x.sizes[dim] if x.ndim else 0):
        if call.is_split((start, end)):
            return unknown(call, "its bounds are sizes that are split")
        return everywhere(call, x.state)
    whole = start == 0 and step == 1 and equal(call.output.sizes[dim], x.sizes[dim])
    if whole:
        return everywhere(call, x.state)
    return _section(call, x, dim)


def _section(call: RuleCall, x: Operand, dim: int) -> tuple[State, ...]:
    """`x[start : end]` that is one section of a concatenated dim, or one of equal pieces."""
    start, length = call["start"] or 0, call.output.sizes[dim]
    if not isinstance(x.state, Shard) or call["step"] != 1:
        return unknown(call, "a part of a dim that is split")
    before = 0
    for size in x.state.sections:
        if equal(before, start) and equal(size, length):
            return everywhere(call, Shard(dim, 1))
        before = before + size
    pieces = quotient(x.sizes[dim], length)
    at = quotient(start, length)
    outer = None if x.state.outer is None or pieces is None else quotient(x.state.outer, pieces)
    if not isinstance(pieces, int) or not isinstance(at, int) or outer is None or x.state.sections:
        return unknown(call, "a part of a dim that is split")
    return everywhere(call, Shard(dim, outer))


def _slice_backward(call: RuleCall) -> tuple[State, ...]:
    """Zeros of `input_sizes` with the gradient in a slice: linear, and other dims are free."""
    return _embedded(call, call["dim"], both=True)


def _select_backward(call: RuleCall) -> tuple[State, ...]:
    return _embedded(call, call["dim"], both=False)


def _embedded(call: RuleCall, dim: int, both: bool) -> tuple[State, ...]:
    """`both`: the gradient has the dim as well."""
    gradient, out = call.tensor("grad_output"), call.output
    dim = dim % max(out.ndim, 1)
    numbers = [call.arguments.get(name) for name in ("start", "end", "step", "index")]
    if both and call.is_split(out.sizes[dim]) and equal(gradient.sizes[dim], out.sizes[dim]):
        return everywhere(call, gradient.state)
    if call.is_split(out.sizes[dim]) or call.is_split(numbers):
        return unknown(call, "a part of a dim that is split")
    if isinstance(gradient.state, Shard):
        at = gradient.state.dim
        to = at if both or at < dim else at + 1
        return everywhere(call, Shard(to, gradient.state.outer, gradient.state.sections))
    if isinstance(gradient.state, Constant):  # beside the slice there are zeros
        dims = split_dims(out.sizes, call.split)
        return everywhere(call, Shard(dims[0], None) if dims else SAME)
    return everywhere(call, gradient.state)


def _repeated(call: RuleCall) -> tuple[State, ...]:
    """`repeat`: copies one after the other are the outermost factor of a dim."""
    x, repeats = call.tensor("self"), list(call["repeats"])
    added = len(repeats) - x.ndim
    if call.is_split(repeats):
        return unknown(call, "as many copies as a size that is split")
    if not isinstance(x.state, Shard):
        return everywhere(call, x.state)
    times, dim = repeats[x.state.dim + added], x.state.dim + added
    if x.state.outer is None or times == 1:
        return everywhere(call, Shard(dim, x.state.outer, x.state.sections))
    if x.state.sections:
        return unknown(call, "copies of a concatenation")
    return everywhere(call, Shard(dim, x.state.outer * times))


def _interleaved(call: RuleCall) -> tuple[State, ...]:
    """`repeat_interleave(x, n, dim)`: copies of each entry are the innermost factor of the dim."""
    if not isinstance(call["repeats"], int) or call.operand("repeats") is not None:
        return unknown(call, "numbers of copies in a tensor")
    return everywhere(call, call.tensor("self").state)


def _as_complex(call: RuleCall) -> tuple[State, ...]:
    """`view_as_complex`, `view_as_real`: the last dim of two is one number."""
    x = call.tensor("self")
    if isinstance(x.state, PartialMax):
        return unknown(call, "complex numbers have no maximum")
    ndim = min(x.ndim, call.output.ndim)
    if isinstance(x.state, Constant) and x.ndim < call.output.ndim:  # its two parts may differ
        lies = x.shard(call.split)
        lost = lies is None and call.is_split(x.sizes)
        return unknown(call, f"{x.state} of sizes that are split") if lost else everywhere(call, lies or SAME)
    return moved(call, x, [d if d < ndim else None for d in range(x.ndim)])


def _zeros(call: RuleCall) -> tuple[State, ...]:
    return everywhere(call, ZERO)


def _ones(call: RuleCall) -> tuple[State, ...]:
    return everywhere(call, CONSTANT)


def _full(call: RuleCall) -> tuple[State, ...]:
    value = call.arguments.get("fill_value", call.arguments.get("s"))
    return everywhere(call, ZERO if value == 0 else CONSTANT)


def _equal(call: RuleCall) -> tuple[State, ...]:
    """Made whole on every rank."""
    return everywhere(call, SAME)


_ZEROS = "zeros new_zeros zeros_like zero".split()
_ONES = "ones new_ones ones_like".split()
_FULL = "full new_full full_like scalar_tensor".split()
_SEQUENCES = """
    arange.default arange.start arange.start_step eye.default eye.m linspace.default tril_indices.default
    triu_indices.default
""".split()


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        **{f"aten.{name}.default": _viewed for name in ("view", "_unsafe_view", "reshape", "_reshape_copy")},
        "aten.permute.default": _by_dims(_permuted),
        "aten.transpose.int": _by_dims(_transposed),
        "aten.t.default": _by_dims(_reversed),
        "aten.numpy_T.default": _by_dims(_reversed),
        "aten.unsqueeze.default": _by_dims(_unsqueezed),
        "aten.squeeze.default": _by_dims(_squeezed),
        "aten.squeeze.dim": _by_dims(_squeezed),
        "aten.squeeze.dims": _by_dims(_squeezed),
        "aten.select.int": _by_dims(_selected),
        "aten.unbind.int": _unbound,
        "aten.expand.default": _expanded,
        "aten.slice.Tensor": _sliced,
        "aten.slice_backward.default": _slice_backward,
        "aten.select_backward.default": _select_backward,
        "aten.repeat.default": _repeated,
        "aten.repeat_interleave.self_int": _interleaved,
        "aten.view_as_complex.default": _as_complex,
        "aten.view_as_real.default": _as_complex,
        **{f"aten.{name}.default": _zeros for name in _ZEROS},
        **{f"aten.{name}.default": _ones for name in _ONES},
        **{f"aten.{name}.default": _full for name in _FULL},
        **{f"aten.{name}": _equal for name in _SEQUENCES},
    }
)

# Arguments that list sizes: they may depend on what is split, since the result's sizes do.
SIZES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "aten.view.default": ("size",),
        "aten._unsafe_view.default": ("size",),
        "aten.reshape.default": ("shape",),
        "aten.expand.default": ("size",),
        "aten.slice.Tensor": ("start", "end"),
        "aten.slice_backward.default": ("input_sizes", "start", "end"),
        "aten.select_backward.default": ("input_sizes",),
        **{
            f"aten.{name}.default": ("size",) for name in ("zeros", "new_zeros", "ones", "new_ones", "full", "new_full")
        },
    }
)
