"""The search: exact on small graphs, the same for every layer, and independent of the number of layers in its work."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor, nn

from nnscaler.ir.graph import Graph
from nnscaler.ir.operation_annotations import Signature, signatures
from nnscaler.ir.operation_placement import Choice
from nnscaler.planning import beam_search_axis_choices as search
from nnscaler.planning.beam_search_axis_choices import Versions, cheapest_choices
from nnscaler.planning.plan_from_axes import _options
from nnscaler.tracing import trace


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(24)
        self.up, self.down = nn.Linear(24, 96, bias=False), nn.Linear(96, 24, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def traced(layers: int) -> tuple[Graph, dict[str, Signature]]:
    graph = trace(Stack(layers), {"x": torch.randn(6, 10, 24)}, self_check=False).graph
    return graph, dict(signatures(graph))


def cost(graph: Graph, known: dict[str, Signature], parts: int, chosen: dict[str, Choice]) -> int | None:
    """Return the cost of these choices, made one operation after the other; None where they cannot be made."""
    live: dict[str, Versions | None] = {}
    total = 0
    for op in graph.operations:
        outcome = search._outcome(graph, op, known[op.name], chosen[op.name], parts, live)
        if outcome is None:
            return None
        total += outcome.cost
        live.update(zip(op.inputs, outcome.inputs, strict=True))
        live.update((n, frozenset((s,))) for n, s in zip(op.outputs, outcome.outputs, strict=True) if n is not None)
    return total


@pytest.mark.parametrize("parts", [2, 3])
def test_it_is_the_cheapest_of_all(parts: int) -> None:
    graph, known = traced(1)
    options = _options(graph, known, parts, ())
    names = [op.name for op in graph.operations]
    every = (cost(graph, known, parts, dict(zip(names, c, strict=True))) for c in product(*(options[n] for n in names)))
    best = min(c for c in every if c is not None)
    assert cost(graph, known, parts, cheapest_choices(graph, known, parts, options)) == best


@pytest.mark.long
def test_equal_layers_get_equal_choices_and_are_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for layers in (12, 24):
        graph, known = traced(layers)
        calls = []
        advance = search._advance
        with monkeypatch.context() as patch:
            patch.setattr(search, "_advance", lambda *given, f=advance, c=calls: (c.append(1), f(*given))[1])
            chosen = cheapest_choices(graph, known, 2, _options(graph, known, 2, ()))
        counts.append(len(calls))
        inner = [
            [str(chosen[op.name]) for op in graph.operations if op.module.startswith(f"layers.{i}")]
            for i in range(3, layers - 3)
        ]
        assert all(layer == inner[0] for layer in inner)
    assert counts[1] == counts[0]
