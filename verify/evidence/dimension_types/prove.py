"""Proof by dimension types: a split is right for every size, number of parts and value, forward and backward.

One trace of the operator and of its backward pass serves all identifiers. For each of them, inputs and cotangents
start in the states that the annotation gives them, every ATen operator passes states on by its rule, and what comes
out must be what the annotation says. What cannot be followed is not proved, with the reason; nothing is refuted here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch.fx.experimental._config as symbolic_config

from op_registry.annotation.bind_sizes import BoundAnnotation, BoundOperand
from op_registry.annotation.splits import splittable
from op_registry.call import Call
from op_registry.spec import OperatorSpec

from nnscaler.ir.derive_operand_layouts import input_states, output_states
from nnscaler.ir.operation_annotations import Signature
from nnscaler.ir.operation_placement import Choice, RunPartial, Split
from nnscaler.layout import Invariant, Partial, Replicated, Sharded, gradient_state
from nnscaler.layout import State as Layout
from verify.evidence.dimension_types.check_size_guards_on_shards import equals, granted
from verify.evidence.dimension_types.functional_trace import Trace, record, simplified
from verify.evidence.dimension_types.interpret import interpret
from verify.evidence.dimension_types.localize_hooks_on_irregular_shards import asked_otherwise
from verify.evidence.dimension_types.localized_call_as_whole_call import NoProof, whole_call
from verify.evidence.dimension_types.make_call_with_symbolic_sizes import (
    SymbolicCall,
    make_symbolic,
    sizes_shown_as_numbers,
)
from verify.evidence.dimension_types.states import (
    PARTIAL_MAX,
    PARTIAL_SUM,
    SAME,
    Constant,
    PartialMax,
    PartialSum,
    Same,
    Shard,
    Size,
    State,
    Symbols,
    Unknown,
    Zero,
    checked,
    equal,
    join,
    mentions,
    substituted,
)
from verify.evidence.inputs.concrete_call import ConcreteCall, function_of
from verify.evidence.operator_trace import NotTraceable, quiet
from verify.evidence.user_code_path_on_fake_tensors import Places, places_seen, where_ways_part
from verify.results.verdict import Condition

SECONDS = 3.0  # of processor time, for one call
NO_GRADIENT = Condition("no gradient flows through a partial maximum")  # the compiler refuses it otherwise


@dataclass(frozen=True, slots=True)
class Proof:
    """`blocker` says why it is not proved; `conditions` under what it is, or would be."""

    target: Choice
    proved: bool
    blocker: str = ""
    conditions: tuple[Condition, ...] = ()


@dataclass(frozen=True, slots=True)
class Proofs:
    """One proof per identifier that may be split (the first of those split together) and per linear set."""

    proofs: tuple[Proof, ...]
    seconds: float = 0.0


def targets(signature: Signature) -> tuple[Choice, ...]:
    """Return the choices to be proved for a call: a split of each set of tied identifiers, and each linear set."""
    bound = signature.bound
    if bound is None:
        return ()
    firsts = dict.fromkeys(bound.tied.get(i, (i,))[0] for i in signature.identifiers)
    splits = [name for name in firsts if _splits(bound, name)]
    return (*(Split(name) for name in splits), *(RunPartial(slots) for slots in signature.linear))


def _splits(bound: BoundAnnotation, name: str) -> bool:
    """Return whether some number of parts may split it in this call."""
    return any(splittable(bound, name, parts) is None for parts in range(2, bound.sizes[name] + 1))


@dataclass(frozen=True)
class _SymbolicTrace:
    """A trace and the symbols that it is written in. `whole`: the call of the model, unless a hook has another."""

    call: SymbolicCall
    trace: Trace


class _Prover:
    """Proves what it can of one call; traces are made when they are needed, and shared by targets."""

    def __init__(
        self, spec: OperatorSpec, signature: Signature, concrete: ConcreteCall, seconds: float, way: Places | None
    ) -> None:
        self.spec = spec
        self.signature = signature
        self.concrete = concrete
        self.way = way
        self.deadline = time.thread_time() + seconds
        self.traces: dict[str, _SymbolicTrace | str] = {}
        self.blocks: dict[str, Call | NoProof | None] = {}
        self.hooked: dict[str, Call | NoProof | None] = {}

    def prove(self, target: Choice) -> Proof:
        """Return the proof under the fewest conditions, or why the first attempt failed."""
        reason = ""
        failed: Proof | None = None
        best: Proof | None = None
        try:
            for call, wanted in self.attempts(target):
                if best is not None and self.fixed(wanted):
                    break  # it would hold under more conditions
                proof = self.attempt(target, call, wanted)
                if proof.proved and (best is None or len(proof.conditions) < len(best.conditions)):
                    best = proof
                failed = failed or (None if proof.proved else proof)
                if (best is not None and not best.conditions) or time.thread_time() > self.deadline:
                    break
        except NoProof as no_proof:
            reason = str(no_proof)
        except Exception as error:  # noqa: BLE001 - a proof that fails proves nothing
            reason = f"the proof raises {type(error).__name__}: {error}"
        return best or failed or _blocked(target, reason)

    def attempt(self, target: Choice, call: Call | None, wanted: frozenset[str]) -> Proof:
        """Return the proof by one trace."""
        traced = self.traced(call, wanted)
        if isinstance(traced, str):
            return _blocked(target, traced)
        proof = _follow(self.signature, target, traced)
        return replace(proof, conditions=(*proof.conditions, *self.fixed(wanted))) if proof.proved else proof

    def attempts(self, target: Choice) -> Iterator[tuple[Call | None, frozenset[str]]]:
        """Yield calls to trace, with the identifiers that get symbols: all of them; those that may be
        split; its own."""
        bound = self.signature.bound
        assert bound is not None
        calls: list[Call | None] = [*self.followed(), None]
        together: frozenset[str] = frozenset()
        if isinstance(target, Split):
            together = frozenset(bound.tied.get(target.identifier, (target.identifier,)))
            own = self.own(target.identifier)
            calls = calls if own is None else [own]
        every = frozenset(bound.sizes)
        free = frozenset(self.signature.identifiers)
        for wanted in dict.fromkeys((every, free | together, together)):
            for call in calls:
                yield call, wanted

    def followed(self) -> tuple[Call, ...]:
        """Return the call as a hook rewrites it, sizes included; it also serves for identifiers that hooks do not
        touch."""
        if self.spec.localize is None:
            return ()
        found: dict[str, Call] = {}
        for target in targets(self.signature):
            if isinstance(target, Split):
                with suppress(NoProof):
                    call = self.own(target.identifier)
                    if call is not None:
                        found.setdefault(repr(call), call)
        return tuple(found.values())[:1]

    def own(self, identifier: str) -> Call | None:
        """Return the call that a proof of this split follows, if it is not the model's. Raises NoProof."""
        if identifier not in self.hooked:
            found = self.contiguous(identifier)
            try:
                if not isinstance(found, NoProof):
                    names = [t.identifier for t in targets(self.signature) if isinstance(t, Split)]
                    others = [n for n in names if not isinstance(self.contiguous(n), NoProof)]
                    asked_otherwise(self.signature, identifier, found, others)
            except NoProof as no_proof:
                found = no_proof
            self.hooked[identifier] = found
        found = self.hooked[identifier]
        if isinstance(found, NoProof):
            raise found
        return found

    def contiguous(self, identifier: str) -> Call | NoProof | None:
        """Return the same as far as equal contiguous blocks tell, or why there is none."""
        if identifier not in self.blocks:
            try:
                self.blocks[identifier] = whole_call(self.spec, self.concrete, self.signature, identifier)
            except NoProof as no_proof:
                self.blocks[identifier] = no_proof
        return self.blocks[identifier]

    def fixed(self, wanted: frozenset[str]) -> tuple[Condition, ...]:
        """Return the sizes that a proof was made for, of identifiers without a symbol."""
        assert self.signature.bound is not None
        sizes = self.signature.bound.sizes
        return tuple(equals(name, size) for name, size in sizes.items() if name not in wanted and size > 1)

    def traced(self, call: Call | None, wanted: frozenset[str]) -> _SymbolicTrace | str:
        """Return the trace, or why there is none."""
        key = repr((call, sorted(wanted)))
        if key not in self.traces:
            self.traces[key] = self.trace(call, wanted)
        return self.traces[key]

    def trace(self, call: Call | None, wanted: frozenset[str]) -> _SymbolicTrace | str:
        seconds = self.deadline - time.thread_time()
        try:
            with quiet(), symbolic_config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
                tensors, constants = self.concrete.tensors, self.concrete.constants
                made = make_symbolic(self.signature, call, tensors, constants, wanted)
                function = function_of((call or self.signature.call).operator, self.spec)
                trace = self.recorded(function, made, seconds)
                known = made.world.shape_env.replacements
                sizes, symbols = substituted(made.outputs, known), substituted(dict(made.symbols), known)
                return _SymbolicTrace(replace(made, outputs=sizes, symbols=symbols), simplified(trace, known))
        except Exception as error:  # noqa: BLE001 - whatever the operator raises on fake tensors is the answer
            text = str(error).strip().splitlines()
            return f"its trace raises {type(error).__name__}: {text[0][:160] if text else ''}"

    def recorded(self, function: Callable[..., Any], made: SymbolicCall, seconds: float) -> Trace:
        """Return the trace of a run that takes the way through a user's code that tensors with values take. Symbols are
        no integers: code that asks what kind of number a size is may do something else with one."""
        if self.way is None:
            return record(function, made, seconds)
        with places_seen() as seen, sizes_shown_as_numbers():
            trace = record(function, made, seconds)
        parted = where_ways_part(seen, self.way, self.way, "sizes that are symbols")
        if parted:
            raise NotTraceable(parted)
        return trace


def prove(
    spec: OperatorSpec,
    signature: Signature,
    concrete: ConcreteCall,
    seconds: float = SECONDS,
    way: Places | None = None,
) -> Proofs:
    """Prove what it can of one call in `seconds`. Does not raise: what fails is not proved, and says why.

    `way`: the places of a user's code that a run on the call's tensors comes to, which a trace has to take as well.
    """
    started = time.thread_time()
    prover = _Prover(spec, signature, concrete, seconds, way)
    proofs = tuple(prover.prove(target) for target in targets(signature))
    return Proofs(proofs, time.thread_time() - started)


def _blocked(target: Choice, blocker: str) -> Proof:
    return Proof(target, False, blocker)


def _follow(signature: Signature, target: Choice, traced: _SymbolicTrace) -> Proof:
    call, trace = traced.call, traced.trace
    split = _split_symbols(signature, target, call)
    names = {symbol: name for name, symbol in call.world.symbols.items()}
    grants = granted(call.world.shape_env, split, names)
    if grants.blocker:
        return Proof(target, False, grants.blocker, grants.conditions)
    layouts_in = input_states(signature, target)
    layouts_out = output_states(signature, target, len(trace.outputs))
    shards_in = _expected(signature, target, layouts_in, call, True)
    shards_out = _expected(signature, target, layouts_out, call, False)
    gradients_in = _expected(signature, target, [gradient_state(s) for s in layouts_in], call, True)
    gradients_out = _expected(signature, target, [gradient_state(s) for s in layouts_out], call, False)
    given: dict[int, State] = dict(zip(trace.inputs, shards_in, strict=True))
    given |= {n: state for n, state in zip(trace.cotangents, gradients_out, strict=True) if n is not None}
    known = interpret(trace, given, split)
    blocker = _outputs_differ(trace, call, known, shards_out, split)
    conditions = grants.conditions
    if PARTIAL_MAX in shards_out:
        conditions = (*conditions, NO_GRADIENT)
    else:
        blocker = blocker or _gradients_differ(trace, known, gradients_in, split)
    return Proof(target, not blocker, blocker, grants.conditions if blocker else conditions)


def _split_symbols(signature: Signature, target: Choice, call: SymbolicCall) -> frozenset[Any]:
    if not isinstance(target, Split):
        return frozenset()
    assert signature.bound is not None
    together = signature.bound.tied.get(target.identifier, (target.identifier,))
    return frozenset(call.world.symbols[name] for name in together if name in call.world.symbols)


def _expected(
    signature: Signature, target: Choice, layouts: Sequence[Layout], call: SymbolicCall, inputs: bool
) -> tuple[State, ...]:
    """Return the states that the annotation gives tensors, with outers in symbols."""
    bound = signature.bound
    assert bound is not None
    operands = bound.inputs if inputs else bound.outputs
    found: list[State] = []
    for layout, operand in zip(layouts, operands, strict=True):
        if isinstance(layout, Sharded):
            assert operand is not None and isinstance(target, Split)
            together = bound.tied.get(target.identifier, (target.identifier,))
            found.append(_shard(operand, together, layout.dim, call))
        elif isinstance(layout, Partial):
            found.append(PARTIAL_SUM if layout.reduction == "sum" else PARTIAL_MAX)
        else:
            assert isinstance(layout, Replicated | Invariant)
            found.append(SAME)
    return tuple(found)


def _shard(operand: BoundOperand, together: Sequence[str], dim: int, call: SymbolicCall) -> Shard:
    sizes: list[Size] = [call.symbols.get(f.identifier or "", f.size) for f in operand.dims[dim].factors]
    if operand.dims[dim].concat:
        return Shard(dim, 1, tuple(sizes))
    at = next(i for i, f in enumerate(operand.dims[dim].factors) if f.identifier in together)
    return Shard(dim, prod(sizes[:at]))


def _outputs_differ(
    trace: Trace, call: SymbolicCall, known: Mapping[int, State], wanted: Sequence[State], split: Symbols
) -> str:
    """Explain why the outputs are not what the annotation says; empty if they are."""
    if mentions(trace.plain, split):
        return "an output is a number that depends on the size that is split"
    if len(trace.outputs) != len(wanted):
        return f"{len(trace.outputs)} outputs, {len(wanted)} in the annotation"
    for i, (number, state, sizes) in enumerate(zip(trace.outputs, wanted, call.outputs, strict=True)):
        if number is None:
            continue
        info = trace.tensors[number]
        same_shape = sizes is not None and len(sizes) == len(info.sizes) and _fit(info.sizes, sizes, split)
        if sizes is not None and not same_shape:
            return f"output {i} has sizes {list(info.sizes)}, {list(sizes)} in the annotation"
        found = checked(known[number], info.sizes, split) if number in known else Unknown("an output of unknown origin")
        if not _is(found, state, info.sizes, split):
            return _differs(f"output {i}", found, state)
    return ""


def _fit(found: Sequence[Size], wanted: Sequence[Size], split: Symbols) -> bool:
    """Return whether all sizes that depend on the split are as the annotation says."""
    return all(
        equal(a, b) or not (mentions(a, split) or mentions(b, split)) for a, b in zip(found, wanted, strict=True)
    )


def _gradients_differ(trace: Trace, known: Mapping[int, State], wanted: Sequence[State], split: Symbols) -> str:
    """Explain why the gradients of inputs are not in the states that are wanted; empty if they are."""
    for i, (number, state) in enumerate(zip(trace.gradients, wanted, strict=True)):
        if number is None:
            continue
        found = known.get(number, Unknown("a gradient of unknown origin"))
        if not _is(found, state, trace.tensors[number].sizes, split):
            return _differs(f"the gradient of input {i}", found, state)
    return ""


def _is(found: State, wanted: State, sizes: tuple[Size, ...], split: Symbols) -> bool:
    """Return whether a tensor in state `found` is also in state `wanted`."""
    match wanted:
        case Shard():
            if isinstance(found, Constant | Zero):
                return checked(wanted, sizes, split) == wanted
            return isinstance(found, Shard) and found.dim == wanted.dim and join(found, wanted) is not None
        case PartialSum():
            return isinstance(found, PartialSum | Zero)
        case PartialMax():
            return isinstance(found, PartialMax | Same | Constant | Zero)
    return isinstance(found, Same | Constant | Zero)


def _differs(what: str, found: State, wanted: State) -> str:
    if isinstance(found, Unknown):
        return found.reason
    return f"{what} is {found}, and should be {wanted}"
