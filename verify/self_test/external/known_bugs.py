"""Bugs of other projects, planted again from their descriptions in code of our own. `thread`: where they were told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from verify.self_test.external import context_expert_and_sharded_optimizer as ds
from verify.self_test.external import edits_that_make_mutants as e
from verify.self_test.external import megatron_style_layers as hand
from verify.self_test.external.edits_that_make_mutants import ExternalMutant
from verify.self_test.external.models import Moe, supervised
from verify.self_test.external.mutants import fully_shard as sharded_mutants
from verify.self_test.external.mutants import hand_written_parallelism as hand_mutants


class EnteredEarly(ds.OwnExperts):
    """Rows enter the experts before the router and the residual read them: those gradients are summed too."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(torch.tanh(self.stem(x)), self.group)
        shares = self.weights(x)
        mixed = sum(shares[:, self.first + i, None] * expert(x) for i, expert in enumerate(self.experts))
        result: Tensor = self.head(x + hand.Reduced.apply(mixed, self.group))  # type: ignore[no-untyped-call]
        return result


def _entered_early(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    assert isinstance(model, Moe)
    return EnteredEarly(model, mesh.get_group("ep"), hand.Copied.apply, True)


def _cleared_in_the_loop(model: Any, batch: Any) -> Tensor:
    losses = []
    for part in zip(*(t.chunk(2) for t in batch), strict=True):
        model.zero_grad()
        losses.append(supervised(model, part))
        (losses[-1] / 2).backward()
    return torch.stack(losses).mean().detach()


class _LabelsAlone(hand_mutants.SharesAlone):
    """The loss of split logits, with the identity as the gradient of log_softmax."""

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        shares, local, inside = ctx.saved_tensors
        result = torch.zeros_like(shares)
        result[torch.arange(len(local))[inside], local[inside]] = -1.0
        return gradients[0] * result / len(local), None, None


def _misspelt(rules: dict[str, Any]) -> dict[str, Any]:
    """Name modules that the model does not have: torch passes over such a rule with a warning."""
    return {name.replace("norm2", "ffn_norm"): style for name, style in rules.items()}


def bug(thread: str, base: str, what: str, causes: str, edit: e.Edit) -> ExternalMutant:
    """Return a row."""
    return ExternalMutant("known bug", what, base, edit, tuple(causes.split()), thread=thread)


ROWS: tuple[ExternalMutant, ...] = (
    bug("pytorch/torchtitan#4054", "ep=4 moe", "experts split without their own axis: gradients below them too large",
        "differs scaled", lambda p: replace(p, parallelize=_entered_early)),
    bug("pytorch/torchtitan#4245", "hand tp=4 gpt", "a bias is added on every rank before the sum", "differs",
        e.afterwards(hand_mutants.early_bias)),
    bug("pytorch/torchtitan#3412", "hand tp=2 gpt chunked loss", "a loss in chunks: a partial gradient taken as whole",
        "missing_reduction", e.step_choice(reduced=False)),
    bug("pytorch/torchtitan#3575", "fsdp=2 mlp accumulated 2", "gradients cleared within the loop over micro-batches",
        "differs scaled", e.stepping(lambda step: _cleared_in_the_loop)),
    bug("NVIDIA-NeMo/Automodel#1260", "dtensor full tensors", "the reduce-scatter lost behind full_tensor()",
        "missing_reduction own_rows", e.choice(gradient=None)),
    bug("pytorch/pytorch#190746", "hand tp=2 gpt words", "a split loss with the identity as gradient of log_softmax",
        "differs", hand_mutants.with_loss(_LabelsAlone)),
    bug("deepspeedai/DeepSpeed#8224", "by hand each use", "a module used twice is reduced once",
        "missing_reduction differs",
        e.choice(again=False)),
    bug("NVIDIA-NeMo/RL#3716", "tp=2 llama normed", "gradients of norms of queries and keys are not summed over tp",
        "missing_reduction", e.lacking("blocks.*.attention.q_norm", "blocks.*.attention.k_norm")),
    bug("huggingface/transformers#39674", "tp=2 llama", "the loss multiplied by the number of ranks under tp", "scaled",
        e.of_loss(lambda loss: loss * 2)),
    bug("huggingface/transformers#37474", "ddp=3 mlp uneven rows", "means over unequal parts averaged as if equal",
        "mean_of_means differs", e.step_choice(inner=supervised)),
    bug("huggingface/transformers#48792", "tp=2 gpt sequence", "a rule that matches no module is passed over",
        "missing_reduction", e.plan(_misspelt)),
    bug("meta-pytorch/torchtune#2420", "hsdp=2x2 gpt", "the norm for clipping is that of own shards",
        "differs scaled missing_reduction", e.program_choice(clip=sharded_mutants.local_norm)),
)  # fmt: skip
