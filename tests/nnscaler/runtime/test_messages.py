"""Pieces of one tensor between two ranks, as `Exchange` declares them."""

from __future__ import annotations

import torch
from torch import Tensor

from nnscaler.runtime import Exchange, Simulator, Stage
from nnscaler.runtime.stage_base_class import RunContext
from nnscaler.runtime.training.messages import Mail

WHOLE = (0, 4, 1)
STRIPES = tuple((0, 1, ((start, 6, 2), WHOLE), ((start * 3, start * 3 + 3, 1), WHOLE)) for start in (0, 1))
BACK = tuple((1, 0, there, here) for _, _, here, there in STRIPES)


class Producer(Stage):
    index = 0
    ranks = (0,)


class Consumer(Stage):
    index = 1
    ranks = (1,)


def test_strided_pieces_have_keys_of_their_own_and_come_back_in_place() -> None:
    value = torch.arange(24.0).view(6, 4)

    def run(communicator) -> tuple[Tensor, list[tuple[object, ...]]]:
        keys: list[tuple[object, ...]] = []
        communicator.listener = lambda call: keys.append(call.key)
        mail = Mail(communicator, torch.device("cpu"))
        stage = (Producer, Consumer)[communicator.rank](communicator.rank, RunContext())
        exchange = Exchange("h", 1 - stage.index, STRIPES, BACK, (6, 4))
        if stage.index == 0:
            mail.send_value(stage, exchange, value, 2)
            return mail.receive_gradient(stage, exchange, value.shape, value.dtype, 2), keys
        received = mail.receive_value(stage, exchange, torch.float32, 2)
        mail.send_gradient(stage, exchange, received * 10, 2)
        return received, keys

    (gradient, keys), (received, same_keys) = Simulator(2).run(run)
    assert torch.equal(received, torch.cat([value[0::2], value[1::2]]))
    assert torch.equal(gradient, value * 10)
    assert keys == same_keys == [("h", 0, 1, 2, phase, number) for phase in "FB" for number in (0, 1)]
