"""Which layers of a module repeat: elements of a list of modules that hold equal parameters and buffers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

Run = tuple[str, int]  # the container's path, and a number for each kind of element in it


@dataclass(frozen=True)
class Site:
    """A layer that repeats.

    path     its name in the model
    module   the layer
    run      equal for the layers that it repeats with
    """

    path: str
    module: nn.Module
    run: Run


def repeated_layers(module: nn.Module, at_least: int) -> Mapping[int, Site]:
    """Return the repeated layers of `module` by the identity of their `__dict__`, which torch's tracer gives to its
    stand-ins.

    Elements of a ModuleList or Sequential that have submodules, share a class, and whose stored tensors agree in names,
    shapes and dtypes, at least so many of them. Whether they compute the same is not looked at here.
    """
    found: dict[int, Site] = {}
    for path, container in module.named_modules():
        if not isinstance(container, nn.ModuleList | nn.Sequential):
            continue
        kinds: dict[object, list[Site]] = {}
        for name, layer in container.named_children():
            kind = (type(layer), _stored(layer)) if any(True for _ in layer.children()) else None
            if kind is not None:
                run = (path, list(kinds).index(kind) if kind in kinds else len(kinds))
                kinds.setdefault(kind, []).append(Site(f"{path}.{name}" if path else name, layer, run))
        for sites in kinds.values():
            if len(sites) >= at_least:
                found.update({id(site.module.__dict__): site for site in sites})
    return found


def _stored(layer: nn.Module) -> tuple[object, ...]:
    def describe(name: str, tensor: Tensor) -> tuple[object, ...]:
        return name, tuple(tensor.shape), tensor.dtype

    parameters = tuple(describe(n, t) for n, t in layer.named_parameters(remove_duplicate=False))
    buffers = tuple(describe(n, t) for n, t in layer.named_buffers(remove_duplicate=False))
    return parameters, buffers
