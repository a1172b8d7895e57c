"""Decoders: x-transformers with its options, litgpt, torchtune, xLSTM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from library_models.rows import real, row, use, whole

DECODERS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "rotary": {"rotary_pos_emb": True},
    "alibi": {"alibi_pos_bias": True, "alibi_num_heads": 2},
    "glu": {"ff_glu": True, "ff_swish": True, "use_rmsnorm": True},
    "flash": {"attn_flash": True},
    "qknorm": {"attn_qk_norm": True},
    "rel": {"rel_pos_bias": True},
    "gqa": {"attn_kv_heads": 2},
    "talking": {"attn_pre_talking_heads": True},
    "macaron": {"macaron": True},
    "shifted": {"shift_tokens": 1},
    "sandwich": {"sandwich_norm": True},
    "residual_attn": {"residual_attn": True},
    "dynamic_pos": {"dynamic_pos_bias": True},
    "memory": {"attn_num_mem_kv": 4},
    "sparse": {"attn_sparse_topk": 4},
    "scaled_residual": {"scale_residual": True},
    "gated_values": {"attn_gate_values": True},
}


def _decoder(settings: Mapping[str, Any]) -> Any:
    layers = use("x_transformers.Decoder")(dim=32, depth=2, heads=4, attn_dim_head=8, **settings)
    net = use("x_transformers.TransformerWrapper")(num_tokens=64, max_seq_len=32, attn_layers=layers)
    return use("x_transformers.AutoregressiveWrapper")(net)


for name, settings in DECODERS.items():
    row("x-transformers", f"xt_{name}", lambda settings=settings: _decoder(settings), a=whole(64, 17))


def _gpt(**changes: Any) -> Any:
    settings = {"block_size": 16, "vocab_size": 64, "padded_vocab_size": 64, "n_layer": 2, "n_head": 4, "n_embd": 32}
    return use("litgpt.GPT")(use("litgpt.Config")(**{**settings, **changes}))


LITGPT: Mapping[str, Mapping[str, Any]] = {
    "pythia": {},
    "llama": {
        "n_query_groups": 2,
        "norm_class_name": "RMSNorm",
        "mlp_class_name": "LLaMAMLP",
        "intermediate_size": 64,
        "rotary_percentage": 1.0,
        "bias": False,
        "parallel_residual": False,
    },
    "gemma": {
        "n_query_groups": 1,
        "norm_class_name": "RMSNorm",
        "mlp_class_name": "GemmaMLP",
        "intermediate_size": 64,
        "rotary_percentage": 1.0,
        "bias": False,
        "parallel_residual": False,
        "scale_embeddings": True,
    },
    "mixtral": {
        "n_query_groups": 2,
        "norm_class_name": "RMSNorm",
        "mlp_class_name": "LLaMAMoE",
        "intermediate_size": 64,
        "rotary_percentage": 1.0,
        "bias": False,
        "parallel_residual": False,
        "n_expert": 4,
        "n_expert_per_token": 2,
    },
}
for name, settings in LITGPT.items():
    row("litgpt", f"litgpt_{name}", lambda settings=settings: _gpt(**settings), a=whole(64, 12), target=whole(64, 12))

TUNE = {
    "vocab_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "embed_dim": 32,
    "max_seq_len": 16,
    "intermediate_dim": 64,
}
row("torchtune", "tune_llama3", ("torchtune.models.llama3.llama3", TUNE), a=whole(64, 12), target=whole(64, 12))
row("torchtune", "tune_qwen2", ("torchtune.models.qwen2.qwen2", TUNE), a=whole(64, 12), target=whole(64, 12))
row(
    "torchtune",
    "tune_gemma",
    ("torchtune.models.gemma.gemma", {**TUNE, "head_dim": 8}),
    a=whole(64, 12),
    target=whole(64, 12),
)
row(
    "torchtune",
    "tune_lora",
    (
        "torchtune.models.llama3.lora_llama3",
        {
            **TUNE,
            "lora_attn_modules": ["q_proj", "v_proj"],
            "apply_lora_to_mlp": True,
            "lora_rank": 4,
            "lora_alpha": 8.0,
        },
    ),
    a=whole(64, 12),
    target=whole(64, 12),
)
row(
    "xlstm",
    "xlstm",
    lambda: use("xlstm.xLSTMBlockStack")(
        use("xlstm.xLSTMBlockStackConfig")(
            mlstm_block=use("xlstm.mLSTMBlockConfig")(mlstm=use("xlstm.mLSTMLayerConfig")(num_heads=2)),
            context_length=12,
            num_blocks=2,
            embedding_dim=32,
        )
    ),
    a=real(12, 32),
)
