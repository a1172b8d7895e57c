"""Name the parameters of a script's models, and say which of their elements this rank holds."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from verify.external.addresses import Addresses, StateMap, claimed, clean_name, layout_words, local_value
from verify.external.torchrun.records import HeldInScript


def outermost(module: nn.Module) -> nn.Module:
    """Return the module that holds this one and that no other module holds: the smallest, where there are several."""
    modules = [found for found in gc.get_objects() if issubclass(type(found), nn.Module)]
    inner = {id(part) for found in modules for part in found.children()}
    holders = [m for m in modules if id(m) not in inner and any(part is module for part in m.modules())]
    return min(holders, key=lambda m: sum(1 for _ in m.modules()), default=module)


def parameters_of(root: nn.Module, number: int) -> Iterator[tuple[str, nn.Parameter, tuple[str, ...]]]:
    """Yield each parameter of a model once: its name, and the other names that it has."""
    names: dict[int, list[str]] = {}
    found: dict[int, nn.Parameter] = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        found[id(parameter)] = parameter
        names.setdefault(id(parameter), []).append(clean_name(name) or name)
    before = f"model {number + 1}: " if number else ""
    for key, parameter in found.items():
        first, *rest = dict.fromkeys(before + name for name in names[key])
        yield first, parameter, tuple(rest)


def held(name: str, parameter: nn.Parameter, tied: tuple[str, ...]) -> HeldInScript:
    """Describe a parameter as this rank holds it."""
    places: Addresses | None = None
    if isinstance(parameter, DTensor):
        shapes = {name: parameter.shape}
        places = claimed(parameter, name, StateMap({name: 0}, shapes, {name: "parameter"}, parameter.numel(), (name,)))
    shape = tuple(local_value(parameter).shape)
    return HeldInScript(
        name, tuple(parameter.shape), shape, places, layout_words(parameter), parameter.requires_grad, tied
    )


def put(parameter: Tensor, values: Tensor) -> None:
    """Give a parameter of a run on one rank the values of the whole tensor."""
    with torch.no_grad():
        target = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        target.copy_(values.to(target.dtype).view(target.shape))
