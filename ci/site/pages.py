"""Pages of the site that the product itself tells: commands from the parser, findings from the catalogue, public names.

Takes nothing, gives Markdown by the path of the page in the site. Nothing here repeats what the product says: a new
command, option, finding or public name has its page by itself. Needs no site generator: tests compare these texts with
the product.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from nnscaler.cli.main import build_parser, main
from verify.results.finding_codes import CODES, page

ROOT = Path(__file__).resolve().parents[2]
COMMANDS, FINDINGS, API = "reference/commands", "reference/findings", "reference/api"
PACKAGES = {
    "nnscaler": "Compile a model, run the program, train.",
    "verify": "Verify an operator, a plan, a program of others, from Python.",
    "op_registry": "Operators, their annotations, and what a split of one means.",
}
LINK = re.compile(r"(\]\()(?!https?:|#|mailto:)([^)#\s]+)")
WHOLE_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!https?:|#|mailto:)([^)#\s]+)(?:#[^)]*)?\)")


def make_pages() -> dict[str, str]:
    """Return all generated pages: path in the site -> Markdown."""
    return {**command_pages(), **finding_pages(), **api_pages(), "contributing.md": contributing_page()}


def command_pages() -> dict[str, str]:
    """Return a page per command, and one that lists them."""
    parser = build_parser()
    described = _subcommands(parser)
    index = [
        "# Commands",
        "",
        str(parser.description),
        "",
        "| command | what it does |",
        "|---|---|",
        *(f"| [`nnscaler {name}`]({name}.md) | {_cell(help)} |" for name, (_, help) in described.items()),
        "",
        *_fenced("text", str(parser.epilog)),
    ]
    pages = {f"{COMMANDS}/index.md": "\n".join(index) + "\n"}
    for name, (command, help) in described.items():
        pages[f"{COMMANDS}/{name}.md"] = "\n".join(_command(command, help)) + "\n"
    return pages


def finding_pages() -> dict[str, str]:
    """Return a page per finding code, as `nnscaler explain` has it, and one that lists them."""
    rows = [f"| [`{code}`]({code}.md) | {_cell(sentence)} |" for code, sentence in CODES.items()]
    index = [
        "# Finding codes",
        "",
        "What `nnscaler explain CODE` prints, a page each; [by command](../../findings.md), with what to do.",
        "",
        "| code | meaning |",
        "|---|---|",
        *rows,
    ]
    return {f"{FINDINGS}/index.md": "\n".join(index) + "\n", **{f"{FINDINGS}/{c}.md": page(c) for c in CODES}}


def api_pages() -> dict[str, str]:
    """Return a page per package with its public names, which mkdocstrings fills from their docstrings."""
    pages = {}
    for package, sentence in PACKAGES.items():
        names = sorted((n for n in importlib.import_module(package).__all__ if not n.startswith("_")), key=str.lower)
        lines = [f"# {package}", "", sentence]
        for name in names:
            lines += ["", f"::: {home_of(package, name)}"]
        pages[f"{API}/{package}.md"] = "\n".join(lines) + "\n"
    return pages


def home_of(package: str, name: str) -> str:
    """Return the full name of a public object where it is defined: the front doors import it on first use."""
    found = getattr(importlib.import_module(package), name)
    found = getattr(found, "__wrapped__", found)  # of functools.cache
    return f"{found.__module__}.{found.__qualname__}"


def contributing_page() -> str:
    """Return CONTRIBUTING.md, whose links into `docs/` lead to the site's pages."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return LINK.sub(lambda found: found[1] + found[2].removeprefix("docs/"), text)


def outside_links(text: str, source: str) -> str:
    """Return a page that names files which are not of the site (`../examples/gpt.py`) instead of linking to them."""

    def replaced(found: re.Match[str]) -> str:
        parts: list[str] = []
        for part in (PurePosixPath("docs", source).parent / found[2]).parts:
            parts = parts[:-1] if part == ".." else [*parts, part]
        path = "/".join(parts)
        if parts[:1] == ["docs"]:
            return found[0]
        return f"`{path}`" if found[1].strip("`").rstrip("/") in (path, parts[-1]) else f"{found[1]} (`{path}`)"

    return WHOLE_LINK.sub(replaced, text)


def link_codes(text: str, up: str) -> str:
    """Return a page whose codes in first columns of tables lead to their pages; `up` leads to the root of the site."""
    return re.sub(
        r"^\| `(\w+)` \|",
        lambda found: f"| [`{found[1]}`]({up}{FINDINGS}/{found[1]}.md) |" if found[1] in CODES else found[0],
        text,
        flags=re.MULTILINE,
    )


def _subcommands(parser: argparse.ArgumentParser) -> dict[str, tuple[argparse.ArgumentParser, str]]:
    """Return the commands below a parser by name, with their one line of help."""
    found = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            found |= {name: (command, helps.get(name, "")) for name, command in action.choices.items()}
    return found


def _command(command: argparse.ArgumentParser, help: str, level: int = 1) -> Iterator[str]:
    yield from ("#" * level + f" {command.prog}", "")
    if not command.add_help:  # its help is its own text, of more than a parser knows
        yield from _fenced("text", _printed_help(command))
    else:
        yield from (command.description or f"{help[:1].upper()}{help[1:]}.", "")
        yield from _fenced("text", " ".join(command.format_usage().removeprefix("usage: ").split()))
    for group in command._action_groups:
        actions = [a for a in group._group_actions if not isinstance(a, argparse._SubParsersAction)]
        if actions:
            yield from ("#" * (level + 1) + f" {str(group.title).capitalize()}", "")
            for action in actions:
                yield from _option(action, command)
    for name, (below, text) in _subcommands(command).items():
        yield from _command(below, text or name, level + 1)
    if command.epilog:
        yield from ("#" * (level + 1) + " Examples and exit codes", "", *_fenced("text", command.epilog))


def _option(action: argparse.Action, command: argparse.ArgumentParser) -> Iterator[str]:
    """A definition: how it is written, then what it does."""
    formatter = command._get_formatter()
    if action.option_strings:
        taken = "" if action.nargs == 0 else " " + formatter._format_args(action, str(action.dest).upper())
        words = [f"`{option}{taken}`" for option in action.option_strings]
    else:
        words = [f"`{formatter._format_args(action, str(action.dest))}`"]
    text = formatter._expand_help(action) if action.help else "see above"
    yield from (", ".join(words), f":   {_cell(text)}", "")


def _printed_help(command: argparse.ArgumentParser) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        main([*command.prog.split()[1:], "--help"])
    return out.getvalue()


def _fenced(language: str, text: str) -> list[str]:
    return [f"```{language}", text.strip("\n"), "```", ""]


def _cell(text: str) -> str:
    """Text that is no markup: `*`, `<` and `|` stand for themselves outside of code."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    return "".join(part if part.startswith("`") else re.sub(r"([*_<|\[\]])", r"\\\1", part) for part in parts)
