"""Find the sizes of the inputs for which the proof of a program holds.

The first two dims of the inputs, batch and sequence in many models, are symbols; sizes of all other tensors follow from
the bound annotations, and every split and every factor of a dim is a condition. A symbol that has to have one value
somewhere is not generalised, and the result says where. What the lemmas prove is not said again here: a lemma that is
proved at bounded sizes holds at other sizes as far as that goes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from op_registry.registry import facts_of

from nnscaler.ir.graph import Graph, Operation
from nnscaler.ir.operation_annotations import Signature, signatures
from nnscaler.layout import MICRO
from verify.programs.lemmas.run_graph_at_other_sizes import rerun
from verify.programs.lemmas.size_conditions import (
    Divides,
    Followed,
    Shape,
    Simplified,
    follow,
    follows,
    of_factors,
    of_splits,
    place_of,
    simplify,
)
from verify.programs.lemmas.solve_size_equations import Conflict, join_names, named, number
from verify.programs.typing import Obligation

BATCH = "batch"
SEQUENCE = "sequence length"
TIMES = ((5, 3), (3, 7))  # multiples of the divisors at which the graph is run again
SHOWN = 8  # assumptions in the text


@dataclass(frozen=True)
class Symbol:
    """A size of the program that may vary.

    name     as the report writes it
    sample   its value in the sample
    divisor  all its values are multiples of it
    axes     the axes that require the divisor
    blocker  why it has to keep the sample's value; empty if it may vary
    """

    name: str
    sample: int
    divisor: int = 1
    axes: tuple[str, ...] = ()
    blocker: str = ""


@dataclass(frozen=True)
class SizesResult:
    """The sizes for which a program's proof holds.

    symbols      sizes that may vary, with their conditions
    others       conditions on several symbols, or with a remainder
    assumptions  numbers of the program that are taken for sizes, with their places
    as_far       a lemma of a user's operator that is not proved for all sizes; empty where there is none
    """

    symbols: tuple[Symbol, ...]
    others: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    as_far: str = ""

    @property
    def text(self) -> str:
        """`holds for every batch divisible by 8 (dp x micro) and every sequence length divisible by 2 (tp)`."""
        free = [s for s in self.symbols if not s.blocker]
        lines = [f"holds for {join_names(map(_every, free))}" if free else "holds for the sizes of the sample"]
        if self.others:
            lines[0] += f", with {join_names(self.others)}"
        if free and self.as_far:
            lines[0] += f", as far as this does: {self.as_far}"
        lines += [f"the {s.name} stays {s.sample}: {s.blocker}" for s in self.symbols if s.blocker]
        lines += self.assumptions[:SHOWN]
        if len(self.assumptions) > SHOWN:
            lines.append(f"and {len(self.assumptions) - SHOWN} more numbers are taken so")
        return "\n".join(lines)


def sizes_result(graph: Graph, obligations: Sequence[Obligation], at_sample: Sequence[str] = ()) -> SizesResult:
    """Return the sizes for which the obligations of a graph hold if they hold at the sample's. Does not raise.

    at_sample  lines of the program that were read with the sample's sizes, and may mean something else at others
    """
    known = signatures(graph)
    relied_on = _by_operation(graph, known, obligations)
    every = _symbols(graph)
    blocked: dict[str, str] = {}
    if at_sample:
        more = f", and {len(at_sample) - 1} more lines" if len(at_sample) > 1 else ""
        why = (
            f"{at_sample[0]}{more}: no operation of the model, and shown to do nothing at the sizes of the sample only"
        )
        blocked = dict.fromkeys(every, why)
    while True:
        samples = {name: size for name, (size, _) in every.items() if name not in blocked}
        try:
            return _attempt(graph, known, relied_on, every, samples, blocked)
        except Conflict as conflict:
            if not samples:  # nothing is left that could vary
                return SizesResult(tuple(Symbol(n, size, blocker=blocked[n]) for n, (size, _) in every.items()))
            new = [name for name in conflict.symbols if name in samples] or list(samples)
            blocked.update(dict.fromkeys(new, str(conflict)))


def _symbols(graph: Graph) -> dict[str, tuple[int, tuple[tuple[str, int], ...]]]:
    """symbol -> (its value in the sample, the (input, dim) that have it). Inputs of different lengths have one each."""
    inputs = [t for t in graph.tensors.values() if t.role == "input"]
    found: dict[str, tuple[int, tuple[tuple[str, int], ...]]] = {}
    for dim in (0, 1):
        by_size: dict[int, list[str]] = {}
        for tensor in inputs:
            if len(tensor.shape) > dim and tensor.shape[dim] > 1:
                by_size.setdefault(tensor.shape[dim], []).append(tensor.name)
        for size, names in by_size.items():
            meant = BATCH if dim == 0 else SEQUENCE if _are_tokens(graph, names) else ""
            name = meant if meant and meant not in found else f"{meant or 'size of dim 1'} of `{names[0]}`"
            found[name] = (size, tuple((n, dim) for n in names))
    return found


def _are_tokens(graph: Graph, names: Sequence[str]) -> bool:
    """Return whether one of these inputs is a batch of token sequences: rows of numbers that a table is read at, whole.

    The second dim of others may be features, channels or the height of an image.
    """
    rows = {graph.tensors[name].shape for name in names if len(graph.tensors[name].shape) == 2}
    return any(
        op.operator.startswith("aten.embedding.") and graph.tensors[op.inputs[1]].shape in rows
        for op in graph.operations
    )


def _by_operation(
    graph: Graph, known: Mapping[str, Signature], obligations: Sequence[Obligation]
) -> dict[str, list[Obligation]]:
    """Return the obligations that each operation's call may rely on: all that speak of such a call."""
    by_call: dict[str, list[Obligation]] = {}
    for obligation in obligations:
        by_call.setdefault(repr(obligation.signature.call), []).append(obligation)
    return {op.name: by_call.get(repr(known[op.name].call), []) for op in graph.operations}


def _attempt(
    graph: Graph,
    known: Mapping[str, Signature],
    relied_on: Mapping[str, Sequence[Obligation]],
    every: Mapping[str, tuple[int, tuple[tuple[str, int], ...]]],
    samples: Mapping[str, int],
    blocked: Mapping[str, str],
) -> SizesResult:
    """Return the result with these symbols. Raises Conflict."""
    followed = follow(graph, known, _inputs(graph, every, samples), samples)
    _check_numbers(graph, known, followed)
    free = [name for name in samples if name not in followed.unifier.solved]
    conditions = _conditions(graph, relied_on, followed)
    simplified = simplify(conditions, free)
    for condition in conditions:
        if not follows(condition, simplified.divisors, simplified.others):
            raise Conflict(
                condition.size.names, f"Z3 does not decide whether {condition}, which {condition.place} asks"
            )
    for values in _others(simplified, free, samples):
        _rerun(graph, known, relied_on, followed, {**samples, **values})
    symbols = [_symbol(name, size, followed, simplified, blocked) for name, (size, _) in every.items()]
    return SizesResult(tuple(symbols), tuple(map(str, simplified.others)), _assumptions(graph, followed, free, samples))


def _check_numbers(graph: Graph, known: Mapping[str, Signature], followed: Followed) -> None:
    """Raise Conflict where constants number the entries of a dim that may vary: they are those of the sample."""
    constant = {t.name for t in graph.with_role("constant")}
    for op in graph.operations:
        if op.inputs and constant.issuperset(op.inputs):
            constant.update(name for name in op.outputs if name is not None)
        bound = known[op.name].bound
        if not facts_of(op.operator).gathers or bound is None or constant.isdisjoint(op.inputs[1:]):
            continue
        kept = {f.identifier for o in bound.outputs if o is not None for dim in o.dims for f in dim.factors}
        read = {f.identifier for dim in (bound.inputs[0].dims if bound.inputs[0] else ()) for f in dim.factors}
        for name in sorted(name for name in read - kept if name is not None):
            if (size := followed.unifier.known(followed.identifiers[op.name][name])).names:
                raise Conflict(size.names, f"{place_of(op)} reads entries of it whose numbers are constants")


def _inputs(
    graph: Graph, every: Mapping[str, tuple[int, tuple[tuple[str, int], ...]]], samples: Mapping[str, int]
) -> dict[str, Shape]:
    at = {place: name for name, (_, places) in every.items() if name in samples for place in places}
    return {
        t.name: tuple(named(at[t.name, d]) if (t.name, d) in at else number(s) for d, s in enumerate(t.shape))
        for t in graph.tensors.values()
        if t.role == "input"
    }


def _conditions(graph: Graph, relied_on: Mapping[str, Sequence[Obligation]], followed: Followed) -> list[Divides]:
    found: dict[tuple[object, int, object], Divides] = {}
    for op in graph.operations:
        sizes, place = followed.identifiers[op.name], place_of(op)
        every = [*of_factors(sizes, followed.unifier, place)]
        for obligation in relied_on[op.name]:
            every += of_splits(obligation, sizes, followed.unifier, place)
        for condition in every:
            found.setdefault((condition.size, condition.modulus, condition.axes), condition)
    return list(found.values())


def _others(simplified: Simplified, free: Sequence[str], samples: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Yield other values that satisfy all conditions: of one symbol after the other, then of all of them."""
    for changed in (*([name] for name in free), list(free)) if free else ():
        for times in TIMES:
            values = {name: simplified.divisors[name] * times[i % 2] for i, name in enumerate(changed)}
            values = {name: v + simplified.divisors[name] * (v == samples[name]) for name, v in values.items()}
            if all(c.size.value({**samples, **values}) % c.modulus == 0 for c in simplified.others):
                yield values


def _rerun(
    graph: Graph,
    known: Mapping[str, Signature],
    relied_on: Mapping[str, Sequence[Obligation]],
    followed: Followed,
    values: Mapping[str, int],
) -> None:
    """Run the graph again, with conflicts named by the symbols that have other values."""
    try:
        rerun(graph, known, relied_on, followed, values)
    except Conflict as conflict:
        changed = frozenset(n for n, value in values.items() if value != followed.unifier.samples[n])
        raise Conflict(conflict.symbols & changed or changed, str(conflict)) from None


def _symbol(name: str, sample: int, followed: Followed, simplified: Simplified, blocked: Mapping[str, str]) -> Symbol:
    if name in blocked:
        return Symbol(name, sample, blocker=blocked[name])
    if name in followed.unifier.solved:
        return Symbol(name, sample, blocker=f"it is the {followed.unifier.known(named(name))} in all places")
    return Symbol(name, sample, simplified.divisors[name], simplified.axes[name])


def _every(symbol: Symbol) -> str:
    if symbol.divisor == 1:
        return f"every {symbol.name} above 1"
    names = ["micro-batches" if axis == MICRO else axis for axis in symbol.axes]
    axes = f" ({' x '.join(names)})" if names else ""
    return f"every {symbol.name} divisible by {symbol.divisor}{axes}"


def _assumptions(graph: Graph, followed: Followed, free: Sequence[str], samples: Mapping[str, int]) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for name, unknown in followed.unifier.unknowns.items():
        meant = followed.unifier.known(named(name))
        if meant.names & set(free):
            found[f"{unknown.sample} in {unknown.place} is taken for the {meant}"] = None
    for op in graph.operations:
        for value in _plain_numbers(op, {samples[name] for name in free}):
            found[f"{value} in {place_of(op)} is taken for a number of the model's own"] = None
    return tuple(found)


def _plain_numbers(op: Operation, values: set[int]) -> list[float]:
    """Return the arguments of pointwise operators that equal a symbol's value and are no size."""
    arguments = (*op.args, *(value for _, value in op.kwargs))
    return [
        a for a in arguments if isinstance(a, int | float) and not isinstance(a, bool) and a in values and op.inputs
    ]
