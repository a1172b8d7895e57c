"""Compiled examples, each once per process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nnscaler.ir.graph import Graph
from tests.verify.lemmas.planted import planned as make_planned
from verify.programs.typing import Obligation

Planned = tuple[Graph, tuple[Obligation, ...]]


@pytest.fixture(scope="session")
def planned() -> Callable[..., Planned]:
    """planned(example, plan, ranks, micro_batches): the graph, and the obligations of the plan."""
    known: dict[tuple[object, ...], Planned] = {}

    def plan(name: str, spec: str = "dp=2,tp=2,pp=2", ranks: int = 8, micro_batches: int = 2) -> Planned:
        key = name, spec, ranks, micro_batches
        if key not in known:
            known[key] = make_planned(name, spec, ranks, micro_batches)
        return known[key]

    return plan
