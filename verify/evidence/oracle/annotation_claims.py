"""Read the claims of an annotation off its text, whatever a call's sizes are, and map each test case to the claims that
it exercises.

An identifier that may be split may be split into contiguous blocks, and, where the rules allow them, into strided
blocks, shards of unequal sizes, and section by section. Each of these is a claim of its own: a sample whose sizes do
not divide says nothing about it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from op_registry.bind_and_localise_call import named_values
from op_registry.call import TensorArgument

from nnscaler.ir.derive_operand_layouts import explain_illegal_choice
from nnscaler.ir.operation_annotations import Signature
from nnscaler.ir.operation_placement import Choice, RunPartial, Split
from verify.evidence.split_case import SplitCase
from verify.evidence.verify_op_options import Safeguards


@dataclass(frozen=True, slots=True)
class Slices:
    """Slices in time of an identifier, each of which has all rows up to its last one of what is marked `<`."""

    identifier: str

    def __str__(self) -> str:
        return f"slices of `{self.identifier}`"


Target = str | frozenset[int] | Slices  # an identifier over ranks, operands that hold partial sums, or slices
Form = Literal["contiguous", "strided", "unequal", "sections", "partial"]
SAID: dict[Form, str] = {
    "contiguous": "contiguous blocks",
    "strided": "strided blocks (`outer`)",
    "unequal": "shards of unequal sizes",
    "sections": "shards of each section",
    "partial": "partial sums",
}
_SIZES = re.compile(r"\b(?!1\b)\d+\b")
_SIZE, _UNEQUAL, _SECTIONS = 24, (13, 11), (8, 16)  # of every identifier, to ask the rules whether a form is allowed


@dataclass(frozen=True, slots=True)
class Claimed:
    """A claim of an annotation: a target may be split in one form.

    kind    of the calls about which it is claimed
    target  an identifier, or a set of operands for partial sums
    form    of the shards
    text    the annotation
    """

    kind: str
    target: Target
    form: Form
    text: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{target_text(self.target)} in {SAID[self.form]}"


def split_by(target: Target) -> str | None:
    """Return the identifier that a target splits; None for partial sums."""
    return target if isinstance(target, str) else target.identifier if isinstance(target, Slices) else None


def choice_of(target: Target) -> Choice:
    """Return the plainest choice that a target allows."""
    if isinstance(target, frozenset):
        return RunPartial(target)
    return Split(target) if isinstance(target, str) else Split(target.identifier, prefix=True)


def target_text(target: Target) -> str:
    """Return a target in words."""
    if isinstance(target, frozenset):
        return f"inputs {sorted(target)}"
    return f"`{target}`" if isinstance(target, str) else str(target)


def slices_of(signature: Signature) -> tuple[Slices, ...]:
    """Return what the annotation says may be cut into slices in time: the rows along which something is read."""
    assert signature.bound is not None
    return tuple(Slices(name) for name in dict.fromkeys(signature.bound.rows.values()))


def claims_of(signature: Signature, targets: Iterable[Target], guards: Safeguards) -> tuple[Claimed, ...]:
    """Return every claim about these targets that the safeguards want tested."""
    bound = signature.bound
    assert bound is not None
    kind = kind_of(signature)
    return tuple(
        Claimed(kind, target, form, bound.text) for target in targets for form in _forms(signature, target, guards)
    )


def kind_of(signature: Signature) -> str:
    """Return what calls have in common of which one shows what holds for all.

    A user's function may do anything else with other arguments: a call with another flag, or a number that is no size,
    is of another kind. A built-in operator has an annotation for each kind of call, in which literal sizes other than 1
    make no difference, since they are not split.
    """
    bound, spec = signature.bound, signature.spec
    assert bound is not None and spec is not None
    if spec.target is None:
        return _SIZES.sub("#", bound.text)
    values = named_values(spec, signature.call)
    given = [f"{name}={_plain(value)}" for name, value in values if name not in bound.sizes]
    return f"{bound.text} of {', '.join(given)}"


def _plain(value: object) -> str:
    """Return the text of an argument, with a word for each tensor."""
    if isinstance(value, TensorArgument):
        return "tensor"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_plain, value))}]"
    return repr(value)


def _forms(signature: Signature, target: Target, guards: Safeguards) -> Iterator[Form]:
    if isinstance(target, frozenset):
        yield "partial"
        return
    assert signature.bound is not None
    sized = replace(signature.bound, sizes=dict.fromkeys(signature.bound.sizes, _SIZE))
    asked = Signature(signature.call, signature.spec, sized, signature.linear)
    if isinstance(target, Slices):
        yield "contiguous"
        if guards.uneven:
            yield "unequal"
        return
    wanted: list[tuple[Form, Choice]] = [("contiguous", Split(target))]
    wanted += [("strided", Split(target, 2))] if guards.outers else []
    wanted += [("unequal", Split(target, sizes=_UNEQUAL))] if guards.uneven else []
    wanted += [("sections", Split(target, sections=_SECTIONS))] if guards.sections else []
    yield from (form for form, choice in wanted if explain_illegal_choice(asked, choice, 2) is None)


def untested(
    claimed: Iterable[Claimed], exercised: Collection[Claimed], declined: Collection[Claimed] = ()
) -> tuple[Claimed, ...]:
    """Return the claims that nothing exercised, each once.

    What the operator's hook declined, strided blocks for example, no program contains: it is claimed of nothing. But
    an identifier that is not split into contiguous blocks either has no reason to be without `^`.
    """
    no_claim = {claim for claim in declined if claim.form != "contiguous"}
    return tuple(dict.fromkeys(claim for claim in claimed if claim not in exercised and claim not in no_claim))


def exercised_by(case: SplitCase, signature: Signature) -> Claimed | None:
    """Return the claim that a case of one axis in float64 is about, whether or not it ran."""
    bound = signature.bound
    if len(case.choices) != 1 or case.inputs.dtype != "float64" or bound is None:
        return None
    choice = case.choices[0]
    if not isinstance(choice, Split | RunPartial):
        return None
    target: Target = choice.identifier if isinstance(choice, Split) else choice.slots
    if isinstance(choice, Split) and choice.prefix:
        target = Slices(choice.identifier)
    return Claimed(kind_of(signature), target, form_of(case), bound.text)


def form_of(case: SplitCase) -> Form:
    """Return the form of the split in a case of one axis."""
    choice = case.choices[0]
    if not isinstance(choice, Split):
        return "partial"
    if case.uneven:
        return "unequal"
    return "sections" if choice.sections else "strided" if choice.outer > 1 else "contiguous"
