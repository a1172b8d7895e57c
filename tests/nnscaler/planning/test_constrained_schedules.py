"""Schedules that constraints and callers of a search ask for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nnscaler.compile import WantedPlan, compile_traced
from nnscaler.errors import NnscalerError
from nnscaler.ir.operation_annotations import signatures
from nnscaler.planning.auto_plan_request import AutoPlan
from nnscaler.planning.constraints import sizes
from nnscaler.planning.constraints.read_toml_constraints import parse_constraints
from nnscaler.planning.parallel_configurations import Configuration
from nnscaler.scheduling.registry import SCHEDULES, get_schedule
from tests.nnscaler.planning.planner.planned import graph_of
from tests.traced_examples import traced


def test_a_schedule_is_a_size(tmp_path: Path) -> None:
    """By its name, with any number of stages or with one; in a file as in Python; as a schedule too."""
    c = Configuration(pp=2, micro_batches=4, schedule=SCHEDULES["interleaved"], chunks=2)
    for schedule in ("interleaved", "Interleaved:2", "interleaved:02", SCHEDULES["interleaved"]):
        assert sizes(schedule).permits(c) and not sizes(schedule).permits(replace(c, schedule=SCHEDULES["gpipe"]))
    assert not sizes("interleaved:3").permits(c)
    file = tmp_path / "kept.toml"
    for value, message in (('"zb_q"', "no schedule 'zb_q'"), ("3", "schedule is 3")):
        file.write_text(f"[[constraint]]\nkind = 'sizes'\nschedule = {value}\n")
        with pytest.raises(NnscalerError, match=message) as found:
            parse_constraints(file)
        assert f"{file}: constraint 1 (sizes)" in found.value.message
    file.write_text("[[constraint]]\nkind = 'sizes'\nschedule = 'interleaved:2'\n")
    (made,) = parse_constraints(file)
    graph = graph_of("gpt")
    assert made(graph, signatures(graph)).permits(c)


def test_a_schedule_beside_a_searched_plan_is_kept() -> None:
    wanted = AutoPlan("h100x8", None, sizes(pp=2))
    for schedule in ("gpipe", SCHEDULES["gpipe"]):
        program = compile_traced(
            traced("gpt"), WantedPlan(2, wanted, schedule=schedule, micro_batches=2), model={"name": "gpt"}
        )
        assert program.plan.schedule == "gpipe"


def test_what_is_searched_later_has_no_orders_before() -> None:
    with pytest.raises(NnscalerError, match="are searched for the stages of a program"):
        get_schedule("search")(2, 1, 4)
