"""The type of a variable in a rank program: a logical tensor, in a layout; and mistakes about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from op_registry.source_location import SourceLocation

from nnscaler.ir.graph import Graph
from nnscaler.layout import INVARIANT, MICRO, SLICE, Layout, Replicated, State
from verify.programs.checks.input_and_outcome import CheckOutcome, outcome_of
from verify.programs.source_map import SourceMap
from verify.programs.typing.program_files.rank_program_syntax import StageText
from verify.results.finding import Finding
from verify.results.report import Check


@dataclass(frozen=True)
class Axes:
    """The axes of a stage, `micro` last. Outside of its region, an axis of pieces has the size 1."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    in_time: int = 1  # how many of them, the last ones, have no ranks

    @property
    def first_in_time(self) -> int:
        return len(self.names) - self.in_time

    @cached_property
    def pairs(self) -> tuple[tuple[str, int], ...]:
        return tuple(zip(self.names, self.sizes, strict=True))

    def layout(self, states: Mapping[str, State]) -> Layout:
        """Make a layout from states by name. Raises Mistake for an axis that the stage does not have."""
        for name in states:
            if name not in self.names:
                raise Mistake("layouts_disagree", f"a layout names axis {name!r}; the stage has {list(self.names)}")
        return tuple(states.get(name, INVARIANT) for name in self.names)


def axes_of(stage: StageText, micro_batches: int | None = None) -> Axes:
    """Return the axes of a stage outside of regions; `micro_batches`: other than its own, which then are whole."""
    whole = micro_batches is not None
    count = stage.micro_batches if micro_batches is None else micro_batches
    in_time = {
        **dict.fromkeys(stage.time_axes, 1),
        **({SLICE: 1 if whole else stage.slices} if stage.slices > 1 else {}),
    }
    names, sizes = (*stage.axes, *in_time, MICRO), (*stage.axes.values(), *in_time.values(), count)
    return Axes(names, sizes, 1 + len(in_time))


def in_region(axes: Axes, axis: str, parts: int) -> Axes:
    """Return the axes inside of a region with so many pieces."""
    sizes = zip(axes.names, axes.sizes, strict=True)
    return replace(axes, sizes=tuple(parts if name == axis else size for name, size in sizes))


@dataclass(frozen=True, slots=True)
class Held:
    """A logical tensor in a layout, in normal form (`normal`)."""

    tensor: str
    layout: Layout


def normal(layout: Sequence[State], sizes: Sequence[int], needs_grad: bool) -> Layout:
    """Normalise a layout.

    On an axis of one rank all states are one, and without gradient `Replicated` and `Invariant` are.
    """
    return tuple(
        INVARIANT if parts == 1 or (not needs_grad and isinstance(state, Replicated)) else state
        for state, parts in zip(layout, sizes, strict=True)
    )


class Mistake(Exception):
    """A type error in one line. `tensor`: the logical tensor that it concerns; `cause`: the reason, in words."""

    def __init__(self, code: str, message: str, cause: str | None = None, tensor: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.cause, self.tensor = code, message, cause, tensor


# Turn mistakes into findings, with the model's line and the program's line.


class Finder:
    """Collects the findings of one check after another."""

    def __init__(self, graph: Graph, folder: str, sources: Mapping[str, str]) -> None:
        self._graph = graph
        self._folder = folder
        self._places = SourceMap(graph)
        self._sources = {file: text.splitlines() for file, text in sources.items()}
        self._found: list[Finding] = []
        self.count = 0

    def add(self, file: str, number: int, mistake: Mistake) -> None:
        self.count += 1
        lines = self._sources.get(file, [])
        text = lines[number - 1].strip().partition("  # ")[0] if 0 < number <= len(lines) else ""
        place = SourceLocation(str(Path(self._folder) / file), max(number, 1), text)
        where, module = None, ""
        if mistake.tensor is not None:
            where = self._places.of_tensor(mistake.tensor) or self._places.of_stored().get(mistake.tensor)
            producer = self._graph.producers.get(mistake.tensor)
            module = producer.module if producer is not None else ""
        facts = {"program": f"{file}:{number}" if number else file}
        if mistake.tensor is not None:
            facts["tensor"] = mistake.tensor
        if module:
            facts["module"] = module
        message = mistake.message + (f" (in `{module}`)" if module else "")
        related = (("generated program", place),)
        self._found.append(Finding(mistake.code, message, where, facts, mistake.cause, related=related))

    def outcome(self, check: Check) -> CheckOutcome:
        """Return the outcome of a check that ends here; the next one begins without findings."""
        found, self._found, self.count = self._found, [], 0
        return outcome_of(check, found)
