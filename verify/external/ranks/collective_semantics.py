"""The semantics of collectives: check what the ranks of a group must agree on, and write results into their tensors.

Sums are taken in the order of the group, so that all ranks hold the same bits. Large tensors are worked on in blocks
that stay in a processor's cache while the terms of a sum are added, and the sum is copied to the ranks.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor

from nnscaler.runtime.communication.communicator import CommunicationCall, CommunicationError
from nnscaler.runtime.communication.simulator import disagreement

GroupKey = tuple[str, tuple[int, ...]]  # the name of a group, and its global ranks in its order


def disagreement_of(
    number: int, rank: int, call: CommunicationCall, other_rank: int, other: CommunicationCall
) -> str | None:
    """Describe how the calls of two ranks differ, the `number`-th of their group; None where they agree."""
    reason = disagreement(_comparable(call), _comparable(other))
    if reason is None:
        return None
    return f"{reason} (call {number} of the group):\n  rank {rank}: {call}\n  rank {other_rank}: {other}"


def _comparable(call: CommunicationCall) -> CommunicationCall:
    """Return a call with what must agree.

    Dims of size one do not matter, for a loss is a scalar here and a vector there. Shapes do not where ranks may
    lawfully give different ones: there, what one gives is compared with what another takes.
    """
    if call.kind in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"):
        return replace(call, shapes=())
    return replace(call, shapes=tuple(tuple(size for size in shape if size != 1) for shape in call.shapes))


# Results.


_BLOCK = 1 << 15  # elements


@dataclass(frozen=True)
class CollectiveShare:
    """One rank's share of a collective.

    rank     global
    call     that it makes
    inputs   by item of a coalesced call: the tensor that it gives, or one for each rank of the group
    outputs  by item: the tensor that it takes, or one from each rank
    factor   of a sum of products with it ("premul_sum"), else 1
    watch    the program may change its inputs before it waits for the result, which would be a mistake
    """

    rank: int
    call: CommunicationCall
    inputs: tuple[tuple[Tensor, ...], ...] = ()
    outputs: tuple[tuple[Tensor, ...], ...] = ()
    factor: float | Tensor = 1.0
    watch: bool = False

    @property
    def given_bytes(self) -> int:
        """Return the bytes that the rank gives."""
        return sum(tensor.numel() * tensor.element_size() for item in self.inputs for tensor in item)


def answer(parts: Sequence[CollectiveShare], root: int | None) -> None:
    """Write the results of a collective. `parts` are in the order of the group, `root` is a place in it.

    Raises CommunicationError where what one rank gives is not what another takes.
    """
    kind = parts[0].call.kind
    if kind == "barrier":
        return
    with torch.no_grad():
        for item in range(max(max(len(part.inputs), len(part.outputs)) for part in parts)):
            _ANSWERS[kind](parts, item, root or 0)


def _all_reduce(parts: Sequence[CollectiveShare], item: int, _: int) -> None:
    tensors = [part.outputs[item][0] for part in parts]
    reducer = _Reducer(parts)
    for blocks in _blocks(tensors):
        reducer.reduce(blocks, blocks[0])
        for block in blocks[1:]:
            block.copy_(blocks[0])


def _reduce(parts: Sequence[CollectiveShare], item: int, root: int) -> None:
    target = parts[root].outputs[item][0]
    reducer = _Reducer(parts)
    for blocks in _blocks([*(part.inputs[item][0] for part in parts), target]):
        reducer.reduce(blocks[:-1], blocks[-1])


def _reduce_scatter(parts: Sequence[CollectiveShare], item: int, _: int) -> None:
    reducer = _Reducer(parts)
    for place, part in enumerate(parts):
        (target,) = part.outputs[item]
        given = [other.inputs[item][place] for other in parts]
        for source, tensor in enumerate(given):
            _check_fit(parts[source], tensor, part, target)
        for blocks in _blocks([*given, target]):
            reducer.reduce(blocks[:-1], blocks[-1])


def _all_gather(parts: Sequence[CollectiveShare], item: int, _: int) -> None:
    for source, sender in enumerate(parts):
        (given,) = sender.inputs[item]
        targets = [part.outputs[item][source] for part in parts]
        for part, target in zip(parts, targets, strict=True):
            _check_fit(sender, given, part, target)
        for block, *copies in _blocks([given, *targets]):
            for copy in copies:
                if copy.data_ptr() != block.data_ptr():
                    copy.copy_(block)


def _all_to_all(parts: Sequence[CollectiveShare], item: int, _: int) -> None:
    for place, part in enumerate(parts):
        for source, target in enumerate(part.outputs[item]):
            _copy(parts[source], parts[source].inputs[item][place], part, target)


def _broadcast(parts: Sequence[CollectiveShare], item: int, root: int) -> None:
    for part in parts:
        _copy(parts[root], parts[root].inputs[item][0], part, part.outputs[item][0])


def _scatter(parts: Sequence[CollectiveShare], item: int, root: int) -> None:
    for place, part in enumerate(parts):
        _copy(parts[root], parts[root].inputs[item][place], part, part.outputs[item][0])


def _gather(parts: Sequence[CollectiveShare], item: int, root: int) -> None:
    for source, target in enumerate(parts[root].outputs[item]):
        _copy(parts[source], parts[source].inputs[item][0], parts[root], target)


_ANSWERS: dict[str, Callable[[Sequence[CollectiveShare], int, int], None]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "scatter": _scatter,
    "gather": _gather,
}


def _copy(sender: CollectiveShare, given: Tensor, receiver: CollectiveShare, target: Tensor) -> None:
    _check_fit(sender, given, receiver, target)
    if given.data_ptr() != target.data_ptr() or given.stride() != target.stride():
        target.data.copy_(given if given.shape == target.shape else given.reshape(target.shape))


def _check_fit(sender: CollectiveShare, given: Tensor, receiver: CollectiveShare, target: Tensor) -> None:
    if given.numel() != target.numel() or given.dtype != target.dtype:
        raise CommunicationError(
            f"rank {sender.rank} gives {_kind(given)} where rank {receiver.rank} takes {_kind(target)}:"
            f"\n  rank {sender.rank}: {sender.call}\n  rank {receiver.rank}: {receiver.call}"
        )


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _blocks(tensors: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """Cut tensors of one size into blocks, side by side; as they are where one of them does not lie in a piece.

    What is written to a block is no change that autograd sees.
    """
    if any(tensor.layout is not torch.strided for tensor in tensors):
        return [tuple(tensors)]  # a write to a sparse tensor gives it other memory: it must be the tensor itself
    values = [tensor.data for tensor in tensors]
    if not all(value.is_contiguous() for value in values):
        return [tuple(value if value.shape == values[0].shape else value.reshape(values[0].shape) for value in values)]
    flat = [value.view(-1) for value in values]
    if flat[0].numel() <= _BLOCK:
        return [tuple(flat)]
    return list(zip(*(value.split(_BLOCK) for value in flat), strict=True))


class _Reducer:
    """The reduction that the ranks ask for."""

    def __init__(self, parts: Sequence[CollectiveShare]) -> None:
        self.name = parts[0].call.reduction.partition(" ")[0]
        self.factors = [part.factor for part in parts]
        self.count = len(parts)

    def reduce(self, terms: Sequence[Tensor], target: Tensor) -> None:
        """Write the reduction of the terms to `target`, which may be one of them."""
        sparse = target.layout is not torch.strided
        if sparse or len(terms) == 1 or any(target.data_ptr() == term.data_ptr() for term in terms[1:]):
            target.copy_(self._apart(terms))
            return
        if self.name in ("sum", "avg"):
            torch.add(terms[0], terms[1], out=target)
            for term in terms[2:]:
                target.add_(term)
            if self.name == "avg":
                target.div_(self.count)
            return
        target.copy_(self._apart(terms))

    def _apart(self, terms: Sequence[Tensor]) -> Tensor:
        if self.name in ("sum", "avg"):
            total = reduce(operator.add, terms)
            return total / self.count if self.name == "avg" else total
        if self.name == "premul_sum":
            return reduce(operator.add, (term * factor for term, factor in zip(terms, self.factors, strict=True)))
        return reduce(_BINARY[self.name], terms)


_BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "product": operator.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
