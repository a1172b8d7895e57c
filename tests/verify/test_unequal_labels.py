"""The labels of a loss are found through rearrangements, and every piece gets another number that count."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import nnscaler
import verify
from nnscaler.layout import Sharded
from nnscaler.runtime.stage_base_class import Input, Stage
from nnscaler.tracing import trace
from verify.programs.rerun_with_other_scale_or_labels import Labels, counts, find_labels, unequal

Loss = Callable[[Tensor, Tensor], Tensor]


class Classes(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.head = nn.Linear(6, 7)
        self.loss = loss

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.loss(self.head(x), target)


X = torch.randn(12, 5, 6, generator=torch.Generator().manual_seed(0))
TARGET = torch.randint(0, 7, (12, 5), generator=torch.Generator().manual_seed(1))
LOSSES: dict[str, tuple[Loss, int | None]] = {
    "flat": (lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten(), ignore_index=-7), -7),
    "view": (lambda y, t: F.cross_entropy(y.view(-1, 7), t.view(-1)), -100),
    "shifted": (lambda y, t: F.cross_entropy(y[:, :-1].flatten(0, 1), t[:, 1:].flatten()), -100),
    "padded": (
        lambda y, t: F.cross_entropy(y.flatten(0, 1), F.pad(t, (0, 1), value=-100)[:, 1:].contiguous().view(-1)),
        -100,
    ),
    "classes in the middle": (lambda y, t: F.cross_entropy(y.transpose(1, 2), t), -100),
    "a chunk": (lambda y, t: F.cross_entropy(y[:, :3].flatten(0, 1), t.chunk(2, 1)[0].flatten()), -100),
    "squeezed": (lambda y, t: F.cross_entropy(y.flatten(0, 1), t[None].squeeze().movedim(1, 1).flatten()), -100),
    "turned": (lambda y, t: F.cross_entropy(y.flatten(0, 1), t.t().movedim(0, 1).flatten()), -100),
    "sum": (lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten(), reduction="sum"), -100),
    "smoothed": (lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten(), label_smoothing=0.1), -100),
    "computed": (lambda y, t: F.cross_entropy(y.flatten(0, 1), (t + 1).remainder(7).flatten()), None),
    "squares": (lambda y, t: (y.mean(-1) - t).square().mean(), None),
}


@pytest.mark.parametrize("name", LOSSES)
def test_labels_are_found(name: str) -> None:
    loss, ignored = LOSSES[name]
    found = find_labels(trace(Classes(loss), (X, TARGET)).graph)
    assert found == (None if ignored is None else Labels("target", ignored))


def stage(states: dict[str, Sharded], **axes: int) -> type[Stage]:
    micro = axes.pop("micro", 1)
    return type("S", (Stage,), {"axes": axes, "micro_batches": micro, "inputs": {"t": Input("t", states)}})


def test_every_piece_has_another_count() -> None:
    labels = Labels("t", -100)
    cut = stage({"dp": Sharded(0), "micro": Sharded(0, outer=2)}, dp=2, tp=3, micro=2)
    changed = unequal(labels, {"t": TARGET, "x": X}, [cut])
    assert changed is not None and changed["x"] is X
    assert counts(labels, changed, [cut]) == [0, 5, 10, 15]
    kept = changed["t"] != -100
    assert torch.equal(changed["t"][kept], TARGET[kept])
    assert counts(labels, {"t": TARGET}, [cut]) == [15] * 4


def test_labels_that_cannot_differ() -> None:
    labels = Labels("t", -100)
    assert unequal(labels, {"t": TARGET}, [stage({}, tp=4)]) is None
    assert unequal(labels, {"t": TARGET}, [type("S", (Stage,), {"inputs": {}})]) is None
    ignored = torch.full_like(TARGET, -100)
    assert unequal(labels, {"t": ignored}, [stage({"dp": Sharded(0)}, dp=3)]) is None


@pytest.mark.parametrize(("name", "tried"), [("shifted", True), ("squares", False)])
def test_the_report_says_whether_they_were_tried(name: str, tried: bool) -> None:
    report = verify.verify_plan(Classes(LOSSES[name][0]), (X, TARGET), ranks=3, plan="dp=3", micro_batches=2)
    assert report.exit_code == 0, report.to_json()
    assert any(check.name == "unequal labels" and check.count > 4 for check in report.checks) is tried
    assert any("unequal numbers of labels were not tried" in note for note in report.notes) is not tried


def test_labels_that_no_rank_can_take_its_piece_of(tmp_path: Path) -> None:
    """Of an edited program: two axes cut one dim at the same place. Ranks raise, and the verifier does not."""
    batch = {"x": X[:8], "target": TARGET[:8]}
    model = Classes(LOSSES["flat"][0])
    program = nnscaler.parallelize(model, batch, ranks=2, plan="dp=2", micro_batches=2).save(tmp_path / "program")
    text = (program / "role_0.py").read_text()
    assert text.count('"micro": Sharded(0, outer=2)') == 2
    (program / "role_0.py").write_text(text.replace('"micro": Sharded(0, outer=2)', '"micro": Sharded(0)'))
    report = verify.verify_plan(model, batch, program=program)
    assert {f.code for f in report.findings} == {"not_covered", "rank_raises"}, report.to_json()
    assert any("`target` cannot be cut so: two axes overlap" in note for note in report.notes)
