"""Facts of operators that no plan holds: tracing spells them otherwise, so that they need no annotation."""

from __future__ import annotations

from op_registry.spec import OperatorSpec

_CASTS = """
    to.prim_Device to.prim_dtype to.prim_other _autocast_to_reduced_precision.default
    _autocast_to_full_precision.default
""".split()
_DRAWN = "bernoulli.default bernoulli.p rand_like.default randn_like.default randint_like.default".split()

UNANNOTATED: tuple[OperatorSpec, ...] = (
    *(OperatorSpec(f"aten.{name}", "", moves="cast") for name in _CASTS),
    *(OperatorSpec(f"aten.{name}", "", detached=True) for name in _DRAWN),
    OperatorSpec("aten.detach_.default", "", moves="value", detached=True),
    OperatorSpec("aten.atleast_1d.default", "", moves="unit dims"),
)
