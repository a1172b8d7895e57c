"""Transfer rules of matrix products, reductions, and what goes along a dim."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from math import prod
from types import MappingProxyType

from verify.evidence.dimension_types.rules.call_with_states import Operand, Rule, RuleCall, everywhere
from verify.evidence.dimension_types.rules.labelled_dims_rule import Labelled, labelled, letters
from verify.evidence.dimension_types.rules.pointwise import pointwise
from verify.evidence.dimension_types.states import (
    CONSTANT,
    PARTIAL_MAX,
    PARTIAL_SUM,
    SAME,
    Constant,
    Shard,
    State,
    Unknown,
    Zero,
    checked,
    is_linear,
)

# Matrix products: operands have labels, and what is contracted is summed.


def _product(first: str, second: str, out: str, names: tuple[str, str] = ("self", "mat2")) -> Rule:
    """One letter per dim, as in einsum."""
    sums = frozenset(first + second) - frozenset(out)
    how = Labelled({names[0]: first, names[1]: second}, [out], sums, [[names[0]], [names[1]]])
    return lambda call: labelled(call, how)


def plus(call: RuleCall, term: Operand | None, state: State) -> tuple[State, ...]:
    """Return the state of `term`, which broadcasts, plus a tensor of the output's sizes in `state`."""
    state = checked(state, call.output.sizes, call.split)
    if term is None or isinstance(state, Unknown):
        return (state,)
    arguments = {"term": term, "rest": call.output.with_state(state)}
    return pointwise(RuleCall(call.overload, arguments, (call.output,), call.split), (("term", "rest"),))


def _plus_product(first: str, second: str, out: str, names: tuple[str, str]) -> Rule:
    """`addmm` and its like: the term in `self` is added once. With `beta=0` it is not read."""
    product = _product(first, second, out, names)

    def rule(call: RuleCall) -> tuple[State, ...]:
        arguments = {name: call[name] for name in names}
        (state,) = product(replace(call, arguments=arguments))
        return plus(call, None if call.arguments.get("beta", 1) == 0 else call.operand("self"), state)

    return rule


def _linear(call: RuleCall) -> tuple[State, ...]:
    """`linear(input, weight, bias)` where it arrives whole."""
    x, weight = call.tensor("input"), call.tensor("weight")
    rows = [f"r{i}" for i in range(x.ndim - 1)]
    out = [*rows, *(["n"] if weight.ndim == 2 else [])]
    how = Labelled(
        {"input": [*rows, "k"], "weight": ["n", "k"][2 - weight.ndim :]}, [out], ["k"], [["input"], ["weight"]]
    )
    arguments = {"input": x, "weight": weight}
    (state,) = labelled(replace(call, arguments=arguments), how)
    return plus(call, call.operand("bias"), state)


_PRODUCTS: Mapping[str, Rule] = {
    "aten.mm.default": _product("mk", "kn", "mn"),
    "aten.bmm.default": _product("bmk", "bkn", "bmn"),
    "aten.mv.default": _product("mk", "k", "m", ("self", "vec")),
    "aten.dot.default": _product("k", "k", "", ("self", "tensor")),
    "aten.vdot.default": _product("k", "k", "", ("self", "other")),
    "aten.outer.default": _product("m", "n", "mn", ("self", "vec2")),
    "aten.linear.default": _linear,
    "aten.addmm.default": _plus_product("mk", "kn", "mn", ("mat1", "mat2")),
    "aten.baddbmm.default": _plus_product("bmk", "bkn", "bmn", ("batch1", "batch2")),
    "aten.addmv.default": _plus_product("mk", "k", "m", ("mat", "vec")),
    "aten.addr.default": _plus_product("m", "n", "mn", ("vec1", "vec2")),
}


# Reductions, and operators along a dim.


Dims = Callable[[RuleCall, int], Sequence[int]]


def given_dims(call: RuleCall, ndim: int) -> list[int]:
    """Return the dims that a reduction runs over; all of them without `dim`, and with an empty list."""
    dim = call.arguments.get("dim")
    named = [dim] if isinstance(dim, int) else list(dim or ())
    return sorted({d % max(ndim, 1) for d in named} & set(range(ndim))) if named else list(range(ndim))


def all_dims(_: RuleCall, ndim: int) -> list[int]:
    """Return every dim."""
    return list(range(ndim))


def reduced(call: RuleCall, dims: Collection[int], sums: bool, linear: bool) -> Labelled:
    """Return the labels of `self` and of the outputs, whose `dims` have gone, or are 1 with `keepdim`."""
    x = call.tensor("self")
    names = letters(x.ndim, () if sums else dims)
    keep = any(o is not None and o.ndim == x.ndim for o in call.outputs)
    out = [None if d in dims else name for d, name in enumerate(names) if keep or d not in dims]
    summed = [f"d{d}" for d in dims] if sums else []
    return Labelled({"self": names}, [out] * len(call.outputs), summed, [["self"]] if linear else [])


def _sum(of: Dims) -> Rule:
    def rule(call: RuleCall) -> tuple[State, ...]:
        x = call.tensor("self")
        dims = of(call, x.ndim)
        if isinstance(x.state, Constant):
            count = prod(x.sizes[d] for d in dims)
            if call.is_split(count) and not is_linear(count, call.split):
                return everywhere(call, Unknown(f"{call.overload}: the counts of ranks do not add up to {count}"))
            return everywhere(call, PARTIAL_SUM if call.is_split(count) else CONSTANT)
        exact = call.output.dtype == x.dtype or not (x.dtype.is_floating_point or x.dtype.is_complex)
        return labelled(call, reduced(call, dims, True, exact))

    return rule


def _mean(of: Dims) -> Rule:
    """The mean over a dim that is split divides by the shard's own count: not a term of the whole's mean."""

    def rule(call: RuleCall) -> tuple[State, ...]:
        x = call.tensor("self")
        if isinstance(x.state, Constant | Zero):
            return everywhere(call, x.state)
        return labelled(call, reduced(call, of(call, x.ndim), False, True))

    return rule


def _largest(of: Dims) -> Rule:
    """The maximum over a dim that is split is a partial maximum."""

    def rule(call: RuleCall) -> tuple[State, ...]:
        x = call.tensor("self")
        dims = of(call, x.ndim)
        if isinstance(x.state, Constant | Zero) and len(call.outputs) == 1:
            return everywhere(call, x.state)
        if isinstance(x.state, Shard) and x.state.dim in dims and len(call.outputs) == 1:
            return everywhere(call, SAME if x.state.outer is None else PARTIAL_MAX)
        return labelled(call, reduced(call, dims, False, False))

    return rule


def _read_whole(of: Dims) -> Rule:
    """A reduction that is no sum."""
    return lambda call: labelled(call, reduced(call, of(call, call.tensor("self").ndim), False, False))


def along(*names: str, linear: Sequence[Sequence[str]] = (), default: int = -1) -> Rule:
    """Runs along `dim`; all arguments of these names, and all outputs, have the same dims."""

    def rule(call: RuleCall) -> tuple[State, ...]:
        ndim = call.tensor(names[0]).ndim
        dim = call.arguments.get("dim")
        labels = letters(ndim, [(default if dim is None else dim) % max(ndim, 1)])
        how = Labelled(dict.fromkeys(names, labels), [labels] * len(call.outputs), (), linear)
        return labelled(call, how)

    return rule


def _flipped(call: RuleCall) -> tuple[State, ...]:
    """`flip`, `roll`: the dims named are read whole; `roll` without dims reads the tensor as one row."""
    x = call.tensor("self")
    dims = [d % max(x.ndim, 1) for d in call["dims"]] or range(x.ndim)
    if isinstance(x.state, Constant | Zero):
        return everywhere(call, x.state)
    labels = letters(x.ndim, list(dims))
    return labelled(call, Labelled({"self": labels}, [labels], (), [["self"]]))


def _triangle(call: RuleCall) -> tuple[State, ...]:
    """The last two dims are read whole, and sizes stay: `tril`."""
    ndim = call.tensor("self").ndim
    labels = letters(ndim, range(ndim - 2, ndim))
    return labelled(call, Labelled({"self": labels}, [labels], (), [["self"]]))


def _counted(of: Dims) -> Rule:
    """The number of entries that are not zero: a sum, of what is not linear."""

    return lambda call: labelled(call, reduced(call, of(call, call.tensor("self").ndim), True, False))


_WHOLE_GIVEN = """
    all.dim all.dims prod.dim_int var.dim std.dim var.correction std.correction var_mean.correction
    std_mean.correction min.dim max.dim median.dim argmax.default argmin.default logsumexp.default
    linalg_vector_norm.default norm.ScalarOpt_dim norm.ScalarOpt_dim_dtype mode.default
    nanmedian.dim kthvalue.default
""".split()
_WHOLE_ALL = "all.default min.default prod.default median.default norm.Scalar var.default std.default".split()
_ALONG = """
    cumprod.default logcumsumexp.default cummax.default cummin.default sort.default sort.stable topk.default
    argsort.default argsort.stable
""".split()

RULES: Mapping[str, Rule] = MappingProxyType(
    {
        **_PRODUCTS,
        **{f"aten.{name}": _read_whole(given_dims) for name in _WHOLE_GIVEN},
        **{f"aten.{name}": _read_whole(all_dims) for name in _WHOLE_ALL},
        **{f"aten.{name}": along("self") for name in _ALONG},
        "aten.sum.default": _sum(all_dims),
        "aten.sum.dim_IntList": _sum(given_dims),
        "aten.mean.default": _mean(all_dims),
        "aten.mean.dim": _mean(given_dims),
        "aten.amax.default": _largest(given_dims),
        "aten.any.dim": _largest(given_dims),
        "aten.any.dims": _largest(given_dims),
        "aten.any.default": _largest(all_dims),
        "aten.nansum.default": _counted(given_dims),
        "aten.linalg__powsum.default": _counted(given_dims),
        "aten.amin.default": _read_whole(given_dims),
        "aten.max.default": _largest(all_dims),
        "aten.count_nonzero.default": _counted(given_dims),
        "aten.count_nonzero.dim_IntList": _counted(given_dims),
        "aten.cumsum.default": along("self", linear=[["self"]]),
        "aten.flip.default": _flipped,
        "aten.roll.default": _flipped,
        "aten.tril.default": _triangle,
        "aten.triu.default": _triangle,
        "aten._softmax.default": along("self"),
        "aten._safe_softmax.default": along("self"),
        "aten._log_softmax.default": along("self"),
        "aten._softmax_backward_data.default": along("grad_output", "output", linear=[["grad_output"]]),
        "aten._log_softmax_backward_data.default": along("grad_output", "output", linear=[["grad_output"]]),
    }
)
