"""Enumerate the test cases of an operator, from its annotation and a seed.

Each identifier that may be split, alone: 2, 3 and 4 parts (or the smallest number that divides its size), contiguous
and strided, even and uneven, section by section, on three kinds of draws; shards of one element and other dims of
size 1; float32 and bfloat16, and float16 of a user's. The same of slices in time, even and uneven, where `<` marks what
is read up to a row. Each set of operands in which the operator is linear, on partial sums. Then pairs of these on a
mesh of two axes, and one identifier over both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product

from op_registry.annotation.syntax_tree import UNSPLIT
from op_registry.annotation.well_formed import parse_checked
from op_registry.numbers_in_user_code import numbers_in
from op_registry.spec import OperatorSpec

from nnscaler.errors import AnnotationError
from nnscaler.exception_in_one_line import in_one_line
from nnscaler.ir.operation_annotations import Signature
from nnscaler.ir.operation_placement import Choice, Split
from verify.evidence.inputs.draw_calls import (
    OTHER_DIMS,
    SECOND_SIZE,
    SPLIT_SIZE,
    Style,
    choose_sizes,
    dims_of,
    flags_of,
)
from verify.evidence.oracle.annotation_claims import Claimed, Target, choice_of, form_of, split_by
from verify.evidence.oracle.case_runner import OperatorRunner, Prepared, WholeRaised
from verify.evidence.oracle.find_runnable_inputs import Unusable, first_inputs, without_derivatives
from verify.evidence.split_case import Inputs, SplitCase
from verify.evidence.verify_op_options import DRAWS, Kind, OpOptions

FALLBACKS: tuple[Kind, ...] = ("normal", "integers", "positive", "given", "definite")
PAIRS = 15  # of two targets; the seed says which ones, where there are more
LOW = ("float32", "bfloat16")
USERS_LOW = (*LOW, "float16")  # a user's operator may do something else in any of them
NESTED = (3, 2)
FLAGS = 3  # boolean arguments of a user's operator that are changed
_MOST_DIMS = 6  # that a number in the code is taken for a number of dims


@dataclass(frozen=True)
class Base:
    """A sample call, or a choice of sizes, that cases vary.

    leaders  identifiers that may be split, one of each set that is split together
    linear   sets of operands that may be partial sums together
    style    of the sizes, where they are drawn
    """

    inputs: Inputs
    signature: Signature
    leaders: tuple[str, ...]
    linear: tuple[frozenset[int], ...]
    style: Style = "distinct"

    @property
    def targets(self) -> tuple[Target, ...]:
        """Everything that is claimed of it."""
        found: list[Target] = [*self.leaders]
        found += self.linear
        return tuple(found)


def leaders_of(signature: Signature, ones: bool = False) -> tuple[str, ...]:
    """Identifiers that the annotation says may be split, one of each set that is split together.

    `ones`: also those of size 1, which this call cannot show.
    """
    bound = signature.bound
    assert bound is not None
    names = [n for n in bound.sizes if bound.marks.get(n) not in UNSPLIT and bound.tied.get(n, (n,))[0] == n]
    return tuple(n for n in names if ones or bound.sizes[n] != 1)


def bases(runner: OperatorRunner) -> list[Base]:
    """Return the calls that the cases vary: samples, or else a drawn one.

    Raises Unusable where the operator cannot run.
    """
    if runner.samples:
        found = [base for i in range(runner.samples) if (base := _sample_base(runner, i)) is not None]
        if not found:
            _raise_unusable(runner)
        return found
    style, drawn = first_inputs(runner)
    found = []
    for inputs in drawn:
        signature = runner.prepare(inputs).signature
        found.append(Base(inputs, signature, leaders_of(signature), signature.linear, style))
    for inputs in drawn:
        found += [*_of_other_dims(runner, inputs, style), *_of_other_flags(runner, inputs, style)]
    return found


def _of_other_dims(runner: OperatorRunner, inputs: Inputs, style: Style) -> Iterator[Base]:
    """Yield calls in which `*` stands for fewer and for more dims, and for as many as its code asks for, where a user's
    operator runs on such."""
    annotation, numbers = parse_checked(str(runner.spec.annotation)), {*numbers_in(runner.spec.target)}
    asked = range(OTHER_DIMS[-1] + 1, _MOST_DIMS + 1)
    wanted = (*OTHER_DIMS, *(n for n in asked if not numbers.isdisjoint((n, n - 1, n + 1))))
    for dims in wanted if runner.spec.target is not None and dims_of(dict(inputs.sizes)) else ():
        other = replace(inputs, sizes=tuple(choose_sizes(annotation, (), style, dims).items()))
        try:
            signature = runner.prepare(other).signature
        except (WholeRaised, AnnotationError, KeyError):  # a name of `whole_numbers` may not be there
            continue
        yield Base(other, signature, leaders_of(signature), signature.linear, style)


def _of_other_flags(runner: OperatorRunner, inputs: Inputs, style: Style) -> Iterator[Base]:
    """Yield calls in which one boolean argument of a user's operator is not its default: the annotation speaks of them
    too."""
    for name in flags_of(runner.spec)[:FLAGS] if runner.spec.target is not None else ():
        other = replace(inputs, flags=(name,))
        try:
            signature = runner.prepare(other).signature
        except (WholeRaised, AnnotationError):  # it may return other results then
            continue
        yield Base(other, signature, leaders_of(signature), signature.linear, style)


def _raise_unusable(runner: OperatorRunner) -> None:
    raised = why_unused(runner, 0)
    if raised:
        raise Unusable("uninformative", f"on its sample inputs `{runner.spec.name}` raises {raised}")
    raise Unusable("uninformative", f"`{runner.spec.name}` gives NaN, infinity or only zeros on its sample inputs")


def why_unused(runner: OperatorRunner, sample: int) -> str:
    """Return the error message of the operator on a sample call; empty if it runs."""
    try:
        runner.prepare(Inputs(sample, (), "given", runner.options.seed))
    except WholeRaised as raised:
        return in_one_line(raised.error, 200)
    return ""


def _sample_base(runner: OperatorRunner, index: int) -> Base | None:
    for kind in ("normal", "given"):
        inputs = without_derivatives(runner, Inputs(index, (), kind, runner.options.seed))
        try:
            signature = runner.prepare(inputs).signature
        except WholeRaised:
            continue
        return Base(inputs, signature, leaders_of(signature), signature.linear)
    return None


def by_identifier(found: Sequence[Base]) -> Iterator[tuple[str, str, list[tuple[int, Base]]]]:
    """Yield identifiers with their kind, and the sample calls whose annotation says that they may be split so."""
    groups: dict[tuple[str, str], list[tuple[int, Base]]] = {}
    for index, base in enumerate(found):
        bound = base.signature.bound
        assert bound is not None
        for name in leaders_of(base.signature, ones=True):
            mark = bound.marks.get(name, "")
            reduction = bound.reductions.get(name, "sum")
            kind = "spatial" if not mark else "reduction" if reduction == "sum" else f"reduction ({reduction})"
            groups.setdefault((name, kind), []).append((index, base))
    for (name, kind), group in groups.items():
        yield name, kind, group


class Enumerator:
    """Cases of one base. Wholes are run on the way: uninformative draws are replaced."""

    def __init__(self, runner: OperatorRunner, base: Base) -> None:
        self.runner = runner
        self.base = base
        self.options = runner.options
        self.guards = runner.options.safeguards
        self.drawn = base.inputs.sample is None
        self.users = runner.spec.target is not None  # whose code may ask for a size; torch's kernels are known
        self.seed = runner.options.seed
        self.half_line = False  # whether only positive inputs show anything

    def draws(self, sizes: tuple[tuple[str, int], ...], count: int = DRAWS, again: int = 0) -> list[Inputs]:
        """Return up to `count` inputs of these sizes on which the whole operator shows something; others for each
        number of `again`."""
        found: list[Inputs] = []
        beyond: list[Inputs] = []  # with infinities, as of a mask
        zeros: list[Inputs] = []
        candidates = [*enumerate(self.guards.values), *enumerate(FALLBACKS, 10), *enumerate(FALLBACKS, 20)]
        for number, kind in candidates:
            seed = (self.seed * 1000 + 100 * again + number) % 2**62
            inputs = replace(self.base.inputs, sizes=sizes, kind=kind, seed=seed)
            if kind == "given" and (self.drawn or any(i.kind == "given" for i in found)):
                continue
            prepared = self.prepared(inputs)
            if prepared is None:
                continue
            whole = prepared.whole
            finite = whole.finite or not whole.concrete.compare
            (zeros if not whole.shows_something else found if finite else beyond).append(inputs)
            if len(found) == count:
                break
        if {i.kind for i in found} and {i.kind for i in found} <= {"positive", "definite", "given"}:
            self.half_line = True
        # of a built-in operator we know that a constant zero is meant (`zeros_like`); what cannot show is then said
        return found or beyond[:count] or (zeros[:count] if self.runner.rows else [])

    def prepared(self, inputs: Inputs) -> Prepared | None:
        """Return the whole's run, if it can be run and there is something to compare."""
        try:
            prepared = self.runner.prepare(inputs)
        except (WholeRaised, AnnotationError, Exception) as error:
            if isinstance(error, AnnotationError) and not inputs.sizes:
                raise
            return None
        return prepared if prepared.whole.comparable or not prepared.whole.concrete.compare else None

    def sizes_for(self, targets: Sequence[Target]) -> tuple[tuple[str, int], ...]:
        """Return sizes under which these targets can be split in 2, 3 and 4."""
        names = [name for t in targets if (name := split_by(t)) is not None]
        bound = self.base.signature.bound
        assert bound is not None
        if self.drawn:
            annotation, dims = parse_checked(str(self.runner.spec.annotation)), dims_of(dict(self.base.inputs.sizes))
            found = tuple(choose_sizes(annotation, names, self.base.style, dims).items())
            if self.prepared(replace(self.base.inputs, sizes=found)) is not None:
                return found
            # The others may depend on each other (k of the largest of n): they stay as they are.
            own = {n: size for n, size in found if any(n in bound.tied.get(name, (name,)) for name in names)}
            return tuple({**dict(self.base.inputs.sizes), **own}.items())
        wanted = zip(names, (SPLIT_SIZE, SECOND_SIZE), strict=False)
        changed = tuple((n, size) for n, size in wanted if self.runner.given and bound.sizes[n] % 6)
        other = replace(self.base.inputs, sizes=changed, kind="normal", seed=self.seed)
        if changed and self.prepared(other) is not None:
            return changed
        return ()

    def singles(self, target: Target) -> Iterator[SplitCase]:
        """Yield one identifier or linear set, over one axis."""
        sizes = self.sizes_for([target])
        draws = self.draws(sizes)
        for inputs in draws:
            yield from self.forms(target, inputs)
        if self.guards.small and (split_by(target) is not None or self.users):
            yield from self.small(target) if split_by(target) is not None else self.ones(target)
        if self.guards.dtypes and draws:
            yield from self.low(target, draws)

    def more(self, target: Target, again: int) -> Iterator[SplitCase]:
        """Yield the same partitions on other inputs, where those of `singles` let a wrong result look right."""
        for inputs in self.draws(self.sizes_for([target]), again=again):
            if inputs.kind != "given":
                yield from self.forms(target, inputs)

    def forms(self, target: Target, inputs: Inputs) -> Iterator[SplitCase]:
        """Yield every way of splitting these inputs in a few numbers of shards."""
        for parts in self.parts(target, inputs.sizes):
            for choice in self.choices(target, parts, inputs.sizes):
                yield SplitCase(inputs, (choice,), (parts,))
            if split_by(target) is not None and self.guards.uneven:
                yield SplitCase(inputs, (choice_of(target),), (parts,), uneven=True)

    def resized(self, claim: Claimed) -> Iterator[SplitCase]:
        """Yield the cases of one claim that no sample's own sizes exercise: the same call with sizes that divide, if it
        runs."""
        bound = self.base.signature.bound
        name = split_by(claim.target)
        if self.drawn or name is None or bound is None:
            return
        together = bound.tied.get(name, (name,))
        for size in (SPLIT_SIZE, 2 * SPLIT_SIZE):
            for inputs in self.draws(tuple((other, size * (1 + i)) for i, other in enumerate(together))):
                yield from (case for case in self.forms(claim.target, inputs) if form_of(case) == claim.form)

    def size(self, target: str, sizes: tuple[tuple[str, int], ...]) -> int:
        assert self.base.signature.bound is not None
        return dict(sizes).get(target, self.base.signature.bound.sizes[target])

    def parts(self, target: Target, sizes: tuple[tuple[str, int], ...]) -> tuple[int, ...]:
        """Return the numbers of shards; beside the usual ones the smallest that divides, where none of those does."""
        usual, name = self.guards.parts, split_by(target)
        if name is None or any(self.size(name, sizes) % parts == 0 for parts in usual):
            return usual
        size = self.size(name, sizes)
        return (*usual, *(p for p in range(max(usual) + 1, size + 1) if size % p == 0))[: len(usual) + 1]

    def choices(self, target: Target, parts: int, sizes: tuple[tuple[str, int], ...]) -> tuple[Choice, ...]:
        """Return the choices to test for a target: contiguous blocks first, then strided ones and sections of unequal
        sizes."""
        if not isinstance(target, str):
            return (choice_of(target),)
        found: list[Choice] = [Split(target)]
        size = self.size(target, sizes)
        outer = next((o for o in range(2, size) if size % (o * parts) == 0), None)
        if self.guards.outers and outer is not None:
            found.append(Split(target, outer))
        if self.guards.sections and size % parts == 0 and size >= 2 * parts:
            first = parts * max(size // parts // 3, 1)
            found.append(Split(target, sections=(first, size - first)))
        return tuple(found)

    def small(self, target: Target) -> Iterator[SplitCase]:
        """Yield cases with shards of size 1, of one element in all, and with each other identifier of size 1."""
        bound, split, choice = self.base.signature.bound, split_by(target), choice_of(target)
        assert bound is not None and split is not None
        if not self.drawn and not self.runner.given:
            size = bound.sizes[split]
            if max(self.guards.parts) < size <= 6:
                for inputs in self.draws((), 1):
                    yield SplitCase(inputs, (choice,), (size,))
            return
        full = dict(self.sizes_for([target]))
        together = bound.tied.get(split, (split,))
        tables = (full, dict.fromkeys(bound.sizes, 1)) if self.users else (full,)
        for parts, others in product(self.guards.parts[:2], tables):
            ones = {**others, **{name: parts * (1 + i) for i, name in enumerate(together)}}
            for inputs in self.draws(tuple(ones.items()), DRAWS if self.users else 1):  # one may show nothing
                yield SplitCase(inputs, (choice,), (parts,))
        yield from self.ones(target)

    def ones(self, target: Target) -> Iterator[SplitCase]:
        """Yield cases in which each other identifier has size 1."""
        bound = self.base.signature.bound
        assert bound is not None
        if not self.drawn and not self.runner.given:
            return
        full, split = dict(self.sizes_for([target])), split_by(target)
        together = () if split is None else bound.tied.get(split, (split,))
        for other in [n for n in bound.sizes if n not in together][:6]:
            for inputs in self.draws(tuple({**full, other: 1}.items()), 1):
                yield SplitCase(inputs, (choice_of(target),), (self.guards.parts[0],))

    def low(self, target: Target, draws: Sequence[Inputs]) -> Iterator[SplitCase]:
        """Yield cases in narrower dtypes, where the operator runs in them."""
        inputs = draws[min(1, len(draws) - 1)]
        for dtype in USERS_LOW if self.users else LOW:
            other = replace(inputs, dtype=dtype)
            try:
                self.runner.prepare(other)
            except (WholeRaised, AnnotationError):
                continue
            for parts in self.guards.parts[:2]:
                yield SplitCase(other, (choice_of(target),), (parts,))

    def pairs(self, targets: Sequence[Target]) -> Iterator[tuple[tuple[Target, Target], SplitCase]]:
        """Yield two targets on a mesh of two axes, and one identifier over both of them."""
        chosen: list[tuple[Target, Target]] = [*combinations(targets, 2)]
        if len(chosen) > PAIRS:
            start = (self.seed * PAIRS) % len(chosen)
            chosen = [*chosen[start:], *chosen[:start]][:PAIRS]
        chosen += [(t, t) for t in targets if isinstance(t, str)]
        for pair in chosen:
            first, second = pair
            same = first == second
            draws = self.draws(self.sizes_for([first] if same else pair), 1)
            for inputs in draws:
                if same and isinstance(first, str):
                    yield pair, SplitCase(inputs, (Split(first, 2), Split(first)), (3, 2))
                    continue
                yield pair, SplitCase(inputs, (choice_of(first), choice_of(second)), NESTED)


def enumerate_cases(spec: OperatorSpec, options: OpOptions | None = None) -> Iterator[tuple[OperatorRunner, SplitCase]]:
    """Yield every case of an operator, with the runner that runs it. Raises Unusable."""
    runner = OperatorRunner(spec, options or OpOptions())
    for base in bases(runner):
        enumerator = Enumerator(runner, base)
        for target in base.targets:
            for case in enumerator.singles(target):
                yield runner, case
        if runner.options.safeguards.pairs:
            for _, case in enumerator.pairs(base.targets):
                yield runner, case


__all__ = ["Base", "Enumerator", "Target", "Unusable", "bases", "enumerate_cases"]
