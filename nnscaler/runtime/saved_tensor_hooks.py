"""The values that the forward of a micro-batch saves for its backward, by hooks of saved tensors.

A parameter that forward has gathered (ZeRO-3) is not among them: what shows it remembers where it was gathered, and it
is gathered again when backward reads that. Every other value is kept as it is.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from nnscaler.runtime.communication.sharded_parameter_gathers import ParameterReads, WholeView

GONE = "backward reads a saved value again that it had done with"


class Saved:
    """A value, and the number of changes in place at the time."""

    __slots__ = ("value", "version")

    def __init__(self, value: Tensor) -> None:
        self.value: Tensor | None = value.detach()
        self.version = value._version


class SavedValues:
    """The saved values of one micro-batch.

    reads  gathers parameters; None: all values are kept
    once   each value goes when backward reads it, unless `keep` is set
    keep   what is read now is read again
    """

    def __init__(self, reads: ParameterReads | None = None, once: bool = False) -> None:
        self.reads, self.once = reads, once
        self.keep = False

    def hooks(self) -> AbstractContextManager[None]:
        """Return what forward runs inside of."""
        return saved_tensors_hooks(self.save, self.take)

    def save(self, value: Tensor) -> Saved | WholeView:
        """Return what is kept of a value."""
        view = None if self.reads is None else self.reads.view_of_whole(value)
        return Saved(value) if view is None else view

    def take(self, saved: Saved | WholeView) -> Tensor:
        """Return the value for backward."""
        if isinstance(saved, WholeView):
            assert self.reads is not None, "it made the view"
            return self.reads.gather_again(saved, self.keep)
        value = saved.value
        if value is None:
            raise RuntimeError(GONE)
        if value._version != saved.version:  # autograd's own check is not made of values that hooks save
            raise RuntimeError(f"a tensor of shape {list(value.shape)} that backward needs was modified in place")
        if self.once and not self.keep:
            saved.value = None
        return value
