"""Shrink a configuration to a size that a test can afford.

Sizes are shrunk by rules over the names of fields (`_RULES`), not by a list of models; lists with an entry per layer
keep one layer of each kind.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from verify.external.transformers.find_and_change_config import fields_of, is_configuration

MOST_LAYERS = 4  # kept of a model with many kinds of layers


@dataclass(frozen=True)
class Sizes:
    """The sizes of a shrunk model.

    heads      attention heads; the hidden size is 16 a head
    kv_heads   key and value heads, where the model has fewer of them than heads; None: half of the heads
    experts    routed experts of a mixture
    vocab      rows of the embedding
    """

    heads: int = 4
    kv_heads: int | None = None
    experts: int = 4
    vocab: int = 96

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return 16

    @property
    def hidden(self) -> int:
        """Channels of the model."""
        return self.head_dim * self.heads


def shrink(config: Any, sizes: Sizes) -> Any:
    """Make a small configuration of the same kind: few layers, one of each kind, and small sizes that divide."""
    fields = fields_of(config)
    layers = _layers_to_keep(fields)
    changes: dict[str, Any] = {}
    for name, value in fields.items():
        small = _shrunk(name, value, fields, sizes, layers)
        if small is not value:
            changes[name] = small
    rope = changes.get("rope_parameters")
    if isinstance(rope, dict) and not any(isinstance(item, dict) for item in rope.values()) and _turns_on_axes(config):
        turning = _rotary(fields, sizes) or int(sizes.head_dim * rope.get("partial_rotary_factor", 1.0))
        rope.setdefault("mrope_section", sections_of(turning // 2, 3))
    return type(config)(**{**fields, **changes, **lacking(config)})


# What the default configuration of a model type lacks, so that the library itself cannot build it
_QUIRKS: Mapping[str, Mapping[str, Any]] = {
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 48},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "step3p5": {"sliding_window": 8},
    "t5gemma2_decoder": {"dropout_rate": 0.0},
    "t5gemma2_text": {"dropout_rate": 0.0},
}


def lacking(config: Any) -> Mapping[str, Any]:
    """Return what a default configuration of this kind lacks; it need not be a field."""
    return _QUIRKS.get(config.model_type, {})


def _turns_on_axes(config: Any) -> bool:
    """True where the model's source reads sections of axes, whose default sizes do not fit a small head."""
    package = Path(inspect.getfile(type(config))).parent
    return any("mrope_section" in file.read_text(encoding="utf-8") for file in package.glob("modeling_*.py"))


def _shrunk(name: str, value: Any, fields: Mapping[str, Any], sizes: Sizes, layers: Sequence[int]) -> Any:
    """Return the small value of a field, or the value itself."""
    if is_configuration(value):
        return shrink(value, sizes)
    if name == "rope_parameters":
        return _shrunk_rope(value, fields, sizes)
    if name == "per_layer_config":
        return {number: _small_layer(value[layer], fields, sizes, layers) for number, layer in enumerate(layers)}
    if isinstance(value, list | tuple) and value and _is_per_layer(name, value, fields):
        if _is_index_list(value, fields):
            return [layers.index(layer) for layer in value if layer in layers]
        return [_small_number(name, value[layer], fields, sizes, layers) for layer in layers]
    if name.endswith(("sizes", "_size")) and isinstance(value, list | tuple):
        return [min(item, sizes.head_dim) if isinstance(item, int) else item for item in value]
    return _small_number(name, value, fields, sizes, layers)


def _small_layer(
    own: Mapping[str, Any], fields: Mapping[str, Any], sizes: Sizes, layers: Sequence[int]
) -> dict[str, Any]:
    """Return the small values of what one layer has of its own; heads that are wider than others stay so."""
    found: dict[str, Any] = {}
    for name, value in own.items():
        small, usual = _small_number(name, value, {**fields, **own}, sizes, layers), fields.get(name)
        found[name] = small
        if name == "head_dim" and "qk_rope_head_dim" not in fields and isinstance(usual, int) and value > usual > 0:
            found[name] = small * value // usual
    return found


def _small_number(name: str, value: Any, fields: Mapping[str, Any], sizes: Sizes, layers: Sequence[int]) -> Any:
    if name in _LAYERS:
        return len(layers)
    if "dropout" in name or name.endswith("pdrop") or "jitter" in name:
        return 0.0 if isinstance(value, float | int) else value
    if value is None:
        return _filled(name, sizes)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        return value
    if name.endswith(("token_id", "token_index")):
        return min(value, sizes.vocab - 1)
    for pattern, rule in _RULES:
        if re.fullmatch(pattern, name):
            return rule(value, fields, sizes)
    return value


def _filled(name: str, sizes: Sizes) -> int | None:
    """Return a size that the library leaves open in a default configuration, and that its models need; else None."""
    if name == "head_dim":
        return sizes.head_dim
    if name == "num_key_value_heads":
        return sizes.heads
    if name in ("num_experts_per_tok", "top_k_experts"):
        return 2
    if name in ("n_routed_experts", "num_experts"):
        return sizes.experts
    if name == "moe_intermediate_size":
        return 48
    return 1 if name == "n_shared_experts" else None


_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "depth")
_Rule = Callable[[int, Mapping[str, Any], Sizes], int]


def _kv_heads(value: int, fields: Mapping[str, Any], sizes: Sizes) -> int:
    """Keep one head for all, and as many as heads, as they are; else half of the heads."""
    if value == 1 or value == fields.get("num_attention_heads"):
        return sizes.heads if value > 1 else 1
    return sizes.kv_heads or sizes.heads // 2


def _rotary(fields: Mapping[str, Any], sizes: Sizes) -> int:
    """Channels of a head that turn, where they are kept apart from the others (latent attention)."""
    return sizes.head_dim // 2 if fields.get("qk_rope_head_dim") else 0


def _in_proportion(value: int, fields: Mapping[str, Any], sizes: Sizes) -> int:
    """Keep the ratio to the channels that turn: partial rotary factors and splits depend on it."""
    turning = fields.get("qk_rope_head_dim")
    return max(1, value * _rotary(fields, sizes) // turning) if turning else sizes.head_dim


def _at_most(most: int) -> _Rule:
    return lambda value, fields, sizes: min(value, most)


# name of a field, as a pattern -> its small value; the first that matches
_RULES: tuple[tuple[str, _Rule], ...] = (
    (r".*key_value_heads|.*kv_heads", _kv_heads),
    (r"linear_num_key_heads", lambda value, fields, sizes: sizes.heads // 2 if value > 1 else 1),
    (r"mamba_(n|num)_heads", lambda value, fields, sizes: 2 * sizes.hidden // 16),
    (r"(.*_)?(num|n)_(\w+_)?heads|.*_heads_per_layer", lambda value, fields, sizes: sizes.heads),
    (r"(n|num)_head", lambda value, fields, sizes: sizes.heads),
    (r"rotary_dim", lambda value, fields, sizes: sizes.head_dim // 2),
    (r"head_dim|qk_\w*head_dim", _in_proportion),
    (r".*head_dim|mamba_d_head", lambda value, fields, sizes: sizes.head_dim),
    (r"mamba_d_ssm", lambda value, fields, sizes: 2 * sizes.hidden),
    (
        r"\w*hidden_sizes|\w*hidden_size_per_layer_input|router_hidden_size|prediction_head_size|\w*embed\w*_dim",
        _at_most(16),
    ),
    (r"(\w+_)?hidden_size|d_model|n_embd|adapter_(in|out)_dim|\w*(in|out)put_dim", lambda v, f, sizes: sizes.hidden),
    (r"(moe|expert|shared|prefix)\w*_(intermediate|ffn_hidden)_size|share_expert_dim", _at_most(48)),
    (r"\w*intermediate_size\w*|\w*ffn_hidden_size", _at_most(96)),
    (r"\w*vocab_size(_per_layer_input)?", lambda value, fields, sizes: min(value, sizes.vocab)),
    (r"(moe_)?num_(local_)?experts|n_routed_experts", lambda value, fields, sizes: sizes.experts),
    (r"zero_expert_num", _at_most(2)),
    (r"num_experts_per_tok|moe_topk|moe_k", _at_most(2)),
    (r"n_group", _at_most(2)),
    (r"topk_group", _at_most(1)),
    (r"\w*_rank", _at_most(16)),
    (r"\w*sliding_window\w*size|sliding_window|attention_chunk_size|keep_window_size", _at_most(8)),
    (r"\w*chunk_size|\w*block_size|mamba_d_state|ssm_state_size|d_rel", _at_most(8)),
    (r"max_position_embeddings|n_ctx|n_positions|rel_extent", _at_most(64)),
    (r"\w*(_period|_interval|_pattern|every_n_layers|group_size)", _at_most(2)),
    (r"\w*(_offset)", _at_most(1)),
    (r"first_k_dense_replace", _at_most(1)),
    (r"num_kv_shared_layers|max_window_layers|num_layers_per_stack", _at_most(1)),
    (r"n_(input|output|recurrent)_layers", _at_most(1)),
    (r"index_topk\w*", _at_most(8)),
    (r"index_kpool|hc_(mult|count)", _at_most(2)),
    (r"ngram_vocab_size_base", _at_most(64)),
    (r"make_ngram_vocab_size_divisible_by|split_ngram_parts|heads_per_ngram", _at_most(2)),
    (r"hc_lowrank", _at_most(16)),
    (r"image_size|crop_size", _at_most(64)),
    (r"\w*channels?|num_mel_bins|feature_size", _at_most(64)),
    (r"num_blocks", _at_most(2)),
    (r"position_embedding_size|pos_emb_(height|width)", _at_most(16)),
    (r"num_(codebooks|code_groups)", _at_most(2)),
    (r"codebook_size", _at_most(32)),
)


def _layer_count(fields: Mapping[str, Any]) -> int:
    return next((fields[name] for name in _LAYERS if isinstance(fields.get(name), int)), 0)


def _is_per_layer(name: str, value: Sequence[Any], fields: Mapping[str, Any]) -> bool:
    if not all(isinstance(item, str | int | float | None) for item in value):
        return False
    return len(value) == _layer_count(fields) or (_is_index_list(value, fields) and "layer" in name + "layer_idx")


def _is_index_list(value: Sequence[Any], fields: Mapping[str, Any]) -> bool:
    """True for numbers of layers in rising order, such as the layers that have experts."""
    count = _layer_count(fields)
    if not all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item < count for item in value):
        return False
    return all(left < right for left, right in pairwise(value))


def _layers_to_keep(fields: Mapping[str, Any]) -> list[int]:
    """Choose the first layer of each kind, at least two layers and at most MOST_LAYERS, in their order."""
    count = _layer_count(fields)
    kinds: list[tuple[Any, ...]] = [() for _ in range(count)]
    for name, value in fields.items():
        if not isinstance(value, list | tuple) or not value or not _is_per_layer(name, value, fields):
            continue
        for layer in range(count):
            kinds[layer] += (layer in value,) if _is_index_list(value, fields) else (value[layer],)
    chosen: list[int] = []
    for layer, kind in enumerate(kinds):
        if len(chosen) < MOST_LAYERS and kind not in [kinds[other] for other in chosen]:
            chosen.append(layer)
    fewest = 3 if "n_recurrent_layers" in fields else 2  # one each before, in and after a loop
    for layer in range(count):
        if len(chosen) < fewest and layer not in chosen:
            chosen.append(layer)
    return sorted(chosen)


def _shrunk_rope(value: Any, fields: Mapping[str, Any], sizes: Sizes) -> Any:
    """Fit the sections of a rotary embedding of several axes to the small head, and shorten its contexts."""
    if not isinstance(value, Mapping):
        return value
    if not value and fields.get("layer_types"):  # one for each kind of layer is wanted, and there is no default
        return {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in sorted(set(fields["layer_types"]))}
    small: dict[str, Any] = {}
    turning = _rotary(fields, sizes) or int(sizes.head_dim * value.get("partial_rotary_factor", 1.0))
    for key, item in value.items():
        if isinstance(item, Mapping):
            small[key] = _shrunk_rope(item, fields, sizes)
        elif key.endswith("section") and isinstance(item, list | tuple):
            small[key] = sections_of(turning // 2, len(item))
        elif key.endswith("max_position_embeddings") and isinstance(item, int):
            small[key] = min(item, 32)
        else:
            small[key] = item
    return small


def sections_of(total: int, parts: int) -> list[int]:
    """Divide channels among the axes of a rotary embedding, the first ones first: 8 among 3 gives 3, 3 and 2."""
    return [total // parts + (number < total % parts) for number in range(parts)]
