"""Interpret the graph on the whole batch: the value of every logical tensor, the gradient that each operation sends
back, and the parameters after a step.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from itertools import product
from math import prod

import torch
from torch import Tensor

from nnscaler.ir.graph import Graph, Operation
from nnscaler.layout import Partial, State
from nnscaler.runtime.shards import Coordinates, ravel, shard
from nnscaler.runtime.tensor_bits_and_differences import is_whole
from nnscaler.runtime.training.autocast_on_any_device import AskedDtypes
from nnscaler.tracing.float64_run import exact_tensor
from nnscaler.tracing.run_graph import run_graph
from nnscaler.transform.hoist_whole_batch_values import SUFFIX
from verify.evidence.inputs.draw_values import random_terms

# The pieces that ranks should hold of a logical tensor, where its layout leaves a choice drawn at random.
#
# A partial sum may lie in any way whose sum is right. One rank with all of it and zeros elsewhere would hide what the
# other ranks do wrong, so every rank gets a random part.


class Dealer:
    """Deals the pieces of a tensor once, for all ranks and micro-batches; the same ones whoever asks first."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._lock = threading.Lock()
        self._dealt: dict[Hashable, dict[int, Tensor]] = {}

    def piece(
        self,
        key: Hashable,
        tensor: Tensor,
        states: Mapping[str, State],
        sizes: Mapping[str, int],
        coordinates: Coordinates,
    ) -> Tensor:
        """Return the piece at `coordinates`, its own memory. Raises ValueError when a size does not divide."""
        with self._lock:
            if key not in self._dealt:
                self._dealt[key] = deal(tensor, states, sizes, self._generator(key))
            return self._dealt[key][ravel(coordinates, sizes)].clone()

    def random_like(self, key: Hashable, tensor: Tensor) -> Tensor:
        """Return a normal tensor of the same shape."""
        return torch.randn(tensor.shape, dtype=torch.float64, generator=self._generator(key))

    def _generator(self, key: Hashable) -> torch.Generator:
        digest = sha256(repr((self._seed, key)).encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def deal(
    tensor: Tensor, states: Mapping[str, State], sizes: Mapping[str, int], generator: torch.Generator
) -> dict[int, Tensor]:
    """Cut a tensor into pieces: position on `sizes` -> piece."""
    combined = [axis for axis in sizes if isinstance(states.get(axis), Partial)]
    reductions = {state.reduction for axis in combined if isinstance(state := states[axis], Partial)}
    points = list(product(*(range(sizes[axis]) for axis in combined)))
    parts = _parts(tensor, len(points), "max" if "max" in reductions else "sum", generator)
    whole = {axis: state for axis, state in states.items() if axis not in combined}
    found: dict[int, Tensor] = {}
    for point in product(*(range(size) for size in sizes.values())):
        at = dict(zip(sizes, point, strict=True))
        part = parts[points.index(tuple(at[axis] for axis in combined))]
        found[ravel(at, sizes)] = shard(part, whole, sizes, at)
    assert len(found) == prod(sizes.values())
    return found


def _parts(tensor: Tensor, count: int, reduction: str, generator: torch.Generator) -> list[Tensor]:
    """Return `count` tensors whose sum, or maximum, is `tensor`."""
    if count == 1 or tensor.dtype == torch.bool:
        return [tensor] * count
    if reduction == "max":
        owner = torch.randint(count, tensor.shape, generator=generator)
        below = [torch.rand(tensor.shape, dtype=torch.float64, generator=generator) + 0.5 for _ in range(count)]
        return [torch.where(owner == i, tensor, (tensor - below[i]).to(tensor.dtype)) for i in range(count)]
    finite = tensor[torch.isfinite(tensor)] if tensor.numel() else tensor
    scale = float(finite.abs().double().mean()) + 1e-3 * float(finite.abs().max()) if finite.numel() else 1.0
    return random_terms(tensor, count, generator, real=True, scale=scale or 1.0)


# Values.


@dataclass(frozen=True)
class Logical:
    """One step of the graph, interpreted on the whole batch in float64. Each map is by tensor, `[*global shape]`.

    values      of every tensor
    gradients   of the loss
    cotangents  a random tensor for each that needs a gradient. It stands for the gradient in every test of a single
                statement, so that zeros in the real one hide nothing. None where nobody deals them.
    """

    graph: Graph
    step: int
    values: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    cotangents: Mapping[str, Tensor]

    def name_of(self, tensor: str) -> str:
        """Return the tensor of the model: what is computed once per step is computed again for each micro-batch."""
        return tensor.removesuffix(SUFFIX) if tensor not in self.values else tensor

    def value(self, tensor: str) -> Tensor | None:
        return self.values.get(self.name_of(tensor))

    @cached_property
    def _sent_back(self) -> dict[str, dict[str, Tensor]]:
        return {}

    def sent_back(self, operation: Operation) -> Mapping[str, Tensor]:
        """Return, by input, what the operation adds to its gradient when the outputs' gradients are the cotangents."""
        if operation.name not in self._sent_back:
            self._sent_back[operation.name] = _sent_back(self, operation)
        return self._sent_back[operation.name]


def interpret(
    graph: Graph, state: Mapping[str, Tensor], inputs: Mapping[str, Tensor], dealer: Dealer | None, step: int = 0
) -> Logical:
    """Interpret one step of the graph from `state`."""
    trainable = {t.fqns[0] for t in graph.with_role("parameter") if t.needs_grad}
    leaves = {
        name: t if is_whole(t) else exact_tensor(t).detach().requires_grad_(name in trainable)
        for name, t in state.items()
    }
    with torch.enable_grad():
        values = run_graph(graph, leaves, inputs, precision="float64")
    wanted = {name: t for name, t in values.items() if t.requires_grad}
    loss = values[graph.loss]
    with AskedDtypes():
        found = torch.autograd.grad(loss, list(wanted.values()), torch.ones_like(loss), allow_unused=True)
    gradients = {name: g for name, g in zip(wanted, found, strict=True) if g is not None}
    cotangents = {} if dealer is None else {n: dealer.random_like((n, "cotangent"), t) for n, t in wanted.items()}
    return Logical(graph, step, {name: t.detach() for name, t in values.items()}, gradients, cotangents)


def next_state(logical: Logical, state: Mapping[str, Tensor], learning_rate: float) -> dict[str, Tensor]:
    """Return the state after a step of SGD."""
    after = {name: exact_tensor(t) for name, t in state.items()}
    for tensor in logical.graph.with_role("parameter"):
        gradient = logical.gradients.get(tensor.name)
        if gradient is not None:
            value = logical.values[tensor.name] - learning_rate * gradient
            after.update(dict.fromkeys(tensor.fqns, value))
    for buffer, value_name in logical.graph.updates:
        after.update(dict.fromkeys(logical.graph.tensors[buffer].fqns, logical.values[value_name]))
    return after


def _sent_back(logical: Logical, operation: Operation) -> dict[str, Tensor]:
    """Run the operation alone. Empty where it records no gradient."""
    made = [name for name in operation.outputs if name is not None]
    cotangents = {name: logical.cotangents[name] for name in made if name in logical.cotangents}
    if not operation.region.grad_enabled or not cotangents:
        return {}
    tensors = {
        name: replace(logical.graph.tensors[name], role="input" if name in operation.inputs else "activation")
        for name in (*operation.inputs, *made)
    }
    alone = logical.graph.replace(tensors=tensors, operations=(operation,), updates=())
    leaves = {
        name: logical.values[name].detach().requires_grad_(name in logical.cotangents) for name in operation.inputs
    }
    with torch.enable_grad():
        values = run_graph(alone, {}, leaves, precision="float64")
    outputs = {name: values[name] for name in cotangents if values[name].requires_grad}
    trained = [name for name in leaves if leaves[name].requires_grad]
    if not outputs or not trained:
        return {}
    ends, given = list(outputs.values()), [cotangents[name] for name in outputs]
    with AskedDtypes():
        found = torch.autograd.grad(ends, [leaves[name] for name in trained], given, allow_unused=True)
    return {name: g for name, g in zip(trained, found, strict=True) if g is not None}
