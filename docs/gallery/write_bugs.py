"""Write the pages and the notebook of find_the_bug.py, with what nnscaler says of each bug.

    python -m docs.gallery.write_bugs

A test writes them again and compares.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PROGRAMS, NOTEBOOK = HERE / "find_the_bug.py", HERE / "find_the_bug.ipynb"
PAGE, OTHERS = HERE / "find-the-bug.md", HERE / "find-more-bugs.md"  # a page is 400 lines at most
FIRST = 8  # bugs of the first page: those of tensor parallel programs
BUG = re.compile(r"^# bug (\d+): (.+?), (\w+=\d)\n+(.*?)(?=^# bug|\Z)", re.MULTILINE | re.DOTALL)

# What is wrong, for those who have guessed.
ANSWERS: Mapping[int, str] = {
    1: "A layer that has some of its inputs computes a part of a sum. The all_reduce that adds the parts up is "
    "missing: each rank goes on with its own part.",
    2: "Forward is right, and so is the loss. But a layer with some of its outputs gives back a part of its "
    "input's gradient, and nobody sums the parts: everything below has a wrong gradient.",
    3: "Each rank adds the bias before the sum, so that it is added twice.",
    4: "Each rank keeps the keys' weight of the other rank, so that its queries meet the keys of other heads.",
    5: "The scale of attention is computed from a number that the split has changed: the rows of the own weight, "
    "not of the whole one.",
    6: "The norms of queries and keys have one weight for all heads. Each rank sees the gradient of its own "
    "heads, which trains a little off, for ever. Plans of several models of transformers have just this bug.",
    7: "The ranks' words are dealt in turn, not put side by side: word 1 stands where word 7 belongs.",
    8: "A word of another rank must count as zero here. It is clamped to a neighbour instead, and added.",
    9: "Rotary positions begin at 0 on every rank: the second half of the sentence thinks that it is the first.",
    10: "The causal mask is cut at the corner of the own rows, not at their place in the sentence: late tokens "
    "are blind for their neighbours.",
    11: "Keys and values are gathered, and their gradients are not summed on the way back: what later tokens on "
    "other ranks want of a key is lost. The loss of the first step is right.",
    12: "Gradients are summed and never divided: they are twice as large. AdamW hides it; SGD and clipping do not.",
    13: "Gradients of biases and norms are forgotten: those parameters drift apart, rank by rank.",
    14: "Each rank divides by its own labels. The last rows are short, so that a mean of means is not the mean.",
    15: "One rank reduces gradients in another order. With equal shapes they would be mixed up without a word; "
    "here shapes differ, and on GPUs the job would hang.",
}

START = '''import re
import verify
from verify.report_formats import FORMATS

MATTERS = re.compile(r"[a-z]+_[a-z_]+  |  rank |  = cause|  help|      first difference|REFUTED|VERIFIED")


def report(bug, mesh):
    """Verify a program of the file; return the lines of the report."""
    found = verify.verify_external(f"find_the_bug.py::{bug}", mesh=mesh)
    return [re.sub(r"at \\S*/", "at ", line.text) for line in FORMATS["full"]([found], found.seconds)]


def ask(bug, mesh):
    """Print what matters of the report."""
    for line in report(bug, mesh):
        if MATTERS.match(line):
            print(re.sub(r": \\d+ checks?.*", "", line))
'''


@dataclass(frozen=True)
class Bug:
    """A bug: its number, of what it is one, the mesh that it runs on, and its text."""

    number: int
    kind: str
    mesh: str
    text: str


def bugs() -> list[Bug]:
    """Return the bugs of the file, in order."""
    found = BUG.findall(PROGRAMS.read_text(encoding="utf-8"))
    return [Bug(int(number), kind, mesh, text.strip() + "\n") for number, kind, mesh, text in found]


def said_of_all() -> dict[int, list[str]]:
    """Ask of each bug, as the notebook does; return the lines of the reports."""
    names = _names()
    said, before = {}, Path.cwd()
    os.chdir(HERE)
    try:
        for bug in bugs():
            said[bug.number] = names["report"](f"bug_{bug.number}", mesh=bug.mesh)
    finally:
        os.chdir(before)
    return said


def _names() -> dict[str, Any]:
    """Return what the first cell of the notebook defines."""
    names: dict[str, Any] = {}
    exec(START, names)
    return names


def printed(lines: Sequence[str]) -> str:
    """Return what the notebook prints of a report."""
    names, out = _names(), io.StringIO()
    names["report"] = lambda bug, mesh: lines
    with contextlib.redirect_stdout(out):
        names["ask"]("", mesh="")
    return out.getvalue()


def page(introduction: str, shown: Sequence[Bug], said: Mapping[int, Sequence[str]]) -> str:
    """Return a page."""
    lines = [introduction, HIDDEN_NAMES]
    for bug in shown:
        lines.append(
            f"## Bug {bug.number}\n\n{bug.kind.capitalize()}, `--mesh {bug.mesh}`.\n\n```python\n{bug.text}```\n"
        )
        command = f"$ nnscaler verify-external docs/gallery/{PROGRAMS.name}::bug_{bug.number} --mesh {bug.mesh}"
        block = f"<!-- exit: 1 -->\n<!-- long -->\n```console\n{command}\n{_shown(said[bug.number])}\n```\n"
        answer = "\n".join(textwrap.wrap(ANSWERS[bug.number], 119)) + "\n"
        lines.append(f"<details markdown>\n<summary>What nnscaler says</summary>\n\n{block}\n{answer}\n</details>\n")
    return "\n".join(lines)


def _shown(lines: Sequence[str]) -> str:
    """Return what a page shows of a report: what matters of it, lists cut; `...` is what stands between."""
    matters, found = _names()["MATTERS"], list[str]()
    for line in lines:
        if line.startswith("REFUTED") and found[-1:] != ["..."]:
            found.append("...")  # the command says how to reproduce it
        if matters.match(line):
            cut = re.sub(r"(\S+), [^()]*? and (\d+) more", r"\1, ... and \2 more", line)
            found.append(re.sub(r": \d+ checks?.*", ": ...", re.sub(r" at find_the_bug", " at ...find_the_bug", cut)))
        elif found[-1:] != ["..."]:
            found.append("..." if line else "")
    return "\n".join(found)


def notebook(said: Mapping[int, Sequence[str]]) -> str:
    """Return the notebook, with outputs."""
    introduction = "Each of these programs is wrong. Read, guess, and run the cell below it."
    cells = [_markdown(f"# Find the bug\n\n{introduction}"), _code(START, None)]
    cells.append(
        _markdown("The model, the pieces and three right programs are in `find_the_bug.py`, beside this notebook.")
    )
    cells.append(
        _code('from pathlib import Path\n\nprint(Path("find_the_bug.py").read_text().split("# bug 1")[0])\n', None)
    )
    for bug in bugs():
        cells.append(_markdown(f"## Bug {bug.number}: {bug.kind}\n\n```python\n{bug.text}```"))
        cells.append(_code(f'ask("bug_{bug.number}", mesh="{bug.mesh}")\n', printed(said[bug.number])))
        cells.append(_markdown(f"<details><summary>Answer</summary>\n\n{ANSWERS[bug.number]}\n\n</details>"))
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    found = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


def _markdown(text: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "id": "", "metadata": {}, "source": text.splitlines(keepends=True)}


def _code(text: str, printed: str | None) -> dict[str, Any]:
    lines = [] if printed is None else printed.splitlines(keepends=True)
    outputs = [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []
    source = text.rstrip("\n").splitlines(keepends=True)
    return {
        "cell_type": "code",
        "execution_count": None,
        "id": "",
        "metadata": {},
        "outputs": outputs,
        "source": source,
    }


INTRODUCTION = """# Find the bug

Fifteen parallel programs, each with one mistake. Each of them runs and trains, but for one, and many have the right
loss in the first step. Read, guess, and open what nnscaler says. The [notebook](find_the_bug.ipynb) has the same to
run.

![A missing all_reduce, as a report shows it](../pictures/report.svg)

[`find_the_bug.py`](find_the_bug.py) has a small decoder and three right ways to run it on two ranks: with some of the
heads and of the hidden layer each (tensor parallel), with half of the sentence each (context parallel), with half of
the rows each (data parallel). They are written by hand, as Megatron-like code is:

<!-- long -->
```console
$ nnscaler verify-external docs/gallery/find_the_bug.py::tensor_parallel --mesh tp=2
...
VERIFIED  find_the_bug.py::tensor_parallel on 2 ranks (tp=2), in float64: ...
$ nnscaler verify-external docs/gallery/find_the_bug.py::context_parallel --mesh cp=2
...
VERIFIED  find_the_bug.py::context_parallel on 2 ranks (cp=2), in float64: ...
$ nnscaler verify-external docs/gallery/find_the_bug.py::data_parallel --mesh dp=2
...
VERIFIED  find_the_bug.py::data_parallel on 2 ranks (dp=2), in float64: ...
```

What the bugs are made of:

* `Copied`: the same on all ranks in forward, summed in backward. `Summed`: the other way round.
* `Gathered`: the tokens of all ranks in forward, of the gradients' sum the own ones in backward.
* `Columns`: a linear layer that has some of its outputs. `Rows`: one that has some of its inputs.
* `on_gradients(parameters, change)`: done to each gradient when it is whole; `average` averages it over the ranks.
"""

SECOND = """# Find more bugs

Seven programs in which ranks share the tokens of a sentence, or the rows of a batch. The first eight, and what these
are made of, are [on their page](find-the-bug.md).
"""

MORE = """
[Seven more](find-more-bugs.md), of context and data parallel programs.
"""

HIDDEN_NAMES = """<!-- python
import sys
sys.path.insert(0, "docs/gallery")
from find_the_bug import *
-->
"""


def main() -> int:
    """Write all."""
    for path, text in written(said_of_all()).items():
        path.write_text(text, encoding="utf-8")
    return 0


def written(said: Mapping[int, Sequence[str]]) -> dict[Path, str]:
    """Return the files."""
    every = bugs()
    pages = {PAGE: page(INTRODUCTION, every[:FIRST], said) + MORE, OTHERS: page(SECOND, every[FIRST:], said)}
    return {**pages, NOTEBOOK: notebook(said)}


if __name__ == "__main__":
    sys.exit(main())
