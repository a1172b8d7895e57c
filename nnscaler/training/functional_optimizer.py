"""A step of an optimizer as a function of tensors: (parameter, gradient, state...) -> (parameter, state...).

Any class of `torch.optim.Optimizer` will do; its own code runs. What its state holds is found by running it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from op_registry.builtin.optimizers import NO_UPDATE, UPDATES
from op_registry.numbers_in_user_code import numbers_in, numbers_of

from nnscaler.errors import NnscalerError
from nnscaler.exception_in_one_line import first_line

OptimizerClass = type[Any]  # a subclass of Optimizer, called with parameters and hyper-parameters
SIZES = (6, 5, 4, 3)  # of the dims of parameters to try an update on: all different, so that dims are told apart
AGES = (0, 1, 12)  # steps before the one that is looked at: at the 6th RAdam changes its formula
MOST_STEPS = 300  # of a run that goes beyond the numbers in an optimizer's code
LARGEST_SCALE = 1e6  # of gradients, likewise
_LARGEST_COUNT = 10**7  # to which a counter of steps is set
_DEEPEST = 6  # containers within each other that are searched for one
_TRIED = 64  # rows and columns of a parameter of which the state is measured
_HOW_IT_RUNS = frozenset({"foreach", "fused", "capturable"})  # hyper-parameters that do not say what is computed


def optimizer_name(cls: type) -> str:
    """`torch.optim.AdamW` for torch's own classes, the name of another one."""
    public = f"torch.optim.{cls.__name__}"
    return public if getattr(torch.optim, cls.__name__, None) is cls else cls.__qualname__


def check_class(cls: Any, defaults: Mapping[str, Any]) -> str | None:
    """Return how the registry says that the class may be cut; None for one that is not there.

    Raises NnscalerError for what is no optimizer, for a class whose step is no update, and for hyper-parameters that it
    does not take.
    """
    if not (inspect.isclass(cls) and issubclass(cls, Optimizer)):
        message = f"{cls!r} is no optimizer: a class that derives from torch.optim.Optimizer is one"
        raise NnscalerError("not_an_optimizer", message, help="torch.optim.AdamW, say, and not an object of it")
    name = optimizer_name(cls)
    if name in NO_UPDATE:
        raise NnscalerError(
            "no_update", f"{name} cannot be used: {NO_UPDATE[name]}", help="torch.optim.AdamW is the usual choice"
        )
    said = [refusal(cls, defaults, dims) for dims in range(1, len(SIZES) + 1)]
    if all(said):
        shown = ", ".join(f"{key}={value!r}" for key, value in defaults.items())
        message = f"{name}({shown}) cannot be made: {said[1]}"
        raise NnscalerError("optimizer_refused", message, help=f"{name}{_signature(cls)}")
    return UPDATES.get(name)


def refusal(cls: OptimizerClass, defaults: Mapping[str, Any], dims: int) -> str:
    """Return what the optimizer says of a parameter with so many dims; empty where it takes one."""
    try:
        cls([nn.Parameter(torch.zeros(SIZES[:dims]))], **_what_is_computed(defaults))
    except Exception as error:  # noqa: BLE001 - whatever the class raises is what it says
        return first_line(error) or type(error).__name__
    return ""


def _signature(cls: type) -> str:
    """Return the hyper-parameters with their defaults: `(lr=0.001, betas=(0.9, 0.999))`."""
    found = [p for p in inspect.signature(cls).parameters.values() if p.name != "params"]
    shown = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in found]
    return f"({', '.join(shown)})"


def _what_is_computed(defaults: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in defaults.items() if key not in _HOW_IT_RUNS}


def own_numbers(cls: OptimizerClass, defaults: Mapping[str, Any]) -> tuple[int | float, ...]:
    """Return the numbers that an optimizer may compare something with, in order: those in its code and its
    hyper-parameters. None of torch's own classes, of which the registry says what they do."""
    if optimizer_name(cls) in UPDATES:
        return ()
    settings = [p.default for p in inspect.signature(cls).parameters.values()]
    return numbers_of([*numbers_in(cls), *settings, *defaults.values()])


def steps_beyond(numbers: Sequence[int | float]) -> int:
    """Return a number of steps that goes beyond all of these, or as far as one is run; never fewer than usual."""
    return max([AGES[-1], *(min(int(2 * n) + 2, MOST_STEPS) for n in numbers if n > 1)])


def steps_far_beyond(numbers: Sequence[int | float]) -> tuple[int, ...]:
    """Return numbers of steps beyond those of these numbers that are too large to be run to; some at most."""
    return tuple(int(n) + 2 for n in numbers if MOST_STEPS - 2 < n <= _LARGEST_COUNT and n == n // 1)[-2:]


def scales_beyond(numbers: Sequence[int | float]) -> tuple[float, ...]:
    """Return what to multiply gradients by, so that an element of one exceeds each of these numbers; ascending."""
    return tuple(4.0 * n for n in numbers if 1 < n <= LARGEST_SCALE)


@dataclass(frozen=True, slots=True)
class Past:
    """An optimizer after some steps, without the parameter.

    leaves    of its state, by their paths (`['step']`): numbers, and (number, dtype) for a tensor without dims
    tree      what puts them together
    settings  of its group: the learning rate, and what it has written there
    others    of its state, what belongs to no parameter
    counters  numbers that it keeps as its own attributes
    """

    leaves: Mapping[str, Any]
    tree: Any
    settings: Mapping[str, Any]
    others: Mapping[Any, Any] = field(default_factory=dict)
    counters: Mapping[str, Any] = field(default_factory=dict)

    def numbers(self, paths: Sequence[str]) -> str:
        """Return, as text to compare, all but the tensors of its state at these paths."""
        leaves = {path: leaf for path, leaf in self.leaves.items() if path not in paths}
        return repr((leaves, self.settings, self.others, self.counters))


@dataclass(frozen=True)
class Update:
    """One step of an optimizer on one parameter.

    cls       the optimizer
    defaults  its hyper-parameters
    paths     of the tensors in its state, as `['exp_avg']`
    positive  those that are never negative: a square, a step size. Of what is given only the magnitude counts
    pasts     what its state has besides, by the number of steps before this one
    numbers   what its code may compare something with (`own_numbers`)
    """

    cls: OptimizerClass
    defaults: Mapping[str, Any]
    paths: tuple[str, ...] = ()
    positive: frozenset[str] = frozenset()
    pasts: Mapping[int, Past] = field(default_factory=dict)
    numbers: tuple[int | float, ...] = ()

    @property
    def scales(self) -> tuple[float, ...]:
        """Return what gradients are multiplied by in further calls: beyond the smallest and the largest number."""
        found = scales_beyond(self.numbers)
        return tuple(dict.fromkeys((*found[:1], *found[-1:])))

    @property
    def counts(self) -> bool:
        """Return whether something besides the tensors of its state differs from step to step: one that its code may
        branch on. Of torch's own classes the code is known."""
        if optimizer_name(self.cls) in UPDATES:
            return False
        return len({past.numbers(self.paths) for past in self.pasts.values()}) > 1

    @property
    def options(self) -> Mapping[str, int | float]:
        """Return the keyword arguments of a call, beside the tensors, with their defaults."""
        return {"steps": AGES[-1], **({"scale": 1.0} if self.scales else {})}

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the tensors in its state: `exp_avg`."""
        return tuple(re.sub(r"\W+", "_", path).strip("_") or "state" for path in self.paths)

    @property
    def __signature__(self) -> inspect.Signature:
        """Tell `inspect` a name for each tensor of the state."""
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        tensors = [inspect.Parameter(name, kind, annotation=Tensor) for name in ("parameter", "gradient", *self.names)]
        only = inspect.Parameter.KEYWORD_ONLY
        options = [inspect.Parameter(n, only, default=v, annotation=type(v)) for n, v in self.options.items()]
        return inspect.Signature([*tensors, *options])

    def __call__(
        self, parameter: Tensor, gradient: Tensor, *state: Tensor, steps: int = AGES[-1], scale: float = 1.0
    ) -> tuple[Tensor, ...]:
        """Return the parameter and the state after the step. The arguments are not changed.

        `steps`: how many were before; at 0 the optimizer begins, and what is given as its state is not read.
        `scale`: what the gradient is multiplied by.
        """
        with torch.no_grad():
            tensor = nn.Parameter(parameter.detach().clone())
            tensor.grad = gradient.detach().clone() if scale == 1.0 else gradient.detach() * scale
            optimizer = self.cls([tensor], **self.defaults)
            if steps:
                given = {
                    path: value.detach().abs() if path in self.positive else value.detach().clone()
                    for path, value in zip(self.paths, state, strict=True)
                }
                _restore(optimizer, tensor, self.pasts[steps], given)
            optimizer.step()
            made = _leaves(optimizer, tensor)
        # what is not there after the first step stays as it is
        after = [made.get(path, old.clone()) for path, old in zip(self.paths, state, strict=True)]
        return (tensor.detach(), *after)

    def example(self, parameter: Tensor, gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the tensors of the state after a step with each of the gradients."""
        (found,) = trajectory(self.cls, self.defaults, [parameter], [[gradient] for gradient in gradients])
        return tuple(found[path] for path in self.paths)


def make_update(cls: OptimizerClass, defaults: Mapping[str, Any], dims: int = 2) -> Update:
    """Return the step of an optimizer on parameters with so many dims. Raises what the optimizer raises on these."""
    asked = _what_is_computed(defaults)
    shape = SIZES[:dims]
    one, other = (_leaves(run, _only(run)) for run in (_run(cls, asked, shape, AGES[-1], seed) for seed in (0, 1)))
    tensors = {path: value for path, value in one.items() if isinstance(value, Tensor)}
    # a number is the same in each run, or it is made from the gradients, as a tensor is
    paths = tuple(path for path, v in tensors.items() if v.dim() or not torch.equal(v, other[path]))
    positive = frozenset(path for path in paths if bool((one[path] >= 0).all() and (other[path] >= 0).all()))
    numbers = own_numbers(cls, defaults)
    ages = dict.fromkeys((*AGES, steps_beyond(numbers), *steps_far_beyond(numbers)))
    pasts = {age: _past(_run(cls, asked, shape, age, 0)) for age in ages if age}
    return Update(cls, MappingProxyType(asked), paths, positive, MappingProxyType(pasts), numbers)


def trajectory(
    cls: OptimizerClass,
    defaults: Mapping[str, Any],
    parameters: Sequence[Tensor],
    gradients: Sequence[Sequence[Tensor]],
    skipped: int = 0,
) -> list[dict[str, Tensor]]:
    """Run the optimizer, one step for each of `gradients` (one tensor per parameter). After the second one its counters
    of steps are set forward by `skipped`.

    Returns, of each parameter, its value (by the name "") and the tensors of its state.
    """
    tensors = [nn.Parameter(p.detach().clone()) for p in parameters]
    optimizer = cls(tensors, **_what_is_computed(defaults))
    with torch.no_grad():
        for number, each in enumerate(gradients):
            for tensor, gradient in zip(tensors, each, strict=True):
                tensor.grad = gradient.detach().clone()
            _step(optimizer, skipped if number == 1 else 0)
    found = []
    for tensor in tensors:
        state = {path: value for path, value in _leaves(optimizer, tensor).items() if isinstance(value, Tensor)}
        found.append({"": tensor.detach(), **state})
    return found


def state_bytes(cls: OptimizerClass, defaults: Mapping[str, Any]) -> float:
    """Return the bytes that an optimizer keeps of an element of a float32 matrix. Raises what the optimizer raises."""
    matrix = torch.ones(_TRIED, _TRIED)
    (found,) = trajectory(cls, defaults, [matrix], [[torch.ones_like(matrix)]])
    return sum(value.nbytes for path, value in found.items() if path and value.dim()) / matrix.numel()


def drawn(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Draw real values, every eighth of them 0."""
    values = torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
    return values * (torch.rand(tuple(shape), generator=generator) > 0.125)


def _run(cls: OptimizerClass, defaults: Mapping[str, Any], shape: tuple[int, ...], steps: int, seed: int) -> Optimizer:
    generator = torch.Generator().manual_seed(seed)
    tensor = nn.Parameter(drawn(shape, generator))
    optimizer: Optimizer = cls([tensor], **defaults)
    run = steps if steps <= MOST_STEPS else 2
    with torch.no_grad():
        for number in range(run):
            tensor.grad = drawn(shape, generator)
            _step(optimizer, steps - run if number == 1 else 0)
    return optimizer


def _step(optimizer: Optimizer, skipped: int) -> None:
    """Step once, then add `skipped` to every number that the step has raised by one."""
    before = {path: float(held[key]) for path, held, key in _numbers_held(optimizer)} if skipped else {}
    optimizer.step()
    for path, held, key in _numbers_held(optimizer) if skipped else ():
        if path in before and float(held[key]) == before[path] + 1:
            held[key] = held[key] + skipped


def _numbers_held(optimizer: Optimizer) -> list[tuple[Any, Any, Any]]:
    """Return (path, container, key) of each number of an optimizer: of its state, its groups and its attributes."""
    found: list[tuple[Any, Any, Any]] = []
    waiting: list[tuple[tuple[Any, ...], Any]] = [((), vars(optimizer))]
    while waiting:
        path, held = waiting.pop()
        for key, value in list(held.items() if isinstance(held, dict) else enumerate(held)):
            place = (*path, id(key) if isinstance(key, Tensor) else key)
            if isinstance(value, dict | list) and len(place) < _DEEPEST:
                waiting.append((place, value))
            elif type(value) in (int, float) or (isinstance(value, Tensor) and not value.dim()):
                found.append((place, held, key))
    return found


def _only(optimizer: Optimizer) -> Tensor:
    (group,) = optimizer.param_groups
    (tensor,) = group["params"]
    assert isinstance(tensor, Tensor)
    return tensor


def _leaves(optimizer: Optimizer, tensor: Tensor) -> dict[str, Any]:
    """Return what the optimizer has of a parameter, by path."""
    paths, _ = pytree.tree_flatten_with_path(dict(optimizer.state[tensor]))
    return {pytree.keystr(path): value for path, value in paths}


def _past(optimizer: Optimizer) -> Past:
    """Tensors without dims become numbers with their dtype: a proof makes them anew among its own."""
    leaves = {
        path: (value.item(), value.dtype) if isinstance(value, Tensor) and not value.dim() else value
        for path, value in _leaves(optimizer, _only(optimizer)).items()
    }
    _, tree = pytree.tree_flatten(dict(optimizer.state[_only(optimizer)]))
    (group,) = optimizer.param_groups
    return Past(
        leaves,
        tree,
        {key: value for key, value in group.items() if key != "params"},
        {key: deepcopy(value) for key, value in optimizer.state.items() if not isinstance(key, Tensor)},
        {name: value for name, value in vars(optimizer).items() if type(value) in (int, float)},
    )


def _restore(optimizer: Optimizer, tensor: Tensor, past: Past, given: Mapping[str, Tensor]) -> None:
    leaves = []
    for path, leaf in past.leaves.items():
        if path in given:
            leaf = given[path]
        elif isinstance(leaf, tuple):
            number, dtype = leaf
            leaf = torch.tensor(number, dtype=dtype)
        leaves.append(leaf)
    optimizer.state[tensor] = pytree.tree_unflatten(leaves, past.tree)
    optimizer.state.update(deepcopy(dict(past.others)))
    optimizer.param_groups[0].update(past.settings)
    vars(optimizer).update(past.counters)
