"""Attention of `transformers` models is traced as eager runs it: without a mask where eager makes none."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nnscaler.errors import NnscalerError
from nnscaler.ir.graph import Operation, Slot
from nnscaler.tracing import trace
from nnscaler.tracing.export import run_export

SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}
IDS = torch.randint(3, 32, (2, 6), generator=torch.Generator().manual_seed(0))
PADDED = torch.tensor([[1] * 6, [0] * 2 + [1] * 4])


def llama(hf: ModuleType, **changes: Any) -> nn.Module:
    config = hf.LlamaConfig(**SIZES, num_key_value_heads=2, pad_token_id=0, **changes)
    return hf.LlamaForCausalLM(config).train()


def attention(model: nn.Module, **batch: Tensor) -> tuple[Operation, int]:
    """The attention of the traced model, and how many operations there are."""
    traced = trace(model, batch)
    assert traced.notes == ()
    found = [op for op in traced.graph.operations if op.operator == "aten.scaled_dot_product_attention.default"]
    return found[0], len(traced.graph.operations)


@pytest.mark.long
def test_a_causal_model_without_padding(hf: ModuleType) -> None:
    op, count = attention(llama(hf), input_ids=IDS, labels=IDS)
    assert len(op.inputs) == 3 and op.args[5] is True  # no mask, is_causal
    assert dict(op.kwargs)["enable_gqa"] is True
    masked, more = attention(llama(hf), input_ids=IDS, labels=IDS, attention_mask=PADDED)
    assert len(masked.inputs) == 4 and isinstance(masked.args[3], Slot)
    assert more > count


@pytest.mark.long
def test_a_mask_that_the_user_gives_is_never_left_out(hf: ModuleType) -> None:
    """All ones in this batch, and padding in the next."""
    op, _ = attention(llama(hf), input_ids=IDS, labels=IDS, attention_mask=torch.ones_like(IDS))
    assert len(op.inputs) == 4


@pytest.mark.long
def test_a_bidirectional_model_without_padding(hf: ModuleType) -> None:
    config = hf.BertConfig(**SIZES, attention_probs_dropout_prob=0.0)
    op, _ = attention(hf.BertForMaskedLM(config).train(), input_ids=IDS, labels=IDS)
    assert len(op.inputs) == 3 and op.args[4:6] != (0.0, True)


@pytest.mark.long
def test_a_model_whose_mask_differs_under_export(hf: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """PaliGemma on text: eager attends to everything, and under export it would be causal."""
    text = hf.GemmaConfig(**SIZES, num_key_value_heads=2, head_dim=4)
    vision = hf.SiglipVisionConfig(
        hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    config = hf.PaliGemmaConfig(
        vision_config=vision, text_config=text, projection_dim=16, image_token_index=31, hidden_size=16
    )
    model = hf.PaliGemmaForConditionalGeneration(config).train()
    batch = {"input_ids": IDS.clamp(max=30), "labels": IDS}
    assert trace(model, batch).notes == ()
    monkeypatch.setattr(run_export, "_QUESTIONS", ())
    monkeypatch.setattr(run_export, "_FLAGS", ())
    with pytest.raises(NnscalerError, match="the traced graph is not the model"):
        trace(model, batch)


@pytest.mark.long
def test_a_default_mask_that_is_made_in_eager_alone(hf: ModuleType) -> None:
    config = hf.LongT5Config(
        vocab_size=32, d_model=12, d_kv=4, d_ff=16, num_layers=1, num_decoder_layers=1, num_heads=3, local_radius=2,
        decoder_start_token_id=0,
    )  # fmt: skip
    model = hf.LongT5ForConditionalGeneration(config).train()
    assert trace(model, {"input_ids": IDS, "labels": IDS[:, :4]}).notes == ()


@pytest.mark.long
def test_without_the_shim_masks_are_explicit(hf: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_export, "_QUESTIONS", ())
    monkeypatch.setattr(run_export, "_FLAGS", ())
    op = next(
        op
        for op in trace(llama(hf), {"input_ids": IDS, "labels": IDS}).graph.operations
        if op.operator == "aten.scaled_dot_product_attention.default"
    )
    assert len(op.inputs) == 4


def test_labels_that_the_model_looks_at(hf: ModuleType) -> None:
    config = hf.Wav2Vec2Config(
        vocab_size=9, hidden_size=12, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        conv_dim=(8, 8), conv_stride=(2, 2), conv_kernel=(4, 3), num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, mask_time_prob=0.0, layerdrop=0.0, feat_extract_norm="layer",
    )  # fmt: skip
    model = hf.Wav2Vec2ForCTC(config).train()
    batch = {"input_values": torch.randn(2, 60), "labels": torch.tensor([[1, 2, 3], [4, 4, 1]])}
    with pytest.raises(NnscalerError) as caught:
        trace(model, batch)
    assert caught.value.code == "trace_failed" and "--loss-fn" in (caught.value.help or "")
    assert caught.value.where is not None and "labels.max()" in caught.value.where.text

    def ctc(outputs: Any, batch: dict[str, Tensor]) -> Tensor:
        scores = outputs.logits.log_softmax(-1).transpose(0, 1)
        frames = torch.full((scores.shape[1],), scores.shape[0])
        return nn.functional.ctc_loss(scores, batch["labels"], frames, torch.tensor([3, 2]), blank=0)

    traced = trace(model, batch, loss_fn=ctc)
    assert "aten.ctc_loss.Tensor" in {op.operator for op in traced.graph.operations}
    assert "lm_head.weight" in traced.state  # names are the model's own
