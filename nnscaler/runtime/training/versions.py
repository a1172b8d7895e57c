"""The versions of a stage's parameters in a stream: a batch reads the newest one, and its backward that one again.

Each version has a place in memory, out of as many as the stage declares: a new one takes that of the oldest. The tensor
between steps, which the optimizer updates and checkpoints see, is always the newest version. Each batch reads its
version through leaves of its own, so that gradients of two batches are never added up.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import Parameter

from nnscaler.runtime.role import Stage


class Versions:
    """The versions of one stage. Batches are named by any number that is free again after `gradients`."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._rest = {name: stage.at_rest[name] for name in stage.parameters}
        self._places: list[dict[str, Tensor]] = [{name: rest.data for name, rest in self._rest.items()}]
        self._made = 0
        self._leaves: dict[int, dict[str, Parameter]] = {}

    def read(self, batch: int) -> None:
        """Let the program's text read the newest version, for the forward of a batch."""
        # `.data`: a later update in place of the same memory is for the check of versions to find, not for autograd
        self._leaves[batch] = {name: Parameter(rest.data) for name, rest in self._rest.items()}
        self.again(batch)

    def again(self, batch: int) -> None:
        """Let the text read what the forward of a batch read: what is computed again in backward."""
        for name, leaf in self._leaves[batch].items():
            setattr(self._stage, name, leaf)

    def gradients(self, batch: int) -> None:
        """Put the gradients of a batch to the tensors between steps, and let go of what it read."""
        for name, leaf in self._leaves.pop(batch).items():
            self._rest[name].grad = leaf.grad

    def begin(self) -> None:
        """Begin a new version, as a copy of the newest one in the place of the oldest one."""
        self._made += 1
        at = self._made % self._stage.versions
        if at == len(self._places):
            self._places.append({name: rest.data.clone() for name, rest in self._rest.items()})
        for name, rest in self._rest.items():
            place = self._places[at][name]
            if place.data_ptr() != rest.data_ptr():
                place.copy_(rest.data)
                rest.data = place

    def end(self) -> None:
        """Let the text read the tensors between steps, as outside of a stream."""
        for name, rest in self._rest.items():
            setattr(self._stage, name, rest)
