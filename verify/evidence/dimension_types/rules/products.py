"""Matrix products: operands have labels, and what is contracted is summed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from verify.evidence.dimension_types.rules.call_with_states import Operand, Rule, RuleCall
from verify.evidence.dimension_types.rules.labelled_dims_rule import Labelled, labelled
from verify.evidence.dimension_types.rules.pointwise import pointwise
from verify.evidence.dimension_types.states import State, Unknown, checked


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


RULES: Mapping[str, Rule] = MappingProxyType(
    {
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
)
