"""Programs compiled from wrong annotations: an operation is split as a mutant of its annotation allows.

The text is consistent in itself; only who knows the right annotation, or runs it, finds the mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from op_registry.annotation.splits import splittable
from op_registry.bind_call import bind_call
from op_registry.errors import NnscalerError

from nnscaler.ir.derive import input_states, output_states
from nnscaler.ir.graph import Operation
from nnscaler.ir.placement import Placement, Split
from nnscaler.ir.signature import Signature
from verify.self_test.operators.annotation_mutants import annotation_mutants
from verify.self_test.programs.compile_in_steps import Generation

Sources = dict[str, str]


@dataclass(frozen=True, slots=True)
class WrongAnnotation:
    """`text`: gives the program, None where the compiler refuses it."""

    operator: str
    before: str
    after: str
    text: Callable[[], Sources | None]


def wrong_annotations(made: Generation) -> dict[str, list[WrongAnnotation]]:
    """By kind of mutant, every way in which one operation of the program can be split wrongly."""
    found: dict[str, list[WrongAnnotation]] = {}
    asked: set[str] = set()
    for op in made.partitioned.graph.operations:
        signature = made.known[op.name]
        result = op.outputs[0]
        if signature.bound is None or result is None or not made.partitioned.graph.tensors[result].needs_grad:
            continue
        if signature.bound.text in asked:
            continue  # repeated layers call the same operators
        asked.add(signature.bound.text)
        for kind, wrong in _of_operation(made, op, signature):
            found.setdefault(f"annotation: {kind}", []).append(wrong)
    return found


def _of_operation(made: Generation, op: Operation, right: Signature) -> Iterator[tuple[str, WrongAnnotation]]:
    assert right.bound is not None and right.spec is not None
    for mutant in annotation_mutants(right.bound.text):
        try:
            spec = replace(right.spec, annotation=mutant.text)
            wrong = Signature(right.call, spec, bind_call(spec, right.call), right.linear)
        except (NnscalerError, ValueError, KeyError):
            continue  # refused at registration, or it does not fit the call
        for stage in made.partitioned.placements[op.name].stages[:1]:
            for axis, described in enumerate(made.partitioned.stages[stage].mesh.axes):
                for identifier in wrong.identifiers:
                    split = Split(identifier)
                    assert wrong.bound is not None
                    if splittable(wrong.bound, identifier, described.size) is None and _differ(op, right, wrong, split):
                        text = _compiled(made, op, wrong, stage, axis, split)
                        yield mutant.kind, WrongAnnotation(op.operator, right.bound.text, mutant.text, text)


def _differ(op: Operation, right: Signature, wrong: Signature, split: Split) -> bool:
    """Return whether the two annotations disagree about the operands' states under this split."""
    assert right.bound is not None
    if split.identifier not in right.bound.sizes or right.bound.marks.get(split.identifier) == "^":
        return True
    count = len(op.outputs)
    return (input_states(right, split), output_states(right, split, count)) != (
        input_states(wrong, split),
        output_states(wrong, split, count),
    )


def _compiled(
    made: Generation, op: Operation, wrong: Signature, stage: int, axis: int, split: Split
) -> Callable[[], Sources | None]:
    def text() -> Sources | None:
        old = made.partitioned.placements[op.name]
        here = (*old.choices[stage][:axis], split, *old.choices[stage][axis + 1 :])
        choices = tuple(here if s == stage else c for s, c in enumerate(old.choices))
        placements: dict[str, Placement] = {**made.partitioned.placements, op.name: replace(old, choices=choices)}
        changed = replace(made.partitioned, placements=placements)
        return made.text_of_placements(changed, {**made.known, op.name: wrong})

    return text
