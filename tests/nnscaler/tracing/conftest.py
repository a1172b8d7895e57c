"""The library of models that tracing is tested on."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def hf() -> ModuleType:
    """`transformers`, imported by the first test that needs it: every worker collects all tests, and it takes long."""
    return import_module("transformers")
