"""The parts of the executors, each by itself."""

from __future__ import annotations

import os
import pickle
import random
import sys
from collections import Counter, deque
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.distributed as dist

from nnscaler.runtime.communication.communicator import CommunicationCall, CommunicationError
from nnscaler.runtime.keep_freed_memory import kept_memory
from verify import child_processes
from verify.external.ranks.call_sites import is_program, place_in_stack, place_of_call, place_of_error, traceback_of
from verify.external.ranks.collective_semantics import CollectiveShare, answer, disagreement_of
from verify.external.ranks.globals_of_ranks import VARIABLES, environment_of, load_state, save_state
from verify.external.ranks.processes.logged_gloo_group import CallReader, CallWriter, Entry
from verify.external.ranks.run_ranks_here_or_in_child import run_ranks
from verify.external.ranks.run_result import RankCall, RanksFailed
from verify.external.ranks.threads.exchange import WatchedTensors
from verify.results.finding_codes import CATALOGUE
from verify.self_test.external import models


def call(kind: str = "all_reduce", shape: tuple[int, ...] = (2,), **fields: object) -> CommunicationCall:
    return CommunicationCall(kind, (0, 1), (shape,), torch.float32, **fields)  # type: ignore[arg-type]


# -- answers ----------------------------------------------------------------------------------------------------------


def test_a_rank_that_gives_more_than_another_takes() -> None:
    given, taken = torch.zeros(2), torch.zeros(3)
    parts = [
        CollectiveShare(0, call("broadcast"), ((given,),), ((given,),)),
        CollectiveShare(1, call("broadcast"), ((taken,),), ((taken,),)),
    ]
    with pytest.raises(CommunicationError, match=r"rank 0 gives float32\[2\] where rank 1 takes float32\[3\]"):
        answer(parts, 0)


def test_tensors_that_do_not_lie_in_a_piece() -> None:
    values = [torch.arange(6.0).view(2, 3).t(), torch.ones(3, 2)]
    parts = [CollectiveShare(0, call(reduction="sum"), ((value,),), ((value,),)) for value in values]
    answer(parts, None)
    assert values[0].tolist() == values[1].tolist() == [[1.0, 4.0], [2.0, 5.0], [3.0, 6.0]]


def test_a_sum_does_not_overwrite_what_a_later_rank_gives() -> None:
    values = [torch.ones(4), torch.full((4,), 2.0), torch.full((4,), 4.0)]
    target = values[2]  # the root takes into what it gives
    parts = [CollectiveShare(0, call("reduce", reduction="sum"), ((value,),), ((value,),)) for value in values]
    answer(parts, 2)
    assert target.tolist() == [7.0] * 4
    assert values[0].tolist() == [1.0] * 4


# -- agreement --------------------------------------------------------------------------------------------------------


def test_what_ranks_must_agree_on() -> None:
    assert disagreement_of(0, 0, call(), 1, call()) is None
    assert disagreement_of(0, 0, call(shape=()), 1, call(shape=(1, 1))) is None
    assert disagreement_of(0, 0, call("all_to_all", (2,)), 1, call("all_to_all", (3,))) is None
    text = disagreement_of(4, 0, call(place="a.py:1"), 1, call(shape=(3,), place="b.py:2"))
    assert text == (
        "ranks of one group give different shapes (call 4 of the group):\n"
        "  rank 0: all_reduce float32[2] over ranks (0, 1) at a.py:1\n"
        "  rank 1: all_reduce float32[3] over ranks (0, 1) at b.py:2"
    )


# -- the log of calls -------------------------------------------------------------------------------------------------


def test_calls_are_read_while_they_are_written(tmp_path: Path) -> None:
    files = [tmp_path / "0", tmp_path / "1"]
    for file in files:
        file.touch()
    reader = CallReader(files)
    writers = [CallWriter(file) for file in files]
    key = ("0", (0, 1))
    writers[0].write(Entry(key, call(), 8))
    assert reader.read() is None
    with files[1].open("ab") as file:
        file.write(b"\x07")  # the beginning of an entry
    assert reader.read() is None
    assert reader.calls() == ((RankCall.of(call(), 8),), ())
    reader.close()


def test_the_log_finds_ranks_that_disagree_and_lost_messages(tmp_path: Path) -> None:
    files = [tmp_path / "0", tmp_path / "1"]
    writers = [CallWriter(file) for file in files]
    key = ("0", (0, 1))
    for _ in range(2):
        writers[0].write(Entry(key, call("send", key=("tag 0",)), 8))
    writers[1].write(Entry(key, CommunicationCall("recv", (-1, 1), ((2,),), torch.float32, key=("tag 0",)), 0))
    writers[0].write(Entry(key, call(), 8))
    writers[1].write(Entry(key, call("broadcast", source=0), 8))
    reader = CallReader(files)
    found = reader.read()
    assert found is not None
    assert found[0].startswith("ranks of one group call different collectives (call 0 of the group)")
    assert found[1:] == (1, call("broadcast", source=0))
    assert len(reader.undelivered()) == 1
    reader.close()


# -- watching tensors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 4096, 1_000_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64])
def test_a_change_is_seen(size: int, dtype: torch.dtype) -> None:
    value = torch.zeros(size, dtype=dtype)
    watched = WatchedTensors([value])
    assert not watched.has_changed()
    value[size // 2 :] = 1
    assert watched.has_changed()


def test_a_nan_that_stays_is_no_change() -> None:
    assert not WatchedTensors([torch.full((3,), float("nan"))]).has_changed()


# -- state of a rank --------------------------------------------------------------------------------------------------


def test_the_state_of_a_process_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(VARIABLES, environment_of(1, 2), strict=True):
        monkeypatch.setenv(name, value)
    before = save_state()
    first = torch.rand(1), random.random(), float(np.random.rand())
    torch.set_default_dtype(torch.float64)
    os.environ["RANK"] = "7"
    del os.environ["LOCAL_RANK"]
    sys.modules["torch.nn.modules.module"]._global_forward_hooks[0] = print  # type: ignore[attr-defined]
    load_state(before)
    assert torch.get_default_dtype() == torch.float32
    assert (os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"]) == ("1", "1", "2")
    assert (torch.rand(1), random.random(), float(np.random.rand())) == first
    assert not sys.modules["torch.nn.modules.module"]._global_forward_hooks  # type: ignore[attr-defined]


_mine: list[int] = []


def test_names_of_a_users_module_are_bound_for_each_rank() -> None:
    """A library keeps its groups in a name of its module: on threads of one process they would be the last rank's."""

    def on_rank(rank: int) -> list[int]:
        globals()["_mine"] = [rank]
        globals()["_new"] = rank
        dist.barrier()
        return [*_mine, globals()["_new"]]

    assert run_ranks(on_rank, 3).results == ([0, 0], [1, 1], [2, 2])
    assert not _mine and "_new" not in globals()


class _Groups:
    """Libraries keep their process groups in a name and a dict of a class, tables in a table, an object."""

    rank = -1
    of: ClassVar[dict[str, int]] = {}
    nested: ClassVar[dict[str, list[int]]] = {"ranks": []}
    seen: ClassVar[set[int]] = set()
    counts: ClassVar[Counter[str]] = Counter(rows=1)
    last: ClassVar[deque[int]] = deque(maxlen=1)
    sums: ClassVar[Any] = np.zeros(())


_groups = _Groups()


def test_tables_of_a_users_classes_and_objects_are_those_of_each_rank() -> None:
    def on_rank(rank: int) -> list[object]:
        _Groups.rank = rank
        _Groups.of["tp" if rank else "dp"] = rank
        _Groups.of["last"] = rank
        _Groups.nested["ranks"].append(rank)
        _Groups.seen.add(rank)
        _Groups.counts["rows"] += rank + 1
        _Groups.last.append(rank)
        _Groups.sums += rank + 1
        _groups.own = rank  # type: ignore[attr-defined]
        turns = []
        for name in _Groups.of:  # which other ranks change meanwhile
            dist.barrier()
            turns.append(name)
        seen = [*_Groups.nested["ranks"], *_Groups.seen, *vars(_groups).items()]
        seen += [_Groups.counts["rows"], *_Groups.last, float(_Groups.sums)]
        return [_Groups.rank, list(_Groups.of.items()), turns, seen]

    first = [0, [("dp", 0), ("last", 0)], ["dp", "last"], [0, 0, ("own", 0), 2, 0, 1.0]]
    second = [1, [("tp", 1), ("last", 1)], ["tp", "last"], [1, 1, ("own", 1), 3, 1, 2.0]]
    assert run_ranks(on_rank, 2).results == (first, second)
    assert _Groups.rank == -1 and _Groups.nested == {"ranks": []}
    assert not (_Groups.of or _Groups.seen or vars(_groups) or _Groups.last or _Groups.sums.any())
    assert _Groups.counts == {"rows": 1}


_counted = torch.zeros(2)
_sums = {"rows": torch.zeros(2)}


@pytest.mark.parametrize(
    ("tensor", "place"), [(_counted, "_counted of test_parts"), (_sums["rows"], "rows of a table")]
)
def test_a_run_in_which_threads_change_one_tensor_is_none(tensor: torch.Tensor, place: str) -> None:
    """Others see what a rank counts there, without a reduction."""
    with pytest.raises(RanksFailed, match=f"`{place}` is changed in place") as error:
        run_ranks(lambda rank: float(tensor.add_(1).sum()), 2)
    assert error.value.code == "rank_raises"
    assert run_ranks(lambda rank: float(tensor.sum()) * 0, 2).results == (0, 0)


@cache
def _ranks_that_are_up() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


@pytest.mark.parametrize("executor", ["simulator", "gloo"])
def test_what_functions_have_cached_before_ranks_start_is_forgotten(executor: str) -> None:
    assert _ranks_that_are_up() == 1
    assert run_ranks(lambda rank: _ranks_that_are_up(), 2, executor, isolate=True).results == (2, 2)
    assert _ranks_that_are_up.cache_info().currsize == 1


class _Numbers:
    @staticmethod
    @cache
    def world_and_rank() -> tuple[int, int]:
        return dist.get_world_size(), dist.get_rank()

    @classmethod
    @lru_cache(maxsize=1)
    def own_rank(cls) -> int:
        return dist.get_rank()


@lru_cache(maxsize=8)
def _plus(number: int) -> list[int]:
    return [dist.get_rank() + number]


def test_what_functions_cache_is_that_of_each_rank() -> None:
    """The group or number that a cached function returns is its caller's, and the same object each time."""

    def on_rank(rank: int) -> bool:
        dist.barrier()
        first = _plus(1)
        dist.barrier()
        own = [_Numbers.world_and_rank()[1], _Numbers.own_rank(), first[0] - 1, _plus(5)[0] - 5]
        return own == [rank] * 4 and _plus(1) is first and _plus.cache_parameters()["maxsize"] == 8

    assert run_ranks(on_rank, 3).results == (True,) * 3
    assert _Numbers.world_and_rank.cache_info().currsize == _plus.cache_info().currsize == 0


# -- places, failures, memory -----------------------------------------------------------------------------------------


def test_places_are_lines_of_the_program() -> None:
    here = place_of_call()
    assert here == f"{__file__}:{test_places_are_lines_of_the_program.__code__.co_firstlineno + 1}"
    try:
        torch.ones(2) @ torch.ones(3)
    except RuntimeError as error:
        line = test_places_are_lines_of_the_program.__code__.co_firstlineno + 4
        assert place_of_error(error.__traceback__) == f"{__file__}:{line}"
    assert not is_program(torch.nn.functional.__file__)
    assert not is_program(random.__file__)
    assert is_program(np.__file__)
    assert not is_program(child_processes.__file__)
    assert is_program(models.__file__)
    stack = f'  File "{torch.__file__}", line 3 in f\n  File "/somewhere/train.py", line 12 in main\n'
    assert place_in_stack(stack) == "/somewhere/train.py:12"


def test_a_traceback_has_no_lines_of_ours() -> None:
    spaces: list[dict[str, Callable[[Callable[[], object]], object]]] = [{}, {}]
    for space in spaces:
        exec(compile("def through(inner): return inner()", child_processes.__file__, "exec"), space)
    begun, around = (space["through"] for space in spaces)
    try:
        begun(lambda: around(lambda: torch.ones(2) @ torch.ones(3)))
    except RuntimeError as error:
        told, error_text = traceback_of(error), f"RuntimeError: {error}"
    assert child_processes.__file__ not in told
    assert told.count(__file__) == 3 and told.endswith(f"{error_text}\n")


def test_a_failure_survives_pickling() -> None:
    failure = RanksFailed("deadlock", "text", rank=2, place="a.py:3", by_rank={2: "waits"})
    again = pickle.loads(pickle.dumps(failure))
    assert (again.code, again.message, again.rank, again.place, again.by_rank) == (
        "deadlock",
        "text",
        2,
        "a.py:3",
        {2: "waits"},
    )
    assert str(again) == "text"


def test_codes_of_failures_are_in_the_catalogue() -> None:
    from verify.external.ranks.run_result import FAILURES

    assert set(FAILURES) <= set(CATALOGUE)


def test_memory_may_be_kept_again_and_again() -> None:
    for _ in range(2):
        with kept_memory():
            assert float(torch.ones(3_000_000).sum()) == 3_000_000
