"""Lightning's Trainer with our strategy: real processes, against its own DDP."""

from __future__ import annotations

import json
import os
import pickle
import random
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import BaseFinetuning, EMAWeightAveraging, ModelPruning, StochasticWeightAveraging
from lightning.pytorch.trainer.connectors.data_connector import _DataLoaderSource
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from nnscaler.errors import NnscalerError
from nnscaler.integrations.lightning import NnscalerStrategy
from nnscaler.integrations.lightning_checks import Fixed, Switches, check_module, read_first
from nnscaler.integrations.lightning_steps import StepModule
from nnscaler.integrations.lightning_torchmetrics import Metrics, metrics_recorded

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
    for plan in ("dp=2,zero=1", "dp=2,zero=3", "dp=1,shard=2,zero=3", "tp=2", "pp=2"):
        assert len(found[plan]["train"]) == 20
        assert state_distance(found[plan], ddp) <= TOLERANCE, plan
        assert found[plan]["validation"] == pytest.approx(ddp["validation"], abs=TOLERANCE), plan
        assert found[plan]["metrics"] == pytest.approx(ddp["metrics"], abs=1e-6), plan
        assert found[plan]["shapes"] == [8] * 20, plan  # what the step returns is that of the global batch
        assert found[plan]["train"] == pytest.approx(found["tp=2"]["train"], abs=TOLERANCE), plan
    assert len({*ddp["metrics"]}) > 5 and min(ddp["metrics"]) >= 0
    several = found["dp=2, 3 batches a step"], found["ddp, 3 batches a step"]
    assert state_distance(*several) <= TOLERANCE
    assert len(several[0]["train"]) == len(several[1]["train"])
    assert state_distance(found["dp=2, whole matrices"], found["ddp, whole matrices"]) <= TOLERANCE
    assert state_distance(found["dp=2, some parameters"], found["ddp, some parameters"]) <= TOLERANCE
    assert state_distance(found["dp=2, others"], found["ddp, others"]) <= TOLERANCE
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


class Gathers(Module):
    def training_step(self, batch: Tensor) -> Any:
        return self.layer(self.all_gather(batch)).square().mean()


class ReadsRate(Module):
    def training_step(self, batch: Tensor) -> Any:
        self.log("rate", self.optimizers().param_groups[0]["lr"])  # type: ignore[union-attr]
        return super().training_step(batch)


class ReadsEpoch(Module):
    def training_step(self, batch: Tensor) -> Any:
        return super().training_step(batch) * (self.current_epoch + 1)


class Alternates(Module):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:  # type: ignore[override]
        return super().training_step(batch if batch_idx % 2 else -batch)


class Measures(Module):
    def __init__(self) -> None:
        super().__init__()
        self.error, self.mean = torchmetrics.MeanSquaredError(), torchmetrics.MeanMetric()

    def training_step(self, batch: Tensor) -> Any:
        outputs = self.layer(batch)
        self.mean.update(outputs, weight=2.0)
        value: Any = self.error(outputs, target=batch[:, :1])
        self.log("error", 1 - torch.stack([value, value]).sum().sqrt() / 2)
        self.log("mean", self.mean)
        return {"loss": self.loss(outputs, value), "value": value}

    def loss(self, outputs: Tensor, value: Any) -> Any:
        return outputs.square().mean()


class ByMetric(Measures):
    def loss(self, outputs: Tensor, value: Any) -> Any:
        return value


class ByProduct(Measures):
    def loss(self, outputs: Tensor, value: Any) -> Any:
        return outputs.mean() * value


class Branches(Measures):
    def loss(self, outputs: Tensor, value: Any) -> Any:
        return outputs.mean() if value > 1 else outputs.sum()


class Silent(Module):
    def validation_step(self, batch: Tensor) -> None:
        self.layer(batch)


class Unfreezes(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.layer)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        self.unfreeze_and_add_param_group(pl_module.layer, optimizer)


@pytest.mark.parametrize(
    ("module", "options", "said"),
    [
        (ByHand, {}, "ByHand optimizes by hand"),
        (OwnBackward, {}, "OwnBackward has a `backward` of its own"),
        (Module, {"callbacks": [StochasticWeightAveraging(1e-2)]}, "StochasticWeightAveraging averages"),
        (Module, {"callbacks": [EMAWeightAveraging()]}, "EMAWeightAveraging averages the module's weights"),
        (Module, {"callbacks": [ModelPruning("l1_unstructured", amount=0.5)]}, "ModelPruning prunes"),
        (Module, {"callbacks": [Unfreezes()]}, "Unfreezes unfreezes parameters"),
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
    for module, said in (
        (LogsMetric(), "'layer', \\.\\.\\.\\) of a Linear"),
        (Gathers(), "calls self.all_gather"),
        (ReadsRate(), "asks for optimizers"),
    ):
        with pytest.raises(NnscalerError, match=said):
            steps(module)(torch.ones(2, 3))
    made = steps(LogsNumber())
    assert made(torch.ones(2, 3))["logged"] == {}
    with pytest.warns(UserWarning, match="logs a number that Python computed"):
        made.notes.tell()
    assert made.notes.by_mode[True].logs == {"rows": {"value": 2, "prog_bar": True}}


def test_metrics_get_what_the_step_gives_them_after_it() -> None:
    module, batch = Measures(), torch.randn(5, 3)
    steps = StepModule(module, lightning.Trainer(accelerator="cpu", logger=False).precision_plugin.forward_context)
    found = steps(batch)
    assert module.mean.update_count == module.error.update_count == 0 and set(found["rest"]) == set()
    traced = pickle.loads(pickle.dumps(steps.notes.by_mode[True]))  # rank 0 sends it
    metrics = Metrics(module)
    values = metrics.run(traced.metrics, found["measured"])
    outputs = module.layer(batch).detach()
    expected = nn.functional.mse_loss(outputs, batch[:, :1])
    torch.testing.assert_close(traced.values["value"].function(values), expected)
    torch.testing.assert_close(traced.logs["error"]["value"].function(values), 1 - (2 * expected).sqrt() / 2)
    assert traced.logs["mean"]["value"].path == "mean"
    torch.testing.assert_close(module.mean.compute(), outputs.mean())
    assert module.mean.distributed_available_fn is not Measures().mean.distributed_available_fn
    metrics.release()
    assert module.mean.distributed_available_fn is Measures().mean.distributed_available_fn


@pytest.mark.parametrize("kind", [ByMetric, ByProduct, Branches])
def test_a_step_that_has_to_know_what_a_metric_returns_is_refused(kind: type[Measures]) -> None:
    steps = StepModule(kind(), lightning.Trainer(accelerator="cpu", logger=False).precision_plugin.forward_context)
    with pytest.raises(NnscalerError, match="the step computes with what the metric `error` returns") as raised:
        steps(torch.randn(5, 3))
    assert "torchmetrics.functional" in (raised.value.help or "")


class MakesMetric(Measures):
    def training_step(self, batch: Tensor) -> Tensor:
        self.log("mean", torchmetrics.MeanMetric()(self.layer(batch)))
        return self.layer(batch).square().mean()


def test_a_metric_that_a_step_makes_is_refused_at_its_line() -> None:
    context = lightning.Trainer(accelerator="cpu", logger=False).precision_plugin.forward_context
    with pytest.raises(NnscalerError, match="the step makes a MeanMetric, which is a new one in every step") as raised:
        StepModule(MakesMetric(), context)(torch.randn(5, 3))
    assert raised.value.where is not None and "MeanMetric()(" in (raised.value.where.text or "")
    torchmetrics.MeanMetric()  # outside of a step as ever


def test_a_validation_step_without_results_is_refused() -> None:
    steps = StepModule(Silent(), lightning.Trainer(accelerator="cpu", logger=False).precision_plugin.forward_context)
    with pytest.raises(NnscalerError, match="validation_step of Silent returns nothing, and logs nothing"):
        steps.eval()(torch.randn(5, 3))


@pytest.mark.parametrize(
    ("module", "said"), [(ReadsEpoch(), "reads current_epoch, which stays 0"), (Alternates(), "reads batch_idx, which")]
)
def test_a_count_that_a_step_reads_is_told(module: Module, said: str) -> None:
    module.trainer = trainer = lightning.Trainer(accelerator="cpu", logger=False)
    steps = StepModule(module, trainer.precision_plugin.forward_context)
    steps(torch.ones(2, 3))
    with pytest.warns(UserWarning, match=f"the step {said}"):
        steps.notes.tell()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it was told, and is not again
        steps.notes.tell()
    assert module.current_epoch == 0 and "log" not in vars(module)


def test_a_module_that_changes_its_mode_or_a_parameter_that_is_unfrozen_is_refused() -> None:
    module = Module()
    module.layer.bias.requires_grad_(False)
    switches = Switches(module)
    switches.check()
    module.layer.eval()
    with pytest.raises(NnscalerError, match="`layer` is in evaluation mode, and was in training mode"):
        switches.check()
    module.layer.train()
    module.layer.bias.requires_grad_(True)
    with pytest.raises(NnscalerError, match=r"`layer.bias` is trained, and was frozen"):
        switches.check()


def test_numbers_and_texts_and_tensors_of_a_batch_that_differ_are_told() -> None:
    steps = StepModule(Module(), lightning.Trainer(accelerator="cpu", logger=False).precision_plugin.forward_context)
    fixed = Fixed.of({"x": torch.ones(2), "n": 3, "of": "a"}, steps)
    with pytest.raises(NnscalerError, match=r"the numbers \[4\], and the step was compiled with \[3\]"):
        fixed.check({"x": torch.ones(2), "n": 4, "of": "a"})
    with pytest.warns(UserWarning, match="batches have texts in them"):
        fixed.check({"x": torch.ones(2), "n": 3, "of": "b"})
    with (
        pytest.raises(
            NnscalerError, match=r"validation has the tensors \['y'\], and that of training \['batch_x'\]: no"
        ),
        fixed.explained({"y": torch.ones(2)}),
    ):
        raise NnscalerError("usage", "no")


def test_the_engine_is_there_during_fit_alone() -> None:
    with pytest.raises(NnscalerError, match="during `fit` alone"):
        _ = NnscalerStrategy("dp=2").engine


@dataclass
class Scored:
    values: Tensor


class Total(torchmetrics.Metric):  # type: ignore[misc]
    """The sum of what is scored."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0))

    def update(self, scored: Scored) -> None:
        self.total += scored.values.sum()

    def compute(self) -> Tensor:
        return self.total


def test_a_metric_gets_the_tensors_of_a_dataclass_as_they_are_in_the_step() -> None:
    """It got those of the trace."""
    module, calls, measured = torch.nn.ModuleDict({"total": Total()}), [], {}
    with metrics_recorded(module, calls, measured):
        module["total"].update(Scored(torch.ones(3)))
    (name,) = measured
    Metrics(module).run(calls, {name: torch.full((3,), 5.0)})
    assert float(module["total"].compute()) == 15.0


class Once(IterableDataset[float]):
    """Its own iterator, as that of a pipe: iterated again it has what was not read."""

    def __init__(self) -> None:
        self._rows = iter([1.0, 2.0, 3.0, 4.0, 5.0])

    def __iter__(self) -> Iterator[float]:
        return self._rows


class Drawn(IterableDataset[Any]):
    def __init__(self, draw: Callable[[], Any]) -> None:
        self.draw, self.count = draw, 6

    def __iter__(self) -> Iterator[Any]:
        return (self.draw() for _ in range(self.count))


@pytest.mark.parametrize("draws", [random.random, partial(torch.rand, ())])
def test_the_batch_that_is_compiled_for_is_trained_on(draws: Callable[[], Any]) -> None:
    """No row comes twice, nor is lost: of a stream that goes on where it was, and of one that draws its rows."""
    once = _DataLoaderSource(DataLoader(Once(), batch_size=2), "train_dataloader")
    assert read_first(once).tolist() == [1.0, 2.0]
    assert [batch.tolist() for batch in once.dataloader()] == [[1.0, 2.0], [3.0, 4.0], [5.0]]
    assert once.dataloader() is once.instance
    drawn = _DataLoaderSource(DataLoader(Drawn(draws), batch_size=2), "train_dataloader")
    first = read_first(drawn)
    given = torch.stack(list(drawn.dataloader()))
    assert torch.equal(given[0], first) and len(given.unique()) == 6


def test_workers_that_stay_have_not_read_the_batch_that_is_compiled_for() -> None:
    """Else a stream that does not start again would go on behind it, in their copy."""
    loader = DataLoader(Once(), batch_size=2, num_workers=1, persistent_workers=True)
    once = _DataLoaderSource(loader, "train_dataloader")
    assert read_first(once).tolist() == [1.0, 2.0]
    assert [batch.tolist() for batch in once.dataloader()] == [[1.0, 2.0], [3.0, 4.0], [5.0]]


def test_a_setting_of_a_stream_reaches_it() -> None:
    stream = Drawn(random.random)
    loader = DataLoader(stream, batch_size=2)
    read_first(_DataLoaderSource(loader, "train_dataloader"))
    loader.dataset.count = 2  # as a callback does, by `trainer.train_dataloader.dataset`
    assert stream.count == 2
