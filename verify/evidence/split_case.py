"""One split to compare, as data: which inputs, split how over which mesh. All else follows from it and the operator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nnscaler.ir.operation_placement import Choice, Split
from verify.evidence.verify_op_options import Kind

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Inputs:
    """The recipe of the whole operator's input tensors.

    sample            which sample call; None: drawn from the annotation
    sizes             of identifiers: all of them when drawn, changes to the sample's otherwise
    without_gradient  floating inputs (by index) that do not ask for a gradient
    factors           of each tensor, and of the cotangents at the end: of those with a fraction
    whole_numbers     drawn operands (by position) that hold integers below an identifier's size or a number ("8"), or
                      booleans ("")
    flags             boolean arguments of a drawn call that are the other value than their default
    sentinels         (tensor, number): numbers that a third of a tensor's elements are, such as -100 among labels
    """

    sample: int | None
    sizes: tuple[tuple[str, int], ...] = ()
    kind: Kind = "integers"
    seed: int = 0
    dtype: str = "float64"
    without_gradient: tuple[int, ...] = ()
    whole_numbers: tuple[tuple[int, str], ...] = ()
    factors: tuple[float, ...] = ()
    sentinels: tuple[tuple[int, float], ...] = ()
    flags: tuple[str, ...] = ()

    def generator(self) -> torch.Generator:
        """Return a generator at its start: the same draws each time."""
        import torch  # a token is read without it

        return torch.Generator().manual_seed(self.seed)


@dataclass(frozen=True, slots=True)
class SplitCase:
    """`choices` and `parts`: one per axis of the mesh, which has one axis or two. `uneven`: shards of unequal sizes."""

    inputs: Inputs
    choices: tuple[Choice, ...]
    parts: tuple[int, ...]
    uneven: bool = False

    @property
    def split_in_words(self) -> str:
        """Say what is split in how many."""
        return " and ".join(f"{c} in {p}" for c, p in zip(self.choices, self.parts, strict=True))

    def with_sizes(self, identifiers: Mapping[str, int]) -> SplitCase | str:
        """Return an uneven case with the sizes of its shards, or why there are none; any other as it is.

        `identifiers`: their sizes.
        """
        (choice, *_), parts = self.choices, self.parts[0]
        if not self.uneven:
            return self
        assert isinstance(choice, Split)
        size = identifiers.get(choice.identifier, 0)
        if size <= parts:
            return f"`{choice.identifier}` is too small for {parts} unequal shards"
        return replace(self, choices=(replace(choice, sizes=uneven_sizes(size, parts)),))


def uneven_sizes(length: int, parts: int) -> tuple[int, ...]:
    """Return sizes that differ by one and more, the first the largest: (7, 5) for 12 in 2, (5, 4, 3) for 12 in 3."""
    sizes = [length // parts] * parts
    sizes[0] += length % parts
    for giving in range(parts - 1, 0, -1):
        if sizes[giving] > 1 and len(set(sizes)) == 1:
            sizes[giving] -= 1
            sizes[0] += 1
    return tuple(sizes)
