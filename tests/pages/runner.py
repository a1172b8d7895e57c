"""Runs the blocks of one page, in order, as its reader would: in one folder, with what was written before."""

from __future__ import annotations

import contextlib
import doctest
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import yaml

from nnscaler.cli.main import main
from tests.pages.blocks import ROOT, Block

TIME = re.compile(r"\b\d+(?:\.\d+)? ?(?:us|ms|s|min)\b")
ROW_TIME = re.compile(r"^( *(?:PASS|FAIL|OPEN|----)  .*\S)  \d+\.\d s$", re.MULTILINE)
SHELL = re.compile(r"[|&;<>$*`~]|\w=\S* nnscaler")
OWN_PROCESS = ("train", "verify-op")  # one changes what a process is, one imports files that pages change
DATA: Mapping[str, Callable[[str], object]] = {"toml": tomllib.loads, "json": json.loads, "yaml": yaml.safe_load}


class PageFailed(Exception):
    """A block does not do what its page says; the text says which, and what it did."""


def run_page(blocks: Sequence[Block], folder: Path) -> int:
    """Run the blocks in `folder`, which is the current one; return how many of those that are shown were run.

    Raises PageFailed at the first one that ends otherwise, or prints something else, than the page says.
    """
    for name in ("examples", "benchmarks", "docs"):
        (folder / name).symlink_to(ROOT / name)
    names: dict[str, object] = {"__name__": "__main__"}
    printed, done = "", 0
    for block in blocks:
        if "output" in block.marks:
            part = "...\n" if block.marks["output"] == "part" else ""
            _compare(block, part + block.text + part, printed)
        elif "output of" in block.marks:
            status, out, err = run_command(block.marks["output of"], folder)
            if status:
                raise PageFailed(f"{block.place}: exit {status}: {block.marks['output of']}\n{err}")
            _compare(block, f"...\n{block.text}...\n", out)
        elif block.title is not None:
            (folder / block.title).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.title).write_text(block.text, encoding="utf-8")
        elif block.language == "pycon":
            _doctest(block, names)
        elif block.language == "python":
            printed = _python(block, names)
        elif block.language in DATA:
            _read(block)
        else:
            printed = _commands(block, folder)
        done += block.shown
    return done


def _read(block: Block) -> None:
    try:
        DATA[block.language](block.text)
    except ValueError as error:
        raise PageFailed(f"{block.place}: is no {block.language}: {error}") from error


def _python(block: Block, names: dict[str, object]) -> str:
    out = io.StringIO()
    code = compile("\n" * block.line + block.text, block.page, "exec")
    try:
        with contextlib.redirect_stdout(out):
            exec(code, names)
    except Exception as error:
        raise PageFailed(f"{block.place}: {type(error).__name__}: {error}\n{out.getvalue()}") from error
    return out.getvalue()


def _doctest(block: Block, names: dict[str, object]) -> None:
    test = doctest.DocTestParser().get_doctest(block.text, names, block.place, block.page, block.line)
    out = io.StringIO()
    result = doctest.DocTestRunner().run(test, out=out.write, clear_globs=False)
    names.update(test.globs)
    if result.failed or not result.attempted:
        raise PageFailed(f"{block.place}: {out.getvalue()}")


def _commands(block: Block, folder: Path) -> str:
    """Run the commands of a block; return what the last one printed. Only the last may fail as `exit` says."""
    found, steps = "", list(_steps(block))
    for number, (command, wanted) in enumerate(steps):
        allowed = int(block.marks.get("exit", "0")) if number == len(steps) - 1 else 0
        if block.language == "console" and wanted.startswith("error: "):
            allowed = 2
        status, out, err = run_command(command, folder)
        if status != allowed:
            raise PageFailed(f"{block.place}: exit {status}, not {allowed}: {command}\n{out}{err}")
        found = err[max(err.find("error: "), 0) :] if status == 2 else out  # before it: progress
        if wanted:
            _compare(block, wanted, found)
    return found


def _steps(block: Block) -> Iterator[tuple[str, str]]:
    """The commands of a block, each with what it prints; comments and continued lines as a shell has them."""
    text = block.text.replace("\\\n", " ")
    if block.language == "console":
        for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            command, _, wanted = part.partition("\n")
            yield command, wanted.strip("\n")
        return
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            yield line, ""


def run_command(command: str, folder: Path) -> tuple[int, str, str]:
    """Run a command line; return its status, stdout and stderr. What is ours runs in this process where it can."""
    words = shlex.split(command, comments=True)
    if words[0] == "nnscaler" and words[1] not in OWN_PROCESS and not SHELL.search(shlex.join(words).replace("'", "")):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main(words[1:])
        return int(status), out.getvalue(), err.getvalue()
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout, done.stderr


def _compare(block: Block, wanted: str, found: str) -> None:
    """`...` stands for anything, as a first line for nothing too. Times, the widths of columns and where the repository
    lies are not compared."""
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    found = found.replace(f"{ROOT}/", "").replace(f"{Path.cwd()}/", "")
    same, shown, seen = doctest.OutputChecker().check_output, _timeless(wanted) + "\n", _timeless(found)
    if not same(shown, seen, flags) and not same(shown.removeprefix("...\n"), seen, flags):
        raise PageFailed(f"{block.place}: the page shows\n{wanted}\nand this is printed:\n{found}")


def _timeless(text: str) -> str:
    """Name each time alike, and leave out those that end the row of a check: a quick check has none (below 0.05 s)."""
    return TIME.sub("TIME", ROW_TIME.sub(r"\1", text))
