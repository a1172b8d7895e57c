"""Count the proofs over many operators, and the reasons that stop the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from op_registry.bind_and_localise_call import bind_call, linear_sets
from op_registry.samples import samples_of
from op_registry.spec import OperatorSpec

from nnscaler.ir.operation_annotations import Signature
from verify.evidence.dimension_types.prove import Proof, prove
from verify.evidence.inputs.concrete_call import ConcreteCall, function_of, outputs_of, with_outputs, with_tensors
from verify.evidence.inputs.draw_calls import builtin_call


@dataclass(frozen=True, slots=True)
class SurveyRow:
    """One operator. `blockers`: why something is not proved, with how often; `calls` is the number of sample calls."""

    operator: str
    calls: int
    proved: int
    targets: int
    blockers: Mapping[str, int]
    seconds: float

    @property
    def complete(self) -> bool:
        """Return whether every split and every linear set of every sample call is proved, and there is a call."""
        return self.calls > 0 and self.proved == self.targets


def survey(specs: Iterable[OperatorSpec]) -> tuple[SurveyRow, ...]:
    """Prove what it can of the sample calls of built-in operators. Raises what a sample call raises."""
    return tuple(_row(spec) for spec in specs)


def _row(spec: OperatorSpec) -> SurveyRow:
    proofs: list[Proof] = []
    seconds = 0.0
    samples = samples_of(spec.name)
    for sample in samples:
        concrete = builtin_call(sample, "normal", torch.Generator().manual_seed(0))
        found = prove(spec, signature_of(spec, concrete), concrete)
        proofs += found.proofs
        seconds += found.seconds
    blockers: dict[str, int] = {}
    for proof in proofs:
        if not proof.proved:
            blockers[proof.blocker] = blockers.get(proof.blocker, 0) + 1
    return SurveyRow(spec.name, len(samples), sum(p.proved for p in proofs), len(proofs), blockers, seconds)


def signature_of(spec: OperatorSpec, concrete: ConcreteCall) -> Signature:
    """Return the annotation bound to a run of the operator."""
    args, kwargs = with_tensors(concrete.call, list(concrete.tensors), {})
    with torch.no_grad():
        outputs = outputs_of(function_of(spec.name, spec)(*args, **kwargs))
    call = with_outputs(concrete.call, outputs)
    return Signature(call, spec, bind_call(spec, call), tuple(frozenset(s) for s in linear_sets(spec, call)))
