"""Orders that are given, in a plan or by a function: read, or refused with the place and what is legal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from nnscaler.compile import for_batch, parallelize
from nnscaler.errors import NnscalerError
from nnscaler.instructions import Instruction
from nnscaler.scheduling.dependencies import chain, check_acyclic
from nnscaler.scheduling.given_orders import GivenOrder, kind_of_function, read_csv, read_orders, write_csv
from nnscaler.scheduling.pipedream import written_for
from nnscaler.scheduling.registry import SCHEDULES, schedule_of, with_schedule
from nnscaler.transform.plan import Plan

PP2 = Plan((("pp", 2),), micro_batches=1)


def own(*orders: str, micro_batches: int = 1, **more: Any) -> Plan:
    return replace(PP2, micro_batches=micro_batches, schedule="mine", orders=orders, **more)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (own("F0.0 B0.0"), "there are 1, and the plan has 2 pipeline devices"),
        (own("F0.0 B0.0", "F1.0 X1.0"), "device 1, word 2: 'X1.0' is not an instruction of a schedule"),
        (own("F0.0 B0.0", "F1.0.1 B1.0.1"), "device 1, word 1: F1.0.1 and F0.0: either all passes"),
        (own("F0.0 F0.1 B0.0 B0.1", "F1.0 F1.1 B1.1", micro_batches=2), "device 1: never runs B1.0"),
        (own("F0.0 B0.0", "F1.0 I1.0"), "device 1: runs I1.0 and never W1.0"),
        (own("F0.0 B0.0", "F1.0 I1.0 W1.0 W1.0"), "device 1, word 4: runs W1.0 twice"),
        (own("F0.0 B0.0", "F1.0 W1.0 I1.0"), "device 1, word 2: runs W1.0 before I1.0"),
        (own("F0.0 B0.0", "B1.0 F1.0"), "device 1, word 1: runs B1.0 before its forward"),
        (own("F0.0 B0.0", "F2.0 B2.0"), "device 1, word 1: has 'F2.0', a stage or micro-batch that is not its own"),
        (own("F0.0 B0.0 F1.0 B1.0", ""), "device 0, word 3: has 'F1.0', a stage or micro-batch that is not its own"),
        (own("", ""), "there are no passes in it"),
    ],
)
def test_orders_of_a_plan_that_are_wrong(plan: Plan, message: str) -> None:
    with pytest.raises(NnscalerError) as error:
        schedule_of(plan)
    assert error.value.code == "bad_schedule"
    assert error.value.message.startswith(f"orders of the plan (mine): {message}")
    assert error.value.help


def test_micro_batches_of_a_plans_orders() -> None:
    with pytest.raises(NnscalerError, match="are for 1 micro-batches, and the plan has 2"):
        schedule_of(own("F0.0 B0.0", "F1.0 B1.0", micro_batches=2))


def test_orders_without_backward_do_not_train() -> None:
    plan = own("F0.0", "F1.0")
    assert check_acyclic(schedule_of(plan, range(2)), chain(2)) == (
        Instruction("F", 0, (0,)),
        Instruction("F", 1, (0,)),
    )
    for untrained, missing in (
        (plan, "runs no backward on the stages 0, 1, and gradients reach them"),
        (own("F0.0 B0.0", "F1.0"), "runs no backward on the stages 1, and gradients reach them"),
    ):
        with pytest.raises(NnscalerError, match=missing):
            check_acyclic(schedule_of(untrained), chain(2))


def test_orders_that_deadlock_are_refused_with_the_cycle() -> None:
    plan = own("F0.0 B0.0 F0.1 B0.1", "F1.0 F1.1 B1.0 B1.1", micro_batches=2)
    with pytest.raises(NnscalerError, match=r"schedule mine deadlocks: device 0 is at B0\.0 and waits for B1\.0"):
        check_acyclic(schedule_of(plan), chain(2))


def test_a_named_schedule_needs_its_places() -> None:
    placed = with_schedule(PP2, "zb-v")
    assert placed.stage_devices == ((0,), (1,), (1,), (0,))
    assert schedule_of(placed).name == "zb-v"
    assert with_schedule(placed, "interleaved") == replace(PP2, schedule="interleaved", chunks=2)
    with pytest.raises(NnscalerError, match=r"interleaved has the stages on the devices \[\[0\], \[1\], \[0\],"):
        schedule_of(replace(placed, schedule="interleaved"))
    with pytest.raises(NnscalerError, match="schedule zb-v runs 2 stages on each device, not 1"):
        schedule_of(replace(PP2, schedule="zb-v"))
    with pytest.raises(NnscalerError, match=r"and stage_devices of the plan on \[\[0\], \[0, 1\]\]"):
        schedule_of(replace(PP2, stage_devices=((0,), (0, 1))))


def kind(function: Callable[[int, int, int], object]) -> Any:
    return kind_of_function(function, "mine.py::f", "f")


@pytest.mark.long
@given(name=st.sampled_from(sorted(SCHEDULES)), devices=st.integers(1, 4), micro_batches=st.integers(1, 8))
@settings(max_examples=40, deadline=None)
def test_functions_may_return_texts_or_instructions_or_a_schedule(name: str, devices: int, micro_batches: int) -> None:
    made = SCHEDULES[name](devices, SCHEDULES[name].chunks, micro_batches)
    texts = [made.text(device) for device in range(devices)]
    for result in (made, made.orders, texts, tuple(texts)):
        found = kind(lambda *_, result=result: result)(devices, 1, micro_batches)
        assert (found.orders, found.devices, found.name) == (made.orders, made.devices, "f")


@given(name=st.sampled_from(sorted(SCHEDULES)), devices=st.integers(1, 4), micro_batches=st.integers(1, 8))
@settings(max_examples=40, deadline=None)
def test_what_a_function_returns_is_held_by_plans(name: str, devices: int, micro_batches: int) -> None:
    made = SCHEDULES[name](devices, SCHEDULES[name].chunks, micro_batches)
    # others are too short to show how a stream goes on: test_short_streams_are_no_plans
    assume(not made.staleness or micro_batches >= written_for(devices))
    of_plan = 1 if made.staleness else micro_batches  # each batch of a stream is one
    plan = with_schedule(Plan((("pp", devices),), micro_batches=of_plan), kind(lambda *_: made))
    assert plan.orders == tuple(made.text(device) for device in range(devices))
    assert schedule_of(Plan.from_json(plan.to_json()), made.untrained) == replace(made, name="f")


def test_short_streams_are_no_plans() -> None:
    plan = with_schedule(
        Plan((("pp", 2),)), kind(lambda *_: ["F0.0 F0.1 B0.0 U0.0 B0.1 U0.1", "F1.0 B1.0 U1.0 F1.1 B1.1 U1.1"])
    )
    with pytest.raises(NnscalerError, match="are a stream's, written for 2 batches"):
        schedule_of(plan)
    with pytest.raises(NnscalerError, match="cuts it into 2 micro-batches"):
        schedule_of(replace(plan, micro_batches=2))


@pytest.mark.long
@given(data=st.data(), devices=st.integers(1, 3), stages=st.integers(3, 5), micro_batches=st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_any_order_that_can_run_is_accepted(data: st.DataObject, devices: int, stages: int, micro_batches: int) -> None:
    """Passes drawn one by one, each of those that could run: on any devices, backward whole or in halves."""
    places = data.draw(st.permutations([*range(devices), *(s % devices for s in range(devices, stages))]))
    halves = data.draw(st.sets(st.tuples(st.integers(0, stages - 1), st.integers(0, micro_batches - 1))))
    waits: dict[Instruction, set[Instruction]] = {}
    for stage in range(stages):
        for m in range(micro_batches):
            forward = Instruction("F", stage, (m,))
            back = forward.of("I" if (stage, m) in halves else "B")
            later = Instruction("I" if (stage + 1, m) in halves else "B", stage + 1, (m,))
            waits[forward] = {Instruction("F", stage - 1, (m,))} if stage else set()
            waits[back] = {forward, later} if stage + 1 < stages else {forward}
            if back.kind == "I":
                waits[back.of("W")] = {back}
    orders: list[list[str]] = [[] for _ in range(devices)]
    done: set[Instruction] = set()
    while len(done) < len(waits):
        found = data.draw(st.sampled_from(sorted(i for i, w in waits.items() if i not in done and w <= done)))
        done.add(found)
        orders[places[found.stage]].append(str(found))
    texts = tuple(" ".join(order) for order in orders)
    plan = Plan(
        (("pp", devices),), (), micro_batches, "mine", 1, stage_devices=tuple((d,) for d in places), orders=texts
    )
    schedule = schedule_of(plan)
    assert len(check_acyclic(schedule, chain(stages))) == len(waits)
    again = read_orders(read_csv(write_csv(schedule), "a.csv"), "mine")
    assert again == schedule


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "mine.py::f(2, 1, 1) returns NoneType, not the orders of 2 devices"),
        ("F0.0 B0.0", "mine.py::f(2, 1, 1) returns str, not the orders of 2 devices"),
        (["F0.0 B0.0"], "mine.py::f(2, 1, 1) returns 1 orders, not the orders of 2 devices"),
        (["F0.0 B0.0", 7], "mine.py::f: order of device 1, word 1: '7' is not an instruction of a schedule"),
        (["F0.0 B0.0", "F1.0 B1.0 F1.1 B1.1"], "mine.py::f: order of device 0: never runs F0.1"),
        (["F0.0 B0.0 F0.1 B0.1", "F1.0 F1.1 B1.0 B1.1"], "mine.py::f has passes of 2 micro-batches, and there are 1"),
        (
            ["F0.0 B0.0", "F2.0 B2.0"],
            "mine.py::f: order of device 1, word 1: F2.0 is of stage 2, and stage 1 is nowhere",
        ),
        (["F0.0 B0.0", "B0.0 F1.0"], "mine.py::f: order of device 1: never runs F0.0"),
    ],
)
def test_what_a_function_returns_otherwise(result: object, message: str) -> None:
    with pytest.raises(NnscalerError) as error:
        kind(lambda *_: result)(2, 1, 1)
    assert error.value.code == "bad_schedule"
    assert error.value.message.startswith(message)


def test_a_kind_fault_in_any_place_is_found() -> None:
    """Each pass of each order left out, doubled, or of a stage that is nowhere: all are refused."""
    made = SCHEDULES["zb-v"](2, 2, 3)
    texts = [made.text(device).split() for device in range(2)]
    count = 0
    for device, order in enumerate(texts):
        for i, word in enumerate(order):
            for edited in ([*order[:i], *order[i + 1 :]], [*order[: i + 1], *order[i:]], [*order[:i], word[0] + "9.0"]):
                orders = [GivenOrder.of_text(" ".join(o), f"row {d}") for d, o in enumerate(texts)]
                orders[device] = GivenOrder.of_text(" ".join(edited), f"row {device}")
                with pytest.raises(NnscalerError):
                    read_orders(orders, "mine")
                count += 1
    assert count == 3 * 36


def test_a_smaller_batch_has_fewer_passes() -> None:
    """The engine compiles a program again for another batch, under the same plan."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
    batch = torch.arange(32.0).view(8, 4)
    zipped = kind(SCHEDULES["gpipe"])
    program = parallelize(
        model,
        (batch,),
        ranks=2,
        plan="pp=2",
        schedule=zipped,
        micro_batches=4,
        loss_fn=lambda out, _: out.square().mean(),
    )
    assert program.plan.orders[1] == "F1.0 F1.1 F1.2 F1.3 B1.0 B1.1 B1.2 B1.3"
    (name,) = program.inputs
    smaller = for_batch(program, {name: batch[:2]}, training=True)
    assert (smaller.plan.micro_batches, smaller.plan.orders[1]) == (2, "F1.0 F1.1 B1.0 B1.1")
    assert "\nF1.0 F1.1 B1.0 B1.1\n" in smaller.sources["role_1.py"]
