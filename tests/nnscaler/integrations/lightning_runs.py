"""Runs of Lightning's Trainer on two ranks, under DDP and under our strategy; the test starts it, and compares.

python lightning_runs.py FOLDER
"""

from __future__ import annotations

import json
import os
import socket
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score

from nnscaler.integrations.lightning import NnscalerStrategy


class Classifier(lightning.LightningModule):
    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.rate = 1e-2
        self.layers = nn.Sequential(nn.Linear(7, 12), nn.GELU(), nn.Linear(12, 12), nn.GELU(), nn.Linear(12, 4))
        self.accuracy, self.of_classes = MulticlassAccuracy(4), MulticlassAccuracy(4, average=None)
        self.kept = MetricCollection({"f1": MulticlassF1Score(4), "rank": MulticlassAUROC(4)}, prefix="kept_")

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        inputs, labels = batch
        outputs = self.layers(inputs)
        loss = nn.functional.cross_entropy(outputs, labels)
        right = outputs.argmax(-1) == labels
        self.log_dict({"train_loss": loss, "right": right.double().sum()}, reduce_fx="max", prog_bar=True)
        self.accuracy(outputs, labels)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        of_classes: Any = self.of_classes(outputs, target=labels)
        self.log("first_class", 100 * of_classes[0].mean())
        return {"loss": loss, "outputs": outputs, "of_classes": of_classes}

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self.layers(inputs), labels)
        self.log("val_loss", loss, sync_dist=True)
        self.log("val_by_rows", loss, sync_dist=True, batch_size=len(inputs))
        self.log("val_by_count", loss, sync_dist=True, batch_size=torch.ones_like(labels).sum())
        self.kept.update(self.layers(inputs).softmax(-1), labels)

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.kept.compute())
        self.kept.reset()

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": [p for p in self.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in self.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ]
        optimizer = self.optimizer(groups, lr=self.rate)
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40), "interval": "step"}
        ]


def of_matrices(groups: Any, lr: float) -> torch.optim.Optimizer:
    """Return one that updates some of the parameters; the gradients of others count in no norm."""
    return torch.optim.SGD(groups[:1], lr=50 * lr)


class Losses(Callback):
    def __init__(self) -> None:
        self.train: list[float] = []
        self.shapes: list[int] = []
        self.validation: list[float] = []
        self.metrics: list[float] = []

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.metrics.append(float(trainer.callback_metrics["accuracy"]))

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        self.train.append(float(trainer.callback_metrics["train_loss"]))
        self.shapes.append(len(outputs["outputs"]))
        if float(trainer.callback_metrics["first_class"]) != 100 * float(outputs["of_classes"][0]):
            self.metrics.append(-1.0)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        found = trainer.callback_metrics
        self.validation += [float(found[name]) for name in ("val_loss", "val_by_rows", "val_by_count")]
        self.metrics += [float(found[name]) for name in ("kept_f1", "kept_rank")]


class Version(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.number = 1

    def get_extra_state(self) -> Any:
        return {"number": self.number}

    def set_extra_state(self, state: Any) -> None:
        self.number = state["number"]


class Other(Classifier):
    """Batches of two loaders, a state that is no tensor, and a hook at the end of training."""

    def __init__(self) -> None:
        super().__init__()
        self.version = Version()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first, second = (super(Other, self).training_step(batch[name], batch_idx)["loss"] for name in ("a", "b"))
        return first + second

    def on_train_start(self) -> None:
        self.version.number = 2

    def on_train_end(self) -> None:
        self.at_end = {name: tensor.clone() for name, tensor in self.layers.state_dict().items()}


def run_other(strategy: Any, folder: Path) -> dict[str, Any]:
    """Search a learning rate, train, and read the checkpoint in a plain module."""
    lightning.seed_everything(1, verbose=False)
    module = Other()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        precision="64-true",
        max_epochs=1,
        callbacks=[ModelCheckpoint(folder)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loaders = {"a": DataLoader(rows(40, 0), 4), "b": DataLoader(rows(16, 1), 4)}
    Tuner(trainer).lr_find(module, loaders, num_training=5, update_attr=False, attr_name="rate")
    trainer.fit(module, loaders)
    state = module.layers.state_dict()
    assert all(torch.equal(module.at_end[name], tensor) for name, tensor in state.items())
    plain = Other().double()
    trainer.validate(plain, DataLoader(rows(20, 1), 4), ckpt_path="best", verbose=False)
    assert module.version.number == plain.version.number == 2
    assert all(torch.equal(plain.layers.state_dict()[name], tensor) for name, tensor in state.items())
    return {"state": {name: tensor.tolist() for name, tensor in state.items()}}


def rows(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 7, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, torch.randint(0, 4, (count,), generator=generator))


def run(
    strategy: Any,
    batch: int,
    steps: int = 20,
    accumulate: int = 1,
    folder: Path | None = None,
    resume: Any = None,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
) -> dict[str, Any]:
    """Train from one beginning. `batch`: of a data part."""
    lightning.seed_everything(1, verbose=False)
    module, losses = Classifier(optimizer), Losses()
    callbacks: list[Callback] = [losses]
    if folder is not None:
        callbacks.append(ModelCheckpoint(folder, save_last=True, every_n_train_steps=11))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        precision="64-true",
        max_steps=steps,
        gradient_clip_val=0.5,
        accumulate_grad_batches=accumulate,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=folder is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    train, validation = (
        DataLoader(rows(88, 0), batch, shuffle=True),
        DataLoader(rows(20, 1), batch),
    )  # the last one is short
    trainer.fit(module, train, validation, ckpt_path=resume)
    found = {
        "train": losses.train,
        "validation": losses.validation,
        "shapes": losses.shapes,
        "metrics": losses.metrics,
        "state": {name: tensor.tolist() for name, tensor in module.state_dict().items()},
    }
    if folder is not None:
        found["test"] = trainer.validate(Classifier(), validation, ckpt_path="best", verbose=False)[0]["val_loss"]
    return found


def main(out: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = {
        "ddp": run("ddp", 4),
        "dp=2,zero=1": run(NnscalerStrategy("dp=2,zero=1"), 4),
        "dp=2,zero=3": run(NnscalerStrategy("dp=2,zero=3"), 4),
        "dp=1,shard=2,zero=3": run(NnscalerStrategy("dp=1,shard=2,zero=3"), 4),
        "tp=2": run(NnscalerStrategy("tp=2"), 8),
        "pp=2": run(NnscalerStrategy("pp=2"), 8),
        "ddp, 3 batches a step": run("ddp", 4, 7, 3),
        "dp=2, 3 batches a step": run(NnscalerStrategy("dp=2,zero=2"), 4, 7, 3),
        "ddp, whole matrices": run("ddp", 4, optimizer=torch.optim.Adafactor),
        "dp=2, whole matrices": run(NnscalerStrategy("dp=2,zero=1,owned=1"), 4, optimizer=torch.optim.Adafactor),
        "ddp, some parameters": run("ddp", 4, optimizer=of_matrices),
        "dp=2, some parameters": run(NnscalerStrategy("dp=2,zero=1"), 4, optimizer=of_matrices),
        "first half": run(NnscalerStrategy("dp=2,zero=1"), 4, 11, folder=out / "first"),
        "second half": run(NnscalerStrategy("dp=2,zero=1"), 4, 20, resume=out / "first" / "last.ckpt"),
        "ddp, others": run_other("ddp", out / "ddp"),
        "dp=2, others": run_other(NnscalerStrategy("dp=2,zero=1"), out / "dp"),
        "under another plan": run(NnscalerStrategy("tp=2"), 8, 20, resume=out / "first" / "last.ckpt"),
    }
    if torch.distributed.get_rank() == 0:
        (out / "found.json").write_text(json.dumps(found))


def fork_second_rank() -> int:
    """Return the rank of each process: one imports Lightning, which takes longer than half of the runs, and both go on.
    They find each other as ranks that torchrun has started."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rank = 0 if os.fork() else 1
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    os.environ.update(place, RANK=str(rank), LOCAL_RANK=str(rank))
    return rank


if __name__ == "__main__":
    is_first = fork_second_rank() == 0
    main(Path(sys.argv[1]))
    assert not is_first or os.wait()[1] == 0, "the second rank failed"
