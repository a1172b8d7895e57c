"""Run a graph at other sizes, on tensors without values: what has been inferred of sizes must come true.

Numbers among the arguments that were sizes follow them, or stay, whichever gives the sizes that were inferred; the
annotation has to be bound in the same form, and every choice of the plan has to be legal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from op_registry.annotation.bind_sizes import BoundAnnotation
from op_registry.bind_and_localise_call import bind_call
from op_registry.call import Call, TensorArgument, map_leaves
from op_registry.errors import AnnotationError

from nnscaler.exception_in_one_line import first_line
from nnscaler.ir.derive_operand_layouts import explain_illegal_choice
from nnscaler.ir.graph import Graph, Operation
from nnscaler.ir.operation_annotations import Signature
from verify.evidence.inputs.concrete_call import function_of, outputs_of, with_tensors
from verify.evidence.smt.smaller_calls import same_kind
from verify.programs.lemmas.size_conditions import Followed, place_of
from verify.programs.lemmas.solve_size_equations import Conflict, join_names
from verify.programs.typing import Obligation

Shape = tuple[int, ...]
_NO_SHAPES = ("meta", "Meta", "device", "numpy", "data_ptr", "storage", "FakeTensor", "nonzero", "item")


def rerun(
    graph: Graph,
    signatures: Mapping[str, Signature],
    relied_on: Mapping[str, Sequence[Obligation]],
    followed: Followed,
    values: Mapping[str, int],
) -> None:
    """Run the graph with these values of the symbols.

    `relied_on`: the obligations of each operation's call. Raises Conflict with the symbols on which the first operation
    that comes out otherwise depends.
    """
    shapes: dict[str, Shape] = {}
    done: dict[Any, tuple[Shape, ...]] = {}
    for name, tensor in graph.tensors.items():
        if tensor.role != "activation":
            shapes[name] = _inferred(followed, values, followed.shapes[name]) or tensor.shape
    for op in graph.operations:
        inferred = [() if n is None else _inferred(followed, values, followed.shapes[n]) for n in op.outputs]
        given = tuple(shapes[name] for name in op.inputs)
        signature = signatures[op.name]
        key = (id(signature), given, tuple(inferred))
        if key not in done:
            done[key] = _operation(op, signature, relied_on.get(op.name, ()), given, inferred, values, followed)
        made = zip(op.outputs, done[key], strict=True)
        shapes.update({output: shape for output, shape in made if output is not None})


def _inferred(followed: Followed, values: Mapping[str, int], sizes: Sequence[Any]) -> Shape | None:
    found = [followed.unifier.valued(values, s) for s in sizes]
    return None if None in found else tuple(s for s in found if s is not None)


def _operation(
    op: Operation,
    signature: Signature,
    obligations: Sequence[Obligation],
    inputs: Sequence[Shape],
    inferred: Sequence[Shape | None],
    values: Mapping[str, int],
    followed: Followed,
) -> tuple[Shape, ...]:
    tensors = [*op.inputs, *(name for name in op.outputs if name is not None)]
    names = {name for tensor in tensors for size in followed.shapes[tensor] for name in _names(followed, size)}
    same = all(i == t.shape for i, t in zip(inputs, signature.call.tensors(), strict=True))
    if not names and same:
        return tuple(() if o is None else o.shape for o in signature.call.outputs)
    problem = ""
    for call in _variants(signature, inputs, inferred):
        outputs, reason = _run(call, signature, inferred)
        if reason is None and outputs is not None:
            reason = _other(call, outputs, signature, obligations)
            if not reason:
                return outputs
        problem = problem or reason or ""
    changed = {n: v for n, v in values.items() if v != followed.unifier.samples[n]}
    at = join_names(f"the {name} is {value}" for name, value in changed.items())
    raise Conflict(frozenset(names), f"where {at}, {place_of(op)} {problem}")


def _names(followed: Followed, size: Any) -> frozenset[str]:
    return frozenset(n for n in followed.unifier.known(size).names if n in followed.unifier.samples)


def _variants(signature: Signature, inputs: Sequence[Shape], inferred: Sequence[Shape | None]) -> list[Call]:
    """Return the call on the new shapes: numbers as they are, then numbers that were sizes following them."""
    call = signature.call
    old = [t.shape for t in call.tensors()] + [() if o is None else o.shape for o in call.outputs]
    new = [*inputs, *(shape if shape is not None else () for shape in inferred)]
    table: dict[int, int] = {}
    for before, after in zip(old, new, strict=True):
        for a, b in zip(before, after, strict=False):
            if a > 1 and a != b:
                table.setdefault(a, b)

    def shaped(value: Any) -> Any:
        return replace(value, shape=inputs[value.index]) if isinstance(value, TensorArgument) else value

    def followed(value: Any) -> Any:
        return table.get(value, value) if isinstance(value, int) and not isinstance(value, bool) else shaped(value)

    found: list[Call] = []
    for convert in (shaped, followed):
        kwargs = {k: map_leaves(v, convert) for k, v in call.kwargs.items()}
        found.append(Call(call.operator, map_leaves(call.args, convert), kwargs))
    spec = signature.spec
    if spec is not None and spec.shape_argument is not None:
        position, name, output = spec.shape_argument
        given, shape = call.get(position, name), inferred[output]
        if isinstance(given, list | tuple) and shape is not None:
            found.insert(0, found[0].replace(position, name, type(given)(shape)))
    return found


def _run(
    call: Call, signature: Signature, inferred: Sequence[Shape | None]
) -> tuple[tuple[Shape, ...] | None, str | None]:
    """Return the outputs' shapes, or what is wrong with them."""
    known = None if any(shape is None for shape in inferred) else tuple(s for s in inferred if s is not None)
    spec = signature.spec
    if spec is None or spec.random or spec.target is not None:
        return known, None if known is not None else "has outputs of which the sizes are not known"
    tensors = [torch.empty(t.shape, dtype=getattr(torch, t.dtype), device="meta") for t in call.tensors()]
    args, kwargs = with_tensors(call, tensors, {}, torch.float32)
    if not tensors:
        kwargs = {**kwargs, "device": "meta"}
    try:
        with torch.no_grad():
            outputs = outputs_of(function_of(call.operator, spec)(*args, **kwargs))
    except Exception as error:  # noqa: BLE001 - what the operator raises at these sizes is the answer
        text = first_line(error)
        if any(word in text for word in _NO_SHAPES) and known is not None:
            return known, None
        return None, f"raises {type(error).__name__}: {text[:120]}"
    found = tuple(() if o is None else tuple(o.shape) for o in outputs)
    if len(found) != len(inferred):
        return None, f"has {len(found)} outputs"
    for number, (shape, wanted) in enumerate(zip(found, inferred, strict=True)):
        used = number < len(signature.call.outputs) and signature.call.outputs[number] is not None
        if used and wanted is not None and shape != wanted:
            return None, f"makes {list(shape)} and not {list(wanted)}"
    return found, None


def _other(call: Call, outputs: Sequence[Shape], signature: Signature, obligations: Sequence[Obligation]) -> str:
    """Explain why the call is of another form, or a choice of the plan is not legal; empty if neither."""
    spec, bound = signature.spec, signature.bound
    if spec is None or bound is None:
        return ""
    described = tuple(
        None if o is None else TensorArgument(i, shape, o.dtype)
        for i, (o, shape) in enumerate(zip(signature.call.outputs, outputs, strict=True))
    )
    call = Call(call.operator, call.args, call.kwargs, described)
    try:
        found: BoundAnnotation = bind_call(spec, call)
    except AnnotationError as error:
        return f"does not fit its annotation: {first_line(error.message)}"
    if not same_kind(bound, found):
        return f"has another annotation, `{found.text}` instead of `{bound.text}`"
    other = Signature(call, spec, found, signature.linear)
    for obligation in obligations:
        for choice, (axis, parts) in zip(obligation.choices, obligation.axes, strict=True):
            reason = explain_illegal_choice(other, choice, parts) if parts > 1 else None
            if reason and getattr(choice, "outer", 1) == 1:
                return f"cannot be split over {axis}: {reason}"
    return ""
