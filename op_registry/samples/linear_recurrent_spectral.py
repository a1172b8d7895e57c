"""Sample calls of linear algebra (products, matrices, distances), recurrent networks, complex numbers and Fourier
transforms."""

from __future__ import annotations

from op_registry.samples.sample import C, F, I, P, S, Sample, Tensor

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
    S("linalg_solve", F(12, 3, 3), F(12, 6, 3), left=False, splits="a n"),
    S("linalg_solve_triangular", F(12, 3, 3), F(12, 3, 6), upper=True, splits="a n"),
    S("linalg_solve_triangular", F(12, 3, 3), F(12, 6, 3), upper=False, left=False, splits="a n"),
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


# Samples: recurrent networks, complex numbers, Fourier transforms, products by groups.


def _weights(
    gates: int, inputs: int, hidden: int, directions: int = 1, layers: int = 1, bias: bool = True
) -> list[Tensor]:
    found: list[Tensor] = []
    for layer in range(layers):
        width = inputs if layer == 0 else hidden * directions
        for _ in range(directions):
            rows = gates * hidden
            found += [F(rows, width), F(rows, hidden), *([F(rows), F(rows)] if bias else [])]
    return found


def _run(name: str, gates: int, batch_first: bool, directions: int, layers: int, bias: bool) -> Sample:
    x = F(12, 5, 4) if batch_first else F(5, 12, 4)
    state = F(layers * directions, 12, 3)
    states = [state, state] if name == "lstm" else state
    weights = _weights(gates, 4, 3, directions, layers, bias)
    options = (bias, layers, 0.0, True, directions == 2, batch_first)
    return S(f"{name}.input", x, states, weights, *options, splits="b")


_RECURRENT: tuple[Sample, ...] = (
    _run("lstm", 4, True, 1, 1, True),
    _run("lstm", 4, False, 2, 1, False),
    _run("lstm", 4, True, 1, 2, False),
    _run("gru", 3, True, 1, 1, True),
    _run("gru", 3, False, 2, 1, False),
    _run("rnn_tanh", 1, True, 2, 1, False),
    _run("rnn_tanh", 1, False, 1, 2, False),
    _run("rnn_relu", 1, True, 1, 1, True),
    _run("rnn_relu", 1, False, 1, 1, False),
    S("lstm.data", F(9, 4), I(3, high=4, low=3), [F(1, 3, 2)] * 2, _weights(4, 4, 2), True, 1, 0.0, True, False),
    *(
        S(f"{name}.data", F(9, 4), I(3, high=4, low=3), F(1, 3, 2), _weights(gates, 4, 2), True, 1, 0.0, True, False)
        for name, gates in (("gru", 3), ("rnn_tanh", 1), ("rnn_relu", 1))
    ),
    S("lstm_cell", F(12, 4), [F(12, 6), F(12, 6)], F(24, 4), F(24, 6), F(24), F(24), splits="b h"),
    S("lstm_cell", F(6, 4), [F(6, 12), F(6, 12)], F(48, 4), F(48, 12), splits="b h"),
    S("gru_cell", F(12, 4), F(12, 6), F(18, 4), F(18, 6), F(18), F(18), splits="b"),
    S("gru_cell", F(6, 4), F(6, 3), F(9, 4), F(9, 3), splits="b"),
    *(
        S(f"{name}_cell", F(12, 4), F(12, 6), F(6, 4), F(6, 6), *biases, splits="b h")
        for name in ("rnn_tanh", "rnn_relu")
        for biases in ((F(6), F(6)), ())
    ),
)


def _c(*shape: int) -> Tensor:
    return Tensor(shape, "complex")


_ONE = ("fft_fft", "fft_ifft", "fft_rfft", "fft_irfft", "fft_hfft", "fft_ihfft")


def _spectrum(name: str, *shape: int) -> Tensor:
    return F(*shape) if name.startswith(("fft_rfft", "fft_ihfft")) else _c(*shape)


_SPECTRAL: tuple[Sample, ...] = (
    *(S(name, _spectrum(name, 6, 5, 12), None, 1, "ortho", splits="a c") for name in _ONE),
    *(S(name, _spectrum(name, 6, 12, 7), splits="a b") for name in _ONE),
    S("fft_fft", F(6, 12), 8, splits="a"),
    S("fft_irfft", _c(6, 12), n=8, norm="forward", splits="a"),
    *(S(f"{name}2", _spectrum(name, 12, 5, 4), splits="a") for name in _ONE),
    S("fft_rfft2", F(5, 12, 4), None, [0, -1], splits="b"),
    S("fft_ifft2", _c(5, 4, 12), [6, 3], [0, 1], "ortho", splits="c"),
    *(S(f"{name}n", _spectrum(name, 12, 5, 4), None, [1, 2], splits="a") for name in _ONE),
    S("fft_fftn", F(6, 12, 4), [3], splits="a b"),
    S("fft_fftn", F(3, 4)),
    S("fft_fftshift", F(6, 5, 12), [1], splits="a c"),
    S("fft_fftshift", F(6, 5)),
    S("fft_ifftshift", _c(6, 5, 12), [-2], splits="a c"),
    S("stft", F(12, 32), 8, 4, 8, P(8), False, True, True, splits="b"),
    S("stft", F(32), 8, return_complex=True),
    S("stft.center", F(6, 32), 8, None, None, None, True, "reflect", True, None, True, splits="b"),
    S("istft", _c(12, 5, 9), 8, splits="b"),
    S("istft", _c(5, 9), 8, 4),
    *(
        S(name, _c(6, 12), splits="*0 *1")
        for name in ("_conj", "conj", "conj_physical", "resolve_conj", "real", "imag")
    ),
    *(S(name, F(6, 12), splits="*0 *1") for name in ("conj", "resolve_neg", "_neg_view", "real", "conj_physical")),
    S("nnscaler.view_as_complex", F(6, 12, 2), splits="*0 *1"),
    S("angle", _c(6, 12), splits="*0 *1"),
    S("complex", F(6, 12), F(6, 12), splits="a b"),
    S("complex", F(6, 1, 12), F(18, 1), splits="a b c"),
)

_GROUPED: tuple[Sample, ...] = (
    *(
        S(name, F(12, 18), F(4, 18, 24), Tensor((4,), "offsets", 12), splits="m k g n")
        for name in ("transformers.grouped_mm_fallback.default", "nnscaler.grouped_mm")
    ),
    S("nnscaler.grouped_mm", F(18, 24), F(6, 24, 12), Tensor((6,), "offsets", 18), splits="m k g n"),
    S("nnscaler.grouped_mm", F(18, 24), F(6, 24, 12), Tensor((6,), "offsets", 15), splits="m k g n"),
)

RECURRENT_SPECTRAL: tuple[Sample, ...] = (*_RECURRENT, *_SPECTRAL, *_GROUPED)
