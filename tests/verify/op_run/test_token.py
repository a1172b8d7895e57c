"""Tokens: there and back, replays, and what is refused."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnscaler.errors import NnscalerError
from nnscaler.ir.operation_placement import Choice, RunPartial, Split
from verify.evidence.split_case import Inputs, SplitCase
from verify.evidence.verify_op_options import KINDS, OpOptions
from verify.operators.run.replay import find_job, replay, token_of
from verify.operators.run.reproduce_token import Token, decode, encode
from verify.operators.run.targets import find_jobs
from verify.operators.run.verify_many import PoolSettings, run_many
from verify.results.report import environment
from verify.results.verdict import Verdict

OPTIONS = OpOptions(prove=False, timeout=60.0)
names = st.text(min_size=1, max_size=6)
sizes = st.lists(st.tuples(names, st.integers(1, 64)), max_size=4, unique_by=lambda pair: pair[0]).map(tuple)
indices = st.lists(st.integers(0, 9), max_size=3).map(tuple)
inputs = st.builds(
    Inputs,
    sample=st.none() | st.integers(0, 3),
    sizes=sizes,
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 2**40),
    dtype=st.sampled_from(["float64", "bfloat16"]),
    without_gradient=indices,
)
splits = st.builds(Split, names, st.integers(1, 4), indices)
choices = splits | st.builds(RunPartial, st.frozensets(st.integers(0, 5), min_size=1))


@st.composite
def cases(draw: st.DrawFn) -> SplitCase:
    chosen: list[Choice] = draw(st.lists(choices, min_size=1, max_size=2))
    parts = tuple(draw(st.integers(2, 8)) for _ in chosen)
    return SplitCase(draw(inputs), tuple(chosen), parts, draw(st.booleans()))


tokens = st.builds(
    Token,
    names,
    st.none() | st.text(),
    st.none() | names,
    names,
    st.integers(0, 2**40),
    st.none() | cases(),
    st.lists(names, max_size=2).map(tuple),
    st.just(environment()["nnscaler"]),
    names,
)


@given(tokens)
def test_there_and_back(token: Token) -> None:
    word = encode(token)
    assert word.startswith("nns1:") and not set(word) - set(WORD)
    assert decode(word) == token
    assert decode(f" {word[:20]}\n{word[20:]} ") == token  # as a terminal wraps it


WORD = "nns1:abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_"
TOKEN = Token(
    "f.py::f",
    None,
    None,
    "annotation_wrong",
    0,
    SplitCase(Inputs(None, (("a", 4),)), (Split("a"),), (2,)),
    (),
    environment()["nnscaler"],
    environment()["torch"],
)


def packed(document: object) -> str:
    return "nns1:" + base64.urlsafe_b64encode(zlib.compress(json.dumps(document).encode())).decode().rstrip("=")


def unpacked(word: str) -> dict[str, object]:
    body = word.removeprefix("nns1:")
    document: dict[str, object] = json.loads(zlib.decompress(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))))
    return document


def test_what_is_no_token() -> None:
    word = encode(TOKEN)
    document = unpacked(word)
    case = document["case"]
    assert isinstance(case, dict)
    damaged = [
        "",
        "nonsense",
        "nns1:",
        "nns1:????",
        word[:-6],
        word[:-6] + "AAAAAA",
        word.replace("nns1", "nns2"),
        packed([]),
        packed({}),
        packed({**document, "tool": "verify-plan"}),
        packed({**document, "annotation": 3}),
        packed({**document, "case": {**case, "parts": []}}),
        packed({**document, "case": {**case, "inputs": {"kind": "unheard of"}}}),
        packed({**document, "case": {**case, "inputs": {"kind": "integers", "unknown": 1}}}),
        packed({**document, "padding": " " * (1 << 17)}),
    ]
    for text in damaged:
        with pytest.raises(NnscalerError) as caught:
            decode(text)
        assert caught.value.code == "bad_token" and caught.value.help, text
    assert decode(packed(document)) == TOKEN


def test_a_token_of_another_version_is_refused() -> None:
    with pytest.raises(NnscalerError) as caught:
        decode(encode(replace(TOKEN, nnscaler="0.0.9")))
    assert "is of nnscaler 0.0.9" in str(caught.value) and "verify-op f.py::f" in str(caught.value)


OPERATORS = """
@nnscaler.register_op("a b -> a b", name="NAME_wrong")
def wrong(x: Tensor) -> Tensor:
    return x.softmax(-1)

@nnscaler.register_op("a b -> a b", name="NAME_dies")
def dies(x: Tensor) -> Tensor:
    if x.shape[0] == 4:
        import os
        os.abort()
    return x * 2

def plain(x, y):
    return (x * y).sum(1)

def inputs():
    return torch.ones(4, 6), torch.ones(4, 6)
"""


def first_token(target: str, **more: str) -> Token:
    (result,) = run_many(find_jobs([target], **more), OPTIONS, PoolSettings(workers=1))  # type: ignore[arg-type]
    token = token_of(result.report.findings[0])
    assert token is not None
    return token


def test_a_replay_runs_the_case_alone_and_finds_the_same(write: Callable[[str], str]) -> None:
    token = first_token(f"{write(OPERATORS)}::wrong")
    assert token.case is not None and token.code == "annotation_wrong"
    report = replay(decode(encode(token)), 60.0)
    assert report.verdict is Verdict.REFUTED and report.total < 5
    (finding,) = report.findings
    assert finding.code == "annotation_wrong" and finding.counter_example["identifier"] == "b"
    assert {"expected", "found"} <= set(finding.counter_example)


def test_it_passes_once_the_operator_is_right(write: Callable[[str], str]) -> None:
    file = write(OPERATORS)
    token = first_token(f"{file}::wrong")
    repaired = write(OPERATORS.replace("x.softmax(-1)", "x * 2"))
    report = replay(replace(token, address=f"{repaired}::wrong"), 60.0)
    assert report.verdict.passes and not report.findings and report.total > 0


def test_a_case_that_is_gone(write: Callable[[str], str]) -> None:
    token = first_token(f"{write(OPERATORS)}::wrong")
    for annotation in ("a b^ -> a b^", "m n -> m n"):
        changed = write(OPERATORS.replace('"a b -> a b", name="NAME_wrong"', f'"{annotation}", name="NAME_wrong"'))
        with pytest.raises(NnscalerError) as caught:
            replay(replace(token, address=f"{changed}::wrong"), 60.0)
        assert caught.value.code == "case_is_gone"
    with pytest.raises(NnscalerError) as caught:
        replay(replace(token, address="no_such_file.py::f"), 60.0)
    assert caught.value.code == "no_such_file"


def test_annotation_and_sample_inputs_travel_with_it(write: Callable[[str], str]) -> None:
    given = {"annotation": "a b+, a b+ -> a", "sample_inputs": "inputs"}
    file = write(OPERATORS.replace("(x * y).sum(1)", "(x * y).mean(1)"))
    token = first_token(f"{file}::plain", **given)
    assert (token.annotation, token.samples) == (given["annotation"], "inputs")
    assert find_job(token).spec.sample_inputs is not None
    assert replay(token, 60.0).verdict is Verdict.REFUTED


def test_a_death_replays_as_a_death(write: Callable[[str], str]) -> None:
    token = first_token(f"{write(OPERATORS)}::dies")
    assert token.case is None and token.code == "operator_died"
    report = replay(token, 60.0)
    assert report.verdict is Verdict.REFUTED and report.findings[0].code == "operator_died"


def test_an_annotation_outside_the_language(write: Callable[[str], str]) -> None:
    token = first_token(f"{write(OPERATORS)}::plain", annotation="a b, a b -> a")
    assert token.case is None
    assert replay(token, 60.0).verdict is Verdict.REFUTED
