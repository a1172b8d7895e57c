"""`nnscaler train`: train a model as a file says, on local ranks or under torchrun."""

from __future__ import annotations

import argparse
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from nnscaler.cli.options import add_verbosity
from nnscaler.cli.output.exit_codes import ExitCode
from nnscaler.errors import NnscalerError
from nnscaler.is_user_file import OURS

if TYPE_CHECKING:
    from nnscaler.cli.output.console import Console
    from nnscaler.codegen.compiled_program import Program
    from nnscaler.training.train_settings import TrainSettings
    from nnscaler.training.trainer import Result, Trainer

_TOGETHER = (ExitCode.VERIFIED, ExitCode.INCONCLUSIVE, ExitCode.INTERRUPTED)  # with which all ranks of a run end

HEAD = """usage: nnscaler train RUN.toml [--name=value ...] [-q | -v] [--color WHEN]

Train the model that RUN.toml names, on data, with checkpoints. A whole run:

  model = "gpt.py"              # build_model() -> nn.Module; forward returns the loss
  plan = "dp=2,zero=1"          # how it lies on the ranks; without one, data parallel; "auto" searches
  steps = 1000

  [data]
  source = "text.py::datasets"  # returns the training data, or (training, validation)
  batch_size = 64               # of all ranks together

  [optimizer]
  name = "AdamW"                # of torch.optim
  lr = 3e-4

  [checkpoints]
  folder = "runs/a"             # the same command goes on from the newest

  nnscaler train RUN.toml --ranks=2 --steps=8 --dtype=float64 --checkpoints.folder=runs/b
  torchrun --nproc-per-node 8 -m nnscaler train RUN.toml

Without a terminal the console has a line for each step, `step 3  loss 2.302585092994046`. The manual: docs/train.md"""
NAME, HELP, DESCRIPTION, EPILOG = "train", "train a model as a file says", "", ""
CODES = """exit codes:
  0 trained   2 could not run, or a rank was lost (the message says why)
  3 a loss was not finite: the optimizer did not use it   101 a bug of nnScaler   130 interrupted   143 terminated"""


class _Help(argparse.Action):
    """Shows all options of a run; they are read only then."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(help_text(), end="")
        parser.exit()


def help_text() -> str:
    """Return what `nnscaler train --help` shows."""
    from nnscaler.training.read_settings import SHORT, all_options

    lines = [
        HEAD,
        "",
        "options, each also a key of the file (`--checkpoints.every=100` is `every` of [checkpoints]):",
    ]
    short = {path: name for name, path in SHORT.items()}
    for option in all_options():
        name = f"--{option.path}" + (f", --{short[option.path]}" if option.path in short else "")
        lines.append(f"  {name}={option.default}\n      {option.help}")
    lines += ["  --optimizer.ARGUMENT (--lr is --optimizer.lr), --schedule.ARGUMENT", "      of the class", "", CODES]
    return "\n".join(lines) + "\n"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes. The options of a run are checked by what reads its file."""
    parser.add_argument("-h", "--help", action=_Help, nargs=0)
    add_verbosity(parser)
    parser.add_argument("file", metavar="RUN.toml", type=Path)
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="--name=value")


def run(options: argparse.Namespace) -> int:
    """Train on this rank, or start the ranks of this machine and wait for them."""
    from nnscaler.training.read_settings import ranks_of, read_settings

    console: Console = options.console
    words = _without_verbosity(options, console)
    if words is None:
        return ExitCode.VERIFIED
    settings = read_settings(options.file, words)
    inside = "RANK" in os.environ
    ranks = ranks_of(settings)
    from nnscaler.training.run_ranks_as_processes import LOST, note_error, run_local_ranks

    if not inside and ranks > 1:
        console.progress(f"start        {ranks} ranks")
        silent = ["-q"] if console.verbosity == 0 else []
        every = ["train", *silent, f"--color={console.color}", str(options.file), *words]
        return run_local_ranks(every, ranks, _TOGETHER)
    # Threads of OpenMP wait for each other by spinning, which takes the processors away from those that are waited for.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        result = _fit(settings, console, os.environ.get("RANK", "0") == "0")
    except NnscalerError as error:
        told = note_error(error)
        if told and error.code == "rank_lost":  # another rank is the cause, and says so
            return LOST
        raise
    if result.ended == "not finite":
        what = f"the loss of step {result.steps} is {result.loss}"
        if result.loss is not None and abs(result.loss) < float("inf"):
            what = f"the gradients of step {result.steps} are not finite"
        console.error(f"error: {what}: stopped before the optimizer used it{_left(settings)}")
        return ExitCode.INCONCLUSIVE
    console.progress(f"{result.ended:<12} after step {result.steps}{_left(settings)}")
    return ExitCode.INTERRUPTED if result.ended == "interrupted" else ExitCode.VERIFIED


def _fit(settings: TrainSettings, console: Console, first: bool) -> Result:
    """Train. What the runtime finds wrong is the user's to read, without our frames."""
    from nnscaler.runtime.communication.communicator import CommunicationError, ProgramError
    from nnscaler.training.build_from_settings import told_of_dtypes
    from nnscaler.training.trainer import Trainer
    from verify.programs.static_check_of_recompiled_program import vouch

    def proved(program: Program) -> None:
        """Let no program run that is not the model's. Rank 0 calls it."""
        begin = time.perf_counter()
        try:
            vouch(program)
            console.progress(f"{'prove':<12} {time.perf_counter() - begin:5.1f} s  the text of {_size(program)}")
        except NnscalerError as error:
            if error.code != "program_unread":
                raise
            console.warning(error.message)

    told = console.progress if first else None
    trainer = Trainer(settings, write=console.result, progress=told, warn=console.warning, vouch=proved)
    try:
        with _ending_after_step(trainer, told or (lambda text: None)), _notes_told(console if first else None):
            return trainer.fit()
    except CommunicationError as error:
        help = "another rank has ended, or the connection; the same command goes on from the newest checkpoint"
        raise NnscalerError("rank_lost", str(error), help=help) from error
    except ProgramError as error:
        engine = getattr(trainer, "engine", None)
        raise NnscalerError("cannot_train", str(error), help=engine and told_of_dtypes(engine.program)) from error


@contextmanager
def _notes_told(console: Console | None) -> Iterator[None]:
    """Tell notes on the model as notes, once, and without our lines; None: another rank tells them."""
    with warnings.catch_warnings():
        others = warnings.showwarning

        def show(*shown: Any, **named: Any) -> None:
            message, _category, filename, *_ = shown
            if not filename.startswith(OURS):
                others(*shown, **named)
            elif console is not None:
                console.warning(str(message))

        warnings.showwarning = show
        yield


@contextmanager
def _ending_after_step(trainer: Trainer, told: Callable[[str], None]) -> Iterator[None]:
    """Let Ctrl-C end the run after its step, and a second one at once."""
    before = signal.getsignal(signal.SIGINT)
    asked = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if trainer.running and not asked:
            asked = True
            trainer.ask_to_stop()
            told("stopping     after this step; Ctrl-C once more stops at once")
        elif callable(before):
            before(number, frame)

    mine = threading.current_thread() is threading.main_thread()
    if mine:
        signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        if mine:
            signal.signal(signal.SIGINT, before)


def _size(program: Program) -> str:
    return ", ".join(f"{entry.name} {list(entry.shape)}" for entry in program.manifest.inputs)


def _left(settings: TrainSettings) -> str:
    folder = settings.checkpoints.folder
    return f"; checkpoints are in {folder}" if folder else ""


def _without_verbosity(options: argparse.Namespace, console: Console) -> Sequence[str] | None:
    """Return the words that are for the run, after obeying -q, -v and --color among them; None after --help."""
    parser = argparse.ArgumentParser(prog="nnscaler train", add_help=False, allow_abbrev=False)
    add_verbosity(parser)
    parser.add_argument("-h", "--help", action="store_true")
    given, words = parser.parse_known_args(options.words)
    if given.help:
        console.result(help_text().rstrip("\n"))
        return None
    quiet, verbose = options.quiet or given.quiet, options.verbose or given.verbose
    console.verbosity = 0 if quiet else 2 if verbose else 1
    console.color = given.color if given.color != "auto" else console.color
    return words
