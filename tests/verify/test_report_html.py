"""The page: complete, self-contained, safe, and never with an empty part."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

from op_registry.spec import SourceLocation

from verify import Check, Finding, Report, Verdict
from verify.report_formats import FORMATS
from verify.report_formats.html.errors_plot import axis_of
from verify.report_formats.html.text import size
from verify.report_formats.html.timeline import lanes_of

VOID = {"meta", "br"}
NASTY = "<script>alert('x')</script> \"quoted\" & </style> \x00 \ud800 `<b>`"
EXACT = "TESTED (exact)"
BARS = [
    {"kind": "F", "stage": 0, "micro": 0, "start": 0, "end": 1},
    {"kind": "B", "stage": 0, "micro": 0, "start": 3, "end": 5},
]
ATTACHMENTS: dict[str, Any] = {
    "tensors": [
        {
            "kind": "gradients",
            "step": 0,
            "name": "right.weight",
            "error": 1e-15,
            "allowed": 1e-9,
            "verdict": "TESTED (exact)",
        },
        {"kind": "gradients", "step": 1, "name": "wrong.weight", "error": 0.5, "allowed": 1e-9, "verdict": "REFUTED"},
        {"kind": "gradients", "step": 0, "name": "nan.weight", "error": "nan", "allowed": 1e-9, "verdict": "REFUTED"},
        {"kind": "loss", "step": 0, "name": "loss", "error": 0.0, "allowed": 1e-9, "verdict": EXACT},
    ],
    "timeline": {"unit": "forward passes", "rows": [{"role": 0, "ranks": "0-3", "bars": BARS}]},
    "communication_profile": [{"axis": "tp", "collective": "all_reduce", "calls": 80, "bytes": 1_257_984}],
    "memory": [{"stage": 0, "ranks": "0-3", "parameters": 2000, "gradients": 1000, "activations": 500, "total": 3500}],
    "lemmas": [{"operator": "aten.linear", "verdict": "PROVED (all sizes)", "uses": 48}],
    "certificate": {"order": "188 actions"},
}
TITLES = {
    "tensors": "Error and tolerance",
    "timeline": "Schedule",
    "communication_profile": "Communication",
    "memory": "Memory per rank",
    "lemmas": "Lemmas (1)",
    "certificate": "Certificate",
}
FINDING = Finding(
    "gradient_differs",
    f"the gradient of `w` differs {NASTY}",
    SourceLocation("model.py", 31, f"    y = f(x)  # {NASTY}"),
    {"annotation": "m k, k n -> m n", "identifier": "k", "expected": f"1\n{NASTY}"},
    f"cause {NASTY}",
    f"help {NASTY}",
    f"nnscaler reproduce nns2:abc {NASTY}",
    (("generated program", SourceLocation("role_0.py", 7, NASTY)),),
)
WRONG = Report(
    "verify-plan",
    f"model.py {NASTY}",
    "on 8 ranks",
    3,
    (Check("loss", Verdict.TESTED_EXACT, 2, 0, 0.5), Check(f"gradients {NASTY}", Verdict.REFUTED, 9, 1, 0.5, NASTY)),
    (FINDING,),
    (f"note {NASTY}",),
    {"torch": f"2.13 {NASTY}"},
    2.0,
    ATTACHMENTS,
)
RIGHT = Report("verify-op", "my_op", "`a b -> a b`", 0, (Check("split `a`", Verdict.PROVED_ALL_SIZES, 5),))
EMPTY = Report("verify-op", "empty", "", 0, ())


class Page(HTMLParser):
    """Checks that tags close in order; collects tags, attributes and text."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def titles(self) -> list[str]:
        return re.findall(r"<h2>([^<]*)</h2>", self.rawdata)


def source(reports: Sequence[Report], seconds: float = 0.0) -> str:
    lines = "".join(line.text + "\n" for line in FORMATS["html"](reports, seconds))
    return lines.encode("utf-8").decode("utf-8")  # nothing that UTF-8 lacks is left


def titles(text: str) -> list[str]:
    return re.findall(r"<h2>([^<]*)</h2>", text)


SEQUENCES: dict[str, Sequence[Report]] = {
    "none": [],
    "wrong": [WRONG],
    "right": [RIGHT],
    "empty": [EMPTY],
    "several": [RIGHT, WRONG, EMPTY, WRONG],
}


@pytest.mark.parametrize("reports", SEQUENCES.values(), ids=SEQUENCES.keys())
def test_a_page_is_whole_and_needs_nothing(reports: Sequence[Report]) -> None:
    text = source(reports)
    page = Page(text)
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"script", "link", "img", "iframe", "object", "form"} and {"main", "style", "title"} <= tags
    assert not re.search(r"https?://|url\(|@import|javascript:", text)
    assert not any(name.startswith("on") or name == "src" for _, attributes in page.tags for name in attributes)
    assert all(str(a["href"]).startswith("#") for tag, a in page.tags if tag == "a")
    names = [a["id"] for _, a in page.tags if "id" in a]
    assert len(set(names)) == len(names) and {a["href"] for t, a in page.tags if t == "a"} == {f"#{n}" for n in names}
    assert "width=device-width" in text and "prefers-color-scheme: dark" in text and "@media print" in text


@pytest.mark.parametrize("reports", SEQUENCES.values(), ids=SEQUENCES.keys())
def test_the_banner_is_the_verdict(reports: Sequence[Report]) -> None:
    text = source(reports)
    verified = bool(reports) and all(report.exit_code == 0 for report in reports)
    word, style = re.findall(r'<div class="word">(\w+)</div>', text), re.findall(r'class="banner (\w+)"', text)
    assert (word == ["VERIFIED"]) is (style == ["good"]) is verified
    assert len(word) == len(style) == 1


def test_everything_of_a_report_is_on_the_page() -> None:
    page = Page(source([WRONG]))
    shown = "<script>alert('x')</script> \"quoted\" & </style> \\x00 \\ud800"
    wanted = ["gradient_differs", "model.py:31", "role_0.py:7", "nnscaler explain gradient_differs", "9", "on 8 ranks"]
    wanted += [
        f"cause {shown}",
        f"help {shown}",
        f"note {shown}",
        f"nns2:abc {shown}",
        "11 checks, 1 refuted, 2.0 s (seed 3)",
    ]
    assert not [text for text in wanted if text not in page.text]
    assert page.text.count(shown) >= 12
    assert re.search(r'm k, k n -&gt; m n\n<span class="caret">  \^  \^</span>', source([WRONG]))
    assert titles(source([WRONG])) == [
        "Findings (1)",
        "Checks (2)",
        "Error and tolerance",
        "Schedule",
        "Communication",
        "Memory per rank",
        "Lemmas (1)",
        "Certificate",
        "Notes",
        "Environment",
    ]


@pytest.mark.parametrize("missing", ATTACHMENTS)
@pytest.mark.parametrize("value", [None, [], {}, "?", [1], {"rows": []}, [{}]])
def test_a_part_without_data_is_left_out(missing: str, value: Any) -> None:
    given = {**ATTACHMENTS, missing: value}
    text = source([replace(WRONG, attachments=given)])
    Page(text)
    known = (missing == "certificate" and value) or (missing == "lemmas" and value == [{}])
    assert (TITLES[missing] in titles(text)) is bool(known)
    assert set(titles(text)) >= {title for name, title in TITLES.items() if name != missing}


def test_a_report_without_attachments_has_checks_alone() -> None:
    assert titles(source([RIGHT])) == ["Checks (1)", "Environment"]
    assert titles(source([EMPTY])) == ["Findings (1)", "Environment"]  # nothing_checked
    assert titles(source([])) == ["Nothing was verified", "Environment"]


def test_one_dot_for_each_tensor_and_the_worst_is_named() -> None:
    text = source([WRONG])
    circles = re.findall(r'<circle class="([\w ]+)" cx="([\d.]+)%" cy="\d+" r="[\d.]+"><title>([^<]*)</title>', text)
    assert len(circles) == len(ATTACHMENTS["tensors"]) == text.count("<circle")
    place = {title.split(",")[0]: (style, float(x)) for style, x, title in circles}
    (allowed,) = set(re.findall(r'<line class="allowed" x1="([\d.]+)%"', text))
    assert place["right.weight"][0] == "good" and place["right.weight"][1] < float(allowed) < place["wrong.weight"][1]
    assert place["wrong.weight"][0] == "bad" and place["nan.weight"] == ("bad worst", 98.0)
    assert place["loss"] == ("good worst", 2.0)
    assert re.search(r'<text class="tag"[^>]*>nan.weight</text>', text)


def test_the_axis_holds_every_ratio_and_what_is_allowed() -> None:
    axis = axis_of([1e-7, 3e4, 0.0, math.inf, math.nan])
    assert (axis.low, axis.high) == (-7, 5)
    places = [axis.place(ratio) for ratio in (0.0, 1e-7, 1e-3, 1.0, 3e4, math.inf)]
    assert places == sorted(places) and len(set(places)) == 6 and places[0] > 0 and places[-1] < 1
    assert axis_of([]).low < 0 < axis_of([]).high


def test_lanes_of_the_schedule() -> None:
    other = [{**BARS[0], "start": 1, "end": 2}]
    rows = [{"ranks": "0-1", "bars": BARS}, {"ranks": "2-3", "bars": other}, {"ranks": "4", "bars": BARS}]
    assert [lane.name for lane in lanes_of({"rows": rows})] == ["0-1, 4", "2-3"]
    text = source([replace(RIGHT, attachments={"timeline": {"unit": "ms", "rows": rows}})])
    boxes = re.findall(r'<rect x="([\d.]+)%" width="([\d.]+)%" height="24" fill="(hsl\([^)]*\))"><title>([^<]*)', text)
    assert [box[:2] for box in boxes] == [("0", "20"), ("60", "40"), ("20", "20")]
    assert boxes[0][2] == boxes[2][2] != boxes[1][2]
    assert boxes[1][3] == "B of micro-batch 0, stage 0: 3 to 5"
    assert "time in ms" in text and "Idle: 60%" in text


def test_volumes_and_memory() -> None:
    profile = [
        {"axis": "tp", "collective": "all_reduce", "calls": 3, "bytes": 3000},
        {"axis": "tp", "collective": "send", "calls": 1, "bytes": 1000},
        {"axis": "dp", "collective": "all_reduce", "calls": 2, "bytes": 2000},
    ]
    page = Page(source([replace(RIGHT, attachments={"communication_profile": profile})]))
    assert "6 calls and 6 kB in a step." in page.text
    assert "tp 4 kB, 4 calls" in page.text and "all_reduce 5 kB, 5 calls" in page.text
    counted = [{"axis": "tp", "collective": "all_reduce", "calls": 3, "elements": 1500.0}]
    assert "1.5 k elements" in Page(source([replace(RIGHT, attachments={"communication": counted})])).text
    rows = [{**ATTACHMENTS["memory"][0], "ranks": ranks} for ranks in ("0-3", "4-7")]
    text = source([replace(RIGHT, attachments={"memory": rows})])
    assert "0-3, 4-7" in text and "at most 3.5 kB" in text
    assert re.findall(r'<i style="width:([\d.]+)%;background[^"]*" title', text) == ["57.143", "28.571", "14.286"]


def test_sizes() -> None:
    assert [size(n) for n in (0, 7, 999, 1000, 1_257_984, 3.2e12)] == [
        "0 B",
        "7 B",
        "999 B",
        "1 kB",
        "1.26 MB",
        "3.2 TB",
    ]


def test_a_thousand_checks_and_128_ranks_stay_readable() -> None:
    checks = [Check(f"c{n}", Verdict.INCONCLUSIVE if n == 777 else Verdict.TESTED_EXACT, 1) for n in range(1000)]
    rows = [
        {"ranks": str(rank), "bars": [{**bar, "start": bar["start"] + rank, "end": bar["end"] + rank} for bar in BARS]}
        for rank in range(128)
    ]
    many = [{**ATTACHMENTS["tensors"][0], "name": f"w{n}"} for n in range(5000)]
    given = {"timeline": {"rows": rows}, "tensors": many}
    text = source([replace(RIGHT, checks=tuple(checks), attachments=given)])
    Page(text)
    assert text.index("c777") < text.index("c0<") and "940 more checks: 940 TESTED (exact)" in text
    assert all(f"<b>c{n}</b>" in text for n in range(1000))
    assert text.count('<div class="lane">') == 128 and 'height="11"' in text
    assert text.count("<circle") < 50 and "5000 compared" in text  # dots at one place are drawn once
    assert len(text) < 1_000_000


def test_many_findings_are_listed_and_a_line_they_share_stands_once() -> None:
    findings = tuple(replace(FINDING, message=f"finding {n}", reproduce="nnscaler reproduce nns2:x") for n in range(30))
    text = source([replace(WRONG, findings=findings)])
    assert text.count("nns2:x") == 1 and "26 more findings" in text
    assert all(f"finding {n}" in text for n in range(30))
    apart = (*findings[:1], replace(findings[1], reproduce="nnscaler reproduce nns2:y"))
    assert source([replace(WRONG, findings=apart)]).count("nns2:") == 2


def test_several_reports_worst_first() -> None:
    text = source([RIGHT, WRONG, EMPTY], 7.0)
    links = re.findall(r'<a href="#report-(\d)">', text)
    assert links == ["1", "2", "0"]
    assert re.findall(r'<details class="report"( open)?>', text) == [" open", " open", ""]
    assert "1 refuted, 1 inconclusive, 1 verified" in text and "7.0 s" in text
