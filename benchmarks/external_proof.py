"""Time the proof of an external program: transformers' Llama in the shapes of Llama-3-405B, tensor by data parallel.

    python benchmarks/external_proof.py [--layers 126] [--tp 8] [--dp 128] [--sequence]

Nothing is computed: parameters and activations are fake. It prints the verdict, what was followed, and seconds by phase
(wall, and of the processor, which other work on the machine changes less).
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import LlamaConfig, LlamaForCausalLM

from verify.external.program import ExternalProgram
from verify.external.proof import prove_external

WORDS, LENGTH = 128256, 8192
COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWS = ("self_attn.o_proj", "mlp.down_proj")


def parallelize(model: nn.Module, mesh: Any, sequence: bool) -> nn.Module:
    """Columns and rows over tp (and the sequence between them), gradients averaged over dp by hooks."""
    rows = RowwiseParallel(output_layouts=Shard(1)) if sequence else RowwiseParallel()
    plan: dict[str, Any] = {}
    for i in range(len(model.model.layers)):
        layer = f"model.layers.{i}."
        plan |= {layer + name: ColwiseParallel() for name in COLUMNS} | {layer + name: rows for name in ROWS}
        if sequence:
            whole = PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": Shard(1)},
                desired_input_kwarg_layouts={"hidden_states": Replicate()},
                use_local_output=True,
            )
            only = PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=True
            )
            plan |= {layer + "self_attn": whole, layer + "mlp": only}
            names = ("input_layernorm", "post_attention_layernorm")
            plan |= {layer + name: SequenceParallel(use_local_output=True) for name in names}
    if sequence:
        plan["model.layers.0"] = PrepareModuleInput(
            input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=True
        )
        plan["model.norm"] = SequenceParallel()
        plan["lm_head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    parallelize_module(model, mesh["tp"], plan)
    group = mesh["dp"].get_group()

    def average(parameter: Tensor) -> None:
        assert parameter.grad is not None
        local = parameter.grad._local_tensor if isinstance(parameter.grad, DTensor) else parameter.grad
        local.copy_(collectives.all_reduce(local, "avg", group))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(average)
    return model


def program(layers: int, tp: int, dp: int, sequence: bool) -> ExternalProgram:
    """Return the program of these sizes: one row of 8,192 tokens for each data part."""
    config = LlamaConfig(
        hidden_size=16384,
        intermediate_size=53248,
        num_hidden_layers=layers,
        num_attention_heads=128,
        num_key_value_heads=8,
        vocab_size=WORDS,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )

    def batch() -> dict[str, Tensor]:
        ids = torch.zeros(dp, LENGTH, dtype=torch.long)
        return {"input_ids": ids, "labels": ids.clone()}

    return ExternalProgram(
        "llama",
        lambda: LlamaForCausalLM(config),
        batch,
        lambda model, mesh: parallelize(model, mesh, sequence),
        (("dp", dp), ("tp", tp)),
        ("dp",),
        step=lambda model, given: model(**given).loss,
    )


def main() -> None:
    """Prove one program and print what it took."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=126)
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--dp", type=int, default=128)
    parser.add_argument("--sequence", action="store_true", help="divide the sequence between blocks as well")
    given = parser.parse_args()
    wall, processor = time.perf_counter(), time.process_time()
    found = prove_external(program(given.layers, given.tp, given.dp, given.sequence))
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    print(f"{found.verdict}: {found.compared} things compared; ranks {found.ranks} traced")
    print(f"{found.calls} calls followed, {found.collectives} collectives; {found.classes} different")
    print(", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in found.seconds.items()))
    print(f"wall {wall:.1f} s, processor {processor:.1f} s")
    for finding in found.findings[:5]:
        print(f"{finding.code}: {finding.message} ({finding.where})")


if __name__ == "__main__":
    main()
