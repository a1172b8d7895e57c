"""The gradients of one step on one rank: accumulated over micro-batches, then summed over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from nnscaler.runtime.communication.communicator import Communicator, ProgramError
from nnscaler.runtime.layout import Sharded
from nnscaler.runtime.role import Buffer, Parameter, Stage
from nnscaler.runtime.shards import unravel
from nnscaler.runtime.training.at_rest import BUCKET_BYTES, AtRest, scatter
from nnscaler.runtime.training.autocast import dtype_named

# Sum the gradients that different ranks hold parts of, once per step, in buckets.
# A gradient is summed over the ranks that differ from this one only on the parameter's `reduce` axes, in every
# stage that holds a copy of it. Parameters with the same group and dtype share buckets. Every rank works through
# its groups in one global order (by their ranks), so two ranks that share several groups meet in the same order.

_NAMED = 3  # parameters of a bucket that an error names


@dataclass(frozen=True, slots=True)
class Holding:
    """One local tensor of a parameter: which one, and the ranks (in order) whose gradients add up to its gradient."""

    fqn: str
    group: tuple[int, ...]


def holding(stage: Stage, description: Parameter) -> Holding:
    """Return where the gradient of this stage's shard of a parameter at rest is summed."""
    here = unravel(stage.ranks.index(stage.rank), stage.axes)
    kept = [axis for axis in stage.axes if axis not in description.summed]
    positions = [
        position
        for position in range(len(stage.ranks))
        if all(unravel(position, stage.axes)[axis] == here[axis] for axis in kept)
    ]
    copies = description.copies or (tuple(stage.ranks),)
    return Holding(description.fqn, tuple(sorted({copy[position] for copy in copies for position in positions})))


def reduce_gradients(
    gradients: Sequence[tuple[Holding, Tensor]], communicator: Communicator, bucket_bytes: int = BUCKET_BYTES
) -> list[Tensor]:
    """Sum the gradients, and return them in the order given.

    Gradients with equal holdings are several local copies of one shard: they are added first, and all get the sum.
    """
    local: dict[tuple[tuple[int, ...], str, Holding], Tensor] = {}
    for held, gradient in gradients:
        key = (held.group, str(gradient.dtype), held)
        local[key] = local[key] + gradient if key in local else gradient
    order = sorted(local, key=lambda key: (key[0], key[1], key[2].fqn))
    summed: dict[tuple[tuple[int, ...], str, Holding], Tensor] = {}
    for bucket in _buckets(order, local, bucket_bytes):
        group = bucket[0][0]
        values = [local[key] for key in bucket]
        if len(group) > 1:
            with _told(communicator, bucket):
                values = _reduce_together(values, group, communicator)
        summed.update(zip(bucket, values, strict=True))
    return [summed[held.group, str(gradient.dtype), held] for held, gradient in gradients]


@contextmanager
def _told(communicator: Communicator, bucket: Sequence[tuple[tuple[int, ...], str, Holding]]) -> Iterator[None]:
    """Calls inside are recorded with the parameters whose gradients they sum."""
    named, more = [f"`{key[2].fqn}`" for key in bucket[:_NAMED]], len(bucket) - _NAMED
    before = communicator.context
    communicator.context = f"the gradient sum of {', '.join(named)}" + (f" and {more} more" if more > 0 else "")
    try:
        yield
    finally:
        communicator.context = before


def _buckets(
    order: Sequence[tuple[tuple[int, ...], str, Holding]],
    values: dict[tuple[tuple[int, ...], str, Holding], Tensor],
    bucket_bytes: int,
) -> list[list[tuple[tuple[int, ...], str, Holding]]]:
    """Consecutive keys with one group and dtype, up to `bucket_bytes` each (a larger tensor is a bucket of its own)."""
    buckets: list[list[tuple[tuple[int, ...], str, Holding]]] = []
    size = 0
    for key in order:
        weight = values[key].numel() * values[key].element_size()
        fits = bool(buckets) and buckets[-1][0][:2] == key[:2] and size + weight <= bucket_bytes
        if not fits:
            buckets.append([])
            size = 0
        buckets[-1].append(key)
        size += weight
    return buckets


def _reduce_together(values: Sequence[Tensor], group: tuple[int, ...], communicator: Communicator) -> list[Tensor]:
    if len(values) == 1:
        return [communicator.all_reduce(values[0], group)]
    flat = communicator.all_reduce(torch.cat([v.reshape(-1) for v in values]), group)
    pieces = flat.split([v.numel() for v in values])
    return [piece.view(value.shape).clone() for piece, value in zip(pieces, values, strict=True)]


_HALF = (torch.float16, torch.bfloat16)


class Gradients:
    """From the gradients of leaves to those of tensors at rest.

    What `.grad` had before the step is held apart, so that only this step's gradients are summed over ranks. A used
    parameter that got no gradient here contributes zeros; an unused one keeps `.grad` as it was.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        resting: Sequence[AtRest],
        communicator: Communicator,
        precision: str | None = None,
    ) -> None:
        self._communicator = communicator
        self._resting = list(resting)
        self._position = {entry.leaf: i for i, entry in enumerate(resting)}
        self._holdings: dict[torch.nn.Parameter, Holding] = {}  # by leaf, in order
        self._rest: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        self._used: dict[torch.nn.Parameter, bool] = {}
        self._summed_in: dict[torch.nn.Parameter, torch.dtype] = {}
        self._at_once: dict[int, list[torch.nn.Parameter]] = {}  # stage -> leaves that are divided after each backward
        for stage in stages.values():
            for name, description in stage.parameters.items():
                leaf = getattr(stage, name)
                self._rest[leaf] = stage.at_rest[name]
                self._holdings[leaf] = holding(stage, description)
                self._used[leaf] = self._used.get(leaf, False) or description.used
                if description.sums:
                    self._summed_in[leaf] = dtype_named(description.sums, precision)
                if description.rest and description.scatter == "micro_batch":
                    self._at_once.setdefault(stage.index, []).append(leaf)
        self._before: dict[torch.nn.Parameter, Tensor] = {}
        self._sums: dict[torch.nn.Parameter, Tensor] = {}  # of a leaf over micro-batches, where not in its `.grad`
        self._divided: dict[torch.nn.Parameter, Tensor] = {}  # the same, divided as the tensor at rest

    def begin(self) -> None:
        self._before = {leaf: rest.grad for leaf, rest in self._rest.items() if rest.grad is not None}
        self._sums, self._divided = {}, {}
        for leaf, rest in self._rest.items():
            leaf.grad = rest.grad = None

    def widen(self) -> None:
        """After any backward, move gradients of half precision into float32."""
        for leaf in self._holdings:
            if leaf.dtype in _HALF and leaf.grad is not None:
                wide = leaf.grad.float()
                self._sums[leaf] = self._sums[leaf] + wide if leaf in self._sums else wide
                leaf.grad = None

    def collect(self, stage: int) -> None:
        """After a backward that completes the gradients of this stage, B or W, widen them, and divide those of ZeRO-2.

        Every rank of the stage calls it after the same backward.
        """
        self.widen()
        leaves = [leaf for leaf in self._at_once.get(stage, ()) if self._used[leaf]]
        found = {self._position[leaf]: self._local(leaf) for leaf in leaves}
        for i, gradient in scatter(found, self._resting, self._communicator).items():
            leaf = self._resting[i].leaf
            wide = gradient.float() if gradient.dtype in _HALF else gradient
            self._divided[leaf] = self._divided[leaf] + wide if leaf in self._divided else wide
            self._sums.pop(leaf, None)
            leaf.grad = None

    def finish(self, loss_scale: float = 1.0) -> None:
        """Sums over ranks, takes the scale of the loss out, and leaves the result, plus what was there before the
        step, in `.grad` of the tensors at rest."""
        used = [leaf for leaf in self._holdings if self._used[leaf]]
        local = {leaf: self._divided[leaf] if leaf in self._divided else self._local(leaf) for leaf in used}
        waiting = [leaf for leaf in used if leaf in self._position and leaf not in self._divided]
        divided = scatter({self._position[leaf]: local[leaf] for leaf in waiting}, self._resting, self._communicator)
        local.update((self._resting[i].leaf, gradient) for i, gradient in divided.items())
        summed = reduce_gradients([(self._holdings[leaf], local[leaf]) for leaf in used], self._communicator)
        for leaf, scaled in zip(used, summed, strict=True):
            rest, before = self._rest[leaf], self._before.get(leaf)
            wide = scaled.float() if scaled.dtype in _HALF else scaled  # summed in half precision
            gradient = wide if loss_scale == 1.0 else wide / loss_scale
            total = gradient if before is None else before.to(gradient.dtype) + gradient
            if leaf is not rest:
                leaf.grad = None
            rest.grad = total.to(rest.dtype)
        for leaf, rest in self._rest.items():
            if not self._used[leaf]:
                rest.grad = self._before.get(leaf)
        self._before, self._sums, self._divided = {}, {}, {}

    def _local(self, leaf: torch.nn.Parameter) -> Tensor:
        """Return this rank's gradient of a leaf, in the dtype in which it is summed."""
        found = self._sums.get(leaf) if leaf.dtype in _HALF else leaf.grad
        if found is None:
            found = torch.zeros_like(leaf, dtype=torch.float32 if leaf.dtype in _HALF else leaf.dtype)
        return found.to(self._summed_in.get(leaf, found.dtype))


# The norm of all gradients of a program, and gradients clipped to it.
# Each logical element counts once: a shard on its rank, a copy on the first rank that holds it, a tied parameter in
# the first stage that holds it. So the norm is that of the whole model, whatever the plan.

EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_ has it


def holds_first_copy(stage: Stage, description: Parameter | Buffer) -> bool:
    """Return whether no rank before this one, and no stage before, holds the same elements."""
    coordinates = stage.coordinates()
    states = description.at_rest
    if any(coordinates[axis] for axis in stage.axes if not isinstance(states.get(axis), Sharded)):
        return False
    copies = description.copies if isinstance(description, Parameter) else ()
    return not copies or tuple(copies[0]) == tuple(stage.ranks)


def gradient_norm(stages: Sequence[Stage], communicator: Communicator, norm_type: float = 2.0) -> Tensor:
    """Return the norm of all gradients, in float64, the same bits on every rank.

    Every rank of the program must call it.

    Raises ProgramError for a norm that is not positive.
    """
    if not norm_type > 0:
        raise ProgramError(f"a norm of type {norm_type} does not exist: it must be positive")
    own = [torch.linalg.vector_norm(g, norm_type, dtype=torch.float64) for g in _counted(stages)]
    device = stages[0].device if stages else torch.device("cpu")
    everyone = tuple(range(communicator.world_size))
    if norm_type == inf:
        local = torch.stack(own).max() if own else torch.zeros((), dtype=torch.float64, device=device)
        return communicator.all_reduce(local, everyone, "max")
    local = torch.stack(own).pow(norm_type).sum() if own else torch.zeros((), dtype=torch.float64, device=device)
    return communicator.all_reduce(local, everyone).pow(1.0 / norm_type)


def clip_gradients(stages: Sequence[Stage], norm: Tensor, max_norm: float) -> None:
    """Scale every gradient by max_norm / norm where that is below 1."""
    factor = (max_norm / (norm + EPSILON)).clamp(max=1.0)
    for parameter in {id(p): p for stage in stages for p in _trained(stage)}.values():
        if parameter.grad is not None:
            parameter.grad = parameter.grad * factor.to(parameter.grad.dtype)


def _counted(stages: Sequence[Stage]) -> Iterator[Tensor]:
    seen: set[int] = set()
    for stage in stages:
        for name, description in stage.parameters.items():
            parameter = stage.at_rest[name]
            if id(parameter) not in seen and parameter.grad is not None and holds_first_copy(stage, description):
                seen.add(id(parameter))
                yield parameter.grad


def _trained(stage: Stage) -> Iterator[torch.nn.Parameter]:
    return (stage.at_rest[name] for name in stage.parameters)
