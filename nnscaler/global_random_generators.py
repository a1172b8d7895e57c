"""Keep, set and seed the global random generators, by module: torch's, Python's own, and numpy's where it is loaded."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

States = Mapping[str, Any]


def states() -> States:
    """Return the states of all generators."""
    import torch

    return {"torch": torch.get_rng_state(), **python_states()}


def python_states() -> States:
    """Return the states of Python's generators: a program has none of them."""
    numpy, found = sys.modules.get("numpy"), {"random": random.getstate()}
    if numpy is not None:  # its legacy form warns of generators of another kind than the usual one
        found["numpy.random"] = numpy.random.get_state(legacy=False)
    return found


def set_states(found: States) -> None:
    """Go on from states that one of these functions gave."""
    import torch

    if "torch" in found:
        torch.set_rng_state(found["torch"])
    random.setstate(found["random"])
    if "numpy.random" in found:
        sys.modules["numpy"].random.set_state(found["numpy.random"])


def moved(before: States, after: States) -> list[str]:
    """Return the generators that gave numbers."""
    return [name for name, state in after.items() if name not in before or _bytes(state) != _bytes(before[name])]


def seed_all(seed: int) -> None:
    """Seed all generators."""
    import torch

    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def _bytes(state: Any) -> bytes:
    return state.numpy().tobytes() if hasattr(state, "numpy") else pickle.dumps(state)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Put all generators back to where they were."""
    before = states()
    try:
        yield
    finally:
        set_states(before)
