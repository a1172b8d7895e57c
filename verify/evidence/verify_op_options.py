"""The options of verify-op, and its safeguards: all on by default; the self-test switches them off one by one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Kind = Literal[
    "integers", "normal", "sparse", "positive", "definite", "negative", "bits", "given",
    "spiked", "nan", "infinite", "zeros", "constant", "mostly", "rising", "counts",
]  # fmt: skip
KINDS: tuple[Kind, ...] = ("integers", "normal", "sparse")
NOT_FINITE: tuple[Kind, ...] = ("nan", "infinite")
SPECIAL: tuple[Kind, ...] = (*NOT_FINITE, "zeros", "constant", "mostly", "rising", "counts")  # some code asks for them
DRAWS = 3  # informative draws that each partition is compared on


@dataclass(frozen=True, slots=True)
class Safeguards:
    """The measures that keep a wrong operator from passing by coincidence. Each earns its place in the ablation table
    of `nnscaler self-test ops`.

    random_cotangents  signed integers and not all ones
    parts              numbers of shards
    outputs, gradients what is compared
    derivative         finite differences, where a backward is written by hand
    pairs              two identifiers (or linear sets) split on a mesh of two axes
    uneven             shards of unequal sizes, where the operator's call is not rewritten
    outers             strided shards
    sections           shards of each section of a dim
    values             kinds of draws
    distinct_sizes     a size of its own for every identifier
    dtypes             float32 and bfloat16 beside float64
    subsets            gradients asked for some inputs only
    small              shards of one element, other dims of size 1
    strides            non-contiguous inputs (part of the audit)
    audit              mutation, randomness, repeatability, dtypes
    mutants            every pass must refute wrong variants of its result
    """

    random_cotangents: bool = True
    parts: tuple[int, ...] = (2, 3, 4)
    outputs: bool = True
    gradients: bool = True
    derivative: bool = True
    pairs: bool = True
    uneven: bool = True
    outers: bool = True
    sections: bool = True
    values: tuple[Kind, ...] = KINDS
    distinct_sizes: bool = True
    dtypes: bool = True
    subsets: bool = True
    small: bool = True
    strides: bool = True
    audit: bool = True
    mutants: bool = True


@dataclass(frozen=True, slots=True)
class OpOptions:
    """The options of verify-op.

    timeout     seconds for one operator
    cases       at most so many cases per claim; None: all
    explain     shrink counter-examples, and look for an annotation that holds
    safeguards  those that are on
    """

    seed: int = 0
    fail_fast: bool = False
    prove: bool = True
    suggest: bool = False
    explain: bool = True
    timeout: float = 60.0
    cases: int | None = None
    safeguards: Safeguards = field(default_factory=Safeguards)
