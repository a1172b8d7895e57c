"""verify_plan: right programs pass, and each kind of planted bug gives its finding, which names the tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import verify
from nnscaler.errors import NnscalerError
from tests.sampling import every, only
from verify import Report, Verdict
from verify.programs.loaded_model_and_plan import PlanSubject
from verify.programs.request import PlanRequest
from verify.programs.verify_request import verify_request
from verify.results.finding_codes import CODES

Factory = Callable[[], nn.Module]
Batch = dict[str, Tensor]


@pytest.mark.parametrize(
    ("plan", "ranks", "micro_batches"),
    only(
        (
            1,
            4,
            5,
        ),
        [("dp=2", 2, 1), ("dp=3", 3, 1), ("tp=2", 2, 1), ("pp=2", 2, 4), ("dp=2,tp=2,pp=2", 8, 2), (None, 1, 1)],
    ),
)
def test_right_plans_pass(tiny: Factory, batch: Batch, plan: str | None, ranks: int, micro_batches: int) -> None:
    report = verify.verify_plan(tiny, batch, ranks=ranks, plan=plan, micro_batches=micro_batches, level="run")
    assert report.exit_code == 0, report.to_json()
    assert report.verdict is Verdict.TESTED_EXACT
    names = [check.name for check in report.checks]
    trained = ["coverage", "loss", "gradients", "gradient norm, clipped", "parameters after 2 steps"]
    assert names[1:7] == [*trained, "buffers after 2 steps"]
    assert report.total > 50


@pytest.mark.long
@pytest.mark.parametrize(("plan", "ranks"), only((1,), [("dp=3", 3), ("dp=2,tp=2,pp=2", 8)]))
def test_right_plans_are_proved_up_to_their_weakest_lemma(tiny: Factory, batch: Batch, plan: str, ranks: int) -> None:
    static = verify.verify_plan(tiny, batch, ranks=ranks, plan=plan, level="static")
    both = verify.verify_plan(tiny, batch, ranks=ranks, plan=plan)
    assert static.verdict is both.verdict is Verdict.TESTED_EXACT  # dropout draws by position, which is only tested
    lemmas = next(check for check in both.checks if check.name == "operator lemmas")
    assert "nnscaler.dropout" in lemmas.detail
    assert {"nothing was run"} <= set(static.notes)
    assert both.total > static.total
    assert both.attachments.certificate is not None and both.attachments.certificate.proved


@pytest.mark.long
def test_a_line_that_computes_the_same_in_another_way_is_undecided(program: Path, tiny: Factory, batch: Batch) -> None:
    edit(program, 1, "gelu_1 = aten.gelu(linear_2)", "gelu_1 = aten.add.Tensor(aten.gelu(linear_2), 0.0)")
    report = verified(program, tiny, batch, level="all")
    assert report.exit_code == 3, report.to_json()
    assert report.findings[0].code == "operation_differs"


def test_what_is_read_to_be_wrong_is_told_first(program: Path, tiny: Factory, batch: Batch) -> None:
    edit(program, 0, "comm.all_reduce(linear_1, self.tp)", "linear_1")
    report = verified(program, tiny, batch, level="all")
    assert report.exit_code == 1
    first = report.findings[0]
    assert first.code == "layouts_disagree" and "an all_reduce over tp is missing" in str(first.cause)
    assert any(f.code == "tensor_differs" for f in report.findings)


@pytest.mark.long
def test_a_model_without_data_is_proved_and_not_run(batch: Batch, tiny: Factory) -> None:
    with torch.device("meta"):
        model = tiny()
    report = verify.verify_plan(model, batch, ranks=4, plan="dp=2,tp=2")
    assert report.exit_code == 0, report.to_json()
    assert any("the program was not run" in note for note in report.notes)
    with pytest.raises(NnscalerError, match="cannot be run"):
        verify.verify_plan(model, batch, ranks=4, plan="dp=2,tp=2", level="run")


@pytest.mark.long
def test_a_module_is_taken_too_and_not_changed(tiny: Factory, batch: Batch) -> None:
    module = tiny()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    assert verify.verify_plan(module, batch, ranks=2, plan="dp=2", steps=1).exit_code == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    assert all(p.grad is None for p in module.parameters())


class Several(nn.Module):
    """Returns more than its loss, and reads a layer without a gradient that it leaves trainable."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head, self.teacher = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            target = self.teacher(x).softmax(-1)
        logits = self.head(torch.tanh(self.layer(x)))
        loss = nn.functional.cross_entropy(logits, y) + nn.functional.cross_entropy(logits, target)
        return {"loss": loss, "logits": logits}


@pytest.mark.parametrize("how", [{"depth": "deep"}, {"depth": "deep", "steps": 1}, {"train": True}])
def test_a_model_of_several_results_is_verified_at_any_depth(how: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    batch = {"x": torch.randn(8, 6, generator=generator), "y": torch.randint(0, 3, (8,), generator=generator)}
    report = verify.verify_plan(Several, batch, ranks=2, plan="dp=2", **how)
    assert report.exit_code == 0, report.to_json()


@pytest.mark.long
def test_dropout_is_compared_and_said_so(tiny: Factory, batch: Batch) -> None:
    report = verify.verify_plan(tiny, batch, ranks=2, plan="dp=2", steps=1)
    assert any("2 random operations (dropout included)" in note for note in report.notes)


@pytest.mark.long
@pytest.mark.parametrize("dtype", every(2, [torch.float32, torch.bfloat16, torch.float16]))
def test_low_precision_is_calibrated(tiny: Factory, batch: Batch, dtype: torch.dtype) -> None:
    report = verify.verify_plan(tiny, batch, ranks=2, plan="tp=2", dtype=dtype, level="run")
    assert report.verdict is Verdict.TESTED_CALIBRATED, report.to_json()


@pytest.mark.long
def test_the_report_says_what_was_run(tiny: Factory, batch: Batch) -> None:
    report = verify.verify_plan(tiny, batch, ranks=2, plan="pp=2", micro_batches=4, seed=5)
    document = json.loads(report.to_json())
    assert document["setting"] == "on 2 ranks (pp=2, 1F1B, 4 micro-batches), in float64"
    assert document["seed"] == 5
    assert document["environment"]["backend"] == "simulator"
    assert document["environment"]["dtype"] == "float64"


def test_an_illegal_plan_is_an_error_and_not_a_verdict(tiny: Factory, batch: Batch) -> None:
    with pytest.raises(NnscalerError) as caught:
        verify.verify_plan(tiny, batch, ranks=4, plan="dp=2")
    assert caught.value.code == "plan_illegal"


def test_a_model_that_raises_is_an_error_and_not_a_verdict(batch: Batch) -> None:
    class Broken(nn.Module):
        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            raise ValueError("not today")

    with pytest.raises(NnscalerError):
        verify.verify_plan(Broken, batch, ranks=2, plan="dp=2")


def test_a_model_that_computes_nan_is_inconclusive() -> None:
    class Undefined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.weight).log().sum()

    report = verify.verify_plan(Undefined, {"x": -torch.ones(6, 4)}, ranks=2, plan="dp=2")
    assert report.exit_code == 3
    assert report.findings[0].code == "reference_not_finite"


# -- planted bugs: (name, file, text, replacement, code of the first finding, tensor that it names) -------------------

LAST_UP = '"layers.0.up.weight", (24, 8), "float32", {"tp": Sharded(0)}, reduce=("dp",)'
PLANTED = [
    ("forward reduction missing", 0, "comm.all_reduce(linear_1, self.tp)", "linear_1", "tensor_differs", "linear_1"),
    (
        "backward reduction missing",
        1,
        "layer_norm_1_v1 = comm.replicate(layer_norm_1, self.tp)",
        "layer_norm_1_v1 = layer_norm_1",
        "tensor_gradient_differs",
        "layer_norm_1",
    ),
    (
        "reduction over the wrong axis",
        0,
        "comm.all_reduce(linear_1, self.tp)",
        "comm.all_reduce(linear_1, self.dp)",
        "tensor_differs",
        "linear_1",
    ),
    (
        "reduced twice",
        1,
        "comm.all_reduce(linear_3, self.tp)",
        "comm.all_reduce(comm.all_reduce(linear_3, self.tp), self.tp)",
        "tensor_differs",
        "linear_3",
    ),
    (
        "bias on every rank",
        0,
        "comm.keep_first(self.layers_0_down_bias, self.tp)",
        "self.layers_0_down_bias",
        "tensor_differs",
        "layers_0_down_bias",
    ),
    ("gradient not summed", 0, LAST_UP, LAST_UP.partition(", reduce")[0], "gradient_differs", "layers.0.up.weight"),
    (
        "gradient summed twice",
        0,
        '"layers.0.norm.weight", (8,), "float32", {}, reduce=("dp",)',
        "\"layers.0.norm.weight\", (8,), \"float32\", {}, reduce=('dp', 'tp')",
        "gradient_differs",
        "layers.0.norm.weight",
    ),
    ("tied weight not summed", None, ", copies=((0, 1, 2, 3), (4, 5, 6, 7))", "", "gradient_differs", "words.weight"),
    ("parameter forgotten", 1, '"layers.1.up.bias"', '"layers.0.up.bias"', "tensor_differs", "layers.0.up.bias"),
    ("not finite", 1, "gelu_1 = aten.gelu(linear_2)", "gelu_1 = aten.gelu(linear_2) / 0", "tensor_differs", "gelu_1"),
]


def edit(program: Path, role: int | None, text: str, replacement: str) -> None:
    files = [program / f"role_{role}.py"] if role is not None else sorted(program.glob("role_*.py"))
    for file in files:
        source = file.read_text()
        assert text in source, f"{file.name} has changed: {text}"
        file.write_text(source.replace(text, replacement))


def verified(program: Path, tiny: Factory, batch: Batch, **options: object) -> Report:
    asked = {"level": "run", "backend": "simulator", "depth": "quick", **options}
    request = PlanRequest(ranks=8, program=str(program), **asked)  # type: ignore[arg-type]
    report = verify_request(request, PlanSubject(tiny, batch))
    assert {finding.code for finding in report.findings} <= set(CODES)
    return report


@pytest.mark.long
def test_an_unedited_program_passes(program: Path, tiny: Factory, batch: Batch) -> None:
    report = verified(program, tiny, batch, depth="default")
    assert report.exit_code == 0 and report.findings == ()


@pytest.mark.long
@pytest.mark.parametrize(
    ("role", "text", "replacement", "code", "tensor"),
    only((4, 8), [row[1:] for row in PLANTED]),
    ids=[row[0] for row in PLANTED],
)
def test_planted_bugs(
    program: Path, tiny: Factory, batch: Batch, role: int | None, text: str, replacement: str, code: str, tensor: str
) -> None:
    edit(program, role, text, replacement)
    report = verified(program, tiny, batch)
    assert report.exit_code == 1
    first = report.findings[0]
    assert first.code == code, report.to_json()
    assert first.counter_example["tensor"] == tensor
    assert tensor in first.message
    assert first.where is not None and Path(first.where.file).name == "conftest.py"
    assert any("was changed after it was generated" in note for note in report.notes)


CAUSES = [
    (0, "comm.all_reduce(linear_1, self.tp)", "linear_1", "an all_reduce over tp is missing"),
    (0, LAST_UP, LAST_UP.partition(", reduce")[0], "an all_reduce over dp is missing"),
    (None, ", copies=((0, 1, 2, 3), (4, 5, 6, 7))", "", "stages 0 and 1 share it"),
    (
        0,
        "comm.all_reduce(linear_1, self.tp)",
        "comm.all_reduce(linear_1, self.tp) / self.tp.size",
        "1/2 of the model's",
    ),
]


@pytest.mark.parametrize(("role", "text", "replacement", "cause"), only((2,), CAUSES))
def test_causes(
    program: Path, tiny: Factory, batch: Batch, role: int | None, text: str, replacement: str, cause: str
) -> None:
    edit(program, role, text, replacement)
    assert cause in str(verified(program, tiny, batch).findings[0].cause)


@pytest.mark.long
def test_the_finding_names_the_line_of_the_program(program: Path, tiny: Factory, batch: Batch) -> None:
    edit(program, 0, "comm.all_reduce(linear_1, self.tp)", "linear_1")
    first = verified(program, tiny, batch).findings[0]
    assert first.code == "tensor_differs" and first.counter_example["tensor"] == "linear_1"
    assert "an all_reduce over tp is missing" in str(first.cause)
    what, place = first.related[0]
    assert what == "generated program"
    assert Path(place.file) == program / "role_0.py"
    assert place.text.startswith("linear_1_v1 = linear_1")


@pytest.mark.long
def test_a_bug_is_refuted_in_low_precision_too(program: Path, tiny: Factory, batch: Batch) -> None:
    edit(program, 0, "comm.all_reduce(linear_1, self.tp)", "linear_1")
    assert verified(program, tiny, batch, dtype="float32").exit_code == 1


@pytest.mark.long
def test_a_rank_that_raises(program: Path, tiny: Factory, batch: Batch) -> None:
    edit(program, 0, "gelu = aten.gelu(linear)", "gelu = aten.gelu(linear) + torch.ones(7)")
    report = verified(program, tiny, batch)
    assert report.exit_code == 1
    assert report.findings[0].code == "rank_raises"
    assert "`gelu`" in report.findings[0].message
    assert report.findings[0].where is not None


@pytest.mark.long
def test_collectives_that_do_not_match(program: Path, tiny: Factory, batch: Batch) -> None:
    edit(program, 0, "comm.all_reduce(linear_1, self.tp)", "comm.all_reduce(linear_1[: 1 + self.tp.index], self.tp)")
    finding = verified(program, tiny, batch).findings[0]
    assert finding.code == "communication_mismatch"
    assert "`linear_1_v1`" in finding.message and "shapes" in finding.message


@pytest.mark.long
def test_a_deadlock_is_found(program: Path, tiny: Factory, batch: Batch) -> None:
    edit(program, 0, 'Send("add_1@1", 1, peers=(4, 5, 6, 7)', 'Send("add_1@1", 1, peers=(5, 4, 6, 7)')
    report = verified(program, tiny, batch)
    assert report.exit_code == 1
    finding = report.findings[0]
    assert finding.code == "deadlock"
    assert "`add_1`" in finding.message
    assert any(key.startswith("rank ") for key in finding.counter_example)


@pytest.mark.apart  # its ranks go on for a minute, inside of what a run changes in torch
def test_a_program_that_takes_too_long_is_inconclusive(program: Path, tiny: Factory, batch: Batch) -> None:
    edit(program, 0, "gelu = aten.gelu(linear)", "__import__('time').sleep(60); gelu = aten.gelu(linear)")
    report = verified(program, tiny, batch, timeout=2.0)
    assert report.exit_code == 3
    assert report.findings[0].code == "timed_out"


def test_a_program_for_other_inputs_is_an_error(program: Path, tiny: Factory, batch: Batch) -> None:
    half = {name: tensor[:6] for name, tensor in batch.items()}
    with pytest.raises(NnscalerError) as caught:
        verified(program, tiny, half)
    assert caught.value.code == "inputs_differ"


def test_a_folder_without_a_program_is_an_error(tmp_path: Path, tiny: Factory, batch: Batch) -> None:
    with pytest.raises(NnscalerError) as caught:
        verified(tmp_path, tiny, batch)
    assert caught.value.code == "not_a_program"


def test_a_rank_that_exits_is_refuted(program: Path, tiny: Factory, batch: Batch) -> None:
    edit(program, 0, "gelu = aten.gelu(linear)", "raise SystemExit('enough')")
    report = verified(program, tiny, batch)
    assert report.exit_code == 1
    assert report.findings[0].code == "rank_raises" and "enough" in report.findings[0].message
