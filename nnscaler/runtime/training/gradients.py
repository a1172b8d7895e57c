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

# Sum the gradients that different ranks hold parts of, once per step, in buckets.
# A gradient is summed over the ranks that differ from this one only on the parameter's `reduce` axes, in every
# stage that holds a copy of it. Parameters with the same group and dtype share buckets. Every rank works through
# its groups in one global order (by their ranks), so two ranks that share several groups meet in the same order.

BUCKET_BYTES = 25 * 2**20
_NAMED = 3  # parameters of a bucket that an error names


@dataclass(frozen=True, slots=True)
class Holding:
    """One local tensor of a parameter: which one, and the ranks (in order) whose gradients add up to its gradient."""

    fqn: str
    group: tuple[int, ...]


def holding(stage: Stage, description: Parameter) -> Holding:
    """Return where the gradient of this stage's shard of a parameter is summed."""
    here = unravel(stage.ranks.index(stage.rank), stage.axes)
    kept = [axis for axis in stage.axes if axis not in description.reduce]
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
    """Holds what `.grad` had before the step apart, so that only this step's gradients are summed over ranks.

    A used parameter that got no gradient here contributes zeros; an unused one keeps `.grad` as it was.
    """

    def __init__(self, stages: Mapping[int, Stage], communicator: Communicator) -> None:
        self._communicator = communicator
        self._holdings: dict[torch.nn.Parameter, Holding] = {}
        self._used: dict[torch.nn.Parameter, bool] = {}
        for stage in stages.values():
            for name, description in stage.parameters.items():
                parameter = getattr(stage, name)
                self._holdings[parameter] = holding(stage, description)
                self._used[parameter] = self._used.get(parameter, False) or description.used
        self._before: dict[torch.nn.Parameter, Tensor] = {}
        self._wide: dict[torch.nn.Parameter, Tensor] = {}

    def begin(self) -> None:
        self._before = {p: p.grad for p in self._holdings if p.grad is not None}
        self._wide = {}
        for parameter in self._holdings:
            parameter.grad = None

    def collect(self) -> None:
        """Move gradients of half precision into float32, after each backward."""
        for parameter in self._holdings:
            if parameter.dtype in _HALF and parameter.grad is not None:
                wide = parameter.grad.float()
                self._wide[parameter] = self._wide[parameter] + wide if parameter in self._wide else wide
                parameter.grad = None

    def finish(self, loss_scale: float = 1.0) -> None:
        """Sums over ranks, takes the scale of the loss out, and leaves the result, plus what was there before the
        step, in `.grad`."""
        used = [p for p in self._holdings if self._used[p]]
        summed = reduce_gradients([(self._holdings[p], self._local(p)) for p in used], self._communicator)
        for parameter, scaled in zip(used, summed, strict=True):
            gradient = scaled if loss_scale == 1.0 else scaled / loss_scale
            before = self._before.get(parameter)
            total = gradient if before is None else before.to(gradient.dtype) + gradient
            parameter.grad = total.to(parameter.dtype)
        for parameter in self._holdings:
            if not self._used[parameter]:
                parameter.grad = self._before.get(parameter)
        self._before, self._wide = {}, {}

    def _local(self, parameter: torch.nn.Parameter) -> Tensor:
        if parameter.dtype in _HALF:
            wide = self._wide.get(parameter)
            return torch.zeros_like(parameter, dtype=torch.float32) if wide is None else wide
        return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


# The norm of all gradients of a program, and gradients clipped to it.
# Each logical element counts once: a shard on its rank, a copy on the first rank that holds it, a tied parameter in
# the first stage that holds it. So the norm is that of the whole model, whatever the plan.

EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_ has it


def holds_first_copy(stage: Stage, description: Parameter | Buffer) -> bool:
    """Return whether no rank before this one, and no stage before, holds the same elements."""
    coordinates = stage.coordinates()
    states = description.states
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
            parameter = getattr(stage, name)
            if id(parameter) not in seen and parameter.grad is not None and holds_first_copy(stage, description):
                seen.add(id(parameter))
                yield parameter.grad


def _trained(stage: Stage) -> Iterator[torch.nn.Parameter]:
    return (getattr(stage, name) for name in stage.parameters)
