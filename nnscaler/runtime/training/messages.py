"""Tensors that cross from one stage to another: activations forward, gradients backward.

A message is named (tensor key, producing stage, consuming stage, micro-batch, "F" or "B"), and its number among the
messages of the same two ranks where the meshes differ in shape. Messages of a rank to itself never leave it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from nnscaler.runtime.communication.communicator import Communicator, Key, ProgramError
from nnscaler.runtime.role import Exchange, Message, Receive, Send, Stage, as_index, piece_shape


class Mail:
    """The messages of one rank."""

    def __init__(self, communicator: Communicator, device: torch.device) -> None:
        self.communicator = communicator
        self.device = device
        self._own: dict[Key, deque[Tensor]] = {}

    def clear(self) -> None:
        self._own.clear()

    def _send(self, tensor: Tensor, destination: int, key: Key) -> None:
        if destination == self.communicator.rank:
            self._own.setdefault(key, deque()).append(tensor.detach())
        else:
            self.communicator.send(tensor, destination, key)

    def _receive(self, shape: tuple[int, ...], dtype: torch.dtype, source: int, key: Key) -> Tensor:
        if source != self.communicator.rank:
            return self.communicator.recv(shape, dtype, source, key).to(self.device)
        waiting = self._own.get(key)
        if not waiting:
            raise ProgramError(f"rank {source}: SCHEDULE runs the consumer of {key} before its producer")
        return waiting.popleft()

    def send_value(self, stage: Stage, send: Send | Exchange, value: Tensor, micro: int) -> None:
        key: Key = (send.key, stage.index, send.stage, micro, "F")
        if isinstance(send, Send):
            self._send(value, send.peers[_position(stage)], key)
        else:
            self._send_pieces(value, send.messages, key)

    def receive_value(self, stage: Stage, receive: Receive | Exchange, dtype: torch.dtype, micro: int) -> Tensor:
        key: Key = (receive.key, receive.stage, stage.index, micro, "F")
        if isinstance(receive, Receive):
            return self._receive(stage.local(receive.shape), dtype, receive.peers[_position(stage)], key)
        return self._receive_pieces(stage.local(receive.shape), dtype, receive.messages, key)

    def send_gradient(self, stage: Stage, receive: Receive | Exchange, gradient: Tensor, micro: int) -> None:
        """Send the gradient of a received value back to where the value came from."""
        key: Key = (receive.key, receive.stage, stage.index, micro, "B")
        if isinstance(receive, Receive):
            self._send(gradient, receive.peers[_position(stage)], key)
        else:
            self._send_pieces(gradient, receive.backward, key)

    def receive_gradient(self, stage: Stage, send: Send | Exchange, value: Tensor, micro: int) -> Tensor:
        """Receive the gradient of a sent value."""
        key: Key = (send.key, stage.index, send.stage, micro, "B")
        if isinstance(send, Send):
            return self._receive(tuple(value.shape), value.dtype, send.peers[_position(stage)], key)
        return self._receive_pieces(tuple(value.shape), value.dtype, send.backward, key)

    def _send_pieces(self, tensor: Tensor, messages: Sequence[Message], key: Key) -> None:
        for number, (source, destination, here, _) in _numbered(messages):
            if source == self.communicator.rank:
                self._send(tensor[as_index(here)], destination, (*key, number))

    def _receive_pieces(
        self, shape: tuple[int, ...], dtype: torch.dtype, messages: Sequence[Message], key: Key
    ) -> Tensor:
        whole = torch.zeros(shape, dtype=dtype, device=self.device)
        for number, (source, destination, _, here) in _numbered(messages):
            if destination == self.communicator.rank:
                whole[as_index(here)] = self._receive(piece_shape(here), dtype, source, (*key, number))
        return whole


def _position(stage: Stage) -> int:
    return stage.ranks.index(stage.rank)


def _numbered(messages: Sequence[Message]) -> Iterator[tuple[int, Message]]:
    """Yield each message with its number among those of the same source and destination."""
    seen: dict[tuple[int, int], int] = {}
    for message in messages:
        number = seen.get(message[:2], 0)
        seen[message[:2]] = number + 1
        yield number, message
