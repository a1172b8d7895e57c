"""Example models, loaded as the command line loads a user's file: under a private name."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@functools.cache
def load_example(name: str) -> ModuleType:
    """The module of `examples/<name>.py`, loaded once per process: it may register operators."""
    private = f"_example_{name}"
    spec = importlib.util.spec_from_file_location(private, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[private] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _models_are_traced_once(traced_once: None) -> None:
    """Many plans of few models."""


@pytest.fixture(scope="session")
def example() -> Callable[[str], ModuleType]:
    return load_example
