"""Samples: tensors made from sizes and numbers, and windows of a signal."""

from __future__ import annotations

from op_registry.call import DType
from op_registry.samples.sample import C, F, I, S, Sample

_DOUBLE = DType("float64")

FACTORIES: tuple[Sample, ...] = (
    S("arange", 12, splits="t"),
    S("arange", 12, dtype=_DOUBLE, splits="t"),
    S("arange.start", 5, 17, splits="t"),
    S("arange.start_step", 5, 40, 3, splits="t"),
    S("arange.start_step", 40, 5, -3, splits="t"),
    S("arange.start_step", 0, 23, 2, dtype=_DOUBLE, splits="t"),
    S("arange.start_step", 0.0, 1.2, 0.1),
    S("arange", 6.0),
    S("zeros", [6, 12], dtype=_DOUBLE, splits="a b"),
    S("zeros", [], dtype=_DOUBLE),
    S("ones", [6, 12], splits="a b"),
    S("full", [6, 12], 2.5, dtype=_DOUBLE, splits="a b"),
    S("empty.memory_format", [6, 12], dtype=_DOUBLE, splits="a b", compare=False),
    S("new_zeros", F(6, 12), [6, 12], splits="a b"),
    S("new_zeros", F(6, 12), [6], splits="a"),
    S("new_zeros", F(6, 12), [6, 12, 4], splits="a b c"),
    S("new_ones", F(18), [6, 12], dtype=DType("bool"), splits="a b"),
    S("new_ones", I(1, 1, 12, 1), [], dtype=DType("bool")),
    S("new_full", F(6, 12), [6, 18], 2.5, splits="a b"),
    *(S(f"nnscaler.random_{name}", [6, 12], _DOUBLE, splits="a b", compare=False) for name in ("uniform", "normal")),
    S("new_empty", F(6), [6, 12], splits="a b", compare=False),
    S("zeros_like", F(6, 12), splits="*0 *1"),
    S("ones_like", F(6, 12), splits="*0 *1"),
    S("full_like", I(6, 12), 3, splits="*0 *1"),
    S("empty_like", F(6, 12), splits="*0 *1", compare=False),
    S("scalar_tensor", 2.5, dtype=_DOUBLE),
    S("eye", 6),
    S("eye.m", 6, 12),
    S("linspace", 0, 1, 12),
    S("linspace.Scalar_Tensor", 0, C(), 12),
    S("linspace.Tensor_Scalar", C(), 3, 12),
    S("linspace.Tensor_Tensor", C(), C(), 12),
    S("fill.Scalar", F(6, 12), 2.5, splits="*0 *1"),
    S("fill.Tensor", F(6, 12), F(), splits="a b"),
    S("zero", F(6, 12), splits="*0 *1"),
)

WINDOWS: tuple[Sample, ...] = (
    *(
        S(f"{name}_window.{of}", 12, *rest)
        for name in ("bartlett", "blackman", "hamming", "hann", "kaiser")
        for of, rest in (("default", ()), ("periodic", (False,)))
    ),
    S("hamming_window.periodic_alpha", 12, True, 0.5),
    S("hamming_window.periodic_alpha_beta", 12, True, 0.5, 0.4),
    S("kaiser_window.beta", 12, True, 10.0),
    S("new_empty_strided", F(6), [6, 12], [12, 1], splits="a b", compare=False),
    S("logspace", 0.0, 1.0, 12),
    S("logspace.Tensor_Scalar", C(), 2.0, 12),
    S("logspace.Scalar_Tensor", 0.0, C(), 12),
    S("logspace.Tensor_Tensor", C(), C(), 12),
    S("range", 0, 11),
    S("range.step", 0, 11, 2),
    *(S(f"{name}_indices", 4, 6, 1) for name in ("tril", "triu")),
)
