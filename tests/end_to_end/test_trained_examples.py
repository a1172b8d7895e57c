"""Every example is in the table of examples/README.md, its commands run, and what trains learns as the table says.

By default the table is compared with the folder, and an example takes a few steps on its data, under a plan, as the
eager model does. The commands themselves are `long`.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import nnscaler
from nnscaler.runtime.program.import_role_and_user_files import load_user_module
from nnscaler.training.engine import Engine
from tests.nnscaler.training.test_engine import on_ranks
from tests.sampling import only

Load = Callable[[str], ModuleType]

FOLDER = Path(__file__).resolve().parents[2] / "examples"
CODE = re.compile(r"`([^`]+)`")
SECONDS = 900


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    files: Sequence[str]
    verify: Sequence[str]
    train: Sequence[str]
    losses: tuple[float, float] | None


def read_table() -> list[Row]:
    lines = (FOLDER / "README.md").read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")]
    found = []
    for files, _, verify, train, losses, _ in cells:
        numbers = [float(number) for number in losses.split(" - ")] if losses else []
        codes = [CODE.findall(cell) for cell in (files, verify, train)]
        found.append(Row(*codes, (numbers[0], numbers[1]) if numbers else None))
    return found


TABLE = read_table()


@pytest.fixture(scope="session")
def load() -> Load:
    """A file of the folder as a module, once: it may register operators."""
    return cache(lambda name: load_user_module(str(FOLDER / name)))


def test_every_example_is_in_the_table() -> None:
    listed = sorted(name for row in TABLE for name in row.files)
    there = [str(file.relative_to(FOLDER)) for file in FOLDER.rglob("*") if file.suffix in (".py", ".toml")]
    assert listed == sorted(there)


def test_every_example_has_its_commands() -> None:
    """What is verified or trained is the row's own; a command that trains has the losses between which it is tested."""
    assert len(TABLE) > 15
    for row in TABLE:
        assert row.verify or row.train
        assert bool(row.train) == (row.losses is not None)
        for command in (*row.verify, *row.train):
            assert any(f"examples/{name}" in command for name in row.files), command
        assert row.losses is None or row.losses[1] < row.losses[0]


# -- a few steps ------------------------------------------------------------------------------------------------------

# model, data, plan: one of a model with operators of its own by default
TRAINED = [
    ("custom_op.py", "train_gpt.py", "dp=2"),
    ("retnet.py", "train_gpt.py", "tp=2"),
    ("yoco.py", "train_gpt.py", "tp=2"),
    ("deepseek_moe.py", "train_gpt.py", "tp=2"),
    ("deepseek_moe.py", "train_gpt.py", "dp=2"),
    ("long_rope.py", "long_rope.py", "cp=2"),
    ("vit_hf.py", "train_vit.py", "tp=2"),
    ("t5_hf.py", "train_t5.py", "tp=2"),
    ("train_evoformer.py", "train_evoformer.py", "tp=2"),
]
STEPS, ROWS = 4, 6


class InFloat64(TorchFunctionMode):
    """Computes in float64 what a model computes in float32 of its own, as programs do whose dtype is float64."""

    def __enter__(self) -> Any:
        torch.set_default_dtype(torch.float64)
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        torch.set_default_dtype(torch.float32)

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        function = torch.Tensor.double if function is torch.Tensor.float else function
        return function(*map(wide, args), **{name: wide(value) for name, value in (kwargs or {}).items()})


def loss_of(outputs: Any) -> Tensor:
    loss: Tensor = outputs if isinstance(outputs, Tensor) else outputs.loss
    return loss


@pytest.mark.long
@pytest.mark.parametrize(("model", "data", "plan"), only([0], TRAINED))
def test_it_takes_the_steps_of_the_eager_model(load: Load, model: str, data: str, plan: str) -> None:
    """On its data, by AdamW and the rate of warmup.py, in float64. With buffers that the steps change."""
    rows, _ = load(data).datasets()
    warmup_cosine = load("warmup.py").warmup_cosine
    samples = [
        {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in rows[i].items()}
        for i in range(ROWS)
    ]
    batch = torch.utils.data.default_collate(samples)

    def built() -> nn.Module:
        torch.manual_seed(0)
        made: nn.Module = load(model).build_model().double()
        return made.train()

    module = built()
    program = nnscaler.parallelize(module, batch, ranks=2, plan=plan)

    def course(step: Callable[[], Tensor], optimizer: torch.optim.Optimizer) -> tuple[list[float], list[float]]:
        schedule = warmup_cosine(optimizer, warmup=2, total_steps=STEPS)
        losses, rates = [], []
        for _ in range(STEPS):
            losses.append(float(step().detach()))
            rates += schedule.get_last_lr()[:1]
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        return losses, rates

    def parallel(engine: Engine) -> tuple[Any, Mapping[str, Tensor]]:
        [own] = engine.loader(samples, batch_size=ROWS)
        optimizer = engine.optimizer(torch.optim.AdamW, lr=0.01)
        return course(lambda: engine.step(own), optimizer), engine.state_dict()

    found = on_ranks(program, parallel)

    eager = built()

    def step() -> Tensor:
        with InFloat64():
            loss = loss_of(eager(**batch))
        loss.backward()
        return loss

    losses, rates = course(step, torch.optim.AdamW(eager.parameters(), lr=0.01))
    assert rates[:2] == pytest.approx([0.005, 0.01]) and rates[-1] < rates[-2] < 0.0101
    assert losses[-1] < losses[0]
    for (found_losses, found_rates), state in found:
        assert found_rates == rates
        assert found_losses == pytest.approx(losses, rel=1e-9)
        for name, tensor in eager.state_dict().items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-6, atol=1e-9)


# -- commands ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with the examples, in which nothing was trained before."""
    for folder in ("examples", "docs"):
        shutil.copytree(FOLDER.parent / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def execute(command: str, place: Path) -> str:
    """Return what the command prints in this folder. A command that fails fails the test."""
    words = shlex.split(command)
    started = {"nnscaler": [sys.executable, "-m", "nnscaler"], "python": [sys.executable]}[words[0]]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [*started, *words[1:]],
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.long
@pytest.mark.parametrize("command", [command for row in TABLE for command in row.verify])
def test_it_is_verified(command: str, place: Path) -> None:
    assert execute(command, place).rstrip().splitlines()[-1].startswith("VERIFIED")


@pytest.mark.long
@pytest.mark.timeout(4 * SECONDS)
@pytest.mark.parametrize("row", [row for row in TABLE if row.train], ids=lambda row: row.files[0])
def test_it_learns(row: Row, place: Path) -> None:
    """The last command of the row ends where the table says; those before it make what it starts from."""
    [*_, printed] = [execute(command, place) for command in row.train]
    trained = [float(text) for text in re.findall(r"(?<!validation )(?:loss|generator) (\S+)", printed)]
    if apart := re.search(r"energy distance (\S+) before, (\S+) after", printed):
        trained = [float(text) for text in apart.groups()]
    kept = [float(text) for text in re.findall(r"validation loss (\S+)", printed)]
    assert row.losses is not None
    first, last = row.losses
    assert trained[0] == pytest.approx(first, rel=0.05)
    assert (kept or trained)[-1] < last + 0.1 * (first - last)


RUNS = [
    (file.name, words)
    for file in sorted(FOLDER.glob("*.toml"))
    for words in re.findall(
        rf"#   nnscaler train examples/{file.name} (--ranks=2 .*)", file.read_text(encoding="utf-8")
    )
]


@pytest.mark.long
@pytest.mark.timeout(4 * SECONDS)
@pytest.mark.parametrize(("file", "words"), RUNS)
def test_the_other_plan_of_a_run_prints_the_same_losses(file: str, words: str, place: Path) -> None:
    """What the head of each file names beside the run on one rank."""
    short = "--steps=3 --dtype=float64 --batch_size=8 --validation.every=0"
    row = next(row for row in TABLE if file in row.files)
    for command in row.train[:-1]:
        execute(command, place)
    alone, divided = (
        re.findall(r"loss (\S+)", execute(f"nnscaler train examples/{file} {options} {short}", place))
        for options in ("--ranks=1 --plan=dp=1 --checkpoints.folder=", f"{words} --checkpoints.folder=")
    )
    assert len(alone) == 3
    assert [float(text) for text in divided] == pytest.approx([float(text) for text in alone], rel=1e-9)


@pytest.mark.long
def test_a_loop_prints_what_the_run_of_its_file_does(place: Path) -> None:
    """warmup.py in Python, and warmup.toml."""
    loop = execute("python examples/warmup.py", place)
    run = execute("nnscaler train examples/warmup.toml", place)
    rates = [float(text) for text in re.findall(r"rate (\S+)", loop)]
    assert re.findall(r"loss (\S+)", loop) == re.findall(r"loss (\S+)", run)
    assert len(rates) == 60 and max(rates) == 1e-2 and rates[0] < 1e-3 and rates[-1] < 2e-3
