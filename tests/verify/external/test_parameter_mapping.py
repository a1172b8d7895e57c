"""Which elements of the model a tensor of the program holds, found from values."""

import torch
from torch import nn

from verify.external.parameter_mapping import Lookup, StateMap


def _lookup(model: nn.Module) -> Lookup:
    return Lookup.of(StateMap.of(model), dict(model.named_parameters()))


def test_two_elements_of_one_value_are_told_apart_by_their_neighbours():
    model = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
    with torch.no_grad():
        for start, name in enumerate("ab"):
            model[name].weight.copy_(torch.arange(16.0).view(4, 4) + 100 * start)
        model["b"].weight[2, 1] = model["a"].weight[1, 3] = 7.5
        model["b"].weight[0, 0] = model["a"].weight[0, 0]
    lookup = _lookup(model)
    for start, name in ((0, "a"), (16, "b")):
        addresses, share = lookup.by_value(model[name].weight)
        assert share == 1.0
        assert addresses.tolist() == list(range(start, start + 16))
    addresses, share = lookup.by_value(model["b"].weight[2:, :2])  # runs of two
    assert addresses.tolist() == [24, 25, 28, 29]


def test_a_value_that_the_model_lacks_counts_against_the_share():
    model = nn.Linear(2, 2, bias=False)
    addresses, share = _lookup(model).by_value(torch.tensor([float(model.weight[0, 1]), 1234.0]))
    assert addresses[0] == 1
    assert share == 0.5


def test_a_value_that_stands_in_several_places_and_continues_no_run_is_not_found():
    model = nn.Linear(3, 2)
    nn.init.zeros_(model.bias)
    padded = torch.cat([model.weight.detach().flatten()[:5], torch.zeros(1)])
    addresses, share = _lookup(model).by_value(padded)
    assert addresses[:5].tolist() == list(range(5))
    assert share == 5 / 6
