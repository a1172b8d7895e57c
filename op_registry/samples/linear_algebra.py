"""Samples: products, matrices, distances."""

from __future__ import annotations

from op_registry.samples.sample import C, F, P, S, Sample, Tensor

_PRODUCTS: tuple[Sample, ...] = (
    S("linalg_matmul", F(6, 1, 12, 18), F(18, 24), splits="a k m n"),
    S("vdot", F(12), F(12), splits="k"),
    S("ger", F(6), F(12), splits="m n"),
    S("addmv", F(6), F(6, 12), F(12), splits="k m"),
    S("addmv", F(), F(6, 12), F(12), beta=0.5, alpha=2, splits="k m"),
    S("addbmm", F(18), F(8, 6, 12), F(8, 12, 18), splits="b k m n"),
    S("addbmm", F(6, 18), F(4, 6, 12), F(4, 12, 18), beta=0.5, alpha=2, splits="b k m n"),
    S("addr", F(12), F(6), F(12), beta=0.5, alpha=2, splits="m n"),
    S("addr", F(6, 12), F(6), F(12), splits="m n"),
    S("inner", F(6, 8, 12), F(18, 12), splits="a b c k"),
    S("inner", F(12), F(12), splits="k"),
    S("inner", F(6, 12), F(), splits="a b"),
    S("tensordot", F(4, 6, 12), F(12, 6, 18), [1, 2], [1, 0], splits="a b c f"),
    S("tensordot", F(6, 12), F(18, 12), [-1], [-1], splits="a b c"),
    S("tensordot", F(6, 1), F(18, 12), [1], [1], splits="a c d"),
    S("linalg_vecdot", F(6, 12, 18), F(12, 1), dim=-1, splits="a b c"),
    S("linalg_vecdot", F(6, 12, 18), F(6, 12, 18), dim=1, splits="a b c"),
    S("kron", F(6, 4), F(12, 8), splits="a b c d"),
    S("kron", F(6), F(12, 18), splits="b c d"),
    S("bilinear", F(6, 8, 12), F(6, 8, 18), F(24, 12, 18), F(24), splits="*0 *1 i j o"),
    S("bilinear", F(6, 12), F(6, 18), F(24, 12, 18), splits="*0 i j o"),
    *(S(name, [F(6, 12), F(12, 18), F(18, 24)], splits="a b c d") for name in ("chain_matmul", "linalg_multi_dot")),
    S("linalg_multi_dot", [F(12), F(12, 18), F(18)], splits="b c"),
    S("einsum", "bii -> bi", [F(6, 12, 12)], splits="b"),
    S("einsum", "bij,jj->bi", [F(6, 12, 18), F(18, 18)], splits="b i"),
    S("einsum", "ii", [F(6, 6)]),
    S("einsum", "bT H, H k -> b T k", [F(4, 6, 12), F(12, 18)], splits="b T H k"),
    S("einsum", "kB,ak", [F(6, 12), F(18, 6)], splits="B a k"),
    S("einsum", "...ij->ij", [F(4, 6, 12)], splits="e0 i j"),
    S("einsum", "i...->...", [F(6, 12, 18)], splits="i e0 e1"),
    S("einsum", "ij,ij,jk->ik", [F(6, 12), F(6, 12), F(12, 18)], splits="i j k"),
    S("einsum", "a,a->", [F(12), F(12)], splits="a"),
)

_MATRIX = """
    det inverse linalg_det linalg_inv linalg_matrix_exp linalg_pinv.atol_rtol_float linalg_slogdet
    linalg_svdvals matrix_exp pinverse
    slogdet linalg_matrix_rank.atol_rtol_float linalg_lu_factor linalg_diagonal linalg_cond
""".split()
_ITSELF = "linalg_cholesky_ex linalg_inv_ex linalg_lu_factor_ex".split()

_PIVOTS = Tensor((12, 3), "pivots")

_ALGEBRA: tuple[Sample, ...] = (
    *(S(name, F(12, 3, 3), splits="a") for name in _MATRIX),
    *(S(name, F(6, 12, 2, 2), splits="a b") for name in ("linalg_det", "linalg_inv", "linalg_eigvalsh")),
    S("linalg_lu", C(12, 3, 3), splits="a"),
    *(S(name, F(12, 3, 3), splits="a") for name in _ITSELF if name != "linalg_cholesky_ex"),
    *(S(name, F(12, 3, 3), 1e-9, splits="a") for name in ("linalg_pinv", "linalg_matrix_rank")),
    *(S(f"linalg_{n}.atol_rtol_tensor", F(12, 3, 3), atol=C(12), splits="a") for n in ("pinv", "matrix_rank")),
    S("linalg_qr", F(12, 4, 3), splits="a"),
    S("linalg_svd", F(12, 3, 3), splits="a"),
    S("linalg_eigh", F(12, 3, 3), splits="a"),
    S("logdet", Tensor((12, 1, 1), "positive"), splits="a"),
    *(S(name, F(12, 3, 3), 3, splits="a") for name in ("matrix_power", "linalg_matrix_power")),
    *(S(name, P(12, 1, 1), splits="a") for name in ("cholesky", "linalg_cholesky", "linalg_cholesky_ex")),
    S("cholesky_inverse", P(12, 1, 1), splits="a"),
    S("cholesky_solve", F(12, 2, 3), P(12, 2, 2), splits="a"),
    S("linalg_solve", F(12, 3, 3), F(12, 3, 6), splits="a n"),
    S("linalg_solve", F(12, 3, 3), F(12, 3), splits="a"),
    S("linalg_solve", F(6, 1, 3, 3), F(12, 3, 6), splits="a b n"),
    S("linalg_solve", F(12, 3, 3), F(12, 6, 3), left=False, splits="a"),
    S("linalg_solve_triangular", F(12, 3, 3), F(12, 3, 6), upper=True, splits="a n"),
    S("linalg_solve_triangular", F(12, 3, 3), F(12, 6, 3), upper=False, left=False, splits="a"),
    S("linalg_householder_product", F(12, 4, 3), F(12, 3), splits="a"),
    *(S(name, C(12, 3, 3), splits="a") for name in ("linalg_eig", "linalg_eigvals", "geqrf")),
    *(S(name, C(12, 3, 3), splits="a") for name in ("linalg_ldl_factor", "linalg_ldl_factor_ex")),
    S("linalg_lu_solve", F(12, 3, 3), _PIVOTS, F(12, 3, 2), splits="a"),
    S("linalg_ldl_solve", C(12, 3, 3), _PIVOTS, C(12, 3, 2), splits="a"),
    S("lu_solve", F(12, 3, 2), F(12, 3, 3), _PIVOTS, splits="a"),
    S("lu_unpack", F(12, 3, 3), _PIVOTS, splits="a"),
    S("ormqr", F(12, 3, 3), F(12, 3), F(12, 3, 2), splits="a"),
    S("triangular_solve", F(12, 3, 2), F(12, 3, 3), splits="a"),
    S("cov", F(3, 12)),
    S("corrcoef", F(3, 12)),
    S("vander", C(12), splits="n"),
    S("vander", C(12), 3, True, splits="n"),
    S("diag", F(12)),
    S("diag", F(6, 12), 1),
    S("diagflat", F(3, 4), -1),
    S("linalg_diagonal", F(3, 12, 4), offset=1, dim1=0, dim2=2, splits="b"),
    S("trace", F(6, 12)),
)

_DISTANCES: tuple[Sample, ...] = (
    S("cosine_similarity", F(6, 12, 18), F(6, 12, 18), splits="a c"),
    S("cosine_similarity", F(6, 1, 18), F(12, 18), -1, splits="a b"),
    S("pairwise_distance", F(6, 12), F(6, 12), splits="a"),
    S("pairwise_distance", F(6, 12), F(12), 1.0, 1e-6, True, splits="a b"),
    S("cdist", F(4, 6, 3), F(4, 12, 3), splits="a p r"),
    S("cdist", F(6, 4, 5, 12), F(4, 18, 12), 1.0, splits="a b m r"),
    S("cdist", F(6, 12), F(18, 12), float("inf"), splits="p m r"),
    S("pdist", F(6, 4)),
    S("dist", F(6, 12), F(12)),
    S("cross", F(6, 3, 12), F(6, 3, 1), splits="a c"),
    S("cross", F(6, 12, 3), F(1, 12, 3), -1, splits="a b"),
    S("linalg_cross", F(6, 12, 3), F(1, 12, 3), splits="a b"),
    S("linalg_cross", F(3, 12), F(3, 12), dim=0, splits="b"),
)

LINEAR_ALGEBRA: tuple[Sample, ...] = (*_PRODUCTS, *_ALGEBRA, *_DISTANCES)
