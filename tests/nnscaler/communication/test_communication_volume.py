"""The profile must be what programs do: every call that ranks make on the simulator, counted and compared."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nnscaler import communication_buckets
from nnscaler.communication.stage_communication_calls import ranks_text
from nnscaler.compile import WantedPlan, compile_traced
from nnscaler.ir.graph import element_bytes
from nnscaler.ir.mixed_precision_dtypes import Precision
from nnscaler.ir.operation_annotations import signatures
from nnscaler.records_as_json import encode
from nnscaler.runtime.program.import_role_and_user_files import load_user_module
from nnscaler.tracing import Traced, trace
from nnscaler.transform.plan import Plan, RecomputeStep, ReplicateStep, RestStep, SplitStep
from tests import halves, traced_examples
from tests.calls import Made, check, profile_of, said
from tests.random_plans import Mesh, random_plan
from tests.sampling import every, only


def example(name: str) -> ModuleType:
    return load_user_module(str(Path(__file__).resolve().parents[3] / "examples" / f"{name}.py"))


@pytest.fixture(scope="module")
def gpt() -> Traced:
    module = example("gpt")
    torch.manual_seed(0)
    return trace(module.GPT(module.GPTConfig(layers=4)), module.sample_inputs(batch=24), self_check=False)


@pytest.fixture(scope="module")
def llama() -> Traced:
    return traced_examples.traced("llama_hf")


@pytest.fixture(scope="module")
def t5() -> Traced:
    return traced_examples.traced("t5_hf")


def kinds(made: Mapping[Made, int]) -> set[str]:
    return {key[1] for key in made}


@pytest.mark.long
def test_three_axes_and_micro_batches(gpt: Traced, tmp_path: Path) -> None:
    made = check(gpt, "dp=2,tp=2,pp=2", 8, tmp_path, micro_batches=4)
    phases = {key[5] for key in made}
    assert {"gradient", "F0", "F1", "B0", "B1"} <= phases and kinds(made) >= {"all_reduce", "send", "recv"}


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "interlaced"])
def test_schedules_and_chunks(gpt: Traced, schedule: str, tmp_path: Path) -> None:
    check(gpt, "dp=2,pp=2", 4, tmp_path, micro_batches=4, schedule=schedule)


@pytest.mark.long
def test_an_asymmetric_mesh(gpt: Traced, tmp_path: Path) -> None:
    check(gpt, "dp=2,tp=3", 6, tmp_path)


@pytest.mark.long
def test_llama(llama: Traced, tmp_path: Path) -> None:
    check(llama, "dp=2,tp=2,pp=2", 8, tmp_path, micro_batches=3)


@pytest.mark.long
def test_t5_whose_embedding_is_tied_and_whose_encoder_is_read_by_many_stages(t5: Traced, tmp_path: Path) -> None:
    check(t5, "dp=2,pp=3", 6, tmp_path, micro_batches=2)


UNLIKE = ((("dp", 2), ("tp", 2)), (("tp", 3),)), ((("dp", 3),), (("dp", 2),))


@pytest.mark.long
@pytest.mark.parametrize("stage_axes", every(2, map(pytest.param, UNLIKE)))
def test_stages_of_different_shape(stage_axes: Any, tmp_path: Path) -> None:
    module = example("gpt")
    torch.manual_seed(0)
    model = module.GPT(module.GPTConfig(layers=2))
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    traced = trace(model, module.sample_inputs(batch=24), self_check=False)
    drawn = random_plan(traced.graph, dict(signatures(traced.graph)), Mesh((("pp", 2),), 2, stage_axes), 3)
    steps = tuple(s for s in drawn.steps if getattr(s, "axis", "") != "dp")  # dp follows the batch
    made = check(traced, Plan((("pp", 2),), steps, 2, stage_axes=stage_axes), drawn.ranks, tmp_path)
    assert {"send", "recv"} <= kinds(made)


@pytest.mark.long
@pytest.mark.parametrize(
    "seed",
    only((1, 2), range(8)),
)
def test_random_plans(gpt: Traced, seed: int, tmp_path: Path) -> None:
    meshes = [
        ((("a", 2), ("b", 3)), 1),
        ((("a", 3),), 1),
        ((("a", 2), ("b", 2), ("pp", 2)), 2),
        ((("a", 3), ("pp", 2)), 2),
    ]
    mesh, micro_batches = meshes[seed % len(meshes)]
    plan = random_plan(gpt.graph, dict(signatures(gpt.graph)), Mesh(mesh, micro_batches), seed)
    check(gpt, plan, plan.ranks, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
def test_random_plans_of_llama(llama: Traced, seed: int, tmp_path: Path) -> None:
    mesh = (("a", 2), ("b", 2), ("pp", 2)) if seed else (("a", 2), ("b", 3))
    plan = random_plan(llama.graph, dict(signatures(llama.graph)), Mesh(mesh, 1 + seed), seed)
    check(llama, plan, plan.ranks, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("tp", only((1,), [2, 3]))
def test_recomputed_layers_repeat_their_communication(gpt: Traced, tp: int, tmp_path: Path) -> None:
    plan = compile_traced(gpt, WantedPlan(2 * tp, f"dp=2,tp={tp}"), model={"name": "m"}).plan
    steps = (*plan.steps, *(RecomputeStep((f"blocks.{i}",)) for i in (1, 2)))
    made = check(gpt, Plan(plan.mesh, steps, 2, data_axes=plan.data_axes), 2 * tp, tmp_path)
    plain = said(profile_of(gpt, Plan(plan.mesh, plan.steps, 2, data_axes=plan.data_axes)))
    assert sum(made.values()) > sum(plain.values())


class Detached(nn.Module):
    """A branch without gradient, a frozen parameter, an unused one, one in half precision, and batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 24), nn.Linear(24, 12)
        self.frozen = nn.Linear(12, 12).requires_grad_(False)
        self.unused = nn.Parameter(torch.zeros(5))
        self.norm = nn.BatchNorm1d(12)
        self.scale = nn.Parameter(torch.ones(12, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(torch.relu(self.first(self.norm(x))))
        target = self.second(self.frozen(x).repeat(1, 2)).detach()
        return ((y * self.scale.float() - target) ** 2).mean()


@pytest.mark.long
@pytest.mark.parametrize("seed", every(2, range(6)))
def test_what_gets_no_gradient_communicates_none(seed: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    traced = trace(Detached(), {"x": torch.randn(12, 12)}, self_check=False)
    mesh = ((("a", 2), ("b", 2)), (("a", 3),))[seed % 2]
    plan = random_plan(traced.graph, dict(signatures(traced.graph)), Mesh(mesh), seed)
    check(traced, plan, plan.ranks, tmp_path)


def test_a_parameter_at_rest_in_shards_is_gathered_and_its_gradient_scattered(tmp_path: Path) -> None:
    """ZeRO's pattern: the weight is sharded by one operation and read whole by another, over the same axis."""
    torch.manual_seed(0)
    traced = trace(Detached(), {"x": torch.randn(12, 12)}, self_check=False)
    linears = [op for op in traced.graph.operations if "linear" in op.operator and op.module == "second"]
    assert len(linears) == 2
    plan = Plan(
        (("z", 3),),
        (SplitStep((linears[0].name,), "z", "n"), ReplicateStep((linears[1].name,), "z", deferred=True)),
        data_axes=(),
    )
    check(traced, plan, 3, tmp_path)


@pytest.mark.long
def test_buckets_are_those_of_the_runtime(gpt: Traced, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communication_buckets, "BUCKET_BYTES", 20_000)
    monkeypatch.setattr(communication_buckets, "LEAST_BYTES", 1_000)
    for plan in ("dp=2,tp=2", "dp=2,tp=2,zero=1"):
        made = check(gpt, plan, 4, tmp_path / plan)
        gradients = [n for key, n in made.items() if key[5] == "gradient" and key[0] == 0]
        assert sum(gradients) > 3


ZERO = (
    ("dp=3,zero=1", 3, {}),  # 3 does not divide all sizes of the model
    ("dp=3,tp=2,zero=2", 6, {"micro_batches": 2}),
    ("dp=2,shard=2,zero=1", 4, {}),
    ("dp=2,shard=3,pp=2,zero=2", 12, {"micro_batches": 2}),
    ("dp=2,shard=2,zero=3", 4, {}),
    ("dp=3,pp=2,zero=2", 6, {"micro_batches": 2, "schedule": "interleaved"}),
)


@pytest.mark.long
@pytest.mark.parametrize(("plan", "ranks", "options"), only((2, 4, 5), ZERO))
def test_what_zero_gathers_and_scatters(
    gpt: Traced, plan: str, ranks: int, options: dict[str, Any], tmp_path: Path
) -> None:
    made = check(gpt, plan, ranks, tmp_path, **options)
    gathered = {key[5] for key in made if key[1] == "all_gather" and key[5] == "gather"}
    scattered = {key[5] for key in made if key[1] == "reduce_scatter"}
    if "zero=1" in plan:
        assert gathered and scattered == {"gradient"}
    elif "zero=2" in plan:
        assert gathered and scattered and all(phase.startswith("B") for phase in scattered)
    else:
        assert not gathered


@pytest.mark.long
@pytest.mark.parametrize("zero", [1, 2])
def test_masters_are_gathered_as_leaves_and_gradients_summed_in_their_own_dtype(zero: int, tmp_path: Path) -> None:
    module, precision = example("gpt"), Precision("bfloat16", reduce="bfloat16")
    torch.manual_seed(0)
    model = module.GPT(module.GPTConfig(layers=2))
    traced = trace(model, module.sample_inputs(batch=12), self_check=False, precision=precision)
    made = check(traced, f"dp=2,shard=2,zero={zero}", 4, tmp_path, precision=precision)
    dtypes = {(key[1], key[4]) for key in made if key[5] != "loss"}
    # what rests divided is added up in float32 where it is divided after each backward
    summed = "bfloat16" if zero == 1 else "float32"
    assert dtypes >= {("all_gather", "bfloat16"), ("reduce_scatter", "bfloat16"), ("all_reduce", summed)}


def test_parameters_may_rest_by_several_stages_of_zero_over_several_axes(gpt: Traced, tmp_path: Path) -> None:
    steps = (
        RestStep(("blocks.0",), "dp", 2),
        RestStep(("blocks",), "other", 1),
        RestStep(("blocks.1",), "dp", 3),
        RestStep(("wte",), "dp", 1),
    )
    plan = Plan((("dp", 2), ("other", 3)), steps, 2, data_axes=("dp", "other"))
    check(gpt, plan, 6, tmp_path)


@pytest.mark.long
def test_the_manifest_of_a_large_mesh_stays_small(gpt: Traced) -> None:
    sizes = []
    for dp in (2, 12):
        program = compile_traced(gpt, WantedPlan(2 * dp * 2, f"dp={dp},tp=2,pp=2"), model={"name": "m"})
        sizes.append(len(json.dumps(encode(program.manifest.communication_profile))))
    assert sizes[1] < 1.1 * sizes[0]


def test_when_calls_are_made(gpt: Traced) -> None:
    plan = compile_traced(gpt, WantedPlan(4, "pp=2,dp=2", micro_batches=3), model={"name": "m"}).plan
    found = {(c.call.phase, c.call.stage): c.when for c in profile_of(gpt, plan).classes}
    # stage 0 runs F F B F B B, stage 1 runs F B F B F B
    assert (found["F", 0].first, found["F", 0].last, found["F", 0].of) == (0, 3, 6)
    assert (found["B", 1].first, found["B", 1].last, found["B", 1].text) == (1, 5, "B of stage 1, each micro-batch")
    assert (found["gradient", 0].first, found["gradient", 0].text) == (None, "once, after the last instruction")


@pytest.mark.long
def test_the_cause_is_the_module_that_makes_the_partial_sum(llama: Traced) -> None:
    plan = compile_traced(llama, WantedPlan(2, "tp=2"), model={"name": "m"}).plan
    sums = {c.call.module for c in profile_of(llama, plan).classes if c.call.kind in ("all_reduce", "reduce_scatter")}
    assert {"model.layers.*.self_attn.o_proj", "model.layers.*.mlp.down_proj"} & sums


HALVES: list[tuple[str, int, halves.Place, str]] = [
    ("dp=2,tp=2,pp=2", 8, halves.zero_bubble, "1f1b"),
    ("dp=2,pp=2,zero=3", 4, halves.late, "1f1b"),
    ("dp=2,pp=2,zero=2", 4, halves.adjacent, "1f1b"),
    ("tp=2,pp=2", 4, halves.late, "interleaved"),
    ("dp=2,tp=2,pp=2,zero=2", 8, halves.odd(halves.late), "1f1b"),
]


@pytest.mark.long
@pytest.mark.parametrize(("plan", "ranks", "place", "kind"), only((2, 4), HALVES))
def test_each_half_of_a_backward_makes_its_own_calls(
    gpt: Traced, plan: str, ranks: int, place: halves.Place, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An input's gradient is summed in I, a parameter's in W: each call is counted in the instruction that makes it."""
    schedule = halves.registered(monkeypatch, place, kind)
    made = check(gpt, plan, ranks, tmp_path, micro_batches=4, schedule=schedule)
    phases = {key[5] for key in made if key[1] not in ("send", "recv")}
    assert "I1" in phases if "tp" in plan else "W1" in phases
    assert ("W1" in phases) == ("zero=3" in plan or "zero=2" in plan)
    assert ("B1" in phases) == (place is HALVES[-1][2])


@pytest.mark.long  # tests/nnscaler/performance/test_predicted_events.py asks it of fewer ranks
def test_recomputed_layers_repeat_their_communication_in_the_first_half(
    gpt: Traced, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = halves.registered(monkeypatch, halves.late)
    plan = compile_traced(gpt, WantedPlan(8, "dp=2,zero=3,tp=2,pp=2"), model={"name": "m"}).plan
    steps = (*plan.steps, *(RecomputeStep((f"blocks.{i}",)) for i in range(4)))
    check(gpt, replace(plan, steps=steps, micro_batches=2, schedule=schedule), 8, tmp_path)


def test_when_halves_make_their_calls(gpt: Traced, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = halves.registered(monkeypatch, halves.late)
    wanted = WantedPlan(8, "dp=2,tp=2,pp=2,zero=2", micro_batches=2, schedule=schedule)
    plan = compile_traced(gpt, wanted, model={"name": "m"}).plan
    found = {(c.call.phase, c.call.stage): c.when for c in profile_of(gpt, plan).classes}
    # stage 1 runs F I F I W W
    assert (found["I", 1].first, found["I", 1].last, found["I", 1].text) == (1, 3, "I of stage 1, each micro-batch")
    assert (found["W", 1].first, found["W", 1].last, found["W", 1].of) == (4, 5, 6)


def test_bytes_of_elements() -> None:
    names = ("bool", "uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64", "complex64", "float8_e5m2")
    assert [element_bytes(n) for n in names] == [getattr(torch, n).itemsize for n in names]


def test_ranks_as_text() -> None:
    texts = [ranks_text(r) for r in ((0, 1, 2, 3), (0, 8, 16), (4, 5), (0, 8), (3, 1), (0, 1, 5), (7,))]
    assert texts == ["0-3", "0-16 by 8", "4-5", "0, 8", "3, 1", "0, 1, 5", "7"]
