"""The functions of `torch.special`: element by element."""

from __future__ import annotations

from op_registry.builtin.numeric.elementwise import broadcasting
from op_registry.spec import OperatorSpec

_UNARY = """
    airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 digamma entr erf erfc erfcx erfinv exp2 expit expm1 gammaln i0 i0e
    i1 i1e log1p log_ndtr logit modified_bessel_i0 modified_bessel_i1 modified_bessel_k0 modified_bessel_k1 multigammaln
    ndtr ndtri polygamma psi round scaled_modified_bessel_k0 scaled_modified_bessel_k1 sinc spherical_bessel_j0
""".split()
_BINARY = "gammainc gammaincc".split()
_WITH_NUMBERS = "xlog1py xlogy zeta".split()
_POLYNOMIALS = """
    chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v chebyshev_polynomial_w hermite_polynomial_h
    hermite_polynomial_he laguerre_polynomial_l legendre_polynomial_p shifted_chebyshev_polynomial_t
    shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v shifted_chebyshev_polynomial_w
""".split()
_OVERLOADS = (
    *((name, ("default",)) for name in _BINARY),
    *((name, ("default", "other_scalar", "self_scalar")) for name in _WITH_NUMBERS),
    *((name, ("default", "n_scalar", "x_scalar")) for name in _POLYNOMIALS),
)

SPECS: tuple[OperatorSpec, ...] = (
    *(OperatorSpec(f"aten.special_{name}.default", "* -> *") for name in _UNARY),
    *(
        OperatorSpec(f"aten.special_{name}.{overload}", broadcasting)
        for name, overloads in _OVERLOADS
        for overload in overloads
    ),
)
