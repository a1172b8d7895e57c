"""Direct calls of ATen operators for `rule_fuzz`: of those that have a rule and that no traced sample reaches, and such
arguments of others as samples have not. Every size of 5 or more is a symbol; one that occurs twice is one symbol."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from op_registry.samples.sample import B, F, I, P, S, Sample, U, replace_tensors
from op_registry.samples.sample import Tensor as SampleTensor

from nnscaler.tracing.graph_builder import torch_operator
from verify.evidence.dimension_types.make_call_with_symbolic_sizes import World
from verify.evidence.dimension_types.rules.call_with_states import Operand
from verify.evidence.dimension_types.states import SAME, Size, size_of, substituted
from verify.evidence.inputs.concrete_call import flat
from verify.evidence.operator_trace import arguments_of
from verify.self_test.transfer_rules.draw_calls_and_states import DrawnCall, Values

LEAST = 5  # smaller sizes are numbers
_C = SampleTensor((6, 12), "complex")

_NAMES = "var std rad2deg positive lift lift_fresh special_expit alias detach".split()

ROWS: tuple[Sample, ...] = (
    S("linear", F(6, 12, 18), F(24, 18), F(24)),
    S("linear", F(6, 18), F(24, 18)),
    S("linear", F(6, 18), F(18)),
    S("outer", F(6), F(12)),
    S("vdot", F(6), F(6)),
    S("addmv", F(6), F(6, 12), F(12), beta=0.5),
    S("addmv", F(6), F(6, 12), F(12), beta=0),
    S("addr", F(6, 12), F(6), F(12), alpha=2),
    S("addmm", F(18), F(12, 24), F(24, 18), beta=0),
    S("_fused_rms_norm", F(6, 12, 18), [18], F(18), 1e-6),
    S("_safe_softmax", F(6, 12), 1),
    S("native_group_norm", F(18, 12, 24), F(12), F(12), 18, 12, 24, 3, 1e-5),
    S("native_group_norm_backward", *(F(18, 12, 24),) * 2, F(18, 3), P(18, 3), F(12), 18, 12, 24, 3, [True] * 3),
    S("native_group_norm_backward", *(F(18, 12, 24),) * 2, F(18, 12), P(18, 12), None, 18, 12, 24, 12, [True] * 3),
    S("native_dropout_backward", F(6, 12), B(6, 12), 2.0),
    *(S(f"{name}", F(6, 12), 1) for name in ("cummax", "cummin", "logcumsumexp", "argsort", "mode", "nanmedian.dim")),
    S("argsort.stable", F(6, 12), stable=True, dim=0),
    S("kthvalue", F(6, 12), 2, 0),
    S("nansum", F(6, 12)),
    S("nansum", F(6, 12), [1], True),
    S("sum", F(6, 12)),
    S("norm.ScalarOpt_dim_dtype", F(6, 12), 2, [1], False, dtype=torch.float64),
    *(S(f"{name}", F(6, 12)) for name in _NAMES),
    *(S(f"{name}.dim", F(6, 12), [0]) for name in ("var", "std")),
    *(S(f"{name}", _C) for name in ("conj_physical", "_conj_physical", "resolve_conj", "angle", "real", "imag")),
    S("complex", F(6, 12), F(6, 12)),
    *(S(f"{name}.Tensor", F(6, 12), F(12)) for name in ("greater", "less")),
    S("true_divide.Tensor", F(6, 12), P(12)),
    S("true_divide.Scalar", F(6, 12), 2.5),
    S("arctan2", F(6, 12), F(6, 1)),
    S("special_xlogy", F(6, 12), P(12)),
    S("float_power.Tensor_Scalar", P(6, 12), 1.5),
    S("where.Scalar", B(6, 12), 1.5, 2.5),
    S("where.ScalarSelf", B(6, 12), 1.5, F(12)),
    S("where.ScalarOther", B(6, 12), F(6, 1), 0.0),
    S("where.ScalarOther", B(6, 12), F(6, 1), 2.5),
    *(S(f"{name}.Tensor", I(6, 12), I(12)) for name in ("__and__", "__or__", "__xor__")),
    *(S(f"{name}.Scalar", I(6, 12), 5) for name in ("__and__", "__or__")),
    S("numpy_T", F(6, 12, 18)),
    S("reshape", F(6, 12, 18), [6, 12, 18, 1]),
    S("_reshape_copy", F(6, 1, 12), [6, 12]),
    S("repeat_interleave.self_int", F(6, 12), 3, 1),
    S("repeat_interleave.self_int", F(6, 12), 2, 0),
    S("_index_put_impl", F(6, 12), [I(18)], F(18, 12), True),
    S("_index_put_impl", F(6, 12), [None, SampleTensor((3,), "distinct", 12)], F(6, 3)),
    *(S(f"{kind}_pad1d", F(6, 12, 18), [2, 1]) for kind in ("reflection", "replication")),
    *(S(f"{kind}_pad2d", F(6, 12, 18, 24), [2, 1, 1, 0]) for kind in ("reflection", "replication")),
    *(S(f"{kind}_pad1d_backward", F(6, 12, 21), F(6, 12, 18), [2, 1]) for kind in ("reflection", "replication")),
    *(
        S(f"{kind}_pad2d_backward", F(6, 12, 19, 27), F(6, 12, 18, 24), [2, 1, 1, 0])
        for kind in ("reflection", "replication")
    ),
    # Casts: a partial sum must not be rounded.
    *(S("_to_copy", F(6, 12), dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool)),
    S("_to_copy", I(6, 12), dtype=torch.float64),
    S("_to_copy", B(6, 12), dtype=torch.float64),
    # Reductions that integers and truth values go through.
    S("sum.dim_IntList", I(6, 12), [1]),
    S("sum.dim_IntList", B(6, 12), [0], True),
    S("cat", [F(6, 12), F(6, 18)], 1),
    S("cat", [F(6, 12), F(6, 12)], 0),
    S("stack", [F(6, 12), F(6, 12)], 1),
    *(S(name, 6, 12) for name in ("tril_indices", "triu_indices")),
    S("binary_cross_entropy", U(6, 12), U(6, 12), None, 2),
)

_SIZES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "aten.reshape.default": ("shape",),
        "aten._reshape_copy.default": ("size",),
        "aten._fused_rms_norm.default": ("normalized_shape",),
        "aten.native_group_norm.default": ("N", "C", "HxW"),
        "aten.native_group_norm_backward.default": ("N", "C", "HxW"),
    }
)
_UNCHECKED = ("pad", "group_norm")  # kernels that take sizes that do not fit


def direct_calls() -> list[DrawnCall]:
    """Return a call per row. Raises what operators raise on fake tensors: rows are ours."""
    return [_direct(row) for row in ROWS]


def _direct(row: Sample) -> DrawnCall:
    overload: Any = torch_operator(row.operator)
    world = World()
    integers: dict[int, Any] = {}
    integers_of: list[Values] = []

    def symbol(size: int) -> Any:
        if size < LEAST:
            return size
        if size not in integers:
            integers[size] = world.symbol(f"n{size}", size)
        return integers[size]

    def make(wanted: SampleTensor) -> Tensor:
        dtype = wanted.make(torch.Generator().manual_seed(0)).dtype
        if wanted.kind in ("integer", "distinct"):
            integers_of.append(tuple(range(wanted.low, wanted.high)))
        return world.tensor([symbol(size) for size in wanted.shape], dtype, False)

    given = arguments_of(overload, tuple(replace_tensors(a, make) for a in row.args), row.kwargs)
    for sized in _SIZES.get(row.operator, ()):
        value = given[sized]
        found = [integers.get(size, size) for size in value] if isinstance(value, list) else integers.get(value, value)
        given = {**given, sized: found}
    args = [given[p.name] for p in overload._schema.arguments if not p.kwarg_only]
    kwargs = {p.name: given[p.name] for p in overload._schema.arguments if p.kwarg_only}
    symbols = {size: size_of(value) for size, value in integers.items()}
    with world.mode, torch.no_grad():
        outputs = flat(overload(*args, **kwargs))
    known = world.shape_env.replacements
    hints = {symbol: size for size, symbol in symbols.items() if symbol not in known}
    guards = tuple(substituted(guard.expr, known) for guard in world.shape_env.guards)

    def convert(value: Any) -> Any:
        if isinstance(value, Tensor):
            sizes: tuple[Size, ...] = substituted(tuple(map(size_of, value.shape)), known)
            return Operand(sizes, value.dtype, SAME)
        if isinstance(value, list | tuple):
            return tuple(map(convert, value))
        return size_of(value)

    arguments = {name: convert(value) for name, value in given.items()}
    values = {name: tuple(integers_of) for name in given if integers_of}
    results = tuple(convert(o) if isinstance(o, Tensor) else None for o in outputs)
    unchecked = any(name in row.operator for name in _UNCHECKED)
    return DrawnCall(overload, arguments, results, hints, guards, values, f"direct {row}", unchecked)
