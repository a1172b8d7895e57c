"""Dims along which a tensor has the same value everywhere: all pieces of one length are then the same piece, and it
does not matter how such a dim was cut.

That a dim is uniform follows from annotations, without a table of operators. An identifier that may be split into as
many parts as it has elements says that the operator works on each of them by itself. Where the operands that have the
identifier are uniform along it (or none has it, as in `zeros`, or where a dim is expanded), and the call of every part
is the same (which that of `arange` is not), every part gives the same result.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from math import prod

from op_registry.annotation.bind_sizes import BoundOperand
from op_registry.bind_and_localise_call import localise
from op_registry.rank_expression import depends_on_rank
from op_registry.spec import Refusal

from nnscaler.ir.conversion_table_and_paths import shape_of_rank
from nnscaler.ir.derive_operand_layouts import is_legal, output_states, shards_of
from nnscaler.ir.graph import Graph
from nnscaler.ir.operation_annotations import Signature
from nnscaler.ir.operation_placement import Split
from nnscaler.layout import INVARIANT, Invariant, Layout, Replicated, Sharded, State

Dims = frozenset[int]
NO_DIMS: Dims = frozenset()
_PART = "part"


def uniform_dims(graph: Graph, signatures: Mapping[str, Signature]) -> Mapping[str, Dims]:
    """Return the dims along which each tensor is uniform. One with a gradient has none: that may differ everywhere."""
    found: dict[str, Dims] = {}
    for op in graph.operations:
        made = uniform_outputs(signatures[op.name], tuple(found.get(name, NO_DIMS) for name in op.inputs))
        named = zip(op.outputs, made, strict=False)  # nothing is known of some operators
        found.update({n: dims for n, dims in named if n is not None and dims and not graph.tensors[n].needs_grad})
    return found


def uniform_outputs(signature: Signature, given: tuple[Dims, ...]) -> tuple[Dims, ...]:
    """Return the uniform dims of every output, from those of the inputs; nothing for an operator that is not known."""
    key = ("uniform", given)
    if key not in signature.memo:
        signature.memo[key] = _outputs(signature, given) if _is_known(signature) else ()
    found: tuple[Dims, ...] = signature.memo[key]
    return found


def _outputs(signature: Signature, given: tuple[Dims, ...]) -> tuple[Dims, ...]:
    assert signature.bound is not None
    operands = tuple(zip(signature.bound.inputs, given, strict=True))
    return tuple(
        NO_DIMS
        if operand is None
        else Dims(d for d in range(len(operand.dims)) if _is_uniform(signature, operand, d, operands))
        for operand in signature.bound.outputs
    )


def _is_known(signature: Signature) -> bool:
    """Return whether the call's annotation is tested with nnScaler, and the operator draws no random numbers.

    A user's operator has its claims tested as obligations of the lines that rely on them, and there is no line here. An
    operator that draws numbers draws them by their place.
    """
    spec = signature.spec
    return spec is not None and signature.bound is not None and not spec.random and spec.target is None


def _is_uniform(
    signature: Signature, operand: BoundOperand, dim: int, operands: Iterable[tuple[BoundOperand | None, Dims]]
) -> bool:
    bound = operand.dims[dim]
    if bound.concat:
        return False
    return all(
        factor.size == 1
        or (
            factor.identifier is not None
            and all(_spares(given, uniform, factor.identifier) for given, uniform in operands)
            and _is_same_for_every_part(signature, factor.identifier)
        )
        for factor in bound.factors
    )


def _spares(operand: BoundOperand | None, uniform: Dims, identifier: str) -> bool:
    """Return whether the operand is the same for every part of the identifier."""
    dims = enumerate(operand.dims) if operand is not None else ()
    return all(number in uniform or all(f.identifier != identifier for f in dim.factors) for number, dim in dims)


def _is_same_for_every_part(signature: Signature, identifier: str) -> bool:
    key = ("same for every part", identifier)
    if key not in signature.memo:
        signature.memo[key] = _one_call(signature, identifier)
    return bool(signature.memo[key])


def _one_call(signature: Signature, identifier: str) -> bool:
    """Return whether the identifier can be split into single elements, with one and the same call for each."""
    assert signature.bound is not None and signature.spec is not None
    parts, choice = signature.bound.sizes[identifier], Split(identifier)
    alone = len(signature.bound.tied[identifier]) == 1 and signature.bound.marks[identifier] == ""
    if not alone or not is_legal(signature, choice, parts):
        return False
    axes = ((_PART, parts),)
    states = output_states(signature, choice, len(signature.call.outputs))
    shapes = [
        None if output is None else shape_of_rank((state,), axes, output.shape)
        for output, state in zip(signature.call.outputs, states, strict=True)
    ]
    try:
        call = localise(signature.spec, signature.call, shards_of(signature, (choice,), axes), shapes)
    except Refusal:
        return False
    return not depends_on_rank((call.args, call.kwargs))


def same_piece(one: State, other: State, uniform: Dims) -> bool:
    """Return whether two legal states hold the same pieces: cuts of a uniform dim into pieces of the same lengths."""
    if one == other:
        return True
    if not isinstance(one, Sharded) or not isinstance(other, Sharded):
        return False
    return one.dim == other.dim and one.dim in uniform and _lengths(one) == _lengths(other)


def _lengths(state: Sharded) -> tuple[int, ...]:
    """Return the lengths of the pieces; nothing where all are equal."""
    return tuple(size * state.outer for size in state.sizes)


def equal_layouts(layout: Layout, uniform: Dims, sizes: Sequence[int]) -> Iterator[Layout]:
    """Yield the layouts in which every rank holds the same piece as in this one, which is the first: with equal cuts of
    uniform dims over other axes, into as many parts. `sizes`: of the axes. A line that makes zeros of a shard's shape
    does not say which axis cut them."""
    if not uniform:
        yield layout
        return
    dim = min(uniform)
    for other in _cut_otherwise(layout, dim, sizes):
        yield from equal_layouts(other, uniform - {dim}, sizes)


def _cut_otherwise(layout: Layout, dim: int, sizes: Sequence[int]) -> Iterator[Layout]:
    yield layout
    cuts = [i for i, state in enumerate(layout) if isinstance(state, Sharded) and state.dim == dim]
    states = [layout[i] for i in cuts]
    if not cuts or any(isinstance(s, Sharded) and (s.sections or s.sizes) for s in states):
        return
    free = [i for i, s in enumerate(layout) if sizes[i] > 1 and (i in cuts or isinstance(s, Invariant | Replicated))]
    parts = prod(sizes[i] for i in cuts)
    for count in range(1, len(free) + 1):
        for taken in combinations(free, count):
            if list(taken) != cuts and prod(sizes[i] for i in taken) == parts:
                found = [INVARIANT if i in cuts else state for i, state in enumerate(layout)]
                for number, i in enumerate(taken):
                    found[i] = Sharded(dim, prod(sizes[j] for j in taken[:number]))
                yield tuple(found)
