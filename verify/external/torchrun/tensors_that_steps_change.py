"""The tensors of one process that a script's steps may change, by name.

models   parameters and buffers of the modules that the script calls, and of what holds them
outside  leaves of an optimizer that no such module holds, and a backward pass gives a gradient:
         "parameter 2 of optimizer 1"
filled   the others, whose gradients the script fills in: copies of parameters in a wider dtype, or flat shards of them
aside    parameters and buffers of modules that are never called with gradients, as averages of the weights are:
         "AveragedModel aside: n_averaged"; all of them are of the kind "buffer", for no optimizer trains them
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.pipelining import Pipe
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer

from verify.external.observe_rank_run import local_gradient, unread_by
from verify.external.parameter_mapping import (
    Addresses,
    StateMap,
    claimed,
    clean_name,
    layout_words,
    local_value,
    real_shape,
)
from verify.external.ranks.torch_private import flat_shards, resting_shards
from verify.external.torchrun.watched_script_record import HeldInScript
from verify.programs.module_tensors_by_every_name import Kind, every_parameter


@dataclass(frozen=True)
class StateTensor:
    """A tensor of a script. `names`: the first one is for reports; `given`: a run on one rank gives it its start;
    `shard`: the whole shape, and the elements, of what FullyShardedDataParallel flattened; `filled`: no backward pass
    gives it a gradient, the script does."""

    tensor: Tensor
    names: tuple[str, ...]
    kind: Kind
    given: bool = True
    shard: tuple[tuple[int, ...], range] | None = None
    filled: bool = False

    def local(self, value: Tensor) -> Tensor:
        """Return the tensor or its gradient as this rank holds it, without padding."""
        return value if self.shard is None else value.reshape(-1)[: len(self.shard[1])]


class ScriptState:
    """The tensors of one process, as far as they are known."""

    def __init__(self) -> None:
        self.held: dict[str, HeldInScript] = {}
        self.start: dict[str, Tensor] = {}
        self._models: list[nn.Module] = []
        self._known: set[int] = set()  # modules of models
        self._aside: dict[str, nn.Module] = {}
        self._alike: dict[str, tuple[list[nn.Module], list[float]]] = {}  # and sums of their values at the start
        self._outside: dict[str, Tensor] = {}
        self._filled: dict[str, Tensor] = {}
        self._optimizers: list[Optimizer] = []

    def knows(self, module: nn.Module) -> bool:
        """Return whether it is a part of a model that was met."""
        return id(module) in self._known

    def meet_model(self, module: nn.Module) -> None:
        """Get to know the model of a module that is called."""
        model = outermost(module)
        self._known |= {id(part) for part in (module, *model.modules())}
        for name in [name for name, other in self._aside.items() if id(other) in self._known]:
            del self._aside[name]
            gone = [key for key in self.held if key.startswith(f"{name}: ")]
            for key in gone:
                del self.held[key], self.start[key]
        if not any(model is known for known in self._models):
            self._models.append(model)

    def meet_aside(self) -> None:
        """Get to know the modules that no model holds. Of several that look alike nobody can say which is which."""
        modules, holders = _living_modules()
        alike: dict[str, list[nn.Module]] = {}
        for top in modules:
            if id(top) not in holders and id(top) not in self._known and any(tensors_of_module(top, "")):
                plain = next(c for c in type(top).__mro__ if not issubclass(c, FSDPModule))  # as before sharding
                shapes = [(t.names[0], tuple(t.tensor.shape)) for t in tensors_of_module(top, "")]
                alike.setdefault(f"{plain.__name__} {shapes}", []).append(top)
        for key, found in alike.items():
            if len(found) > 1:
                self._alike.setdefault(key, (found, [value for _, value in _sums(found)]))
            elif not any(found[0] is known for known in self._aside.values()):
                name = f"{key.partition(' ')[0]} aside"
                self._aside[name if name not in self._aside else f"{name} ({len(self._aside)})"] = found[0]

    def unseen(self) -> tuple[str, ...]:
        """Return the classes of modules that were changed, and that cannot be told from others."""
        own = {id(t.tensor) for model in self._models for t in tensors_of_module(model, "")}  # others may hold them too
        changed = [
            key
            for key, (found, before) in self._alike.items()
            if any(after != old for (one, after), old in zip(_sums(found), before, strict=False) if one not in own)
        ]
        return tuple(f"several {key.partition(' ')[0]} aside" for key in changed)

    def meet_optimizer(self, optimizer: Optimizer) -> None:
        """Get to know an optimizer."""
        if not any(optimizer is known for known in self._optimizers):
            self._optimizers.append(optimizer)

    def new(self) -> list[StateTensor]:
        """Hold what was not held before, with the values that it has now, and return it."""
        found = [t for t in self.tensors() if t.names[0] not in self.held]
        self.hold(found)
        return found

    def hold(self, found: Sequence[StateTensor]) -> None:
        """Take the values that tensors have now for those at the start."""
        for one in found:
            self.held[one.names[0]] = held(one)
            self.start[one.names[0]] = one.local(local_value(one.tensor)).clone()

    def tensors(self) -> list[StateTensor]:
        """Return every tensor that is known, once."""
        found: list[StateTensor] = []
        for number, model in enumerate(self._models):
            found += tensors_of_module(model, f"model {number + 1}: " if number else "")
        found += [StateTensor(tensor, (name,), "parameter", given=False) for name, tensor in self._outside.items()]
        found += self._filled_in()
        for name, module in self._aside.items():
            found += tensors_of_module(module, f"{name}: ", aside=True)
        first: dict[int, StateTensor] = {}
        for one in found:
            first.setdefault(id(one.tensor), one)
        return list(first.values())

    def parameters(self) -> dict[str, Tensor]:
        """Return what a backward pass trains, or might."""
        return {one.names[0]: one.tensor for one in self.tensors() if one.kind == "parameter" and not one.filled}

    def unread(self) -> frozenset[str]:
        """Return the parameters whose gradient no optimizer reads."""
        return unread_by(self._optimizers, self.parameters())

    def gradients(self) -> dict[str, Tensor | None]:
        """Return copies of the local gradients, by name."""
        found = {one: local_gradient(one.tensor) for one in self.tensors() if one.kind == "parameter"}
        return {one.names[0]: None if value is None else one.local(value) for one, value in found.items()}

    def values(self) -> dict[str, Tensor]:
        """Return copies of the local values, by name, of what has its shape at the start."""
        found = {one.names[0]: one.local(local_value(one.tensor)) for one in self.tensors()}
        return {
            name: value.clone()
            for name, value in found.items()
            if name in self.start and value.shape == self.start[name].shape
        }

    def replica(self) -> tuple[int, int] | None:
        """Return this rank's number among those whose gradients are averaged by DDP or FSDP, and how many these are;
        None where no model is wrapped."""
        modules = [part for model in self._models for part in model.modules()]
        return max((at for part in modules if (at := _replica(part)) is not None), key=lambda at: at[1], default=None)

    def unknown(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of optimizers that nobody holds."""
        known = {id(one.tensor) for one in self.tensors() if not one.filled}
        for number, optimizer in enumerate(self._optimizers):
            tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
            for place, tensor in enumerate(tensors):
                if id(tensor) not in known:
                    yield f"parameter {place} of optimizer {number + 1}", tensor

    def meet_filled(self, optimizer: Optimizer) -> None:
        """Get to know what the script has given a gradient for this optimizer's step, and no backward pass has."""
        mine = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
        self._filled |= {n: t for n, t in self.unknown() if id(t) in mine and t.grad is not None}
        self.hold([one for one in self._filled_in() if one.names[0] not in self.held])

    def _filled_in(self) -> list[StateTensor]:
        left = {name: tensor for name, tensor in self._filled.items() if name not in self._outside}
        return [StateTensor(tensor, (name,), "parameter", given=False, filled=True) for name, tensor in left.items()]

    def watch_outside(self) -> Callable[[], list[StateTensor]]:
        """Return what, after a backward pass, holds the leaves outside of modules to which it gave a gradient.

        Others are `filled`.
        """
        before = {id(tensor): _mark(tensor) for _, tensor in self.unknown()}

        def after() -> list[StateTensor]:
            touched = {name: t for name, t in self.unknown() if t.grad is not None and _mark(t) != before.get(id(t))}
            self._outside |= touched
            return self.new() if touched else []

        return after


def is_outside(name: str) -> bool:
    """Return whether a name is that of a tensor outside of modules, which keeps the start that its script gives it."""
    return name.startswith("parameter ") and " of optimizer " in name


def _replica(module: nn.Module) -> tuple[int, int] | None:
    if isinstance(module, DistributedDataParallel | FullyShardedDataParallel):
        return dist.get_rank(module.process_group), dist.get_world_size(module.process_group)
    first = next(module.parameters(), None) if isinstance(module, FSDPModule) else None
    parameter = resting_shards(module).get(id(first), first)
    if not isinstance(parameter, DTensor):
        return None
    index, size = 0, 1
    mesh = parameter.device_mesh
    at: Sequence[int] = mesh.get_coordinate() or ()
    # FSDP2's axes are the outer ones: of copies, and the first one that shards
    for axis, (coordinate, placement) in enumerate(zip(at, parameter.placements, strict=True)):
        index, size = index * mesh.size(axis) + coordinate, size * mesh.size(axis)
        if not placement.is_replicate():
            break
    return index, size


def _sums(modules: Sequence[nn.Module]) -> list[tuple[int, float]]:
    """Return the tensors of modules, and the sum of each; 0 where it is none."""
    tensors = [t.tensor for m in modules for t in tensors_of_module(m, "")]
    sums = [float(local_value(tensor).double().sum()) for tensor in tensors]
    return [(id(t), 0.0 if value != value else value) for t, value in zip(tensors, sums, strict=True)]


def _mark(tensor: Tensor) -> tuple[int, int] | None:
    return None if tensor.grad is None else (id(tensor.grad), tensor.grad._version)


def _living_modules() -> tuple[list[nn.Module], dict[int, list[nn.Module]]]:
    """Return the modules of this process, and those that hold each of them.

    A traced pipeline holds the stages of all ranks: each stage is a model by itself, as one that is cut by hand.
    """
    objects = gc.get_objects()  # hundreds of thousands: nothing in Python looks at each of them
    kinds = list(map(type, objects))
    of_modules = {kind for kind in set(kinds) if issubclass(kind, nn.Module)}
    modules = list(compress(objects, map(of_modules.__contains__, kinds)))
    traced = {id(m) for pipe in modules if isinstance(pipe, Pipe) for m in (pipe, pipe.split_gm)}
    modules = [module for module in modules if id(module) not in traced]
    holders: dict[int, list[nn.Module]] = {}
    for found in modules:
        for part in found.children():
            holders.setdefault(id(part), []).append(found)
    return modules, holders


def outermost(module: nn.Module) -> nn.Module:
    """Return the module that holds this one and that no other module holds: the smallest, where there are several."""
    _, holders = _living_modules()
    above, tops, seen = [module], [], {id(module)}
    while above:
        one = above.pop()
        more = holders.get(id(one), [])
        if not more:
            tops.append(one)
        above += [m for m in more if id(m) not in seen]
        seen |= {id(m) for m in more}
    return min(tops, key=lambda m: sum(1 for _ in m.modules()), default=module)


def tensors_of_module(root: nn.Module, before: str, aside: bool = False) -> Iterator[StateTensor]:
    """Yield each parameter and buffer of a module once, with all names that it has, each after `before`."""
    shards, resting = flat_shards(root), resting_shards(root)
    parameters: Iterable[tuple[str, Tensor]] = every_parameter(root)
    buffers: Iterable[tuple[str, Tensor]] = root.named_buffers(remove_duplicate=False)
    for named, trains in ((parameters, True), (buffers, False)):
        names: dict[int, list[str]] = {}
        found: dict[int, Tensor] = {}
        for name, registered in named:
            tensor = resting.get(id(registered), registered)
            found[id(tensor)] = tensor
            names.setdefault(id(tensor), []).append(before + (clean_name(name) or name))
        for key, tensor in found.items():
            every = tuple(dict.fromkeys(names[key]))
            kind: Kind = "parameter" if trains and not aside else "buffer"
            yield StateTensor(tensor, every, kind, trains, shards.get(key))


def held(one: StateTensor) -> HeldInScript:
    """Describe a tensor as this rank holds it."""
    name, tensor = one.names[0], one.tensor
    places: Addresses | None = None
    shape = tuple(local_value(tensor).shape)
    whole = tuple(real_shape(tensor))
    if isinstance(tensor, DTensor):
        shapes = {name: real_shape(tensor)}
        places = claimed(tensor, name, StateMap({name: 0}, shapes, {name: "parameter"}, math.prod(whole), (name,)))
    trained = tensor.requires_grad and one.kind == "parameter" and not one.filled
    if one.shard is not None:
        whole, places = one.shard
        return HeldInScript(name, whole, (len(places),), places, "FSDP", trained, one.names[1:], one.kind)
    words = layout_words(tensor)
    return HeldInScript(name, whole, shape, places, words, trained, one.names[1:], one.kind, one.filled)
