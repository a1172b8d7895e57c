"""The bugs that a run finds are found by reading as well, and the reader is told why."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nnscaler.transform.plan import Plan, ReplicateStep
from tests.broken import models, test_normed, test_random_numbers, test_resting, test_sharded, test_staged
from tests.broken.planting import Bug, Edit, Original, compile_original
from verify.results.finding_codes import CODES

BUGS = [
    *(("sharded", bug) for bug in (*test_sharded.FORWARD, *test_sharded.BACKWARD, *test_sharded.SUMS)),
    *(("looked_up", bug) for bug in test_sharded.LOOKED_UP),
    ("shuffled", test_sharded.SECTIONED),
    *(("staged", bug) for bug in test_staged.BUGS),
    *(("resting", bug) for bug in test_resting.BUGS),
    *(("normed", bug) for bug in test_normed.BUGS),
]


@pytest.mark.parametrize(("which", "bug"), BUGS, ids=[f"{which}: {bug.name}" for which, bug in BUGS])
def test_bug_is_read(which: str, bug: Bug, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    original: Original = request.getfixturevalue(which)
    assert original.read(original.folder).proved
    result = original.read(original.broken(tmp_path, bug.edits))
    assert not result.proved
    first = next(f for outcome in result.outcomes for f in outcome.findings)
    assert first.code in CODES
    assert first.cause or first.code in ("program_unreadable", "operation_differs", "not_covered"), first.message
    assert first.related[0][0] == "generated program"


PIECE = "((0, 5, 1), (0, 10, 1))"  # the first 5 rows: the first micro-batch has 5 of 12, and the second one 7
EXCHANGE = f'"linear@1", {{}}, ((0, 1, {PIECE}, {PIECE}),), ((1, 0, {PIECE}, {PIECE}),), ({{{{"micro": (5, 7)}}}}, 10))'
UNEVEN = '{"micro": Sharded(0, sizes=(5, 7))}'
OTHERWISE: list[tuple[str, str, tuple[Edit, ...]]] = [
    (
        "a variable whose name looks like that of what is dropped",
        "small_sharded",
        (
            Edit('"x": Input("x"', '"_": Input("x"'),
            Edit("def forward(self, x, y):", "def forward(self, _, y):\n        _ = aten.relu(_)"),
            Edit("aten.linear(x, ", "aten.linear(_, "),
        ),
    ),
    (
        "a default of a function that nobody calls",
        "small_sharded",
        (
            Edit(
                "        tanh =",
                "        def idle(a=aten.mul_.Tensor(linear, 2.0)):\n            return a\n\n        tanh =",
            ),
        ),
    ),
    (
        "a built-in operator from a file",
        "small_staged",
        (
            Edit("\n\n\nclass", '\n\nuser = user_operators(m=("nnscaler.mean_over", "other.py", "f"))\n\n\nclass', 1),
            Edit("ops.mean_over(", "user.m(", 1),
        ),
    ),
    ("a dim that is counted in another tensor", "alike", (Edit(", -1)", ", 0)"),)),
    (
        "pieces of the first micro-batch alone",
        "small_staged",
        (
            Edit('Send("linear@1", 1, peers=(1,))', f"Exchange({EXCHANGE.format(1)}"),
            Edit('Receive("linear@1", 0, (6, 10), "float32", peers=(0,))', f"Exchange({EXCHANGE.format(0)}", 1),
            Edit('{"micro": Sharded(0)}', UNEVEN),
            Edit('{"micro": Sharded(0)}', UNEVEN, 1),
        ),
    ),
]


class Alike(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.rand(7))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cosine_similarity(self.w, x, dim=-1).sum() + y.sum()


@pytest.fixture(scope="session")
def alike(tmp_path_factory: pytest.TempPathFactory) -> Original:
    """A vector that is compared with every row, whole on each of two ranks."""
    names = ("cosine_similarity", "sum_1", "sum_2", "add")
    plan = Plan((("tp", 2),), (ReplicateStep(names, "tp"),))
    return compile_original(tmp_path_factory.mktemp("alike"), Alike, models.points(), 2, plan)


@pytest.mark.parametrize(("which", "edits"), [case[1:] for case in OTHERWISE], ids=[case[0] for case in OTHERWISE])
def test_what_means_something_else_is_read(
    which: str, edits: tuple[Edit, ...], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    original: Original = request.getfixturevalue(which)
    assert original.read(original.folder).proved
    found = [f for outcome in original.read(original.broken(tmp_path, edits)).outcomes for f in outcome.findings]
    assert found and {f.code for f in found} <= {"program_unreadable", "operation_differs", "communication_mismatch"}


def test_a_rounded_message_is_read(staged: Original, tmp_path: Path) -> None:
    """The run in float64 has no casts: only the text can tell."""
    program = staged.broken(tmp_path, ())
    role = program / "role_0.py"
    rounded = r"\1low = aten.to.dtype(\3, dtypes.float16)\n\1low = aten.to.dtype(low, dtypes.float32)\n\1return {\2low"
    changed, times = re.subn(r'^( +)return \{("[^"]+": )(\w+)', rounded, role.read_text(encoding="utf-8"), flags=re.M)
    assert times == 1
    role.write_text(changed, encoding="utf-8")
    found = [f for outcome in staged.read(program).outcomes for f in outcome.findings]
    assert [f.code for f in found] == ["precision_lost"]
    assert "from float32 to float16, and the model does not" in found[0].message
    assert "only the text shows it" in str(found[0].cause)
    report = staged.verify(program)
    assert report.exit_code == 0  # by running alone
    assert staged.verify(program, level="all").exit_code == 1


def test_a_key_of_other_draws_is_read(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    folder = tmp_path_factory.mktemp("dropping")
    dropping, rows = test_random_numbers.dropping, test_random_numbers.rows()
    original = compile_original(folder, dropping, rows, 2, "dp=2")
    program = original.broken(tmp_path, [Edit("'dropout_1'", "'dropout_9'")])
    found = [f for outcome in original.read(program).outcomes for f in outcome.findings]
    assert [f.code for f in found] == ["random_numbers_differ"]
    assert "under the key 'dropout_9', and the model's operation is 'dropout_1'" in found[0].message
    assert "keyed by the operation's name" in str(found[0].cause)
