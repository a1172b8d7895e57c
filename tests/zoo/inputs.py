"""Sample batches by kind: one function each, (configuration, batch) -> keyword arguments of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tests.zoo.shrink import IMAGE, LABELS, VOCABULARY

SOURCE, TARGET = 12, 9
Batch = dict[str, Any]


def _ids(batch: int, length: int = SOURCE) -> Tensor:
    return torch.randint(4, VOCABULARY - 10, (batch, length))


def _padded(batch: int, length: int = SOURCE) -> Tensor:
    """An attention mask with right padding of different lengths."""
    return (torch.arange(length) < torch.randint(length // 2, length + 1, (batch, 1))).long()


def _pixels(batch: int, channels: int = 3) -> Tensor:
    return torch.randn(batch, channels, IMAGE, IMAGE)


def _classes(batch: int) -> Tensor:
    return torch.randint(0, LABELS, (batch,))


def text(config: Any, batch: int) -> Batch:
    """Whole sequences: a causal model takes its fast path."""
    return {"input_ids": (ids := _ids(batch)), "labels": ids.clone()}


def padded_text(config: Any, batch: int) -> Batch:
    mask, ids = _padded(batch), _ids(batch)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def full_text(config: Any, batch: int) -> Batch:
    """For models that want a mask even though nothing is padded."""
    return {**text(config, batch), "attention_mask": torch.ones(batch, SOURCE, dtype=torch.long)}


def only_text(config: Any, batch: int) -> Batch:
    return {"input_ids": _ids(batch), "attention_mask": _padded(batch)}


def translation(config: Any, batch: int) -> Batch:
    return {**only_text(config, batch), "labels": _ids(batch, TARGET)}


def image(config: Any, batch: int) -> Batch:
    return {"pixel_values": _pixels(batch), "labels": _classes(batch)}


def only_image(config: Any, batch: int) -> Batch:
    return {"pixel_values": _pixels(batch)}


def segmentation(config: Any, batch: int) -> Batch:
    return {"pixel_values": _pixels(batch), "labels": torch.randint(0, LABELS, (batch, IMAGE, IMAGE))}


def depth(config: Any, batch: int) -> Batch:
    return {"pixel_values": _pixels(batch), "labels": torch.rand(batch, IMAGE, IMAGE) + 0.5}


def video(config: Any, batch: int) -> Batch:
    return {"pixel_values": torch.randn(batch, 4, 3, IMAGE, IMAGE), "labels": _classes(batch)}


def waves(config: Any, batch: int) -> Batch:
    """Raw audio; the loss is outside of the model."""
    return {"input_values": torch.randn(batch, 800)}


def audio_frames(config: Any, batch: int) -> Batch:
    return {"input_features": torch.randn(batch, 20, config.feature_projection_input_dim)}


def audio_class(config: Any, batch: int) -> Batch:
    return {"input_values": torch.randn(batch, 24, 20), "labels": _classes(batch)}


def dictation(config: Any, batch: int) -> Batch:
    mels = torch.randn(batch, config.num_mel_bins, 2 * config.max_source_positions)
    return {"input_features": mels, "labels": _ids(batch, TARGET)}


def frames_to_text(config: Any, batch: int) -> Batch:
    return {"input_features": torch.randn(batch, 24, config.input_feat_per_channel), "labels": _ids(batch, TARGET)}


def waves_to_text(config: Any, batch: int) -> Batch:
    return {"input_values": torch.randn(batch, 1600), "labels": _ids(batch, TARGET)}


def pairs(config: Any, batch: int) -> Batch:
    """Images and texts that belong together."""
    ids = _ids(batch)
    ids[:, -1] = VOCABULARY - 1  # some models read the text at its largest id
    return {"input_ids": ids, "pixel_values": _pixels(batch), "return_loss": True}


def image_and_text(config: Any, batch: int) -> Batch:
    return {"input_ids": (ids := _ids(batch)), "pixel_values": _pixels(batch), "labels": ids.clone()}


def question(config: Any, batch: int) -> Batch:
    return {"input_ids": _ids(batch), "pixel_values": _pixels(batch), "labels": torch.rand(batch, LABELS)}


def only_pair(config: Any, batch: int) -> Batch:
    return {"input_ids": _ids(batch), "pixel_values": _pixels(batch)}


def regions(config: Any, batch: int) -> Batch:
    return {
        "input_ids": _ids(batch),
        "attention_mask": torch.ones(batch, SOURCE, dtype=torch.long),
        "visual_embeds": torch.randn(batch, 5, config.visual_embedding_dim),
        "visual_attention_mask": torch.ones(batch, 5, dtype=torch.long),
        "labels": torch.rand(batch, LABELS),
    }


def boxes(config: Any, batch: int) -> Batch:
    return {
        "input_ids": _ids(batch),
        "visual_feats": torch.randn(batch, 5, config.visual_feat_dim),
        "visual_pos": torch.rand(batch, 5, 4),
    }


def image_tokens(config: Any, batch: int) -> Batch:
    """A picture inside of a text: as many image tokens as the tower gives."""
    count = {"internvl": 1}.get(config.model_type, 16)
    ids = torch.cat([torch.full((batch, count), config.image_token_id), _ids(batch)], dim=1)
    labels = ids.masked_fill(ids == config.image_token_id, -100)
    found: Batch = {"input_ids": ids, "pixel_values": _pixels(batch), "labels": labels}
    if config.model_type == "paligemma":
        kinds = torch.zeros_like(ids)
        kinds[:, -6:] = 1
        found |= {"token_type_ids": kinds}
    return found


def series(config: Any, batch: int) -> Batch:
    return {"past_values": torch.randn(batch, 32, 3), "future_values": torch.randn(batch, 6, 3)}


def seasons(config: Any, batch: int) -> Batch:
    return {
        "past_values": torch.rand(batch, 24) + 0.5,
        "past_time_features": torch.randn(batch, 24, 2),
        "past_observed_mask": torch.ones(batch, 24),
        "future_values": torch.rand(batch, 6),
        "future_time_features": torch.randn(batch, 6, 2),
    }


def games(config: Any, batch: int) -> Batch:
    return {
        "states": torch.randn(batch, 7, config.state_dim),
        "actions": torch.randn(batch, 7, config.act_dim),
        "rewards": torch.randn(batch, 7, 1),
        "returns_to_go": torch.randn(batch, 7, 1),
        "timesteps": torch.arange(7).repeat(batch, 1),
        "attention_mask": torch.ones(batch, 7),
    }


KINDS: Mapping[str, Callable[[Any, int], Batch]] = {
    f.__name__: f
    for f in (
        text, padded_text, full_text, only_text, translation, image, only_image, segmentation, depth, video, waves,
        audio_frames, audio_class, dictation, frames_to_text, waves_to_text, pairs, image_and_text, question, only_pair,
        regions, boxes, image_tokens, series, seasons, games,
    )
}  # fmt: skip
