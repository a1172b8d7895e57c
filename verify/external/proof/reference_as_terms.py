"""The plain model's graph as terms: the value of its loss and of each gradient, and all calls on the way to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from op_registry.call import map_leaves

from verify.external.proof.call_normal_form import (
    ConstantForm,
    Identity,
    OperatorForm,
    Permutation,
    Sum,
    View,
    normal_form,
)
from verify.external.proof.graph_recorder import CAPTURED, STALE
from verify.external.proof.pull_out_linear_factors import Factors, tensors_of
from verify.external.proof.rank_graph import CallOutput, Form, RankGraph, RecordedCall
from verify.external.proof.terms import UNIT, Terms, WholeTerm


@dataclass(frozen=True)
class ProofReference:
    """
    terms      the table, in which ranks' graphs go on
    values     name of a stored tensor, or path of an input, as `stored NAME` and `batch PATH` -> its value
    loss       None where nothing is known of it
    gradients  by parameter; a parameter without one is not in it. None: nothing is known of it
    changed    parameters and buffers that the step wrote to
    size       terms that the model has; later ones are a rank's
    lost       the first operator of which nothing is known, by name; None: there is none
    """

    terms: Terms
    factors: Factors
    values: Mapping[str, WholeTerm]
    loss: WholeTerm | None
    gradients: Mapping[str, WholeTerm | None]
    changed: Mapping[str, WholeTerm | None]
    size: int
    lost: str | None


def read_reference(graph: RankGraph) -> ProofReference:
    """Read the plain model's graph."""
    terms, factors = Terms(), Factors()
    values: dict[CallOutput, WholeTerm] = {}
    lost: str | None = None
    named: dict[str, WholeTerm] = {}
    for number, call in enumerate(graph.calls):
        made = _made(graph, call, values, terms, factors)
        if all(m is None for m in made) and call.outputs and call.overload is not None:
            lost = lost or call.name
        values.update({CallOutput(number, i): m for i, m in enumerate(made) if m is not None})
    for name, held in graph.stored.items():
        named[f"stored {name}"] = values[held.ref]
    for path, ref in graph.inputs.items():
        named[f"batch {path}"] = values[ref]
    gradients = {name: values.get(held.ref) for name, held in graph.gradients.items()}
    changed = {name: values.get(held.ref) for name, held in graph.changed.items()}
    loss = None if graph.loss is None else values.get(graph.loss.ref)
    return ProofReference(terms, factors, named, loss, gradients, changed, len(terms.rows), lost)


def _made(
    graph: RankGraph, call: RecordedCall, values: Mapping[CallOutput, WholeTerm], terms: Terms, factors: Factors
) -> Sequence[WholeTerm | None]:
    if call.overload is None:
        return (_given(call, terms),)
    if any(ref not in values for _, ref in tensors_of(call.arguments)):
        return (None,) * len(call.outputs)

    def form(ref: CallOutput) -> Form:
        found = graph.calls[ref.call].outputs[ref.output]
        assert found is not None
        return found

    match normal_form(call, form):
        case Identity(of):
            return (values[of],)
        case ConstantForm(value):
            return (terms.constant(value),)
        case View(of, out):
            viewed = terms.view(values[of].term, out.shape)
            return (WholeTerm(values[of].coefficient * viewed.coefficient, viewed.term),)
        case Permutation(of, order):
            return (WholeTerm(values[of].coefficient, terms.permute(values[of].term, order)),)
        case Sum() as found:
            parts = [_part(p, f, values, form, terms, factors) for f, p in found.parts]
            number_ = [] if not found.number else [WholeTerm(found.number, terms.one)]
            if any(p is None for p in parts):
                return (None,)
            shape, dtype = found.out.shape, str(found.out.dtype)
            return (terms.sum([p for p in parts if p is not None] + number_, shape, dtype),)
        case OperatorForm() as found:
            return called(found, values, form, terms, factors)
    raise AssertionError(f"no form of {call.name}")


def _given(call: RecordedCall, terms: Terms) -> WholeTerm | None:
    """Return the value of a tensor that was there before the step; None for one of which nothing is known."""
    (form,) = call.outputs
    assert form is not None
    if call.name in (STALE, CAPTURED):
        return captured(call, terms)
    return WholeTerm(UNIT, terms.input(call.name, form.shape, str(form.dtype)))


def captured(call: RecordedCall, terms: Terms) -> WholeTerm | None:
    """Return the value of a tensor that the code made out of numbers; None for any other that came from nowhere."""
    (form,) = call.outputs
    values = call.arguments.get("values")
    if values is None or form is None or call.name != CAPTURED:
        return None
    if isinstance(values, int | float) and abs(values) < float("inf"):
        return terms.constant(values)
    return WholeTerm(UNIT, terms.input(f"numbers {values}", form.shape, str(form.dtype)))


def _part(
    part: CallOutput | OperatorForm,
    factor: Fraction,
    values: Mapping[CallOutput, WholeTerm],
    form: Callable[[CallOutput], Form],
    terms: Terms,
    factors: Factors,
) -> WholeTerm | None:
    found = values[part] if isinstance(part, CallOutput) else called(part, values, form, terms, factors)[0]
    return None if found is None else WholeTerm(found.coefficient * factor, found.term)


def called(
    call: OperatorForm,
    values: Mapping[CallOutput, WholeTerm],
    form: Callable[[CallOutput], Form],
    terms: Terms,
    factors: Factors,
) -> Sequence[WholeTerm | None]:
    """Return the values of a call of the whole, which is noted among those of the model."""
    names = tensors_of(call.arguments)
    forms = [form(ref) for _, ref in names]
    wholes = [values[ref] for _, ref in names]
    pulled = factors.pulled(call, forms, [w.coefficient for w in wholes])
    multiple = multiplied_by_one(call, [w.term for w in wholes], [f.shape for f in forms], pulled.left, terms)
    if multiple is not None:
        return (WholeTerm(pulled.outputs[0], multiple),)
    operands = [(left, w.term) for left, w in zip(pulled.left, wholes, strict=True)]
    order = operand_order(call, operands)
    outputs = [None if o is None else (o.shape, str(o.dtype)) for o in call.outputs]
    made = terms.call(
        str(call.overload),
        tuple(operands[i] for i in order),
        parameters(call),
        tuple(forms[i].shape for i in order),
        outputs,
    )
    return [None if t is None else WholeTerm(f, t) for f, t in zip(pulled.outputs, made, strict=True)]


def multiplied_by_one(
    call: OperatorForm,
    operands: Sequence[int],
    shapes: Sequence[tuple[int, ...]],
    left: Sequence[Fraction],
    terms: Terms,
) -> int | None:
    """Return the other factor of a product with ones that does not change its shape; None for anything else."""
    (out, *_) = call.outputs
    if str(call.overload) != "aten.mul.Tensor" or len(operands) != 2 or out is None or any(f != 1 for f in left):
        return None
    for one, other in ((0, 1), (1, 0)):
        if operands[one] == terms.one and (shapes[other] == out.shape or terms.is_constant(operands[other])):
            return operands[other]
    return None


def operand_order(call: OperatorForm, operands: Sequence[tuple[Fraction, int]]) -> list[int]:
    """Return the order in which operands stand in a key: that of the call, and for products a fixed one."""
    order = list(range(len(operands)))
    commutes = str(call.overload) == "aten.mul.Tensor"
    return sorted(order, key=lambda i: (operands[i][1], operands[i][0])) if commutes else order


def parameters(call: OperatorForm) -> dict[str, Any]:
    """Return what is no tensor among the arguments, and does not follow from the result's sizes."""
    return {
        name: map_leaves(value, lambda leaf: "tensor" if isinstance(leaf, CallOutput) else leaf, tuple)
        for name, value in call.arguments.items()
        if not isinstance(value, CallOutput) and name not in call.follows
    }
