"""Models of images: timm, torchvision, vit-pytorch, diffusers, MONAI, segmentation models, kornia."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from library_models.rows import fixed, real, row, unit, use, whole

SHALLOW = {"img_size": 32, "depth": 2}
TIMM: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "resnet18": (32, {}),
    "convnext_atto": (64, {}),
    "efficientnet_b0": (64, {}),
    "mobilenetv3_small_050": (64, {}),
    "vit_tiny_patch16_224": (32, {**SHALLOW, "patch_size": 8}),
    "swin_tiny_patch4_window7_224": (56, {"img_size": 56, "embed_dim": 24, "depths": (1, 1), "num_heads": (2, 2)}),
    "mixer_s32_224": (64, {"img_size": 64}),
    "maxvit_pico_rw_256": (64, {"img_size": 64}),
    "coatnet_pico_rw_224": (64, {"img_size": 64}),
    "eva02_tiny_patch14_224": (28, {"img_size": 28, "depth": 2}),
    "cait_xxs24_224": (32, SHALLOW),
    "xcit_nano_12_p16_224": (32, SHALLOW),
    "nfnet_l0": (32, {}),
    "regnetx_002": (32, {}),
    "densenet121": (32, {"block_config": (2, 2, 2, 2)}),
    "poolformer_s12": (64, {}),
    "hiera_tiny_224": (64, {"img_size": 64}),
    "mambaout_femto": (64, {"depths": (1, 1, 1, 1)}),
    "edgenext_xx_small": (64, {}),
    "pvt_v2_b0": (64, {"depths": (1, 1, 1, 1)}),
    "twins_svt_small": (64, {"img_size": 64, "depths": (1, 1, 2, 1)}),
    "gmlp_s16_224": (32, {"img_size": 32}),
    "resmlp_12_224": (32, {"img_size": 32}),
    "davit_tiny": (64, {"embed_dims": (24, 48, 96, 192), "depths": (1, 1, 1, 1), "num_heads": (2, 2, 4, 4)}),
    "focalnet_tiny_srf": (64, {}),
    "efficientvit_m0": (64, {"img_size": 64}),
    "repvgg_a0": (32, {}),
    "ghostnet_100": (64, {}),
    "crossvit_tiny_240": (240, {}),
    "deit3_small_patch16_224": (32, SHALLOW),
    "naflexvit_base_patch16_gap": (32, {"depth": 2, "embed_dim": 64, "num_heads": 4}),
    "volo_d1_224": (64, {"img_size": 64}),
    "tiny_vit_5m_224": (64, {"depths": (1, 1, 2, 1)}),
    "fastvit_t8": (64, {}),
    "starnet_s050": (64, {}),
    "rdnet_tiny": (64, {"num_blocks_list": (1, 1, 1, 1, 1, 1, 1)}),
}
for name, (size, settings) in TIMM.items():
    keywords = {"model_name": name, "num_classes": 10, **settings}
    row("timm", f"timm_{name}", ("timm.create_model", keywords), a=real(3, size, size), target=whole(10))

TORCHVISION: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "resnet18": (32, {}),
    "convnext_tiny": (32, {}),
    "shufflenet_v2_x0_5": (64, {}),
    "mnasnet0_5": (64, {}),
    "squeezenet1_1": (64, {}),
    "regnet_y_400mf": (32, {}),
    "googlenet": (64, {"aux_logits": False, "init_weights": False}),
    "vit_b_32": (64, {"image_size": 64}),
    "swin_v2_t": (64, {}),
    "maxvit_t": (224, {"input_size": (224, 224)}),
    "efficientnet_v2_s": (32, {}),
}
for name, (size, settings) in TORCHVISION.items():
    keywords = {"name": name, "weights": None, "num_classes": 10, **settings}
    row(
        "torchvision", f"tv_{name}", ("torchvision.models.get_model", keywords), a=real(3, size, size), target=whole(10)
    )
for name in ("deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large", "fcn_resnet50"):
    keywords = {"name": name, "weights": None, "weights_backbone": None, "num_classes": 2}
    if not name.startswith("lraspp"):
        keywords["aux_loss"] = False
    row("torchvision", f"tv_{name}", ("torchvision.models.get_model", keywords), a=real(3, 64, 64))
row(
    "torchvision",
    "tv_r3d_18",
    ("torchvision.models.video.r3d_18", {"num_classes": 10}),
    a=real(3, 4, 32, 32),
    target=whole(10),
)
row(
    "torchvision",
    "tv_raft_small",
    ("torchvision.models.optical_flow.raft_small", {}),
    size=2,
    call=lambda net, a, b: net(a, b, num_flow_updates=2)[-1],
    a=real(3, 128, 128),
    b=real(3, 128, 128),
    target=real(2, 128, 128),
)

PATCHES = {"image_size": 32, "patch_size": 8, "num_classes": 10, "dim": 32, "depth": 2, "heads": 4, "mlp_dim": 64}
NEST = {"image_size": 32, "patch_size": 4, "dim": 16, "heads": 2, "num_hierarchies": 2, "block_repeats": (1, 1)}
CCT = {"img_size": 32, "embedding_dim": 32, "n_conv_layers": 1, "kernel_size": 3, "stride": 2, "padding": 1}
POOLED = {"pooling_kernel_size": 3, "pooling_stride": 2, "pooling_padding": 1, "num_layers": 2, "num_heads": 2}
CVT = {f"s{i}_{key}": value for i in (1, 2, 3) for key, value in {"emb_dim": 16, "heads": 2, "depth": 1}.items()}
VITS: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "vit.ViT": (32, PATCHES),
    "simple_vit.SimpleViT": (32, PATCHES),
    "cait.CaiT": (32, {**PATCHES, "cls_depth": 1}),
    "deepvit.DeepViT": (32, PATCHES),
    "cct.CCT": (32, {**CCT, **POOLED, "mlp_ratio": 2.0, "num_classes": 10, "positional_embedding": "learnable"}),
    "rvt.RvT": (32, PATCHES),
    "nest.NesT": (32, {**NEST, "num_classes": 10}),
    "sep_vit.SepViT": (224, {"num_classes": 10, "dim": 8, "dim_head": 8, "heads": (1, 2, 2, 2), "depth": (1, 1, 1, 1)}),
    "parallel_vit.ViT": (32, {**PATCHES, "num_parallel_branches": 2}),
    "simple_vit_with_register_tokens.SimpleViT": (32, PATCHES),
    "normalized_vit.nViT": (32, PATCHES),
    "cvt.CvT": (32, {**CVT, "num_classes": 10}),
    "scalable_vit.ScalableViT": (
        64,
        {
            "num_classes": 10,
            "dim": 16,
            "heads": (2, 2, 2, 2),
            "depth": (1, 1, 1, 1),
            "ssa_dim_key": (8, 8, 8, 8),
            "reduction_factor": (4, 2, 1, 1),
            "window_size": (8, 4, None, None),
        },
    ),
    "vit_with_patch_dropout.ViT": (32, {**PATCHES, "patch_dropout": 0.25}),
}
for name, (size, keywords) in VITS.items():
    row(
        "vit-pytorch",
        f"vp_{name.partition('.')[0]}",
        (f"vit_pytorch.{name}", keywords),
        a=real(3, size, size),
        target=whole(10),
    )

UNET = {"sample_size": 16, "layers_per_block": 1, "block_out_channels": (16, 32), "norm_num_groups": 8}
PLAIN = {
    "in_channels": 3,
    "out_channels": 3,
    "attention_head_dim": 8,
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
}
CROSS = {
    "in_channels": 4,
    "out_channels": 4,
    "attention_head_dim": 4,
    "cross_attention_dim": 24,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
}
HEADS = {"num_attention_heads": 4, "attention_head_dim": 8, "in_channels": 4, "out_channels": 4, "num_layers": 2}
SD3 = {"joint_attention_dim": 24, "caption_projection_dim": 32, "pooled_projection_dim": 16, "pos_embed_max_size": 8}
FLUX = {
    "patch_size": 1,
    "in_channels": 4,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "pooled_projection_dim": 32,
    "axes_dims_rope": (4, 4, 8),
}
WAN = {
    "patch_size": (1, 2, 2),
    "text_dim": 16,
    "freq_dim": 32,
    "ffn_dim": 32,
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
    "rope_max_seq_len": 32,
}
VAE = {
    "in_channels": 3,
    "out_channels": 3,
    "block_out_channels": (16, 32),
    "norm_num_groups": 8,
    "latent_channels": 4,
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
}
STEP = whole(1000)
row(
    "diffusers",
    "dif_unet2d",
    ("diffusers.UNet2DModel", {**UNET, **PLAIN}),
    sample=real(3, 16, 16),
    timestep=STEP,
    target=real(3, 16, 16),
)
row(
    "diffusers",
    "dif_unetcond",
    ("diffusers.UNet2DConditionModel", {**UNET, **CROSS}),
    sample=real(4, 16, 16),
    timestep=STEP,
    encoder_hidden_states=real(6, 24),
    target=real(4, 16, 16),
)
row(
    "diffusers",
    "dif_dit",
    ("diffusers.DiTTransformer2DModel", {**HEADS, "sample_size": 8, "patch_size": 2, "num_embeds_ada_norm": 20}),
    hidden_states=real(4, 8, 8),
    timestep=STEP,
    class_labels=whole(20),
    target=real(4, 8, 8),
)
row(
    "diffusers",
    "dif_sd3",
    ("diffusers.SD3Transformer2DModel", {**HEADS, **SD3, "sample_size": 8, "patch_size": 2}),
    hidden_states=real(4, 8, 8),
    encoder_hidden_states=real(5, 24),
    pooled_projections=real(16),
    timestep=STEP,
    target=real(4, 8, 8),
)
row(
    "diffusers",
    "dif_flux",
    ("diffusers.FluxTransformer2DModel", FLUX),
    hidden_states=real(16, 4),
    encoder_hidden_states=real(6, 32),
    pooled_projections=real(32),
    timestep=unit(),
    img_ids=fixed(lambda g: use("torch.zeros")(16, 3)),
    txt_ids=fixed(lambda g: use("torch.zeros")(6, 3)),
    target=real(16, 4),
)
row("diffusers", "dif_vae", ("diffusers.AutoencoderKL", VAE), sample=real(3, 16, 16), target=real(3, 16, 16))
row(
    "diffusers",
    "dif_wan",
    ("diffusers.WanTransformer3DModel", {**HEADS, **WAN, "attention_head_dim": 12}),
    hidden_states=real(4, 2, 8, 8),
    timestep=STEP,
    encoder_hidden_states=real(5, 16),
    target=real(4, 2, 8, 8),
)
row(
    "diffusers",
    "dif_pixart",
    (
        "diffusers.PixArtTransformer2DModel",
        {
            **HEADS,
            "out_channels": 4,
            "sample_size": 8,
            "patch_size": 2,
            "cross_attention_dim": 32,
            "caption_channels": 24,
            "use_additional_conditions": False,
        },
    ),
    hidden_states=real(4, 8, 8),
    encoder_hidden_states=real(5, 24),
    timestep=STEP,
    target=real(4, 8, 8),
)
row(
    "diffusers",
    "dif_vq",
    (
        "diffusers.VQModel",
        {
            "block_out_channels": (16, 32),
            "norm_num_groups": 8,
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "up_block_types": ("UpDecoderBlock2D",) * 2,
            "num_vq_embeddings": 16,
        },
    ),
    sample=real(3, 16, 16),
    target=real(3, 16, 16),
)
row(
    "denoising-diffusion-pytorch",
    "ddpm",
    lambda: use("denoising_diffusion_pytorch.GaussianDiffusion")(
        use("denoising_diffusion_pytorch.Unet")(dim=16, dim_mults=(1, 2), flash_attn=False), image_size=16, timesteps=20
    ),
    a=unit(3, 16, 16),
)

FLAT = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2}
DOWN = {"channels": (8, 16, 32), "strides": (2, 2)}
UNETR = {"img_size": (32, 32), "feature_size": 8, "hidden_size": 48, "mlp_dim": 96, "num_heads": 4}
FOUR = {"depths": (1, 1, 1, 1), "num_heads": (2, 2, 2, 2)}
MONAI: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "UNet": (32, {**FLAT, **DOWN}),
    "UNETR": (32, {**FLAT, **UNETR}),
    "SwinUNETR": (64, {**FLAT, **FOUR, "feature_size": 12}),
    "AttentionUnet": (32, {**FLAT, **DOWN}),
    "DynUNet": (32, {**FLAT, "kernel_size": (3, 3, 3), "strides": (1, 2, 2), "upsample_kernel_size": (2, 2)}),
    "VNet": (32, {**FLAT}),
    "BasicUNetPlusPlus": (32, {**FLAT, "features": (8, 8, 16, 16, 32, 8)}),
}
for name, (size, keywords) in MONAI.items():
    row("monai", f"monai_{name}", (f"monai.networks.nets.{name}", keywords), a=real(1, size, size))
row(
    "monai",
    "monai_SegResNet",
    ("monai.networks.nets.SegResNet", {**FLAT, "spatial_dims": 3, "init_filters": 8}),
    a=real(1, 16, 16, 16),
    target=real(2, 16, 16, 16),
)
row(
    "monai",
    "monai_dice",
    lambda: (
        use("monai.networks.nets.UNet")(**FLAT, **DOWN),
        use("monai.losses.DiceCELoss")(to_onehot_y=True, softmax=True),
    ),
    call=lambda net, loss, a, b: loss(net(a), b),
    a=real(1, 32, 32),
    b=whole(2, 1, 32, 32),
)
for name, encoder in {
    "Unet": "resnet18",
    "FPN": "mobilenet_v2",
    "Segformer": "mit_b0",
    "DeepLabV3Plus": "resnet18",
    "UnetPlusPlus": "resnet18",
    "PSPNet": "resnet18",
    "MAnet": "resnet18",
    "Linknet": "resnet18",
}.items():
    keywords = {"encoder_weights": None, "classes": 2, "encoder_name": encoder}
    row(
        "segmentation-models-pytorch",
        f"smp_{name}",
        (f"segmentation_models_pytorch.{name}", keywords),
        a=real(3, 64, 64),
        target=real(2, 64, 64),
    )
row("kornia", "kornia_hardnet", ("kornia.feature.HardNet", {"pretrained": False}), a=unit(1, 32, 32), target=real(128))
row("kornia", "kornia_sosnet", ("kornia.feature.SOSNet", {"pretrained": False}), a=unit(1, 32, 32), target=real(128))
row(
    "kornia",
    "kornia_vit",
    (
        "kornia.models.vit.VisionTransformer",
        {"image_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4},
    ),
    a=real(3, 32, 32),
)
row(
    "kornia",
    "kornia_ssim",
    lambda: (use("torch.nn.Conv2d")(3, 3, 3, padding=1),),
    a=unit(3, 32, 32),
    call=lambda net, a: use("kornia.losses.ssim_loss")(net(a), a, 5),
)
row(
    "kornia",
    "kornia_color",
    lambda: (use("torch.nn.Conv2d")(3, 3, 3, padding=1),),
    a=unit(3, 16, 16),
    call=lambda net, a: use("kornia.color.rgb_to_lab")(net(a).sigmoid()),
)
row(
    "kornia",
    "kornia_sobel",
    lambda: (use("torch.nn.Conv2d")(3, 3, 3, padding=1),),
    a=unit(3, 16, 16),
    call=lambda net, a: use("kornia.filters.sobel")(use("kornia.filters.gaussian_blur2d")(net(a), (3, 3), (1.0, 1.0))),
)
row(
    "kornia",
    "kornia_warp",
    lambda: (use("torch.nn.Linear")(4, 8),),
    a=real(4),
    b=unit(3, 16, 16),
    call=lambda net, a, b: use("kornia.geometry.warp_affine")(
        b, use("torch.eye")(2, 3) + 0.1 * net(a)[:, :6].view(-1, 2, 3), (16, 16)
    ),
)
