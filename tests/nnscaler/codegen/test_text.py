"""The text of rank programs: golden, deterministic, self-contained."""

from __future__ import annotations

import ast
import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

import nnscaler
from nnscaler.codegen.compiled_program import Program
from nnscaler.runtime.program.import_role_and_user_files import load_user_module
from nnscaler.transform.plan import Plan, RecomputeStep, ReplicateStep, SplitStep

COMPILE = """
import hashlib, torch, nnscaler
from nnscaler.runtime.program.import_role_and_user_files import load_user_module
gpt = load_user_module({file!r})
torch.manual_seed(0)
model = gpt.GPT(gpt.GPTConfig(layers=2))
program = nnscaler.parallelize(model, gpt.sample_inputs(), ranks=8, plan="dp=2,tp=2,pp=2", micro_batches=2)
texts = [*program.sources.values(), program.plan.to_json(), repr(program.manifest)]
print(hashlib.sha256("".join(texts).encode()).hexdigest())
"""


@pytest.fixture(scope="module")
def small(repository: Path) -> ModuleType:
    return load_user_module(str(repository / "tests" / "text" / "small.py"))


@pytest.fixture(scope="module")
def mlp(small: ModuleType) -> Program:
    """Column and row parallel: p, q and r by their outputs, and what follows from it. norm has whole gradients."""
    steps = SplitStep(("p", "q", "r"), "tp", "n"), ReplicateStep(("norm",), "tp")
    model, inputs = small.mlp()
    return nnscaler.parallelize(model, inputs, ranks=2, plan=Plan((("tp", 2),), steps))


@pytest.fixture(scope="module")
def chain(small: ModuleType) -> Program:
    model, inputs = small.chain()
    return nnscaler.parallelize(model, inputs, ranks=4, plan="dp=2,pp=2", micro_batches=3)


def test_golden_mlp(mlp: Program, golden: Callable[[str, str], None]) -> None:
    golden("mlp_tp2.txt", mlp.source(0))


def test_golden_pipeline(chain: Program, golden: Callable[[str, str], None]) -> None:
    golden("chain_dp2_pp2.txt", chain.source(0) + chain.source(2))


def test_three_projections_of_one_activation_cost_one_backward_all_reduce(mlp: Program) -> None:
    lines = mlp.source(0).splitlines()
    assert sum("= comm.replicate(layer_norm" in line for line in lines) == 1
    assert [re.search(r"comm\.\w+", line).group() for line in lines if "= comm." in line] == [  # type: ignore[union-attr]
        "comm.replicate",
        "comm.keep_first",  # the bias of the row-parallel projection, then x and y
        "comm.keep_first",
        "comm.keep_first",
        "comm.all_reduce",
    ]


def test_comments_name_the_models_line_and_the_layout(mlp: Program) -> None:
    text = mlp.source(0)
    assert "# small.py:20  h = self.norm(x)" in text
    line = next(line for line in text.splitlines() if line.strip().startswith("linear ="))
    assert line.endswith("  # (6, 12/tp)")


def test_a_program_imports_torch_and_the_runtime_only(mlp: Program, chain: Program) -> None:
    for source in (*mlp.sources.values(), *chain.sources.values()):
        imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
        names = {
            n for i in imports for n in ([i.module] if isinstance(i, ast.ImportFrom) else [a.name for a in i.names])
        }
        assert names == {"torch", "nnscaler.runtime"}


@pytest.mark.long
def test_two_processes_write_the_same_bytes(examples: Path) -> None:
    digests = set()
    for seed in ("1", "2"):
        command = [sys.executable, "-c", COMPILE.format(file=str(examples / "gpt.py"))]
        environment = {**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=examples.parent, check=True)
        digests.add(done.stdout.split()[-1])
    assert len(digests) == 1


def test_a_saved_program_is_complete(chain: Program, tmp_path: Path) -> None:
    path = chain.save(tmp_path / "program")
    names = {file.name for file in path.iterdir()}
    assert names == {"manifest.json", "plan.json", "graph.txt", "state.pt", "inputs.pt", "role_0.py", "role_1.py"}
    assert Plan.from_json((path / "plan.json").read_text()) == chain.plan
    for role in chain.manifest.roles:
        assert hashlib.sha256((path / role.file).read_bytes()).hexdigest() == role.sha256


def test_a_folder_with_other_things_is_not_overwritten(chain: Program, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("important")
    with pytest.raises(nnscaler.NnscalerError, match="is not empty and holds no program"):
        chain.save(tmp_path)


def test_recomputed_operations_become_a_function(small: ModuleType) -> None:
    model, inputs = small.mlp()
    plan = Plan((), (RecomputeStep(("p", "gelu")),))
    source = nnscaler.parallelize(model, inputs, ranks=1, plan=plan).source(0)
    assert "def recompute_0(layer_norm):" in source
    assert "gelu, = recompute(recompute_0, layer_norm)" in source


class Windowed(torch.nn.Module):
    """A constant of each kind of torch's factories that takes no sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        window = torch.bartlett_window(6) + torch.blackman_window(6) + torch.fft.fftfreq(6)
        return (x * self.w * (window + torch.hann_window(6))).sum()


def test_every_factory_takes_its_device_from_the_rank() -> None:
    """On a GPU, one that does not would meet tensors of another device."""
    program = nnscaler.parallelize(Windowed(), {"x": torch.ones(4, 6)}, ranks=2, plan="dp=2")
    lines = [line for line in program.sources["role_0.py"].splitlines() if "window" in line or "fftfreq" in line]
    made = [line for line in lines if re.search(r"= aten\.(\w+_window|fft_fftfreq)\b", line)]
    assert len(made) == 4, lines
    assert all("device=self.device" in line and "dtype=dtypes.float32" in line for line in made), made
