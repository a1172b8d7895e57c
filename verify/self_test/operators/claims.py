"""The claims of an annotation about a call: for every identifier that may be split, the state of each operand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from op_registry.bind_call import size_arguments

from nnscaler.ir.derive import explain_illegal_choice, input_states, output_states
from nnscaler.ir.layout import State
from nnscaler.ir.placement import Split
from nnscaler.ir.signature import Signature

PARTS = (2, 3, 4, 5, 7)  # one of them must divide a size, or nothing is claimed


@dataclass(frozen=True, slots=True)
class Claim:
    """The operands' states under a split of an identifier.

    size   of the identifier
    names  identifiers that are split, where the operator's hook, or an argument of that name, reads them; else empty
    """

    inputs: tuple[State, ...]
    outputs: tuple[State, ...]
    size: int
    names: tuple[str, ...] = ()


def claims_of(signature: Signature) -> Mapping[Claim, str]:
    """Return every claim of an annotation that is bound to a call, and the identifier that makes it."""
    bound, spec = signature.bound, signature.spec
    assert bound is not None and spec is not None
    hooked = spec.localize is not None or spec.random
    divided = size_arguments(spec, signature.call)
    found: dict[Claim, str] = {}
    for name, size in bound.sizes.items():
        together = bound.tied.get(name, (name,))
        if together[0] != name or size < 2:
            continue
        split = Split(name)
        if all(explain_illegal_choice(signature, split, parts) is not None for parts in PARTS):
            continue
        named = hooked or any(n in divided for n in together)
        outputs = output_states(signature, split, len(signature.call.outputs))
        found.setdefault(Claim(input_states(signature, split), outputs, size, together if named else ()), name)
    return found
