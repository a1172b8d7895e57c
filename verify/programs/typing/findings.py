"""Turn mistakes into findings, with the model's line and the program's line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from op_registry.spec import SourceLocation

from nnscaler.ir.graph import Graph
from verify.programs.checks.context import SHOWN
from verify.programs.source_map import Places
from verify.programs.typing.typed_value import Mistake
from verify.results.finding import Finding


class Finder:
    """Collects the findings of one check after another."""

    def __init__(self, graph: Graph, folder: str, sources: Mapping[str, str]) -> None:
        self._graph = graph
        self._folder = folder
        self._places = Places(graph)
        self._sources = {file: text.splitlines() for file, text in sources.items()}
        self._found: list[Finding] = []
        self.count = 0

    def add(self, file: str, number: int, mistake: Mistake) -> None:
        self.count += 1
        if len(self._found) >= SHOWN:
            return
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

    def take(self) -> tuple[Finding, ...]:
        found, self._found, self.count = tuple(self._found), [], 0
        return found
