"""A graph that was kept is not that of a user's operator whose code was changed, where torch sees no difference."""

from __future__ import annotations

from pathlib import Path

import pytest

from nnscaler.runtime.jobs.job import JobSpecification
from nnscaler.runtime.jobs.launcher import ForkServer, launch

# The names, the nodes of the graphs and what they are given stay: of the operator of torch.library its derivative is
# changed, in a file that the user's imports, and of the Function what its backward calls.
OPERATORS = """
import torch
import nnscaler
import slope

@torch.library.custom_op("edited::scaled", mutates_args=())
def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * 2.0

scaled.register_fake(torch.empty_like)
scaled.register_autograd(lambda ctx, g: slope.of(g))
nnscaler.register_op("n d -> n d")(scaled)

@torch.compiler.allow_in_graph
def handed_back(g: torch.Tensor) -> torch.Tensor:
    return g * 3.0

@nnscaler.register_op("n d -> n d")
class Handed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 3.0
    @staticmethod
    def backward(ctx, g):
        return handed_back(g)

class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2, 3))
        self.both = NAME

    def forward(self, x):
        return self.both(x * self.weight).square().sum()
"""
FUNCTIONS = Path(__file__).with_name("compiled_rank_functions.py")
SLOPE = "def of(g): return g * 2.0\n"
CALLS = {"torch.library": "scaled", "Function": "Handed.apply"}


@pytest.mark.long  # to make kernels takes half a minute
@pytest.mark.parametrize("kind", CALLS)
def test_the_changed_code_runs(server: ForkServer, kind: str, tmp_path: Path) -> None:
    file, slope = tmp_path / "operators.py", tmp_path / "slope.py"
    arguments = {"file": str(file), "cache": str(tmp_path / "cache")}
    job = JobSpecification(f"{FUNCTIONS}:gradients_of_model", 1, arguments)
    text = OPERATORS.replace("NAME", CALLS[kind])
    changed = (
        (text, SLOPE.replace("2.0", "5.0")) if kind == "torch.library" else (text.replace("g * 3.0", "g * 7.0"), SLOPE)
    )
    found = []
    for texts in ((text, SLOPE), (text, SLOPE), changed):
        file.write_text(texts[0])
        slope.write_text(texts[1])
        ((hits, compiled, plain),) = launch(job, timeout=600, server=server).results()
        assert compiled == pytest.approx(plain)
        found.append((hits, plain))
    (no_hits, before), (hits, again), (stale, after) = found
    assert hits > no_hits == stale == 0
    assert before == again != after
