"""The obligations of a plan's proof, and the lemmas they become: statements about one operator without sizes or ranks.
A lemma speaks of one choice on one axis. That an operation run under a choice on each of several axes makes shards of
shards follows by induction over the axes: the shard of one axis is a call of the same operator at other sizes, to which
the next axis' lemma applies, outermost digit first where axes share a dim. The induction takes a lemma for all sizes,
and that the call which a rank makes for several axes together is the call made axis by axis; the first is the lemmas'
strength, the second is looked at where the operator's record rewrites calls (`Together`).

A strided split (`outer`) or one by sections follows from contiguous ones in all numbers of parts: with as many parts
as elements, the operator works element by element (or adds up what single elements give), and any set of elements is
then right. The tests run them all the same. Unequal shards follow likewise where no hook rewrites calls; they are a
claim of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TypeGuard

from op_registry.spec import OperatorSpec

from nnscaler.ir.operation_annotations import Signature
from nnscaler.ir.operation_placement import Choice, RunInvariant, RunPartial, Split
from verify.programs.typing import Obligation


@dataclass(frozen=True, slots=True)
class Splits:
    """The identifier (the first of those split together) may be split. `uneven`: into shards of unequal sizes;
    `circulating`: while what has this one goes around the axis; `prefix`: into slices in time, which have the rows of
    earlier ones of what is read up to a row."""

    identifier: str
    uneven: bool = False
    circulating: str = ""
    prefix: bool = False

    def __str__(self) -> str:
        what = "slices with what is before" if self.prefix else "shards"
        shown = self.prefix or self.uneven
        around = f", `{self.circulating}` going around" if self.circulating else ""
        return f"splits `{self.identifier}`" + (f" into {'unequal ' * self.uneven}{what}" if shown else "") + around

    @property
    def by_one_shard(self) -> bool:
        """True where a proof may follow the call of one shard, which is the same on every rank and waits for none."""
        return not self.uneven and not self.circulating and not self.prefix


@dataclass(frozen=True, slots=True)
class Passes:
    """Partial sums in these input slots become partial sums of the outputs."""

    slots: frozenset[int]

    def __str__(self) -> str:
        return f"passes on partial sums in inputs {sorted(self.slots)}"


@dataclass(frozen=True, slots=True)
class Together:
    """Two identifiers, or one of them twice, are split by two axes at once. `circulating`: what goes around each;
    `prefix`: those split into slices."""

    identifiers: tuple[str, str]
    circulating: tuple[str, str] = ("", "")
    prefix: frozenset[str] = frozenset()

    def __str__(self) -> str:
        first, second = (n + (f", {around}" if around else "") for n, around in zip(*self.pair, strict=True))
        return f"splits `{first}` by two axes" if first == second else f"splits `{first}` and `{second}` by two axes"

    @property
    def pair(self) -> tuple[tuple[str, str], tuple[str, str]]:
        return self.identifiers, self.circulating

    @property
    def alone(self) -> tuple[Splits, ...]:
        """The claims on each split by itself, which one axis makes."""
        return tuple(dict.fromkeys(Splits(n, False, a, n in self.prefix) for n, a in zip(*self.pair, strict=True)))


@dataclass(frozen=True, slots=True)
class RunsWhole:
    """Every rank runs all of it, on equal inputs, with equal gradients or with partial sums of gradients.

    `equal`: with equal gradients alone, for which a backward written by hand needs not be linear.
    """

    equal: bool = False

    def __str__(self) -> str:
        return "runs whole, with equal gradients" if self.equal else "runs whole"


Claim = Splits | Passes | Together | RunsWhole


def claims_of(obligation: Obligation) -> tuple[Claim, ...]:
    """Return the distinct claims that an obligation makes. An axis of size 1 makes none."""
    signature = obligation.signature
    choices = [c for c, (_, size) in zip(obligation.choices, obligation.axes, strict=True) if size > 1]
    found = dict.fromkeys(_of_choice(signature, c) for c in choices)
    uneven = (c for c in choices if _is_uneven(c))
    found |= dict.fromkeys(Splits(_leader(signature, c.identifier), True, c.circulating, c.prefix) for c in uneven)
    splits = [(_leader(signature, c.identifier), c.circulating) for c in choices if isinstance(c, Split)]
    sliced = frozenset(_leader(signature, c.identifier) for c in choices if isinstance(c, Split) and c.prefix)
    pairs = (((a[0], b[0]), (a[1], b[1])) for a, b in _pairs(splits))
    found |= dict.fromkeys(Together(names, around, sliced.intersection(names)) for names, around in pairs)
    if not found:
        found[RunsWhole(is_users(signature.spec))] = None
    return tuple(found)


def is_users(spec: OperatorSpec | None) -> bool:
    """Return whether an operator is a user's function, whose backward may be written by hand."""
    return spec is not None and spec.target is not None


def _is_uneven(choice: Choice) -> TypeGuard[Split]:
    return isinstance(choice, Split) and bool(choice.sizes)


def _of_choice(signature: Signature, choice: Choice) -> Claim:
    if isinstance(choice, Split):
        return Splits(_leader(signature, choice.identifier), False, choice.circulating, choice.prefix)
    if isinstance(choice, RunPartial):
        return Passes(choice.slots)
    return RunsWhole(is_users(signature.spec) and isinstance(choice, RunInvariant))


def _leader(signature: Signature, identifier: str) -> str:
    """Return the identifier that stands for those split together with it."""
    if signature.bound is None:
        return identifier
    return signature.bound.tied.get(identifier, (identifier,))[0]


def _pairs(splits: Sequence[tuple[str, str]]) -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
    for first, second in combinations(splits, 2):
        yield (first, second) if first <= second else (second, first)


def strided(obligation: Obligation) -> frozenset[str]:
    """Return the identifiers that some axis of the obligation splits into strided shards, or by sections."""
    return frozenset(
        _leader(obligation.signature, c.identifier)
        for c, (_, size) in zip(obligation.choices, obligation.axes, strict=True)
        if size > 1 and isinstance(c, Split) and (c.outer > 1 or c.sections)
    )
