"""Ranks as threads of the simulator and as processes over gloo give one verdict, with the same findings."""

from __future__ import annotations

import pytest

from tests.sampling import every
from verify.self_test.external.edits_that_make_mutants import ExternalMutant
from verify.self_test.external.run import ROWS, ask

RIGHT = ("tp=2 mlp", "tp=2 gpt sequence", "tp=2 gpt loss parallel", "fsdp=2 mlp clipped", "hsdp=2x2 mlp",
         "fsdp=2 tp=2 mlp", "ddp=2 gpt buckets", "ddp=2 zero adamw", "pp=2 gpt 1f1b", "cp=2 gpt exchanged",
         "hand tp=2 gpt words")  # fmt: skip
WRONG = (
    ("tp=2 llama sequence", "norm has no rule"),
    ("fsdp=2 mlp", "the root is not sharded"),
    ("fsdp=2 mlp", "gradients summed and not averaged"),
    ("ddp=2 mlp", "the hook reduces nothing"),
    ("by hand average each", "parameters are not sent at the start"),
    ("pp=2 gpt gpipe", "gradients not divided by the micro-batches"),
    ("hand tp=2 gpt", "the output of a layer is not summed"),
    ("by hand average each", "one rank sends where others sum"),
    ("by hand average from the first", "a rank does not take part"),
    ("pp=2 gpt tied", "the gradients of the ends are not summed"),
)
QUICK = {"fsdp=2 mlp clipped", "pp=2 gpt 1f1b", "the hook reduces nothing", "one rank sends where others sum"}
LONG = pytest.mark.long


def _row(base: str, bug: str) -> ExternalMutant:
    (row,) = [row for row in ROWS if (row.base, row.bug) == (base, bug)]
    return row


def _cases() -> list[object]:
    found = [(base, None) for base in RIGHT] + [(base, bug) for base, bug in WRONG]
    return [
        pytest.param(base, bug, id=f"{base}, {bug or 'right'}", marks=() if (bug or base) in QUICK else (LONG,))
        for base, bug in found
    ]


@pytest.mark.parametrize(("base", "bug"), every(2, _cases()))
def test_both_executors_say_the_same(base: str, bug: str | None) -> None:
    row = None if bug is None else _row(base, bug)
    one, other = ask(base, row, executor="simulator"), ask(base, row, executor="gloo")
    assert one.verdict is other.verdict, (one, other)
    assert one.verdict.passes is (row is None), one
    assert (one.codes, one.causes) == (other.codes, other.causes), (one, other)
