"""Tokens of verify-plan: there and back, replays, and what is refused."""

from __future__ import annotations

import argparse
import json
import random
import string
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnscaler.cli.commands.verify_plan import plan_request
from nnscaler.cli.main import build_parser, main
from nnscaler.errors import NnscalerError
from nnscaler.plan_source import SEARCH
from nnscaler.transform.plan import Plan
from verify.programs.request import WORDS, PlanRequest, make_token
from verify.results.report import environment
from verify.results.request_tokens import LONGEST, Damaged, RequestToken, Source, pack, unpack

MODEL = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(6, 4)

    def forward(self, x, labels):
        return torch.nn.functional.cross_entropy(self.layer(x), labels)

def build_small():
    return Model()

def sample_inputs():
    return {"x": torch.randn(12, 6), "labels": torch.randint(0, 4, (12,))}
"""
encode, decode, request_of = WORDS.encode, WORDS.decode, WORDS.request_of
names = st.text(min_size=1, max_size=6)
options = st.dictionaries(names, names | st.integers() | st.booleans() | st.none() | st.lists(names), max_size=5)
tokens = st.builds(
    RequestToken,
    request=options.map(lambda found: {**found, "model": "small.py", "ranks": 4}),
    sources=st.lists(st.builds(Source, names, names), max_size=3).map(tuple),
    nnscaler=st.just(environment()["nnscaler"]),
    versions=st.dictionaries(names, names, max_size=2),
)


@given(tokens)
def test_there_and_back(token: RequestToken) -> None:
    word = encode(token)
    assert word is not None and word.startswith("nns2:") and word.isascii() and not set(word) & set(" '\"=\n")
    assert decode(word) == token
    assert decode(word[:9] + "\n  " + word[9:]) == token  # as a terminal wraps it


@given(tokens, st.data())
def test_a_damaged_token_is_refused(token: RequestToken, data: st.DataObject) -> None:
    word = encode(token)
    assert word is not None
    cut = data.draw(st.integers(0, len(word) - 1))
    with pytest.raises(NnscalerError) as caught:
        decode(word[:cut])
    assert caught.value.code == "bad_token"


@pytest.mark.parametrize(
    "document", [{}, {"nnscaler": "0"}, {"tool": "verify-op", "nnscaler": environment()["nnscaler"]}]
)
def test_a_word_of_something_else_is_refused(document: dict[str, Any]) -> None:
    with pytest.raises(NnscalerError, match="damaged"):
        decode(pack("nns2:", document))


def test_a_word_that_unpacks_to_too_much_is_refused() -> None:
    word = pack("nns2:", {"a": "x" * 10_000})
    assert unpack("nns2:", word, 20_000)["a"]
    with pytest.raises(Damaged):
        unpack("nns2:", word, 5_000)
    with pytest.raises(Damaged):
        unpack("nns2:", pack("nns2:", [1]), 100)  # type: ignore[arg-type]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.py").write_text(MODEL)
    return tmp_path / "small.py"


def parsed(*arguments: str) -> argparse.Namespace:
    return build_parser().parse_args(["verify-plan", "small.py::build_small", *arguments])


def asked(*arguments: str) -> PlanRequest:
    """Return the request of a command line, on two ranks of the simulator."""
    return replace(plan_request(parsed(*arguments)), ranks=2, backend="simulator")


def test_a_token_holds_everything_that_decides_what_is_run(model: Path) -> None:
    line = ("--plan", "dp=2", "--seed", "7", "--replicate", "a*", "--html", "r.html", "-q", "--steps", "3")
    token = make_token(asked(*line))
    found = token.request
    assert (found["model"], found["plan"]) == ("small.py::build_small", "dp=2")
    assert found["seed"] == 7 and found["ranks"] == 2 and found["backend"] == "simulator"
    assert found["steps"] == 3 and found["replicate"] == ["a*"]
    showing = {"command", "output_format", "quiet", "verbose", "color", "comm_profile", "certificate", "no_cache"}
    assert set(found) == set(vars(parsed(*line))) - showing - {"quick", "deep"} | {"depth", "plan_document"}
    assert not token.changes()
    model.write_text(MODEL + "# changed\n")
    assert token.changes() == ["small.py was changed since the token was made"]
    assert "replayed under" in replace(token, versions={"torch": "1.0"}).changes()[1]


LINES = (
    ("--plan", "dp=2"),
    ("--plan", "tp=2", "--seed", "7", "--replicate", "a*", "--replicate", "b", "--steps", "3", "--quick"),
    ("--deep", "--dtype", "bfloat16", "--timeout", "12.5", "--specialise", "--loss-fn", "small.py::f"),
    ("--program", "program", "--own-weights", "--level", "static"),
    ("--plan", "pp=2", "--schedule", "policy.py::f"),
    ("--plan", "pp=2", "--schedule", "orders.csv"),
    ("--plan", "policy.py::f", "--schedule", "gpipe", "--micro-batches", "4", "--level", "run"),
)


@pytest.mark.parametrize("line", LINES, ids=" ".join)
def test_a_token_gives_the_request_that_it_was_made_of(model: Path, tmp_path: Path, line: tuple[str, ...]) -> None:
    (tmp_path / "policy.py").write_text("def f(graph, ranks): ...")
    (tmp_path / "orders.csv").write_text("0F0,0B0")
    (tmp_path / "program").mkdir()
    word = encode(make_token(asked(*line)))
    assert word is not None and request_of(decode(word)) == asked(*line)


def test_a_request_is_plain_values(model: Path) -> None:
    for line in LINES:
        document = json.loads(json.dumps(asdict(asked(*line))))
        assert PlanRequest(**{**document, "replicate": tuple(document["replicate"])}) == asked(*line)


def test_a_token_of_an_older_release_means_the_same(model: Path) -> None:
    """It may lack options that came later, which are then as they were."""
    older = {"model": "small.py::build_small", "ranks": 2, "replicate": ["a"], "backend": "gloo", "depth": "deep"}
    assert request_of(replace(make_token(asked()), request=older)) == PlanRequest(
        model="small.py::build_small", ranks=2, replicate=("a",), backend="gloo", depth="deep"
    )


def test_plans_and_programs_in_a_token(model: Path, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"mesh": [["dp", 2]]}')
    token = make_token(asked("--plan", "plan.json"))
    assert token.request["plan"] is None and token.request["plan_document"] == '{"mesh": [["dp", 2]]}'
    (tmp_path / "policy.py").write_text("def f(graph, ranks): ...")
    token = make_token(asked("--plan", "policy.py::f"))
    assert token.request["plan"] == "policy.py::f" and token.sources[1] == Source.of("policy.py")
    (tmp_path / "program").mkdir()
    (tmp_path / "program" / "role_0.py").write_text("a")
    token = make_token(asked("--program", "program"))
    assert token.request["program"] == token.sources[1].path == "program"
    (tmp_path / "program" / "role_0.py").write_text("b")
    assert token.changes() == ["program was changed since the token was made"]


def test_the_file_of_a_schedule_is_in_a_token(model: Path, tmp_path: Path) -> None:
    (tmp_path / "orders.csv").write_text("0F0,0B0")
    token = make_token(asked("--plan", "pp=2", "--schedule", "orders.csv"))
    assert token.sources[1] == Source.of("orders.csv") and not token.changes()
    (tmp_path / "orders.csv").write_text("0F0,,0B0")
    assert token.changes() == ["orders.csv was changed since the token was made"]
    assert make_token(asked("--plan", "pp=2", "--schedule", "gpipe")).sources == token.sources[:1]


def test_a_plan_that_is_too_long_for_a_command_line(model: Path) -> None:
    token = make_token(asked("--plan", "dp=2"))
    noise = "".join(random.Random(0).choices(string.printable, k=2 * LONGEST))
    assert encode(replace(token, request={**token.request, "plan_document": noise})) is None


def test_another_version_is_refused(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    word = encode(replace(make_token(asked("--plan", "dp=2")), nnscaler="0.0.1"))
    assert word is not None and main(["reproduce", word]) == 2
    err = capsys.readouterr().err
    assert "is of nnscaler 0.0.1" in err and "verify again: nnscaler verify-plan small.py --ranks 2" in err


def test_a_token_is_of_no_use_elsewhere(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    word = encode(make_token(asked("--plan", "dp=2")))
    assert word is not None
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert main(["reproduce", word]) == 2
    assert "cannot read small.py" in capsys.readouterr().err
    assert main(["reproduce", word, "--emit-test", "x.py"]) == 2
    assert "this token is of a plan" in capsys.readouterr().err


def test_an_option_of_another_release_is_refused(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    token = make_token(asked("--plan", "dp=2"))
    word = encode(replace(token, request={**token.request, "sideways": True}))
    assert word is not None and main(["reproduce", word]) == 2
    assert "options that this nnscaler lacks: sideways" in capsys.readouterr().err


def test_a_finding_is_found_again_and_a_correction_is_seen(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The program was edited, and is then put right."""
    compiled = ["compile", "small.py::build_small", "--ranks", "2", "--plan", "dp=2", "--out", "program", "-q"]
    assert main(compiled) == 0
    role = tmp_path / "program" / "role_0.py"
    right = role.read_text()
    role.write_text(right.replace('reduce=("dp",)', "reduce=()"))
    run = ["verify-plan", "small.py::build_small", "--program", "program", "--backend", "simulator", "--steps", "1"]
    capsys.readouterr()
    assert main([*run, "--quick", "-q", "--output-format", "json"]) == 1
    first = json.loads(capsys.readouterr().out)
    lines = {finding["reproduce"] for finding in first["findings"]}
    (words,) = [line.split() for line in lines]
    assert words[:2] == ["nnscaler", "reproduce"] and decode(words[2]).request["steps"] == 1
    assert main([*words[1:], "-q", "--output-format", "json"]) == 1
    again = json.loads(capsys.readouterr().out)
    for document in (first, again):
        assert "gradient_differs" in {finding["code"] for finding in document["findings"]}
    strip = [[(f["code"], f["message"], f["reproduce"]) for f in document["findings"]] for document in (first, again)]
    assert strip[0] == strip[1] and first["counts"] == again["counts"] and first["setting"] == again["setting"]
    role.write_text(right)
    assert main([*words[1:], "-q"]) == 0
    captured = capsys.readouterr()
    assert "warning: program was changed since the token was made" in captured.err
    assert captured.out.splitlines()[-1].startswith("VERIFIED  small.py on 2 ranks")


def test_a_plan_that_was_searched_is_in_the_token(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another machine, or edited constraints, might give another one."""
    request = asked("--cluster", "nowhere.toml", "--quick", "--steps", "1")
    token = make_token(request.with_plan(Plan((("dp", 2),)).to_json()))
    assert not any(token.request[name] for name in ("plan", *SEARCH))
    word = encode(token)
    assert word is not None and main(["reproduce", word, "-q"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("VERIFIED  small.py on 2 ranks (dp=2)")


def test_a_plan_file_is_replayed_without_the_file(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", "small.py::build_small", "--ranks", "2", "--plan", "dp=2", "--out", "program", "-q"]) == 0
    token = make_token(asked("--plan", "program/plan.json", "--quick", "--steps", "1"))
    Path("program/plan.json").unlink()
    word = encode(token)
    assert word is not None and main(["reproduce", word, "-q"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("VERIFIED  small.py on 2 ranks (dp=2)")
