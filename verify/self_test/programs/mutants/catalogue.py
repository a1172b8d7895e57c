"""Every mutation operator, and the mutants of a program that a seed chooses."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from verify.self_test.programs.compile_in_steps import Text, generation_of
from verify.self_test.programs.mutants import (
    arguments_and_declarations,
    communication,
    cuts_copies_constants,
    operations_and_gradients,
    schedule,
)
from verify.self_test.programs.mutants.compiler_mistakes import generated_mutants
from verify.self_test.programs.mutants.editable_program_and_edits import MutationOperator, RightProgram
from verify.self_test.programs.mutants.mutant import Mutant, StateEdit, apply_edits, edits_between
from verify.self_test.programs.right_programs import Base

TEXT_OPERATORS: tuple[MutationOperator, ...] = (
    *communication.OPERATORS,
    *operations_and_gradients.OPERATORS,
    *arguments_and_declarations.OPERATORS,
    *schedule.OPERATORS,
    *cuts_copies_constants.OPERATORS,
)


def mutants_of(base: Base, seed: int, each: int) -> Iterator[Mutant]:
    """Yield all mutants of one program: of its text, of the graph it is generated from, and of annotations.

    At most `each` of every kind, at places that the seed chooses.
    """
    yield from text_mutants(base.subject, seed, each)
    made = generation_of(base)
    for family, kind, places in generated_mutants(made):
        yield from _generated(base.subject, family, kind, places, seed, each)


def provable_mutants(base: Base, seed: int, each: int) -> Iterator[Mutant]:
    """Those of the families that reading alone has to refute: cuts, copies, constants, and tensors of the folder."""
    yield from text_mutants(base.subject, seed, each, cuts_copies_constants.OPERATORS)
    subject = base.subject
    by_kind: dict[str, list[StateEdit]] = {}
    for edit in cuts_copies_constants.state_edits(subject):
        by_kind.setdefault(edit.kind, []).append(edit)
    for kind, edits in by_kind.items():
        for edit in _chance(subject, kind, seed).sample(edits, min(each, len(edits))):
            yield Mutant(subject.model, subject.plan, cuts_copies_constants.STATE, kind, (), {}, state=edit)


def text_mutants(
    subject: RightProgram, seed: int, each: int, operators: Sequence[MutationOperator] = TEXT_OPERATORS
) -> Iterator[Mutant]:
    """Those of the text."""
    for operator in operators:
        places = operator.places(subject)
        chance = _chance(subject, operator.kind, seed)
        for edits in chance.sample(places, min(each, len(places))):
            changed = apply_edits(subject.program.sources, edits)
            yield Mutant(subject.model, subject.plan, operator.family, operator.kind, edits, changed)


def _generated(
    subject: RightProgram, family: str, kind: str, places: Sequence[Text], seed: int, each: int
) -> Iterator[Mutant]:
    """Yield mutants whose text the compiler writes. Places where it refuses, or writes the same, are passed over."""
    count = 0
    for place in _chance(subject, kind, seed).sample(places, len(places)):
        if count == each:
            return
        sources = place()
        if sources is None or sources == dict(subject.program.sources):
            continue
        count += 1
        changed = {file: text for file, text in sources.items() if text != subject.program.sources[file]}
        yield Mutant(
            subject.model, subject.plan, family, kind, edits_between(subject.program.sources, changed), changed
        )


def _chance(subject: RightProgram, kind: str, seed: int) -> random.Random:
    return random.Random(f"{seed} {subject.model} {subject.plan} {kind}")
