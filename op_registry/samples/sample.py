"""Sample calls of built-in operators: what their annotations are verified on.

A sample names the identifiers that can be split in two. Sizes differ from identifier to identifier and divide by 6, as
a rule; an operator's samples have 12 or 24 among them, for splits in 4. Optional arguments are varied under the splits
that a `localize` hook rewrites the call for: a hook that drops one is right wherever that has its default.
"""

# ruff: noqa: N802 - tables are read by the letters of their tensors

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from op_registry.call import map_instances

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Tensor:
    """A random tensor of a kind: `normal`, `positive` (0.5 .. 1.5), `above` (1.5 .. 2.5), `unit` (0.1 .. 0.9),
    `constant` (positive, without gradient), `sorted`, `complex`, `bool`, `integer` (low .. high - 1), `distinct`
    (integers below high, none twice along dim 1, or along the only dim), `offsets` (rising integers up to high), `bags`
    (rising integers from 0 below high, one of them twice; with `low` 1 the last one is high), `signs` (1 and -1),
    `rare` (one of them is True), `pivots` (1, 2, ... along the last dim), or `labels` (0 .. high - 1, both ends among
    them, and `low` in place of some: the label that is ignored)."""

    shape: tuple[int, ...]
    kind: str = "normal"
    high: int = 0
    low: int = 0

    def make(self, generator: torch.Generator) -> torch.Tensor:
        """Make the tensor, in float64 where it is of floats."""
        import torch

        if self.kind == "integer":
            return torch.randint(self.low, self.high, self.shape, generator=generator)
        if self.kind == "labels":
            found = torch.randint(0, self.high, self.shape, generator=generator)
            found[torch.rand(self.shape, generator=generator) < 0.25] = self.low
            found.view(-1)[:3] = torch.tensor([self.low, self.high - 1, 0])
            return found
        if self.kind == "signs":
            return torch.randint(0, 2, self.shape, generator=generator) * 2 - 1
        if self.kind == "pivots":
            return torch.arange(1, self.shape[-1] + 1, dtype=torch.int32).expand(self.shape)
        if self.kind == "rare":
            found = torch.zeros(self.shape, dtype=torch.bool)
            found.view(-1)[torch.randint(0, found.numel(), (), generator=generator)] = True
            return found
        if self.kind == "bool":
            return torch.rand(self.shape, generator=generator) < 0.4
        if self.kind == "distinct":
            order = [self.shape[0], *self.shape[2:], self.high] if len(self.shape) > 1 else [self.high]
            found = torch.rand(order, generator=generator).argsort(-1)
            return found.movedim(-1, 1)[:, : self.shape[1]] if len(self.shape) > 1 else found[: self.shape[0]]
        if self.kind == "bags":
            found = torch.arange(self.shape[0]) * self.high // (self.shape[0] - self.low)
            found[2] = found[1]
            return found
        if self.kind == "offsets":
            return torch.arange(1, self.shape[0] + 1) * self.high // self.shape[0]
        dtype = torch.complex128 if self.kind == "complex" else torch.float64
        values = torch.randn(self.shape, generator=generator, dtype=dtype)
        uniform = {"positive": (0.5, 1.5), "constant": (0.5, 1.5), "above": (1.5, 2.5), "unit": (0.1, 0.9)}.get(
            self.kind
        )
        if uniform is not None:
            low, high = uniform
            values = low + (high - low) * torch.rand(self.shape, generator=generator, dtype=torch.float64)
        return values.sort().values if self.kind == "sorted" else values


def F(*shape: int) -> Tensor:
    """Normal floats."""
    return Tensor(shape)


def P(*shape: int) -> Tensor:
    """Positive floats."""
    return Tensor(shape, "positive")


def C(*shape: int) -> Tensor:
    """Positive floats that have no gradient (class weights, running statistics)."""
    return Tensor(shape, "constant")


def U(*shape: int) -> Tensor:
    """Floats between 0 and 1."""
    return Tensor(shape, "unit")


def I(*shape: int, high: int = 5, low: int = 0) -> Tensor:  # noqa: E743
    """Describe a tensor of integers."""
    return Tensor(shape, "integer", high, low)


def L(*shape: int, high: int, ignore: int = -100) -> Tensor:
    """Labels, some of them ignored."""
    return Tensor(shape, "labels", high, ignore)


def B(*shape: int) -> Tensor:
    """Booleans."""
    return Tensor(shape, "bool")


@dataclass(frozen=True)
class Sample:
    """A call, and the identifiers that must be splittable in two: no others may be.

    `compare`: whether values are defined (`empty` has none).
    """

    operator: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    splits: frozenset[str] = frozenset()
    compare: bool = True

    def __str__(self) -> str:
        shown = ", ".join([*map(_show, self.args), *(f"{k}={_show(v)}" for k, v in self.kwargs.items())])
        return f"{self.operator.removeprefix('aten.').removesuffix('.default')}({shown})"


def S(operator: str, *args: Any, splits: str = "", compare: bool = True, **kwargs: Any) -> Sample:
    """Make a sample; `aten.` is left out, and `.default` where the operator has no other overload in its name."""
    name = operator if operator.startswith(("nnscaler.", "transformers.")) else f"aten.{operator}"
    if name.startswith("aten.") and name.count(".") == 1:
        name += ".default"
    return Sample(name, args, kwargs, frozenset(splits.split()), compare)


def _show(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.kind[0]}{list(value.shape)}".replace(" ", "")
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_show, value)) + "]"
    return repr(value)


def replace_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """Rebuild nested arguments with `function(tensor)` in place of each tensor, left to right."""
    return map_instances(value, Tensor, function)
