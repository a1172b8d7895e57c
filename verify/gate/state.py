"""The state of the last gate run: which items failed, so that they start first, and how long each took.

It decides the order alone, never a verdict. A file that cannot be read is no state.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from nnscaler.config import cache_folder
from verify.operators.run.cache import make_folder


@dataclass(frozen=True)
class Last:
    """`passed`: whether nothing new was found. `seconds`: of its whole run."""

    passed: bool
    seconds: float


@dataclass(frozen=True)
class State:
    """The last results, by the items' names."""

    items: Mapping[str, Last] = field(default_factory=dict)

    def failed(self, name: str) -> bool:
        """Return whether the item is known to have failed."""
        last = self.items.get(name)
        return last is not None and not last.passed

    def seconds(self, name: str) -> float | None:
        """Return how long the item took; None where that is not known."""
        last = self.items.get(name)
        return None if last is None else last.seconds


def state_file(folder: Path) -> Path | None:
    """Return the file of a project, which is in `folder`; None where there is no cache to keep it in."""
    root = cache_folder(folder)
    project = folder.resolve()
    name = f"{project.name}-{sha256(str(project).encode()).hexdigest()[:12]}.json"  # the cache is for all projects
    return None if root is None else root / "gate" / name


def read_state(file: Path | None) -> State:
    """Read the state; empty where there is none, or none that can be read."""
    if file is None:
        return State()
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        items = {str(name): Last(entry["passed"] is True, float(entry["seconds"])) for name, entry in document.items()}
        return State(items)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return State()


def write_state(file: Path | None, before: State, now: Mapping[str, Last]) -> None:
    """Replace the file; items that did not run keep what they had. A folder that cannot be written is not an error."""
    if file is None:
        return
    items = {**before.items, **now}
    text = json.dumps(
        {name: {"passed": last.passed, "seconds": round(last.seconds, 3)} for name, last in items.items()}
    )
    with suppress(OSError):
        make_folder(file.parent)
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=".gate", suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                stream.write(text)
            Path(name).replace(file)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
