"""Proofs for all values at small sizes: that the shards of an operator's call make up the whole.

The operator is traced on small shapes, whole and on each shard, with the call that the shard really makes (rewritten by
`op_registry.bind_call`). Both traces run on symbols, and Z3 shows that every output element and every gradient element
agree. Where the backward has no semantics here, a proof of the forward pass is a proof of the gradients too: both sides
are the same function for all real values, so their derivatives are the same. That is not said of a hand-written
backward, of a hook or of a detached value.

What is assumed: that the whole operator does not raise (indices are in range), that numbers are real numbers, and at
kinks (ties of a maximum) nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import torch

from op_registry.bind_and_localise_call import bind_call, linear_sets
from op_registry.call import Call, TensorArgument
from op_registry.spec import OperatorSpec, Refusal

from nnscaler.exception_in_one_line import first_line, in_one_line
from nnscaler.ir.derive_operand_layouts import explain_illegal_choice
from nnscaler.ir.operation_annotations import Signature
from nnscaler.ir.operation_placement import Choice, RunPartial, Split
from verify.evidence.inputs.concrete_call import ConcreteCall, function_of, with_tensors
from verify.evidence.smt.check_choice import BoundedResult, check
from verify.evidence.smt.choice_equations import TracedCall, trace_whole
from verify.evidence.smt.decide_equality import Limits
from verify.evidence.smt.element_arithmetic import NoCall, Unsupported
from verify.evidence.smt.smaller_calls import same_kind, variants
from verify.evidence.smt.terms import ProofBudget

Target = str | frozenset[int]
STEPS = 5_000_000  # for one target
CONTIGUOUS = 6  # the size of a split identifier: 3 shards of 2, and 2 shards of 3


def prove_bounded(
    spec: OperatorSpec,
    signature: Signature,
    concrete: ConcreteCall,
    targets: Sequence[Target],
    limits: Limits | None = None,
    steps: float = STEPS,
) -> dict[Target, BoundedResult]:
    """Prove, for each identifier (of `signature.bound`) and each linear set, that splitting it is right for all values.

    `concrete` is the call that `signature` was bound to. `steps`: for each target. Never raises: a failure is a reason.
    """
    found: dict[Target, BoundedResult] = {}
    prover = _OperatorProver(spec, signature, concrete, limits or Limits())
    for target in targets:
        try:
            found[target] = prover.prove(target, ProofBudget(steps))
        except Unsupported as reason:
            found[target] = BoundedResult(False, str(reason))
        except Exception as error:  # noqa: BLE001 - whatever goes wrong in a proof attempt, nothing is proved
            found[target] = BoundedResult(False, _first_line(error))
    return found


class _OperatorProver:
    """One call of one operator. Small variants are traced once and shared by targets."""

    def __init__(self, spec: OperatorSpec, signature: Signature, concrete: ConcreteCall, limits: Limits) -> None:
        self.spec = spec
        self.signature = signature
        self.concrete = concrete
        self.limits = limits
        self.traced: list[tuple[Call, TracedCall | Exception]] = []

    def prove(self, target: Target, work: ProofBudget) -> BoundedResult:
        if self.signature.bound is None:
            raise Unsupported(self.signature.reason or "the operator has no annotation")
        if self.spec.random:
            raise Unsupported("it draws random numbers")
        if not self.concrete.compare:
            raise Unsupported("the values of its outputs are not defined")
        if isinstance(target, frozenset):  # two partial sums are enough: a third is added to the sum of the two
            return self._one(RunPartial(target), (2,), {}, work)
        bound = self.signature.bound
        if target not in bound.sizes:
            raise Unsupported(f"the call has no identifier {target!r}")
        together = bound.tied.get(target, (target,))
        if len(together) > 1:  # a concatenation, whose parts stay unequal
            return self._one(Split(target), (2,), {name: 2 * (2 + i) for i, name in enumerate(together)}, work)
        proof = self._one(Split(target), (3, 2), {target: CONTIGUOUS}, work)
        if not proof.proved or target in self.spec.contiguous:
            return proof
        parts = 3 if proof.depends_on_rank else 2
        strided = self._one(Split(target, 2), (parts,), {target: 4 * parts}, work)
        if strided.proved and proof.gradients == "by theorem":
            return proof
        return strided

    def _one(self, choice: Choice, parts: tuple[int, ...], sizes: dict[str, int], work: ProofBudget) -> BoundedResult:
        """Prove one choice in all these numbers of parts, on the first small call that it can be made on."""
        reason, weak = "", None
        for call in variants(self.spec, self.signature, sizes):
            traced = self._trace(call)
            if isinstance(traced, Exception):
                reason = reason or _first_line(traced)
                continue
            legal = [p for p in parts if explain_illegal_choice(traced.signature, choice, p) is None]
            if not legal or not _two_each(traced.signature, choice, legal):
                reason = reason or explain_illegal_choice(traced.signature, choice, parts[0]) or "shards are too small"
                continue
            try:
                proof = self._all_parts(traced, choice, legal, work)
            except NoCall as error:
                reason = reason or str(error)
                continue
            if proof.proved and not _runs(self.spec, traced):
                reason = reason or "torch does not run it at small sizes"
                continue
            if not proof.proved or not proof.constant:
                return proof
            weak = weak or proof  # other sizes may show more
        if weak is not None:
            return replace(weak, depends_on_rank=False)
        raise Unsupported(reason or "no small call was found")

    def _all_parts(self, traced: TracedCall, choice: Choice, parts: Sequence[int], work: ProofBudget) -> BoundedResult:
        """Return the weakest outcome of all numbers of parts."""
        found: list[BoundedResult] = []
        for count in parts:
            found.append(_checked(traced, choice, count, self.limits, work))
            if not found[-1].proved:
                break
        last = found[-1]
        if last.proved and last.depends_on_rank and max(parts) < 3:
            last = BoundedResult(False, "the call depends on the rank, which two shards do not show")
        gradients = "by theorem" if any(o.gradients == "by theorem" for o in found) else last.gradients
        return replace(last, gradients=gradients)

    def _trace(self, call: Call) -> TracedCall | Exception:
        """Return the whole operator on this call, and its annotation bound again; or why it is no call of the same
        kind."""
        for known, result in self.traced:
            if known == call:
                return result
        try:
            result = self._bind(call)
        except Exception as error:  # noqa: BLE001 - sizes were a guess: what raises on them is passed over
            result = error
        self.traced.append((call, result))
        return result

    def _bind(self, call: Call) -> TracedCall:
        whole = trace_whole(self.spec, call, self.concrete)
        bound = bind_call(self.spec, whole.call)
        assert self.signature.bound is not None
        before = self.signature.call.outputs
        if any(_emptied(old, new) for old, new in zip(before, whole.call.outputs, strict=True)):
            raise Unsupported("at small sizes it gives nothing")
        if not same_kind(self.signature.bound, bound):
            raise Unsupported("at small sizes its annotation is another one")
        sets = tuple(frozenset(s) for s in linear_sets(self.spec, whole.call))
        return replace(whole, signature=Signature(whole.call, self.spec, bound, sets))


def _runs(spec: OperatorSpec, traced: TracedCall) -> bool:
    """Return whether torch's own kernels run the call, on zeros or on ones. Those for fake tensors let more pass."""
    for number in (0, 1):
        tensors = [torch.full(b.shape, number, dtype=getattr(torch, b.dtype)) for b in traced.blanks]
        args, kwargs = with_tensors(traced.call, tensors, {})
        with suppress(Exception), torch.no_grad():
            function_of(traced.call.operator, spec)(*args, **kwargs)
            return True
    return False


def _checked(traced: TracedCall, choice: Choice, parts: int, limits: Limits, work: ProofBudget) -> BoundedResult:
    """Run `check`; an exception becomes the reason. Raises NoCall."""
    try:
        return check(traced, choice, parts, limits, work)
    except NoCall:
        raise
    except (Refusal, Unsupported) as reason:
        return BoundedResult(False, str(reason))
    except Exception as error:  # noqa: BLE001 - whatever a shard raises, it is not proved
        return BoundedResult(False, f"a shard raises {_first_line(error)}")


def _emptied(old: TensorArgument | None, new: TensorArgument | None) -> bool:
    return old is not None and new is not None and 0 in new.shape and 0 not in old.shape


def _two_each(signature: Signature, choice: Choice, parts: Sequence[int]) -> bool:
    """Return whether every shard has at least two elements of the split identifiers."""
    bound = signature.bound
    if not isinstance(choice, Split) or bound is None:
        return True
    together = bound.tied.get(choice.identifier, (choice.identifier,))
    return all(bound.sizes[name] >= 2 * max(parts) for name in together)


def _first_line(error: BaseException) -> str:
    return first_line(error, 200) if isinstance(error, Unsupported) else in_one_line(error, 200)
