"""`verify-plan --train`: right runs pass, wrong ones are told with their cause, and every way to ask for it is one."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import verify
from nnscaler.cli.main import main
from nnscaler.errors import NnscalerError
from nnscaler.layout import Sharded
from tests.sampling import only
from verify.programs.checks.assemble_logical_tensors import JoinedTensor, Layout, join
from verify.programs.request import WORDS, PlanRequest, make_token
from verify.programs.training.comparison import REPLICAS
from verify.programs.training.training_recipe import carried_by, drawn, in_steps, reordered, shortened
from verify.results.finding_codes import CODES
from verify.results.report import Report
from verify.self_test.training.mutants import ROWS
from verify.self_test.training.run import Small, complaint, judge, right_run, run_table, sample, table_lines

NAMED = (  # one of each kind of finding
    "reduce-scatter skipped",
    "clip before unscale",
    "neighbour's state",
    "owner lacks a parameter",
    "weight decay on no group",
    "stale gather",
    "scheduler off by one, behind",
)


def trained(plan: str, ranks: int, model: nn.Module | None = None, **options: Any) -> Report:
    torch.manual_seed(3)
    chosen = {"level": "run", "depth": "quick", "train": True, "train_steps": 3, **options}
    return verify.verify_plan(model or Small(), sample(), ranks=ranks, plan=plan, **chosen)


@pytest.mark.long
def test_dropout_norms_and_sizes_under_zero_pass() -> None:
    report = trained("dp=2,zero=1", 2, Small(0.25, True), train_steps=5)
    assert report.exit_code == 0, report.to_json()
    checks = {check.name: check for check in report.checks if check.name.startswith("training")}
    # five steps of 13 parameters and buffers; three tensors of state each; in the third step two batches
    assert checks["training: loss of each batch"].count == 6
    assert checks["training: optimizer state"].count == 3 * checks["training: parameters after each step"].count
    assert checks["training: runs on every rank"].detail == "compiled for 2 other sizes"
    assert checks["training: evaluation"].count == 1 + checks["training: buffers"].count
    assert checks[REPLICAS].count > 0
    assert "bytes on the fullest rank" in checks["training: owners of the optimizer state"].detail


class AsksForItsDtype(nn.Module):
    """`x.dtype` decides a number and a branch: in every step it answers as the trace saw it."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(6, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        assert self.proj.weight.dtype == torch.float32
        h = x / (x.norm(dim=-1, keepdim=True) + 1e4 * torch.finfo(x.dtype).eps)
        return nn.functional.cross_entropy(self.proj(h), y)


def test_numbers_that_follow_from_a_dtype_are_those_of_the_trace_in_every_step() -> None:
    batch = {"x": torch.randn(4, 6), "y": torch.tensor([0, 2, 1, 1])}
    chosen: Any = {"level": "run", "depth": "quick", "train": True, "train_steps": 2, "backend": "simulator"}
    report = verify.verify_plan(AsksForItsDtype(), batch, ranks=2, plan="dp=2", **chosen)
    assert report.exit_code == 0, report.to_json()


class TimeFirst(nn.Module):
    """Tokens have their batch in dim 1, and their mask in dim 0."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.proj = nn.Embedding(9, 4), nn.Linear(4, 9)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        losses = nn.functional.cross_entropy(
            self.proj(self.table(tokens)).flatten(0, 1), tokens.flatten(), reduction="none"
        )
        return (losses * mask.t().flatten()).mean()


def test_an_input_whose_batch_is_not_in_its_rows_is_trained_on() -> None:
    batch = {"tokens": torch.randint(0, 9, (8, 6)), "mask": torch.ones(6, 8)}
    chosen: Any = {"level": "run", "depth": "quick", "train": True, "backend": "simulator"}
    report = verify.verify_plan(TimeFirst(), batch, ranks=2, plan="dp=2", **chosen)
    assert report.exit_code == 0, report.to_json()


@pytest.mark.long
@pytest.mark.parametrize(("plan", "ranks", "optimizer"), [("dp=3,zero=2", 3, "sgd"), ("pp=2", 2, "torch.optim::NAdam")])
def test_other_optimizers_pass(plan: str, ranks: int, optimizer: str) -> None:
    report = trained(plan, ranks, optimizer=optimizer)
    assert report.exit_code == 0, report.to_json()


def test_an_optimizer_that_needs_whole_parameters_is_refused() -> None:
    with pytest.raises(NnscalerError) as caught:
        trained("dp=2,zero=1", 2, optimizer="torch.optim::Adafactor")
    assert caught.value.code == "update_needs_whole"
    for name, word in (("adam", "none of adamw, sgd"), ("torch.optim::lr_scheduler", "no optimizer")):
        with pytest.raises(NnscalerError, match=word):
            trained("dp=2", 2, optimizer=name)


@pytest.fixture(scope="module")
def zero() -> Any:
    with right_run("zero1", "adamw") as right:
        yield right


@pytest.mark.long
def test_a_right_run_has_no_complaint(zero: Any) -> None:
    assert complaint(zero) == ""


@pytest.mark.parametrize("bug", only((0, 2), NAMED))
def test_a_mutant_is_refuted_by_a_finding_that_names_it(zero: Any, bug: str) -> None:
    mutant = next(row for row in ROWS if row.bug == bug)
    refuted, said = judge(zero, replace(mutant, base="zero1"))
    assert refuted
    ranks = {"rank 1 alone"} if mutant.base != "zero1" else set()
    assert any(all(word in text for word in mutant.says if word not in ranks) for text in said), said


def test_findings_have_codes_of_training(zero: Any) -> None:
    wanted = {
        "scheduler off by one, behind": "learning_rate_differs",
        "bias correction counts batches": "optimizer_state_differs",
        "states kept whole on every rank": "optimizer_state_owner",
        "weight decay on no group": "parameter_differs",
    }
    for bug, code in wanted.items():
        mutant = next(row for row in ROWS if row.bug == bug)
        with mutant.fault():
            outcomes = zero.outcomes()
        codes = [finding.code for outcome in outcomes for finding in outcome.findings]
        assert codes[0] == code and len(set(codes)) <= 2, (bug, codes)


def test_evaluation_that_changes_buffers_is_told() -> None:
    table = run_table(lambda text: None, [row for row in ROWS if row.bug == "evaluation changes buffers"])
    assert table.good and any("evaluation_differs" in text or "evaluation" in text for text in table.rows[0].said)
    assert table_lines(table)[-1].text.startswith("PASSED  1 of 1")


def test_mixed_precision_is_looked_at_in_its_own_dtypes() -> None:
    rows = [row for row in ROWS if row.bug == "optimizer state in half in mixed precision"]
    table = run_table(lambda text: None, rows)  # the right run is judged, too
    assert table.good, table
    assert "training_dtype_differs" in CODES and not table.broken


def test_every_row_is_told_apart() -> None:
    assert len(ROWS) >= 60
    assert len({(row.base, row.bug) for row in ROWS}) == len(ROWS)
    assert all(row.says and all(row.says) for row in ROWS)


@pytest.mark.long
def test_the_whole_table() -> None:
    table = run_table(lambda text: None, processes=2)
    assert table.good, "\n".join(line.text for line in table_lines(table))


# -- batches ----------------------------------------------------------------------------------------------------------


def test_batches_are_like_the_sample() -> None:
    given = {
        "ids": torch.randint(3, 9, (6, 4)),
        "positions": torch.arange(4).expand(6, 4),
        "x": torch.randn(6, 4),
        "labels": torch.tensor([1, -100, 2, -100, 3, 1]),
        "table": torch.arange(5),
    }
    carried = carried_by(given)
    assert carried == {"ids", "positions", "x", "labels"}
    one, other = drawn(given, carried, 1), drawn(given, carried, 2)
    for name in carried - {"positions"}:
        assert not torch.equal(one[name], other[name])
        assert one[name].shape == given[name].shape
        assert given[name].min() <= one[name].min() and one[name].max() <= given[name].max()
    assert set(one["labels"].tolist()) <= {1, 2, 3, -100}
    assert one["positions"] is given["positions"] and one["table"] is given["table"]
    assert torch.equal(drawn(given, carried, 1)["x"], one["x"])
    rows = reordered(given, carried, 1)
    assert all(any(torch.equal(row, own) for own in given["x"]) for row in rows["x"])


def test_steps_and_short_batches() -> None:
    batches = [{"x": torch.full((6, 1), float(i))} for i in range(6)]
    assert [len(step) for step in in_steps(batches, 5)] == [1, 1, 2, 1, 1]
    assert [len(step) for step in in_steps(batches, 1)] == [2]
    short = shortened(batches[0], frozenset({"x"}))
    assert short is not None and short["x"].shape == (4, 1)
    assert shortened({"x": torch.zeros(1, 3)}, frozenset({"x"})) is None


# -- put together -----------------------------------------------------------------------------------------------------


def held(*shards: tuple[int, int, Tensor]) -> JoinedTensor:
    """Each shard: (index on dp, parts, local tensor) of a vector of five."""
    layouts = {}
    for rank, (index, parts, _) in enumerate(shards):
        states = {"dp": Sharded(0, sizes=(3, 2))} if parts > 1 else {}
        layouts[rank] = Layout(("w",), (5,), states, {"dp": parts}, {"dp": index})
    return join(layouts, {rank: tensor for rank, (_, _, tensor) in enumerate(shards)})


def test_shards_gaps_overlaps_and_copies() -> None:
    whole = torch.arange(5.0)
    right = held((0, 2, whole[:3]), (1, 2, whole[3:])).value
    assert right is not None and torch.equal(right, whole)
    assert "its shard is (3,)" in held((0, 2, whole[:2]), (1, 2, whole[2:])).problem
    assert "no rank has 3 of its 5" in held((1, 2, whole[3:])).problem
    overlap = held((0, 2, whole[:3]), (0, 1, whole))
    assert "others that none has" in overlap.problem
    copies = held((0, 1, whole), (0, 1, whole + 0.0), (0, 1, whole * (1 + 2.0**-23)))
    assert copies.copies == 2 and [(u.first, u.other) for u in copies.unequal] == [(0, 2)]
    assert held((0, 1, torch.tensor([0.0] * 5)), (0, 1, torch.tensor([-0.0] * 5))).unequal


def test_pieces_are_judged_beside_the_whole_tensor() -> None:
    right = torch.tensor([1e3, 1e3, 1e3, 2e-9, 1.0])
    near, wrong = torch.tensor([1e-9, 1.0]), torch.tensor([float("nan"), 1.0])
    assert held((0, 2, right[:3]), (1, 2, near)).apart(right, 0.0)[1].relative < 1e-11
    assert [gap.relative for gap in held((0, 2, right[:3]), (1, 2, wrong)).apart(right, 0.0).values()] == [0.0, inf]


# -- the ways to ask --------------------------------------------------------------------------------------------------

MODEL = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])

    def forward(self, x, labels):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return nn.functional.cross_entropy(x, labels)

def build_model():
    return Model()

def sample_inputs():
    return {"x": torch.randn(6, 6), "labels": torch.randint(0, 6, (6,))}

def train_batches():
    while True:
        yield {"x": torch.rand(6, 6), "labels": torch.randint(0, 6, (6,))}
"""


def test_the_command_trains_on_the_files_batches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "model.py"
    file.write_text(MODEL)
    command = ["verify-plan", str(file), "--plan", "dp=2", "--level", "run", "--quick", "--backend", "simulator"]
    assert main([*command, "--train", "--train-steps", "2"]) == 0
    told = capsys.readouterr()
    assert "training: optimizer state" in told.out and "2 steps of adamw, on the simulator" in told.err
    assert main([*command[:4], "--level", "static", "--train"]) == 2
    assert "--train runs the program" in capsys.readouterr().err


def test_a_token_says_how_it_was_trained(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text(MODEL)
    request = PlanRequest(
        model=str(file), ranks=2, plan="dp=2", backend="gloo", train=True, train_steps=3, optimizer="sgd",
        train_backend="simulator",
    )  # fmt: skip
    again = WORDS.request_of(make_token(request))
    assert (again.train, again.train_steps, again.optimizer, again.train_backend) == (True, 3, "sgd", "simulator")


@pytest.mark.long
def test_processes_train_alike(tmp_path: Path) -> None:
    report = trained("dp=2,zero=1", 2, backend="gloo")
    assert report.exit_code == 0, report.to_json()
