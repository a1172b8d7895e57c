"""Scripts that do not end as they should, and rows that are not as they should be."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from nnscaler.errors import NnscalerError
from tests.sampling import every, only
from tests.verify.external.torchrun.running import SCRIPTS, told, verified
from verify.external.request import words_of_script
from verify.external.torchrun.compare_with_one_rank import Judged
from verify.external.torchrun.find_ranks_with_same_rows import same_where_trained
from verify.external.torchrun.match_one_rank import Layout
from verify.external.torchrun.verify import verify_script
from verify.external.torchrun.watched_script_record import ScriptRecord
from verify.results.verdict import Verdict


def line_of(text: str) -> int:
    """Return the number of the line in `breaks.py` that has this text."""
    lines = (SCRIPTS / "breaks.py").read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def test_a_rank_that_leaves_a_collective_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verify.external.ranks.processes.rank_watchdog._STALL", 1.0)
    report = verified("breaks.py missing", 2)
    (finding,) = report.findings
    assert (report.verdict, finding.code) == (Verdict.REFUTED, "deadlock"), told(report)
    assert f"breaks.py:{line_of('dist.all_reduce(parameter.grad)')}" in finding.message
    assert "rank 0 finished" in finding.message


def test_collectives_in_another_order() -> None:
    report = verified("breaks.py order", 3)
    (finding,) = report.findings
    assert (report.verdict, finding.code) == (Verdict.REFUTED, "communication_mismatch"), told(report)
    assert f"breaks.py:{line_of('dist.all_reduce(torch.ones(1))')}" in finding.message
    assert "broadcast" in finding.message


@pytest.mark.parametrize(
    ("how", "code", "words"),
    only(
        (2,),
        [
            ("exit", "rank_raises", "sys.exit(1)"),
            ("crash", "rank_died", "killed by SIGSEGV"),
            ("raise", "rank_raises", "ValueError: rows are missing"),
        ],
    ),
)
def test_one_rank_fails(how: str, code: str, words: str) -> None:
    report = verified(f"breaks.py {how}", 2)
    (finding,) = report.findings
    assert (report.verdict, finding.code) == (Verdict.REFUTED, code), told(report)
    assert words in finding.message
    assert finding.counter_example["rank"] == "1"


def test_the_line_that_raises_is_told() -> None:
    where = verified("breaks.py raise", 2).findings[0].where
    assert where is not None
    assert where.line == line_of('ValueError("rows are missing")')


@pytest.mark.parametrize(("how", "words"), every(2, [("argparse", "sys.exit(2)"), ("everywhere", "on every rank")]))
def test_what_fails_on_one_rank_as_well_decides_nothing(how: str, words: str) -> None:
    report = verified(f"breaks.py {how}", 2)
    assert report.verdict is Verdict.INCONCLUSIVE, told(report)
    assert words in report.findings[0].message
    assert "on one rank as well" in report.findings[0].message


def test_no_step_is_no_pass() -> None:
    report = verified("breaks.py early", 2)
    assert report.verdict is Verdict.INCONCLUSIVE, told(report)
    assert report.findings[0].code == "nothing_checked"
    assert "derive an optimizer of its own from that class" in str(report.findings[0].help)


@pytest.mark.long
def test_ranks_that_make_other_numbers_of_steps_decide_nothing() -> None:
    report = verified("loops.py join", 2, steps=4)
    assert report.verdict is Verdict.INCONCLUSIVE, told(report)
    assert "watch no more than the fewest" in str(report.findings[0].help), told(report)


_STAGES = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
first = dist.get_rank() == 0
stage = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
x = torch.ones(2, 4)
if not first:
    dist.recv(x, 0)
made = stage(x)
if first:
    dist.send(made.detach(), 1)
made.sum().backward()
optimizer.step()
"""


def test_stages_that_always_send_are_no_program_for_one_rank(tmp_path: Path) -> None:
    script = tmp_path / "stages.py"
    script.write_text(_STAGES)
    report = verify_script([str(script)], ranks=2)
    (finding,) = report.findings
    assert (report.verdict, finding.code) == (Verdict.INCONCLUSIVE, "nothing_checked"), told(report)
    assert "it fails with ValueError: a message to or from rank 1, in a group of one rank" in finding.message
    assert "a stage that always sends" in str(finding.help)


def test_a_loop_without_end_is_ended() -> None:
    report = verified("breaks.py loop", 2, timeout=2.0)
    assert report.verdict is Verdict.INCONCLUSIVE, told(report)
    assert report.findings[0].code == "timed_out"


def test_parameters_that_cannot_be_matched_decide_nothing(tmp_path: Path) -> None:
    script = tmp_path / "experts.py"
    script.write_text(EXPERTS)
    report = verify_script([str(script)], ranks=2)
    assert report.verdict is Verdict.INCONCLUSIVE, told(report)
    assert "cannot be found in the parameters on one rank" in report.findings[0].message


EXPERTS = """
import torch, torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = nn.Linear(4, 4)  # each rank has an expert of its own
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.randn(3, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_copies_without_a_reduction_are_no_pass(tmp_path: Path) -> None:
    script = tmp_path / "copies.py"
    script.write_text(EXPERTS.replace("dist.get_rank()", "0"))
    report = verify_script([str(script)], ranks=2)
    assert report.verdict is Verdict.INCONCLUSIVE, told(report)
    (finding,) = report.findings
    assert finding.code == "not_compared"
    assert "an averaging all_reduce over data is missing" in finding.message


@pytest.mark.long
def test_random_numbers_in_the_forward_pass_decide_nothing(tmp_path: Path) -> None:
    script = tmp_path / "noisy.py"
    script.write_text(NOISY)
    report = verify_script([str(script)], ranks=2)
    assert report.verdict is Verdict.INCONCLUSIVE, told(report)
    assert "draws random numbers" in (report.findings[0].cause or "")


NOISY = """
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Noisy(nn.Linear):
    def forward(self, x):
        return super().forward(x + torch.randn_like(x))


dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(Noisy(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
for _ in range(3):
    model(torch.randn(3, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("words", [[], ["-m"], ["--nproc-per-node", "2"], ["torchrun", "train.py"]])
def test_words_that_name_no_script(words: list[str]) -> None:
    with pytest.raises(NnscalerError) as caught:
        words_of_script(shlex.join(words))
    assert caught.value.code == "usage"


def test_a_script_that_is_not_there() -> None:
    with pytest.raises(NnscalerError) as caught:
        words_of_script("nowhere.py")
    assert caught.value.code == "no_such_file"


def test_a_module_is_run_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "training"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "run.py").write_text((SCRIPTS / "by_hand.py").read_text())
    monkeypatch.chdir(tmp_path)
    report = verify_script(["-m", "training.run", "--loss", "mean"], ranks=2)
    assert report.verdict is Verdict.TESTED_EXACT, told(report)


ROOTED = """
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(16, 3) + torch.arange(16)[:, None])
model = nn.Linear(3, 1)
model.scale = nn.Parameter(torch.tensor([1.0, 1.0, 0.0]))  # the derivative of a root at zero is infinite
model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for (x,) in DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False)):
    optimizer.zero_grad()
    (model(x).square().mean() + model.module.scale.sqrt().sum()).backward()
    optimizer.step()
"""


def test_a_gradient_that_is_not_finite_on_one_rank_either_is_not_compared(tmp_path: Path) -> None:
    script = tmp_path / "rooted.py"
    script.write_text(ROOTED)
    report = verify_script([str(script)], ranks=2, steps=1)
    assert report.verdict is Verdict.INCONCLUSIVE, told(report)
    assert "the gradient of scale is not finite" in report.findings[0].message


# Rows that are the same.


def taken(rank: int, rows: list[Tensor], trained: tuple[int, ...]) -> ScriptRecord:
    """Return the record of a rank that took in these rows, and began backward passes with some of them."""
    events = {"input": tuple((one,) for one in rows)}
    numbers = frozenset(("input", number) for number in trained)
    return ScriptRecord(rank, (), {}, (), events, (), (), False, torch.float64, trained=numbers)


@pytest.mark.parametrize(("trained", "open_still"), [((1, 2), True), ((0, 1), False), ((), False)])
def test_rows_that_are_measured_do_not_make_others_of_those_that_are_trained_on(
    trained: tuple[int, ...], open_still: bool
) -> None:
    own, shared = [torch.rand(2, 3) for _ in range(2)], [torch.rand(2, 3) for _ in range(2)]
    records = [taken(rank, [own[rank], *shared], trained) for rank in range(2)]
    judged = Judged(cast(Any, object()), (), (), ())
    found = same_where_trained(judged, records, Layout((0, 1)))
    assert (found is not None) == open_still
    assert found is None or (found[1].code == "same_rows" and not found[0].verdict.passes)
