"""Compute the norm of all gradients of a program, and clip gradients to it.

Each logical element counts once: a shard on its rank, a copy on the first rank that holds it, a tied parameter in the
first stage that holds it. So the norm is that of the whole model, whatever the plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import inf
from operator import itemgetter

import torch
from torch import Tensor

from nnscaler.layout import Sharded
from nnscaler.runtime.communication.communicator import Communicator, ProgramError
from nnscaler.runtime.stage_base_class import Buffer, Parameter, Stage

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
    wide = {False: torch.float64, True: torch.complex128}
    held = [g for g in _counted(stages) if g.numel()]  # nothing may be left of one that is cut: it has no largest
    own = [torch.linalg.vector_norm(g, norm_type, dtype=wide[g.is_complex()]) for g in held]
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
            parameter.grad.mul_(factor.to(parameter.grad.dtype))


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


# Gradients that lie in one memory, apart.
# Of `p.view(2, 2) + q.view(2, 2)` autograd leaves two views of one tensor in `p.grad` and `q.grad`, and whatever then
# changes the one in place, changes both: the next backward adds to them twice, and clipping scales them twice.


def separate_gradients(leaves: Iterable[Tensor]) -> None:
    """Give each of the leaves' gradients memory of its own."""
    given = ((leaf, leaf.grad) for leaf in leaves)
    placed = {id(leaf): (g.data_ptr(), leaf, g) for leaf, g in given if g is not None and g.layout is torch.strided}
    end = 0
    for start, leaf, gradient in sorted(placed.values(), key=itemgetter(0)):
        if start < end and gradient.nbytes:
            leaf.grad = gradient.clone()
        end = max(end, start + gradient.nbytes)
