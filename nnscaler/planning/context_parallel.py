"""Context parallelism: the tokens are split over an axis, and attention passes its keys and values around.

The dim of the inputs that holds tokens is the one that reaches the rows of an attention through the annotations. All
else follows from it, as data parallelism follows from the batch dim. Where the order of tokens matters (a causal mask),
each rank has several blocks of the sequence, so that no rank has only late rows, which see most of the keys (striped
attention: Brandon et al., 2023).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from op_registry.annotation.splits import balanced

from nnscaler.errors import NnscalerError
from nnscaler.ir.derive_operand_layouts import around_axis, explain_illegal_choice, is_legal
from nnscaler.ir.graph import Graph
from nnscaler.ir.operation_annotations import Signature
from nnscaler.ir.placement import Choice, Split
from nnscaler.layout import SLICE, Sharded
from nnscaler.transform.propagate_choices import FollowAxis, follow
from nnscaler.transform.split_candidates import reach

BLOCKS = 8  # of the sequence on a rank, at most: the last rank then has an eighth more work than the average

LONG = 16384  # rows of attention, from which on the planner divides them

Signatures = Mapping[str, Signature]
Rings = Mapping[str, Split]  # by operation, how it passes its operands around


def context_parallel(
    graph: Graph,
    signatures: Signatures,
    axis: str,
    parts: int,
    made: Mapping[str, tuple[Choice, ...]],
    axes: Sequence[tuple[str, int]],
) -> tuple[Mapping[str, Choice], tuple[str, ...]]:
    """Return the choice of every operation on `axis`, and notes: which attentions gather their keys all the same.

    `made`: the choices on `axes`, with which the new ones must be legal together. Raises NnscalerError("plan_illegal")
    where the model has no attention that can pass its keys around, where its length cannot be divided, and where
    tokens are cut into slices in time as well.
    """
    slices = dict(axes).get(SLICE)
    if slices is not None:
        message = f"{axis}={parts} passes keys of all tokens around, and each of {slices} slices has a part of them"
        raise NnscalerError("plan_illegal", message, help=f"leave slices away, or {axis}: tp and dp go with slices")
    able = _able(graph, signatures, parts)
    dim = _token_dim(graph, signatures, parts, able)
    lengths = [_length(signatures[name], split.identifier) for name, split in able.items()]
    outer = _blocks(signatures, able, lengths, parts)
    rings = {name: _of_length(signatures[name], split, outer, parts) for name, split in able.items()}
    legal = {name: split for name, split in rings.items() if is_legal(signatures[name], split, parts)}
    if not legal:
        raise _indivisible(graph, signatures, rings, axis, parts)
    inputs = {
        t.name: Sharded(dim, outer, (), balanced(t.shape[dim], parts) if outer == 1 else ())
        for t in graph.with_role("input")
        if len(t.shape) > dim and t.shape[dim] % outer == 0 and t.shape[dim] >= outer * parts
    }
    choices = follow(graph, signatures, FollowAxis(axis, parts), inputs, legal, made, axes)
    notes = (
        f"{axis}: keys of {op.name} ({op.where}) are gathered, since its rows and columns are not cut alike"
        for op in graph.operations
        if op.name in rings and op.name not in legal
    )
    return choices, tuple(notes)


def contexts(graph: Graph, signatures: Signatures, ranks: int, permitted: Callable[[int], bool]) -> tuple[int, ...]:
    """Return how many ranks the planner lets share a sequence: 1, and where rows of attention are `LONG`, the powers of
    two that divide `ranks` and leave each rank a block; where constraints permit none of these, any number that they
    permit."""
    able = _rings(graph, signatures)
    longest = max((_length(signatures[name], split.identifier) for name, split in able.items()), default=0)
    twos = [2**i for i in range(ranks.bit_length()) if ranks % 2**i == 0 and longest % (BLOCKS * 2**i) == 0]
    found = tuple(twos) if longest >= LONG else (1,)
    if any(map(permitted, found)):
        return found
    return tuple(n for n in range(2, min(ranks, longest) + 1) if ranks % n == 0 and permitted(n)) or found


def _rings(graph: Graph, signatures: Signatures) -> Rings:
    """Return the operations that can pass operands around, and how."""
    found: dict[str, Split] = {}
    for op in graph.operations:
        signature = signatures[op.name]
        pairs = signature.spec.circulates if signature.spec is not None and signature.bound is not None else ()
        splits = (around_axis(signature, Split(first)) for first, _ in pairs if _has(signature, first))
        split = next((s for s in splits if s is not None), None)
        if split is not None:
            found[op.name] = split
    return found


def _has(signature: Signature, identifier: str) -> bool:
    return signature.bound is not None and identifier in signature.bound.sizes


def _able(graph: Graph, signatures: Signatures, parts: int) -> Rings:
    """Return the operations that can pass operands around. Raises NnscalerError where there is none."""
    found = _rings(graph, signatures)
    if found:
        return found
    specs = ((op, signatures[op.name]) for op in graph.operations)
    refused = next(((op, s.bound) for op, s in specs if s.spec is not None and s.spec.circulates), None)
    if refused is not None:
        op, bound = refused
        why = "" if bound is None else f": `{op.operator}` is annotated `{bound.text}` in this call"
        message = f"cp={parts}: no attention of the model can pass its keys around{why}"
        help = "attention with dropout draws from torch's generator: build the model with dropout 0, or drop cp"
        raise NnscalerError("plan_illegal", message, where=op.where, help=help)
    raise NnscalerError(
        "plan_illegal",
        f"cp={parts}: the model calls no attention whose keys can be passed around",
        help="call torch.nn.functional.scaled_dot_product_attention (in transformers: attn_implementation='sdpa') "
        "without dropout, which is drawn for all keys: build the model with dropout 0 in attention; or use tp or dp "
        "instead of cp",
    )


def _token_dim(graph: Graph, signatures: Signatures, parts: int, able: Rings) -> int:
    """Return the dim of the inputs that holds the rows of attention."""
    inputs = graph.with_role("input")
    for dim in range(1, max((len(t.shape) for t in inputs), default=0)):
        states = {
            t.name: Sharded(dim, 1, (), balanced(t.shape[dim], parts))
            for t in inputs
            if dim < len(t.shape) and t.shape[dim] >= parts
        }
        found = reach(graph, signatures, parts, states)
        if any(split.identifier == able[name].identifier for name in able for split in found[name]):
            return dim
    first = next(op for op in graph.operations if op.name in able)
    length = _length(signatures[first.name], able[first.name].identifier)
    shapes = ", ".join(f"{t.name} {list(t.shape)}" for t in inputs)
    raise NnscalerError(
        "plan_illegal",
        f"cp={parts}: no dim of the inputs after the first ({shapes}) reaches the {length} rows of {first.name} in "
        f"{parts} pieces",
        where=first.where,
        help=f"tokens are a dim of the inputs, of {parts} or more; or use tp or dp instead of cp",
    )


def _length(signature: Signature, identifier: str) -> int:
    assert signature.bound is not None
    return signature.bound.sizes[identifier]


def _blocks(signatures: Signatures, able: Rings, lengths: Sequence[int], parts: int) -> int:
    """Return how many blocks of the sequence each rank has; one where the order of rows does not matter."""
    specs = {name: signatures[name].spec for name in able}
    ordered = any(s is not None and able[name].identifier in s.contiguous for name, s in specs.items())
    options = range(BLOCKS, 1, -1) if ordered else ()
    return next((o for o in options if all(length % (o * parts) == 0 for length in lengths)), 1)


def _of_length(signature: Signature, split: Split, outer: int, parts: int) -> Split:
    sizes = balanced(_length(signature, split.identifier), parts) if outer == 1 else ()
    return Split(split.identifier, outer, (), sizes, split.circulating)


def _indivisible(graph: Graph, signatures: Signatures, rings: Rings, axis: str, parts: int) -> NnscalerError:
    op = next(op for op in graph.operations if op.name in rings)
    reason = explain_illegal_choice(signatures[op.name], rings[op.name], parts)
    return NnscalerError(
        "plan_illegal",
        f"{axis}={parts}: {op.name} cannot pass its keys around: {reason}",
        where=op.where,
        help=f"take a {axis} of which rows and columns have at least as many, or that divides both",
    )
