"""Lower random operators to arithmetic on `nnscaler.random_uniform` and `nnscaler.random_normal`. torch draws from a
generator that no two ranks share: ranks that should hold equal copies would not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from op_registry.call import DType, dtype_name
from op_registry.infer_torch_schema import may_draw
from op_registry.registry import facts_of

from nnscaler.errors import NnscalerError
from nnscaler.ir.graph import Graph, Operation
from nnscaler.runtime.ops.random import random_normal, random_uniform
from nnscaler.tracing.graph_builder import Builder, TensorName, dtype_of, torch_operator

# Formulas of torch's random operators over two draws: uniform in (0, 1), and normal.
# Ranks cannot share torch's generator, so programs draw by the runtime's own operators
# (`nnscaler.runtime.ops.random`). The formulas serve twice: a pass writes them into graphs, and an eager run that
# is compared with a program follows them with the numbers that the program has.

Arguments = tuple[Any, ...]


class Maker(Protocol):
    """Makes values: tensors now, or operations of a graph."""

    def draw(self, kind: str, shape: Sequence[int], dtype: str) -> Any:
        """`kind` is "uniform" or "normal"."""

    def call(self, operator: str, *args: Any) -> Any:
        """Return the result of an operator of torch, called `aten.<name>.<overload>`."""

    def dtype(self, value: Any) -> str: ...


Formula = Callable[[Maker, Arguments, tuple[int, ...], str], Any]  # maker, args, result's shape and dtype -> result


def _affine(make: Maker, value: Any, scale: Any, offset: Any) -> Any:
    """value * scale + offset, where both may be numbers or tensors."""
    value = value if _is(scale, 1) else make.call("aten.mul.Tensor", value, scale)
    return value if _is(offset, 0) else make.call("aten.add.Tensor", value, offset)


def _is(value: Any, number: int) -> bool:
    return isinstance(value, int | float) and value == number


def _cast(make: Maker, value: Any, dtype: str) -> Any:
    return value if make.dtype(value) == dtype else make.call("aten.to.dtype", value, DType(dtype))


def _with(args: Arguments, *defaults: Any, skip: int = 0) -> Arguments:
    """Positional arguments from `skip` on, filled up with defaults."""
    return (*args[skip:], *defaults[len(args) - skip :])[: len(defaults)]


def _plain(kind: str) -> Formula:
    return lambda make, args, shape, dtype: make.draw(kind, shape, dtype)


def _uniform(make: Maker, args: Arguments, shape: tuple[int, ...], dtype: str) -> Any:
    low, high = _with(args, 0.0, 1.0, skip=1)
    return _affine(make, make.draw("uniform", shape, dtype), high - low, low)


def _normal(skip: int) -> Formula:
    def formula(make: Maker, args: Arguments, shape: tuple[int, ...], dtype: str) -> Any:
        mean, deviation = _with(args, 0.0, 1.0, skip=skip)
        return _affine(make, make.draw("normal", shape, dtype), deviation, mean)

    return formula


def _bernoulli(skip: int) -> Formula:
    def formula(make: Maker, args: Arguments, shape: tuple[int, ...], dtype: str) -> Any:
        (p,) = _with(args, 0.5, skip=skip)
        number = isinstance(p, int | float)
        draw = make.draw("uniform", shape, "float64" if number else make.dtype(p))
        return _cast(make, make.call(f"aten.lt.{'Scalar' if number else 'Tensor'}", draw, p), dtype)

    return formula


def _exponential(make: Maker, args: Arguments, shape: tuple[int, ...], dtype: str) -> Any:
    (rate,) = _with(args, 1.0, skip=1)
    return make.call("aten.mul.Tensor", make.call("aten.log.default", make.draw("uniform", shape, dtype)), -1.0 / rate)


def _integers(skip: int, low: bool) -> Formula:
    def formula(make: Maker, args: Arguments, shape: tuple[int, ...], dtype: str) -> Any:
        first, end = args[skip : skip + 2] if low else (0, args[skip])
        draw = make.call("aten.mul.Tensor", make.draw("uniform", shape, "float64"), end - first)
        return _cast(make, _affine(make, make.call("aten.floor.default", draw), 1, first), dtype)

    return formula


def _permutation(make: Maker, _args: Arguments, shape: tuple[int, ...], dtype: str) -> Any:
    return _cast(make, make.call("aten.argsort.default", make.draw("uniform", shape, "float64")), dtype)


def _rrelu(make: Maker, args: Arguments, shape: tuple[int, ...], dtype: str) -> Any:
    x, (lower, upper) = args[0], _with(args, 1 / 8, 1 / 3, skip=1)
    slope = _affine(make, make.draw("uniform", shape, dtype), upper - lower, lower)
    return make.call("aten.where.self", make.call("aten.gt.Scalar", x, 0), x, make.call("aten.mul.Tensor", x, slope))


def _log_gamma_draw(make: Maker, rate: Any, shape: tuple[int, ...]) -> Any:
    """Return logarithms of draws from gamma distributions of these shape parameters, in float64.

    Marsaglia and Tsang's method: of a normal number x, d (1 + x / sqrt(9 d))^3 is taken with a probability that is
    above 0.95; the first of `_TRIALS` that is taken counts. A parameter below 1 is drawn one higher, and multiplied
    by u^(1 / parameter). What is drawn has no derivative.
    """

    def call(name: str, *args: Any) -> Any:
        return make.call(f"aten.{name}", *args)

    rate = _cast(make, call("detach.default", rate), "float64")
    d = call("add.Tensor", rate, 2 / 3)
    # one draw for all: in a comparison, two of one shape would be the same numbers
    drawn = make.draw("uniform", (2 * _TRIALS + 1, *shape), "float64")
    u, normal = (call("narrow.default", drawn, 0, start, _TRIALS) for start in (0, _TRIALS))
    x = call("erfinv.default", call("sub.Tensor", call("mul.Tensor", normal, 2.0), 1.0))
    x = call("mul.Tensor", x, 2**0.5)
    root = call("add.Tensor", call("div.Tensor", x, call("sqrt.default", call("mul.Tensor", d, 9.0))), 1.0)
    log_v = call("mul.Tensor", call("log.default", call("clamp_min.default", root, 1e-300)), 3.0)
    linear = call("sub.Tensor", call("add.Tensor", log_v, 1.0), call("exp.default", log_v))
    bound = call("add.Tensor", call("mul.Tensor", call("mul.Tensor", x, x), 0.5), call("mul.Tensor", d, linear))
    taken = call("logical_and.default", call("lt.Tensor", call("log.default", u), bound), call("gt.Scalar", root, 0))
    first = call("argmax.default", call("to.dtype", taken, DType("int64")), 0, True)
    found = call("squeeze.dim", call("gather.default", log_v, 0, first), 0)
    boost = call("div.Tensor", call("log.default", call("select.int", drawn, 0, 2 * _TRIALS)), rate)
    return call("add.Tensor", call("add.Tensor", found, call("log.default", d)), boost)


_TRIALS = 13  # none of them is taken once in 10^17 draws


def _gamma(make: Maker, args: Arguments, shape: tuple[int, ...], dtype: str) -> Any:
    return _cast(make, make.call("aten.exp.default", _log_gamma_draw(make, args[0], shape)), dtype)


def _dirichlet(make: Maker, args: Arguments, shape: tuple[int, ...], dtype: str) -> Any:
    return _cast(make, make.call("aten.softmax.int", _log_gamma_draw(make, args[0], shape), -1), dtype)


FORMULAS: Mapping[str, Formula] = {
    "aten.rand.default": _plain("uniform"),
    "aten.rand_like.default": _plain("uniform"),
    "aten.randn.default": _plain("normal"),
    "aten.randn_like.default": _plain("normal"),
    "aten.uniform.default": _uniform,
    "aten.normal_functional.default": _normal(1),
    "aten.normal.float_float": _normal(0),
    "aten.normal.Tensor_float": _normal(0),
    "aten.normal.float_Tensor": _normal(0),
    "aten.normal.Tensor_Tensor": _normal(0),
    "aten.bernoulli.default": _bernoulli(0),
    "aten.bernoulli.p": _bernoulli(1),
    "aten.bernoulli.Tensor": _bernoulli(1),
    "aten.exponential.default": _exponential,
    "aten.randint.default": _integers(0, False),
    "aten.randint.low": _integers(0, True),
    "aten.randint_like.default": _integers(1, False),
    "aten.randint_like.low_dtype": _integers(1, True),
    "aten.random.to": _integers(1, False),
    "aten.random.from": _integers(1, True),
    "aten.randperm.default": _permutation,
    "aten.rrelu.default": _rrelu,
    "aten._standard_gamma.default": _gamma,
    "aten._sample_dirichlet.default": _dirichlet,
}
# in-place operators write what these make
IN_PLACE = {
    "aten.uniform_.default": "aten.uniform.default",
    "aten.normal_.default": "aten.normal_functional.default",
    "aten.bernoulli_.float": "aten.bernoulli.p",
    "aten.bernoulli_.Tensor": "aten.bernoulli.Tensor",
    "aten.exponential_.default": "aten.exponential.default",
    "aten.random_.to": "aten.random.to",
    "aten.random_.from": "aten.random.from",
}
# functions of torch whose call may draw
DRAWING = frozenset(
    (
        torch.rand, torch.randn, torch.rand_like, torch.randn_like, torch.randint, torch.randint_like, torch.randperm,
        torch.normal, torch.bernoulli, torch.rrelu, torch.rrelu_, F.rrelu, F.gumbel_softmax, Tensor.uniform_,
        Tensor.normal_, Tensor.bernoulli, Tensor.bernoulli_, Tensor.exponential_, Tensor.random_, torch._standard_gamma,
        torch._sample_dirichlet,
    )
)  # fmt: skip


def formula_of(operator: str) -> Formula | None:
    """Return the formula of `aten.rand.default`, also for the overload that takes a generator; None if there is
    none."""
    return FORMULAS.get(operator.replace("_generator", "").replace(".generator", ".default"))


def numbers_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
    """Return the arguments that a formula reads: the positional ones, and parameters of the distribution given by
    name."""
    named = (kwargs[k] for k in ("mean", "std", "p", "lambd", "from", "to") if k in kwargs)
    return (*(a for a in args if not isinstance(a, torch.Generator)), *named)


class Now:
    """Makes tensors, with draws that depend on their place alone."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def draw(self, kind: str, shape: Sequence[int], dtype: str) -> Tensor:
        function = random_uniform if kind == "uniform" else random_normal
        return function(shape, dtype_of(dtype), device=self._device)

    def call(self, operator: str, *args: Any) -> Any:
        return torch_operator(operator)(*(dtype_of(a.name) if isinstance(a, DType) else a for a in args))

    def dtype(self, value: Tensor) -> str:
        return dtype_name(value.dtype)


class FixedDraws(TorchDispatchMode):
    """While open, torch's random operators draw numbers that depend on the place in the tensor alone."""

    def _maker(self, device: torch.device) -> Now:
        return Now(device)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Arguments = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func)
        if name.startswith("aten.rrelu_with_noise"):
            return self._rrelu(name, args, result)
        formula = formula_of(IN_PLACE.get(name, name))
        if formula is None:
            return result
        given = numbers_of(args, kwargs or {})
        made = formula(self._maker(result.device), given, tuple(result.shape), dtype_name(result.dtype))
        return result.copy_(made)

    def _rrelu(self, name: str, args: Arguments, result: Any) -> Any:
        """Its backward reads the slopes from `noise`."""
        x, noise, lower, upper = args[:4]
        if len(args) < 5 or not args[4]:
            return result
        draw = self._maker(noise.device).draw("uniform", noise.shape, dtype_name(noise.dtype))
        slope = draw * (upper - lower) + lower
        # in place, `x` holds the result of the draw just made, of the same sign
        original = torch.where(result > 0, x, x / noise) if name.startswith("aten.rrelu_with_noise_.") else x
        noise.copy_(torch.where(original > 0, 1.0, slope))
        return result.copy_(original * noise)


_ATTENTION = "aten.scaled_dot_product_attention.default"  # its dropout has a pass of its own


def lower_random_draws(graph: Graph) -> Graph:
    """Write every operator that `tracing.draws` has a formula for as that formula.

    Raises NnscalerError "trace_failed" for operators that draw and have none.
    """
    builder = Builder(graph)
    for operation in graph.operations:
        if not draws(operation):
            builder.keep(operation)
            continue
        formula = formula_of(operation.operator)
        if formula is None:
            raise undrawable(operation)
        args, kwargs = builder.references(operation)
        output = builder.source.tensors[operation.outputs[0] or ""]
        made = formula(_Emitter(operation, builder), numbers_of(args, kwargs), output.shape, output.dtype)
        builder.alias(output.name, made.name)
    return builder.finish()


def undrawable(operation: Operation) -> NnscalerError:
    """Return the error for an operation that draws what no program can."""
    return NnscalerError(
        "trace_failed",
        f"{operation.operator} draws random numbers from torch's generator, which no two ranks share",
        where=operation.where,
        help="draw with torch.rand, randn, bernoulli, randint, ... or apply nn.Dropout outside of it; give a function "
        "of your own the random numbers as an input",
    )


def draws(operation: Operation) -> bool:
    """Return whether an operator of torch draws random numbers in this call."""
    if operation.operator == _ATTENTION or not operation.operator.startswith("aten."):
        return False
    told = facts_of(operation.operator).draws_if
    if told:
        return all(place < len(operation.args) and bool(operation.args[place]) for place in told)
    return may_draw(operation.operator)


class _Emitter:
    """Makes operations in place of one random operation."""

    def __init__(self, operation: Operation, builder: Builder) -> None:
        self._operation = operation
        self._builder = builder

    def draw(self, kind: str, shape: Sequence[int], dtype: str) -> TensorName:
        name, of = f"{self._operation.name}_{kind}", (tuple(shape), dtype)
        args = (tuple(shape), DType(dtype))
        return self._builder.make(name, f"nnscaler.random_{kind}", args, like=self._operation, of=of)

    def call(self, operator: str, *args: Any) -> TensorName:
        name = f"{self._operation.name}_{operator.split('.')[1]}"
        return self._builder.make(name, operator, args, like=self._operation)

    def dtype(self, value: TensorName) -> str:
        return self._builder.tensor(value.name).dtype
