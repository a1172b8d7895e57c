"""Samples: products, reductions, normalisations, attention."""

from __future__ import annotations

from op_registry.call import DType

from op_registry.samples.sample import B, C, F, I, S, Sample, Tensor

_PRODUCTS: tuple[Sample, ...] = (
    S("linear", F(6, 12, 18), F(24, 18), splits="*0 *1 k n"),
    S("linear", F(6, 12, 18), F(24, 18), F(24), splits="*0 *1 k n"),
    S("linear", F(6, 12, 18), F(24, 18), None, splits="*0 *1 k n"),
    S("linear", F(18), F(24, 18), F(24), splits="k n"),
    S("linear", F(6, 18), F(18), splits="*0 k"),
    S("matmul", F(6, 12), F(12, 18), splits="k m n"),
    S("matmul", F(12), F(12), splits="k"),
    S("matmul", F(6, 12), F(12), splits="k m"),
    S("matmul", F(12), F(24, 12, 18), splits="a k n"),
    S("matmul", F(6, 24, 12, 18), F(6, 24, 18, 30), splits="a b k m n"),
    S("matmul", F(24, 12, 18), F(6, 1, 18, 30), splits="a b k m n"),
    S("matmul", F(6, 1, 12, 18), F(18, 30), splits="a k m n"),
    S("mm", F(6, 12), F(12, 18), splits="k m n"),
    S("bmm", F(24, 6, 12), F(24, 12, 18), splits="b k m n"),
    S("mv", F(6, 12), F(12), splits="k m"),
    S("dot", F(12), F(12), splits="k"),
    S("outer", F(6), F(12), splits="m n"),
    S("addmm", F(18), F(6, 12), F(12, 18), splits="k m n"),
    S("addmm", F(6, 1), F(6, 12), F(12, 18), beta=0.5, alpha=2, splits="k m n"),
    S("addmm", F(6, 18), F(6, 12), F(12, 18), beta=0, splits="k m n"),
    S("addmm", F(), F(6, 12), F(12, 18), splits="k m n"),
    S("baddbmm", F(24, 6, 18), F(24, 6, 12), F(24, 12, 18), splits="b k m n"),
    S("baddbmm", F(1, 18), F(24, 6, 12), F(24, 12, 18), beta=0.5, alpha=2, splits="b k m n"),
    S("transformers.grouped_mm_fallback.default", F(12, 18), F(4, 18, 24), Tensor((4,), "offsets", 12), splits="k n"),
    S("nnscaler.grouped_mm", F(12, 18), F(4, 18, 24), Tensor((4,), "offsets", 12), splits="k n"),
    S("einsum", "bik,bkj->bij", [F(24, 6, 12), F(24, 12, 18)], splits="b i j k"),
    S("einsum", "ij,jk", [F(6, 12), F(12, 18)], splits="i j k"),
    S("einsum", "...ij, j d -> ...di", [F(6, 18, 30, 12), F(12, 24)], splits="e0 e1 d i j"),
    S("einsum", "...ij,...jk->...ik", [F(6, 12, 18), F(24, 1, 18, 30)], splits="e0 e1 i j k"),
    S("einsum", "bhqd,bkd->bhqk", [F(6, 12, 18, 24), F(6, 30, 24)], splits="b d h k q"),
    S("einsum", "ab,cb,db->acd", [F(6, 12), F(18, 12), F(24, 12)], splits="a b c d"),
    S("einsum", "ab->b", [F(6, 12)], splits="a b"),
    S("einsum", "i,j->ij", [F(6), F(12)], splits="i j"),
    S("einsum", "...a->a", [F(6, 12)], splits="e0 a"),
    S("einsum", "ab,ab->a", [F(6, 1), F(6, 12)], splits="a b"),
    S("einsum", "ii->i", [F(6, 6)]),
)

_SUMS: tuple[Sample, ...] = (
    S("sum", F(6, 12), splits="a b"),
    S("sum", F()),
    S("sum", B(6, 12), splits="a b"),
    S("sum", I(6, 12), dtype=DType("float64"), splits="a b"),
    S("sum.dim_IntList", F(6, 12, 18), [1], splits="a b c"),
    S("sum.dim_IntList", F(6, 12, 18), [-1, 0], True, splits="a b c"),
    S("sum.dim_IntList", F(6, 12), None, splits="a b"),
    S("sum.dim_IntList", F(6, 12), [], splits="a b"),
    S("mean", F(6, 12), splits="a b"),
    S("mean", F(6, 12), dtype=DType("float64"), splits="a b"),
    S("mean.dim", F(6, 12, 18), [-1], True, splits="a b c"),
    S("mean.dim", F(6, 12, 18), [1, 2], splits="a b c"),
    S("mean.dim", F(6, 12), None, True, splits="a b"),
    S("mean.dim", F(6, 12), [1], dtype=DType("float64"), splits="a b"),
    S("count_nonzero", I(6, 12, high=3), splits="a b"),
    S("count_nonzero.dim_IntList", I(6, 12, high=3), [0], splits="a b"),
    S("cumsum", F(6, 12, 18), 1, splits="a c"),
    S("cumsum", B(6, 12), -1, splits="a"),
    S("diff", F(6, 12), splits="a"),
    S("diff", I(6, 12), 1, -1, I(6, 1), splits="a"),
    S("diff", F(6, 12), 2, 0, F(3, 12), F(2, 12), splits="b"),
)

_FROZEN: tuple[Sample, ...] = (
    *(S(n, F(6, 12, 18), [1], splits="a c") for n in ("amax", "amin", "logsumexp")),
    *(S(n, F(6, 12, 18), [1, -1], True, splits="a") for n in ("amax", "logsumexp")),
    *(S(n, F(6, 12, 18), 1, splits="a c") for n in ("argmax", "argmin")),
    *(S(n, F(6, 12)) for n in ("argmax", "max", "min", "prod", "median", "var", "std", "norm.Scalar")),
    *(S(f"{n}.dim", F(6, 12, 18), 1, True, splits="a c") for n in ("max", "min")),
    *(S(f"{n}.dim", B(6, 12, 18), 1, splits="a c") for n in ("any", "all")),
    *(S(f"{n}.dims", B(6, 12, 18), [1, 2], True, splits="a") for n in ("any", "all")),
    *(S(n, B(6, 12)) for n in ("any", "all")),
    *(S(f"{n}.correction", F(6, 12, 18), [-1], correction=0, keepdim=True, splits="a b") for n in ("var", "std")),
    *(S(f"{n}.correction", F(6, 12, 18), [0, 2], splits="b") for n in ("var", "var_mean", "std_mean")),
    *(S(f"{n}.dim", F(6, 12, 18), [1], False, True, splits="a c") for n in ("var", "std")),
    S("prod.dim_int", F(6, 12), 1, splits="a"),
    S("linalg_vector_norm", F(6, 12, 18), 2, [-1], True, splits="a b"),
    S("linalg_vector_norm", F(6, 12)),
    S("linalg_norm", F(6, 12, 18), None, [1], True, splits="a c"),
    S("linalg_norm", F(6, 12)),
    S("norm.ScalarOpt_dim", F(6, 12, 18), 2, [1], True, splits="a c"),
    S("softmax.int", F(6, 12, 18), -1, splits="a b"),
    S("softmax.int", F(6, 12, 18), 1, DType("float64"), splits="a c"),
    S("_softmax", F(6, 12), 1, False, splits="a"),
    S("log_softmax.int", F(6, 12, 18), 2, splits="a b"),
    S("cumprod", F(6, 12), 0, splits="b"),
)

_NORMS: tuple[Sample, ...] = (
    S("layer_norm", F(6, 12, 18), [18], F(18), F(18), 1e-5, False, splits="a b"),
    S("layer_norm", F(6, 12, 18), [12, 18], F(12, 18), splits="a"),
    S("layer_norm", F(6, 12, 18), [18], None, F(18), splits="a b"),
    S("layer_norm", F(6, 12), [12], splits="a"),
    S("rms_norm", F(6, 12, 18), [18], F(18), 1e-6, splits="a b"),
    S("rms_norm", F(6, 12), [12], splits="a"),
    S("_weight_norm", F(6, 12, 18), F(6, 1, 1), 0, splits="a"),
    S("_weight_norm", F(6, 12, 18), F(1, 1, 18), 2, splits="c"),
    S("group_norm", F(18, 24, 5), 6, F(24), F(24), splits="b g"),
    S("group_norm", F(18, 24, 5, 7), 12, F(24), splits="b g"),
    S("group_norm", F(18, 24), 12, splits="b g"),
    S("nnscaler.batch_norm", F(18, 6, 5), F(6), F(6), C(6), C(6), 0.1, 1e-5, splits="c"),
    S("nnscaler.batch_norm", F(18, 6), None, None, C(6), C(6), 0.1, 1e-5, splits="c"),
    S("batch_norm", F(18, 6, 12), F(6), F(6), C(6), C(6), False, 0.1, 1e-5, False, splits="b c s0"),
    S("batch_norm", F(18, 6), None, None, C(6), C(6), False, 0.1, 1e-5, False, splits="b c"),
    S("batch_norm", F(18, 6, 5), F(6), F(6), None, None, True, 0.1, 1e-5, False, splits="c"),
)

_SDPA = "scaled_dot_product_attention"
_QKV = (F(6, 12, 18, 4), F(6, 12, 24, 4), F(6, 12, 24, 30))

_ATTENTION: tuple[Sample, ...] = (
    S(_SDPA, *_QKV, splits="a b l v"),
    S(_SDPA, *_QKV, None, 0.0, True, splits="a b v"),
    S(_SDPA, F(6, 12, 18, 4), F(6, 12, 18, 4), F(6, 12, 18, 4), is_causal=True, scale=0.7, splits="a b v"),
    S(_SDPA, *_QKV, B(18, 24), splits="a b l v"),
    S(_SDPA, *_QKV, F(6, 1, 18, 24), splits="a b l v"),
    S(_SDPA, *_QKV, F(1, 12, 18, 24), scale=1.0, splits="a b l v"),
    S(_SDPA, *_QKV, F(6, 12, 18, 24), splits="a b l v"),
    S(_SDPA, *_QKV, F(12, 1, 24), splits="a b l v"),
    S(_SDPA, *_QKV, F(6, 1, 1, 24), splits="a b l v"),
    S(_SDPA, F(6, 18, 4), F(6, 24, 4), F(6, 24, 30), splits="a l v"),
    S(_SDPA, F(18, 4), F(24, 4), F(24, 30), splits="l v"),
    S(_SDPA, F(6, 12, 18, 4), F(1, 12, 24, 4), F(1, 12, 24, 30), splits="a b l v"),
    S(_SDPA, F(18, 24, 6, 4), F(18, 6, 12, 4), F(18, 6, 12, 30), enable_gqa=True, splits="a g h l v"),
    S(_SDPA, F(18, 24, 6, 4), F(18, 6, 12, 4), F(18, 6, 12, 30), None, 0.0, True, enable_gqa=True, splits="a g h v"),
    S(_SDPA, F(18, 24, 6, 4), F(18, 6, 12, 4), F(18, 6, 12, 30), F(1, 24, 6, 12), enable_gqa=True, splits="a g h l v"),
    S(_SDPA, F(18, 24, 6, 4), F(18, 6, 12, 4), F(18, 6, 12, 30), F(18, 1, 6, 12), enable_gqa=True, splits="a g h l v"),
    S(_SDPA, F(18, 6, 12, 4), F(18, 6, 24, 4), F(18, 6, 24, 30), enable_gqa=True, splits="a b l v"),
)

SAMPLES: tuple[Sample, ...] = (*_PRODUCTS, *_SUMS, *_FROZEN, *_NORMS, *_ATTENTION)
