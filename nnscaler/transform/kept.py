"""Activations that the derivative of an operator keeps of its inputs, and operators that compute nothing."""

from __future__ import annotations

from collections.abc import Collection, Sequence

VIEWS = frozenset(
    f"aten.{name}"
    for name in (
        "reshape.default view.default transpose.int permute.default unsqueeze.default squeeze.dim expand.default "
        "t.default slice.Tensor select.int split.Tensor split_with_sizes.default chunk.default unbind.int "
        "flatten.using_ints"
    ).split()
)
# not linear to the registry (casts round, a constant is added), and their derivatives need no values
_KEEPS_NOTHING = frozenset(
    "aten.to.dtype aten._to_copy.default aten.add.Tensor aten.add.Scalar aten.sub.Tensor aten.sub.Scalar "
    "aten.rsub.Scalar aten.clone.default aten.contiguous.default nnscaler.ce_tail".split()
)


def kept_slots(operator: str, linear: Collection[Collection[int]], needs_grad: Sequence[bool]) -> tuple[int, ...]:
    """Return the inputs whose values backward reads.

    These are the inputs in which, together with an input that has a gradient, the operator is not linear. `linear`: the
    operator's linear sets; `needs_grad`: of each input. An output that an operator keeps instead is of the same size.
    """
    if operator in _KEEPS_NOTHING:
        return ()
    return tuple(
        i
        for i in range(len(needs_grad))
        if any(wants and not any(i in s and j in s for s in linear) for j, wants in enumerate(needs_grad))
    )
