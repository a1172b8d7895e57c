"""The syntax tree of annotations, the annotation language as data, and its canonical text.
    annotation := side "->" side
    side       := [ operand { "," operand } ]           an empty side has no operands (arange: "-> t")
    operand    := "?" | [ "+" ] ( "()" | dim { dim } )  "?": not a tensor, or replicated only; "()": a scalar tensor
    dim        := ("*" | name) [mark] | integer | "(" { name [mark] | integer } ")" | "[" name [mark] { ... } "]"
    mark       := "+" [reduction] | "^" | "<" [name]    touches its name; the reduction is "max" ("sum" is the default)

No mark: spatial (a split gives shards). `+`: reduction (outputs that lack the identifier become partial sums). `^`:
frozen (never split). `s<q`: frozen as well, and row q of a result reads the rows up to its own of s (`t<`: its own
identifier's), so that slices of q in time need a prefix of s each. `*`: any number of dims, the same ones wherever it
stands. `(a b)`: one dim made of factors, outermost first. `[q k]`: one dim that concatenates parts. An integer is a
fixed size. A `+` at an operand's start makes the operand additive: under a reduction split of an identifier that it
lacks, it is itself a partial sum.

Every node knows its place in the text (`start`, `end`), which takes no part in comparisons.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

Mark = Literal["", "+", "^", "<"]
Reduction = Literal["sum", "max"]

REDUCTIONS: tuple[Reduction, ...] = ("sum", "max")
UNSPLIT: frozenset[Mark] = frozenset({"^", "<"})  # marks of what no axis of ranks splits


@dataclass(frozen=True, slots=True)
class Identifier:
    """A name. `*` has the name "*". `reduction` means something only under the mark `+`, `rows` under `<`: the
    identifier along whose rows this one is read, empty for itself."""

    name: str
    mark: Mark = ""
    reduction: Reduction = "sum"
    start: int = field(default=0, compare=False, repr=False)
    end: int = field(default=0, compare=False, repr=False)
    rows: str = ""

    @property
    def is_frozen(self) -> bool:
        """Return whether no axis of ranks may split it."""
        return self.mark in UNSPLIT

    @property
    def is_wildcard(self) -> bool:
        return self.name == "*"


@dataclass(frozen=True, slots=True)
class Integer:
    """A fixed size, never split."""

    size: int
    start: int = field(default=0, compare=False, repr=False)
    end: int = field(default=0, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Group:
    """`(a b 3)`: one dim whose size is the product, outermost factor first. Invariant: at least one factor."""

    factors: tuple[Identifier | Integer, ...]
    start: int = field(default=0, compare=False, repr=False)
    end: int = field(default=0, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Concat:
    """`[q k v]`: one dim whose size is the sum; the parts are split together. Invariant: at least one part."""

    parts: tuple[Identifier, ...]
    start: int = field(default=0, compare=False, repr=False)
    end: int = field(default=0, compare=False, repr=False)


Dim = Identifier | Integer | Group | Concat


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor; without dims a scalar. Invariant: at most one dim is `*`."""

    dims: tuple[Dim, ...] = ()
    additive: bool = False
    start: int = field(default=0, compare=False, repr=False)
    end: int = field(default=0, compare=False, repr=False)

    def identifiers(self) -> Iterator[Identifier]:
        """Yield every identifier of the operand, left to right, `*` included."""
        for dim in self.dims:
            yield from identifiers_of(dim)


@dataclass(frozen=True, slots=True)
class Opaque:
    """`?`: an argument that is not a tensor, or a tensor that is only ever replicated."""

    start: int = field(default=0, compare=False, repr=False)
    end: int = field(default=0, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Annotation:
    """A parsed annotation: `inputs -> outputs`, each operand a tensor's dims, or `?` for what is never split."""

    inputs: tuple[Operand | Opaque, ...]
    outputs: tuple[Operand | Opaque, ...]

    def operands(self) -> Iterator[Operand]:
        """Yield every operand that is a tensor: inputs, then outputs."""
        for operand in (*self.inputs, *self.outputs):
            if isinstance(operand, Operand):
                yield operand

    def identifiers(self) -> Iterator[Identifier]:
        """Yield every occurrence of an identifier, left to right."""
        for operand in self.operands():
            yield from operand.identifiers()


def identifiers_of(dim: Dim) -> Iterator[Identifier]:
    """Yield the identifiers of one dim, left to right."""
    if isinstance(dim, Identifier):
        yield dim
    elif isinstance(dim, Group):
        for factor in dim.factors:
            if isinstance(factor, Identifier):
                yield factor
    elif isinstance(dim, Concat):
        yield from dim.parts


# Annotation -> canonical text; `parse(print_annotation(a)) == a`.


def print_annotation(annotation: Annotation) -> str:
    """Write the canonical text: one space between dims, `, ` between operands, ` -> ` between sides."""
    left = ", ".join(print_operand(o) for o in annotation.inputs)
    right = ", ".join(print_operand(o) for o in annotation.outputs)
    return f"{left} -> {right}".strip()


def print_operand(operand: Operand | Opaque) -> str:
    if isinstance(operand, Opaque):
        return "?"
    sign = "+" if operand.additive else ""
    return sign + (" ".join(print_dim(d) for d in operand.dims) or "()")


def print_dim(dim: Dim) -> str:
    if isinstance(dim, Integer):
        return str(dim.size)
    if isinstance(dim, Group):
        return "(" + " ".join(print_dim(f) for f in dim.factors) + ")"
    if isinstance(dim, Concat):
        return "[" + " ".join(print_dim(p) for p in dim.parts) + "]"
    return print_identifier(dim)


def print_identifier(identifier: Identifier) -> str:
    named = identifier.mark == "+" and identifier.reduction != "sum"
    return identifier.name + identifier.mark + (identifier.reduction if named else "") + identifier.rows
