"""A row: a model of a public library with a loss and a batch. `row(...)` adds one to ROWS; `use(path)` finds a name.

Nothing of a library is imported before a row's model is built. Numbers of a library's own defaults are made small, so
that a model runs in seconds; its code is the library's.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Drawn = Callable[[int, torch.Generator], Tensor]  # rows of the batch
POSITIONAL = ("a", "b", "c", "d")  # inputs that a model takes by their place
ROWS: dict[str, Row] = {}


# what is imported, where that is not the name of the wheel
MODULES = {
    "BS-RoFormer": "bs_roformer",
    "CoLT5-attention": "colt5_attention",
    "En-transformer": "en_transformer",
    "RETRO-pytorch": "retro_pytorch",
    "neuraloperator": "neuralop",
    "open_clip_torch": "open_clip",
}


def installed(library: str) -> bool:
    """Return whether a library can be imported, as far as that is known without doing it."""
    return importlib.util.find_spec(MODULES.get(library, library.replace("-", "_"))) is not None


@dataclass(frozen=True)
class Row:
    """A model: how it is made, how it is called, and what a batch of it is made of."""

    library: str
    name: str
    make: Callable[[], nn.Module | tuple[nn.Module, ...]]
    call: Callable[..., Any]
    size: int
    inputs: Mapping[str, Drawn]

    def build(self) -> tuple[nn.Module, dict[str, Tensor]]:
        """Return the model in training mode, the same each time, and its batch."""
        load_without_kernels()
        torch.manual_seed(0)
        made = self.make()
        model = Scored(self.call, *(made if isinstance(made, tuple) else (made,)))
        generator = torch.Generator().manual_seed(1)
        return model.train(), {name: draw(self.size, generator) for name, draw in self.inputs.items()}


class Scored(nn.Module):
    """Modules of a library, and a scalar loss of what they return."""

    def __init__(self, call: Callable[..., Any], *parts: nn.Module) -> None:
        super().__init__()
        self.call = call
        self.parts = nn.ModuleList(parts)

    def forward(self, target: Tensor | None = None, **batch: Tensor) -> Tensor:
        placed = [batch.pop(name) for name in POSITIONAL if name in batch]
        return score(self.call(*self.parts, *placed, **batch), target)


def score(returned: Any, target: Tensor | None) -> Tensor:
    """Return a loss against `target`, classes or values; without one the scalar that there is, or mean squares."""
    found = [value for value in _tensors(returned) if value.is_floating_point() or value.is_complex()]
    if target is None:
        scalars = [value for value in found if value.ndim == 0]
        if scalars:
            return torch.stack(scalars).sum()
        wanted = [torch.view_as_real(value) if value.is_complex() else value for value in found]
        return torch.stack([value.square().mean() for value in wanted if value.requires_grad]).sum()
    if target.is_floating_point():
        return F.mse_loss(found[0], target)
    return F.cross_entropy(found[0].flatten(0, -2), target.flatten())


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    elif hasattr(value, "__dataclass_fields__"):
        value = [getattr(value, name) for name in value.__dataclass_fields__]
    return [tensor for inside in value for tensor in _tensors(inside)] if isinstance(value, list | tuple) else []


def real(*shape: int) -> Drawn:
    """Draw normal numbers; `shape` has no batch dim."""
    return lambda n, generator: torch.randn(n, *shape, generator=generator)


def unit(*shape: int) -> Drawn:
    """Draw numbers of [0, 1)."""
    return lambda n, generator: torch.rand(n, *shape, generator=generator)


def whole(limit: int, *shape: int) -> Drawn:
    """Draw integers below a limit."""
    return lambda n, generator: torch.randint(0, limit, (n, *shape), generator=generator)


def fixed(draw: Callable[[torch.Generator], Tensor]) -> Drawn:
    """Draw a tensor that has no batch dim."""
    return lambda n, generator: draw(generator)


def use(path: str) -> Any:
    """Import `package.module.name`."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def row(library: str, name: str, make: Any, *, call: Any = None, size: int = 4, **inputs: Drawn) -> None:
    """Add a row. `make`: a function, or a path and the keywords that it is given; `call`: model(*inputs) without."""
    if isinstance(make, tuple):
        path, keywords = make
        made = lambda: use(path)(**keywords)  # noqa: E731 - one line of a closure
    else:
        made = make
    assert name not in ROWS, name
    ROWS[name] = Row(library, name, made, call or _plainly, size, inputs)


def _plainly(model: nn.Module, *placed: Tensor, **named: Tensor) -> Any:
    return model(*placed, **named)


# the signatures that torchvision's Python code speaks of while it is imported
_VISION = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align": "(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
    "int sampling_ratio, bool aligned) -> Tensor",
    **dict.fromkeys(("qnms", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d"), "(Tensor a) -> Tensor"),
    **dict.fromkeys(
        (f"_{name}_backward" for name in ("roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d")),
        "(Tensor a) -> Tensor",
    ),
}
_DEFINED: list[torch.library.Library] = []  # operators live as long as this


def load_without_kernels() -> None:
    """Let torchvision and torchaudio be imported where their compiled parts are of another build of torch.

    Their wheels have kernels for torch's build with CUDA, which a build without it cannot load. No model of the rows
    calls one.
    """
    load = torch.ops.load_library
    if _DEFINED or torch.version.cuda is not None:
        return

    def tolerant(path: str) -> None:
        try:
            load(path)
        except OSError:
            if "torchaudio" not in str(path).split("/"):
                raise  # torchvision catches it

    torch.ops.load_library = tolerant
    vision = torch.library.Library("torchvision", "FRAGMENT")
    for name, schema in _VISION.items():
        vision.define(name + schema)
    audio = torch.library.Library("_torchaudio", "FRAGMENT")
    audio.define("cuda_version() -> int?")
    audio.impl("cuda_version", lambda: None, "CompositeImplicitAutograd")
    audio.define("is_align_available() -> bool")
    audio.impl("is_align_available", lambda: False, "CompositeImplicitAutograd")
    filters = torch.library.Library("torchaudio", "FRAGMENT")
    for name in ("_lfilter_core_loop", "_lfilter", "_overdrive_core_loop"):
        filters.define(f"{name}(Tensor a) -> Tensor")
    _DEFINED.extend((vision, audio, filters))
