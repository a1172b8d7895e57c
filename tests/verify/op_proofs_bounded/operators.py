"""Helpers of the proof tests: proofs of built-in samples and of functions with an annotation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from op_registry.bind_and_localise_call import bind_call, linear_sets
from op_registry.registry import default_registry
from op_registry.samples import Sample, samples_of
from op_registry.spec import OperatorSpec

from nnscaler.ir.operation_annotations import Signature
from verify.evidence.inputs.concrete_call import (
    ConcreteCall,
    function_of,
    make_call,
    outputs_of,
    with_outputs,
    with_tensors,
)
from verify.evidence.inputs.draw_calls import builtin_call
from verify.evidence.smt.check_choice import BoundedResult
from verify.evidence.smt.decide_equality import Limits
from verify.evidence.smt.prove import Target, prove_bounded


def spec_of(name: str) -> OperatorSpec:
    spec = default_registry().lookup(name)
    assert spec is not None
    return spec


def sample_call(sample: Sample) -> ConcreteCall:
    return builtin_call(sample, "integers", torch.Generator().manual_seed(0))


def call_of(name: str, *args: Any, **kwargs: Any) -> ConcreteCall:
    return make_call(name, args, kwargs)


def function_spec(function: Callable[..., Any], annotation: str, **rest: Any) -> OperatorSpec:
    return OperatorSpec("mine", annotation, target=function, **rest)


def bound(spec: OperatorSpec, concrete: ConcreteCall) -> Signature:
    args, kwargs = with_tensors(concrete.call, concrete.tensors, {})
    outputs = outputs_of(function_of(concrete.call.operator, spec)(*args, **kwargs))
    call = with_outputs(concrete.call, outputs)
    return Signature(call, spec, bind_call(spec, call), tuple(frozenset(s) for s in linear_sets(spec, call)))


def targets_of(signature: Signature) -> list[Target]:
    """Every identifier that may be split, once for those that are split together, and every linear set."""
    found = signature.bound
    assert found is not None
    first = [n for n in signature.identifiers if found.tied.get(n, (n,))[0] == n]
    return [*first, *signature.linear]


def prove(spec: OperatorSpec, concrete: ConcreteCall, target: Target, limits: Limits | None = None) -> BoundedResult:
    return prove_bounded(spec, bound(spec, concrete), concrete, [target], limits)[target]


def prove_function(
    function: Callable[..., Any], annotation: str, target: Target, *args: Any, **rest: Any
) -> BoundedResult:
    spec = function_spec(function, annotation, **rest)
    return prove(spec, call_of("mine", *args), target)


def proofs_of(name: str) -> dict[tuple[str, Target], BoundedResult]:
    """Of every sample of a built-in operator."""
    spec = spec_of(name)
    found: dict[tuple[str, Target], BoundedResult] = {}
    for sample in samples_of(name):
        concrete = sample_call(sample)
        signature = bound(spec, concrete)
        for target, proof in prove_bounded(spec, signature, concrete, targets_of(signature)).items():
            found[str(sample), target] = proof
    return found


def floats(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))
