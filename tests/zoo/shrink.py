"""Tiny configurations of `transformers` architectures: the class's own defaults, with every size made small.

Sizes are distinct where an architecture lets them be, and even where two ranks must divide them. Nothing is
downloaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

HIDDEN, HEADS, HEAD, WIDE, VOCABULARY, LAYERS, POSITIONS, IMAGE, PATCH, LABELS = 48, 4, 12, 88, 120, 2, 40, 32, 8, 6

_NAMES: tuple[tuple[Any, str], ...] = (
    (VOCABULARY, "vocab_size n_vocab src_vocab_size tgt_vocab_size text_vocab_size"),
    (HIDDEN, "hidden_size d_model n_embd dim embed_dim model_dim attention_hidden_size emb_dim hidden_channels"),
    (LAYERS, "num_hidden_layers num_layers n_layer n_layers depth"),
    (LAYERS, "encoder_layers decoder_layers num_decoder_layers num_encoder_layers"),
    (HEADS, "num_attention_heads num_heads n_head n_heads encoder_attention_heads decoder_attention_heads"),
    (WIDE, "intermediate_size d_ff n_inner ffn_dim encoder_ffn_dim decoder_ffn_dim ffn_hidden_size d_inner mlp_dim"),
    (2, "num_key_value_heads n_head_kv num_kv_heads multi_query_group_num"),
    (2, "num_experts_per_tok moe_topk num_experts_per_token type_vocab_size"),
    (HEAD, "head_dim d_kv d_head kv_channels v_head_dim"),
    (POSITIONS, "max_position_embeddings n_positions max_source_positions max_target_positions n_ctx seq_length"),
    (4, "num_experts num_local_experts n_routed_experts moe_num_experts num_routed_experts num_queries"),
    (56, "moe_intermediate_size expert_ffn_hidden_size"),
    (36, "projection_dim projection_size proj_dim"),
    (72, "shared_expert_intermediate_size"),
    (1, "n_shared_experts n_group topk_group bos_token_id"),
    (26, "q_lora_rank"),
    (20, "kv_lora_rank num_mel_bins"),
    (10, "qk_nope_head_dim"),
    (6, "qk_rope_head_dim"),
    (IMAGE, "image_size img_size"),
    (PATCH, "patch_size"),
    (0, "pad_token_id"),
    (3, "eos_token_id"),
)
_SMALL: Mapping[str, Any] = {name: size for size, names in _NAMES for name in names.split()}
# Lists with a size for every step of an image model.
_STAGES: Mapping[str, tuple[int, ...]] = {
    "depths": (1, 1, 1, 1),
    "num_heads": (2, 4, 4, 4),
    "num_attention_heads": (2, 4, 4, 4),
    "hidden_sizes": (16, 24, 32, 40),
    "embed_dim": (16, 24, 32, 40),
    "image_size": (IMAGE, IMAGE),
}
# Probabilities of everything that is drawn: the zoo compares values, the tests of random numbers draw.
_DRAWN = ("dropout", "drop_path", "layerdrop", "drop_rate", "droprate", "jitter", "mask_time_prob", "mask_feature_prob")
_DRAWN_END = ("pdrop", "dropout_prob", "_drop", "dropout_rate")


def tiny(model_type: str, changes: Mapping[str, Any]) -> PretrainedConfig:
    """The configuration of `model_type` with small sizes, and `changes` (dots reach into parts: "text_config.x")."""
    config = _tiny(CONFIG_MAPPING[model_type], {"num_labels": LABELS, **changes})
    config.use_cache = False
    return config


def _tiny(kind: type[PretrainedConfig], changes: Mapping[str, Any]) -> PretrainedConfig:
    default = kind()
    values = {name: small for name, value in default.to_dict().items() if (small := _small(name, value)) is not None}
    for part, declared in getattr(kind, "sub_configs", {}).items():
        standard = getattr(default, part, None)
        found = type(standard) if isinstance(standard, PretrainedConfig) else declared
        if isinstance(found, type) and issubclass(found, PretrainedConfig) and found is not PretrainedConfig:
            inside = {name.removeprefix(f"{part}."): v for name, v in changes.items() if name.startswith(f"{part}.")}
            values[part] = _tiny(found, inside).to_dict()
    # the number of labels is no entry of its own in what a configuration writes
    values.update({name: v for name, v in changes.items() if "." not in name})
    return kind(**values)


def _small(name: str, value: Any) -> Any:
    """The small value of one entry; None: the default stays."""
    if isinstance(value, list | tuple) and name in _STAGES:
        return list(_STAGES[name][: len(value)])
    if name in _SMALL and isinstance(value, list | tuple):
        return None
    if name in _SMALL and not (value is None and name in ("q_lora_rank", "n_shared_experts")):
        return _SMALL[name]
    if isinstance(value, float) and (any(word in name for word in _DRAWN) or name.endswith(_DRAWN_END)):
        return 0.0
    if name.endswith(("_token_id", "_token_index")) and isinstance(value, int) and value >= VOCABULARY:
        return VOCABULARY - 1 - (len(name) % 7)
    return None
