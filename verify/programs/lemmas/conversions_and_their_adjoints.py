"""The rows of the conversion table: each is the linear map that the table says, and its backward is the adjoint.

Every row is run as rank programs run it, on every vector of a basis of what the ranks may hold: at that size, nothing
is left out. What comes out has to be a legal state (equal copies) of the same logical value, and, where the table
leaves a choice of partial sums, the one that it names.

The backward pass is run on every vector of a basis of what the ranks may be given. Pairings of values with gradients
are, in each of the four states, the inner product of the logical value with the logical gradient. The forward pass
leaves the logical value as it is, so the backward pass is the adjoint if and only if it leaves the logical gradient as
it is, in the state that the gradient of the source has.

Vectors lie side by side along a dim of their own, which shows that dims that are not cut are carried along, one by
one. A dim that is cut is (outer, parts, inner), or has sections, or blocks of unequal pieces; it is looked at with 2, 3
and 4 parts, with an outer of 1 and above, and with two elements and more in each shard, so that contiguous, strided and
reversed shards differ.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from math import prod
from typing import Any

import torch
from torch import Tensor

from nnscaler.ir.conversion_table_and_paths import ROWS
from nnscaler.layout import (
    INVARIANT,
    PARTIAL,
    REPLICATED,
    Invariant,
    Partial,
    Prefix,
    Replicated,
    Sharded,
    State,
    gradient_state,
)
from nnscaler.runtime.communication import differentiable_collectives as comm
from nnscaler.runtime.communication.differentiable_collectives import AxisGroup
from nnscaler.runtime.communication.simulator import SimulatedCommunicator, Simulator
from nnscaler.runtime.communication.token_slice_cache import KeptRows
from nnscaler.runtime.cut_tensors import pieces_of
from verify.evidence.inputs.cut_and_join_operands import gather, lay_of
from verify.programs.checks.input_and_outcome import CheckOutcome, outcome_of
from verify.programs.typing.lines.chunked_region_border import JOIN
from verify.results.finding import Finding
from verify.results.report import Check
from verify.results.verdict import Verdict

NAME = "conversions"
PARTS = (2, 3, 4)
UNEQUAL = (3, 2, 4, 5)  # sizes of shards, as many as there are parts
MAXIMUM = "all_reduce(max)"
APPEND = "append"  # what slices keep for each other
OF_SLICES = frozenset({APPEND, "own_rows"})  # over an axis in time alone
_PLAIN: Mapping[type, State] = {Invariant: INVARIANT, Replicated: REPLICATED, Partial: PARTIAL}


@dataclass(frozen=True)
class Conversion:
    """One use of a row: `arguments` after the tensor and the axis; `shape` of the logical tensor."""

    function: str
    source: State
    target: State
    arguments: tuple[Any, ...]
    shape: tuple[int, ...]
    parts: int

    @property
    def is_local(self) -> bool:
        """Return whether the row communicates neither way: what an axis in time can do."""
        row = ROWS.get((type(self.source), type(self.target)))
        return row is not None and row.forward is None and row.backward is None

    def __str__(self) -> str:
        return f"comm.{self.function}{self.arguments or '()'} from {self.source} to {self.target} in {self.parts} parts"


def check_rows(rows_used: Iterable[str], parts: Sequence[int] = PARTS) -> CheckOutcome:
    """Check these functions of `differentiable_collectives`. `parts`: the sizes of the axis that are tried.

    PROVED (bounded): for all values, at these numbers of parts. A function that the table does not have is REFUTED.
    """
    started = time.perf_counter()
    wanted = frozenset(rows_used)
    known = {row.function for row in ROWS.values()} | {JOIN}
    wrong = [f"the table has no row `{name}`" for name in sorted(wanted - known)]
    count = len(wrong)
    for size in parts:
        cases = list(conversions(wanted, size))
        for function in sorted(OF_SLICES & wanted):
            slices = list(of_slices(function, size))
            wrong += run_conversions(slices, size, in_time=True)
            count += len(slices)
        wrong += run_conversions(cases, size)
        count += len(cases)
        if JOIN in wanted:
            local = [case for case in cases if case.is_local]
            ends = list(joins(size))
            wrong += run_conversions(local, size, in_time=True) + run_conversions(ends, size, in_time=True)
            count += len(local) + len(ends)
        if "all_reduce" in wanted:
            count += 1
            wrong += _maxima(size)
    verdict = Verdict.REFUTED if wrong else Verdict.PROVED_BOUNDED if count else Verdict.INCONCLUSIVE
    detail = f"{len(wanted)} rows on all basis vectors, forward and backward, in {', '.join(map(str, parts))} parts"
    findings = tuple(Finding("operation_differs", text, cause="the runtime's conversion is wrong") for text in wrong)
    check = Check(NAME, verdict, count, len(wrong), time.perf_counter() - started, detail if count else "")
    return outcome_of(check, findings)


def conversions(functions: frozenset[str], parts: int) -> Iterator[Conversion]:
    """Yield all ways to cut for each row. Dims count from 1: the first one holds the vectors."""
    short, sizes = 2, UNEQUAL[:parts]
    cuts = (
        (Sharded(1), 4 * parts),
        (Sharded(1, 2), 4 * parts),
        (Sharded(1, 1, (parts, 3 * parts)), 4 * parts),
        (Sharded(2), 4 * parts),
        (Sharded(1, 1, (), sizes), sum(sizes)),
        (Sharded(1, 2, (), sizes), 2 * sum(sizes)),
        (Sharded(2, 1, (), sizes), sum(sizes)),
    )
    for (source, target), row in ROWS.items():
        if row.function not in functions or row.function in OF_SLICES:
            continue
        if source is Sharded and target is Sharded:
            yield from _exchanges(row.function, parts)
        elif source is Sharded or target is Sharded:
            for cut, long in cuts:
                shape = (2, long) if cut.dim == 2 else (long, short)
                given = (cut.dim, cut.outer, cut.sections, cut.sizes)
                before, after = (cut if s is Sharded else _PLAIN[s] for s in (source, target))
                yield Conversion(row.function, before, after, given, shape, parts)
        else:
            yield Conversion(row.function, _PLAIN[source], _PLAIN[target], (), (3, 2), parts)


def _exchanges(function: str, parts: int) -> Iterator[Conversion]:
    """Yield exchanges from one dim to another, and from one digit of a dim to a lower and to a higher one."""
    two_dims = ((1, 1, 2, 1), (2, 1, 1, 2), (1, 2, 2, 2))
    for from_dim, from_outer, to_dim, to_outer in two_dims:
        shape = (4 * parts, 2 * parts)
        ends = Sharded(from_dim, from_outer), Sharded(to_dim, to_outer)
        yield Conversion(function, *ends, (from_dim, to_dim, (from_outer, to_outer)), shape, parts)
    sizes, total = UNEQUAL[:parts], sum(UNEQUAL[:parts])
    for before, after, shape in (
        (Sharded(1, 1, (), sizes), Sharded(2, 2), (total, 2 * parts)),
        (Sharded(1), Sharded(2, 1, (), sizes), (2 * parts, total)),
        (Sharded(2, 2, (), sizes), Sharded(1, 1, (), sizes[::-1]), (total, 2 * total)),
    ):
        given = (before.dim, after.dim, (before.outer, after.outer), (before.sizes, after.sizes))
        yield Conversion(function, before, after, given, shape, parts)
    for low, high in ((1, parts), (2, 2 * parts)):
        for one, other in ((low, high), (high, low)):
            shape = (4 * parts * parts, 2)
            yield Conversion(function, Sharded(1, one), Sharded(1, other), (1, 1, (one, other)), shape, parts)


def of_slices(function: str, parts: int) -> Iterator[Conversion]:
    """Yield all ways in which slices keep rows for later ones, or take their own. They run forward in order, and then
    backward in reverse order, on an axis in time."""
    sizes = UNEQUAL[:parts]
    for dim, cut, long in ((1, (), 2 * parts), (2, (), 2 * parts), (1, sizes, sum(sizes)), (2, sizes, sum(sizes))):
        shape = (2, long) if dim == 2 else (long, 2)
        own, rows = Sharded(dim, 1, (), cut), Prefix(dim, cut)
        if function == APPEND:
            yield Conversion(function, own, rows, ("rows", dim, cut), shape, parts)
        else:
            yield Conversion(function, rows, own, (dim, cut), shape, parts)


def joins(parts: int) -> Iterator[Conversion]:
    """Yield all ways in which the results of the pieces of a region leave it: by rows to Invariant, made locally."""
    for case in conversions(frozenset(("all_reduce", "all_gather", "invariant")), parts):
        yield Conversion(JOIN, case.source, INVARIANT, (case.source,), case.shape, parts)


def run_conversions(cases: Sequence[Conversion], parts: int, in_time: bool = False) -> list[str]:
    """Return a description of every conversion that is wrong. All cases run in one job with a thread per rank.

    `in_time`: on an axis in time, whose pieces run one after another and have no communicator.
    """
    values = [_basis(case.source, case.shape, parts) for case in cases]
    gradients = [_basis(gradient_state(case.target), case.shape, parts) for case in cases]
    rows = [(c, v, g, max(len(v[0]), len(g[0]))) for c, v, g in zip(cases, values, gradients, strict=True)]

    def work(communicator: SimulatedCommunicator) -> list[tuple[Tensor, Tensor]]:
        rank = communicator.rank
        axis = AxisGroup("axis", parts, rank, tuple(range(parts)), communicator)
        return converted(axis, rank)

    def converted(axis: AxisGroup, rank: int) -> list[tuple[Tensor, Tensor]]:
        found = []
        for case, value, gradient, count in rows:
            leaf = _padded(value[rank], count).requires_grad_()
            result = getattr(comm, case.function)(leaf, axis, *case.arguments)
            (back,) = torch.autograd.grad(result, leaf, _padded(gradient[rank], count))
            found.append((result.detach()[: len(value[rank])], back[: len(gradient[rank])]))
        return found

    def of_pieces() -> list[list[tuple[Tensor, Tensor]]]:
        if cases and cases[0].function == JOIN:
            return _joined(rows, parts)
        if cases and cases[0].function == APPEND:
            return _appended(rows, parts)
        return [converted(AxisGroup("axis", parts, piece), piece) for piece in range(parts)]

    try:
        by_rank = of_pieces() if in_time else Simulator(parts).run(work)
    except Exception as error:  # noqa: BLE001 - whatever a conversion raises is what is wrong with it
        if len(cases) > 1:
            return [text for case in cases for text in run_conversions([case], parts, in_time)]
        return [f"{cases[0]} raises {type(error).__name__}: {error}"]
    wrong: list[str] = []
    for number, case in enumerate(cases):
        results, backs = ([ranks[number][side] for ranks in by_rank] for side in (0, 1))
        problem = _forward(case, values[number], results) or _backward(case, gradients[number], backs)
        if problem:
            wrong.append(f"{case}: {problem}")
    return wrong


# a case with each rank's vectors of values and of gradients, and the larger number of these
_Row = tuple[Conversion, Sequence[Tensor], Sequence[Tensor], int]


def _joined(rows: Sequence[_Row], parts: int) -> list[list[tuple[Tensor, Tensor]]]:
    """Return, by piece and case, what the join of all pieces makes (the same for each), and the piece's gradient."""
    by_piece: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(parts)]
    for case, value, gradient, count in rows:
        leaves = [_padded(v, count).requires_grad_() for v in value]
        axis = AxisGroup("axis", case.parts, 0)
        (result,) = comm.join(((leaf,) for leaf in leaves), axis, *case.arguments)
        given = _padded(gradient[0], count)
        backs = torch.autograd.grad(result, leaves, given, allow_unused=True)
        for number, back in enumerate(backs):
            back = torch.zeros_like(leaves[number]) if back is None else back
            made = (result.detach()[: len(value[number])], back[: len(gradient[number])])
            by_piece[number].append(made)
    return by_piece


def _appended(rows: Sequence[_Row], parts: int) -> list[list[tuple[Tensor, Tensor]]]:
    """Return, by slice and case, the rows up to its last one, and the gradient of its own."""
    by_slice: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(parts)]
    for case, value, gradient, count in rows:
        kept = KeptRows(case.parts)
        leaves = [_padded(v, count).requires_grad_() for v in value]
        made = [
            comm.append(leaf, AxisGroup("axis", case.parts, index, kept=kept), *case.arguments)
            for index, leaf in enumerate(leaves)
        ]
        for index in reversed(range(case.parts)):
            (back,) = torch.autograd.grad(made[index], leaves[index], _padded(gradient[index], count))
            result = made[index].detach()[: len(value[index])]
            by_slice[index].append((result, back[: len(gradient[index])]))
    return by_slice


def _basis(state: State, shape: tuple[int, ...], parts: int) -> list[Tensor]:
    """Return each rank's piece of a basis of the legal values in this state: `[vector, *local shape]` per rank."""
    count = prod(shape)
    unit = torch.eye(count, dtype=torch.float64).reshape(count, *shape)
    if isinstance(state, Partial):
        zeros = torch.zeros_like(unit)
        return [torch.cat([unit if other == rank else zeros for other in range(parts)]) for rank in range(parts)]
    if isinstance(state, Prefix) and state.terms:  # of each slice, for the rows up to its last one
        return _basis_of_terms(state, shape, parts)
    if isinstance(state, Sharded | Prefix):
        return [piece.contiguous() for piece in pieces_of(unit, state, parts)]
    return [unit] * parts


def _basis_of_terms(state: Prefix, shape: tuple[int, ...], parts: int) -> list[Tensor]:
    """Return each slice's piece of a basis of terms: in each vector, one slice has one element."""
    ends = state.ends(shape[state.dim - 1], parts)  # dims count from 1
    rows = [(*shape[: state.dim - 1], end, *shape[state.dim :]) for end in ends]
    units = [torch.eye(prod(local), dtype=torch.float64).reshape(prod(local), *local) for local in rows]
    found: list[Tensor] = []
    for index, local in enumerate(rows):
        zeros = [torch.zeros((len(unit), *local), dtype=torch.float64) for unit in units]
        found.append(torch.cat([unit if other == index else zeros[other] for other, unit in enumerate(units)]))
    return found


def _padded(vectors: Tensor, count: int) -> Tensor:
    """Pad with zero vectors to that number: one call then serves values and gradients."""
    zeros = vectors.new_zeros((count - len(vectors), *vectors.shape[1:]))
    return torch.cat([vectors, zeros])


def _logical(pieces: Sequence[Tensor], state: State, parts: int) -> Tensor | None:
    """Return the logical value; None where copies differ or shapes do not fit."""
    try:
        return gather(pieces, lay_of([state], [parts]), torch.equal)
    except (RuntimeError, ValueError):
        return None


def _forward(case: Conversion, values: Sequence[Tensor], results: Sequence[Tensor]) -> str:
    expected = _logical(values, case.source, case.parts)
    found = _logical(results, case.target, case.parts)
    if found is None:
        return "forward gives copies that are not equal"
    if expected is None or not torch.equal(found, expected):
        return "forward changes the logical value"
    if isinstance(case.target, Partial) and not isinstance(case.source, Sharded):
        if any(bool(r.any()) for r in results[1:]):
            return "forward keeps the value on another rank than the first"
    elif isinstance(case.target, Partial) and sum(map(torch.count_nonzero, results)) != torch.count_nonzero(expected):
        return "forward gives more than the shard at its place in zeros"
    return ""


def _backward(case: Conversion, gradients: Sequence[Tensor], backs: Sequence[Tensor]) -> str:
    expected = _logical(gradients, gradient_state(case.target), case.parts)
    found = _logical(backs, gradient_state(case.source), case.parts)
    if found is None:
        return "backward gives copies that are not equal"
    if expected is None or not torch.equal(found, expected):
        return "backward is not the adjoint"
    return ""


def _maxima(parts: int) -> list[str]:
    """Return the maximum over ranks, for every order of as many distinct values: it is decided by their order alone."""
    orders = torch.tensor(list(permutations(range(-1, parts - 1))), dtype=torch.float64)

    def work(communicator: SimulatedCommunicator) -> Tensor:
        rank = communicator.rank
        axis = AxisGroup("axis", parts, rank, tuple(range(parts)), communicator)
        return comm.all_reduce(orders[:, rank].clone(), axis, "max")

    found = Simulator(parts).run(work)
    right = all(torch.equal(f, torch.full_like(f, parts - 2)) for f in found)
    return [] if right else [f"comm.{MAXIMUM} in {parts} parts is not the maximum"]
