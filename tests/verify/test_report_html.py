"""The page: complete, self-contained, safe, and never with an empty part."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from typing import Any

import pytest

from op_registry.source_location import SourceLocation

from nnscaler.manifest import Bar, CommunicationProfile, CommunicationTotal, StageMemory, TimelineRow, TimelineRows
from nnscaler.performance.timeline_events import DeviceRanks, Event, StepEvents
from nnscaler.records_as_json import RecordError, decode, encode
from verify import Check, Finding, Report, Verdict
from verify.report_formats import FORMATS
from verify.report_formats.html.communication_lane import pictured
from verify.report_formats.html.errors_plot import axis_of
from verify.report_formats.html.page_elements import size
from verify.report_formats.html.timeline import lanes_of, timeline_panel
from verify.results.typed_attachments import Attachments, Certificate, ComparedTensor, LemmaRow

VOID = {"meta", "br"}
NASTY = "<script>alert('x')</script> \"quoted\" & </style> \x00 \ud800 `<b>`"
BARS = (Bar("F", 0, 0, 0, 1), Bar("B", 0, 0, 3, 5))
ATTACHMENTS = Attachments(
    tensors=(
        ComparedTensor("gradients", 0, "right.weight", 1e-15, 1e-9, Verdict.TESTED_EXACT),
        ComparedTensor("gradients", 1, "wrong.weight", 0.5, 1e-9, Verdict.REFUTED),
        ComparedTensor("gradients", 0, "nan.weight", math.nan, 1e-9, Verdict.REFUTED),
        ComparedTensor("loss", 0, "loss", 0.0, 1e-9, Verdict.TESTED_EXACT),
    ),
    timeline=TimelineRows("forward passes", (TimelineRow(0, "0-3", BARS),), 5, 0.4),
    communication_profile=CommunicationProfile(
        1, "bytes per step", (CommunicationTotal("tp", "all_reduce", "forward", 80, 1_257_984),), ()
    ),
    memory=(StageMemory(0, 0, "0-3", 2000, 1000, 500, 3500),),
    lemmas=(LemmaRow("`aten.linear` splits `k`", "aten.linear", Verdict.PROVED_ALL_SIZES, "", 48),),
    certificate=Certificate(True, "a1", {"role_0.py": "b2"}, 9, 3, (), None, None, ("188 actions",), (), {}),
)
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


@dataclass(frozen=True)
class Profiles:
    """The profiles of a step, as a manifest has them."""

    timeline: TimelineRows | None
    communication_profile: CommunicationProfile | None
    memory: tuple[StageMemory, ...]


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


EMPTY_OF: dict[str, Any] = {
    "tensors": (),
    "timeline": TimelineRows("ms", (TimelineRow(0, "0", ()),), 0, 0),
    "communication_profile": CommunicationProfile(1, "bytes per step", (), ()),
    "memory": (StageMemory(0, 0, "0", 0, 0, 0, 0),),
    "lemmas": (),
    "certificate": None,
}


@pytest.mark.parametrize("missing", TITLES)
@pytest.mark.parametrize("kind", ["none", "empty"])
def test_a_part_without_data_is_left_out(missing: str, kind: str) -> None:
    value = None if kind == "none" else EMPTY_OF[missing]
    text = source([replace(WRONG, attachments=replace(ATTACHMENTS, **{missing: value}))])
    Page(text)
    assert TITLES[missing] not in titles(text)
    assert set(titles(text)) >= {title for name, title in TITLES.items() if name != missing}


OTHER_FORMS = [[], {}, "?", [1], {"rows": []}, [{}]]
PROFILES = ["timeline", "communication_profile", "memory"]


def test_no_stage_needs_memory() -> None:
    assert decode(Profiles, {**encode(ATTACHMENTS), "memory": []}).memory == ()


@pytest.mark.parametrize(
    ("missing", "value"), [(m, v) for m in PROFILES for v in OTHER_FORMS if (m, v) != ("memory", [])]
)
def test_a_profile_of_another_form_is_no_manifest(missing: str, value: Any) -> None:
    """It is refused where it is read: no report has one."""
    data = {**encode(ATTACHMENTS), missing: value}
    with pytest.raises(RecordError, match=f"^{missing}[^ ]* (is|lacks) "):
        decode(Profiles, data)


def test_a_report_without_attachments_has_checks_alone() -> None:
    assert titles(source([RIGHT])) == ["Checks (1)", "Environment"]
    assert titles(source([EMPTY])) == ["Findings (1)", "Environment"]  # nothing_checked
    assert titles(source([])) == ["Nothing was verified", "Environment"]


def test_one_dot_for_each_tensor_and_the_worst_is_named() -> None:
    text = source([WRONG])
    circles = re.findall(r'<circle class="([\w ]+)" cx="([\d.]+)%" cy="\d+" r="[\d.]+"><title>([^<]*)</title>', text)
    assert len(circles) == len(ATTACHMENTS.tensors or ()) == text.count("<circle")
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
    other = (replace(BARS[0], start=1, end=2),)
    rows = (TimelineRow(0, "0-1", BARS), TimelineRow(1, "2-3", other), TimelineRow(2, "4", BARS))
    timeline = TimelineRows("ms", rows, 5, 0.6)
    assert [lane.name for lane in lanes_of(timeline)] == ["0-1, 4", "2-3"]
    text = source([replace(RIGHT, attachments=Attachments(timeline=timeline))])
    boxes = re.findall(r'<rect x="([\d.]+)%" width="([\d.]+)%" height="24" fill="(hsl\([^)]*\))"><title>([^<]*)', text)
    assert [box[:2] for box in boxes] == [("0", "20"), ("60", "40"), ("20", "20")]
    assert boxes[0][2] == boxes[2][2] != boxes[1][2]
    assert boxes[1][3] == "B of micro-batch 0, stage 0: 3 to 5"
    assert "time in ms" in text and "Idle: 60%" in text


def test_halves_of_backwards_have_colours_of_their_own() -> None:
    bars = tuple(Bar(kind, 0, 0, start, start + 1) for start, kind in enumerate("FBIW"))
    for shown, remark in (
        (bars[:2], "Forward passes are light, backward passes dark;"),
        (bars, "Forward passes are light, backward passes dark; of a backward in two halves, I is darkest and W pale;"),
        ((bars[0], *bars[2:]), "Forward passes are light; of a backward in two halves, I is darkest and W pale;"),
    ):
        timeline = TimelineRows("ms", (TimelineRow(0, "0", shown),), 4, 0.0)
        text = source([replace(RIGHT, attachments=Attachments(timeline=timeline))])
        boxes = re.findall(r'height="24" fill="(hsl\([^)]*\))"><title>(.) of', text)
        assert [kind for _, kind in boxes] == [bar.kind for bar in shown]
        assert len({color for color, _ in boxes}) == len(shown)
        legend = text.partition('<div class="legend">')[2].partition("stage 0")[0]
        assert all(f"background:{color}" in legend for color, _ in boxes) and legend.count("<i ") == len(shown)
        assert remark in Page(text).text


def test_volumes_and_memory() -> None:
    totals = (
        CommunicationTotal("tp", "all_reduce", "forward", 3, 3000),
        CommunicationTotal("tp", "send", "forward", 1, 1000),
        CommunicationTotal("dp", "all_reduce", "gradient", 2, 2000),
    )
    profile = CommunicationProfile(1, "bytes per step", totals, ())
    page = Page(source([replace(RIGHT, attachments=Attachments(communication_profile=profile))]))
    assert "6 calls and 6 kB in a step." in page.text
    assert "tp 4 kB, 4 calls" in page.text and "all_reduce 5 kB, 5 calls" in page.text
    rows = tuple(StageMemory(role, role, ranks, 2000, 1000, 500, 3500) for role, ranks in enumerate(("0-3", "4-7")))
    text = source([replace(RIGHT, attachments=Attachments(memory=rows))])
    assert "0-3, 4-7" in text and "at most 3.5 kB" in text
    assert re.findall(r'<i style="width:([\d.]+)%;background[^"]*" title', text) == ["57.143", "28.571", "14.286"]
    second = tuple(replace(row, stage=row.stage + 2) for row in rows)
    assert "at most 7 kB" in source([replace(RIGHT, attachments=Attachments(memory=(*rows, *second)))])


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
    rows = tuple(
        TimelineRow(rank, str(rank), tuple(replace(bar, start=bar.start + rank, end=bar.end + rank) for bar in BARS))
        for rank in range(128)
    )
    many = tuple(ComparedTensor("gradients", 0, f"w{n}", 1e-15, 1e-9, Verdict.TESTED_EXACT) for n in range(5000))
    given = Attachments(timeline=TimelineRows("units", rows, 132, 0.4), tensors=many)
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


def call(kind: str, start: float, end: float, instruction: str = "F0.0") -> Event:
    return Event(
        "communication", kind, 0, (0, 1), start, end, instruction, 0, ((0, 1),), 500,
        axis="tp", module="<mlp>", where="m.py:3",
    )  # fmt: skip


def stepped(*events: Event, seconds: float = 0.01) -> StepEvents:
    ran = Event("compute", "F", 0, (0, 1), 0.0, 0.008, "F0.0", 0)
    return StepEvents(1, "simulated", "seconds", seconds, (DeviceRanks(0, (0, 1), (0,)),), (ran, *events))


def test_calls_are_drawn_below_the_passes() -> None:
    picture = pictured(stepped(call("all_reduce", 0.002, 0.004), call("send", 0.008, 0.008)))
    assert picture.timeline.unit == "milliseconds" and picture.timeline.makespan == 10
    (marks,) = picture.marks.values()
    assert [(mark.kind, mark.start, mark.end) for mark in marks] == [("all_reduce", 2, 4), ("send", 8, 8)]
    text = timeline_panel(picture.timeline, picture.marks)
    boxes = re.findall(r'<rect class="call" x="([\d.]+)%"[^>]*width:max\(1px,([\d.]+)%\)[^>]*><title>([^<]*)', text)
    assert boxes == [
        ("25", "25", "all_reduce over tp in F0.0, 1 kB, &lt;mlp&gt; m.py:3, 2 to 4"),
        ("100", "0", "send over tp in F0.0, 500 B, &lt;mlp&gt; m.py:3, 8 to 8"),
    ]
    assert "<title>communication of ranks 0-1</title>" in text and "reduce_scatter" not in text
    colors = set(re.findall(r'class="call"[^>]*fill="(#[0-9a-f]{6})"', text))
    assert len(colors) == 2 and all(f"background:{color}" in text for color in colors)


def test_calls_that_are_closer_than_a_pixel_share_a_mark_and_others_do_not() -> None:
    near = [call("all_reduce", i * 2e-6, i * 2e-6 + 1e-6, f"F0.{i // 50}") for i in range(100)]
    (marks,) = pictured(stepped(*near, call("all_gather", 2e-4, 3e-4), call("all_reduce", 3e-4, 4e-4))).marks.values()
    assert [mark.kind for mark in marks] == ["all_reduce", "all_gather", "all_reduce"]
    assert marks[0].title.startswith("100 times all_reduce over tp in F0.0 and 1 more, 100 kB, <mlp> m.py:3, ")


def test_a_part_of_a_step_is_drawn_and_said_to_be_one() -> None:
    late = call("all_reduce", 0.009, 0.01, "gradient")
    picture = pictured(stepped(late), 0.0085)
    assert picture.marks == {0: ()} and picture.timeline.unit == "milliseconds: the first 8 of 10"
    assert 'class="call"' not in timeline_panel(picture.timeline, picture.marks)
    whole = pictured(stepped(late))
    assert whole.timeline.unit == "milliseconds"
    assert 'x="90%"' in timeline_panel(whole.timeline, whole.marks), "the axis ends with the last call"
