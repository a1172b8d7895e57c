"""State that forward changes beside the attributes of modules: objects, containers in one another, classes, globals."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nnscaler.errors import NnscalerError
from nnscaler.tracing import trace

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
COUNTS, LIMIT, READY = [0], 7, False


class Plain:
    def __init__(self) -> None:
        self.n = 0
        self.itself = self  # a circle


class Slotted:
    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n = 0


class Shared:
    n = 0


class Model(nn.Module):
    """`count` changes something, and returns how often it has."""

    def __init__(self, held: Any, count: Callable[[Any], int], matters: bool) -> None:
        super().__init__()
        self.proj, self.held, self.count, self.matters = nn.Linear(6, 6), held, count, matters

    def forward(self, x: Tensor) -> Tensor:
        count = self.count(self.held)
        return self.proj(x).square().sum() * (count if self.matters else 1)


def of_attribute(held: Any) -> int:
    held.n += 1
    return int(held.n)


def of_containers(held: Any) -> int:
    held["a"][0]["n"] += 1
    return int(held["a"][0]["n"])


def of_deque(held: Any) -> int:
    held.append(len(held))
    return len(held)


@pytest.mark.parametrize(
    ("make", "count", "told"),
    [
        (Plain, of_attribute, "held.n: 0 -> 1"),
        (Slotted, of_attribute, "held.n: 0 -> 1"),
        (lambda: {"a": ({"n": 0},)}, of_containers, "held['a'][0]['n']: 0 -> 1"),
        (deque, of_deque, "held: 0 items -> 1 items"),
    ],
)
def test_what_a_module_holds(make: Callable[[], Any], count: Callable[[Any], int], told: str) -> None:
    model = Model(make(), count, matters=False)
    with pytest.warns(UserWarning, match="forward changes attributes that are no buffers"):
        notes = trace(model, (X,)).notes
    assert told in notes[0]
    assert count(model.held) == 1, "as if it had not been traced"
    with pytest.raises(NnscalerError, match="and with them the loss differs in the next forward") as caught:
        trace(Model(make(), count, matters=True), (X,))
    assert caught.value.code == "trace_unfaithful" and told in caught.value.message


class Once(nn.Module):
    """Counts what is there once in the process."""

    steps = 0
    matters = False

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        global LIMIT, READY  # noqa: PLW0603 - as a user may
        Once.steps += 1
        Shared.n += 1
        COUNTS[0] += 1
        LIMIT += 1
        READY = True
        return self.proj(x).square().sum() * (Once.steps if Once.matters else 1)


def test_classes_and_globals(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(UserWarning, match="forward changes attributes that are no buffers"):
        (note,) = trace(Once(), (X,)).notes
    assert "global LIMIT: 7 -> 8" in note and note.endswith(", ...")
    assert (Once.steps, Shared.n, COUNTS, LIMIT) == (0, 0, [0], 7), "as if it had not been traced"
    assert READY, "what a flag guards is not undone either"
    monkeypatch.setattr(Once, "matters", True)
    with pytest.raises(NnscalerError, match=r"Once\.steps: 0 -> 1|global LIMIT"):
        trace(Once(), (X,))


class Large(nn.Module):
    """Data, and what repeats itself, cost nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.rows = nn.Linear(6, 6), [[0] * 10_000]
        self.counts = itertools.count()

    def forward(self, x: Tensor) -> Tensor:
        self.rows[0][0] += next(self.counts)
        return self.proj(x).sum()


def test_what_is_left_alone() -> None:
    assert trace(Large(), (X,)).notes == ()
