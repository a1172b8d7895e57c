"""Check what the ranks of one group must agree on."""

from __future__ import annotations

from dataclasses import replace

from nnscaler.runtime.communication.communicator import CommunicationCall
from nnscaler.runtime.communication.simulator import disagreement

GroupKey = tuple[str, tuple[int, ...]]  # the name of a group, and its global ranks in its order


def disagreement_of(
    number: int, rank: int, call: CommunicationCall, other_rank: int, other: CommunicationCall
) -> str | None:
    """Describe how the calls of two ranks differ, the `number`-th of their group; None where they agree."""
    reason = disagreement(_comparable(call), _comparable(other))
    if reason is None:
        return None
    return f"{reason} (call {number} of the group):\n  rank {rank}: {call}\n  rank {other_rank}: {other}"


def _comparable(call: CommunicationCall) -> CommunicationCall:
    """Return a call with what must agree.

    Dims of size one do not matter, for a loss is a scalar here and a vector there. Shapes do not where ranks may
    lawfully give different ones: there, what one gives is compared with what another takes.
    """
    if call.kind in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"):
        return replace(call, shapes=())
    return replace(call, shapes=tuple(tuple(size for size in shape if size != 1) for shape in call.shapes))
