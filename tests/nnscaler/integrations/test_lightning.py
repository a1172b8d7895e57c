"""Lightning's Trainer with our strategy: real processes, against its own DDP."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import Tensor, nn

from nnscaler.errors import NnscalerError
from nnscaler.integrations.lightning import NnscalerStrategy
from nnscaler.integrations.lightning_checks import check_module
from nnscaler.integrations.lightning_steps import StepModule

TOLERANCE = 1e-12


def state_distance(first: dict[str, Any], second: dict[str, Any]) -> float:
    pairs = ((torch.tensor(first["state"][name]), torch.tensor(second["state"][name])) for name in first["state"])
    return max(float((a - b).abs().max()) for a, b in pairs)


def run_script(folder: Path) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path), "GLOO_SOCKET_IFNAME": "lo"}
    script = Path(__file__).with_name("lightning_runs.py")
    done = subprocess.run([sys.executable, script, folder], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


def test_steps_equal_those_of_ddp_under_each_plan_and_a_checkpoint_goes_on_under_another(tmp_path: Path) -> None:
    found = run_script(tmp_path)
    ddp = found["ddp"]
    for plan in ("dp=2,zero=1", "dp=2,zero=3", "tp=2", "pp=2"):
        assert len(found[plan]["train"]) == 20
        assert state_distance(found[plan], ddp) <= TOLERANCE, plan
        assert found[plan]["validation"] == pytest.approx(ddp["validation"], abs=TOLERANCE), plan
        assert found[plan]["shapes"] == [8] * 20, plan  # what the step returns is that of the global batch
        assert found[plan]["train"] == pytest.approx(found["tp=2"]["train"], abs=TOLERANCE), plan
    several = found["dp=2, 3 batches a step"], found["ddp, 3 batches a step"]
    assert state_distance(*several) <= TOLERANCE
    assert len(several[0]["train"]) == len(several[1]["train"])
    first = found["first half"]
    assert first["train"] == found["dp=2,zero=1"]["train"][:11]
    assert first["test"] == pytest.approx(first["validation"][3], abs=TOLERANCE)  # read whole by a plain module
    assert found["second half"]["state"] == found["dp=2,zero=1"]["state"]
    assert found["second half"]["train"] == found["dp=2,zero=1"]["train"][11:]
    assert state_distance(found["under another plan"], ddp) <= TOLERANCE


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def training_step(self, batch: Tensor) -> Any:
        return self.layer(batch).square().mean()


class ByHand(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class OwnBackward(Module):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


class NoLoss(Module):
    def training_step(self, batch: Tensor) -> Any:
        return {"outputs": self.layer(batch)}


class LogsMetric(Module):
    def training_step(self, batch: Tensor) -> Any:
        self.log("layer", self.layer)  # type: ignore[arg-type]
        return super().training_step(batch)


class LogsNumber(Module):
    def training_step(self, batch: Tensor) -> Any:
        self.log("rows", len(batch), prog_bar=True)
        return super().training_step(batch)


@pytest.mark.parametrize(
    ("module", "options", "said"),
    [
        (ByHand, {}, "ByHand optimizes by hand"),
        (OwnBackward, {}, "OwnBackward has a `backward` of its own"),
        (Module, {"callbacks": [StochasticWeightAveraging(1e-2)]}, "StochasticWeightAveraging averages"),
    ],
)
def test_what_a_compiled_step_would_leave_out_is_refused(
    module: type[Module], options: dict[str, Any], said: str
) -> None:
    trainer = lightning.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, **options)
    with pytest.raises(NnscalerError, match=said):
        check_module(module(), trainer, trainer.precision_plugin)


def test_a_step_without_a_loss_and_a_logged_object_are_refused_and_a_logged_number_is_told() -> None:
    def steps(module: Module) -> StepModule:
        return StepModule(module, lightning.Trainer(accelerator="cpu", logger=False).precision_plugin.forward_context)

    with pytest.raises(NnscalerError, match="training_step of NoLoss returns dict, and no loss"):
        steps(NoLoss())(torch.ones(2, 3))
    with pytest.raises(NnscalerError, match="'layer', \\.\\.\\.\\) of a Linear"):
        steps(LogsMetric())(torch.ones(2, 3))
    made = steps(LogsNumber())
    with pytest.warns(UserWarning, match="logs a number that Python computed"):
        assert made(torch.ones(2, 3))["logged"] == {}
    assert made.logs.by_mode[True] == {"rows": {"value": 2, "prog_bar": True}}


def test_the_engine_is_there_during_fit_alone() -> None:
    with pytest.raises(NnscalerError, match="during `fit` alone"):
        _ = NnscalerStrategy("dp=2").engine
