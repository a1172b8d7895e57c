"""Send and receive the tensors that cross from one stage to another: activations forward, gradients backward.

A message is named (tensor key, producing stage, consuming stage, micro-batch, "F" or "B"), and its number among the
messages of the same two ranks where the meshes differ in shape. Messages of a rank to itself never leave it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nnscaler.runtime.communication.communicator import Communicator, Key, Pending, ProgramError
from nnscaler.runtime.stage_base_class import Exchange, Message, Receive, Send, Stage, as_index, piece_shape


class Mail:
    """The messages of one rank."""

    def __init__(self, communicator: Communicator, device: torch.device) -> None:
        self.communicator = communicator
        self.device = device
        self._own: dict[Key, deque[Tensor]] = {}
        self._coming: dict[tuple[int, Key], tuple[Tensor, Pending]] = {}  # by source and key

    def clear(self) -> None:
        self._own.clear()
        self._coming.clear()

    # -- before a pass needs them ---------------------------------------------------------------------------------

    def expect_value(self, stage: Stage, receive: Receive | Exchange, dtype: torch.dtype, micro: int) -> None:
        """Begin to receive a value, for `receive_value`."""
        self._expect(_of_value(stage, receive, micro), dtype)

    def expect_gradient(
        self, stage: Stage, send: Send | Exchange, shape: torch.Size, dtype: torch.dtype, micro: int
    ) -> None:
        """Begin to receive the gradient of a sent value, for `receive_gradient`."""
        self._expect(_of_gradient(stage, send, shape, micro), dtype)

    def _expect(self, arriving: Arriving, dtype: torch.dtype) -> None:
        for shape, source, key, _ in arriving.messages(self.communicator.rank):
            if source != self.communicator.rank and self.communicator.receives_ahead(source):
                into = torch.empty(shape, dtype=dtype, device=self.device)
                self._coming[source, key] = into, self.communicator.start_recv(into, source, key)

    # -- in a pass ------------------------------------------------------------------------------------------------

    def _send(self, tensor: Tensor, destination: int, key: Key) -> None:
        if destination == self.communicator.rank:
            self._own.setdefault(key, deque()).append(tensor.detach())
        else:
            self.communicator.send(tensor, destination, key, lasting=True)

    def _receive(self, shape: tuple[int, ...], dtype: torch.dtype, source: int, key: Key) -> Tensor:
        if (source, key) in self._coming:
            into, pending = self._coming.pop((source, key))
            pending.wait()
            return into
        if source != self.communicator.rank:
            return self.communicator.recv(shape, dtype, source, key).to(self.device)
        waiting = self._own.get(key)
        if not waiting:
            raise ProgramError(f"rank {source}: SCHEDULE runs the consumer of {key} before its producer")
        return waiting.popleft()

    def send_value(self, stage: Stage, send: Send | Exchange, value: Tensor, micro: int) -> None:
        key: Key = (send.key, stage.index, send.stage, micro, "F")
        if (value if value._base is None else value._base).is_leaf:
            value = value.clone()  # it may show a parameter, which an update writes
        if isinstance(send, Send):
            self._send(value, send.peers[_position(stage)], key)
        else:
            self._send_pieces(value, send.messages, key)

    def receive_value(self, stage: Stage, receive: Receive | Exchange, dtype: torch.dtype, micro: int) -> Tensor:
        return self._arrived(_of_value(stage, receive, micro), dtype)

    def send_gradient(self, stage: Stage, receive: Receive | Exchange, gradient: Tensor, micro: int) -> None:
        """Send the gradient of a received value back to where the value came from."""
        gradient = gradient.clone()  # it may share memory with a parameter's gradient, to which more is added
        key: Key = (receive.key, receive.stage, stage.index, micro, "B")
        if isinstance(receive, Receive):
            self._send(gradient, receive.peers[_position(stage)], key)
        else:
            self._send_pieces(gradient, receive.backward, key)

    def receive_gradient(
        self, stage: Stage, send: Send | Exchange, shape: torch.Size, dtype: torch.dtype, micro: int
    ) -> Tensor:
        """Receive the gradient of a sent value of this shape."""
        return self._arrived(_of_gradient(stage, send, shape, micro), dtype)

    def _send_pieces(self, tensor: Tensor, messages: Sequence[Message], key: Key) -> None:
        for number, (source, destination, here, _) in _numbered(messages):
            if source == self.communicator.rank:
                self._send(tensor[as_index(here)], destination, (*key, number))

    def _arrived(self, arriving: Arriving, dtype: torch.dtype) -> Tensor:
        whole: Tensor | None = None
        for shape, source, key, place in arriving.messages(self.communicator.rank):
            piece = self._receive(shape, dtype, source, key)
            if place is None:
                return piece
            if whole is None:
                whole = torch.zeros(arriving.shape, dtype=dtype, device=self.device)
            whole[place] = piece
        return torch.zeros(arriving.shape, dtype=dtype, device=self.device) if whole is None else whole


@dataclass(frozen=True, slots=True)
class Arriving:
    """A tensor that arrives in messages.

    shape   of it
    pieces  from one rank, the whole; else the messages whose pieces make it up
    """

    key: Key
    shape: tuple[int, ...]
    pieces: int | tuple[Message, ...]

    def messages(self, rank: int) -> Iterator[tuple[tuple[int, ...], int, Key, tuple[slice, ...] | None]]:
        """Yield shape, source, key, and where it lies, of each message to the rank; None: it is the whole."""
        if isinstance(self.pieces, int):
            yield self.shape, self.pieces, self.key, None
            return
        for number, (source, destination, _, here) in _numbered(self.pieces):
            if destination == rank:
                yield piece_shape(here), source, (*self.key, number), as_index(here)


def _of_value(stage: Stage, receive: Receive | Exchange, micro: int) -> Arriving:
    key: Key = (receive.key, receive.stage, stage.index, micro, "F")
    pieces = receive.peers[_position(stage)] if isinstance(receive, Receive) else receive.messages
    return Arriving(key, stage.local(receive.shape), pieces)


def _of_gradient(stage: Stage, send: Send | Exchange, shape: torch.Size, micro: int) -> Arriving:
    key: Key = (send.key, stage.index, send.stage, micro, "B")
    return Arriving(key, tuple(shape), send.peers[_position(stage)] if isinstance(send, Send) else send.backward)


def _position(stage: Stage) -> int:
    return stage.ranks.index(stage.rank)


def _numbered(messages: Sequence[Message]) -> Iterator[tuple[int, Message]]:
    """Yield each message with its number among those of the same source and destination."""
    seen: dict[tuple[int, int], int] = {}
    for message in messages:
        number = seen.get(message[:2], 0)
        seen[message[:2]] = number + 1
        yield number, message
