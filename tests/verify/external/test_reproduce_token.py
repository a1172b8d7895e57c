"""Tokens of verify-external: there and back, and what is refused."""

from __future__ import annotations

import argparse
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnscaler.cli.commands.verify_external import external_request
from nnscaler.cli.main import build_parser, main
from nnscaler.errors import NnscalerError
from verify.external.request import WORDS, ExternalRequest, make_token, script_file
from verify.results.report import environment, version_of
from verify.results.request_tokens import LONGEST, RequestToken, Source, pack, reproduce_line

encode, decode, request_of = WORDS.encode, WORDS.decode, WORDS.request_of
names = st.text(min_size=1, max_size=6)
options = st.dictionaries(names, names | st.integers() | st.booleans() | st.none() | st.lists(names), max_size=5)
tokens = st.builds(
    RequestToken,
    request=options,
    sources=st.lists(st.builds(Source, names, names), max_size=1).map(tuple),
    nnscaler=st.just(environment()["nnscaler"]),
    versions=st.dictionaries(names, names, max_size=2),
)
LINES = (
    ("check.py", "--ranks", "4"),
    ("check.py::other", "--mesh", "dp=2,tp=2", "--executor", "both", "--steps", "3", "--seed", "7", "--timeout", "9.5"),
    ("check.py", "--dtype", "float64", "bfloat16", "--checkpoint", "--level", "run"),
    ("hf:llama", "--tp", "2", "4", "--fsdp", "2", "--set", "attention_bias=true", "--set", "a=[1,2]", "--sweep-flags"),
    ("hf:local",),
    ("--torchrun", "train.py --lr '1e-3 ,' -v", "--ranks", "2"),
    ("--torchrun", "-m package.train", "--ranks", "2"),
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("check.py", "train.py"):
        Path(name).write_text("raise RuntimeError('it was run')\n", encoding="utf-8")
    Path("local").mkdir()
    Path("local/config.json").write_text("{}", encoding="utf-8")
    return tmp_path


def parsed(*words: str) -> argparse.Namespace:
    return build_parser().parse_args(["verify-external", *words])


def asked(*words: str) -> ExternalRequest:
    return external_request(parsed(*words))


@given(tokens)
def test_there_and_back(token: RequestToken) -> None:
    word = encode(token)
    assert word is not None and word.startswith("nns3:") and word.isascii() and not set(word) & set(" '\"=\n")
    assert decode(word) == token
    assert decode(word[:9] + "\n  " + word[9:]) == token


@given(tokens, st.data())
def test_a_damaged_token_is_refused(token: RequestToken, data: st.DataObject) -> None:
    word = encode(token)
    assert word is not None
    with pytest.raises(NnscalerError) as caught:
        decode(word[: data.draw(st.integers(0, len(word) - 1))])
    assert caught.value.code == "bad_token"


@pytest.mark.parametrize("document", [{}, {"tool": "verify-plan", "nnscaler": environment()["nnscaler"]}])
def test_a_word_of_something_else_is_refused(document: dict[str, Any]) -> None:
    with pytest.raises(NnscalerError, match="damaged"):
        decode(pack("nns3:", document))


@pytest.mark.parametrize("line", LINES, ids=" ".join)
def test_a_token_gives_the_request_that_it_was_made_of(folder: Path, line: tuple[str, ...]) -> None:
    request = asked(*line)
    word = encode(make_token(request))
    assert word is not None and request_of(decode(word)) == request


def test_a_token_holds_everything_that_decides_what_is_run(folder: Path) -> None:
    token = make_token(asked("check.py"))
    showing = {"command", "output_format", "quiet", "verbose", "color", "comm_profile", "emit_script"}
    assert set(token.request) == set(vars(parsed("check.py"))) - showing | {"emit_script"}
    assert {f.name for f in fields(ExternalRequest)} == set(vars(parsed("check.py"))) - showing | {"emit_script"}


def test_changes_are_told(folder: Path) -> None:
    for line, file in ((LINES[0], "check.py"), (LINES[5], "train.py"), (LINES[4], "local/config.json")):
        token = make_token(asked(*line))
        assert token.sources == (Source.of(file),) and not token.changes()
        Path(file).write_text("# changed\n", encoding="utf-8")
        assert token.changes() == [f"{file} was changed since the token was made"]
    assert set(make_token(asked("check.py")).versions) == {"torch"}
    token = make_token(asked("hf:llama"))
    assert (token.sources, token.versions["transformers"]) == ((), version_of("transformers"))
    assert replace(token, versions={"torch": "1.0", "transformers": "0.1"}).changes() == [
        f"found under torch 1.0, replayed under {environment()['torch']}",
        f"found under transformers 0.1, replayed under {version_of('transformers')}",
    ]


def test_the_file_of_a_script(folder: Path) -> None:
    assert script_file("train.py --lr 1") == Path("train.py")
    assert script_file("-m package.train other.py") is None


def test_a_token_that_is_too_long_is_the_command_itself(folder: Path) -> None:
    import random
    import string

    noise = "".join(random.Random(0).choices(string.printable, k=2 * LONGEST))
    request = replace(asked("hf:llama"), settings=(f"a={noise}",))
    word = encode(make_token(request))
    assert reproduce_line(word, ("nnscaler", "verify-external", "a b")) == "nnscaler verify-external 'a b'"


@pytest.mark.parametrize(
    ("line", "again"),
    [(LINES[1], "check.py ..."), (LINES[3], "hf:llama ..."), (LINES[6], "--torchrun '-m package.train' ...")],
)
def test_another_version_is_refused(
    folder: Path, line: tuple[str, ...], again: str, capsys: pytest.CaptureFixture[str]
) -> None:
    word = encode(replace(make_token(asked(*line)), nnscaler="0.0.1"))
    assert word is not None and main(["reproduce", word]) == 2
    err = capsys.readouterr().err
    assert "is of nnscaler 0.0.1" in err and f"verify again: nnscaler verify-external {again}" in err


def test_what_reproduce_refuses(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    token = make_token(asked("check.py"))
    word = encode(token)
    assert word is not None and main(["reproduce", word, "--emit-test", "x.py"]) == 2
    assert "this token is of a program" in capsys.readouterr().err
    other = encode(replace(token, request={**token.request, "sideways": True}))
    assert other is not None and main(["reproduce", other]) == 2
    assert "options that this nnscaler lacks: sideways" in capsys.readouterr().err
    Path("check.py").unlink()
    assert main(["reproduce", word]) == 2
    assert "cannot read check.py" in capsys.readouterr().err
