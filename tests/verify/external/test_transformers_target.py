"""Models of transformers as programs: built, parallelised by the library's own code, and compared."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nnscaler.errors import NnscalerError
from tests.sampling import every
from verify.external.differential_run import ExternalSettings
from verify.external.reference import initial_model
from verify.external.transformers.build_program import (
    BuiltModel,
    build,
    distributed_options,
    linear_loss,
    transformers_program,
)
from verify.external.transformers.check_parallel_degrees import PlanChanges, PlanSizes
from verify.external.verify import Outcome, verify_in
from verify.results.verdict import Verdict

TWO = PlanSizes(tp=2)


def outcome_of(target: str, sizes: PlanSizes, changes: PlanChanges | None = None, **settings: Any) -> Outcome:
    program = transformers_program(target, sizes, settings, changes=changes)
    model = initial_model(program, 0)
    return verify_in(program, ExternalSettings(steps=1, isolate=False), model, program.batch(), torch.float64)


def verdicts(outcome: Outcome) -> set[Verdict]:
    return {check.verdict for check in outcome.checks}


@pytest.mark.parametrize(
    ("target", "sizes", "settings"),
    every(
        2,
        [
            ("hf:qwen3", TWO, {}),
            ("hf:gemma2", TWO, {}),  # a tied head
            ("hf:qwen3_moe", PlanSizes(tp=2, ep=2), {}),
            ("hf:qwen3_moe", PlanSizes(ep=2), {}),
            ("hf:mistral", PlanSizes(fsdp=2), {"tie_word_embeddings": True}),
            ("hf:inkling2_text", TWO, {}),  # rows that the loader sorts after it has cut them
        ],
    ),
)
def test_right_plans_are_equal(target: str, sizes: PlanSizes, settings: dict[str, Any]) -> None:
    assert verdicts(outcome_of(target, sizes, **settings)) == {Verdict.TESTED_EXACT}


@pytest.mark.long
def test_a_rule_that_is_taken_away_is_found() -> None:
    broken = PlanChanges(tp={"model.layers.*.self_attn.q_norm": "replicate"})
    outcome = outcome_of("hf:qwen3", TWO, broken)
    wrong = {d.name: d.cause for compared in outcome.compared for d in compared.differences}
    gradients = {name for name in wrong if name.endswith("q_norm.weight")}
    assert gradients == {f"model.layers.{layer}.self_attn.q_norm.weight" for layer in (0, 1)}
    assert {wrong[name].kind for name in gradients} == {"missing_reduction"}
    assert {wrong[name].axis for name in gradients} == {"tp"}


def test_models_are_reproducible_and_disturbed() -> None:
    one, two = build("llama", TWO, {}), build("llama", TWO, {})
    for left, right in zip(one.model.parameters(), two.model.parameters(), strict=True):
        assert torch.equal(left, right)
    norm = one.model.get_parameter("model.norm.weight")
    assert norm.std() > 0.01


def test_building_leaves_random_numbers_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    build("llama", TWO, {})
    assert torch.equal(torch.rand(1), expected)


def test_models_without_a_loss_get_a_linear_one() -> None:
    built = build("qwen2_vl_text", TWO, {})
    assert not built.is_scored
    whole = linear_loss(built.model, dict(built.batch))
    parts = [linear_loss(built.model, {k: v.chunk(2)[i] for k, v in built.batch.items()}) for i in (0, 1)]
    assert torch.allclose(whole, torch.stack(parts).mean())


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (PlanSizes(tp=2, pp=2), "returns logits and no loss"),
        (PlanSizes(), "one rank has no plan"),
        (PlanSizes(tp=4, ep=2), "no multiple of --tp 4"),
        (PlanSizes(fsdp=2, ep=4), "does not divide the 2 ranks"),
    ],
)
def test_sizes_that_the_library_does_not_have_are_refused(sizes: PlanSizes, words: str) -> None:
    with pytest.raises(NnscalerError, match=words):
        transformers_program("hf:llama", sizes)


def test_a_plan_that_a_model_does_not_have_is_named() -> None:
    with pytest.raises(NnscalerError, match="declares no ep plan") as caught:
        transformers_program("hf:llama", PlanSizes(ep=2))
    assert caught.value.code == "no_plan"
    assert "--tp" in str(caught.value.help)


def test_a_library_that_applies_plans_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("transformers.distributed.utils.initialize_distributed_mesh")
    with pytest.raises(NnscalerError, match="does not apply its plans by DistributedConfig"):
        transformers_program("hf:llama", TWO)


def test_a_model_that_the_library_cannot_run_is_not_built() -> None:
    with pytest.raises(NnscalerError, match="grid_thw") as caught:
        build("muse_glimmer_vision", TWO, {})
    assert caught.value.code == "not_built"


def test_axes_are_those_of_the_library() -> None:
    assert PlanSizes(tp=2, fsdp=4).mesh() == (("fsdp", 4), ("tp", 2))
    assert PlanSizes(ep=2).mesh() == (("ep", 2),)
    program = transformers_program("hf:llama", PlanSizes(tp=2, fsdp=2))
    assert program.data_axes == ("fsdp",)
    assert program.name == "hf:llama --tp 2 --fsdp 2"


def test_experts_alone_leave_the_tensor_plan_out() -> None:
    built: BuiltModel = build("qwen3_moe", PlanSizes(ep=2), {})
    options = distributed_options(PlanSizes(ep=2), PlanChanges(), built.model)
    assert set(options["tp_plan"].values()) == {"replicate"}
    assert options["ep_size"] == options["tp_size"] == 2
