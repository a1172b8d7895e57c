"""Tensor and sequence parallelism in the words of `torch.distributed.tensor.parallel`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from verify.self_test.external.models import cross_entropy

Plan = Mapping[str, ParallelStyle]
After = Callable[[Any, DeviceMesh], object]


@dataclass(frozen=True)
class TensorParallel:
    """`parallelize_module` with a plan over one axis, and what the author does after it."""

    plan: Callable[[], Plan]
    axis: str = "tp"
    after: tuple[After, ...] = ()

    def __call__(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        parallelize_module(model, mesh[self.axis], dict(self.plan()))
        for step in self.after:
            step(model, mesh)
        return model


def tie_head(model: Any, mesh: DeviceMesh) -> None:
    """Tie the head to the words again: distributing made a parameter of each."""
    model.head.weight = model.words.weight


# -- plans ------------------------------------------------------------------------------------------------------------


def mlp_plan() -> Plan:
    """Split the hidden dim of each layer; norm and head stay as they are."""
    return {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}


def mlp_head_plan() -> Plan:
    """Split the head too, and gather its logits."""
    return {**mlp_plan(), "head": ColwiseParallel(output_layouts=Replicate())}


def mlp_row_head_plan() -> Plan:
    """Split what the head sums over; its input is divided at its door."""
    return {**mlp_plan(), "head": RowwiseParallel(input_layouts=Replicate())}


def mlp_dtensor_plan() -> Plan:
    """Leave the tensors between the two halves of a layer, and the logits, as DTensors."""
    return {
        "layers.*.up": ColwiseParallel(use_local_output=False),
        "layers.*.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate(), use_local_output=False),
    }


def mlp_uneven_plan() -> Plan:
    """Split a hidden dim that ranks do not divide: a DTensor between the halves knows its whole size."""
    return {"layers.*.up": ColwiseParallel(use_local_output=False), "layers.*.down": RowwiseParallel()}


def mlp_sequence_plan() -> Plan:
    """Divide the rows for the last norm and the head; the head's sum is gathered by rows."""
    return {
        **mlp_plan(),
        "layers.1": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(0)),
        "norm": SequenceParallel(sequence_dim=0),
        "head": ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()),
    }


def gpt_plan() -> Plan:
    """Split attention by heads and layers by their hidden dim."""
    return {
        "blocks.*.attention.q": ColwiseParallel(),
        "blocks.*.attention.k": ColwiseParallel(),
        "blocks.*.attention.v": ColwiseParallel(),
        "blocks.*.attention.o": RowwiseParallel(),
        "blocks.*.up": ColwiseParallel(),
        "blocks.*.down": RowwiseParallel(),
    }


def gpt_words_plan() -> Plan:
    """Split the words of the embedding and of the head too."""
    return {
        **gpt_plan(),
        "words": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }


def gpt_uneven_plan() -> Plan:
    """Split words and hidden dims that ranks do not divide."""
    return {**gpt_words_plan(), "blocks.*.up": ColwiseParallel(use_local_output=False)}


def gpt_wide_embedding_plan() -> Plan:
    """Split the embedding by its width, and gather what it returns."""
    return {**gpt_plan(), "words": ColwiseParallel(output_layouts=Replicate())}


def gpt_places_plan() -> Plan:
    """Split both embeddings by their rows."""
    return {**gpt_words_plan(), "places": RowwiseParallel(input_layouts=Replicate())}


def _sequence_block() -> Plan:
    return {
        "blocks.*.norm1": SequenceParallel(use_local_output=False),
        "blocks.*.attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "blocks.*.attention.q": ColwiseParallel(),
        "blocks.*.attention.k": ColwiseParallel(),
        "blocks.*.attention.v": ColwiseParallel(),
        "blocks.*.attention.o": RowwiseParallel(output_layouts=Shard(1)),
        "blocks.*.norm2": SequenceParallel(),
        "blocks.*.up": ColwiseParallel(input_layouts=Shard(1)),
        "blocks.*.down": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


def gpt_sequence_plan() -> Plan:
    """Sequence parallelism: norms, sums and embeddings on a part of each sentence."""
    return {
        **_sequence_block(),
        "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "places": ColwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
    }


def gpt_everything_plan() -> Plan:
    """Make a DTensor of every parameter, so that norms and updates see one kind: as `gpt_sequence_plan` does."""
    return {**gpt_sequence_plan(), "blocks.*.norm1": SequenceParallel()}


def llama_plan() -> Plan:
    """Split attention, layers, words and head."""
    return {**gpt_words_plan(), "blocks.*.gate": ColwiseParallel()}


def llama_sequence_plan() -> Plan:
    """Sequence parallelism for gated layers."""
    return {
        **_sequence_block(),
        "blocks.*.gate": ColwiseParallel(input_layouts=Shard(1)),
        "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    }


def llama_normed_plan() -> Plan:
    """Split heads that are normalised: the norms' gradients are summed, as they see some heads alone."""
    return {
        **llama_plan(),
        "blocks.*.attention.q_norm": SequenceParallel(sequence_dim=1, use_local_output=True),
        "blocks.*.attention.k_norm": SequenceParallel(sequence_dim=1, use_local_output=True),
    }


def llama_local_plan() -> Plan:
    """Sequence parallelism in which plain tensors go between modules: every rule must say how its input lies."""
    local = SequenceParallel(use_local_output=True)
    return {**llama_sequence_plan(), "blocks.*.norm1": local, "blocks.*.norm2": local, "norm": local}


def llama_module_input_plan() -> Plan:
    """Gather once at the door of the layer's norm's output, for gate and up together."""
    return {
        **llama_sequence_plan(),
        "blocks.*.norm2": SequenceParallel(use_local_output=False),
        "blocks.*.gate": ColwiseParallel(),
        "blocks.*.up": ColwiseParallel(),
        "blocks.*": PrepareModuleOutput(output_layouts=(Shard(1),), desired_output_layouts=(Shard(1),)),
    }


def with_loss_parallel(plan: Callable[[], Plan], head: ColwiseParallel) -> Callable[[], Plan]:
    """Leave the logits split by words."""
    return lambda: {**plan(), "head": head}


def moe_plan() -> Plan:
    """Split each expert by its hidden dim; the router is whole everywhere."""
    return {"experts.*.up": ColwiseParallel(), "experts.*.down": RowwiseParallel()}


def moe_router_plan() -> Plan:
    """Split the router by experts too, and gather its scores."""
    return {**moe_plan(), "router": ColwiseParallel(output_layouts=Replicate())}


# -- steps ------------------------------------------------------------------------------------------------------------


def loss_parallel_step(model: Callable[[Tensor], Tensor], batch: Any) -> Tensor:
    """Run forward and backward with logits that stay split by words."""
    inputs, labels = batch
    with loss_parallel():
        loss = cross_entropy(model(inputs), labels)
        loss.backward()
    return whole_loss(loss)


def whole_loss(loss: Tensor) -> Tensor:
    """Return a loss as a plain tensor without gradient."""
    return (loss.full_tensor() if isinstance(loss, DTensor) else loss).detach()


def dtensor_loss_step(model: Callable[[Tensor], Tensor], batch: Any) -> Tensor:
    """Compute the loss from logits that are DTensors; labels count as replicated beside them."""
    inputs, labels = batch
    with implicit_replication():
        loss = cross_entropy(model(inputs), labels)
        loss.backward()
    return whole_loss(loss)


# -- DTensor without a plan -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Distributed:
    """`distribute_module`: parameters by a table of placements, inputs and outputs by functions.

    placements   name of a parameter, or its last word -> its placement; others are replicated
    enter        make the inputs DTensors
    leave        make the output plain
    """

    placements: Mapping[str, Placement]
    enter: Callable[[Tensor, DeviceMesh], DTensor]
    leave: Callable[[DTensor], Tensor]
    axis: str = "tp"

    def __call__(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return distribute_module(
            model,
            mesh[self.axis],
            self.divide,
            lambda module, inputs, m: tuple(self.enter(x, m) for x in inputs),  # type: ignore[arg-type]
            lambda module, output, m: self.leave(output),  # type: ignore[arg-type]
        )

    def divide(self, path: str, module: nn.Module, mesh: DeviceMesh) -> None:
        """Distribute the parameters that a module has of its own."""
        for name, parameter in list(module.named_parameters(recurse=False)):
            full = f"{path}.{name}" if path else name
            placement = self.placements.get(full, Replicate())
            module.register_parameter(name, nn.Parameter(distribute_tensor(parameter, mesh, [placement])))


def replicated_input(x: Tensor, mesh: DeviceMesh) -> DTensor:
    """Take the input as equal everywhere."""
    return DTensor.from_local(x, mesh, [Replicate()])


def rows_input(x: Tensor, mesh: DeviceMesh) -> DTensor:
    """Take the input as this rank's rows."""
    return DTensor.from_local(x, mesh, [Shard(0)])


def divided_input(x: Tensor, mesh: DeviceMesh) -> DTensor:
    """Divide a whole input by its rows."""
    return distribute_tensor(x, mesh, [Shard(0)])


def gathered(output: DTensor) -> Tensor:
    """Return the whole output."""
    return output.full_tensor()


def own_rows(output: DTensor) -> Tensor:
    """Return the rows of this rank."""
    return output.to_local()


def own_rows_averaged(output: DTensor) -> Tensor:
    """Return the rows of this rank; the loss of all is the mean of the ranks' means."""
    return _Divided.apply(output.to_local(), output.device_mesh.size())  # type: ignore[no-any-return,no-untyped-call]


class _Divided(torch.autograd.Function):
    """Return the tensor; divide its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: int) -> Tensor:
        ctx.parts = parts
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] / ctx.parts, None


AVERAGED = Partial("avg")
EVERYWHERE = Replicate()


@dataclass(frozen=True)
class LocalLayers:
    """Data parallelism by DTensor parameters whose whole values compute; their gradients are declared as partial.

    gradient   how the gradients of the whole values add up; None: not declared
    rest       how parameters lie between their uses
    """

    gradient: Placement | None = AVERAGED
    rest: Placement = EVERYWHERE
    axis: str = "dp"

    def __call__(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        for name, layer in list(model.named_modules()):
            if isinstance(layer, nn.Linear | nn.LayerNorm):
                parent = model.get_submodule(name.rpartition(".")[0])
                made = LocalLayer(layer, mesh[self.axis], self.gradient, self.rest)
                setattr(parent, name.rpartition(".")[2], made)
        return model


class LocalLayer(nn.Module):
    """A linear layer or a norm over DTensors that computes with plain tensors."""

    def __init__(
        self, layer: nn.Linear | nn.LayerNorm, mesh: DeviceMesh, gradient: Placement | None, rest: Placement
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(distribute_tensor(layer.weight, mesh, [rest]))
        self.bias = nn.Parameter(distribute_tensor(layer.bias, mesh, [rest]))
        self.gradient = None if gradient is None else [gradient]
        self.shape = layer.normalized_shape if isinstance(layer, nn.LayerNorm) else None

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.whole(self.weight), self.whole(self.bias)
        return F.linear(x, weight, bias) if self.shape is None else F.layer_norm(x, self.shape, weight, bias)

    def whole(self, parameter: Tensor) -> Tensor:
        """Return the whole value of a parameter."""
        assert isinstance(parameter, DTensor)
        if parameter.placements[0].is_replicate():
            return parameter.to_local(grad_placements=self.gradient)
        return parameter.full_tensor(grad_placements=self.gradient)
