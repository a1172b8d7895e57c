"""Configurations become small, and keep one layer of each kind."""

from __future__ import annotations

import pytest

from verify.external.transformers.find_and_change_config import configuration, fields_of
from verify.external.transformers.shrink_config import Sizes, sections_of, shrink


def test_sizes_are_small_and_divide() -> None:
    small = shrink(configuration("llama"), Sizes(heads=8, kv_heads=4))
    assert (small.num_hidden_layers, small.hidden_size, small.num_attention_heads) == (2, 128, 8)
    assert small.num_key_value_heads == 8  # as many as heads, as in the default configuration
    assert small.vocab_size == 96


def test_fewer_key_heads_stay_fewer() -> None:
    small = shrink(configuration("mistral"), Sizes(heads=8, kv_heads=4))
    assert small.num_key_value_heads == 4


def test_one_layer_of_each_kind_is_kept() -> None:
    small = shrink(configuration("qwen3_next"), Sizes())
    assert small.layer_types == ["linear_attention", "full_attention"]
    dense = shrink(configuration("glm4_moe_lite"), Sizes())
    assert dense.mlp_layer_types == ["dense", "sparse"]


def test_index_lists_are_renumbered() -> None:
    small = shrink(configuration("llama4_text"), Sizes())
    assert len(small.no_rope_layers) == small.num_hidden_layers
    assert small.moe_layers == list(range(small.num_hidden_layers))


def test_layers_with_sizes_of_their_own_stay_different() -> None:
    small = shrink(configuration("gemma4_text"), Sizes())
    heads = {layer.head_dim for layer in small.per_layer_config}
    assert heads == {16, 32}
    assert "per_layer_config" in fields_of(small)


def test_latent_attention_keeps_its_proportions() -> None:
    small = shrink(configuration("deepseek_v3"), Sizes())
    assert (small.qk_rope_head_dim, small.qk_nope_head_dim, small.v_head_dim) == (8, 16, 16)
    assert small.qk_head_dim == 24


def test_parts_shrink_with_the_whole() -> None:
    small = shrink(configuration("muse_glimmer"), Sizes())
    assert small.text_config.hidden_size == small.vision_config.hidden_size == 64


def test_sizes_of_layers_in_a_list_shrink() -> None:
    small = shrink(configuration("muse_spark"), Sizes())
    assert max(small.audio_config.hidden_sizes) == 16
    assert shrink(configuration("gemma3n_text"), Sizes()).intermediate_size == [96] * 4


def test_nothing_is_dropped() -> None:
    small = shrink(configuration("gptj"), Sizes())
    assert small.resid_pdrop == small.embd_pdrop == 0.0


@pytest.mark.parametrize(("total", "parts", "expected"), [(8, 3, [3, 3, 2]), (4, 3, [2, 1, 1]), (9, 3, [3, 3, 3])])
def test_sections_add_up(total: int, parts: int, expected: list[int]) -> None:
    assert sections_of(total, parts) == expected
