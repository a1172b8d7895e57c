"""Data parts, feeds of a run on one rank, and parameters that a rank has cut out by hand."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from verify.external.torchrun.cuda_on_cpu import CPU, on_cpu
from verify.external.torchrun.elements_of_one_rank import filled_in
from verify.external.torchrun.feed_data_of_all_ranks import Material, RanksFeed, Way
from verify.external.torchrun.match_one_rank import Layout, NoParts, parts_of, rank_records, reference_of, unmatched
from verify.external.torchrun.replace_data_given_to_model import ScriptMode, Take, close, exchanged, settings_of, varied
from verify.external.torchrun.watched_script_record import (
    Events,
    HeldInScript,
    ReadNumber,
    ScriptRecord,
    SeenStep,
    Unmatched,
    unlike_numbers,
)


def record(
    rank: int, events: Mapping[str, list[Tensor]] | None = None, start: Mapping[str, Tensor] | None = None
) -> ScriptRecord:
    """Return the record of a rank that took in these data and started from these plain parameters."""
    values = dict(start or {})
    held = tuple(HeldInScript(n, tuple(v.shape), tuple(v.shape), None, "plain", True) for n, v in values.items())
    step = SeenStep((torch.ones((), dtype=torch.float64),), values, {}, values, ({"lr": 0.1},), {})
    seen: Events = {kind: tuple((t,) for t in tensors) for kind, tensors in (events or {}).items()}
    return ScriptRecord(rank, held, values, (step,), seen, (), (), False, torch.float64)


def rows(*values: float) -> Tensor:
    """Return a batch of rows of one number."""
    return torch.tensor(values, dtype=torch.float64)[:, None]


def test_ranks_with_equal_data_are_one_part() -> None:
    data = [rows(1, 2), rows(1, 2), rows(3, 4), rows(3, 4)]
    assert parts_of([record(rank, {"input": [x]}) for rank, x in enumerate(data)]) == (0, 0, 1, 1)


def test_one_batch_that_differs_makes_two_parts() -> None:
    first = record(0, {"input": [rows(1), rows(2)]})
    assert parts_of([first, record(1, {"input": [rows(1), rows(3)]})]) == (0, 1)


@pytest.mark.parametrize(
    ("inputs", "parts"),
    [
        # pipelines of two stages and two data parts: a pipeline's ranks one after the other, or every other rank
        ([("input", 1), ("target", 1), ("input", 2), ("target", 2)], (0, 0, 1, 1)),
        ([("input", 1), ("input", 2), ("target", 1), ("target", 2)], (0, 1, 0, 1)),
        # the same with three stages, of which the middle one takes in nothing
        ([("input", 1), None, ("target", 1), ("input", 2), None, ("target", 2)], (0, 0, 0, 1, 1, 1)),
        ([("input", 1), ("input", 2), None, None, ("target", 1), ("target", 2)], (0, 1, 0, 1, 0, 1)),
        ([("input", 1), None, ("target", 1)], (0, 0, 0)),
    ],
)
def test_parts_of_pipelines(inputs: list[tuple[str, float] | None], parts: tuple[int, ...]) -> None:
    records = [record(r, {} if one is None else {one[0]: [rows(one[1])]}) for r, one in enumerate(inputs)]
    assert parts_of(records) == parts


def test_parts_of_unequal_numbers_of_ranks() -> None:
    with pytest.raises(NoParts, match="not as many of them on each"):
        parts_of([record(rank, {"input": [x]}) for rank, x in enumerate((rows(1), rows(1), rows(2)))])


def feed(way: Way, *parts: list[Tensor], part: int = 0) -> RanksFeed:
    """Return a feed of inputs of these data parts."""
    events: list[Events] = [{"input": tuple((t,) for t in tensors)} for tensors in parts]
    return RanksFeed(Material(tuple(events), ({"input": len(parts[0])},), {}, (({"lr": 0.1},),)), way, print, part)


def taken(source: RanksFeed, number: int, own: Tensor) -> Tensor:
    """Return what the feed gives in place of the script's own input."""
    (found,) = source.data("input", number, (own,))
    return found


def test_own_data_may_be_in_another_order() -> None:
    own = rows(1, 3, 2, 4)
    assert taken(feed("own", [rows(1, 2)], [rows(3, 4)]), 0, own) is own


def test_other_data_are_not_the_scripts_own() -> None:
    with pytest.raises(Unmatched, match="are not those of the ranks together"):
        taken(feed("own", [rows(1, 2)], [rows(3, 4)]), 0, rows(1, 2))


def test_whole_batches_hold_the_rows_of_all_parts() -> None:
    assert torch.equal(taken(feed("whole", [rows(1, 2)], [rows(3, 4)]), 0, rows(1, 2)), rows(1, 2, 3, 4))


def test_equal_rows_are_put_together_where_others_differ() -> None:
    source = feed("whole", [rows(1, 2), rows(5, 5)], [rows(3, 4), rows(5, 5)])
    assert torch.equal(taken(source, 1, rows(5, 5)), rows(5, 5, 5, 5))


def test_what_has_no_rows_stays_one() -> None:
    mask = torch.eye(3, dtype=torch.float64)
    assert torch.equal(taken(feed("whole", [rows(1, 2), mask], [rows(3, 4), mask]), 1, mask), mask)


def test_a_count_of_rows_may_be_the_total() -> None:
    source = feed("whole", [torch.tensor(3)], [torch.tensor(4)])
    assert taken(source, 0, torch.tensor(7)) == 7
    assert taken(source, 0, torch.tensor(3)) == 7


def test_turns_give_the_parts_one_after_the_other() -> None:
    source = feed("turns", [rows(1), rows(2)], [rows(3), rows(4)])
    assert [float(taken(source, number, rows(0))) for number in range(4)] == [1, 3, 2, 4]


def test_a_part_gets_its_own() -> None:
    assert torch.equal(taken(feed("part", [rows(1)], [rows(2)], part=1), 0, rows(9)), rows(2))


def test_more_data_than_on_the_ranks_are_not_matched() -> None:
    with pytest.raises(Unmatched, match="more data"):
        taken(feed("part", [rows(1)], [rows(2)]), 1, rows(9))


def test_other_numbers_of_inputs_before_a_step_are_not_matched() -> None:
    with pytest.raises(Unmatched, match="took 2 times inputs of the model, and 1 were expected"):
        feed("part", [rows(1)], [rows(2)]).after_step(0, {"input": 2})


def test_the_optimizer_gets_the_settings_of_the_ranks() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.7)
    feed("part", [rows(1)], [rows(2)]).before_step(0, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_settings_are_numbers_alone() -> None:
    group = {"params": [], "lr": torch.tensor(0.5), "betas": (0.9, 0.99), "foreach": None, "maximize": False, "eps": 1}
    assert settings_of(group) == {"lr": 0.5, "betas": (0.9, 0.99), "eps": 1}


# Numbers that a script reads.


def watched(take: Take = lambda kind, given: given) -> ScriptMode:
    """Return what watches the functions of torch that a script calls."""
    return ScriptMode(lambda note: None, lambda: True, lambda: True, take, lambda t: t, False)


def test_a_norm_of_gradients_is_no_number_of_the_data() -> None:
    weight, labels = nn.Parameter(torch.ones(3)), torch.tensor([1, 2, -100])
    with watched() as mode:
        (weight**2).sum().backward()
        assert weight.grad is not None
        own = torch.from_numpy(weight.grad.numpy())  # shares its memory, which no mode sees: as `to_local` of a DTensor
        own.mul_(min(1.0, 1.0 / nn.utils.get_total_norm([own]).item()))
        count = (labels != -100).sum().item()
    assert mode.measured
    assert [number.value for number in mode.numbers] == [count]


def test_where_a_rank_stands_is_no_number_of_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    labels = torch.tensor([5, 6, -100])
    with watched() as mode:
        grid = torch.arange(4).view(2, 2)
        row, column = (grid == 2).nonzero().flatten()
        place = row.item(), column.item(), grid[1, 1].tolist()
        count = (labels != -100).sum().item()
        chosen = grid.flatten()[labels[0] - 4].item()  # by what stands in the data
        several = torch.arange(3)[1].item()
    assert place == (1, 0, 3)
    read = [(number.value, number.of_ranks) for number in mode.numbers]
    assert read == [(1, True), (0, True), (3, True), (count, False), (chosen, False), (several, False)]
    assert all(number.place is not None and number.place.startswith(__file__) for number in mode.numbers)


def test_a_table_with_as_many_elements_as_there_are_ranks_is_data(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(ranks: int, labels: int) -> list[ReadNumber]:
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        with watched() as mode:
            int((torch.arange(ranks) == ranks - 1).nonzero())  # where this rank stands
            assert torch.ones(1, 1).tolist() == [[1.0]] and torch.ones((), dtype=torch.cfloat).item() == 1
            table = torch.arange(4)
            int((table < labels).sum())
            if labels > 1:
                int(table[3])  # which one rank does not read
            int(table[0])
        return mode.numbers

    (pair,) = unlike_numbers(read(1, 1), read(4, 3))
    assert [number.value for number in pair] == [1, 3]


def test_what_is_written_over_is_no_target_of_the_loss() -> None:
    """Losses that a script collects, and parameters that it puts into another's place, are not combined with data."""
    weight, history, targets = nn.Parameter(torch.ones(2)), torch.zeros(3), torch.ones(2)
    met: list[float] = []

    def take(kind: str, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        met.extend(float(one.sum()) for one in given)
        return tuple(one + 1 for one in given)

    with watched(take):
        loss = (weight * 1 - targets).square().sum()
        history[1] = loss
        targets.copy_(weight * 5)
    assert met == [2.0]
    assert history.tolist() == [0.0, 2.0, 0.0] and targets.tolist() == [5.0, 5.0]


# Parameters that are cut by hand.


def matched(one: Mapping[str, Tensor], *ranks: Mapping[str, Tensor]) -> list[dict[str, object]]:
    """Return, for each rank, the addresses of each parameter, given those of one rank."""
    reference = reference_of([record(0, start=one)], 1)
    records = [record(rank, start=values) for rank, values in enumerate(ranks)]
    found = rank_records(records, Layout((0,) * len(ranks)), reference)
    return [{p.local: p.addresses if p.addresses is None else list(p.addresses) for p in r.pieces} for r in found]


def test_slices_are_found_by_value() -> None:
    whole = torch.arange(8, dtype=torch.float64).view(4, 2)
    assert matched({"w": whole}, {"w": whole[2:]}, {"w": whole[:2]}) == [{"w": [4, 5, 6, 7]}, {"w": [0, 1, 2, 3]}]
    assert matched({"w": whole}, {"w": whole[:, 1:]})[0] == {"w": [1, 3, 5, 7]}


def test_equal_slices_follow_the_others_of_the_rank() -> None:
    whole, zeros = torch.arange(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    cut = {"w": whole[2:], "z": zeros[:2]}
    assert matched({"w": whole, "z": zeros}, cut)[0] == {"w": [2, 3], "z": [6, 7]}


def test_interleaved_rows_are_looked_up() -> None:
    whole = torch.arange(8, dtype=torch.float64) + 1
    assert matched({"w": whole}, {"w": whole[[0, 1, 4, 5]]})[0] == {"w": [0, 1, 4, 5]}


def test_what_is_no_part_is_unmatched() -> None:
    whole = torch.arange(4, dtype=torch.float64)
    reference = reference_of([record(0, start={"w": whole})], 1)
    own = [record(0, start={"w": whole[:2] + 9})]
    found = rank_records(own, Layout((0,)), reference)
    assert str(unmatched(found, own)) == "w on the ranks cannot be found in the parameters on one rank"


def test_plain_copies_with_other_values_are_not_taken_for_the_whole() -> None:
    whole = torch.arange(4, dtype=torch.float64)
    assert matched({"w": whole}, {"w": whole}, {"w": whole + 7})[1] == {"w": None}


# Tensors whose gradients are filled in.


@pytest.mark.parametrize(
    ("values", "model", "runs"),
    [
        ([3, 4, 5], [[1, 2], [3, 4], [5, 6]], [(2, 5)]),
        ([1, 2, 3, 4, 0, 0], [[1, 2, 3, 4], [0, 0, 0, 5]], [(0, 4), (0, 6)]),  # padding, or the start of the second
        ([1, 2, 3, 4, 0, 0], [[1, 2, 3, 4], [0, 5]], [(0, 4)]),
        ([1, 2, 3, 4, 0, 0], [[1, 2, 3, 4, 0, 0, 7]], [(0, 6)]),  # in the middle of a tensor there is no padding
        ([3, 4, 0, 0], [[1, 2, 3, 4], [0]], [(2, 4), (2, 5)]),
        ([3, 4, 0, 0], [[1, 2, 3, 4]], [(2, 4)]),
        ([1, 2, 0], [[1, 2, 3]], []),
        ([1, 2], [[1, 2], [1, 2]], []),
        ([0, 0], [[1, 0, 0]], []),
    ],
)
def test_runs_of_values(values: list[float], model: list[list[float]], runs: list[tuple[int, int]]) -> None:
    tensors = {f"t{i}": torch.tensor(one, dtype=torch.float64) for i, one in enumerate(model)}
    found = reference_of([record(0, start=tensors)], 1).lookup().runs(torch.tensor(values))
    assert [(run.start, run.stop) for run in found] == runs


def placed(model: list[list[float]], *ranks: list[list[float]]) -> tuple[list[list[tuple[int, int] | None]], set[str]]:
    """Return where copies of a rank, named `c0` and so on, stand in tensors of a model, and which are not placed."""

    def tensors(letter: str, values: list[list[float]]) -> dict[str, Tensor]:
        return {f"{letter}{i}": torch.tensor(one, dtype=torch.float64) for i, one in enumerate(values)}

    records = [record(rank, start=tensors("c", values)) for rank, values in enumerate(ranks)]
    records = [replace(one, held=tuple(replace(held, filled=True) for held in one.held)) for one in records]
    filled = filled_in(records, record(0, start=tensors("t", model)))
    rows: list[list[tuple[int, int] | None]] = []
    for one in records:
        found = [filled.places.get((one.rank, held.name)) for held in one.held]
        rows.append([None if place is None else (int(place[0]), int(place[-1]) + 1) for place in found])
    return rows, set(filled.unplaced)


@pytest.mark.parametrize(
    ("copies", "places", "unplaced"),
    [
        ([[1, 2], [0, 0], [3, 4], [0, 0], [1, 1], [0, 0]], [(0, 2), (2, 4), (4, 6), (6, 8), (8, 10), (10, 12)], set()),
        ([[1, 2], [3, 4], [1, 1], [0, 0], [0, 0], [0, 0]], [(0, 2), (4, 6), (8, 10), None, None, None], {3, 4, 5}),
        ([[1, 2], [3, 4], [0, 0], [0, 0], [1, 1], [0, 0]], [(0, 2), (4, 6), None, None, (8, 10), (10, 12)], {2, 3}),
        ([[1, 2], [0, 0, 0], [3, 4]], [(0, 2), None, (4, 6)], {1}),
        ([[2], [0, 0], [3, 4]], [(1, 2), None, (4, 6)], {1}),  # shards: zeros may be a part of any tensor
        ([[0, 0], [0, 0]], [None, None], {0, 1}),
    ],
)
def test_zeros_are_placed_between_their_neighbours(
    copies: list[list[float]], places: list[tuple[int, int] | None], unplaced: set[int]
) -> None:
    model: list[list[float]] = [[1, 2], [0, 0], [3, 4], [0, 0], [1, 1], [0, 0]]
    assert placed(model, copies) == ([places], {f"c{i}" for i in unplaced})


def test_zeros_at_the_end_of_a_shard_are_elements_where_the_next_shard_goes_on() -> None:
    model: list[list[float]] = [[1, 2, 3], [0, 0, 0], [4, 5]]
    assert placed(model, [[1, 2, 3, 0]], [[0, 0, 4, 5]]) == ([[(0, 4)], [(4, 8)]], set())
    assert placed(model[:2], [[1, 2, 3, 0, 0, 0]], [[1, 2, 3, 0, 0, 0]]) == ([[(0, 6)], [(0, 6)]], set())


def test_zeros_at_the_end_of_a_shard_are_no_elements_where_others_may_have_them() -> None:
    assert placed([[1, 2], [0, 0, 5]], [[1, 2, 0], [0, 0, 5, 0]]) == ([[(0, 2), (2, 5)]], set())
    assert placed([[1, 2], [0, 0]], [[1, 2, 0, 0], [0, 0, 0, 0]]) == ([[(0, 2), None]], {"c0", "c1"})
    assert placed([[1, 2], [0, 0, 0], [4]], [[1, 2, 0]], [[4, 0, 0]]) == ([[(0, 2)], [(5, 6)]], {"c0"})


def filled_record(rank: int, **start: list[float]) -> ScriptRecord:
    """Return the record of a rank that fills in the gradients of all but `w`."""
    made = record(rank, start={name: torch.tensor(values, dtype=torch.float64) for name, values in start.items()})
    step = replace(made.steps[0], unread=frozenset({"w"}))
    return replace(made, held=tuple(replace(h, filled=h.name != "w") for h in made.held), steps=(step,))


def test_copies_that_ranks_have_no_elements_of_are_left_out_and_others_compared() -> None:
    one = filled_record(0, w=[1, 2, 3, 4], a=[1, 2], b=[0, 0, 0], c=[3, 4])
    ranks = [filled_record(0, w=[1, 2, 3, 4], a=[1], b=[0, 0], c=[3, 4])]
    ranks += [filled_record(1, w=[1, 2, 3, 4], a=[2], b=[0, 0], c=[3, 4])]
    filled = filled_in(ranks, one)
    assert (set(filled.unplaced), filled.replaced, filled.unheld) == ({"b"}, {"w"}, {"b"})
    reference = reference_of([one], 1, filled)
    assert reference.space.names == ("w", "a", "c")
    assert reference.steps[0].gradients.tolist()[4:] == [1, 2, 3, 4]
    assert bool(reference.steps[0].gradients[:4].isnan().all())
    for number, found in enumerate(rank_records(ranks, Layout((0, 1)), reference, [one], filled)):
        pieces = {p.local: p.take(reference.steps[0].gradients).tolist() for p in found.pieces if p.local != "w"}
        assert pieces == {"a": [1 + number], "c": [3, 4]}
        assert found.steps[0].replaced == {"w"} and "w" not in found.steps[0].gradients


# Values that are exchanged, and devices.


def test_a_batch_of_a_library_keeps_its_class() -> None:
    batch = UserDict({"ids": torch.tensor([1, 2]), "name": "a"})
    made = exchanged(batch, "input", lambda kind, tensors: tuple(t + 1 for t in tensors))
    assert type(made) is UserDict
    assert made["ids"].tolist() == [2, 3]
    assert batch["ids"].tolist() == [1, 2]
    assert exchanged(batch, "input", lambda kind, tensors: tensors) is batch


def test_what_a_parameter_had_a_part_in_is_no_data() -> None:
    made = torch.ones(2, requires_grad=True) * 2
    assert exchanged([made, 3], "input", lambda kind, tensors: ()) == [made, 3]


def test_rounding_makes_no_other_data() -> None:
    x = torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert close(x, x + 1e-14)
    assert not close(x, x + 1e-6)
    assert not close(torch.tensor([1]), torch.tensor([2]))
    assert not close(torch.tensor([0], dtype=torch.int8), torch.tensor([256]))  # 0 of 8 bits
    assert not close(torch.tensor([-1e30, 1.0]), torch.tensor([-1e30, 2.0]))  # beside what fills a mask
    assert close(torch.tensor([float("nan"), 1.0]), torch.tensor([float("nan"), 1.0]))


def test_varied_data_are_ids_of_the_same_vocabulary() -> None:
    ids = torch.arange(12).view(3, 4)
    assert torch.equal(varied(ids, 0, 0), ids)
    assert not torch.equal(varied(ids, 1, 0), ids)
    assert torch.equal(varied(ids, 1, 0).flatten().sort().values, ids.flatten())
    assert not torch.equal(varied(torch.ones(3), 1, 0), torch.ones(3))


@pytest.mark.parametrize("device", ["cuda", "cuda:3", torch.device("cuda", 1), "cpu:2", torch.device("cpu", 1)])
def test_devices_are_the_cpu(device: str | torch.device) -> None:
    assert on_cpu(device, lambda note: None) == CPU


@pytest.mark.parametrize("value", ["cpu", "meta", "cudagraphs", torch.device("meta"), 3, None])
def test_other_values_stay(value: object) -> None:
    assert on_cpu(value, lambda note: None) is value
