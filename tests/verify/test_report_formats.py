"""What people and machines read, to the letter."""

from __future__ import annotations

import json

from op_registry.spec import SourceLocation

from verify import Check, Finding, Report, Verdict
from verify.report_formats import FORMATS

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
            "it is 1/2 of the model's (the size of dp): averaged where it should be summed",
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
    return [line.text for line in FORMATS[name](report)]


def test_full() -> None:
    assert text("full", REPORT) == [
        "PASS  loss          8 of 8 agree, worst difference 2.0e-16",
        "FAIL  gradients    93 of 96 agree  0.3 s",
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
        "  = cause: it is 1/2 of the model's (the size of dp): averaged where it should be summed",
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


def test_json() -> None:
    document = json.loads("\n".join(text("json", REPORT)))
    assert document == json.loads(REPORT.to_json())
    assert document["schema_version"] == 1
    assert document["tool"] == "verify-plan"
    assert document["verdict"] == "REFUTED"
    assert document["seed"] == 7
    assert document["environment"] == {"torch": "2.13.0"}
    assert document["counts"] == {"checks": 104, "refuted": 3}
    assert document["checks"][1]["refuted"] == 3
    finding = document["findings"][0]
    assert finding["code"] == "gradient_differs"
    assert finding["where"] == {"file": "/models/gpt.py", "line": 31, "text": "x = self.wte(ids)"}
    assert finding["counter_example"]["tensor"] == "wte.weight"
    assert finding["related"][0]["line"] == 12


def test_no_meaning_by_colour_alone() -> None:
    styles = {style for line in FORMATS["full"](REPORT) for _, style in line.pieces}
    assert {"good", "bad"} <= styles
    joined = "\n".join(text("full", REPORT))
    assert "PASS" in joined and "FAIL" in joined and "REFUTED" in joined
