"""Messages on communicators: what deadlocks is refused, what does not passes, and the search keeps to it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnscaler.errors import NnscalerError
from nnscaler.instructions import Instruction, read_instruction
from nnscaler.scheduling.registry import get_schedule
from nnscaler.scheduling.search.communicator_deadlock import check_communicators, name_messages, routes_of
from nnscaler.scheduling.search.find import find_schedule
from nnscaler.scheduling.search.placements import equal_stages, looped, pipeline_problem
from nnscaler.scheduling.search.problem import ScheduleProblem
from tests.nnscaler.scheduling.search.shapes import folded, with_shared


def order(text: str) -> tuple[Instruction, ...]:
    found = [read_instruction(word) for word in text.split()]
    assert all(found)
    return tuple(i for i in found if i is not None)


def two_devices(micro_batches: int, chunks: int = 1) -> ScheduleProblem:
    return pipeline_problem(equal_stages(looped(2, chunks)), micro_batches)


def test_1f1b_deadlocks_on_one_communicator_for_both_directions() -> None:
    """Device 0 sends F0.1 and then receives the gradient of B1.0; device 1 sends that before it receives F0.1."""
    orders = get_schedule("1f1b")(2, 1, 2).orders
    problem = two_devices(2)
    check_communicators(problem, orders)
    check_communicators(name_messages(problem, "direction"), orders)
    with pytest.raises(NnscalerError) as caught:
        check_communicators(name_messages(problem, "pair"), orders)
    assert caught.value.code == "communicator_deadlock"
    for text in (
        "F0.1 to F1.1 (device 0 to 1, communicator '0-1')",
        "B1.0 to B0.0 (device 1 to 0, communicator '0-1')",
    ):
        assert text in caught.value.message
    assert "each direction" in (caught.value.help or "")


def test_one_micro_batch_after_another_never_deadlocks() -> None:
    orders = (order("F0.0 B0.0 F0.1 B0.1"), order("F1.0 B1.0 F1.1 B1.1"))
    check_communicators(name_messages(two_devices(2), "pair"), orders)


def test_looped_stages_deadlock_where_both_send_before_they_receive() -> None:
    """The case of pytorch/pytorch#172668: each rank's send waits for the other's receive, which is behind its send."""
    problem = name_messages(two_devices(2, 2), "pair")
    orders = (
        order("F0.0 F0.1 F2.0 F2.1 B2.0 B2.1 B0.0 B0.1"),
        order("F1.0 F1.1 F3.0 F3.1 B3.0 B3.1 B1.0 B1.1"),
    )
    with pytest.raises(NnscalerError, match=r"device 0 to 1, .*'0-1'") as caught:
        check_communicators(problem, orders)
    assert caught.value.code == "communicator_deadlock"
    check_communicators(name_messages(two_devices(2, 2), "direction"), orders)


def test_messages_of_one_direction_must_be_received_in_the_order_of_sending() -> None:
    problem = name_messages(two_devices(2), "direction")
    orders = (order("F0.0 F0.1 B0.1 B0.0"), order("F1.1 B1.1 F1.0 B1.0"))
    with pytest.raises(NnscalerError, match=r"communicator '0>1'"):
        check_communicators(problem, orders)
    check_communicators(two_devices(2), orders)  # with a communicator for each message it runs


def test_passes_that_wait_for_each_other_are_told_apart() -> None:
    with pytest.raises(NnscalerError) as caught:
        check_communicators(two_devices(1), (order("B0.0 F0.0"), order("F1.0 B1.0")))
    assert caught.value.code == "schedule_deadlock"


def test_devices_of_both_blocks_take_part_where_nobody_else_would() -> None:
    problem = pipeline_problem(with_shared(2, (0,)), 1)
    ends = {
        (str(problem.blocks[problem.dependencies[r.index].after]), r.senders, r.receivers)
        for r in routes_of(problem, named=False)
    }
    assert ("F1", (1,), (0,)) in ends  # from both devices to the first: what the second has is missing there
    assert ("B0", (0,), (1,)) in ends
    assert ("F2", (0,), (1,)) in ends


@pytest.mark.parametrize("chunks", [1, 2])
def test_the_search_finds_orders_that_a_communicator_for_both_directions_can_follow(chunks: int) -> None:
    problem = name_messages(two_devices(4, chunks), "pair")
    free = find_schedule(problem)
    with pytest.raises(NnscalerError):
        check_communicators(problem, free.orders)
    found = find_schedule(problem, serial=True)
    check_communicators(problem, found.orders)
    assert free.certificate.makespan <= found.certificate.makespan
    assert free.certificate.bound <= found.certificate.bound
    left_out = any("communicators are not part" in text for text in found.certificate.not_searched)
    assert left_out == (found.certificate.gap > 0)


@pytest.mark.long
@given(st.integers(1, 4), st.integers(1, 6), st.sampled_from(["pair", "direction"]), st.booleans())
@settings(max_examples=25, deadline=None)
def test_what_the_search_returns_can_be_followed(devices: int, count: int, each: str, split: bool) -> None:
    problem = pipeline_problem(equal_stages(folded(devices)), count, 2.0 * devices, split=split)
    named = name_messages(problem, "pair" if each == "pair" else "direction")
    check_communicators(named, find_schedule(named, serial=True).orders)
