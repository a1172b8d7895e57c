"""Context parallelism, expert parallelism and sharded optimizers by hand.

Torch's own `context_parallel` sends keys and values around. Two other ways are written out here: keys and values
gathered, and heads exchanged for places (Ulysses).
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
from torch.distributed.tensor.experimental import context_parallel

from verify.self_test.external.megatron_style_layers import (
    Copied,
    Group,
    Reduced,
    all_reduced,
    gathered_for_split,
    own_piece,
)
from verify.self_test.external.models import Attention, Gpt, Moe, clipped, cross_entropy


class Exchanged(torch.autograd.Function):
    """Send the i-th piece of dim 0 to rank i; backward, send them back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return exchanged(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return exchanged(gradients[0], ctx.group), None


def exchanged(x: Tensor, group: Group) -> Tensor:
    """Send the i-th piece of dim 0 to rank i, and return what arrives, in the order of ranks."""
    result = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(result, x.contiguous(), group=group)
    return result


# -- context parallelism ----------------------------------------------------------------------------------------------


class OwnPlaces(nn.Module):
    """Positions of this rank's piece of each sentence."""

    def __init__(self, places: nn.Embedding, group: Group, shifted: bool) -> None:
        super().__init__()
        self.weight = places.weight
        self.rank = group.rank() if shifted else 0

    def forward(self, numbers: Tensor) -> Tensor:
        return F.embedding(numbers + self.rank * len(numbers), self.weight)


class GatheredKeys(nn.Module):
    """Attention of this rank's queries to the keys and values of all ranks.

    gather  keys and values, with gradient
    shifted the mask knows where this rank's queries stand
    """

    def __init__(self, inner: Attention, group: Group, gather: Callable[..., Tensor], shifted: bool = True) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o, self.of_head = inner.q, inner.k, inner.v, inner.o, inner.of_head
        self.group, self.gather, self.shifted = group, gather, shifted

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, self.of_head)).transpose(1, 2) for part in (self.q, self.k, self.v))
        k, v = self.gather(k, self.group, 2), self.gather(v, self.group, 2)
        first = self.group.rank() * x.shape[1] if self.shifted else 0
        mask = torch.arange(k.shape[2]) <= first + torch.arange(x.shape[1])[:, None]
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        result: Tensor = self.o(found.transpose(1, 2).flatten(2))
        return result


class ExchangedHeads(nn.Module):
    """Attention of some heads to whole sentences: heads are exchanged for places, and back."""

    def __init__(self, inner: Attention, group: Group, exchange: Callable[..., Tensor]) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o, self.of_head = inner.q, inner.k, inner.v, inner.o, inner.of_head
        self.group, self.exchange = group, exchange

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.whole_sentences(part(x)) for part in (self.q, self.k, self.v))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        pieces = torch.stack(found.chunk(self.group.size(), 2))  # of places: ranks, rows, heads, places, head
        back = self.exchange(pieces, self.group)
        heads = back.transpose(0, 1).flatten(1, 2)
        result: Tensor = self.o(heads.transpose(1, 2).flatten(2))
        return result

    def whole_sentences(self, x: Tensor) -> Tensor:
        """Exchange all heads of some places for some heads of all places."""
        heads = x.unflatten(-1, (-1, self.of_head)).transpose(1, 2)
        arrived = self.exchange(torch.stack(heads.chunk(self.group.size(), 1)), self.group)
        return torch.cat(arrived.unbind(0), 2)


@dataclass(frozen=True)
class ContextParallel:
    """A decoder on pieces of sentences; gradients are averaged as in data parallelism.

    attention  makes the attention over all pieces, of (attention, group)
    shifted    positions know where this rank's piece stands
    average    each gradient when it is ready
    """

    attention: Callable[[Attention, Group], nn.Module]
    shifted: bool = True
    average: bool = True

    def __call__(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        assert isinstance(model, Gpt) and model.places is not None
        group = mesh.get_group("cp")
        model.places = OwnPlaces(model.places, group, self.shifted)  # type: ignore[assignment]
        for block in model.blocks.values():
            block.attention = self.attention(block.attention, group)  # type: ignore[arg-type]
        for parameter in model.parameters() if self.average else ():
            parameter.register_post_accumulate_grad_hook(lambda p: averaged(p, group))
        return model


def averaged(parameter: Tensor, group: Group) -> None:
    """Average a gradient over the group."""
    assert parameter.grad is not None
    dist.all_reduce(parameter.grad, group=group)
    parameter.grad /= group.size()


def gathered_keys(attention: Attention, group: Group) -> nn.Module:
    """Gather keys and values; the gradients of all ranks come back summed."""
    return GatheredKeys(attention, group, gathered_for_split)


def exchanged_heads(attention: Attention, group: Group) -> nn.Module:
    """Exchange heads for places."""
    return ExchangedHeads(attention, group, Exchanged.apply)


def own_places_step(model: Any, batch: Any) -> Tensor:
    """Return the loss of this rank's piece of every sentence."""
    ids, labels = (own_piece(t, dist.group.WORLD, 1) for t in batch)  # type: ignore[arg-type]
    return cross_entropy(model(ids), labels)


class Divided(nn.Module):
    """A decoder of which torch divides the sentences: it deals them out in pieces of their beginning and their end.

    placed  torch divides the positions as well; else they are those of one piece of the sentence
    """

    def __init__(self, model: Gpt, mesh: DeviceMesh, placed: bool) -> None:
        super().__init__()
        assert model.places is not None
        self.model, self.mesh = model, mesh
        self.places = None if placed else OwnPlaces(model.places, mesh.get_group(), shifted=True)
        self.table = model.places.weight
        model.places = None

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        buffers = [ids.clone(), labels.clone(), torch.arange(ids.shape[1])]
        with context_parallel(self.mesh, buffers=buffers, buffer_seq_dims=[1, 1, 0], no_restore_buffers={*buffers}):
            rows, wanted, places = buffers
            assert self.model.words is not None
            here = F.embedding(places, self.table) if self.places is None else self.places(torch.arange(rows.shape[1]))
            loss = cross_entropy(self.model(self.model.words(rows) + here), wanted)
            loss.backward()
        return loss.detach()


@dataclass(frozen=True)
class TorchContextParallel:
    """Torch divides the sentences; gradients are averaged as in data parallelism."""

    placed: bool = True
    average: bool = True

    def __call__(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        assert isinstance(model, Gpt)
        group = mesh.get_group("cp")
        for parameter in model.parameters() if self.average else ():
            parameter.register_post_accumulate_grad_hook(lambda p: averaged(p, group))
        return Divided(model, mesh["cp"], self.placed)


def divided_step(model: Any, batch: Any) -> Tensor:
    """Return the loss of what torch gives this rank of every sentence."""
    return model(*batch)  # type: ignore[no-any-return]


# -- expert parallelism -----------------------------------------------------------------------------------------------


class OwnExperts(nn.Module):
    """A mixture of which this rank has some experts; all ranks have the same rows.

    shared  sum the gradients that come back to rows and shares
    """

    def __init__(self, inner: Moe, group: Group, shared: Callable[[Tensor, Group], Tensor], router: bool) -> None:
        super().__init__()
        self.stem, self.router, self.head = inner.stem, inner.router, inner.head
        count = len(inner.experts) // group.size()
        self.first = group.rank() * count
        self.experts = inner.experts[self.first : self.first + count]
        self.weights = inner.weights
        self.group, self.shared, self.router_too = group, shared, router

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x))
        shares = self.weights(x)
        inside = self.shared(x, self.group)
        shares = self.shared(shares, self.group) if self.router_too else shares
        mixed = sum(shares[:, self.first + i, None] * expert(inside) for i, expert in enumerate(self.experts))
        result: Tensor = self.head(x + Reduced.apply(mixed, self.group))  # type: ignore[no-untyped-call]
        return result


class SentRows(nn.Module):
    """A mixture of which this rank has some experts and some rows: rows are sent to their experts, and back."""

    def __init__(self, inner: Moe, group: Group, exchange: Callable[..., Tensor]) -> None:
        super().__init__()
        self.stem, self.router, self.head = inner.stem, inner.router, inner.head
        self.count = len(inner.experts) // group.size()
        first = group.rank() * self.count
        self.experts = inner.experts[first : first + self.count]
        self.weights = inner.weights
        self.group, self.exchange = group, exchange

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x))
        shares = self.weights(x)
        chosen = (shares > 0).to(x.dtype).t()[:, :, None] * x  # experts, rows, width
        arrived = self.exchange(chosen, self.group).unflatten(0, (self.group.size(), self.count))
        done = torch.stack([expert(arrived[:, i]) for i, expert in enumerate(self.experts)], 1)
        back = self.exchange(done.flatten(0, 1), self.group)
        mixed = (shares.t()[:, :, None] * back).sum(0)
        result: Tensor = self.head(x + mixed)
        return result


@dataclass(frozen=True)
class ExpertParallel:
    """Experts over one axis.

    sent      rows are divided too, and sent to experts; else every rank has all rows
    shared    where rows enter the experts
    router    the router's shares enter them too
    exchange  of rows
    average   what is whole on every rank
    divide    the gradients of experts by the number of ranks
    """

    sent: bool = False
    shared: Callable[[Tensor, Group], Tensor] = Copied.apply
    router: bool = True
    exchange: Callable[[Tensor, Group], Tensor] = Exchanged.apply
    average: bool = True
    divide: bool = True

    def __call__(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        assert isinstance(model, Moe)
        group = mesh.get_group("ep")
        if not self.sent:
            return OwnExperts(model, group, self.shared, self.router)
        made = SentRows(model, group, self.exchange)
        for name, parameter in made.named_parameters():
            if "experts" in name:
                parameter.register_hook(lambda g: g / group.size() if self.divide else g)
            elif self.average:
                parameter.register_post_accumulate_grad_hook(lambda p: averaged(p, group))
        return made


# -- a sharded optimizer ----------------------------------------------------------------------------------------------


class OwnedSgd(torch.optim.SGD):
    """SGD with momentum in which each rank updates some parameters, and sends them to the others.

    send  what is updated; a mistake leaves it out
    """

    def __init__(self, parameters: Any, send: bool = True) -> None:
        self.every = list(parameters)
        self.send = send
        ranks, rank = dist.get_world_size(), dist.get_rank()
        super().__init__(self.every[rank::ranks], lr=0.1, momentum=0.9)

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for number, parameter in enumerate(self.every if self.send else ()):
            dist.broadcast(parameter.data, number % dist.get_world_size())
        return result


def owned_sgd(model: Any, send: bool = True) -> torch.optim.Optimizer:
    """Return the sharded optimizer for ranks, and SGD for the plain model."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        return OwnedSgd(model.parameters(), send)
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def total_norm_clip(model: Any, limit: float) -> Tensor:
    """Clip plain shards by the norm of the whole: shards are summed over ranks, replicas counted once."""
    size = dist.get_world_size()
    square = torch.zeros(())
    for parameter in model.parameters():
        if parameter.grad is not None:
            share = 1.0 if getattr(parameter, "is_split", False) else 1.0 / size
            square = square + share * parameter.grad.square().sum()
    norm = all_reduced(square, dist.group.WORLD).sqrt()  # type: ignore[arg-type]
    return clipped([p.grad for p in model.parameters() if p.grad is not None], norm, limit)
