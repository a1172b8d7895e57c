"""The examples, each traced once per test process, and compiled once per plan. What is shared is not changed."""

from __future__ import annotations

from functools import cache
from math import prod
from pathlib import Path

from nnscaler.codegen.compiled_program import Program
from nnscaler.compile import WantedPlan, compile_traced
from nnscaler.model_file import ModelFile, load_model_file
from nnscaler.tracing import Traced, trace

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@cache
def loaded(name: str) -> ModelFile:
    """`examples/<name>.py`, as the command line loads it."""
    return load_model_file(str(EXAMPLES / f"{name}.py"), 0)


@cache
def traced(name: str) -> Traced:
    """The model of `examples/<name>.py`, compared with its graph."""
    return trace(loaded(name).build(), loaded(name).inputs)


@cache
def compiled(name: str, plan: str, micro_batches: int | None = 1) -> Program:
    """The program of an example for a plan whose axes make up its ranks: `dp=2,tp=2`."""
    ranks = prod(int(part.partition("=")[2]) for part in plan.split(","))
    return compile_traced(traced(name), WantedPlan(ranks, plan, micro_batches=micro_batches), model={"name": name})
