"""Scripts whose data parts count as many labels by chance, which hides a mean of the parts' means."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.verify.external.torchrun.running import told, verified
from verify.external.torchrun.verify import verify_script
from verify.external.unequal_label_counts import NAME
from verify.results.verdict import Verdict

_NOTE = "every data part counts as many labels in these batches"


@pytest.mark.parametrize(
    "command",
    [
        "padded.py own",
        pytest.param("padded.py own --inverse", marks=pytest.mark.long),
        pytest.param("padded.py mean --drawn", marks=pytest.mark.long),
        pytest.param("padded.py mean --pad 0", marks=pytest.mark.long),
    ],
)
def test_a_mean_of_means_is_left_open(command: str) -> None:
    report = verified(command, 2)
    assert report.verdict is Verdict.INCONCLUSIVE, told(report)
    assert [check.name for check in report.checks if not check.verdict.passes] == [NAME], told(report)
    (finding,) = report.findings
    assert finding.message.startswith("with unequal numbers of labels in the data parts, the ranks agree with the mean")
    assert "--reference parts" in str(finding.help)
    assert verified(command, 2, reference="parts").verdict.passes


@pytest.mark.parametrize(
    "command",
    ["padded.py ranks --inverse", pytest.param("padded.py ranks --pad 0", marks=pytest.mark.long)],
)
def test_labels_of_all_ranks_are_right(command: str) -> None:
    report = verified(command, 2)
    assert report.verdict is Verdict.TESTED_EXACT, told(report)
    assert next(check for check in report.checks if check.name == NAME).count > 0, told(report)
    assert not any(note.startswith(_NOTE) for note in report.notes), told(report)


@pytest.mark.long
def test_what_other_numbers_of_labels_do_not_show_is_told() -> None:
    """The script counts its labels before they come in where they can be made others."""
    report = verified("padded.py own --drawn", 2)
    assert report.verdict is Verdict.TESTED_EXACT, told(report)
    assert any(note.startswith(_NOTE) for note in report.notes), told(report)


@pytest.mark.long
@pytest.mark.parametrize(
    ("divisor", "verdict"),
    [("ranks", Verdict.TESTED_EXACT), ("own", Verdict.INCONCLUSIVE)],
)
def test_rows_that_every_rank_pads_to_its_longest(divisor: str, verdict: Verdict) -> None:
    """One rank pads them to the longest of all."""
    report = verified(f"padded.py {divisor} --lengths", 2)
    assert report.verdict is verdict, told(report)
    assert any(
        note.startswith("the reference is the script on one rank, with its own data") for note in report.notes
    ) is (divisor == "ranks")


@pytest.mark.parametrize(
    ("scale", "verdict", "cause"),
    [
        ("world", Verdict.INCONCLUSIVE, "whether the loss is a sum over rows could not be tried"),
        pytest.param("1 / world", Verdict.REFUTED, "it is 1/2 of the model's", marks=pytest.mark.long),
        pytest.param(
            "1 + 0.3 * dist.get_rank()",
            Verdict.INCONCLUSIVE,
            "the data parts have other numbers of rows",
            marks=pytest.mark.long,
        ),
    ],
)
def test_rows_that_cannot_be_put_together(tmp_path: Path, scale: str, verdict: Verdict, cause: str) -> None:
    """Each rank has one row of its own length, and a mask for it: the mean over ranks is not what is meant."""
    script = tmp_path / "packed.py"
    script.write_text(PACKED.replace("SCALE", scale))
    report = verify_script([str(script)], ranks=2)
    assert report.verdict is verdict, told(report)
    assert any(cause in str(finding.cause) for finding in report.findings), told(report)


PACKED = """
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

class Mixing(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(20, 8), nn.Linear(8, 20)

    def forward(self, ids, mask):
        x = self.words(ids)
        return self.out(torch.tanh(mask.to(x.dtype) @ x))

dist.init_process_group("gloo")
world = dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(Mixing())
optimizer = torch.optim.SGD(model.parameters(), 0.1)
own = torch.Generator().manual_seed(3 + dist.get_rank())
for _ in range(3):
    length = int(torch.randint(5, 12, (1,), generator=own))
    ids, count = torch.randint(1, 20, (length,), generator=own), torch.tensor(length)
    dist.all_reduce(count)
    optimizer.zero_grad()
    made = model(ids, torch.ones(length, length).tril().bool())
    loss = nn.functional.cross_entropy(made, ids.roll(-1), reduction="sum")
    (loss * (SCALE) / count).backward()
    optimizer.step()
"""
