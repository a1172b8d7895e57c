"""A page of a verification: a small pipeline whose program lost a collective, as `--html` writes it.

The page stands in the picture as it is. What differs from machine to machine is left out of it: seconds, versions,
and the errors of single tensors, whose last digits a processor decides.
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import torch
from torch import Tensor, nn

import nnscaler
from docs.pictures.svg import Picture
from verify import Report
from verify.programs.loaded_model_and_plan import PlanSubject
from verify.programs.request import PlanRequest
from verify.programs.verify_request import verify_request
from verify.report_formats import FORMATS
from verify.report_formats.html.page_elements import escape

RANKS, PLAN, MICRO_BATCHES = 4, "tp=2,pp=2", 4
WIDTH, HEIGHT = 1000, 1010  # of the page that is shown
LOST = re.compile(r"comm\.replicate\((\w+), self\.tp\)")  # nothing in forward, an all_reduce in backward


class Block(nn.Module):
    """A residual feed-forward block."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Network(nn.Module):
    """Two blocks and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(12, 20) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return (x - y).square().mean()


class _Xml(HTMLParser):
    """HTML as the XML that a picture needs: attributes have values, and what is empty is closed."""

    @classmethod
    def of(cls, text: str) -> str:
        """Return a piece of a page as XML."""
        parser = cls(convert_charrefs=True)
        parser.pieces = []
        parser.feed(text)
        parser.close()
        return "".join(parser.pieces)

    pieces: list[str]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        held = "".join(f' {name}="{escape(name if value is None else value)}"' for name, value in attrs)
        self.pieces.append(f"<{tag}{held}{'/' if tag == 'br' else ''}>")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        self.pieces.append(f"</{tag}>")

    def handle_data(self, data: str) -> None:
        self.pieces.append(escape(data))


def network() -> Network:
    """Return the model, the same each time."""
    torch.manual_seed(0)
    return Network()


def batch() -> dict[str, Tensor]:
    """Return one global batch."""
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(8, 12, generator=generator) for name in ("x", "y")}


def draw(repository: Path) -> Picture:
    """Verify the broken program, and return the picture of its page; files have the names that a user would see."""
    with tempfile.TemporaryDirectory() as folder:
        page = "\n".join(line.text for line in FORMATS["html"]([report(Path(folder))], 0.0))
    for above in (folder, str(repository)):
        page = page.replace(f"{above}/", "")
    style, body = (re.search(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL) for tag in ("style", "body"))
    assert style is not None and body is not None
    inside = style[1].replace("body {", ".page {") + f".page {{ height:{HEIGHT}px; overflow:hidden }}"
    shown = f'<div xmlns="http://www.w3.org/1999/xhtml" class="page">{_Xml.of(body[1])}</div>'
    frame = f'<foreignObject width="{WIDTH}" height="{HEIGHT}">{shown}</foreignObject>'
    pieces = (f"<style><![CDATA[{inside}]]></style>", frame)
    return Picture(WIDTH, HEIGHT, "A report's page: the verdict, what is wrong, and where", pieces)


def report(folder: Path) -> Report:
    """Return the report without what differs from machine to machine. `folder`: for the program."""
    found = verify_broken(folder)
    checks = tuple(replace(check, seconds=0.0) for check in found.checks)
    attachments = replace(found.attachments, tensors=None)
    environment = {"executor": "simulator"}
    return replace(found, checks=checks, attachments=attachments, environment=environment, seconds=0.0)


def verify_broken(folder: Path) -> Report:
    """Compile the model into a folder, take one collective out of the program, and return what is said of it."""
    compiled = nnscaler.parallelize(network(), batch(), ranks=RANKS, plan=PLAN, micro_batches=MICRO_BATCHES)
    program = compiled.save(folder / "program")
    role = program / "role_0.py"
    text, lost = LOST.subn(r"\1", role.read_text(encoding="utf-8"), count=1)
    assert lost == 1
    role.write_text(text, encoding="utf-8")
    request = PlanRequest(ranks=RANKS, program=str(program), level="run", backend="simulator")
    return verify_request(request, PlanSubject(network, batch()))
