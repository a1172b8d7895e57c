"""Materialised communication: where tensors are stored, and which are converted and sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nnscaler.communication.communicated_graph import CommunicatedGraph, Convert, StageProgram
from nnscaler.communication.insert_conversions import materialise
from nnscaler.errors import NnscalerError
from nnscaler.ir.operation_annotations import signatures
from nnscaler.layout import INVARIANT, REPLICATED, Sharded
from nnscaler.tracing import trace
from nnscaler.transform.apply import apply_plan
from nnscaler.transform.plan import AssignStep, Plan, ReplicateStep, SplitStep, Step


class Tied(nn.Module):
    """One weight, used at both ends; a frozen weight and a buffer, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 6)
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 6)
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.register_buffer("scale", torch.rand(6))
        self.unused = nn.Parameter(torch.rand(3))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.frozen(self.table(ids)) * self.scale
        x = self.frozen(self.second(F.relu(self.first(x)))) * self.scale
        return F.cross_entropy(F.linear(x, self.table.weight), labels, reduction="sum")


@pytest.fixture(scope="module")
def tied() -> Any:
    torch.manual_seed(0)
    return trace(Tied(), {"ids": torch.arange(12), "labels": torch.arange(12)}).graph


def communicate(graph: Any, plan: Plan) -> CommunicatedGraph:
    known = dict(signatures(graph))
    return materialise(apply_plan(graph, known, plan), known)


def stored(program: StageProgram) -> dict[str, tuple[Any, ...]]:
    """name -> at rest, leaf, axes of the deferred reduction, stages."""
    return {s.tensor: (s.at_rest, s.leaf, s.reduce, s.copies) for s in program.stored}


def rows(program: StageProgram) -> list[str]:
    return [s.move.row.function for s in program.forward if isinstance(s, Convert)]


LAST: Step = AssignStep(("first", "second", "*linear*"), (1,))
S0 = Sharded(0)


def test_data_parallel_parameters_rest_whole_and_are_reduced_once(tied: Any) -> None:
    made = communicate(tied, Plan((("dp", 3),)))
    found = stored(made.stages[0])
    assert found["first_weight"] == ((INVARIANT, INVARIANT), (REPLICATED, INVARIANT), ("dp",), (0,))
    assert found["table_weight"] == ((INVARIANT, INVARIANT), (REPLICATED, INVARIANT), ("dp",), (0,))
    assert found["frozen_weight"] == ((INVARIANT, INVARIANT), (INVARIANT, INVARIANT), (), (0,))
    assert found["scale"] == found["unused"] == found["frozen_weight"]
    assert rows(made.stages[0]) == []


def test_a_split_parameter_rests_sharded(tied: Any) -> None:
    made = communicate(tied, Plan((("tp", 2),), (SplitStep(("first",), "tp", "n"),)))
    found = stored(made.stages[0])
    assert found["first_weight"][0] == (S0, INVARIANT)
    assert found["second_weight"][0] == (Sharded(1), INVARIANT)
    assert found["second_bias"] == ((INVARIANT, INVARIANT), (INVARIANT, INVARIANT), (), (0,))


def test_micro_batches_accumulate_in_the_leaf(tied: Any) -> None:
    found = stored(communicate(tied, Plan((), (), 4)).stages[0])
    assert found["first_weight"] == ((INVARIANT,), (REPLICATED,), (), (0,))


def test_a_tied_parameter_rests_in_one_layout_on_both_stages(tied: Any) -> None:
    vocabulary = next(op.name for op in tied.operations if op.inputs[-1] == "table_weight" and "linear" in op.operator)
    steps = (
        AssignStep(("first", "second", vocabulary), (1,)),
        SplitStep((vocabulary,), "tp", "n"),
        ReplicateStep(("table",), "tp"),
    )
    made = communicate(tied, Plan((("pp", 2), ("tp", 2)), steps))
    both = [stored(s)["table_weight"] for s in made.stages]
    assert both[0] == both[1] == ((S0, INVARIANT), (S0, INVARIANT), (), (0, 1))
    assert rows(made.stages[0])[0] == "all_gather"  # the embedding reads it whole
    assert [stored(s)["frozen_weight"][3] for s in made.stages] == [(0, 1), (0, 1)]
    assert "unused" in stored(made.stages[0]) and "unused" not in stored(made.stages[1])


def test_two_axes_choose_the_layout_at_rest_together(tied: Any) -> None:
    """Each use shards the table along dim 0 over another axis: only one of them can rest so."""
    vocabulary = next(op.name for op in tied.operations if op.inputs[-1] == "table_weight" and "linear" in op.operator)
    steps = SplitStep((vocabulary,), "a", "n"), SplitStep(("table",), "b", "v"), ReplicateStep((vocabulary,), "b")
    made = communicate(tied, Plan((("a", 2), ("b", 2)), (*steps, ReplicateStep(("table",), "a"))))
    at_rest = stored(made.stages[0])["table_weight"][0]
    assert at_rest in ((S0, INVARIANT, INVARIANT), (INVARIANT, S0, INVARIANT))


def test_a_tied_parameter_on_unlike_meshes_is_refused(tied: Any) -> None:
    unlike = ((("dp", 2),), (("dp", 3),))
    with pytest.raises(NnscalerError, match=r"parameter table\.weight is used on stages \[0, 1\], whose meshes differ"):
        communicate(tied, Plan((("pp", 2),), (LAST,), stage_axes=unlike))


def test_a_tensor_is_sent_once_to_each_stage_that_reads_it(tied: Any) -> None:
    made = communicate(tied, Plan((("pp", 2), ("dp", 2)), (LAST,), 2))
    (message,) = made.stages[1].receives
    assert made.stages[0].sends == (message,)
    assert message.key == f"{message.tensor}@1"
    assert made.edges == {(0, 1)}
    shape = tied.tensors[message.tensor].elements // 2
    assert made.volumes["pp", "send"] == (4, 2 * shape)  # two micro-batches, forward and backward


def test_volumes_count_every_reduction(tied: Any) -> None:
    found = communicate(tied, Plan((("dp", 3),))).volumes
    trainable = [t for t in tied.with_role("parameter") if t.needs_grad and tied.consumers[t.name]]
    calls, sent = found["dp", "all_reduce"]
    assert calls == len(trainable)
    assert sent == pytest.approx(sum(t.elements for t in trainable) * 2 * 2 / 3)
