"""Losses over a batch: lightly, pytorch-metric-learning, geomloss, kornia, torchmetrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from library_models.rows import real, row, use, whole


def plain() -> Any:
    """Return a small network of samples on their own."""
    return use("torch.nn.Sequential")(
        use("torch.nn.Linear")(12, 16), use("torch.nn.GELU")(), use("torch.nn.Linear")(16, 8)
    )


PAIRS: Mapping[str, Mapping[str, Any]] = {
    "NTXentLoss": {},
    "VICRegLoss": {},
    "BarlowTwinsLoss": {},
    "NegativeCosineSimilarity": {},
    "DCLLoss": {},
    "DCLWLoss": {},
    "TiCoLoss": {},
}
for name, keywords in PAIRS.items():
    row(
        "lightly",
        f"lightly_{name}",
        lambda name=name, keywords=keywords: (plain(), use(f"lightly.loss.{name}")(**keywords)),
        size=8,
        a=real(12),
        b=real(12),
        call=lambda net, loss, a, b: loss(net(a), net(b)),
    )
row(
    "lightly",
    "lightly_simclr",
    lambda: (plain(), use("lightly.models.modules.SimCLRProjectionHead")(8, 8, 4), use("lightly.loss.NTXentLoss")()),
    size=8,
    a=real(12),
    b=real(12),
    call=lambda net, head, loss, a, b: loss(head(net(a)), head(net(b))),
)
row(
    "lightly",
    "lightly_simsiam",
    lambda: (
        plain(),
        use("lightly.models.modules.SimSiamProjectionHead")(8, 8, 8),
        use("lightly.models.modules.SimSiamPredictionHead")(8, 4, 8),
        use("lightly.loss.NegativeCosineSimilarity")(),
    ),
    size=8,
    a=real(12),
    b=real(12),
    call=lambda net, head, guess, loss, a, b: (
        0.5 * (loss(guess(head(net(a))), head(net(b)).detach()) + loss(guess(head(net(b))), head(net(a)).detach()))
    ),
)
row(
    "lightly",
    "lightly_dino",
    lambda: (
        plain(),
        use("lightly.models.modules.DINOProjectionHead")(8, 16, 8, 12),
        use("lightly.loss.DINOLoss")(output_dim=12),
    ),
    size=8,
    a=real(12),
    b=real(12),
    call=lambda net, head, loss, a, b: loss([head(net(a)).detach()], [head(net(a)), head(net(b))], epoch=1),
)
row(
    "lightly",
    "lightly_swav",
    lambda: (plain(), use("lightly.models.modules.SwaVPrototypes")(8, 6), use("lightly.loss.SwaVLoss")()),
    size=8,
    a=real(12),
    b=real(12),
    call=lambda net, heads, loss, a, b: loss([heads(net(a)), heads(net(b))], []),
)
row(
    "byol-pytorch",
    "byol",
    lambda: use("byol_pytorch.BYOL")(
        use("torch.nn.Sequential")(use("torch.nn.Conv2d")(3, 8, 3, 2), use("torch.nn.Flatten")()),
        image_size=16,
        hidden_layer=-1,
        projection_size=8,
        projection_hidden_size=16,
        augment_fn=use("torch.nn.Identity")(),
        sync_batchnorm=False,
    ),
    size=8,
    a=real(3, 16, 16),
)

METRIC: Mapping[str, Mapping[str, Any]] = {
    "ContrastiveLoss": {},
    "TripletMarginLoss": {},
    "NTXentLoss": {},
    "SupConLoss": {},
    "CircleLoss": {},
    "MultiSimilarityLoss": {},
    "LiftedStructureLoss": {},
    "NPairsLoss": {},
    "SignalToNoiseRatioContrastiveLoss": {},
    "GeneralizedLiftedStructureLoss": {},
    "ArcFaceLoss": {"num_classes": 4, "embedding_size": 8},
    "CosFaceLoss": {"num_classes": 4, "embedding_size": 8},
    "ProxyAnchorLoss": {"num_classes": 4, "embedding_size": 8},
    "ProxyNCALoss": {"num_classes": 4, "embedding_size": 8},
    "SoftTripleLoss": {"num_classes": 4, "embedding_size": 8, "centers_per_class": 2},
    "SphereFaceLoss": {"num_classes": 4, "embedding_size": 8},
    "NormalizedSoftmaxLoss": {"num_classes": 4, "embedding_size": 8},
    "FastAPLoss": {},
    "TupletMarginLoss": {},
}
for name, keywords in METRIC.items():
    row(
        "pytorch-metric-learning",
        f"pml_{name}",
        lambda name=name, keywords=keywords: (plain(), use(f"pytorch_metric_learning.losses.{name}")(**keywords)),
        size=8,
        a=real(12),
        b=lambda n, g: use("torch.arange")(n) % 4,
        call=lambda net, loss, a, b: loss(net(a), b),
    )
row(
    "geomloss",
    "geom_sinkhorn",
    lambda: (plain(), use("geomloss.SamplesLoss")("sinkhorn", backend="tensorized", diameter=4.0)),
    size=8,
    a=real(12),
    b=real(8),
    call=lambda net, loss, a, b: loss(net(a), b),
)
row(
    "geomloss",
    "geom_gaussian",
    lambda: (plain(), use("geomloss.SamplesLoss")("gaussian", backend="tensorized", blur=0.5)),
    size=8,
    a=real(12),
    b=real(8),
    call=lambda net, loss, a, b: loss(net(a), b),
)
row(
    "kornia",
    "kornia_focal",
    lambda: (plain(), use("kornia.losses.FocalLoss")(0.5, reduction="mean")),
    size=8,
    a=real(12),
    b=whole(8),
    call=lambda net, loss, a, b: loss(net(a), b),
)
row(
    "TorchCRF",
    "crf",
    lambda: (use("torch.nn.Linear")(12, 5), use("TorchCRF.CRF")(5)),
    a=real(6, 12),
    b=whole(5, 6),
    call=lambda net, crf, a, b: -crf(net(a), b, use("torch.ones_like")(b, dtype=use("torch.bool"))).mean(),
)
row(
    "torchmetrics",
    "tm_ssim",
    lambda: use("torch.nn.Conv2d")(3, 3, 3, padding=1),
    a=real(3, 32, 32),
    call=lambda net, a: (
        1 - use("torchmetrics.functional.image.structural_similarity_index_measure")(net(a), a, data_range=4.0)
    ),
)
row(
    "torchmetrics",
    "tm_sisdr",
    lambda: use("torch.nn.Linear")(32, 32),
    a=real(32),
    b=real(32),
    call=lambda net, a, b: (
        -use("torchmetrics.functional.audio.scale_invariant_signal_distortion_ratio")(net(a), b).mean()
    ),
)
row(
    "torchmetrics",
    "tm_pearson",
    lambda: use("torch.nn.Linear")(32, 1),
    size=8,
    a=real(32),
    b=real(),
    call=lambda net, a, b: -use("torchmetrics.functional.regression.concordance_corrcoef")(net(a)[:, 0], b),
)
