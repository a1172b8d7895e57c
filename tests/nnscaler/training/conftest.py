"""What trains: the same few models under many plans."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _models_are_traced_once(traced_once: None) -> None:
    """Engines, not traces, are asked about."""
