"""The models of `paper.py` at the sizes of nnScaler's paper, on the meta device, and the tiny examples like them.

All are in half precision. They are traced as bfloat16 and priced as float16: the T5 of `transformers` asks in float16
whether any value of the whole batch overflows, which no micro-batch can answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import SwinConfig, SwinForImageClassification, T5Config, T5ForConditionalGeneration

from nnscaler.ir.graph import Graph
from nnscaler.model_file import import_user_file
from nnscaler.tracing import trace

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
HALF = torch.bfloat16
TOKENS = 1024
PIXELS, WINDOW = 1536, 48
SEQUENCES, RESIDUES, RUNS = 128, 256, 3


@dataclass(frozen=True, eq=False)
class PaperModel:
    """A model of the paper.

    name      as in the tables
    sizes     GPUs -> arguments of `build`
    build     the model and one global batch, both without data
    batch     samples of a global batch
    twin      the tiny example like it
    ratio     of the paper
    """

    name: str
    sizes: Mapping[int, tuple[int, ...]]
    build: Callable[..., tuple[nn.Module, dict[str, Tensor]]]
    batch: int
    twin: str
    ratio: float

    def graph(self, *sizes: int) -> Graph:
        """Trace the model of these sizes."""
        with torch.device("meta"):
            module, inputs = self.build(*sizes, batch=self.batch)
        return trace(module, inputs, self_check=False).graph


def swin(layers: int, hidden: int, heads: int, *, batch: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """Four stages, the third of which has all layers but six: 1.8 billion parameters at the smallest size.

    Attention is explicit, as on a V100. Windows are not shifted: `transformers` repeats its mask over the whole batch
    and adds it to a parameter, so that micro-batches would not make it smaller.
    """
    config = SwinConfig(
        image_size=PIXELS,
        patch_size=4,
        embed_dim=hidden,
        depths=[2, 2, layers - 6, 2],
        num_heads=[heads << stage for stage in range(4)],
        window_size=WINDOW,
        drop_path_rate=0.0,
        num_labels=1000,
        problem_type="single_label_classification",
        attn_implementation="eager",
    )
    model = SwinForImageClassification(config).to(HALF)
    for module in model.modules():
        if hasattr(module, "shift_size"):
            module.shift_size = 0
    images = torch.empty(batch, 3, PIXELS, PIXELS, dtype=HALF)
    return model, {"pixel_values": images, "labels": torch.empty(batch, dtype=torch.long)}


def t5(layers: int, hidden: int, heads: int, thousands: int, *, batch: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """Half of the layers in the encoder, half in the decoder; one table of words for both and for the head."""
    config = T5Config(
        vocab_size=thousands * 1000,
        d_model=hidden,
        d_kv=hidden // heads,
        d_ff=4 * hidden,
        num_layers=layers // 2,
        num_decoder_layers=layers // 2,
        num_heads=heads,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        use_cache=False,
        attn_implementation="eager",
    )
    ids = torch.empty(batch, TOKENS, dtype=torch.long)
    inputs = {"input_ids": ids, "attention_mask": torch.empty_like(ids), "labels": torch.empty_like(ids)}
    return T5ForConditionalGeneration(config).to(HALF), inputs


class Full(nn.Module):
    """A linear layer in float32: the loss adds its results up over all samples."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear.to(torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x.to(torch.float32))
        return result


def evoformer(blocks: int, width: int, heads: int, *, batch: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """`examples/evoformer.py` with three runs, the last one differentiated; pairs half as wide, heads in float32."""
    file = import_user_file(EXAMPLES / "evoformer.py")
    config = file.EvoformerConfig(
        residues=23,
        alignment=width,
        pairs=width // 2,
        heads=heads,
        pair_heads=heads // 2,
        outer=32,
        triangle=width // 2,
        bins=64,
        reach=32,
        blocks=blocks,
        recycles=RUNS - 1,
    )
    shape = (batch, SEQUENCES, RESIDUES)
    inputs = {
        "alignment": torch.empty(shape, dtype=torch.long),
        "present": torch.empty(shape, dtype=HALF),
        "masked": torch.empty(shape, dtype=torch.long),
        "distances": torch.empty((batch, RESIDUES, RESIDUES), dtype=torch.long),
    }
    model = file.Evoformer(config).to(HALF)
    model.residue_head, model.distance_head = Full(model.residue_head), Full(model.distance_head)
    return model, inputs


SWIN = PaperModel(
    "Swin",
    {4: (32, 512, 16), 8: (40, 768, 24), 16: (48, 1024, 32), 32: (56, 1536, 32)},
    swin,
    256,
    "swin_hf.py",
    3.5,
)
T5 = PaperModel(
    "T5",
    {4: (24, 2048, 32, 512), 8: (32, 3072, 48, 1024), 16: (32, 4096, 64, 1536), 32: (32, 6144, 96, 2048)},
    t5,
    256,
    "t5_hf.py",
    2.2,
)
ALPHAFOLD = PaperModel(
    "AlphaFold2-like",
    {4: (48, 256, 8), 8: (64, 512, 16), 16: (96, 1024, 32), 32: (128, 1024, 32)},
    evoformer,
    128,
    "evoformer.py::build_with_recycling",
    1.8,
)
MODELS: Sequence[PaperModel] = (SWIN, T5, ALPHAFOLD)
