"""Samples: recurrent networks, complex numbers, Fourier transforms, products by groups."""

from __future__ import annotations

from op_registry.samples.sample import F, I, P, S, Sample, Tensor


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
