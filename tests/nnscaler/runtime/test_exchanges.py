"""Collectives of one round of messages: what is sent, in how many messages, and where it arrives."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nnscaler.runtime.communication.async_gloo import (
    SHARED_BYTES,
    OneRound,
    Outbox,
    gathering,
    post,
    summing,
)
from nnscaler.runtime.communication.communicator import CommunicationCall
from nnscaler.runtime.training.gradients.buckets import SumBucket

Box = tuple[int, int, str]  # source, destination, agreement


class Line:
    """Messages between ranks of this process: memory is read when it is waited for, as gloo may do."""

    def __init__(self) -> None:
        self.sent: dict[Box, deque[Tensor]] = {}
        self.count = 0

    def post(self, rank: int, exchanges: list[OneRound]) -> None:
        post(
            exchanges,
            lambda call: f"{call.kind} {call.shapes} {call.dtype}",
            lambda memory, peer, agreement: self._send(memory, (rank, peer, agreement)),
            lambda memory, peer, agreement: Received(self, memory, (peer, rank, agreement)),
            lambda *_: None,
            Outbox(),
        )

    def _send(self, memory: Tensor, box: Box) -> None:
        self.count += 1
        self.sent.setdefault(box, deque()).append(memory)


class Received:
    def __init__(self, line: Line, memory: Tensor, box: Box) -> None:
        self._line, self._memory, self._box = line, memory, box

    def wait(self) -> None:
        message = self._line.sent[self._box].popleft()
        assert message.shape == self._memory.shape and message.dtype == self._memory.dtype
        self._memory.copy_(message)


def call(kind: str, *shapes: tuple[int, ...]) -> CommunicationCall:
    return CommunicationCall(kind, (1, 0), shapes, begun=True)  # rank 1 is the first of the group


def test_a_gather_lies_in_the_order_of_the_group_and_in_views() -> None:
    line, wholes, begun = Line(), [torch.zeros(2, 4) for _ in range(2)], []
    for rank in range(2):
        made = gathering(call("all_gather", (2, 2)), torch.full((2, 2), rank + 1.0), wholes[rank].split(2, 1), rank)
        line.post(rank, [made])
        begun.append(made)
    for made in begun:
        made.wait()
    for whole in wholes:
        assert whole.tolist() == [[2.0, 2.0, 1.0, 1.0]] * 2


def test_a_sum_is_taken_in_the_order_of_the_group() -> None:
    """A cancellation shows the order: the first rank of the group is 1."""
    group, line, results, begun = (2, 0, 1), Line(), [torch.zeros(1) for _ in range(3)], []
    values = {2: 1e8, 0: -1e8, 1: 1.0}
    for rank in range(3):
        pieces = [torch.tensor([values[rank]]) for _ in group]
        made = summing(replace(call("reduce_scatter", (1,)), ranks=group), pieces, results[rank], rank)
        line.post(rank, [made])
        begun.append(made)
    for made in begun:
        made.wait()
    assert [r.item() for r in results] == [1.0] * 3  # 1e8 + 1 would have lost it


@pytest.mark.parametrize("large", [0, 1, 2])
def test_what_begins_together_shares_messages_with_what_is_small(large: int) -> None:
    sizes = [SHARED_BYTES // 4 + 1] * large + [3, 5, 0]
    line, begun, wholes = Line(), [], {}
    for rank in range(2):
        together = []
        for number, size in enumerate(sizes):
            dtype = torch.float64 if number % 2 else torch.float32
            wholes[rank, number] = torch.zeros(2, size, dtype=dtype)
            own = torch.full((size,), 10.0 * rank + number, dtype=dtype)
            made = replace(call("all_gather", (size,)), dtype=dtype)
            together.append(gathering(made, own, list(wholes[rank, number]), rank))
        line.post(rank, together)
        begun += reversed(together)  # waited for in any order
    assert line.count == 2 * (large + 1)
    for made in begun:
        made.wait()
    for (_, number), whole in wholes.items():
        assert whole.tolist() == [[10.0 + number] * sizes[number], [float(number)] * sizes[number]]


def test_collectives_of_several_groups_may_begin_together() -> None:
    line, results, begun = Line(), {}, []
    groups = {0: [(0, 1), (0, 2)], 1: [(0, 1)], 2: [(0, 2)]}
    for rank, own in groups.items():
        together = []
        for group in own:
            into = results[rank, group] = torch.zeros(2, 1)
            made = replace(call("all_gather", (1,)), ranks=group)
            together.append(gathering(made, torch.tensor([float(rank)]), list(into), rank))
        line.post(rank, together)
        begun += together
    for made in begun:
        made.wait()
    for (_, group), into in results.items():
        assert into.flatten().tolist() == [float(rank) for rank in group]


def test_the_memory_of_a_bucket_serves_again_when_nothing_of_it_is_held() -> None:
    bucket = SumBucket((0, 1), (), [(2,), (3, 2)], torch.float32, torch.device("cpu"))

    def place_of_step() -> int:
        bucket.begin()
        return bucket.place(1).data_ptr()

    first = place_of_step()
    assert place_of_step() == first == bucket.place(0).data_ptr() + 8  # and nothing but the bucket holds it
    view = bucket.place(0)[1:]
    second = place_of_step()
    assert second != first  # the view is held
    del view
    leaf = torch.nn.Parameter(torch.zeros(3, 2))
    leaf.grad = bucket.place(1).detach()
    third = place_of_step()
    assert third != second  # and so is a gradient
    leaf.grad = None
    assert place_of_step() == third
