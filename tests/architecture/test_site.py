"""The site has a page for all that the product has: every command and option, every finding, every public name."""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from ci.site.docstrings_text import with_lists
from ci.site.pages import API, COMMANDS, FINDINGS, PACKAGES, link_codes, make_pages, outside_links
from nnscaler.cli.main import build_parser
from nnscaler.training.read_settings import all_options
from verify.results.finding_codes import CODES


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return make_pages()


def commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield command
                yield from commands(command)


def test_every_command_and_option_is_on_a_page(pages: dict[str, str]) -> None:
    options = 0
    for command in commands(build_parser()):
        page = pages[f"{COMMANDS}/{command.prog.split()[1]}.md"]
        assert re.search(rf"^#+ {re.escape(command.prog)}$", page, re.MULTILINE), command.prog
        for option in (option for action in command._actions for option in action.option_strings):
            assert re.search(rf"`{option}[ `]|{option}[, ]", page), f"{command.prog} {option}"
            options += 1
    assert options > 200, "else the parser is not read"
    train = pages[f"{COMMANDS}/train.md"]
    missing = [option.path for option in all_options() if f"--{option.path}" not in train]
    assert not missing


def test_every_finding_has_its_page(pages: dict[str, str]) -> None:
    index = pages[f"{FINDINGS}/index.md"]
    for code in CODES:
        assert pages[f"{FINDINGS}/{code}.md"].startswith(f"# {code}\n")
        assert f"[`{code}`]({code}.md)" in index
    assert len([path for path in pages if path.startswith(FINDINGS)]) == len(CODES) + 1


def test_every_public_name_is_on_a_page(pages: dict[str, str]) -> None:
    for package in PACKAGES:
        shown = re.findall(r"^::: \S+\.(\w+)$", pages[f"{API}/{package}.md"], re.MULTILINE)
        public = {name for name in importlib.import_module(package).__all__ if not name.startswith("_")}
        assert set(shown) == public and len(shown) == len(public)


def documented(package: str) -> Iterator[tuple[str, object]]:
    """Public names, and the public methods and properties of classes that are defined here."""
    module = importlib.import_module(package)
    for name in module.__all__:
        if name.startswith("_"):
            continue
        yield f"{package}.{name}", getattr(module, name)
        if inspect.isclass(getattr(module, name)):
            for member, value in vars(getattr(module, name)).items():
                callable_ = inspect.isfunction(value) or isinstance(value, property | classmethod | staticmethod)
                if callable_ and not member.startswith("_"):
                    yield f"{package}.{name}.{member}", value


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_has_a_docstring(package: str) -> None:
    names = list(documented(package))
    without = [name for name, value in names if not inspect.getdoc(value)]
    generated = [  # what dataclasses write of themselves: `Name(field: type, ...)`
        name
        for name, value in names
        if inspect.isclass(value) and (value.__doc__ or "").startswith(f"{value.__name__}(")
    ]
    assert not without and not generated and len(names) > 10


def test_tables_of_docstrings_become_lists() -> None:
    text = "What it is.\n\nfirst    a thing\nsecond   another, which\n         goes on\n\nProse that\ngoes on."
    lists = "* `first`: a thing\n* `second`: another, which\n  goes on"
    assert with_lists(text) == f"What it is.\n\n{lists}\n\nProse that\ngoes on."


def test_files_outside_of_the_pages_are_named_without_a_link() -> None:
    inside = "[b](train.md#x) [c](https://a.b/c) [d](reports/README.md)"
    found = outside_links(f"[a](../examples/gpt.py) [gpt.py](../examples/gpt.py) {inside}", "verify.md")
    assert found == f"a (`examples/gpt.py`) `examples/gpt.py` {inside}"
    assert outside_links("[a](../train.md)", "tutorials/a.md") == "[a](../train.md)"
    assert link_codes("| `loss_differs` | x |\n| `no_code` | y |", "../").count("](") == 1


def nav_pages(entry: object) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    for below in entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ():
        yield from nav_pages(below)


def test_every_page_is_in_the_navigation(files: list[Path], repository: Path, pages: dict[str, str]) -> None:
    named = list(nav_pages(yaml.safe_load((repository / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]))
    folders = tuple(name for name in named if name.endswith("/"))
    docs = {
        str(p.relative_to(repository / "docs")) for p in files if p.suffix == ".md" and repository / "docs" in p.parents
    }
    made = {path for path in pages if not path.startswith(folders)}
    assert sorted(named) == sorted([*folders, *docs, *made])
    assert all(any(path.startswith(folder) for path in pages) for folder in folders)


def test_the_workflow_of_the_site_keeps_to_its_schema(repository: Path) -> None:
    file = repository / "ci" / "site-workflow.yml"
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", str(file)]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    assert "run: mkdocs build --strict\n" in file.read_text(encoding="utf-8")


@pytest.mark.long
def test_the_site_builds_without_a_warning(repository: Path, tmp_path: Path) -> None:
    """Links and anchors included: `validation` of mkdocs.yml makes a warning of each that leads nowhere."""
    pytest.importorskip("mkdocs", reason="the site is built with the extra `docs`: nothing here was checked")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # the theme tells on every build how long it is looked after
    built = subprocess.run(command, cwd=repository, env=quiet, capture_output=True, text=True, check=False)
    assert built.returncode == 0 and "WARNING" not in built.stderr, built.stderr
    fetched = [p for p in tmp_path.rglob("*.html") if re.search(r'(?:src|@import)[=( ]"?https?:', p.read_text())]
    assert not fetched and (tmp_path / "search" / "search_index.js").is_file()


RAISED = re.compile(r'\b(?:NnscalerError|AnnotationError|annotation_error)\(\s*"(\w+)"')


def test_every_error_code_is_explained(repository: Path, python_files: list[Path]) -> None:
    product = [p for p in python_files if p.relative_to(repository).parts[0] in ("op_registry", "nnscaler", "verify")]
    raised = {code for path in product for code in RAISED.findall(path.read_text(encoding="utf-8"))}
    text = (repository / "docs" / "help" / "troubleshooting.md").read_text(encoding="utf-8")
    explained = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    assert len(raised) > 70 and not raised - explained
    words = "\n".join(path.read_text(encoding="utf-8") for path in product)
    assert not {code for code in explained if f'"{code}"' not in words}, "these are gone"
