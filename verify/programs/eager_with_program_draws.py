"""An eager model that draws the random numbers of a program made from it.

A program's draw is a function of (seed, operation, step, logical coordinates). The eager model knows no operations; but
it calls torch's random operators in the order of the trace. So a first run records these calls, `match_draws` says
which operation of the graph each of them is, and `ProgramDraws` gives each the numbers that all ranks together draw.
The whole batch is one logical tensor, of which micro-batches are pieces like those of ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from traceback import walk_stack
from typing import Any

import torch
from torch import Tensor

from nnscaler.ir.graph import Graph, Operation
from nnscaler.runtime.ops.random import logical_kept, logical_uniform, normal_of
from nnscaler.tracing.graph_builder import dtype_of
from nnscaler.tracing.passes.lower_random_draws import IN_PLACE, FixedDraws, Now, formula_of, numbers_of

_RRELU = "aten.rrelu_with_noise"
_BERNOULLI = "aten.bernoulli_.float"  # how torch draws the mask of every dropout


@dataclass(frozen=True, slots=True)
class Draw:
    """One random operation of a graph.

    name          of the operation
    operator      of torch
    shape         logical
    probability   with which an element is dropped
    dims          how many leading dims have draws of their own (None: all)
    place         file and line in the model
    """

    name: str
    operator: str
    shape: tuple[int, ...]
    probability: float = 0.0
    dims: int | None = None
    place: tuple[str, int] | None = None

    @property
    def drops(self) -> bool:
        return "dropout" in self.operator


@dataclass(frozen=True, slots=True)
class Called:
    """One call of a random operator of torch.

    operator      of torch
    shape         of what it draws: that of the result, but for a distribution that takes several numbers for each
    keep          the probability of a one, where that is a number
    place         file and line of the innermost caller
    callers       the lines that led to it
    overwritten   whether the next call drew into the same tensor
    """

    operator: str
    shape: tuple[int, ...]
    keep: float | None
    place: tuple[str, int] | None
    callers: tuple[tuple[str, int], ...] = ()
    overwritten: bool = False

    def may_be(self, draw: Draw) -> bool:
        """Return whether the operation of the graph can come from this call."""
        if draw.drops:
            shape = tuple(n if draw.dims is None or i < draw.dims else 1 for i, n in enumerate(draw.shape))
            kept = self.keep is not None and abs(self.keep - (1.0 - draw.probability)) < 1e-9
            return self.operator == _BERNOULLI and shape == self.shape and kept
        return self.shape == draw.shape


class UnmatchedDraws(Exception):
    """The calls of the eager model are not the random operations of the graph, one to one."""


def draws_of(graph: Graph) -> tuple[Draw, ...]:
    """Return the random operations of a graph, in order; dropout of all or nothing draws nothing."""
    found = []
    for operation in graph.operations:
        if operation.operator.startswith("nnscaler.random_"):
            found.append(Draw(operation.name, operation.operator, tuple(operation.args[0]), place=_place(operation)))
        elif operation.operator.startswith("nnscaler.") and operation.operator.endswith("dropout"):
            shape, p = graph.tensors[operation.inputs[0]].shape, float(operation.args[1])
            dims = 2 if "feature" in operation.operator else None
            if 0.0 < p < 1.0:
                found.append(Draw(operation.name, operation.operator, shape, p, dims, _place(operation)))
    return tuple(found)


def match_draws(calls: Sequence[Called], draws: Sequence[Draw]) -> tuple[Draw | None, ...]:
    """For each call the operation that it is; None for one whose result the loss does not need.

    Raises UnmatchedDraws when there is no such assignment in order, or more than one.
    """
    if len(calls) == len(draws):
        for position, (call, draw) in enumerate(zip(calls, draws, strict=True)):
            if not call.may_be(draw):
                raise UnmatchedDraws(
                    f"draw {position + 1} of the model is {call.operator}{call.shape}, not {draw.name}"
                )
        return tuple(draws)
    found = _assignments(calls, draws)
    if len(found) != 1:
        how = "in more than one way" if found else "in no way"
        raise UnmatchedDraws(f"the model draws {len(calls)} times and its graph {len(draws)} times; they match {how}")
    return found[0]


def _assignments(calls: Sequence[Called], draws: Sequence[Draw]) -> list[tuple[Draw | None, ...]]:
    """Up to two ways to find all `draws`, in order, among `calls`, by shape and line of the model."""
    partial: dict[int, list[tuple[Draw | None, ...]]] = {0: [()]}  # draws found so far -> ways
    for call in calls:
        after: dict[int, list[tuple[Draw | None, ...]]] = {}
        for count, ways in partial.items():
            after.setdefault(count, []).extend((*way, None) for way in ways)
            draw = draws[count] if count < len(draws) else None
            here = draw is not None and (draw.place is None or draw.place in (call.place, *call.callers))
            if draw is not None and here and call.may_be(draw) and not call.overwritten:
                after.setdefault(count + 1, []).extend((*way, draw) for way in ways)
        partial = {count: ways[:2] for count, ways in after.items()}
    return partial.get(len(draws), [])


class ProgramDraws(FixedDraws):
    """While open, torch's random operators draw what a program draws; without `draws` they are recorded in `calls`.

    `begin(step)` before each step. What is computed again in backward (activation checkpointing) draws the same as
    before: it is known by the state of torch's generator, which torch restores. Raises UnmatchedDraws for a call that
    the recorded run did not make.
    """

    def __init__(self, draws: Sequence[Draw | None] | None = None, seed: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Called] = []
        self._draws, self._seed, self._step = draws, seed, 0
        self._position = 0
        self._known: dict[int, int] = {}  # state of torch's generator -> position
        self._drawn: tuple[int, ...] | None = None  # by the call that is recorded
        self._last: Any = None  # of the last recorded call: kept, so that its memory is nobody else's

    def begin(self, step: int, draws: Sequence[Draw | None] | None = None) -> None:
        """Before each step. `draws`: from now on those of a batch of another size."""
        self._step, self._position, self._known = step, 0, {}
        self._draws = self._draws if draws is None else draws

    def end(self) -> None:
        """After each step. Raises UnmatchedDraws when the step drew less than the recorded run."""
        if self._draws is not None and self._position != len(self._draws):
            drew = f"{self._position} times in step {self._step}"
            raise UnmatchedDraws(f"the model draws {drew}, and {len(self._draws)} times in another forward")

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = str(func)
        if formula_of(IN_PLACE.get(name, name)) is None and not name.startswith(_RRELU):
            return func(*args, **(kwargs or {}))
        state = hash(torch.get_rng_state().numpy().tobytes())
        torch.empty(()).uniform_()  # a state of its own for each call, also for those that use another generator
        numbers = numbers_of(args, kwargs or {})
        if self._draws is None:
            if self._last is not None and name in IN_PLACE and args[0].data_ptr() == self._last.data_ptr():
                self.calls[-1] = replace(self.calls[-1], overwritten=self._last.shape == args[0].shape)
            places = _user_places() or (None,)
            self._drawn = None
            self._last = super().__torch_dispatch__(func, types, args, kwargs)
            shape = tuple(self._last.shape) if self._drawn is None else self._drawn
            self.calls.append(Called(name, shape, _keep(name, numbers), places[0], places[1:]))
            return self._last
        draw = self._draws[self._next(state)]
        if draw is None:
            return func(*args, **(kwargs or {}))
        if draw.drops:
            result = func(*args, **(kwargs or {}))
            kept = logical_kept(
                draw.probability, self._seed, draw.name, self._step, draw.shape, draw.dims, result.device
            )
            return result.copy_(kept)
        self._current = draw
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _maker(self, device: torch.device) -> Now:
        if self._draws is None:
            return _Noted(device, self)
        return _Named(device, self._seed, self._current, self._step)

    def _next(self, state: int) -> int:
        assert self._draws is not None
        if torch._C._current_graph_task_id() != -1 and state in self._known:
            return self._known[state]
        position = self._position
        if position >= len(self._draws):
            raise UnmatchedDraws(f"the model draws more than {len(self._draws)} times in step {self._step}")
        self._position, self._known[state] = position + 1, position
        return position


class _Noted(Now):
    """Tells the shape of what it draws."""

    def __init__(self, device: torch.device, told: ProgramDraws) -> None:
        super().__init__(device)
        self._told = told

    def draw(self, kind: str, shape: Sequence[int], dtype: str) -> Tensor:
        self._told._drawn = tuple(shape)
        return super().draw(kind, shape, dtype)


class _Named(Now):
    """Draws of one operation of a graph."""

    def __init__(self, device: torch.device, seed: int, of: Draw, step: int) -> None:
        super().__init__(device)
        self._where, self._seed, self._of, self._step = device, seed, of, step

    def draw(self, kind: str, shape: Sequence[int], dtype: str) -> Tensor:
        numbers = logical_uniform(self._seed, self._of.name, self._step, shape, self._where)
        if kind == "normal":
            return normal_of(numbers + 2.0**-54).to(dtype_of(dtype))
        return (numbers + 2.0**-54).to(dtype_of(dtype))


def _keep(name: str, numbers: tuple[Any, ...]) -> float | None:
    if name != _BERNOULLI:
        return None
    p = numbers[1] if len(numbers) > 1 else 0.5
    return float(p) if isinstance(p, int | float) else None


def _place(operation: Operation) -> tuple[str, int] | None:
    return None if operation.where is None else (operation.where.file, operation.where.line)


def _user_places() -> tuple[tuple[str, int], ...]:
    """The frames outside of torch, of nnscaler and of this module, the innermost first."""
    found = []
    for frame, line in walk_stack(sys._getframe(1)):
        module = str(frame.f_globals.get("__name__", ""))
        if module != __name__ and module.split(".")[0] not in ("torch", "nnscaler", "contextlib"):
            found.append((frame.f_code.co_filename, line))
    return tuple(found)
