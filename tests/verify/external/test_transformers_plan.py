"""Lints of plans, and rules that mend them."""

from __future__ import annotations

from typing import Any

import pytest

from verify.external.transformers.build_program import build
from verify.external.transformers.check_parallel_degrees import PlanSizes
from verify.external.transformers.expand_requests import flag_variants
from verify.external.transformers.lint_and_repair_plan import (
    PlanLint,
    WrongParameter,
    generic,
    plan_lints,
    plan_repairs,
    styles,
)

TWO = PlanSizes(tp=2)


def lints(name: str, sizes: PlanSizes = TWO, **settings: Any) -> list[PlanLint]:
    return list(plan_lints(build(name, sizes, settings), sizes))


def named(found: list[PlanLint], kind: str) -> set[str]:
    return {lint.name for lint in found if lint.kind == kind}


def test_right_plans_have_no_lint() -> None:
    for name in ("llama", "deepseek_v3", "qwen3_next"):
        assert named(lints(name), "unreached_parameter") == set()
    assert lints("llama") == []


def test_a_rule_that_matches_nothing_is_named() -> None:
    found = named(lints("qwen3_moe"), "unmatched_rule")
    assert found == {f"model.layers.*.mlp.{part}_proj" for part in ("gate", "up", "down")}


def test_a_parameter_between_shards_without_a_rule_is_named() -> None:
    built = build("qwen3", TWO, {})
    plan: dict[str, str] = built.model._tp_plan  # type: ignore[assignment]
    del plan["model.layers.*.self_attn.q_norm"]
    found = named(list(plan_lints(built, TWO)), "unreached_parameter")
    assert found == {"model.layers.*.self_attn.q_norm.weight"}


def test_a_norm_before_the_shards_needs_no_rule() -> None:
    built = build("qwen3", TWO, {})
    found = named(list(plan_lints(built, TWO)), "unreached_parameter")
    assert "model.layers.*.input_layernorm.weight" not in found


@pytest.mark.parametrize(
    ("settings", "name"), [({"num_key_value_heads": 1}, "num_key_value_heads"), ({"intermediate_size": 97}, "mlp")]
)
def test_sizes_that_do_not_divide_are_named(settings: dict[str, Any], name: str) -> None:
    assert any(name in found for found in named(lints("llama", **settings), "uneven_size"))


def test_experts_that_do_not_divide_are_named() -> None:
    found = lints("qwen3_moe", PlanSizes(ep=2), num_experts=3, num_experts_per_tok=2)
    assert "model.layers.*.mlp.experts.gate_up_proj" in named(found, "uneven_size")


def test_partial_gradients_are_summed() -> None:
    model = build("qwen3_vl_moe_text", TWO, {}).model
    wrong = [WrongParameter(f"layers.{layer}.self_attn.q_norm.weight", "missing_reduction", "tp") for layer in (0, 1)]
    first = plan_repairs(model, wrong)[0]
    assert dict(first.changes.tp) == {"layers.*.self_attn.q_norm": "replicated_with_grad_allreduce"}
    assert '"layers.*.self_attn.q_norm": "replicated_with_grad_allreduce"' in first.text


def test_gradients_that_are_summed_too_often_are_left_alone() -> None:
    model = build("qwen3", TWO, {}).model
    wrong = [WrongParameter("model.layers.0.self_attn.q_norm.weight", "scaled", "", 2.0)]
    assert dict(plan_repairs(model, wrong)[0].changes.tp) == {"model.layers.*.self_attn.q_norm": "replicate"}


def test_otherwise_tensors_are_made_whole_around_the_parameter() -> None:
    model = build("gemma3n_text", TWO, {}).model
    last = plan_repairs(model, [WrongParameter("model.layers.0.mlp.gate_proj.weight", "differs")])[-1]
    assert last.changes.tp["model.layers.*.mlp.gate_proj"] == "colwise_gather_output"
    assert last.changes.tp["model.layers.*.mlp.down_proj"] == "rowwise_split_input"
    assert set(last.changes.tp.values()) <= set(styles())


def test_numbers_of_layers_become_stars() -> None:
    assert generic("model.layers.10.mlp.experts.0.w1.weight") == "model.layers.*.mlp.experts.*.w1.weight"


def test_flags_that_change_parameters_are_found() -> None:
    found = {str(variant): variant.reason for variant in flag_variants("cohere", TWO)}
    assert found["use_qk_norm=True"].startswith("adds 4 parameters")
    assert "tie_word_embeddings=False" in found
    assert "num_key_value_heads=1" in found
    assert not any(name.startswith("use_cache") for name in found)
