"""One mesh axis as a rank sees it."""

from __future__ import annotations

from dataclasses import dataclass

from nnscaler.runtime.communication.communicator import Communicator, ProgramError


@dataclass(frozen=True, slots=True, eq=False)
class AxisGroup:
    """The ranks that differ from this one only in their coordinate on one axis.

    The micro-batch axis has an `index` (the current micro-batch) and no communicator: its "ranks" are moments.

    name           of the axis
    size           number of ranks
    index          this rank's coordinate
    ranks          in the order of the coordinate
    communicator   None on the micro-batch axis
    """

    name: str
    size: int
    index: int
    ranks: tuple[int, ...] = ()
    communicator: Communicator | None = None

    def connected(self) -> Communicator:
        """Return the communicator. Raises ProgramError on the micro-batch axis, over which nothing can be sent."""
        if self.communicator is None:
            raise ProgramError(f"axis {self.name!r} has no ranks to communicate with")
        return self.communicator
