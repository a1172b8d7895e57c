"""A Llama of `transformers` that goes on from saved weights, learns the manuals of this repository byte by byte, and is
saved as `from_pretrained` reads it.

    python examples/finetune_llama.py                    # stands in for a download: a folder of save_pretrained
    nnscaler train examples/finetune_llama.toml
    nnscaler checkpoint convert runs/finetuned out/ --format transformers --config runs/llama

The weights are read from their several files by each rank for itself, and no rank holds more than its shards: the model
that is compiled is one of the configuration alone.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

REPOSITORY = Path(__file__).resolve().parents[1]
PRETRAINED = REPOSITORY / "runs" / "llama"
CONTEXT = 64


def build_model() -> PreTrainedModel:
    """The model that `config.json` describes; its weights come from the files."""
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(PRETRAINED))
    return model


class Bytes(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Runs of CONTEXT bytes; the model itself compares each with the one that follows."""

    def __init__(self, text: bytes) -> None:
        self._ids = torch.tensor(list(text))

    def __len__(self) -> int:
        return len(self._ids) // CONTEXT

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = self._ids[index * CONTEXT : (index + 1) * CONTEXT]
        return {"input_ids": ids, "labels": ids}


def datasets() -> tuple[Bytes, Bytes]:
    """The manuals, but for the last one, which is kept for validation."""
    texts = [file.read_bytes() for file in sorted((REPOSITORY / "docs").glob("*.md"))]
    return Bytes(b"\n".join(texts[:-1])), Bytes(texts[-1])


def main() -> None:
    """Save a small Llama in several files, as a model hub has them."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        use_cache=False,
    )
    LlamaForCausalLM(config).save_pretrained(PRETRAINED, max_shard_size="1MB")


if __name__ == "__main__":
    main()
