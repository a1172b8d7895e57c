"""Values that the derivative of an operator keeps of its inputs."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from op_registry.registry import facts_of


def kept_slots(operator: str, linear: Collection[Collection[int]], needs_grad: Sequence[bool]) -> tuple[int, ...]:
    """Return the inputs whose values backward reads.

    These are the inputs in which, together with an input that has a gradient, the operator is not linear. `linear`: the
    operator's linear sets; `needs_grad`: of each input. An output that an operator keeps instead is of the same size.
    """
    if facts_of(operator).keeps_nothing:
        return ()
    return tuple(
        i
        for i in range(len(needs_grad))
        if any(wants and not any(i in s and j in s for s in linear) for j, wants in enumerate(needs_grad))
    )
