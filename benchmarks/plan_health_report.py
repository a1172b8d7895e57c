"""The table of `plan_health.py`, as JSON, Markdown and HTML."""

from __future__ import annotations

import html
import json
import re
import shlex
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers

RAISES = "from_pretrained raises"  # of a row that is confirmed in another way
VERSIONS = {"transformers": transformers.__version__, "torch": torch.__version__}
STATUSES = ("equal", "wrong", "crashes", "undecided", "timed out", "not built", "no plan")


@dataclass(frozen=True)
class Row:
    """What became of one program.

    model       model type of the library
    case        a name of CASES: "tp2"
    flag        settings of the configuration that are not as by default; empty: none
    status      one of STATUSES
    detail      what is wrong, or why there is nothing
    parameters  generic names of the parameters whose gradients are wrong
    repair      rules that mend it, tried; empty where none is known
    confirmed   by the minimal script: yes, or what it says instead; empty where it was not run
    script      that reproduces it
    lints       of the plan, before it ran
    seconds     taken
    """

    model: str
    case: str
    flag: str
    status: str
    detail: str = ""
    parameters: tuple[str, ...] = ()
    repair: str = ""
    confirmed: str = ""
    script: str = ""
    lints: tuple[str, ...] = ()
    seconds: float = 0.0


def write_reports(file: Path, rows: Sequence[Row], seconds: float, *, keep: bool = False) -> None:
    """Write the Markdown file, and JSON and HTML beside it. `keep`: also the rows of other programs that are there."""
    data = file.with_suffix(".json")
    if keep and data.exists():
        before = json.loads(data.read_text(encoding="utf-8"))
        taken = {(row.model, row.case, row.flag) for row in rows}
        old = [Row(**{k: tuple(v) if isinstance(v, list) else v for k, v in row.items()}) for row in before["rows"]]
        rows = [*(row for row in old if (row.model, row.case, row.flag) not in taken), *rows]
        seconds += before["seconds"]
    rows = sorted(rows, key=lambda row: (bool(row.flag), row.case, row.model, row.flag))
    found = {"versions": VERSIONS, "seconds": round(seconds), "rows": [asdict(row) for row in rows]}
    data.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    file.write_text("\n".join(markdown(rows, seconds)) + "\n", encoding="utf-8")
    file.with_suffix(".html").write_text(page(rows, seconds), encoding="utf-8")


def markdown(rows: Sequence[Row], seconds: float) -> Iterator[str]:
    """Yield the lines of the Markdown file."""
    yield "# Plan health of transformers"
    yield ""
    yield f"{headline(rows, seconds)} Written by `python benchmarks/plan_health.py --out docs/plan-health.md`."
    yield ""
    yield "Each configuration that declares a tensor or expert plan was shrunk, given random weights, parallelised"
    yield "through the library's own code on the CPU, and compared with the plain model in float64: the loss, and every"
    yield "gradient on every rank. *Confirmed* means that a script of 20 lines of plain torch and transformers, run as"
    yield "gloo processes in float32 with weights read by `from_pretrained(distributed_config=...)`, says the same."
    yield "`flags` are single settings that differ from the default, under TP=2."
    yield ""
    yield "| case | models | " + " | ".join(STATUSES) + " |"
    yield "|---" * (len(STATUSES) + 2) + "|"
    for case, counts in table(rows):
        models = len({row.model for row in rows if _case(row) == case})
        yield f"| {case} | {models} | " + " | ".join(str(counts[status]) for status in STATUSES) + " |"
    for status, title in (("wrong", "Wrong"), ("crashes", "Crashes"), ("undecided", "Undecided")):
        if chosen := [row for row in rows if row.status == status]:
            yield from ("", f"## {title}", "")
            yield from _listed(chosen)
    for status, title in (("timed out", "Timed out"), ("not built", "Cannot be built")):
        if chosen := [row for row in rows if row.status == status]:
            yield from ("", f"## {title}", "", "| model | why |", "|---|---|")
            yield from dict.fromkeys(f"| {row.model} | {_cell(row.detail)} |" for row in chosen)
    scripts = {row.model: row for row in reversed(rows) if row.status == "wrong" and row.confirmed.startswith("yes")}
    if scripts:
        yield from ("", "## Scripts", "")
        yield "One for each model with a wrong plan; each prints what is wrong, or ends with the"
        yield "error of `from_pretrained` that the table has."
        for model, row in sorted(scripts.items()):
            name = f"{model}_{row.case}.py"
            yield from (
                "",
                f"### {model} {row.case} {row.flag}".rstrip(),
                "",
                "<!-- long -->",
                f'```python title="{name}"',
            )
            command = re.findall(r"torchrun [^;]*", row.script)[0].replace("this.py", name)
            error = row.confirmed.partition(f"{RAISES} ")[2][:60]
            told = f" 2>&1 | grep -F {shlex.quote(error)}" if error else ""
            yield from (row.script.rstrip(), "```", f"<!-- then: {command}{told} -->")  # for tests/pages/


def headline(rows: Sequence[Row], seconds: float) -> str:
    """Return the versions, the totals, and the time."""
    counts = Counter(row.status for row in rows)
    names = ", ".join(f"{name} {version}" for name, version in VERSIONS.items())
    told = ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status] and status != "no plan")
    taken = [row.seconds for row in rows if row.status != "no plan"] or [0.0]
    return f"{names}: {told}; {seconds:.0f} s, median {statistics.median(taken):.1f} s a program."


def table(rows: Sequence[Row]) -> Iterator[tuple[str, Counter[str]]]:
    """Yield each case, and how many programs have each status."""
    for case in dict.fromkeys(_case(row) for row in rows):
        yield case, Counter(row.status for row in rows if _case(row) == case)


def _case(row: Row) -> str:
    return "flags" if row.flag else row.case


def _listed(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a table in which programs of a model that say the same share a line."""
    yield "| model | cases | what | repair that was tried and mends it | confirmed |"
    yield "|---|---|---|---|---|"
    groups: dict[tuple[str, str, str, str], list[str]] = {}
    for row in rows:
        what = re.sub(r"^rank \d+ raised", "raises", row.detail) if row.status != "wrong" else _wrong(row)
        key = (row.model, what, row.repair, row.confirmed)
        groups.setdefault(key, []).append(row.flag or row.case)
    for (model, what, repair, confirmed), cases in groups.items():
        yield f"| {model} | {_cell(', '.join(cases))} | {_cell(what)} | {_cell(repair)} | {_cell(confirmed)} |"


def _wrong(row: Row) -> str:
    names = ", ".join(row.parameters[:4]) + (f" and {len(row.parameters) - 4} more" if len(row.parameters) > 4 else "")
    if row.detail.startswith("the loss"):
        return f"the loss, and gradients of {names}"
    cause = row.detail.rpartition(": ")[2] if ": " in row.detail else ""
    return f"gradients of {names}" + (f": {cause}" if cause else "")


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())[:420]


def page(rows: Sequence[Row], seconds: float) -> str:
    """Return the HTML page: the totals, and a row for each program that is not equal."""
    head = "".join(f"<th>{name}</th>" for name in ("case", *STATUSES))
    totals = "".join(
        f"<tr><td>{case}</td>{''.join(f'<td>{counts[status]}</td>' for status in STATUSES)}</tr>"
        for case, counts in table(rows)
    )
    shown = [row for row in rows if row.status not in ("equal", "no plan")]
    cells = "".join(
        "<tr>" + "".join(f"<td>{html.escape(text)}</td>" for text in _texts(row)) + "</tr>" for row in shown
    )
    names = "".join(f"<th>{name}</th>" for name in ("model", "case", "flag", "status", "what", "repair", "confirmed"))
    return (
        "<!doctype html><meta charset='utf-8'><title>Plan health of transformers</title>"
        "<style>body{font:14px sans-serif;margin:2em}td,th{border:1px solid #ccc;padding:4px;vertical-align:top}"
        "table{border-collapse:collapse;margin-bottom:2em}</style><h1>Plan health of transformers</h1>"
        f"<p>{html.escape(headline(rows, seconds))}</p><table><tr>{head}</tr>{totals}</table>"
        f"<table><tr>{names}</tr>{cells}</table>\n"
    )


def _texts(row: Row) -> tuple[str, ...]:
    return row.model, row.case, row.flag, row.status, row.detail[:600], row.repair, row.confirmed
