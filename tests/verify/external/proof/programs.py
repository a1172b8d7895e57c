"""A small GPT, its parallel forms in the words of torch and by hand, and what can go wrong with each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

from verify.external.program import ExternalProgram

WORDS, WIDTH, HEAD, LENGTH, ROWS = 32, 16, 4, 8, 4


@dataclass(frozen=True)
class Faults:
    """What is done wrong; nothing by default.

    forward, backward  how often the sum over ranks is taken in the forward pass of a row, the backward pass of a column
    reduction          of these sums
    axis               over which they are taken
    early_bias         a row adds its bias before the sum
    scale              of the attention's scores
    swapped            queries and keys change places
    skipped            the last layer is left out
    lonely             there is no residual around the attention
    approximate        the other GELU
    seeing             attention sees what comes later
    cut                gradients do not flow through the feed-forward part
    total              the loss is a sum
    head               entries of a head
    frozen             a bias has no gradient
    """

    forward: int = 1
    backward: int = 1
    reduction: str = "sum"
    axis: str = "tp"
    early_bias: bool = False
    scale: float = 1.0
    swapped: bool = False
    skipped: bool = False
    lonely: bool = False
    approximate: bool = False
    seeing: bool = False
    cut: bool = False
    total: bool = False
    head: int = HEAD
    frozen: bool = False


RIGHT = Faults()


class Block(nn.Module):
    """Attention and a feed-forward part, each after a norm."""

    def __init__(self, faults: Faults = RIGHT) -> None:
        super().__init__()
        self.faults = faults
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block of x."""
        faults = self.faults
        h = self.norm1(x)
        q, k, v = (f(h).unflatten(-1, (-1, faults.head)).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = (k, q) if faults.swapped else (q, k)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=not faults.seeing, scale=faults.scale * HEAD**-0.5)
        a = self.o(a.transpose(1, 2).flatten(2))
        x = a if faults.lonely else x + a
        h = F.gelu(self.up(self.norm2(x)), approximate="tanh" if faults.approximate else "none")
        h = self.down(h)
        return x + (h.detach() if faults.cut else h)


class GPT(nn.Module):
    """Embeddings, blocks and a head; it returns the mean loss."""

    def __init__(self, layers: int = 1, faults: Faults = RIGHT) -> None:
        super().__init__()
        self.faults = faults
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(faults) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        if faults.frozen:
            self.norm.bias.requires_grad_(False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Return the loss."""
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks[: len(self.blocks) - 1] if self.faults.skipped else self.blocks:
            x = block(x)
        reduction = "sum" if self.faults.total else "mean"
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten(), reduction=reduction)


def batch() -> tuple[Tensor, Tensor]:
    """Return ids and labels."""
    return torch.arange(ROWS * LENGTH).reshape(ROWS, LENGTH) % WORDS, torch.zeros(ROWS, LENGTH, dtype=torch.long)


# -- in torch's own words


def tensor_parallel(model: nn.Module, mesh: Any, **changes: Any) -> nn.Module:
    """Columns and rows of each block over tp; `changes`: other styles, by name in the block."""
    plan: dict[str, Any] = {}
    for i in range(len(model.blocks)):
        styles = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
        styles |= {"o": RowwiseParallel(), "down": RowwiseParallel()} | changes
        plan |= {f"blocks.{i}.{name}": style for name, style in styles.items() if style is not None}
    return parallelize_module(model, mesh["tp"], plan)


def sequence_parallel(model: nn.Module, mesh: Any, **changes: Any) -> nn.Module:
    """The same, with the sequence divided between them."""
    plan: dict[str, Any] = {
        "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "places": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for i in range(len(model.blocks)):
        styles: dict[str, Any] = {name: ColwiseParallel(input_layouts=Shard(1)) for name in ("q", "k", "v", "up")}
        styles |= {name: RowwiseParallel(output_layouts=Shard(1)) for name in ("o", "down")}
        styles |= {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
        plan |= {f"blocks.{i}.{name}": style for name, style in styles.items()}
    plan |= {(name if name in plan else f"blocks.0.{name}"): style for name, style in changes.items()}
    return parallelize_module(model, mesh["tp"], {name: style for name, style in plan.items() if style is not None})


class Gathered(nn.Module):
    """A parametrisation that gathers a sharded parameter, as SimpleFSDP does."""

    def __init__(self, gradient: Any) -> None:
        super().__init__()
        self.gradient = gradient

    def forward(self, weight: Any) -> Tensor:
        """Return the whole parameter."""
        return weight.redistribute(placements=[Replicate()]).to_local(grad_placements=[self.gradient])


def data_parallel(model: nn.Module, mesh: Any, gradient: Any = None) -> nn.Module:
    """Every parameter sharded over dp, gathered where it is used, its gradient averaged."""
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            sharded = nn.Parameter(distribute_tensor(parameter, mesh["dp"], [Shard(0)]))
            module.register_parameter(name, sharded)
            parametrize.register_parametrization(module, name, Gathered(gradient or Partial("avg")), unsafe=True)
    return model


def averaged(inner: Callable[..., Any], how: str = "avg", axis: str = "dp", without: str = "", times: int = 1) -> Any:
    """Gradients are reduced over an axis by a hook, when they are there; `without`: those of one parameter are not."""

    def parallelize(model: nn.Module, mesh: Any) -> nn.Module:
        model = inner(model, mesh) or model
        for name, parameter in model.named_parameters():
            if name != without:
                parameter.register_post_accumulate_grad_hook(hook(mesh))
        return model

    def hook(mesh: Any) -> Any:
        def reduce(parameter: Tensor) -> None:
            assert parameter.grad is not None
            local = parameter.grad._local_tensor if isinstance(parameter.grad, DTensor) else parameter.grad
            for _ in range(times):
                local.copy_(collectives.all_reduce(local, how, mesh[axis].get_group()))

        return reduce

    return parallelize


# -- by hand


class Copied(torch.autograd.Function):
    """The same value on every rank, whose gradient is a sum over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, times: int, reduction: str) -> Tensor:
        """Return x."""
        ctx.given = group, times, reduction
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Return the sum."""
        group, times, reduction = ctx.given
        for _ in range(times):
            gradient = collectives.all_reduce(gradient, reduction, group)
        return gradient, None, None, None


class Summed(torch.autograd.Function):
    """The sum over ranks, whose gradient is the same on every rank."""

    @staticmethod
    def forward(_: Any, x: Tensor, group: Any, times: int, reduction: str) -> Tensor:
        """Return the sum."""
        for _ in range(times):
            x = collectives.all_reduce(x, reduction, group)
        return x.clone()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Any:
        """Return the gradient as it is."""
        return gradient, None, None, None


class Column(nn.Module):
    """A linear map of whose outputs each rank has some."""

    def __init__(self, whole: nn.Linear, mesh: Any, faults: Faults) -> None:
        super().__init__()
        self.weight = nn.Parameter(distribute_tensor(whole.weight, mesh["tp"], [Shard(0)]))
        self.bias = nn.Parameter(distribute_tensor(whole.bias, mesh["tp"], [Shard(0)]))
        self.group, self.faults = mesh[faults.axis].get_group(), faults

    def forward(self, x: Tensor) -> Tensor:
        """Return the rank's outputs."""
        x = Copied.apply(x, self.group, self.faults.backward, self.faults.reduction)
        return F.linear(x, self.weight.to_local(), self.bias.to_local())


class Row(nn.Module):
    """A linear map of whose inputs each rank has some."""

    def __init__(self, whole: nn.Linear, mesh: Any, faults: Faults) -> None:
        super().__init__()
        self.weight = nn.Parameter(distribute_tensor(whole.weight, mesh["tp"], [Shard(1)]))
        self.bias = nn.Parameter(whole.bias.detach())
        self.group, self.faults, self.ranks = mesh[faults.axis].get_group(), faults, mesh["tp"].size()

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs."""
        faults = self.faults
        bias = self.bias  # every rank adds its part, and so has a part of the gradient
        if not faults.early_bias:
            bias = Copied.apply(bias, self.group, 1, "sum") / self.ranks
        y = F.linear(x, self.weight.to_local(), bias)
        return Summed.apply(y, self.group, faults.forward, faults.reduction)


def by_hand(faults: Faults = RIGHT) -> Callable[..., Any]:
    """Columns and rows without styles of torch's, so that each sum can be left out."""

    def parallelize(model: nn.Module, mesh: Any) -> nn.Module:
        for block in model.blocks:
            for name in ("q", "k", "v", "up"):
                setattr(block, name, Column(getattr(block, name), mesh, faults))
            for name in ("o", "down"):
                setattr(block, name, Row(getattr(block, name), mesh, faults))
        return model

    return parallelize


# -- programs


def program(parallelize: Any, mesh: tuple[tuple[str, int], ...], layers: int = 1, **given: Any) -> ExternalProgram:
    """Return the program of this function on this mesh."""
    data = tuple(axis for axis, _ in mesh if axis == "dp")
    return ExternalProgram("check.py", lambda: GPT(layers), batch, parallelize, mesh, data, **given)


def other_model(faults: Faults, inner: Any) -> Callable[..., Any]:
    """Parallelise a model that is not the one of the check: the program has other code."""

    def parallelize(model: nn.Module, mesh: Any) -> Any:
        model.faults = faults
        for block in model.blocks:
            block.faults = faults
        if faults.frozen:
            model.norm.bias.requires_grad_(False)
        return inner(model, mesh)

    return parallelize


def replicated(*, ignored: str = "", called: bool = True) -> Any:
    """Wrap the model in DDP; `ignored`: a parameter; without `called`, its module is called."""

    def parallelize(model: nn.Module, mesh: Any) -> nn.Module:
        if ignored:
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [ignored])
        made = DistributedDataParallel(model, process_group=mesh["dp"].get_group())
        return made if called else made.module  # type: ignore[no-any-return]

    return parallelize


TP, DP, BOTH = (("tp", 2),), (("dp", 2),), (("dp", 2), ("tp", 2))


def right_programs(layers: int = 1) -> dict[str, ExternalProgram]:
    """Return programs that are right, by name."""
    return {
        "tensor parallel": program(tensor_parallel, TP, layers),
        "tensor parallel over 4": program(tensor_parallel, (("tp", 4),), layers),
        "sequence parallel": program(sequence_parallel, TP, layers),
        "tensor by data parallel": program(averaged(tensor_parallel), BOTH, layers),
        "sequence by data parallel": program(averaged(sequence_parallel), BOTH, layers),
        "sharded data parallel": program(data_parallel, DP, layers),
        "data parallel by hooks": program(averaged(lambda model, mesh: model), DP, layers),
        "DDP": program(replicated(), DP, layers),
        "by hand": program(by_hand(), TP, layers),
        "by hand on two axes": program(averaged(by_hand()), BOTH, layers),
    }


def mutants() -> dict[str, ExternalProgram]:
    """Return programs that are wrong, by what is wrong with them."""
    right = RIGHT
    hand = {
        "no sum in the forward pass": replace(right, forward=0),
        "the sum of the forward pass taken twice": replace(right, forward=2),
        "no sum in the backward pass": replace(right, backward=0),
        "the sum of the backward pass taken twice": replace(right, backward=2),
        "mean for sum": replace(right, reduction="avg"),
        "maximum for sum": replace(right, reduction="max"),
        "bias added by every rank": replace(right, early_bias=True),
    }
    models = {
        "scores of another scale": replace(right, scale=2.0),
        "queries for keys": replace(right, swapped=True),
        "a layer left out": replace(right, skipped=True),
        "no residual": replace(right, lonely=True),
        "another GELU": replace(right, approximate=True),
        "attention sees what comes later": replace(right, seeing=True),
        "gradients cut": replace(right, cut=True),
        "a sum for the mean loss": replace(right, total=True),
        "heads of another size": replace(right, head=2 * HEAD),
        "a parameter without gradient": replace(right, frozen=True),
    }
    found = {name: program(by_hand(faults), TP) for name, faults in hand.items()}
    found |= {f"{name} (tp)": program(other_model(f, tensor_parallel), TP) for name, f in models.items()}
    found |= {
        "sums over dp for tp": program(averaged(by_hand(replace(right, axis="dp"))), BOTH),
        "terms leave the attention": program(
            _changed(tensor_parallel, o=RowwiseParallel(output_layouts=Partial())), TP
        ),
        "terms leave the feed-forward part": program(
            _changed(tensor_parallel, down=RowwiseParallel(output_layouts=Partial())), TP
        ),
        "up is not parallel": program(_changed(tensor_parallel, up=None, down=None, o=None), TP),
        "a norm's gradient is not summed": program(_changed(sequence_parallel, norm1=None), TP),
        "the last norm's gradient is not summed": program(_changed(sequence_parallel, norm=None), TP),
        "places are not divided": program(_changed(sequence_parallel, places=None), TP),
        "rows of the batch scattered for the sequence": program(
            _changed(sequence_parallel, down=RowwiseParallel(output_layouts=Shard(0))), TP
        ),
        "the head is given the wrong layout": program(
            _changed(sequence_parallel, head=ColwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())), TP
        ),
        "gradients are not averaged": program(lambda model, mesh: model, DP),
        "gradients are summed": program(averaged(lambda model, mesh: model, "sum"), DP),
        "gradients are summed twice": program(averaged(tensor_parallel, "sum", times=2), BOTH),
        "gradients are averaged over tp": program(averaged(tensor_parallel, axis="tp"), BOTH),
        "one gradient is not averaged": program(averaged(lambda m, mesh: m, without="norm.bias"), DP),
        "the largest gradient is taken": program(averaged(lambda model, mesh: model, "max"), DP),
        "sharded gradients are summed": program(_changed(data_parallel, gradient=Partial("sum")), DP),
        "sharded gradients are one rank's": program(_changed(data_parallel, gradient=Replicate()), DP),
        "only tensor parallel": program(tensor_parallel, BOTH),
        "the loss is scaled": program(
            averaged(lambda model, mesh: model), DP, step=lambda m, b: 2 * m(*b), reference_step=lambda m, b: m(*b)
        ),
        "the batch is not divided": replace(program(averaged(lambda model, mesh: model, "sum"), DP), data_axes=()),
    }
    return found | _of_ddp()


def _of_ddp() -> dict[str, ExternalProgram]:
    return {
        "DDP ignores a parameter": program(replicated(ignored="norm.bias"), DP),
        "the module of DDP is called": program(replicated(called=False), DP),
    }


def _changed(inner: Callable[..., Any], **changes: Any) -> Callable[..., Any]:
    return lambda model, mesh: inner(model, mesh, **changes)
