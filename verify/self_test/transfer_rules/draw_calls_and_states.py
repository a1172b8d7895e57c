"""Draw what `rule_fuzz` asks: calls, what is split, and a state for every tensor.

Calls are realistic ATen calls with symbols for sizes: what the sample calls of all built-in operators do, forward and
backward, and the same with dims that have more factors. Splits and states are arbitrary, but mostly such that rules can
say much about them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
import torch.fx.experimental._config as symbolic_config
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from op_registry.bind_and_localise_call import bind_call
from op_registry.call import instances_in
from op_registry.registry import default_registry
from op_registry.samples import SAMPLES
from op_registry.samples.sample import Sample

from nnscaler.ir.operation_annotations import Signature
from verify.evidence.dimension_types.functional_trace import record, simplified
from verify.evidence.dimension_types.interpret import rule_call
from verify.evidence.dimension_types.make_call_with_symbolic_sizes import make_symbolic
from verify.evidence.dimension_types.rules.call_with_states import Operand
from verify.evidence.dimension_types.states import (
    CONSTANT,
    PARTIAL_MAX,
    PARTIAL_SUM,
    SAME,
    ZERO,
    Shard,
    Size,
    State,
    Symbols,
    Unknown,
    checked,
    mentions,
    quotient,
    substituted,
    symbols_of,
)
from verify.evidence.inputs.concrete_call import ConcreteCall, flat, function_of, with_outputs, with_tensors
from verify.evidence.inputs.draw_calls import builtin_call
from verify.evidence.operator_trace import arguments_of, functional, quiet

SECONDS = 30.0  # for one trace
Values = tuple[int, ...]
Seen = Mapping[tuple[str, str], tuple[Values, ...]]
MANY = 200  # different values of a tensor that are kept


@dataclass(frozen=True)
class DrawnCall:
    """An ATen call whose operands are all `Same` as yet.

    symbols  every symbol in it, with a value for which the call ran
    guards   what its trace took for granted of them: proofs need not hold elsewhere
    integers  argument -> the different values of its integer tensors in a real run
    origin   the sample that it is from
    unchecked  its kernel takes sizes that make no sense, so that only those of the sample are used
    """

    overload: Any
    arguments: Mapping[str, Any]
    outputs: tuple[Operand | None, ...]
    symbols: Mapping[Any, int]
    guards: tuple[Any, ...]
    integers: Mapping[str, tuple[Values, ...]]
    origin: str
    unchecked: bool = False

    def with_factors(self, random: Random) -> DrawnCall:
        """Return the same call with `2 s`, `s 3` and the like for some of its symbols s, so that dims have more
        factors."""
        chosen = [symbol for symbol in self.symbols if random.random() < 0.6]
        new = {symbol: random.choice((2, 2, 3, 6)) * symbol for symbol in chosen}
        if not new:
            return self

        def convert(value: Any) -> Any:
            if isinstance(value, Operand):
                return replace(value, sizes=convert(value.sizes))
            if isinstance(value, sympy.Basic):
                return value.xreplace(new)
            if isinstance(value, list | tuple):
                return tuple(map(convert, value))
            return value

        arguments = {name: convert(value) for name, value in self.arguments.items()}
        return replace(self, arguments=arguments, outputs=convert(self.outputs), guards=convert(self.guards))

    def granted(self, sizes: Mapping[Any, int]) -> bool:
        """Return whether the guards that the trace assumed hold at these sizes."""
        numbers = {symbol: sympy.Integer(size) for symbol, size in sizes.items()}
        return all(guard.xreplace(numbers) != sympy.false for guard in self.guards)


@dataclass(frozen=True)
class DrawnCalls:
    """`untraced`: samples that cannot be traced, with the reason; none of what they do is proved either."""

    calls: tuple[DrawnCall, ...]
    untraced: Mapping[str, str]


def drawn_calls(samples: Sequence[Sample] = SAMPLES) -> DrawnCalls:
    """Return every ATen call of the samples' forward and backward passes."""
    calls: list[DrawnCall] = []
    untraced: dict[str, str] = {}
    for number, sample in enumerate(samples):
        try:
            calls += _calls_of(sample, number)
        except Exception as error:  # noqa: BLE001 - fake tensors raise anything; it is reported
            untraced[str(sample)] = f"{type(error).__name__}: {error}"
    return DrawnCalls(tuple(calls), untraced)


def _calls_of(sample: Sample, number: int) -> Iterator[DrawnCall]:
    spec = default_registry().lookup(sample.operator)
    assert spec is not None
    concrete = builtin_call(sample, "normal", torch.Generator().manual_seed(number))
    function = function_of(sample.operator, spec)
    seen, outputs = _real_run(function, concrete)
    call = with_outputs(concrete.call, outputs)
    bound = bind_call(spec, call)
    signature = Signature(call, spec, bound, ())
    with quiet(), symbolic_config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
        symbolic = make_symbolic(signature, None, concrete.tensors, concrete.constants, frozenset(bound.sizes))
        trace = record(function, symbolic, SECONDS)
        trace = simplified(trace, symbolic.world.shape_env.replacements)
    hints = {symbol: bound.sizes[name] for name, symbol in symbolic.symbols.items()}
    known = symbolic.world.shape_env.replacements
    guards = [substituted(guard.expr, known) for guard in symbolic.world.shape_env.guards]
    for step in trace.steps:
        found = rule_call(trace, step, dict.fromkeys(range(len(trace.tensors)), SAME), frozenset())
        used = _symbols([*found.arguments.values(), *found.outputs])
        if used <= set(hints):  # others stand for numbers that depend on values
            name = str(step.overload)
            integers = {argument: values for (overload, argument), values in seen.items() if overload == name}
            sizes = {symbol: hint for symbol, hint in hints.items() if symbol in used}
            taken = tuple(guard for guard in guards if guard != sympy.true and symbols_of(guard) <= set(sizes))
            yield DrawnCall(step.overload, found.arguments, found.outputs, sizes, taken, integers, str(sample))


def _symbols(value: Any) -> set[Any]:
    if isinstance(value, Operand):
        return _symbols(list(value.sizes))
    if isinstance(value, list | tuple):
        return {symbol for item in value for symbol in _symbols(item)}
    return set(symbols_of(value))


class _IntegerWatch(TorchDispatchMode):
    """Notes the values of integer tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.values: dict[tuple[str, str], tuple[Values, ...]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = str(functional(func))
        for argument, value in arguments_of(func, args, kwargs or {}).items():
            for tensor in instances_in(value, Tensor):
                if not tensor.is_floating_point() and not tensor.is_complex() and tensor.numel():
                    values = tuple(map(int, tensor.unique()[:MANY]))
                    self.values[name, argument] = (*self.values.get((name, argument), ()), values)
        return func(*args, **(kwargs or {}))


def _real_run(function: Any, concrete: ConcreteCall) -> tuple[Seen, list[Tensor | None]]:
    """Return the values of integers in a real run, forward and backward, and the outputs."""
    tensors = [
        t.clone().requires_grad_((t.is_floating_point() or t.is_complex()) and i not in concrete.constants)
        for i, t in enumerate(concrete.tensors)
    ]
    args, kwargs = with_tensors(concrete.call, tensors, {})
    seen = _IntegerWatch()
    with seen:
        results = flat(function(*args, **kwargs))
        outputs = [r if isinstance(r, Tensor) else None for r in results]
        ends = [r for r in outputs if r is not None and r.requires_grad]
        wanted = [t for t in tensors if t.requires_grad]
        if ends and wanted:
            torch.autograd.grad(ends, wanted, [torch.randn_like(e) for e in ends], allow_unused=True)
    return seen.values, outputs


def operands_of(call: DrawnCall) -> list[Operand]:
    """Return the call's tensors, in the order of the schema."""
    return list(instances_in(call.arguments, Operand))


# -- splits and states -------------------------------------------------------------------------------------------------


def draw_split(call: DrawnCall, random: Random) -> Symbols:
    """Draw the split: nothing, one symbol, or those of a concatenation."""
    symbols = sorted(call.symbols, key=str)
    if not symbols or random.random() < 0.2:
        return frozenset()
    chosen = frozenset({random.choice(symbols)})
    operands = [o for o in (*operands_of(call), *call.outputs) if o is not None]
    sums = [size for o in operands for size in o.sizes if isinstance(size, sympy.Add) and mentions(size, chosen)]
    if sums and random.random() < 0.8:
        return frozenset(random.choice(sums).free_symbols)
    return chosen


def draw_states(operands: Sequence[Operand], split: Symbols, random: Random) -> list[State]:
    """Return a state for every tensor that a tensor of its sizes can be in; most draws are such that rules may say
    much."""
    style = random.choice(("shards", "shards", "sums", "sums", "any"))
    strict = random.random() < 0.7
    if style == "shards":
        outers = random.random()
        return [_pick(o, split, Random(outers) if strict else random, (SAME,) * 8 + (CONSTANT, ZERO)) for o in operands]
    if style == "sums":
        one = random.randrange(max(len(operands), 1))
        several = random.random() < 0.4
        states = []
        for i, o in enumerate(operands):
            sums = i == one or (several and random.random() < 0.6)
            choices: tuple[State, ...] = (PARTIAL_SUM,) if sums else (SAME, SAME, SAME, ZERO, CONSTANT)
            states.append(_pick(o, split, random, choices))
        return states
    return [_pick(o, split, random, (SAME, PARTIAL_SUM, PARTIAL_MAX, CONSTANT, ZERO)) for o in operands]


def _pick(operand: Operand, split: Symbols, random: Random, others: Sequence[State]) -> State:
    dims = [d for d, size in enumerate(operand.sizes) if mentions(size, split)]
    if not dims:
        choices = [s for s in others if s != PARTIAL_SUM or operand.dtype != torch.bool]
        return random.choice(choices or [SAME])
    if len(dims) > 1:
        return random.choice((CONSTANT, ZERO))
    kind = random.random()
    if kind < 0.1:
        return CONSTANT if kind < 0.05 else ZERO
    size = operand.sizes[dims[0]]
    state = Shard(dims[0], None) if kind < 0.2 else _shard(dims[0], size, split, random)
    found = checked(state, operand.sizes, split)
    return random.choice((CONSTANT, ZERO)) if isinstance(found, Unknown) else found


def _shard(dim: int, size: Size, split: Symbols, random: Random) -> Shard:
    inside = symbols_of(size) & split
    if len(inside) > 1 and isinstance(size, sympy.Add):
        terms = list(size.args)
        random.shuffle(terms)
        return Shard(dim, 1, tuple(terms))
    rest = quotient(size, next(iter(inside)))
    if rest is None or rest == 1:
        return Shard(dim)
    factors: list[Size] = []
    for factor, power in sympy.factor_list(rest)[1]:
        factors += [factor] * power
    for prime, power in sympy.factorint(sympy.factor_list(rest)[0]).items():
        factors += [int(prime)] * power
    outer: Size = 1
    for factor in factors:
        outer = outer * factor if random.random() < 0.5 else outer
    return Shard(dim, int(outer) if isinstance(outer, sympy.Integer) else outer)
