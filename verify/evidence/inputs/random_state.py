"""The generators whose state an operator could use behind its caller's back: torch's, numpy's and Python's own."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

States = Mapping[str, Any]


def states() -> States:
    """Return the state of every global generator, by the name it has in messages.

    numpy's only where numpy is loaded.
    """
    found: dict[str, Any] = {"torch's generator": torch.get_rng_state(), "Python's `random`": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        found["`numpy.random`"] = numpy.random.get_state()
    return found


def moved(before: States, after: States) -> list[str]:
    """Return the generators whose states differ."""
    return [name for name in before if _comparable(before[name]) != _comparable(after[name])]


def seed_all(seed: int) -> None:
    """Seed every global generator."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


@contextmanager
def kept() -> Iterator[None]:
    """Put all generators back as they were."""
    before = states()
    try:
        yield
    finally:
        torch.set_rng_state(before["torch's generator"])
        random.setstate(before["Python's `random`"])
        if "`numpy.random`" in before:
            sys.modules["numpy"].random.set_state(before["`numpy.random`"])


def _comparable(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.numpy().tobytes()
    return tuple(part.tobytes() if hasattr(part, "tobytes") else part for part in state)
