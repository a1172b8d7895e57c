"""Models that run their layers several times, the last time alone with a gradient: exact, and no gradients of zeros.

A row is (plan, ranks, schedule, micro-batches, layers, runs without gradient).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

import nnscaler
import verify
from nnscaler.compile import WantedPlan, compile_traced
from nnscaler.runtime.communication.communicator import Communicator
from nnscaler.runtime.communication.simulator import Simulator
from nnscaler.runtime.program.import_role_and_user_files import load_role
from nnscaler.runtime.training.executor import RankExecutor
from nnscaler.runtime.training.messages import Mail
from nnscaler.tracing import trace
from tests.sampling import every
from verify.self_test.programs.judge_mutant import Execution, read_statically
from verify.self_test.programs.right_programs import SmallModel, Spec, build
from verify.self_test.programs.tiny_models import Recycled

Row = tuple[str, int, str, int, int, int]
SHORT: list[Row] = [
    ("pp=2", 2, "3f1b", 1, 2, 2),
    ("pp=2", 2, "3f1b", 5, 2, 2),
    ("pp=3", 3, "3f1b", 4, 3, 2),
    ("pp=2", 2, "3f1b", 3, 3, 1),
    ("tp=2,pp=2", 4, "3f1b", 3, 2, 2),
    ("dp=2,pp=2,zero=3", 4, "3f1b", 3, 2, 2),
    ("pp=3", 3, "1f1b", 3, 2, 2),
]
LONG: list[Row] = [
    *(("pp=2", 2, "3f1b", m, 2, 2) for m in (2, 3, 4, 6)),
    *(("pp=3", 3, "3f1b", m, 3, 2) for m in (1, 2, 3, 5, 6)),
    ("pp=2", 2, "3f1b", 3, 3, 3),
    ("dp=2,pp=2,zero=1", 4, "3f1b", 3, 2, 2),
    ("dp=2,pp=2,zero=2", 4, "3f1b", 3, 2, 2),
    ("dp=2,tp=2,pp=2", 8, "3f1b", 2, 2, 2),
    ("pp=2", 2, "interleaved", 3, 2, 2),
    ("pp=2", 2, "gpipe", 3, 2, 2),
    ("dp=2,pp=2,zero=2", 4, "1f1b", 3, 2, 2),
]
ROWS = [*SHORT, *(pytest.param(*row, marks=pytest.mark.long) for row in LONG)]


def batch(rows: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(rows, 4, generator=generator) for name in "xy"}


@pytest.mark.parametrize(("plan", "ranks", "schedule", "micro_batches", "layers", "recycles"), every(2, ROWS))
def test_computes_what_the_model_does(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    plan: str,
    ranks: int,
    schedule: str,
    micro_batches: int,
    layers: int,
    recycles: int,
) -> None:
    sent: list[Tensor] = []
    send = Mail.send_gradient

    def recorded(mail: Mail, stage: object, receive: object, gradient: Tensor, micro: int) -> None:
        sent.append(gradient.detach().clone())
        send(mail, stage, receive, gradient, micro)  # type: ignore[arg-type]

    monkeypatch.setattr(Mail, "send_gradient", recorded)
    rows = micro_batches * (4 if "dp" in plan else 2)
    small = SmallModel(lambda: Recycled(layers, recycles), lambda: batch(rows))
    base = build(Spec("recycled", plan, ranks, micro_batches, small=small, schedule=schedule), tmp_path)
    program = base.subject.program
    static = read_statically(program.sources, program.graph)
    assert not static.refuted and not static.undecided, static.said
    answer = Execution(base, tmp_path, apart=False).judge(program.sources).answer
    assert not answer.refuted and not answer.undecided, answer.said
    assert sent and all(gradient.any() for gradient in sent)
    backward = {s for text in program.sources.values() for s in range(program.plan.stages) if f"B{s}." in text}
    last = range(program.plan.stages - program.plan.devices, program.plan.stages)
    assert backward == set(last) or schedule in ("1f1b", "gpipe")


@pytest.mark.long
def test_gradients_of_several_batches_add_up(tmp_path: Path) -> None:
    """As many backward passes as the model's own, and no parameter but with the last run's gradient."""
    model, batches = Recycled(), [batch(4), batch(4)]
    program = compile_traced(
        trace(model, batches[0], self_check=False),
        WantedPlan(2, "pp=2", "3f1b", 2),
        model={"name": "recycled"},
    )
    path = program.save(tmp_path / "program")
    roles = {r: load_role(path / role.file) for role in program.manifest.roles for r in role.ranks}

    def run(communicator: Communicator) -> dict[str, Tensor]:
        executor = RankExecutor(roles[communicator.rank], communicator.rank, communicator, program.state)
        for number, one in enumerate(batches):
            executor.step(one, last=number == 1)
        return {fqn: g for _, _, fqn, g in executor.local_tensors("gradient") if g is not None}

    found = {fqn: g for gradients in Simulator(2).run(run) for fqn, g in gradients.items()}
    for one in batches:
        model(**one).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient is not None
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-6)


def compiled(model: torch.nn.Module, rows: int, plan: str, ranks: int, schedule: str) -> nnscaler.Program:
    return compile_traced(
        trace(model, batch(rows), self_check=False), WantedPlan(ranks, plan, schedule, rows // 2), model={"name": "r"}
    )


@pytest.mark.long
def test_faster_than_interleaved_at_the_same_placement() -> None:
    found, other = (compiled(Recycled(4), 16, "pp=4", 4, schedule) for schedule in ("3f1b", "interleaved"))
    assert [s for s in found.plan.steps if s.kind == "assign"] == [s for s in other.plan.steps if s.kind == "assign"]
    assert found.plan.chunks == other.plan.chunks == 3
    times = [program.manifest.timeline.makespan for program in (found, other) if program.manifest.timeline]
    assert times[0] < times[1], times


@pytest.mark.parametrize("name", ["layers", "plain"])
def test_model_without_recycling_is_refused(name: str) -> None:
    """Layers that run once, and layers that run several times with a gradient each time."""

    class Again(Recycled):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return torch.nn.functional.mse_loss(self.run(self.run(self.run(x)) if name == "layers" else x), y)

    with pytest.raises(nnscaler.NnscalerError, match="runs no backward on the stages 0, 1, 2, 3, and gradients"):
        compiled(Again(6), 4, "pp=2", 2, "3f1b")


def test_more_devices_than_layers_are_refused() -> None:
    with pytest.raises(nnscaler.NnscalerError) as error:
        compiled(Recycled(2), 4, "pp=3", 3, "3f1b")
    assert error.value.code == "plan_illegal"
    assert error.value.message == (
        "the model runs 2 layers (layers.0 .. layers.1) 3 times, and 3 pipeline devices have a part of each run"
    )
    assert error.value.help == "the largest number of devices that is legal here is 2"


@pytest.mark.long
@pytest.mark.parametrize("backend", ["simulator", "gloo"])
def test_evoformer_with_recycling(example: Callable[[str], ModuleType], backend: str) -> None:
    module = example("evoformer")
    report = verify.verify_plan(
        module.build_with_recycling,
        module.sample_inputs(sequences=3, length=5),
        ranks=2,
        plan="pp=2",
        schedule="3f1b",
        micro_batches=4,
        backend=backend,
    )
    assert report.exit_code == 0 and not report.findings, report.to_json()
