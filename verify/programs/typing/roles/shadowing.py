"""Names that a rank program must not assign: the text would no longer mean what it says."""

from __future__ import annotations

from collections.abc import Iterator

from nnscaler.runtime.role import Stage
from verify.programs.typing.roles.text import Line, Recomputed, StageText

RESERVED = frozenset({"aten", "comm", "dtypes", "ops", "recompute", "self", "torch", "user", "float", "complex"})
RESERVED |= {"Invariant", "Partial", "Replicated", "Sharded"}
_OWN = frozenset({"micro", "rank", "device", "context", "prepare", "forward", "_observer", *dir(Stage)})


def shadowing(stage: StageText) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of every variable named like a module of the program, and of every stored tensor named like an
    axis or like an attribute that stages have anyway."""
    taken = {*stage.axes, *_OWN}
    seen: set[str] = set()
    for stored in stage.stored:
        if stored.variable in taken or stored.variable in seen:
            yield stored.number, stored.variable
        seen.add(stored.variable)
    for axis in stage.axes:
        if axis in _OWN:
            yield stage.number, axis
    for body in (stage.prepare, stage.forward):
        if body is None:
            continue
        for name in RESERVED.intersection(body.arguments):
            yield body.number, name
        for statement in body.statements:
            lines = (statement, *statement.lines) if isinstance(statement, Recomputed) else (statement,)
            for line in lines:
                if isinstance(line, Line | Recomputed):
                    inside = [name for name, _ in line.bound] if isinstance(line, Recomputed) else []
                    for name in RESERVED.intersection((*line.targets, *inside)):
                        yield line.number, name
