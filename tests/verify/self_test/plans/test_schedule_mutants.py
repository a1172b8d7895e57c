"""Wrong schedules of every kind: passes and halves of a step, stages, messages, runs of layers, updates and versions of
a stream. All are refuted by the text alone; bugs of what runs a stream, by running it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from nnscaler.runtime.training.async_pipeline import StreamExecutor, Versions
from tests.sampling import every
from verify.self_test.programs.judge_mutant import Execution, read_statically
from verify.self_test.programs.mutants import runtime_faults, schedule
from verify.self_test.programs.mutants.editable_program_and_edits import MutationOperator
from verify.self_test.programs.mutants.mutant import apply_edits
from verify.self_test.programs.right_programs import TINY, build

# of the programs in which the kinds have a place: a step with pipelines and tensor parallelism, recycling, a stream;
# stages that devices share, slices, and orders that were searched
PROGRAMS = ("staged", "recycled", "stream", "interlaced", "sliced", "searched")
EVERY = schedule.OPERATORS
# Bugs of what runs a stream.


def no_stashing() -> AbstractContextManager[None]:
    """A backward goes through the newest parameters, whichever its forward read."""
    return patch.object(Versions, "begin", lambda self: None)


def stale_forward() -> AbstractContextManager[None]:
    """A forward reads the version before the newest one."""

    def read(self: Versions, batch: int) -> None:
        right(self, batch)
        last = self._places[(self._made - 1) % self._stage.versions] if self._made else None
        if last is not None and len(self._places) > 1:
            self._leaves[batch] = {name: torch.nn.Parameter(value.clone()) for name, value in last.items()}
            self.again(batch)

    right = Versions.read
    return patch.object(Versions, "read", read)


def repeated_update(times: int) -> runtime_faults.Fault:
    """Add to the parameters so many times what an update adds."""

    def apply(self: StreamExecutor, *given: Any) -> None:
        before = {p: p.detach().clone() for p in self.parameters.values()}
        right(self, *given)
        with torch.no_grad():
            for p, old in before.items():
                p.copy_(old + times * (p - old))

    right = StreamExecutor._apply
    return lambda: patch.object(StreamExecutor, "_apply", apply)


def update_before_the_sum() -> AbstractContextManager[None]:
    """An update takes the gradient of this rank's rows, before the sum over data parts."""
    return runtime_faults.summing(lambda held, own, total, _: own)


FAULTS: dict[str, tuple[Callable[[], AbstractContextManager[None]], str]] = {
    # bugs of what runs a right stream, and what is said of each
    "no stashing": (no_stashing, "stashing is missing"),
    "stale forward": (stale_forward, "one update older than its staleness says"),
    "double update": (repeated_update(2), "the loss of batch 0 of step 1"),
    "missing update": (repeated_update(0), "one update older than its staleness says"),
    "update before the sum over data parts": (
        update_before_the_sum,
        "an all_reduce over dp is missing",
    ),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Execution]:
    found = {}
    for name in PROGRAMS:
        folder: Path = tmp_path_factory.mktemp("program")
        found[name] = Execution(build(TINY[name], folder), folder, apart=False)
    return found


def one_each(right: Execution) -> list[tuple[MutationOperator, dict[str, str]]]:
    """Return a mutant of each kind that the program has a place for: in the middle of its places."""
    subject, found = right.base.subject, []
    for operator in EVERY:
        places = operator.places(subject)
        if places:
            sources = subject.program.sources
            found.append((operator, {**sources, **apply_edits(sources, places[len(places) // 2])}))
    return found


@pytest.mark.long
def test_right_programs_pass(made: dict[str, Execution]) -> None:
    for name, right in made.items():
        sources = dict(right.base.subject.program.sources)
        read = read_statically(sources, right.base.subject.program.graph)
        assert not read.refuted and not read.undecided, (name, read.said)
        answer = right.judge(sources).answer
        assert not answer.refuted and not answer.undecided, (name, answer.said)


@pytest.mark.long
def test_every_kind_is_refuted_by_the_text(made: dict[str, Execution]) -> None:
    """One mutant of each kind in each program: 40 kinds at least, each in some program."""
    kinds, count = set(), 0
    for name, right in made.items():
        for operator, sources in one_each(right):
            read = read_statically(sources, right.base.subject.program.graph)
            assert read.refuted, (name, operator.kind)
            kinds.add(operator.kind)
            count += 1
    assert kinds == {operator.kind for operator in EVERY} and len(kinds) >= 40 and count >= 80


@pytest.mark.long
def test_wrong_updates_are_refuted_by_running(made: dict[str, Execution]) -> None:
    """Or the runtime refuses to begin: nothing is compared that a wrong order computed."""
    right = made["stream"]
    own = set(schedule.STREAMS)
    for operator, sources in one_each(right):
        if operator.kind in own:
            answer = right.judge(sources).answer
            assert answer.refuted, (operator.kind, answer.said)


@pytest.mark.parametrize("fault", every(2, FAULTS))
def test_a_right_text_that_is_run_wrongly(made: dict[str, Execution], fault: str) -> None:
    wrong, said = FAULTS[fault]
    answer = made["stream"].judge(made["stream"].base.subject.program.sources, wrong).answer
    assert answer.refuted and said in answer.said, answer.said
