"""A sum of tensors over ranks that read each other's memory, as if they were one, without laying them together.

Gradients of 3 and 5 elements on two ranks make up 8 elements together. The first rank sums the first 4 of them: it
reads all of the first gradient, and one element of the second, where these lie on the other rank, and adds them to its
own. Then each rank reads the other half, now summed, into its own gradients. A sum is taken in the order of the group,
so that its bits are those that one flat tensor would have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from nnscaler.runtime.communication.async_gloo import wait_for
from nnscaler.runtime.communication.cross_memory_attach import PeerMemory
from nnscaler.runtime.communication.torch_communicator_base import add_in_order

_CHUNK = 1 << 17  # bytes that are read and added at a time


def sum_in_place(
    peers: PeerMemory, rank: int, tensors: Sequence[Tensor], ranks: Sequence[int], tag: Callable[[int], int]
) -> None:
    """Sum tensors of one dim over ranks, in place. Every one of the ranks calls it with tensors of the same sizes.

    `rank`: this one; `tag`: of the messages with a rank.
    """
    parts = dict(zip(ranks, _divided(tensors, len(ranks)), strict=True))
    others = {other: tag(other) for other in ranks if other != rank}
    own = parts[rank]
    offers = [peers.send(parts[other], other, name) for other, name in others.items() if parts[other]]
    if own:
        _add_up(peers, own, [None if each == rank else (each, others[each]) for each in ranks])
    wait_for(offers)
    arriving = [peers.recv(parts[other], other, name) for other, name in others.items() if parts[other]]
    leaving = [peers.send(own, other, name) for other, name in others.items() if own]
    wait_for([*arriving, *leaving])


def _add_up(peers: PeerMemory, own: Sequence[Tensor], order: Sequence[tuple[int, int] | None]) -> None:
    """Add to this rank's part what the others have in its place. What is read is added while it is in the processor's
    cache. `order`: rank and tag, in the order of the sum; None: this rank."""
    most = _CHUNK // own[0].element_size()
    sources = [None if each is None else peers.recv(own, *each) for each in order]
    memory = [None if source is None else own[0].new_empty(most) for source in sources]
    places = [[] if source is None else source.addresses() for source in sources]
    for chunk in _chunks(own, most):
        pieces, lengths = [piece for _, _, piece in chunk], [piece.numel() for _, _, piece in chunk]
        parts: list[Sequence[Tensor]] = []  # of each rank, in the order of the sum
        for source, there, read in zip(sources, places, memory, strict=True):
            if source is None or read is None:
                parts.append(pieces)
                continue
            parts.append(read[: sum(lengths)].split(lengths))
            source.copy([there[number] + offset for number, offset, _ in chunk], parts[-1])
        for piece, summed in zip(pieces, zip(*parts, strict=True), strict=True):
            add_in_order(summed, piece)
    for source in sources:
        if source is not None:
            source.release()


def _divided(tensors: Sequence[Tensor], count: int) -> list[list[Tensor]]:
    """Divide what tensors make up together into so many parts, as `tensor_split` does: the first ones may be longer by
    one. None of their pieces is empty."""
    total = sum(tensor.numel() for tensor in tensors)
    lengths = [total // count + (part < total % count) for part in range(count)]
    parts: list[list[Tensor]] = [[]]
    for tensor in tensors:
        start = 0
        while start < tensor.numel():
            left = lengths[len(parts) - 1]
            if not left:
                parts.append([])
                continue
            piece = tensor[start : start + left]
            parts[-1].append(piece)
            start, lengths[len(parts) - 1] = start + piece.numel(), left - piece.numel()
    return parts + [[] for _ in range(count - len(parts))]


def _chunks(tensors: Sequence[Tensor], most: int) -> Iterator[list[tuple[int, int, Tensor]]]:
    """Go through tensors in chunks of at most so many elements: for each piece its tensor's number, the bytes before it
    there, and itself."""
    chunk: list[tuple[int, int, Tensor]] = []
    left = most
    for number, tensor in enumerate(tensors):
        start = 0
        while start < tensor.numel():
            piece = tensor[start : start + left]
            chunk.append((number, start * tensor.element_size(), piece))
            start, left = start + piece.numel(), left - piece.numel()
            if not left:
                yield chunk
                chunk, left = [], most
    if chunk:
        yield chunk
