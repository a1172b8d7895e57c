"""A wrong operator under an annotation that is right for its twin.

The twin is the same operator without the bug. It must pass: refuting an operator that nothing can satisfy shows
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from op_registry.call import Call
from op_registry.spec import OperatorSpec, Shards

from verify.evidence.inputs.find_operator import find_operator

Function = Callable[..., Any]
Hook = Callable[[Call, Shards], Call]

SHARDS = frozenset({"annotation_wrong", "shard_raises"})  # the shards do not make the whole
DERIVATIVE = frozenset({"gradient_is_not_derivative"})
EITHER = SHARDS | DERIVATIVE
FIT = frozenset({"annotation_does_not_fit"})
MUTATED = frozenset({"input_mutated"})
RANDOM = frozenset({"random_operator", "not_repeatable"})
DTYPE = frozenset({"output_dtype_wrong"})
STRIDES = frozenset({"strides_matter"})


@dataclass(frozen=True, slots=True)
class OperatorMutant:
    """`codes`: the findings that name the bug for what it is. `right`: the twin."""

    name: str
    family: str
    wrong: OperatorSpec
    right: OperatorSpec
    codes: frozenset[str] = SHARDS


@dataclass(frozen=True, slots=True)
class Family:
    """Makes mutants that share the name of a family."""

    name: str

    def mutant(
        self,
        name: str,
        annotation: str,
        wrong: Function,
        right: Function,
        codes: frozenset[str] = SHARDS,
        inputs: Callable[[], Any] | None = None,
    ) -> OperatorMutant:
        """Return a wrong function beside the right one. `inputs` gives arguments where the annotation alone cannot."""
        return OperatorMutant(
            f"{self.name}/{name}",
            self.name,
            spec_of(f"{self.name}/{name}", annotation, wrong, inputs),
            spec_of(f"{self.name}/twin of {name}", annotation, right, inputs),
            codes,
        )


def spec_of(
    name: str,
    annotation: str,
    function: Function,
    inputs: Callable[[], Any] | None = None,
    localize: Hook | None = None,
    contiguous: frozenset[str] = frozenset(),
) -> OperatorSpec:
    """Return the record of an operator that is not registered."""
    spec = find_operator(function, annotation)
    return replace(spec, name=name, sample_inputs=inputs, localize=localize, contiguous=contiguous)
