"""Pipelines of models without numbered layers: verified, and as even as their operations allow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import prod
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import verify
from nnscaler.errors import NnscalerError
from nnscaler.ir.graph import Graph
from nnscaler.ir.operation_annotations import signatures
from nnscaler.planning.plan_from_axes import stages_of
from nnscaler.tracing import trace
from nnscaler.transform.balanced_cuts_at_module_borders import balanced_cuts
from nnscaler.transform.partition_stages import SLACK, repeated_operations, work_of
from tests.sampling import every
from tests.traced_examples import traced

Load = Callable[[str], ModuleType]


class Attributes(nn.Module):
    """An MLP whose layers are plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(12, 28), nn.Linear(28, 20), nn.Linear(20, 24)
        self.fc4, self.fc5, self.fc6 = nn.Linear(24, 22), nn.Linear(22, 26), nn.Linear(26, 6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in (self.fc1, self.fc2, self.fc3, self.fc4, self.fc5):
            x = F.relu(layer(x))
        return F.mse_loss(self.fc6(x), y)


class InSequence(nn.Module):
    """An MLP in one `Sequential`."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (12, 28, 20, 24, 22, 26, 6)
        steps = [step for pair in pairwise(sizes) for step in (nn.Linear(*pair), nn.Tanh())]
        self.net = nn.Sequential(*steps[:-1])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.net(x), y)


class Towers(nn.Module):
    """Two towers that meet in a product: what the first one makes is sent past all of the second one."""

    def __init__(self) -> None:
        super().__init__()
        self.user_in, self.user_out = nn.Linear(12, 30), nn.Linear(30, 16)
        self.item_in, self.item_out = nn.Linear(6, 36), nn.Linear(36, 16)
        self.mix = nn.Linear(16, 6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        user = self.user_out(F.gelu(self.user_in(x)))
        item = self.item_out(F.gelu(self.item_in(y)))
        return F.mse_loss(self.mix(user * item), y)


class EncoderDecoder(nn.Module):
    """An encoder and a decoder of unlike blocks; every block of the decoder reads what the encoder made."""

    def __init__(self) -> None:
        super().__init__()
        self.encode_in, self.encode_out = nn.Linear(12, 40), nn.Linear(40, 20)
        self.start, self.gate, self.mix, self.last = (
            nn.Linear(6, 20),
            nn.Linear(40, 20),
            nn.Linear(40, 24),
            nn.Linear(44, 6),
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        memory = self.encode_out(F.gelu(self.encode_in(x)))
        h = self.start(y)
        h = torch.sigmoid(self.gate(torch.cat([h, memory], -1))) * h
        h = self.mix(torch.cat([h, memory], -1))
        return F.mse_loss(self.last(torch.cat([h, memory], -1)), y)


class OneHuge(nn.Module):
    """Nearly all of the work is one operation."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.huge, self.last = nn.Linear(12, 100), nn.Linear(100, 90), nn.Linear(90, 6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.last(F.relu(self.huge(F.relu(self.small(x))))), y)


class Three(nn.Module):
    """Three operations."""

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.only(x)).sum()


def inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"x": torch.randn(12, 12, generator=generator), "y": torch.randn(12, 6, generator=generator)}


def ranks_of(plan: str) -> int:
    return prod(int(axis.split("=")[1]) for axis in plan.split(",") if not axis.startswith("zero"))


ROWS = [
    (Attributes, "pp=2", None, 2),
    (Attributes, "pp=3", "gpipe", 4),
    (Attributes, "dp=2,tp=2,pp=2", None, 2),
    (Attributes, "pp=2", "interleaved", 2),
    (InSequence, "pp=3", None, 3),
    (Towers, "pp=2", None, 2),
    (Towers, "dp=2,pp=2,zero=3", None, 2),
    (EncoderDecoder, "pp=3", None, 3),
    (EncoderDecoder, "tp=2,pp=2", None, 2),
    (OneHuge, "pp=3", None, 2),
    (Three, "pp=3", None, 2),
]


@pytest.mark.parametrize(("model", "plan", "schedule", "micro_batches"), every(2, ROWS))
def test_a_pipeline_is_verified(model: type[nn.Module], plan: str, schedule: str | None, micro_batches: int) -> None:
    given = inputs() if model is not Three else {"x": inputs()["x"]}
    report = verify.verify_plan(
        model,
        given,
        ranks=ranks_of(plan),
        plan=plan,
        schedule=schedule,
        micro_batches=micro_batches,
        level="run",
        depth="quick",
    )
    assert report.exit_code == 0 and report.total > 10 and not report.findings, report.to_json()
    told = [note for note in report.notes if note.startswith("stages, each with its share")]
    stages = ranks_of("pp=" + plan.split("pp=")[1].split(",")[0]) * (2 if schedule == "interleaved" else 1)
    assert [note.count("|") + 1 for note in told] == ([] if model is InSequence else [stages])
    uneven = [note for note in report.notes if "would be even" in note]
    assert model is not OneHuge or ("alone has" in uneven[0] and "test_cut_anywhere.py:" in uneven[0])


@pytest.mark.long
@pytest.mark.parametrize("name", ["resnet", "unet"])
@pytest.mark.parametrize(
    ("plan", "schedule"), [("pp=2", None), ("pp=3", None), ("tp=2,pp=2", None), ("pp=2", "interleaved")]
)
def test_a_pipeline_of_an_example_is_verified(example: Load, name: str, plan: str, schedule: str | None) -> None:
    module = example(name)
    report = verify.verify_plan(
        module.build_model,
        module.sample_inputs(),
        ranks=ranks_of(plan),
        plan=plan,
        schedule=schedule,
        micro_batches=2,
        level="run",
    )
    assert report.exit_code == 0 and not report.findings, report.to_json()


def work_in(graph: Graph) -> list[float]:
    known, repeated = signatures(graph), repeated_operations(graph)
    return [work_of(graph, known, op) for op in graph.operations if op.name not in repeated]


def best(costs: Sequence[float], stages: int) -> float:
    """The least possible largest stage, whatever is sent."""
    places = range(1, len(costs))
    cuts = balanced_cuts(costs, places, places, [0] * len(places), stages)
    assert cuts is not None
    return max(sum(costs[start:end]) for start, end in pairwise([0, *cuts, len(costs)]))


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("name", ["resnet", "unet"])
def test_stages_are_as_even_as_operations_allow(name: str, stages: int) -> None:
    graph = traced(name).graph
    costs = work_in(graph)
    found = stages_of(graph, signatures(graph), stages, stages)
    assert sum(found.costs) == pytest.approx(sum(costs))
    assert max(found.costs) <= 1.2 * sum(costs) / stages
    assert max(found.costs) <= best(costs, stages) * (1 + SLACK)


@pytest.mark.parametrize("model", [Attributes, Towers, EncoderDecoder, OneHuge])
def test_stages_are_near_the_best_there_are(model: type[nn.Module]) -> None:
    graph = trace(model(), inputs(), self_check=False).graph
    costs = work_in(graph)
    for stages in (2, 3, 4):
        found = stages_of(graph, signatures(graph), stages, stages)
        assert max(found.costs) <= best(costs, stages) * (1 + SLACK)


def test_a_skip_crosses_where_a_cut_inside_of_blocks_would_be_dearer() -> None:
    graph = traced("resnet").graph
    found = stages_of(graph, signatures(graph), 2, 2)
    assert found.layers == ("stem .. narrow_b", "middle_a .. cross_entropy_loss")  # between blocks: one tensor is sent


def test_more_stages_than_operations_are_refused() -> None:
    with pytest.raises(NnscalerError, match="cannot be cut into 4 pipeline stages") as raised:
        verify.verify_plan(Three, {"x": inputs()["x"]}, ranks=4, plan="pp=4", micro_batches=2)
    assert raised.value.code == "plan_illegal" and "legal here is 3" in (raised.value.help or "")
    assert raised.value.where is not None and raised.value.where.text == "return F.relu(self.only(x)).sum()"
