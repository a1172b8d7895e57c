"""Which parameters rest in shards, and along which dim."""

from __future__ import annotations

import pytest
import torch

from nnscaler.errors import NnscalerError
from nnscaler.ir.operation_annotations import signatures
from nnscaler.ir.operation_placement import Rest
from nnscaler.layout import INVARIANT, Layout, Sharded
from nnscaler.tracing import trace
from nnscaler.transform.apply import apply_plan
from nnscaler.transform.plan import Plan, RestStep
from nnscaler.transform.zero_sharded_parameters import sharded_at_rest


@pytest.mark.parametrize(
    ("layout", "sizes", "shape", "made"),
    [
        ((INVARIANT, INVARIANT), (2, 1), (6, 4), Sharded(0)),
        ((INVARIANT, INVARIANT), (4, 1), (6, 4), Sharded(1)),  # the first dim that divides
        ((INVARIANT, Sharded(0)), (2, 2), (8, 4), Sharded(1)),  # one that no other axis cuts
        ((INVARIANT, Sharded(0)), (2, 2), (8,), Sharded(0, outer=2)),  # inside of the other axis's shards
        ((INVARIANT, Sharded(0, outer=3)), (2, 2), (24,), Sharded(0, outer=6)),
        ((INVARIANT, INVARIANT), (3, 1), (7, 5), Sharded(0, sizes=(3, 2, 2))),  # nothing divides
        ((INVARIANT, Sharded(0)), (3, 2), (8, 7), Sharded(1, sizes=(3, 2, 2))),
        ((INVARIANT, INVARIANT), (3, 1), (2,), INVARIANT),  # too small
        ((INVARIANT, INVARIANT), (2, 1), (), INVARIANT),
    ],
)
def test_the_dim_that_is_cut(layout: Layout, sizes: tuple[int, ...], shape: tuple[int, ...], made: object) -> None:
    assert sharded_at_rest(layout, 0, sizes, shape) == (made, *layout[1:])


class Two(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 6), torch.nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)).sum()


def _rests(*steps: RestStep) -> dict[str, dict[str, Rest]]:
    graph = trace(Two(), (torch.randn(4, 4),)).graph
    made = apply_plan(graph, dict(signatures(graph)), Plan((("dp", 2),), steps))
    return {graph.tensors[name].fqns[0]: dict(axes) for name, axes in made.at_rest.items()}


def test_parameters_are_named_by_themselves_by_modules_and_by_globs() -> None:
    assert set(_rests(RestStep(("first",)))) == {"first.weight", "first.bias"}
    found = _rests(RestStep(("*.bias", "second.weight")))
    assert found == {name: {"dp": Rest(3)} for name in ("first.bias", "second.weight", "second.bias")}
    assert _rests(RestStep(("first.bias",), zero=1)) == {"first.bias": {"dp": Rest(1)}}
    assert _rests(RestStep(("first.bias",), zero=2, owned=True)) == {"first.bias": {"dp": Rest(2, True)}}
    with pytest.raises(NnscalerError, match="'third', which is no parameter"):
        _rests(RestStep(("third",)))
    with pytest.raises(NnscalerError, match="a rest step names axis 'tp'"):
        _rests(RestStep(("*",), "tp"))
