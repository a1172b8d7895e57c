"""Pages of reports in a real browser: at three widths, in both themes, nothing stands out and all text is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import verify
from docs.pictures.draw import PICTURES, file_of
from docs.pictures.report import MICRO_BATCHES, PLAN, RANKS, batch, network, verify_broken
from nnscaler.compile import WantedPlan, make
from nnscaler.ir.operation_annotations import signatures
from nnscaler.performance.predict_step_time import replay
from nnscaler.performance.predicted_events import step_events
from nnscaler.planning.auto_plan_request import AutoPlan, cluster_of, cost_of, search_plan
from nnscaler.tracing import trace
from tests.browser.chromium import Chromium, find_chromium
from tests.browser.looks import HARD_TO_READ, TOO_WIDE
from tests.verify.test_report_html import SEQUENCES, source
from verify.report_formats.html.planner_result_page import plan_page
from verify.report_formats.html.timeline import events_page

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(find_chromium() is None, reason="needs Chromium, and finds none"),
]

WIDTHS = (400, 800, 1600)
MACHINE = AutoPlan("h100x8")
WRONG_PAGE = """<!DOCTYPE html><meta name="color-scheme" content="light dark"><body>
<p style="color:#999;background:#eee">grey</p><div style="width:1700px">wide</div>
<div style="overflow-x:auto"><div style="width:1800px">in a scroller</div></div>
<svg width="80" height="20"><rect width="80" height="20" fill="hsl(145 55% 40%)"/>
<text y="15" fill="#fff">7</text></svg>"""


def refuted(folder: Path) -> str:
    return source([verify_broken(folder)], 1.0)


def proved(_: Path) -> str:
    report = verify.verify_plan(
        network, batch(), ranks=RANKS, plan=PLAN, micro_batches=MICRO_BATCHES, backend="simulator"
    )
    assert report.exit_code == 0 and report.attachments.lemmas
    return source([report], 1.0)


def operator(_: Path) -> str:
    return source([verify.verify_op("aten.linear.default")])


def planned(_: Path) -> str:
    graph = trace(network(), batch()).graph
    known = signatures(graph)
    found = search_plan(graph, known, RANKS, MACHINE)
    replayed = replay(graph, known, found.plan, cost_of(MACHINE, cluster_of(MACHINE, RANKS)))
    return plan_page("network.py", found, replayed, {"Explanation": ["up: a line " + "that is long " * 20]})


def timed(_: Path) -> str:
    graph = trace(network(), batch()).graph
    made = make(graph, WantedPlan(RANKS, PLAN, micro_batches=MICRO_BATCHES))
    replayed = replay(graph, made.signatures, made.plan, cost_of(MACHINE, cluster_of(MACHINE, RANKS)))
    return events_page("network.py", PLAN, step_events(replayed.communicated, replayed.prediction))


MADE: dict[str, Callable[[Path], str]] = {
    "refuted": refuted,
    "proved": proved,
    "operator": operator,
    "planned": planned,
    "timed": timed,
    "nasty": lambda _: source(SEQUENCES["wrong"]),
    "several": lambda _: source(SEQUENCES["several"]),
    "none": lambda _: source(SEQUENCES["none"]),
}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    executable = find_chromium()
    assert executable is not None
    with Chromium(executable, tmp_path_factory.mktemp("chromium")) as found:
        yield found


@pytest.fixture(scope="module", params=MADE)
def page(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The name of a page, and the page."""
    return request.param, MADE[request.param](tmp_path_factory.mktemp("page"))


def look(browser: Chromium, text: str, width: int, dark: bool, picture: Path) -> None:
    browser.show(text, width, dark)
    picture.write_bytes(browser.screenshot())
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert browser.evaluate("innerWidth") == width
    assert browser.evaluate("matchMedia('(prefers-color-scheme: dark)').matches") is dark
    assert browser.evaluate(TOO_WIDE) == []
    read = browser.evaluate(HARD_TO_READ)
    assert read["found"] == [] and read["read"] > 4


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_a_page_fits_and_can_be_read(
    browser: Chromium, page: tuple[str, str], width: int, dark: bool, tmp_path: Path
) -> None:
    """With all that is folded opened: what is hidden has to fit as well."""
    name, text = page
    opened = text.replace("<details class", "<details open class")
    theme = "dark" if dark else "light"
    look(browser, text, width, dark, tmp_path / f"{name}_{width}_{theme}.png")
    look(browser, opened, width, dark, tmp_path / f"{name}_{width}_{theme}_opened.png")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_can_be_read(browser: Chromium, name: str, dark: bool, tmp_path: Path) -> None:
    text = file_of(name).read_text(encoding="utf-8")
    frame = '<!DOCTYPE html><meta name="color-scheme" content="light dark"><body style="margin:0">'
    look(browser, f"{frame}{text}", 1100, dark, tmp_path / f"{name}.png")


def test_what_is_wrong_is_found(browser: Chromium) -> None:
    """The checks themselves: each of these is on the page once, and what scrolls is no fault."""
    browser.show(WRONG_PAGE, 400, False)
    wide, hard = browser.evaluate(TOO_WIDE), browser.evaluate(HARD_TO_READ)
    assert [text.endswith("wide") for text in wide] == [True, True] and "1708 wide" in wide[0]
    assert [text.split(": ")[1].split(" ")[0] for text in hard["found"]] == ["grey", "7"]
    assert hard["read"] == 4
