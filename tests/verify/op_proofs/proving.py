"""Helpers of the proofs' tests: a function and its annotation, proved on one call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from op_registry.bind_and_localise_call import bind_call, linear_sets
from op_registry.spec import OperatorSpec, SchemaParameter

from nnscaler.ir.operation_annotations import Signature
from nnscaler.ir.operation_placement import RunPartial, Split
from verify.evidence.dimension_types.prove import Proof, prove
from verify.evidence.inputs.concrete_call import ConcreteCall, make_call, outputs_of, with_outputs, with_tensors


def floats(*shape: int) -> Tensor:
    """Random numbers of a shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def signature_of(spec: OperatorSpec, concrete: ConcreteCall) -> Signature:
    """The annotation bound to a run of the operator."""
    assert spec.target is not None
    args, kwargs = with_tensors(concrete.call, list(concrete.tensors), {})
    call = with_outputs(concrete.call, outputs_of(spec.target(*args, **kwargs)))
    return Signature(call, spec, bind_call(spec, call), tuple(frozenset(s) for s in linear_sets(spec, call)))


def proofs_of(
    function: Callable[..., Any],
    annotation: str,
    *args: Any,
    linear: tuple[frozenset[int], ...] = (),
    sampled_with: Callable[..., Any] | None = None,
    parameters: tuple[SchemaParameter, ...] = (),
    **kwargs: Any,
) -> dict[str, Proof]:
    """Proofs by identifier (and by `partial [0]`) of `function`, called with `args`.

    `sampled_with`: the function whose outputs the annotation is bound to, where `function` does not run.
    """
    spec = OperatorSpec("tested", annotation, linear=linear, target=function, parameters=parameters)
    concrete = make_call("tested", args, kwargs)
    shown = replace(spec, target=sampled_with or function)
    signature = signature_of(shown, concrete)
    found = prove(spec, signature, concrete)
    return {_name(proof.target): proof for proof in found.proofs}


def _name(target: Any) -> str:
    if isinstance(target, Split):
        return target.identifier
    assert isinstance(target, RunPartial)
    return str(target)


def proved(function: Callable[..., Any], annotation: str, *args: Any, **kwargs: Any) -> set[str]:
    """The targets that are proved."""
    return {name for name, proof in proofs_of(function, annotation, *args, **kwargs).items() if proof.proved}
