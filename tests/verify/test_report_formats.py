"""The formats for people, to the letter."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from op_registry.source_location import SourceLocation

from verify import Check, Finding, Report, Verdict
from verify.report_formats import FORMATS
from verify.report_formats.finding_text import caret_line, finding_lines

REPORT = Report(
    "verify-plan",
    "gpt.py",
    "on 8 ranks (dp=2 tp=2 pp=2, 1F1B, 4 micro-batches)",
    7,
    (
        Check("loss", Verdict.TESTED_EXACT, 8, 0, 0.01, "worst difference 2.0e-16"),
        Check("gradients", Verdict.REFUTED, 96, 3, 0.26),
    ),
    (
        Finding(
            "gradient_differs",
            "the gradient of `wte.weight` differs at step 0: 1.5 instead of 3",
            SourceLocation("/models/gpt.py", 31, "x = self.wte(ids)"),
            {"tensor": "wte.weight", "relative difference": "0.5"},
            "it is 1/2 of the model's, the size of dp: averaged where it should be summed",
            "sum it\nonce",
            "nnscaler verify-plan gpt.py --ranks 8",
            (("generated program", SourceLocation("/p/role_0.py", 12, "x = aten.embedding.default(w, ids)")),),
        ),
    ),
    ("dropout was switched off",),
    {"torch": "2.13.0"},
    12.43,
)
VERIFIED = Report(
    "verify-plan",
    "gpt.py",
    "on 8 ranks (dp=2 tp=2 pp=2, 1F1B, 4 micro-batches)",
    0,
    (Check("loss", Verdict.TESTED_EXACT, 214),),
    seconds=12.4,
)


def text(name: str, report: Report) -> list[str]:
    return [line.text for line in FORMATS[name]([report])]


def test_full() -> None:
    assert text("full", REPORT) == [
        "PASS  loss       TESTED (exact)  8 of 8 agree, worst difference 2.0e-16",
        "FAIL  gradients  REFUTED         93 of 96 agree  0.3 s",
        "note: dropout was switched off",
        "",
        "gradient_differs  the gradient of `wte.weight` differs at step 0: 1.5 instead of 3",
        "  --> /models/gpt.py:31",
        "     |",
        "  31 | x = self.wte(ids)",
        "     |",
        "  generated program: /p/role_0.py:12",
        "      x = aten.embedding.default(w, ids)",
        "  = counter-example: tensor=wte.weight, relative difference=0.5",
        "  = cause: it is 1/2 of the model's, the size of dp: averaged where it should be summed",
        "  help: sum it",
        "        once",
        "  reproduce: nnscaler verify-plan gpt.py --ranks 8",
        "",
        "REFUTED  gpt.py on 8 ranks (dp=2 tp=2 pp=2, 1F1B, 4 micro-batches): 104 checks, 3 refuted, 12.4 s (seed 7)",
    ]


def test_the_last_line_of_a_verified_plan() -> None:
    line = "VERIFIED  gpt.py on 8 ranks (dp=2 tp=2 pp=2, 1F1B, 4 micro-batches): 214 checks, 0 refuted, 12.4 s (seed 0)"
    assert text("full", VERIFIED)[-1] == line
    assert text("concise", VERIFIED) == [line]


def test_concise_is_one_line_per_finding() -> None:
    assert text("concise", REPORT)[0] == (
        "/models/gpt.py:31: gradient_differs the gradient of `wte.weight` differs at step 0: 1.5 instead of 3"
    )
    assert len(text("concise", REPORT)) == 2


def test_no_meaning_by_colour_alone() -> None:
    styles = {style for line in FORMATS["full"]([REPORT]) for _, style in line.pieces}
    assert {"good", "bad"} <= styles
    joined = "\n".join(text("full", REPORT))
    assert "PASS" in joined and "FAIL" in joined and "REFUTED" in joined


WRONG = Finding(
    "annotation_wrong",
    "output 0 of `my_op` is wrong when `k` is split, as `m k, k n -> m n` allows",
    SourceLocation("my_ops.py", 7, '@register_op("m k, k n -> m n")'),
    {
        "annotation": "m k, k n -> m n",
        "identifier": "k",
        "parts": "2",
        "expected": "Replicated",
        "found": "Partial(sum)",
    },
    "the outputs of the shards sum to the right answer",
    'this annotation holds (tested): "m k+, k+ n -> m n"',
)


def shown(finding: Finding) -> list[str]:
    return [line.text for line in finding_lines(finding)]


def test_carets_under_the_identifier_in_the_users_line() -> None:
    assert shown(WRONG) == [
        "annotation_wrong  output 0 of `my_op` is wrong when `k` is split, as `m k, k n -> m n` allows",
        "  --> my_ops.py:7",
        "    |",
        '  7 | @register_op("m k, k n -> m n")',
        "    |                 ^  ^",
        "  = expected: Replicated",
        "  = found:    Partial(sum)",
        "  = counter-example: identifier=k, parts=2",
        "  = cause: the outputs of the shards sum to the right answer",
        '  help: this annotation holds (tested): "m k+, k+ n -> m n"',
    ]


@pytest.mark.parametrize("where", [SourceLocation("my_ops.py", 7, "@register_op("), None])
def test_the_annotation_has_a_line_where_the_users_line_does_not_hold_it(where: SourceLocation | None) -> None:
    lines = shown(replace(WRONG, where=where))
    number = lines.index("  = annotation: m k, k n -> m n")
    assert lines[number + 1] == "                  ^  ^"
    assert not any("annotation=" in line for line in lines)


@pytest.mark.parametrize(
    ("annotation", "identifier", "carets"),
    [
        ("m k+, k+ n -> m n", "k", "  ^^  ^^"),
        ("b (h d)^ -> b h+max d", "h", "   ^          ^^^^^"),
        ("b (h dh), hd -> b", "d", None),
        ("b *^, * -> b", "*0", "  ^^  ^"),
        ("m k, k n -> m n", "m, n", "^      ^    ^ ^"),
        ("m k -> m", "", None),
    ],
)
def test_carets(annotation: str, identifier: str, carets: str | None) -> None:
    assert caret_line(annotation, identifier) == carets


def test_an_annotation_without_the_identifier_stays_a_fact() -> None:
    finding = replace(WRONG, where=None, counter_example={"annotation": "m -> m", "identifier": "k"})
    assert "  = counter-example: annotation=m -> m, identifier=k" in shown(finding)


def test_several_lines_in_a_finding_stay_aligned() -> None:
    finding = Finding("shard_raises", "it raises", None, {"error": "one\ntwo"}, "because\nof this")
    assert shown(finding)[1:] == [
        "  = counter-example:",
        "      error=one",
        "        two",
        "  = cause: because",
        "           of this",
    ]


def test_several_reports_take_a_line_each() -> None:
    wrong = Report(
        "verify-op",
        "my_op",
        "",
        0,
        (Check("split `m`", Verdict.PROVED_ALL_SIZES, 9), Check("split `k`", Verdict.REFUTED, 4, 1)),
        (WRONG,),
        ("a note",),
        {},
        0.2,
    )
    right = Report(
        "verify-op",
        "aten.gelu",
        "",
        0,
        (Check("split `*`", Verdict.PROVED_ALL_SIZES, 24, detail="x"),),
        (),
        ("a note",),
    )
    lines = [line.text for line in FORMATS["full"]([right, wrong], 3.0)]
    assert lines[:4] == [
        "PASS  aten.gelu  PROVED (all sizes)  24 of 24 agree",
        "FAIL  my_op      REFUTED             12 of 13 agree  0.2 s",
        "      FAIL  split `k`  REFUTED  3 of 4 agree",
        "note: a note (aten.gelu, my_op)",
    ]
    assert lines[5].startswith("annotation_wrong")
    assert lines[-2:] == [
        "1 PROVED (all sizes), 1 REFUTED",
        "REFUTED  2 operators (1 refuted, 1 verified): 37 checks, 1 refuted, 3.0 s (seed 0)",
    ]


def test_no_report_is_not_a_pass() -> None:
    for name in ("full", "concise"):
        assert FORMATS[name]([])[-1].text.startswith("INCONCLUSIVE  0 reports: 0 checks")


def test_a_check_without_comparisons_is_no_pass() -> None:
    report = replace(VERIFIED, checks=(*VERIFIED.checks, Check("buffers", Verdict.TESTED_EXACT, 0)))
    assert text("full", report)[1] == "----  buffers  TESTED (exact)  nothing compared"


def test_a_long_report_shows_what_does_not_pass() -> None:
    checks = [Check(f"c{number}", Verdict.PROVED_BOUNDED, 1) for number in range(500)]
    checks[250] = Check("c250", Verdict.INCONCLUSIVE, 0, detail="why")
    lines = text("full", replace(VERIFIED, checks=tuple(checks)))
    assert lines[:2] == [
        "OPEN  c250  INCONCLUSIVE  nothing compared, why",
        "PASS  499 more checks: 499 PROVED (bounded)",
    ]
    assert len(lines) < 10 and lines[-1].startswith("INCONCLUSIVE  ")


def test_what_does_not_pass_without_a_finding_is_named() -> None:
    report = replace(VERIFIED, checks=(Check("loss", Verdict.INCONCLUSIVE, 0, detail="no time"),))
    assert text("concise", report)[0] == "nothing_checked `gpt.py` was not verified: loss: INCONCLUSIVE, no time"


def test_a_line_that_reproduces_several_findings_is_shown_once_after_the_last_that_is_shown_whole() -> None:
    (finding,) = REPORT.findings
    own = replace(finding, code="operation_differs", reproduce="nnscaler reproduce nns1:own")
    for count in (2, 3, 9):
        lines = text("full", replace(REPORT, findings=(finding, own, *[finding] * (count - 1))))
        shown = [line for line in lines if "reproduce: " in line]
        assert shown == [
            "  reproduce: nnscaler reproduce nns1:own",
            "  reproduce: nnscaler verify-plan gpt.py --ranks 8",
        ]
    assert sum("reproduce: " in line for line in text("full", REPORT)) == 1
    machine = json.loads("\n".join(text("json", replace(REPORT, findings=(finding, finding)))))
    assert [entry["reproduce"] for entry in machine["findings"]] == [finding.reproduce] * 2  # each stands by itself
