"""Which modules of a program are trained and compared."""

from dataclasses import dataclass

from torch import nn

from verify.external.observe_rank_run import modules_of


@dataclass
class Trainer:
    model: nn.Module
    head: nn.Module
    again: tuple


def test_a_module_that_is_reached_twice_is_returned_once():
    part = nn.Linear(2, 2)
    assert modules_of([part, {"same": part}]) == (part,)


def test_a_part_of_another_module_is_left_out():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert modules_of(Trainer(model, model[1], (model,))) == (model,)
