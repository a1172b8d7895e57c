"""Models traced once per test process, and programs made from them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from nnscaler.codegen.program import Program
from nnscaler.compile import compile_traced
from nnscaler.tracing import Traced, trace

Compile = Callable[..., Program]


def load(path: Path) -> ModuleType:
    name = f"static_example_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def traced_example(examples: Path) -> Callable[[str], Traced]:
    known: dict[str, Traced] = {}

    def get(name: str) -> Traced:
        if name not in known:
            module = load(examples / f"{name}.py")
            known[name] = trace(module.build_model(), module.sample_inputs())
        return known[name]

    return get


@pytest.fixture(scope="session")
def compile_example(traced_example: Callable[[str], Traced]) -> Compile:
    def compile_it(name: str, plan: Any, micro_batches: int | None = 1) -> Program:
        if isinstance(plan, str):
            ranks = prod(int(part.partition("=")[2]) for part in plan.split(","))
        else:
            ranks = plan.ranks
        traced = traced_example(name)
        return compile_traced(traced, ranks=ranks, plan=plan, micro_batches=micro_batches, model={"name": name})

    return compile_it
