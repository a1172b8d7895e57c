"""Models of tokens: long attention, state spaces, experts, quantisers, retrieval, images with texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from library_models.rows import real, row, use, whole

# what takes tokens and gives logits of each
SMALL = {"num_tokens": 64, "dim": 32, "depth": 2, "heads": 4, "dim_head": 8}
SEEN = {"num_tokens": 64, "dim": 32, "depth": 2, "heads": 4}
LOGITS: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "performer": ("performer-pytorch", "performer_pytorch.PerformerLM", {**SMALL, "max_seq_len": 16, "causal": True}),
    "linformer": ("linformer", "linformer.LinformerLM", {**SEEN, "seq_len": 16, "k": 8}),
    "reformer": ("reformer-pytorch", "reformer_pytorch.ReformerLM", {**SEEN, "max_seq_len": 16, "bucket_size": 4}),
    "local": (
        "local-attention",
        "local_attention.LocalTransformer",
        {**SMALL, "max_seq_len": 16, "local_attn_window_size": 4},
    ),
    "sinkhorn": (
        "sinkhorn-transformer",
        "sinkhorn_transformer.SinkhornTransformerLM",
        {**SEEN, "max_seq_len": 16, "bucket_size": 4},
    ),
    "routing": (
        "routing_transformer",
        "routing_transformer.RoutingTransformerLM",
        {**SEEN, "max_seq_len": 16, "window_size": 4},
    ),
    "gateloop": ("gateloop-transformer", "gateloop_transformer.Transformer", {"num_tokens": 64, "dim": 32, "depth": 2}),
    "mingru": ("minGRU-pytorch", "minGRU_pytorch.minLM.minLM", {"num_tokens": 64, "dim": 32, "depth": 2}),
    "gmlp": ("g-mlp-pytorch", "g_mlp_pytorch.gMLP", {"num_tokens": 64, "dim": 32, "depth": 2, "seq_len": 16}),
    "block_recurrent": (
        "block-recurrent-transformer-pytorch",
        "block_recurrent_transformer_pytorch.BlockRecurrentTransformer",
        {**SMALL, "max_seq_len": 16, "block_width": 8, "num_state_vectors": 8},
    ),
    "palm": ("palm-rlhf-pytorch", "palm_rlhf_pytorch.PaLM", {**SMALL, "flash_attn": False}),
    "recurrent_memory": (
        "recurrent-memory-transformer-pytorch",
        "recurrent_memory_transformer_pytorch.RecurrentMemoryTransformer",
        {**SMALL, "seq_len": 16, "num_memory_tokens": 4},
    ),
}
for name, (library, path, keywords) in LOGITS.items():
    row(
        library,
        f"lm_{name}",
        (path, keywords),
        a=whole(64, 16),
        target=whole(64, 16),
        call=lambda net, a: _first(net(a)),
    )


def _first(returned: Any) -> Any:
    return returned[0] if isinstance(returned, tuple) else returned


row(
    "MEGABYTE-pytorch",
    "megabyte",
    (
        "MEGABYTE_pytorch.MEGABYTE",
        {"num_tokens": 64, "dim": (32, 16), "depth": (1, 1), "max_seq_len": (4, 4), "flash_attn": False},
    ),
    a=whole(64, 16),
    call=lambda net, a: net(a, return_loss=True),
)
row(
    "titans-pytorch",
    "titans_mac",
    (
        "titans_pytorch.MemoryAsContextTransformer",
        {
            "num_tokens": 64,
            "dim": 32,
            "depth": 2,
            "heads": 2,
            "dim_head": 8,
            "segment_len": 8,
            "neural_memory_layers": (),
            "use_flex_attn": False,
        },
    ),
    a=whole(64, 17),
    call=lambda net, a: net(a, return_loss=True),
)
row(
    "coca-pytorch",
    "coca",
    lambda: use("coca_pytorch.CoCa")(
        dim=32,
        num_tokens=64,
        unimodal_depth=1,
        multimodal_depth=1,
        dim_head=8,
        heads=4,
        image_dim=32,
        img_encoder=use("library_models.sequences.patches")(),
    ),
    text=whole(64, 9),
    images=real(3, 32, 32),
    call=lambda net, text, images: net(text, images, return_loss=True),
)
row(
    "RETRO-pytorch",
    "retro",
    (
        "retro_pytorch.RETRO",
        {
            "num_tokens": 64,
            "chunk_size": 8,
            "max_seq_len": 16,
            "enc_dim": 32,
            "enc_depth": 1,
            "dec_dim": 32,
            "dec_depth": 2,
            "dec_cross_attn_layers": (2,),
            "heads": 2,
            "dim_head": 32,
            "use_deepnet": False,
        },
    ),
    a=whole(64, 17),
    b=whole(64, 2, 2, 16),
    call=lambda net, a, b: net(a, retrieved=b, return_loss=True),
)
row(
    "nystrom-attention",
    "nystrom",
    ("nystrom_attention.Nystromformer", {"dim": 32, "depth": 2, "heads": 4, "dim_head": 8, "num_landmarks": 4}),
    a=real(16, 32),
)
row(
    "perceiver-pytorch",
    "perceiver",
    (
        "perceiver_pytorch.Perceiver",
        {
            "input_channels": 3,
            "input_axis": 2,
            "num_freq_bands": 4,
            "max_freq": 10.0,
            "depth": 2,
            "num_latents": 8,
            "latent_dim": 16,
            "cross_heads": 1,
            "latent_heads": 2,
            "cross_dim_head": 8,
            "latent_dim_head": 8,
            "num_classes": 10,
        },
    ),
    a=real(8, 8, 3),
    target=whole(10),
)
row(
    "perceiver-pytorch",
    "perceiver_io",
    (
        "perceiver_pytorch.PerceiverIO",
        {
            "dim": 16,
            "queries_dim": 16,
            "logits_dim": 10,
            "depth": 2,
            "num_latents": 8,
            "latent_dim": 16,
            "cross_heads": 1,
            "latent_heads": 2,
            "cross_dim_head": 8,
            "latent_dim_head": 8,
        },
    ),
    a=real(12, 16),
    b=real(6, 16),
    call=lambda net, a, b: net(a, queries=b),
)
row("mixture-of-experts", "moe_lucid", ("mixture_of_experts.MoE", {"dim": 16, "num_experts": 4}), a=real(8, 16))
row(
    "st-moe-pytorch",
    "st_moe",
    ("st_moe_pytorch.MoE", {"dim": 16, "num_experts": 4, "gating_top_n": 2}),
    a=real(8, 16),
    call=lambda net, a: net(a).outputs,
)
row(
    "soft-moe-pytorch",
    "soft_moe",
    ("soft_moe_pytorch.SoftMoE", {"dim": 16, "seq_len": 8, "num_experts": 4}),
    a=real(8, 16),
)
row(
    "soft-moe-pytorch",
    "soft_moe_dynamic",
    ("soft_moe_pytorch.DynamicSlotsSoftMoE", {"dim": 16, "num_experts": 4}),
    a=real(8, 16),
)
row(
    "CoLT5-attention",
    "colt5",
    (
        "colt5_attention.ConditionalRoutedFeedForward",
        {"dim": 16, "light_ff_mult": 1, "heavy_ff_mult": 2, "num_heavy_tokens": 4},
    ),
    a=real(16, 16),
)
row(
    "hyper-connections",
    "hyper_connections",
    lambda: use("torch.nn.ModuleList")(
        use("hyper_connections.HyperConnections")(4, dim=16, layer_index=i, branch=use("torch.nn.Linear")(16, 16))
        for i in range(2)
    ),
    a=real(8, 16),
    call=lambda net, a: net[1](net[0](a.repeat_interleave(4, 0))),
)
row("vector-quantize-pytorch", "vq_lfq", ("vector_quantize_pytorch.LFQ", {"codebook_size": 16, "dim": 8}), a=real(6, 8))
row(
    "vector-quantize-pytorch",
    "vq_fsq",
    lambda: (use("torch.nn.Linear")(8, 8), use("vector_quantize_pytorch.FSQ")(levels=[4, 3, 3], dim=8)),
    a=real(6, 8),
    call=lambda net, vq, a: vq(net(a))[0],
)
row(
    "vector-quantize-pytorch",
    "vq_ema",
    lambda: (use("torch.nn.Linear")(8, 8), use("vector_quantize_pytorch.VectorQuantize")(dim=8, codebook_size=16)),
    a=real(6, 8),
    call=lambda net, vq, a: vq(net(a)),
)
row(
    "vector-quantize-pytorch",
    "vq_learned",
    lambda: (use("torch.nn.Linear")(8, 8), use("vector_quantize_pytorch.SimVQ")(dim=8, codebook_size=16)),
    a=real(6, 8),
    call=lambda net, vq, a: vq(net(a)),
)
row(
    "vector-quantize-pytorch",
    "vq_residual",
    lambda: (
        use("torch.nn.Linear")(8, 8),
        use("vector_quantize_pytorch.ResidualFSQ")(levels=[4, 3, 3], num_quantizers=2, dim=8),
    ),
    a=real(6, 8),
    call=lambda net, vq, a: vq(net(a))[0],
)
row(
    "rotary-embedding-torch",
    "rotary",
    lambda: (use("torch.nn.Linear")(16, 32), use("rotary_embedding_torch.RotaryEmbedding")(dim=8)),
    a=real(6, 16),
    call=lambda net, rotary, a: rotary.rotate_queries_or_keys(net(a).view(-1, 6, 4, 8).transpose(1, 2)),
)


def patches() -> Any:
    """Return a small vision transformer that gives one vector a patch."""
    net = use("vit_pytorch.SimpleViT")(
        image_size=32, patch_size=8, num_classes=10, dim=32, depth=1, heads=2, mlp_dim=32
    )
    return use("vit_pytorch.extractor.Extractor")(net, return_embeddings_only=True, detach=False)


def _clip() -> Any:
    image = use("open_clip.model.CLIPVisionCfg")(layers=2, width=64, head_width=16, patch_size=8, image_size=32)
    text = use("open_clip.model.CLIPTextCfg")(context_length=12, vocab_size=50, width=32, heads=4, layers=2)
    return use("open_clip.model.CLIP")(32, image, text), use("open_clip.ClipLoss")()


row(
    "open_clip_torch",
    "clip",
    _clip,
    call=lambda net, loss, a, b: loss(*net(a, b)[:3]),
    a=real(3, 32, 32),
    b=whole(50, 12),
)
row(
    "open_clip_torch",
    "siglip",
    lambda: (_clip()[0], use("open_clip.loss.SigLipLoss")()),
    a=real(3, 32, 32),
    b=whole(50, 12),
    call=lambda net, loss, a, b: loss(*net(a, b)[:3], logit_bias=None),
)
