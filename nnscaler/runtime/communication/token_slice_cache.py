"""The tensors that token slices of one micro-batch keep for each other on a rank: rows going forward, gradients back.

Slices run forward in order, each after the rows of all slices before it, and backward in reverse order (TeraPipe: Li et
al., 2021). A slice that runs backward has its rows' terms from all later ones, and leaves its own terms for earlier
ones.
"""

from __future__ import annotations

from torch import Tensor

from nnscaler.runtime.communication.communicator import ProgramError


class KeptRows:
    """The rows of `slices` slices by name, and the terms of their gradients that later slices left."""

    def __init__(self, slices: int) -> None:
        self._slices = slices
        self._rows: dict[str, list[Tensor]] = {}
        self._terms: dict[str, list[Tensor | None]] = {}
        self._next: dict[str, int] = {}  # the slice that runs backward next

    def append(self, name: str, index: int, rows: Tensor) -> list[Tensor]:
        """Keep the rows of a slice, and return those of all slices up to it. A slice that is computed again replaces
        its own. Raises ProgramError where an earlier slice did not run."""
        kept = self._rows.setdefault(name, [])
        if len(kept) < index:
            raise ProgramError(f"slice {index} of {name} runs forward before slice {len(kept)}")
        kept[index : index + 1] = [rows]
        return kept[: index + 1]

    def gradient(self, name: str, index: int, gradient: Tensor, dim: int) -> Tensor:
        """Return the whole gradient of a slice's own rows, and leave the terms of earlier slices' rows to them.

        `gradient`: the slice's term, of all rows up to its own. Raises ProgramError where a later slice did not run
        backward, or this one did.
        """
        expected = self._next.get(name, self._slices - 1)
        if index != expected:
            raise ProgramError(f"slice {index} of {name} runs backward, and it is the turn of slice {expected}")
        self._next[name] = index - 1
        terms = self._terms.setdefault(name, [None] * self._slices)
        *earlier, own = gradient.split([rows.shape[dim] for rows in self._rows[name][: index + 1]], dim)
        for before, term in enumerate(earlier):
            left = terms[before]
            terms[before] = term if left is None else left + term
        later, terms[index] = terms[index], None
        del self._rows[name][index]  # no earlier slice reads it
        return own if later is None else own + later
