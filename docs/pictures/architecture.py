"""The floors of the architecture: from the contracts that import-linter keeps, in the words of the documents."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from docs.pictures.svg import Picture, arrow, line, paragraph, rect, words

WIDTH, LEFT, NAMES, ROW, GAP = 980, 24, 236, 29, 4
TOWER = 190  # pixels of the runtime's tower, at the right
ROOM = 76  # characters of a description
COLORS = {"nnscaler": "code", "verify": "goodback", "op_registry": "unsureback"}


def draw(repository: Path) -> Picture:
    """Return the picture: a row per floor, top to bottom, and the runtime's tower beside them."""
    contracts = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    floors = list(_floors(contracts["contracts"]))
    told = {name: _docstring(repository, name) for names in floors for name in names}
    told |= descriptions((repository / "docs" / "architecture.md").read_text(encoding="utf-8"))
    ground = _standing_on(contracts["contracts"])
    pieces = [words(LEFT, 36, "Imports go down only", "bold", size=17)]
    top = 58
    for number, names in enumerate(floors):
        pieces += _row(top + number * (ROW + GAP), names, told)
    first = next(n for n, names in enumerate(floors) if set(names) <= ground)
    writer = next(n for n, names in enumerate(floors) if "nnscaler.codegen" in names)
    pieces += _tower(top, top + first * (ROW + GAP) - GAP, top + writer * (ROW + GAP) + ROW / 2)
    bottom = top + len(floors) * (ROW + GAP)
    note = "The contracts in pyproject.toml are this table; a test breaks where an import goes up."
    pieces.append(words(LEFT, bottom + 18, note, "faint", size=12))
    return Picture(WIDTH, bottom + 34, "The floors of nnScaler, from the import contracts", tuple(pieces))


def descriptions(document: str) -> Mapping[str, str]:
    """Return what docs/architecture.md says of each floor, by its name."""
    block = re.search(r"^## Floors\n.*?^```text\n(.*?)^```$", document, re.MULTILINE | re.DOTALL)
    assert block is not None
    found: dict[str, str] = {}
    for row in filter(None, block[1].splitlines()):
        cells = re.split(r"\s{2,}", row)
        for names, text in zip(cells[::2], cells[1::2], strict=True):
            parts = names.split(", ")
            package = parts[0].rpartition(".")[0]
            found |= {(package + name if name.startswith(".") else name): text for name in parts}
    return found


def _docstring(repository: Path, name: str) -> str:
    """Return the first line of a module's docstring: what it is, where the document has no row for it."""
    path = repository.joinpath(*name.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return text.splitlines()[0].rstrip(".") if text else ""


def _floors(contracts: list[dict[str, Any]]) -> Iterator[list[str]]:
    """Yield the names of each floor, the highest first."""
    (layers,) = (c["layers"] for c in contracts if c["name"].startswith("Floors"))
    for layer in layers:
        yield [name.strip("() ") for name in layer.split("|")]


def _standing_on(contracts: list[dict[str, Any]]) -> set[str]:
    """Return the modules that the runtime may import: those that stand on the standard library alone."""
    (ground,) = (c["source_modules"] for c in contracts if c["name"].startswith("Manifest and layouts stand on"))
    return set(ground)


def _row(top: float, names: list[str], told: Mapping[str, str]) -> list[str]:
    wide = WIDTH - 2 * LEFT - TOWER - 16
    share = (wide - (len(names) - 1) * GAP) / len(names)
    pieces = []
    for number, name in enumerate(names):
        x = LEFT + number * (share + GAP)
        pieces.append(rect(x, top, share, ROW, COLORS[name.split(".")[0]], radius=5))
        pieces.append(words(x + 10, top + 19, name, "mono", size=12.5))
        pieces.append(words(x + (NAMES if len(names) == 1 else 170), top + 19, _short(told[name]), "faint", size=12))
    return pieces


def _short(text: str) -> str:
    """Return the first part of a description, as much as a row has room for."""
    first = re.split(r"; |(?<=\w): |\. ", text, maxsplit=1)[0] if len(text) > ROOM else text.split("; ")[0]
    return first if len(first) <= ROOM else first[:ROOM].rpartition(" ")[0].rstrip(",") + " ..."


def _tower(top: float, bottom: float, written: float) -> list[str]:
    x = WIDTH - LEFT - TOWER
    return [
        rect(x, top, TOWER, bottom - top, "card", radius=5),
        words(x + 14, top + 26, "nnscaler.runtime", "mono bold", size=12.5),
        *paragraph(
            x + 14,
            top + 50,
            ["a tower of its own", "", "generated programs import", "this and torch alone:", "no compiler at run time"],
        ),
        arrow(x - 15, written, x, written),
        *paragraph(x + 14, written + 4, ["the text of each role"]),
        line(x + 14, bottom - 56, x + TOWER - 14, bottom - 56),
        *paragraph(x + 14, bottom - 34, ["imports the floors that lie", "below its foot"]),
    ]
