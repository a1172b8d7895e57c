"""Tensor, sequence, context and expert parallelism by hand: plain shards, and autograd functions that communicate.

This is how Megatron-like code bases are written. The functions come in pairs: what one does forward, its conjugate
does backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from verify.self_test.external.models import Attention, Gpt, GptBlock, ResidualPair

Group = dist.ProcessGroup


def all_reduced(x: Tensor, group: Group) -> Tensor:
    """Return the sum over the group."""
    total = x.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total


def gathered(x: Tensor, group: Group, dim: int) -> Tensor:
    """Return the pieces of the group side by side."""
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim)


def scattered(x: Tensor, group: Group, dim: int) -> Tensor:
    """Return this rank's piece of the sum over the group."""
    return own_piece(all_reduced(x, group), group, dim)


def own_piece(x: Tensor, group: Group, dim: int) -> Tensor:
    """Return this rank's piece."""
    return x.chunk(group.size(), dim)[group.rank()].contiguous()


class Copied(torch.autograd.Function):
    """Hand a tensor to all ranks of a split layer; sum the gradients that come back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return all_reduced(gradients[0], ctx.group), None


class Reduced(torch.autograd.Function):
    """Sum what the ranks of a split layer return; every rank gets the whole gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return all_reduced(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


Move = Callable[[Tensor, Group, int], Tensor]


def with_backward(forward: Move, backward: Move) -> Move:
    """Return a function of a tensor, a group and a dim; another one of the same makes the gradient."""

    class Moved(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
            ctx.group, ctx.dim = group, dim
            return forward(x, group, dim)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return backward(gradients[0], ctx.group, ctx.dim), None, None

    return Moved.apply


gathered_for_split = with_backward(gathered, scattered)  # of a sequence, before a split layer
scattered_sum = with_backward(scattered, gathered)  # of what the ranks return
gathered_whole = with_backward(gathered, own_piece)  # where every rank goes on with it in the same way
divided = with_backward(own_piece, gathered)


@dataclass(frozen=True)
class Functions:
    """The communication of a hand-written program, by its four places; mistakes replace one of them.

    enter    before a split layer, of (x, group, dim)
    leave    after it
    divide   where the sequence is divided first
    join     where it is put together at the end
    """

    enter: Move
    leave: Move
    divide: Move = lambda x, group, dim: x
    join: Move = lambda x, group, dim: x


PLAIN = Functions(lambda x, group, dim: Copied.apply(x, group), lambda x, group, dim: Reduced.apply(x, group))  # type: ignore[no-untyped-call]
SEQUENCE = Functions(gathered_for_split, scattered_sum, divided, gathered_whole)


def keep_rows(weight: Tensor, group: Group) -> nn.Parameter:
    """Keep this rank's rows of a weight."""
    return marked(own_piece(weight.detach(), group, 0))


def keep_columns(weight: Tensor, group: Group) -> nn.Parameter:
    """Keep this rank's columns of a weight."""
    return marked(own_piece(weight.detach(), group, 1))


def marked(piece: Tensor) -> nn.Parameter:
    """Mark a parameter as a shard, for the norm of gradients."""
    parameter = nn.Parameter(piece)
    parameter.is_split = True  # type: ignore[attr-defined]
    return parameter


class SplitColumns(nn.Module):
    """A linear layer that has some of its outputs."""

    def __init__(self, layer: nn.Linear, group: Group) -> None:
        super().__init__()
        self.weight = keep_rows(layer.weight, group)
        self.bias = None if layer.bias is None else keep_rows(layer.bias, group)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class SplitRows(nn.Module):
    """A linear layer that has some of its inputs; the bias is added once, after the sum."""

    def __init__(self, layer: nn.Linear, group: Group, functions: Functions, dim: int) -> None:
        super().__init__()
        self.weight = keep_columns(layer.weight, group)
        self.bias = layer.bias
        self.group, self.functions, self.dim = group, functions, dim

    def forward(self, x: Tensor) -> Tensor:
        y = self.functions.leave(F.linear(x, self.weight), self.group, self.dim)
        return y if self.bias is None else y + self.bias


class Entered(nn.Module):
    """Split layers that read one tensor, which enters them once."""

    def __init__(self, inner: nn.Module, group: Group, functions: Functions, dim: int) -> None:
        super().__init__()
        self.inner = inner
        self.group, self.functions, self.dim = group, functions, dim

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(self.functions.enter(x, self.group, self.dim))
        return result


@dataclass(frozen=True)
class Megatron:
    """Split the layers of a decoder or of an MLP over one axis, with plain tensors.

    functions  the communication
    sequence   norms and sums on a part of each sentence
    norms      sum the gradients of what is computed on parts of the sequence, when they are ready
    biases     and those of biases that are added to parts
    axis       of the mesh
    """

    functions: Functions = PLAIN
    sequence: bool = False
    norms: bool = True
    biases: bool = True
    axis: str = "tp"

    def __call__(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        group = mesh.get_group(self.axis)
        for layer in list(model.modules()):
            if isinstance(layer, ResidualPair | GptBlock):
                self.split(layer, "up", "down", group)
            if isinstance(layer, Attention):
                for name in ("q", "k", "v"):
                    setattr(layer, name, SplitColumns(getattr(layer, name), group))
                layer.o = SplitRows(layer.o, group, self.functions, 1)  # type: ignore[assignment]
            if isinstance(layer, GptBlock):
                layer.attention = Entered(layer.attention, group, self.functions, 1)  # type: ignore[assignment]
        if self.sequence:
            assert isinstance(model, Gpt)
            self.divide_sequence(model, group)
        return model

    def split(self, layer: nn.Module, up: str, down: str, group: Group) -> None:
        """Split a pair of layers."""
        first = SplitColumns(getattr(layer, up), group)
        setattr(layer, up, Entered(first, group, self.functions, 1))
        setattr(layer, down, SplitRows(getattr(layer, down), group, self.functions, 1))

    def divide_sequence(self, model: Gpt, group: Group) -> None:
        """Divide the sequence after the embeddings, and join it before the head."""
        blocks, norm = list(model.blocks.values()), model.norm
        blocks[0].register_forward_pre_hook(lambda m, x: self.functions.divide(x[0], group, 1))
        assert norm is not None
        norm.register_forward_hook(lambda m, x, y: self.functions.join(y, group, 1))
        on_parts = [p for name, p in model.named_parameters() if "norm" in name] if self.norms else []
        if self.biases:
            on_parts += [p for name, p in model.named_parameters() if name.endswith(("down.bias", "o.bias"))]
        for parameter in on_parts:
            parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad, group=group))


# -- words and losses that are split by words -------------------------------------------------------------------------


class SplitWords(nn.Module):
    """An embedding that has some of the words."""

    def __init__(self, words: nn.Embedding, group: Group, masked: bool = True) -> None:
        super().__init__()
        self.weight = keep_rows(words.weight, group)
        self.first = group.rank() * self.weight.shape[0]
        self.group, self.masked = group, masked

    def forward(self, ids: Tensor) -> Tensor:
        local = ids - self.first
        outside = (local < 0) | (local >= self.weight.shape[0])
        found = F.embedding(local.masked_fill(outside, 0), self.weight)
        if self.masked:
            found = found.masked_fill(outside[..., None], 0.0)
        return Reduced.apply(found, self.group)  # type: ignore[no-any-return, no-untyped-call]


class SplitCrossEntropy(torch.autograd.Function):
    """The loss of logits that are split by words, without gathering them."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, group: Group) -> Tensor:
        top = logits.max(-1).values
        dist.all_reduce(top, dist.ReduceOp.MAX, group)
        powers = (logits - top[:, None]).exp()
        total = all_reduced(powers.sum(-1), group)
        local = labels - group.rank() * logits.shape[1]
        inside = (local >= 0) & (local < logits.shape[1])
        picked = logits.gather(1, local.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
        label = all_reduced(torch.where(inside, picked, 0.0), group)
        ctx.save_for_backward(powers / total[:, None], local, inside)
        result: Tensor = (total.log() + top - label).mean()
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        shares, local, inside = ctx.saved_tensors
        result = shares.clone()
        rows = torch.arange(len(local))[inside]
        result[rows, local[inside]] -= 1.0
        return gradients[0] * result / len(local), None, None


@dataclass(frozen=True)
class SplitVocabulary:
    """Split words and head of a decoder by words; the loss never sees whole logits.

    inner   splits the layers
    masked  words of other ranks count as zero
    copied  sum the gradients that come back from the head
    """

    inner: Megatron
    masked: bool = True
    copied: bool = True

    def __call__(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        assert isinstance(model, Gpt) and model.words is not None and model.head is not None
        self.inner(model, mesh)
        group = mesh.get_group(self.inner.axis)
        tied = model.head.weight is model.words.weight
        words = SplitWords(model.words, group, self.masked)
        head: nn.Module = SplitColumns(model.head, group)
        if tied:
            head.weight = words.weight
        model.words = words  # type: ignore[assignment]
        model.head = Entered(head, group, PLAIN, 1) if self.copied else head  # type: ignore[assignment]
        model.loss_group = group  # type: ignore[assignment]
        return model


def split_loss_step(model: Any, batch: Any) -> Tensor:
    """Return the loss of logits that are split by words."""
    ids, labels = batch
    logits = model(ids).flatten(0, 1)
    return SplitCrossEntropy.apply(logits, labels.flatten(), model.loss_group)  # type: ignore[no-any-return, no-untyped-call]


@dataclass(frozen=True)
class ChunkedLoss:
    """The loss of a few rows at a time, so that the logits of all never exist; then the backward pass of the rest.

    reduced  sum over ranks the gradient that the head leaves at its input
    """

    reduced: bool = True
    count: int = 3

    def __call__(self, model: Any, batch: Any) -> Tensor:
        ids, labels = batch
        head, model.head = model.head, None
        hidden = model(ids)
        model.head = head
        leaf = hidden.detach().requires_grad_()
        total = torch.zeros(())
        for x, y in zip(leaf.chunk(self.count), labels.chunk(self.count), strict=True):
            loss = SplitCrossEntropy.apply(head.inner(x).flatten(0, 1), y.flatten(), model.loss_group)  # type: ignore[no-untyped-call]
            (loss / self.count).backward()
            total = total + loss.detach() / self.count
        assert leaf.grad is not None
        hidden.backward(all_reduced(leaf.grad, model.loss_group) if self.reduced else leaf.grad)
        return total
