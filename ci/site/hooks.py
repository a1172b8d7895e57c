"""What mkdocs calls while it builds the site: adds the generated pages, and takes away links that leave `docs/`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mkdocs.structure.files import File, Files

from ci.site.pages import FINDINGS, link_codes, make_pages, outside_links

_PAGES = make_pages()


def on_config(config: Any) -> Any:
    """Put the generated pages where `nav` names their folder: `Commands: reference/commands/`."""
    config.nav = [_filled(entry) for entry in config.nav]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages to those of `docs/`."""
    for path, text in _PAGES.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:  # noqa: ARG001 - mkdocs gives all
    """Name files outside of `docs/` without a link, and lead from codes in tables to their pages."""
    source = page.file.src_uri
    markdown = outside_links(markdown, source)
    return link_codes(markdown, "../" * source.count("/")) if not source.startswith(FINDINGS) else markdown


def _filled(entry: Any) -> Any:
    if isinstance(entry, dict):
        return {title: _filled(below) for title, below in entry.items()}
    if isinstance(entry, list):
        return [_filled(below) for below in entry]
    if isinstance(entry, str) and entry.endswith("/"):
        index = f"{entry}index.md"
        below = [path for path in _PAGES if path.startswith(entry) and path != index]
        return [*([index] if index in _PAGES else []), *below]
    return entry
