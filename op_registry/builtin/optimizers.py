"""Annotations of the updates of torch's optimizers: along which dims of a parameter each of them may be cut.

An update is an operator: (parameter, gradient, state...) -> (parameter, state...). Elementwise it is `*, *, * -> *, *`,
and parameter, gradient and state may lie in shards of any kind. Where it needs the whole parameter (a norm of it, the
product of a matrix with itself), the dims are frozen. One annotation serves `verify-op`, which compares it with the
class, and training, which refuses shards that it does not allow. Importing this needs no torch.
"""

from __future__ import annotations

from collections.abc import Collection
from types import MappingProxyType
from typing import Literal

from op_registry.builtin._name_and_broadcast_dims import annotate, letters
from op_registry.call import Call

Cut = Literal["elementwise", "whole"]  # may be cut along every dim; along none

# Every hyper-parameter leaves these as they are: momentum and amsgrad add state, and no dim is reduced over.
_ELEMENTWISE = "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD".split()
# Adafactor: norms of the parameter and of its update, squares summed over rows and columns. Muon: the gradient, as a
# matrix, is made orthogonal.
_WHOLE = "Adafactor Muon".split()

_KINDS: tuple[tuple[Cut, list[str]], ...] = (("elementwise", _ELEMENTWISE), ("whole", _WHOLE))
UPDATES = MappingProxyType({f"torch.optim.{name}": kind for kind, names in _KINDS for name in names})

NO_UPDATE = MappingProxyType(
    {
        "torch.optim.LBFGS": "it steps along products of all parameters at once, and evaluates the loss anew in each"
        " step: its step is no function of one parameter and its gradient",
        "torch.optim.SparseAdam": "it takes sparse gradients, and compiled programs give dense ones",
        "torch.optim.Optimizer": "it is the base class, and has no step of its own",
    }
)


def update_annotation(call: Call, free: Collection[int]) -> str:
    """Return the annotation of an update whose parameter may be cut along the dims `free`, and along no other.

    The call has the parameter first, then its gradient, then its state. A dim of a state's tensor is that dim of the
    parameter which has its size: the same place first; one without is frozen.
    """
    parameter, *others = call.tensors()
    names = [n if i in free else f"{n}^" for i, n in enumerate(letters(parameter.ndim))]
    operands = [_operand(names, parameter.shape, tensor.shape) for tensor in (parameter, *others)]
    return annotate(operands, [operands[0], *operands[2:]])


def elementwise_annotation(states: int) -> str:
    """Return the annotation of an elementwise update with so many tensors of state: `*, *, * -> *, *` for one."""
    return annotate(["*"] * (2 + states), ["*"] * (1 + states))


def _operand(names: list[str], parameter: tuple[int, ...], shape: tuple[int, ...]) -> list[str]:
    dims: list[str] = []
    for place, size in enumerate(shape):
        same = [place] if place < len(parameter) and parameter[place] == size else []
        candidates = [i for i in (*same, *range(len(parameter))) if parameter[i] == size and names[i] not in dims]
        dims.append(names[candidates[0]] if candidates else str(size))
    return dims
