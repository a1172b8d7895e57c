"""Interlaced pipelines: the ends on all devices together, the layers on one each. Exact, with a part of the table on
each rank; and what cannot run is refused with its place."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nnscaler.cli.main import main
from nnscaler.compile import WantedPlan, compile_traced
from nnscaler.model_file import load_model_file
from nnscaler.transform.plan import Plan, RecomputeStep
from tests.traced_examples import EXAMPLES, loaded, traced
from verify import verify_plan

# `tests/verify/static/test_interlaced.py` proves such programs
SHORT = [("t5_hf", "pp=4", 4, "simulator", "run")]
LONG = [
    ("gpt", "dp=2,pp=2,zero=3", 4, "simulator"),
    *(("gpt", plan, 4, "gloo") for plan in ("pp=4", "tp=2,pp=2", "dp=2,pp=2,zero=1", "dp=2,pp=2,zero=2")),
    ("gpt", "dp=2,tp=2,pp=2,zero=3", 8, "simulator"),
    ("t5_hf", "dp=2,tp=2,pp=2", 8, "simulator"),
    ("t5_hf", "pp=4", 4, "gloo"),
    ("llama_hf", "pp=2", 2, "gloo"),
]


@pytest.mark.parametrize(
    ("name", "plan", "ranks", "backend", "level"),
    [*SHORT, *(pytest.param(*row, "all", marks=pytest.mark.long) for row in LONG)],
)
def test_it_equals_the_model(name: str, plan: str, ranks: int, backend: Any, level: Any) -> None:
    model = loaded(name)
    options = {"schedule": "interlaced", "micro_batches": None, "backend": backend, "level": level}
    options["depth"] = "quick" if level == "run" else "default"
    report = verify_plan(model.build, model.inputs, ranks=ranks, plan=plan, **options)
    assert report.exit_code == 0, [f.message for f in report.findings]


def test_an_untied_head_and_recomputed_layers() -> None:
    gpt, untied = loaded("gpt"), load_model_file(str(EXAMPLES / "gpt.py::build_untied"), 0)

    def again(graph: Any, ranks: int) -> Plan:
        plan = compile_traced(traced("gpt"), WantedPlan(ranks, "pp=2", "interlaced", 4), model={"name": "gpt"}).plan
        return replace(plan, steps=(RecomputeStep(("blocks.0", "blocks.3")), *plan.steps))

    report = verify_plan(untied.build, gpt.inputs, ranks=2, plan=again, backend="simulator", depth="quick")
    assert report.exit_code == 0, [f.message for f in report.findings]


@pytest.mark.long
def test_each_rank_has_a_quarter_of_the_table() -> None:
    program = compile_traced(traced("t5_hf"), WantedPlan(4, "pp=4", "interlaced", 4), model={"name": "t5"})
    (table,) = (entry for entry in program.manifest.parameters if "shared.weight" in entry.fqns)
    bytes_of_table = 4 * table.shape[0] * table.shape[1]
    ends = [entry for entry in program.manifest.memory if entry.stage in (0, 5)]
    assert [(entry.stage, entry.role) for entry in ends] == [(s, d) for s in (0, 5) for d in range(4)]
    assert all(bytes_of_table / 4 <= entry.parameters < bytes_of_table / 4 + 64 for entry in ends)


ORDERS = ("F0.0 F1.0 F3.0 B3.0 B1.0 B0.0", "F0.0 F2.0 F3.0 B3.0 B2.0 B0.0")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stage_devices": [[0, 1], [0], [1], [0, 2]]}, "stage_devices: stage 3 is on the devices [0, 2]"),
        ({"stage_devices": [[0, 1], [0], [1], []]}, "stage_devices: stage 3 is on the devices []"),
        ({"stage_devices": [[0, 1], [0], [1], [1, 0]]}, "rank 1 would hold two shards of it"),
        ({"orders": [ORDERS[0], ORDERS[1].replace(" F3.0 B3.0", "")]}, "device 1: never runs F3.0"),
        (
            {"orders": [ORDERS[0], ORDERS[1].replace("F0.0 F2.0", "F2.0 F0.0")]},
            "device 1 is at F2.0 and waits for F1.0",
        ),
        (
            {"orders": [ORDERS[0].replace("B1.0 B0.0", "B0.0 B1.0"), ORDERS[1]]},
            "device 0 is at B0.0 and waits for B1.0",
        ),
    ],
)
def test_plans_that_cannot_run(
    change: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = compile_traced(traced("gpt"), WantedPlan(2, "pp=2", "interlaced", 1), model={"name": "gpt"})
    told = {**json.loads(program.plan.to_json()), "schedule": "mine", "orders": list(ORDERS), **change}
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(told))
    words = ["compile", str(EXAMPLES / "gpt.py"), "--ranks", "2", "--plan", str(file), "--out", str(tmp_path / "out")]
    assert main(words) == 2
    text = capsys.readouterr().err
    assert message in text and "help:" in text, text
