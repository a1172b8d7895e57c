"""Patterns: a name, a module, a glob; a parameter where nothing else has that name."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nnscaler.tracing import trace
from nnscaler.transform.select_operations import select


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(6, 4)
        self.middle = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.middle(self.words(ids))).square().mean()


def names(*patterns: str) -> list[str]:
    graph = trace(Tied(), {"ids": torch.tensor([[1, 2, 5], [0, 3, 4]])}, self_check=False).graph
    return [op.operator for op in select(graph, patterns)]


def test_a_module_is_not_the_embedding_that_is_tied_to_it() -> None:
    assert names("head*") == ["aten.linear.default"]


def test_a_parameter_names_all_operations_that_read_it() -> None:
    assert names("words.weight") == ["aten.embedding.default", "aten.linear.default"]


def test_patterns_add_up_in_graph_order() -> None:
    assert names("head", "middle", "words") == ["aten.embedding.default", "aten.linear.default", "aten.linear.default"]


def test_an_operator_names_all_its_operations_where_nothing_else_is_named_so() -> None:
    assert names("aten.linear.default") == names("aten.lin*") == ["aten.linear.default", "aten.linear.default"]
    assert names("words", "aten.embed*") == ["aten.embedding.default"]
