"""Loggers, which are told how a run goes: the console, TensorBoard, Weights & Biases. On rank 0 alone."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from nnscaler.errors import NnscalerError
from nnscaler.training.train_settings import LoggerSettings, TrainSettings

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


@dataclass(frozen=True)
class StepReport:
    """A step of the optimizer.

    step, steps  which, of how many; 0: that is not known
    loss         of its batches
    rate         learning rate of the first group
    norm         of all gradients, where they are clipped
    seconds      that it took
    tokens       of its batches: elements of the first input
    utilisation  floating point operations of the model a second, as a part of what the devices can do; None: not known
    memory       bytes at most in use on this rank
    """

    step: int
    steps: int
    loss: float
    rate: float
    norm: float | None
    seconds: float
    tokens: int
    utilisation: float | None
    memory: int


@dataclass(frozen=True)
class ValidationReport:
    """A validation after a step.

    step     after which
    loss     mean over its batches, weighted by their rows
    batches  that were read
    seconds  that it took
    """

    step: int
    loss: float
    batches: int
    seconds: float


class Logger(Protocol):
    """A receiver of a run's reports."""

    def step(self, report: StepReport) -> None: ...
    def validation(self, report: ValidationReport) -> None: ...
    def close(self) -> None: ...


class ConsoleLogger:
    """A line for each step: `step 3  loss 2.302585092994046`, with all digits of the loss."""

    def __init__(self, write: Callable[[str], None], every: int) -> None:
        self._write, self._every = write, every

    def step(self, report: StepReport) -> None:
        """Print the loss."""
        if report.step % self._every == 0 or report.step == report.steps:
            self._write(f"step {report.step}  loss {report.loss!r}")

    def validation(self, report: ValidationReport) -> None:
        """Print the loss."""
        self._write(f"step {report.step}  validation loss {report.loss!r}")

    def close(self) -> None:
        """Nothing is open."""


class ProgressLogger:
    """A bar on a terminal, with what a step takes; validations keep a line of their own."""

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def step(self, report: StepReport) -> None:
        """Draw the bar."""
        if self._bar is None:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (BarColumn(24), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
            self._bar = Progress(*columns)
            self._bar.start()
            self._task = self._bar.add_task("", total=report.steps or None)
        assert self._task is not None
        self._bar.update(self._task, completed=report.step, description=described(report))

    def validation(self, report: ValidationReport) -> None:
        """Print the loss above the bar."""
        if self._bar is not None:
            self._bar.print(f"step {report.step}  validation loss {report.loss:.6g}")

    def close(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.stop()


def described(report: StepReport) -> str:
    """Return `loss 2.31  1.2k tokens/s  MFU 31%  412 MB`."""
    words = [f"loss {report.loss:.5g}", f"{_short(report.tokens / max(report.seconds, 1e-9))} tokens/s"]
    if report.utilisation is not None:
        words.append(f"MFU {report.utilisation:.0%}")
    return "  ".join([*words, f"{_short(report.memory)}B"])


def _short(number: float) -> str:
    for unit in ("", "k", "M", "G"):
        if number < 1000:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}T"


class TensorBoardLogger:
    """Scalars for TensorBoard, by step."""

    def __init__(self, folder: str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise _missing("tensorboard", "loggers.tensorboard") from None
        self._writer: Any = SummaryWriter(folder)

    def step(self, report: StepReport) -> None:
        """Write what a step gives."""
        for name, value in scalars(report).items():
            self._writer.add_scalar(name, value, report.step)

    def validation(self, report: ValidationReport) -> None:
        """Write the loss."""
        self._writer.add_scalar("validation/loss", report.loss, report.step)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


class WandbLogger:
    """A run of Weights & Biases."""

    def __init__(self, project: str, settings: TrainSettings) -> None:
        from dataclasses import asdict

        try:
            wandb = import_module("wandb")
        except ImportError:
            raise _missing("wandb", "loggers.wandb") from None
        self._run: Any = wandb.init(project=project, config=asdict(settings))

    def step(self, report: StepReport) -> None:
        """Send what a step gives."""
        self._run.log(scalars(report), step=report.step)

    def validation(self, report: ValidationReport) -> None:
        """Send the loss."""
        self._run.log({"validation/loss": report.loss}, step=report.step)

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()


def scalars(report: StepReport) -> dict[str, float]:
    """Return the numbers of a step, by the names that loggers give them."""
    found: dict[str, float | None] = {
        "train/loss": report.loss,
        "train/rate": report.rate,
        "train/norm": report.norm,
        "speed/seconds": report.seconds,
        "speed/tokens": report.tokens / max(report.seconds, 1e-9),
        "speed/mfu": report.utilisation,
        "memory/bytes": report.memory,
    }
    return {name: value for name, value in found.items() if value is not None}


def make_loggers(settings: TrainSettings, write: Callable[[str], None] | None) -> Sequence[Logger]:
    """Return the loggers of a run on rank 0. `write`: takes the console's lines; None: standard output.

    Raises NnscalerError `not_installed` where one needs a package that is not there.
    """
    chosen: LoggerSettings = settings.loggers
    found: list[Logger] = []
    if sys.__stdout__ is not None and sys.__stdout__.isatty():
        found.append(ProgressLogger())
    else:
        found.append(ConsoleLogger(write or _print, chosen.every))
    if chosen.tensorboard:
        found.append(TensorBoardLogger(chosen.tensorboard))
    if chosen.wandb:
        found.append(WandbLogger(chosen.wandb, settings))
    return found


def memory_in_use(device: torch.device) -> int:
    """Return the bytes at most in use by this process: on its GPU, else in all."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _missing(package: str, option: str) -> NnscalerError:
    return NnscalerError("not_installed", f"`{option}` needs {package}", help=f"pip install {package}")


class StepProfiler:
    """Traces the steps that the settings say, and writes the trace of this rank."""

    def __init__(self, settings: TrainSettings, rank: int) -> None:
        self._wanted, self._rank = settings.profiler, rank
        self._running: Any = None

    def before(self, step: int) -> None:
        """Start before the first of the steps, and write after the last."""
        if step == self._wanted.last + 1:
            self._write()
        if self._wanted.last and step == self._wanted.first:
            self._running = torch.profiler.profile()
            self._running.start()

    def _write(self) -> None:
        if self._running is not None:
            self._running.stop()
            folder = Path(self._wanted.folder)
            folder.mkdir(parents=True, exist_ok=True)
            self._running.export_chrome_trace(str(folder / f"rank_{self._rank}.json"))
            self._running = None

    def __enter__(self) -> StepProfiler:
        return self

    def __exit__(self, *error: object) -> None:
        self._write()
