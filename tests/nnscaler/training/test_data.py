"""The loader: the same samples in the same step under every number of parts, each once per epoch, resumed exactly."""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from op_registry.annotation.splits import balanced

from nnscaler.errors import NnscalerError
from nnscaler.runtime.training.cut_batch import DataPart
from nnscaler.training.data.pack_and_collate_samples import PackedRows, check_collate, pack
from nnscaler.training.data.sample_order_and_loader import Loader, SampleOrder, loader, rows_of


class Numbers:
    """23 samples that tell their number."""

    def __init__(self, count: int = 23) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        assert 0 <= index < self.count
        return {"x": torch.tensor([float(index)] * 3), "number": torch.tensor(index)}


class Stream(IterableDataset[torch.Tensor]):
    """Numbers that come in a row."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.arange(23)


class StatefulStream(Stream):
    """A stream that can go on where it was, and counts what it reads."""

    def __init__(self) -> None:
        self.at, self.read = 0, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.at < 23:
            self.at, self.read = self.at + 1, self.read + 1
            yield torch.tensor(self.at - 1)
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def load(dataset: Any, batch_size: int, part: DataPart, **options: Any) -> Loader:
    of_order = {name: options.pop(name) for name in ("shuffle", "seed", "drop_last") if name in options}
    return loader(dataset, SampleOrder(batch_size, **of_order), part, **options)


def made(dataset: Any, count: int, **options: Any) -> list[Loader]:
    options = {"shuffle": not isinstance(dataset, IterableDataset), **options}
    return [load(dataset, 5, DataPart(index, count), seed=3, **options) for index in range(count)]


def numbers(batch: Any) -> list[int]:
    found: list[int] = (batch["number"] if isinstance(batch, dict) else batch).tolist()
    return found


def flat(lists: Iterable[list[int]]) -> list[int]:
    return [number for found in lists for number in found]


def steps(loaders: list[Loader]) -> list[list[int]]:
    """The numbers of each global batch of an epoch, put together from its parts."""
    return [flat(map(numbers, parts)) for parts in zip(*loaders, strict=True)]


DATASETS = {"map": Numbers, "stream": Stream, "stateful": StatefulStream}


@pytest.mark.parametrize("kind", DATASETS)
def test_parts_make_up_the_same_batches_in_every_epoch(kind: str) -> None:
    whole = made(DATASETS[kind](), 1)
    epochs = [steps(whole) for _ in range(2)]
    assert [len(batch) for batch in epochs[0]] == [5, 5, 5, 5, 3]
    for epoch in epochs:
        assert sorted(flat(epoch)) == list(range(23))
    assert (epochs[0] != epochs[1]) == (kind == "map")
    for count in (2, 3, 4):  # parts of a copy each, as processes have them; in the last batch the fourth has none
        parts = [made(DATASETS[kind](), count)[index] for index in range(count)]
        assert [steps(parts) for _ in range(2)] == epochs


def test_rows_lie_as_the_program_cuts_them() -> None:
    for size in range(12):
        for count in range(1, 6):
            cut = [rows_of(DataPart(index, count), size) for index in range(count)]
            assert flat(map(list, cut)) == list(range(size))
            if size >= count and size % count:
                assert tuple(map(len, cut)) == balanced(size, count)


def test_a_part_without_rows_gets_the_form() -> None:
    last = list(made(Numbers(), 4)[3])[-1]
    assert last["x"].shape == (0, 3)
    assert last["number"].dtype == torch.int64


def test_short_batches_are_dropped_if_asked() -> None:
    for dataset in (Numbers(), Stream()):
        assert [len(batch) for batch in steps(made(dataset, 2, drop_last=True))] == [5, 5, 5, 5]
    assert [len(found) for found in (*made(Numbers(), 2), *made(Numbers(), 2, drop_last=True))] == [5, 5, 4, 4]


@pytest.mark.parametrize("kind", DATASETS)
@pytest.mark.parametrize("taken", [0, 2, 5, 7])
def test_a_run_goes_on_under_another_number_of_parts(kind: str, taken: int) -> None:
    whole = made(DATASETS[kind](), 1)[0]
    expected = [numbers(batch) for _ in range(3) for batch in whole]
    before = [made(DATASETS[kind](), 2)[index] for index in range(2)]
    for found in before:
        rest = iter(found)
        for _ in range(taken):
            batch = next(rest, None)
            if batch is None:
                rest = iter(found)
                next(rest)
    states = [found.state_dict() for found in before]
    assert states[0] == states[1]
    after = [made(DATASETS[kind](), 3)[index] for index in range(3)]
    for found in after:
        found.load_state_dict(states[0])
    assert [batch for _ in range(3) for batch in steps(after)][: 15 - taken] == expected[taken:]


def test_a_stateful_stream_is_not_read_again() -> None:
    first, later = StatefulStream(), StatefulStream()
    for before, after in zip(made(first, 1), made(later, 1), strict=True):
        rest = iter(before)
        next(rest), next(rest)
        after.load_state_dict(before.state_dict())
        assert numbers(next(iter(after))) == [10, 11, 12, 13, 14]
    assert later.read == 5


@pytest.mark.parametrize("kind", DATASETS)
def test_worker_processes_change_nothing(kind: str) -> None:
    own = made(DATASETS[kind](), 1)[0]
    worked = made(DATASETS[kind](), 1, workers=1)[0]
    rest = iter(own)
    next(rest), next(rest)
    worked.load_state_dict(own.state_dict())
    ahead = iter(worked)
    assert numbers(next(ahead)) == numbers(next(rest))
    assert worked.state_dict() == own.state_dict()  # what the worker has read ahead is not handed out
    assert [numbers(batch) for batch in ahead] == [numbers(batch) for batch in rest]


class Split(IterableDataset[torch.Tensor]):
    """As torch's pages have it: each worker reads a part of its own. In an order of chance, if asked."""

    def __init__(self, shuffled: bool = False) -> None:
        self.shuffled = shuffled

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        numbers = list(range(23) if worker is None else range(worker.id, 23, worker.num_workers))
        if self.shuffled:
            random.shuffle(numbers)
        yield from torch.tensor(numbers)


@pytest.mark.parametrize("shuffled", [False, True])
def test_several_workers_read_one_stream(shuffled: bool) -> None:
    """Each of them reads all of it: of a part of its own it would leave out what is another one's batch."""
    batches = steps(made(Split(shuffled), 1, workers=2))
    assert sorted(flat(batches)) == list(range(23))
    assert shuffled or flat(batches) == list(range(23))


def test_workers_of_a_stream_that_would_stay_are_told_their_place() -> None:
    (whole,) = made(Stream(), 1, workers=1, persistent_workers=True)
    next(iter(whole))
    assert flat(steps([whole])) == list(range(5, 23))
    assert (flat(steps([whole])), whole.epoch) == (list(range(23)), 2)


class OwnChance(Split):
    """Draws from a generator that nothing seeds."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.tensor(random.Random().sample(range(23), 23))


def test_workers_that_read_other_samples_are_told() -> None:
    with pytest.raises(NnscalerError, match="two workers read other samples of the stream") as caught:
        steps(made(OwnChance(), 1, workers=2))
    assert caught.value.code == "batch_differs"


def test_a_worker_that_is_killed_is_told_where_batches_are_read() -> None:
    """Not where the process then is, which may be anywhere in the model."""
    others = {*multiprocessing.active_children()}
    batches = iter(made(Numbers(230), 1, workers=1)[0])
    next(batches)
    (worker,) = {*multiprocessing.active_children()} - others
    worker.kill()
    time.sleep(0.2)  # here torch's handler of signals raises
    with pytest.raises(NnscalerError, match=rf"a worker process \(pid {worker.pid}\) (is|was) killed by .*") as caught:
        list(batches)
    assert caught.value.code == "data_raised"


def test_an_epoch_can_be_chosen() -> None:
    one, other = made(Numbers(), 1)[0], made(Numbers(), 1)[0]
    list(one)
    other.set_epoch(1)
    assert one.epoch == 1
    assert steps([one]) == steps([other])


def test_the_order_is_that_of_seed_and_epoch() -> None:
    orders = {tuple(flat(steps([load(Numbers(), 5, DataPart(0, 1), shuffle=True, seed=s)]))) for s in range(9)}
    assert len(orders) == 9
    assert flat(steps([load(Numbers(), 5, DataPart(0, 1), shuffle=False)])) == list(range(23))


DOCUMENTS = [torch.arange(size) + 100 * number for number, size in enumerate((3, 9, 1, 4, 6))]


class Documents(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from DOCUMENTS


def test_documents_are_packed() -> None:
    rows = pack(DOCUMENTS, 5)
    assert isinstance(rows, PackedRows)
    assert len(rows) == 5
    assert {name: tensor.tolist() for name, tensor in rows[0].items()} == {
        "ids": [0, 1, 2, 100, 101],
        "labels": [1, 2, -100, 101, 102],  # the last is predicted across the rows
        "documents": [0, 0, 0, 1, 1],
        "positions": [0, 1, 2, 0, 1],
    }
    assert rows[4]["ids"].tolist() == [403, 404, 405, 0, 0]
    assert rows[4]["labels"].tolist() == [404, 405, -100, -100, -100]
    assert rows[4]["documents"].tolist() == [0, 0, 0, 1, 1]
    for row, streamed in zip((rows[i] for i in range(5)), pack(Documents(), 5), strict=True):
        assert all(torch.equal(row[name], streamed[name]) for name in row)


@pytest.mark.parametrize("documents", [DOCUMENTS, Documents()])
def test_packed_tokens_come_once_under_every_number_of_parts(documents: Any) -> None:
    predicted = sorted(int(token) for document in DOCUMENTS for token in document[1:])
    for count in (1, 2, 3):
        parts = [made(documents, count, packed=4)[index] for index in range(count)]
        found = [row for part in parts for batch in part for row in batch["labels"].flatten().tolist()]
        assert sorted(label for label in found if label != -100) == predicted


def refused(dataset: Any, **options: Any) -> str:
    with pytest.raises(NnscalerError) as error:
        load(dataset, options.pop("batch_size", 4), DataPart(0, 1), **options)
    assert error.value.code == "bad_data"
    return str(error.value)


def test_what_cannot_be_loaded_is_refused() -> None:
    assert "no shuffle\n  help: shuffle the stream itself" in refused(Stream(), shuffle=True)
    assert "a int is no dataset" in refused(7)
    assert "no samples" in refused([])
    assert "batch_size 0" in refused(Numbers(), batch_size=0)
    assert "workers -1" in refused(Numbers(), workers=-1)
    assert "has 3 samples, a batch 4" in refused(Numbers(3), drop_last=True)
    with pytest.raises(NnscalerError, match=r"a document of float32\[2\]"):
        list(made([torch.ones(2)], 1, packed=4)[0])
    with pytest.raises(NnscalerError, match="a stream has no number of batches"):
        len(made(Stream(), 1)[0])


def test_a_place_in_other_data_is_refused() -> None:
    (first,) = made(Numbers(), 1)
    next(iter(first))
    state = first.state_dict()
    with pytest.raises(NnscalerError, match="a number of samples of 23, and this loader's is 24") as error:
        made(Numbers(24), 1)[0].load_state_dict(state)
    assert error.value.code == "other_data"
    with pytest.raises(NnscalerError, match="seed 3, and this loader's is 4"):
        load(Numbers(), 5, DataPart(0, 1), shuffle=True, seed=4).load_state_dict(state)


@pytest.mark.parametrize("more", [{"seed": 4, "shuffle": True}, {"seed": 3}])
def test_at_the_end_of_an_epoch_the_order_may_change(more: dict[str, Any]) -> None:
    (first,) = made(Numbers(), 1)
    batches = iter(first)
    for _ in range(len(first)):
        next(batches)
    going, new = load(Numbers(), 5, DataPart(0, 1), **more), load(Numbers(), 5, DataPart(0, 1), **more)
    going.load_state_dict(first.state_dict())
    new.set_epoch(1)
    assert (going.completed, list(going)) == (1, [])
    assert steps([going]) == steps([new])


def padded(rows: list[Any]) -> dict[str, torch.Tensor]:
    """Rows of 1 + n % 3 places, padded to the longest of the batch."""
    return {"x": torch.nn.utils.rnn.pad_sequence([row["x"][: 1 + int(row["number"]) % 3] for row in rows], True)}


COLLATES: dict[str, tuple[Any, str]] = {
    "rows": (lambda rows: [torch.stack([row["x"] for row in rows]), torch.ones(7), torch.tensor(0.5), "text"], ""),
    "padded": (padded, ""),
    "noise": (lambda rows: torch.rand(len(rows), 3), ""),
    "wants many rows": (lambda rows: torch.stack([row["x"] for row in rows])[: len(rows) // (len(rows) // 3)], ""),
    "empties rows": (lambda rows: torch.stack([row.pop("x") for row in rows]), ""),
    "time first": (
        lambda rows: {"x": torch.stack([row["x"] for row in rows], 1)},
        r"\['x'\] is \[3, 2\] of 2 rows, and \[6, 1\] where they are joined",
    ),
    "two views": (lambda rows: torch.stack([r["x"] for r in rows] * 2), "and other values where they are joined"),
    "sorted": (lambda rows: torch.stack([r["x"] for r in rows]).sort(0, descending=True).values, "other values"),
}


@pytest.mark.parametrize("name", COLLATES)
def test_a_collate_that_does_not_go_by_rows_is_refused_where_parts_are_joined(name: str) -> None:
    collate, told = COLLATES[name]
    next(iter(loader(Numbers(), SampleOrder(10), DataPart(0, 1), collate=collate)))
    for parts in (4, 10):  # of 3 rows, and of one, which has no order and equal views
        made = iter(loader(Numbers(), SampleOrder(10), DataPart(1, parts), collate=collate))
        if told and (parts == 4 or name == "time first"):
            with pytest.raises(NnscalerError, match=told):
                next(made)
        elif parts == 4 or name != "wants many rows":
            next(made)


def test_generators_are_where_they_were_after_a_collate_was_checked() -> None:
    def noise(rows: list[Any]) -> torch.Tensor:
        return torch.rand(len(rows)) + random.random()

    states = torch.get_rng_state(), random.getstate()
    check_collate(noise, [1, 2])
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]


def test_a_part_without_rows_keeps_what_is_no_rows() -> None:
    made = loader(Numbers(5), SampleOrder(4), DataPart(2, 3), collate=COLLATES["rows"][0])
    *_, (rows, weights, number, text) = made
    assert rows.shape == (0, 3) and weights.shape == (7,) and (float(number), text) == (0.5, "text")
