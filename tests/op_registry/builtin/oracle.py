"""The oracle: an operator on shards must equal the operator on the whole, values and every input's gradient.

Layouts are the (value, gradient) pairs of `nnscaler.layout`; a shard is the entries whose digit on the axis is the
rank's, read off an explicit list of positions (`tests.layouts`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import import_module
from itertools import product
from math import prod
from typing import Any

import torch

from op_registry.annotation.bind_sizes import BoundAnnotation, BoundDim, BoundOperand
from op_registry.bind_and_localise_call import bind_call, localise
from op_registry.call import AxisShard, Call, DType, TensorArgument
from op_registry.rank_expression import Expression
from op_registry.registry import default_registry
from op_registry.samples.sample import Sample, replace_tensors
from op_registry.spec import OperatorSpec

from tests import layouts

Coordinates = Mapping[str, int]
Shards = Mapping[str, tuple[AxisShard, ...]]
Values = list[torch.Tensor]


@dataclass(frozen=True)
class Whole:
    """One run of the whole operator: its call, inputs, outputs, random cotangents and gradients."""

    spec: OperatorSpec
    call: Call
    bound: BoundAnnotation
    inputs: Values
    outputs: list[torch.Tensor | None]
    cotangents: list[torch.Tensor | None]
    gradients: list[torch.Tensor | None]
    compare: bool


def target(operator: str) -> Callable[..., Any]:
    """The function that runs an operator."""
    namespace, _, name = operator.partition(".")
    if namespace == "nnscaler":
        from nnscaler.runtime import ops

        found: Callable[..., Any] = getattr(ops, name)
        return found
        # defines the operator
    if namespace == "transformers":
        import_module("transformers.integrations.moe")  # defines the operator
    packet, _, overload = name.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)  # type: ignore[no-any-return]


def run(call: Call, inputs: Sequence[torch.Tensor], coordinates: Coordinates) -> list[torch.Tensor | None]:
    """Run a call on these tensors, on the rank with these coordinates."""

    def value(argument: Any) -> Any:
        if isinstance(argument, TensorArgument):
            return inputs[argument.index]
        if isinstance(argument, Expression):
            return argument.evaluate(coordinates)
        if isinstance(argument, DType):
            return getattr(torch, argument.name)
        if isinstance(argument, list | tuple):
            return [value(a) for a in argument]
        return argument

    result = target(call.operator)(*map(value, call.args), **{k: value(v) for k, v in call.kwargs.items()})
    results = result if isinstance(result, list | tuple) else [result]
    return [r if isinstance(r, torch.Tensor) else None for r in results]


def differentiable(t: torch.Tensor | None) -> bool:
    return t is not None and (t.is_floating_point() or t.is_complex())


def has_derivative(t: torch.Tensor) -> bool:
    """False for a result of an operator that torch cannot differentiate, and says so in backward."""
    return t.grad_fn is None or not t.grad_fn.name().endswith("NotImplemented")


def gradients(
    outputs: Sequence[torch.Tensor | None], inputs: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Every input's gradient; zeros where no output depends on it, None where it has none."""
    pairs = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if o is not None and c is not None]
    pairs = [(o, c) for o, c in pairs if o.requires_grad and has_derivative(o)]
    leaves = [t for t in inputs if t.requires_grad]
    found: Sequence[torch.Tensor | None] = [None] * len(leaves)
    if pairs and leaves:
        found = torch.autograd.grad([o for o, _ in pairs], leaves, [c for _, c in pairs], allow_unused=True)
    by_leaf = iter(found)
    result: list[torch.Tensor | None] = []
    for t in inputs:
        gradient = next(by_leaf) if t.requires_grad else None
        result.append(torch.zeros_like(t) if gradient is None and t.requires_grad else gradient)
    return result


def as_leaf(t: torch.Tensor, wanted: bool = True) -> torch.Tensor:
    """A contiguous copy that records gradients if it can and they are wanted."""
    copy = t.detach().clone(memory_format=torch.contiguous_format)
    return copy.requires_grad_(wanted and differentiable(t))


@cache
def _whole(number: int) -> Whole:
    from op_registry.samples import SAMPLES

    return whole_run(SAMPLES[number], number)


def whole(number: int) -> Whole:
    """The whole run of a sample, made once."""
    return _whole(number)


def whole_run(sample: Sample, seed: int) -> Whole:
    """Run the whole operator on random tensors."""
    spec = default_registry().lookup(sample.operator)
    assert spec is not None, sample.operator
    generator = torch.Generator().manual_seed(seed)
    inputs: Values = []

    def argument(t: Any) -> TensorArgument:
        inputs.append(as_leaf(t.make(generator), t.kind != "constant"))
        return TensorArgument(len(inputs) - 1, t.shape, str(inputs[-1].dtype).removeprefix("torch."))

    args = replace_tensors(sample.args, argument)
    kwargs = {k: replace_tensors(v, argument) for k, v in sample.kwargs.items()}
    outputs = run(Call(sample.operator, args, kwargs), inputs, {})
    described = tuple(
        None if o is None else TensorArgument(i, tuple(o.shape), str(o.dtype).removeprefix("torch."))
        for i, o in enumerate(outputs)
    )
    call = Call(sample.operator, args, kwargs, described)
    cotangents = [
        torch.randn(o.shape, generator=generator, dtype=o.dtype) if o is not None and differentiable(o) else None
        for o in outputs
    ]
    found = gradients(outputs, inputs, cotangents)
    return Whole(spec, call, bind_call(spec, call), inputs, outputs, cotangents, found, sample.compare)


def positions(dim: BoundDim, shards: Shards, coordinates: Coordinates) -> torch.Tensor:
    """The entries of a dim that the rank has, in order."""
    digits = [
        tuple((axis, axis.parts, coordinates[axis.axis]) for axis in shards.get(factor.identifier or "", ()))
        for factor in dim.factors
    ]
    return _positions(dim, tuple(digits))


@lru_cache(maxsize=4096)
def _positions(dim: BoundDim, digits: tuple[tuple[tuple[AxisShard, int, int], ...], ...]) -> torch.Tensor:
    """The entries of a dim whose digits, on the axes of each factor, are these."""
    found, start = [0], 0
    every: list[int] = []
    for factor, wanted in zip(dim.factors, digits, strict=True):
        kept = layouts.positions(factor.size, wanted).tolist()
        found = [before * factor.size + entry for before in found for entry in kept]
        every += [start + entry for entry in kept]
        start += factor.size
    return torch.tensor(every if dim.concat else found, dtype=torch.long)


def shard(t: torch.Tensor, operand: BoundOperand | None, shards: Shards, coordinates: Coordinates) -> torch.Tensor:
    """The rank's shard of a tensor."""
    for number, dim in enumerate(operand.dims if operand is not None else ()):
        if any(f.identifier in shards for f in dim.factors):
            t = t.index_select(number, positions(dim, shards, coordinates))
    return t


def lacking(operand: BoundOperand | None, bound: BoundAnnotation, shards: Shards) -> dict[str, str]:
    """Axes whose identifier the operand lacks -> the identifier's reduction, empty if it has none."""
    has = set() if operand is None else set(operand.identifiers())
    return {
        axis.axis: bound.reductions.get(name, "")
        for name, axes in shards.items()
        if not has & set(bound.tied[name])
        for axis in axes
    }


def random_parts(t: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Random tensors whose sum is `t`."""
    generator = torch.Generator().manual_seed(count)
    if differentiable(t):
        parts = [torch.randn(t.shape, generator=generator, dtype=t.dtype) for _ in range(count - 1)]
    else:
        parts = [torch.randint(-9, 9, t.shape, generator=generator, dtype=t.dtype) for _ in range(count - 1)]
    return [*parts, t - sum(parts, torch.zeros_like(t))]


def close(actual: torch.Tensor, expected: torch.Tensor, whole: torch.Tensor) -> bool:
    """Equal up to rounding, which is that of the `whole` tensor that the piece belongs to: the largest of its values
    says how much was summed. Integers and bools exactly."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    if not differentiable(expected):
        return torch.equal(actual, expected)
    if torch.equal(actual, expected) or not expected.numel():
        return True
    bound = 64 * torch.finfo(expected.dtype).eps
    scale = float(whole.abs().max())
    if math.isfinite(scale):
        return float((actual - expected).abs().max()) <= bound * max(1.0, scale)
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    return bool((same | ((actual - expected).abs() <= bound)).all())


class Mismatch(AssertionError):
    """The shards do not make the whole."""


def _merge(parts: Sequence[torch.Tensor], reduction: str) -> torch.Tensor:
    if reduction == "max":
        return torch.stack(list(parts)).amax(0)
    return parts[0] if len(parts) == 1 else torch.stack(list(parts)).sum(0).to(parts[0].dtype)


def _compare(
    what: str,
    ranks: Sequence[tuple[Coordinates, torch.Tensor]],
    expected: _Expected,
    summed: Mapping[str, str],
) -> None:
    """Compare, after reducing over the axes in `summed`, what each group of ranks has with what it should have."""
    groups: dict[tuple[tuple[str, int], ...], list[tuple[Coordinates, torch.Tensor]]] = {}
    for coordinates, value in ranks:
        key = tuple((a, c) for a, c in coordinates.items() if a not in summed)
        groups.setdefault(key, []).append((coordinates, value))
    for key, members in groups.items():
        reduction = "max" if "max" in summed.values() else "sum"
        merged, wanted = _merge([v for _, v in members], reduction), expected(members[0][0])
        if not close(merged, wanted, expected.value):
            raise Mismatch(
                f"{what} at {dict(key)}: {tuple(merged.shape)} {merged} instead of {tuple(wanted.shape)} {wanted}"
            )


def check_split(w: Whole, shards: Shards) -> None:
    """Run the shards, and compare. Raises `Mismatch`."""
    assert any(o is not None for o in w.outputs), "there is nothing to compare"
    axes = {axis.axis: axis.parts for split in shards.values() for axis in split}
    tied = {m: split for name, split in shards.items() for m in w.bound.tied[name]}
    additive = {
        i: [a for a, reduction in lacking(o, w.bound, shards).items() if reduction == "sum"]
        for i, o in enumerate(w.bound.inputs)
        if o is not None and o.additive
    }
    parts = {i: random_parts(w.inputs[i].detach(), prod(axes[a] for a in on)) for i, on in additive.items()}
    local_call = localise(w.spec, w.call, tied, _local_shapes(w.bound, tied))
    outputs_of, gradients_of = [], []
    for numbers in product(*(range(n) for n in axes.values())):
        coordinates = dict(zip(axes, numbers, strict=True))
        local = []
        for i, operand in enumerate(w.bound.inputs):
            t = w.inputs[i].detach()
            if i in parts:
                number = 0
                for a in additive[i]:
                    number = number * axes[a] + coordinates[a]
                t = parts[i][number]
            local.append(as_leaf(shard(t, operand, tied, coordinates), w.inputs[i].requires_grad))
        outputs = run(local_call, local, coordinates)
        cotangents = [
            None if c is None else shard(c, o, tied, coordinates)
            for c, o in zip(w.cotangents, w.bound.outputs, strict=True)
        ]
        outputs_of.append((coordinates, outputs))
        gradients_of.append((coordinates, gradients(outputs, local, cotangents)))
    _compare_outputs(w, tied, shards, outputs_of)
    _compare_gradients(w, tied, shards, additive, gradients_of)


def _local_shapes(bound: BoundAnnotation, tied: Shards) -> list[tuple[int, ...] | None]:
    origin = dict.fromkeys((axis.axis for split in tied.values() for axis in split), 0)
    return [None if o is None else tuple(len(positions(dim, tied, origin)) for dim in o.dims) for o in bound.outputs]


def _compare_outputs(w: Whole, tied: Shards, shards: Shards, outputs_of: list[Any]) -> None:
    for i, (operand, value) in enumerate(zip(w.bound.outputs, w.outputs, strict=True)):
        if value is None:
            continue
        if not w.compare:
            for coordinates, outputs in outputs_of:
                assert outputs[i].shape == shard(value, operand, tied, coordinates).shape
            continue
        ranks = [(c, outputs[i].detach()) for c, outputs in outputs_of]
        expected = _Expected(value.detach(), operand, tied)
        summed = {} if operand is None else lacking(operand, w.bound, shards)  # `?` is whole on every rank
        _compare(f"output {i}", ranks, expected, summed)


def _compare_gradients(
    w: Whole, tied: Shards, shards: Shards, additive: Mapping[int, list[str]], gradients_of: list[Any]
) -> None:
    if any(r == "max" for r in w.bound.reductions.values()):
        return  # a maximum is only ever split where no gradient is recorded
    for i, (operand, value) in enumerate(zip(w.bound.inputs, w.gradients, strict=True)):
        if value is not None:
            ranks = [(c, found[i]) for c, found in gradients_of]
            summed = {a: "sum" for a in lacking(operand, w.bound, shards) if a not in additive.get(i, ())}
            _compare(f"gradient of input {i}", ranks, _Expected(value, operand, tied), summed)


@dataclass(frozen=True)
class _Expected:
    value: torch.Tensor
    operand: BoundOperand | None
    tied: Shards

    def __call__(self, coordinates: Coordinates) -> torch.Tensor:
        return shard(self.value, self.operand, self.tied, coordinates)


def check_partial(w: Whole, slots: frozenset[int], ranks: int) -> None:
    """Run the operator on random partial sums in these tensors, and compare. Raises `Mismatch`."""
    assert slots and any(o is not None for o in w.outputs), "there is nothing to compare"
    parts = {i: random_parts(w.inputs[i].detach(), ranks) for i in slots}
    outputs_of: list[Any] = []
    gradients_of: list[Any] = []
    for rank in range(ranks):
        local = [as_leaf(parts[i][rank] if i in parts else t, t.requires_grad) for i, t in enumerate(w.inputs)]
        outputs = run(w.call, local, {})
        outputs_of.append(({"r": rank}, outputs))
        gradients_of.append(({"r": rank}, gradients(outputs, local, w.cotangents)))
    for i, value in enumerate(w.outputs):
        if value is not None:
            ranks_of = [(c, outputs[i].detach()) for c, outputs in outputs_of]
            _compare(f"output {i}", ranks_of, _Expected(value.detach(), None, {}), {"r": "sum"})
    for i, gradient in enumerate(w.gradients):
        if gradient is not None:
            ranks_of = [(c, found[i]) for c, found in gradients_of]
            summed = {} if i in slots else {"r": "sum"}
            _compare(f"gradient of input {i}", ranks_of, _Expected(gradient, None, {}), summed)
