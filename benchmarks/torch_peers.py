"""Training steps as an expert writes them with torch alone: what `step_against_torch.py` holds programs against.

Each function makes a step of a GPT on the ranks of the default process group: a function of this rank's rows that
trains on them, and returns the loss where this rank has one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B, ScheduleZBVZeroBubble
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

Step = Callable[[Tensor, Tensor], "float | None"]
RATE = 1e-4


@dataclass(frozen=True)
class Size:
    """A GPT, the rows and tokens of a global batch, and with which probability what a block adds is dropped."""

    width: int
    layers: int
    heads: int
    words: int
    tokens: int
    rows: int
    dropped: float = 0.0


SIZES = {
    "compute": Size(256, 4, 8, 1024, 128, 8),
    "communication": Size(512, 4, 8, 1024, 32, 8),
    "tiny": Size(64, 4, 4, 128, 16, 16),
    "dropout": Size(256, 4, 8, 1024, 128, 8, 0.1),  # for rows whose peer draws on every rank by itself: one, dp, zero
}


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head_dim, self.dropped = size.width // size.heads, size.dropped
        self.first, self.second = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.q, self.k, self.v, self.out = (nn.Linear(size.width, size.width) for _ in range(4))
        self.up, self.down = nn.Linear(size.width, 4 * size.width), nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        y = self.first(x)
        q, k, v = (f(y).view(batch, tokens, -1, self.head_dim).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.out(y.transpose(1, 2).reshape(batch, tokens, -1)), self.dropped, self.training)
        y = self.down(F.gelu(self.up(self.second(x))))
        result: Tensor = x + F.dropout(y, self.dropped, self.training)
        return result


class GPT(nn.Module):
    """A decoder whose forward returns the loss."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.words = nn.Embedding(size.words, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, size.words)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return loss_of(self.head(self.norm(x)), labels)


def model_of(size: Size, device: str | torch.device = "cpu") -> GPT:
    torch.manual_seed(0)
    return GPT(size).to(device)


def sample(size: Size, device: str | torch.device = "cpu") -> dict[str, Tensor]:
    ids = torch.randint(size.words, (size.rows, size.tokens + 1), generator=torch.Generator().manual_seed(1))
    return {"ids": ids[:, :-1].contiguous().to(device), "labels": ids[:, 1:].contiguous().to(device)}


# as `nnscaler profile` asks for a model


def build_model() -> GPT:
    return model_of(SIZES["compute"])


def sample_inputs() -> dict[str, Tensor]:
    return sample(SIZES["compute"])


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the fused optimizer, which takes tensors of one kind at once: DTensors, or others."""
    every = list(parameters)
    kinds = [[p for p in every if isinstance(p, DTensor) is cut] for cut in (False, True)]
    return torch.optim.AdamW([{"params": those} for those in kinds if those], lr=RATE, fused=True)


def _step(forward: Callable[[Tensor, Tensor], Tensor], optimizer: torch.optim.Optimizer) -> Step:
    def step(ids: Tensor, labels: Tensor) -> float:
        loss = forward(ids, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return step


def eager(model: GPT) -> Step:
    return _step(model, adamw(model.parameters()))


def compiled(model: GPT) -> Step:
    return _step(torch.compile(model), adamw(model.parameters()))


def ddp(model: GPT) -> Step:
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return _step(wrapped, adamw(model.parameters()))


def compiled_ddp(model: GPT) -> Step:
    """Let torch cut the graph at DDP's buckets, so that they leave while backward goes on."""
    wrapped = torch.compile(DistributedDataParallel(model, gradient_as_bucket_view=True))
    return _step(wrapped, adamw(model.parameters()))


def _recompute(model: GPT) -> None:
    """Compute the activations of each block again in backward."""
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def recomputed(model: GPT) -> Step:
    _recompute(model)
    return compiled(model)


def recomputed_ddp(model: GPT) -> Step:
    _recompute(model)
    return compiled_ddp(model)


def zero_redundancy(model: GPT) -> Step:
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return _step(wrapped, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=RATE, fused=True))


def sharded(model: GPT, keep: bool = False, compiled: bool = False) -> Step:
    """`keep`: what forward has gathered is kept for backward, where it would be gathered once more. `compiled`: blocks
    are, one by one, as torchtitan does."""
    for block in model.blocks:
        if compiled:
            block.compile()
        fully_shard(block, reshard_after_forward=not keep)
    fully_shard(model, reshard_after_forward=not keep)
    return _step(model, adamw(model.parameters()))


def _tensor_parallel(model: GPT, mesh: torch.distributed.DeviceMesh) -> None:
    """Cut the words, each block and the head, as torch's tutorial does without sequence parallelism."""
    plan = {"words": RowwiseParallel(input_layouts=Replicate())}
    plan["head"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)  # type: ignore[assignment]
    for i in range(len(model.blocks)):
        plan |= {f"blocks.{i}.{name}": ColwiseParallel() for name in ("q", "k", "v", "up")}  # type: ignore[misc]
        plan |= {f"blocks.{i}.{name}": RowwiseParallel() for name in ("out", "down")}
    parallelize_module(model, mesh, plan)


def _with_parallel_loss(step: Step) -> Step:
    def inside(ids: Tensor, labels: Tensor) -> float | None:
        with loss_parallel():
            return step(ids, labels)

    return inside


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def tensor_parallel(model: GPT, compiled: bool = False) -> Step:
    """`compiled`: the model is, whole; torch 2.13 cannot run the backward of blocks that are compiled one by one."""
    _tensor_parallel(model, init_device_mesh(_device(model).type, (torch.distributed.get_world_size(),)))
    if compiled:
        model.compile()

    def whole(ids: Tensor, labels: Tensor) -> Tensor:
        loss = model(ids, labels)
        return loss.full_tensor() if hasattr(loss, "full_tensor") else loss

    return _with_parallel_loss(_step(whole, adamw(model.parameters())))


def recomputed_tensor_parallel(model: GPT) -> Step:
    """Compile nothing: torch 2.13 cannot run the backward of what is both."""
    _recompute(model)
    return tensor_parallel(model)


def _two_dims(model: GPT) -> torch.distributed.DeviceMesh:
    shape = (torch.distributed.get_world_size() // 2, 2)
    return init_device_mesh(_device(model).type, shape, mesh_dim_names=("dp", "tp"))


def ddp_tensor_parallel(model: GPT) -> Step:
    mesh = _two_dims(model)
    _tensor_parallel(model, mesh["tp"])
    _pre_dp_module_transform(model)
    wrapped = DistributedDataParallel(model, process_group=mesh.get_group("dp"), gradient_as_bucket_view=True)

    def whole(ids: Tensor, labels: Tensor) -> Tensor:
        loss = wrapped(ids, labels)
        return loss.full_tensor() if hasattr(loss, "full_tensor") else loss

    return _with_parallel_loss(_step(whole, adamw(model.parameters())))


def sharded_tensor_parallel(model: GPT) -> Step:
    mesh = _two_dims(model)
    _tensor_parallel(model, mesh["tp"])
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])

    def whole(ids: Tensor, labels: Tensor) -> Tensor:
        loss = model(ids, labels)
        return loss.full_tensor() if hasattr(loss, "full_tensor") else loss

    return _with_parallel_loss(_step(whole, adamw(model.parameters())))


class Part(nn.Module):
    """Some consecutive blocks of a GPT, with what stands before the first and after the last."""

    def __init__(self, model: GPT, index: int, count: int) -> None:
        super().__init__()
        layers = len(model.blocks)
        self.blocks = model.blocks[index * layers // count : (index + 1) * layers // count]
        self.words = model.words if index == 0 else None
        self.norm, self.head = (model.norm, model.head) if index == count - 1 else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        if self.words is not None:
            x = self.words(x)
        for block in self.blocks:
            x = block(x)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


def pipeline(model: GPT, micro_batches: int) -> Step:
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()

    def schedule(stages: list[PipelineStage], count: int, **options: Any) -> Schedule1F1B:
        return Schedule1F1B(stages[0], count, **options)

    return _pipeline(model, micro_batches, (rank,), ranks, schedule)


def interleaved(model: GPT, micro_batches: int) -> Step:
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return _pipeline(model, micro_batches, (rank, rank + ranks), 2 * ranks, ScheduleInterleaved1F1B)


def zero_bubble_v(model: GPT, micro_batches: int) -> Step:
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return _pipeline(model, micro_batches, (rank, 2 * ranks - 1 - rank), 2 * ranks, ScheduleZBVZeroBubble)


def _pipeline(
    model: GPT, micro_batches: int, here: tuple[int, ...], count: int, schedule_of: Callable[..., Any]
) -> Step:
    """`here`: the stages of this rank, of `count`."""
    parts = [Part(model, index, count) for index in here]
    stages = [PipelineStage(part, index, count, _device(model)) for part, index in zip(parts, here, strict=True)]
    schedule = schedule_of(stages, micro_batches, loss_fn=loss_of)
    optimizer = adamw([p for part in parts for p in part.parameters()])
    first, last = 0 in here, count - 1 in here

    def step(ids: Tensor, labels: Tensor) -> float | None:
        losses: list[Tensor] = []
        schedule.step(*([ids] if first else []), target=labels if last else None, losses=losses if last else None)
        optimizer.step()
        optimizer.zero_grad()
        return float(torch.stack(losses).mean()) if last else None

    return step
