"""The planner's certificate: what was found, and the bound that no plan in the space goes below."""

from __future__ import annotations

from pathlib import Path

from docs.pictures.svg import Picture, line, rect, words
from nnscaler.ir.operation_annotations import signatures
from nnscaler.model_file import load_model_file, traced
from nnscaler.planning.auto_plan_request import AutoPlan, search_plan
from nnscaler.planning.cluster.description import show_bytes, show_seconds
from nnscaler.planning.planner.build_certified_plan import Certificate

RANKS, CLUSTER, MODEL = 8, "h100x8", "examples/gpt.py"
WIDTH, LEFT, NAMES, BARS, ROW = 980, 24, 190, 660, 30


def draw(repository: Path) -> Picture:
    """Search the plan of an example, and return the picture of its certificate."""
    model = load_model_file(str(repository / MODEL), 0)
    graph = traced(model, lambda _: None).graph
    found = search_plan(graph, signatures(graph), RANKS, AutoPlan(CLUSTER))
    return picture_of(found.certificate)


def picture_of(of: Certificate) -> Picture:
    """Return the picture: a bar per configuration that was solved and shown, and the bound as a line through them."""
    rows = ((of.configuration, of.seconds, True), *of.runners_up)
    scale = BARS / max(seconds for _, seconds, _ in rows)
    top, start = 96, LEFT + NAMES
    bottom = top + len(rows) * (ROW + 6)
    pieces = [
        words(LEFT, 34, f"nnscaler plan {MODEL} --ranks {RANKS} --cluster {CLUSTER}", "mono bold", size=14),
        words(LEFT, 56, _told(of), "faint", size=12.5),
    ]
    for number, (name, seconds, fits) in enumerate(rows):
        y = top + number * (ROW + 6)
        pieces.append(words(LEFT, y + 20, name, "mono" if number else "mono bold", size=12))
        pieces.append(rect(start, y, seconds * scale, ROW, "pale" if number else "bar", radius=3))
        shown = show_seconds(seconds) + ("" if fits else ", does not fit")
        pieces.append(words(start + seconds * scale + 8, y + 20, shown, "" if number else "bold", size=12))
    x = start + of.bound * scale
    pieces.append(line(x, top - 14, x, bottom + 6, "mark", dashes="5 4"))
    least = f"no plan in the space takes less than {show_seconds(of.bound)}"
    pieces.append(words(x, bottom + 24, least, "bad", size=12.5, anchor="middle"))
    return Picture(WIDTH, bottom + 44, f"The certificate of a plan: gap {of.gap:.2%}", tuple(pieces))


def _told(of: Certificate) -> str:
    solved = f"{of.solved} configurations solved, {of.left} pruned by their bounds, {of.too_large} too large"
    held = f"{show_bytes(of.memory)} of {show_bytes(of.memory_limit)} a rank"
    return f"{solved}; {held}; this plan is at most {of.gap:.2%} above the optimum"
