"""Minimal scripts: short, without any of our code, and read right."""

from __future__ import annotations

import ast
import importlib.util
import math

import pytest

from nnscaler.errors import NnscalerError
from tests.verify.external.script_runs import ScriptResult, read_result, run_script
from verify.external.transformers.build_program import build, distributed_options
from verify.external.transformers.check_parallel_degrees import PlanChanges, PlanSizes
from verify.external.transformers.repro_script import minimal_script


def script(name: str, sizes: PlanSizes) -> str:
    built = build(name, sizes, {}, exact=False)
    return minimal_script(built, sizes, distributed_options(sizes, PlanChanges(), built.model))


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("apertus", PlanSizes(tp=2)),
        ("qwen3_vl_moe_text", PlanSizes(tp=2, fsdp=2)),
        ("muse_glimmer", PlanSizes(tp=2)),
        ("gemma4_text", PlanSizes(ep=2, tp=2)),
    ],
)
def test_scripts_are_short_and_stand_alone(name: str, sizes: PlanSizes) -> None:
    text = script(name, sizes)
    ast.parse(text)
    assert len(text.splitlines()) <= 20
    imported = {line.split()[1].partition(".")[0] for line in text.splitlines() if line.startswith(("import", "from"))}
    assert imported <= {"atexit,", "transformers"}
    assert f"--nproc_per_node {sizes.shared * sizes.fsdp}" in text


def test_the_configuration_of_a_script_is_the_small_one() -> None:
    built = build("gemma4_text", PlanSizes(tp=2), {}, exact=False)
    text = minimal_script(built, PlanSizes(tp=2), {"tp_size": 2})
    line = next(line for line in text.splitlines() if line.startswith("config = "))
    config = eval(line.removeprefix("config = "), {type(built.config).__name__: type(built.config)})
    assert config.num_hidden_layers == built.config.num_hidden_layers
    assert [layer.head_dim for layer in config.per_layer_config] == [
        layer.head_dim for layer in built.config.per_layer_config
    ]


def test_what_a_script_prints_is_read() -> None:
    logs = [
        """rank 0: loss relative error 2.1e-07
rank 0: a.weight relative error 0.5
rank 0: b.weight relative error 1.01 (held in another order)
""",
        "rank 1: loss relative error 0.003\nrank 1: c.weight relative error inf \nsome warning\n",
    ]
    result = read_result([0, 0], logs)
    assert result.parameters == {"a.weight", "c.weight"}
    assert result.moved == {"b.weight"}
    assert result.loss == 0.003
    assert result.wrong[-1] == (1, "c.weight", math.inf)
    assert result.is_wrong


def test_equal_programs_are_not_wrong() -> None:
    assert not read_result([0, 0], ["rank 0: loss relative error 1e-07", ""]).is_wrong


def test_the_rank_that_failed_first_is_named() -> None:
    logs = ["RuntimeError: Connection closed by peer", "Traceback\n  File\nValueError: no such plan\nend"]
    assert read_result([1, 1], logs) == ScriptResult((), frozenset(), 0.0, "ValueError: no such plan")


@pytest.mark.long
def test_a_script_runs_with_a_process_per_rank() -> None:
    text = (
        "import os, torch, torch.distributed as dist\n"
        'dist.init_process_group("gloo")\n'
        "total = torch.ones(1)\n"
        "dist.all_reduce(total)\n"
        'print(f"rank {dist.get_rank()}: x relative error {total.item()}")\n'
    )
    assert run_script(text, 2).wrong == ((0, "x", 2.0), (1, "x", 2.0))


def test_a_script_that_hangs_is_ended() -> None:
    with pytest.raises(NnscalerError, match="not done in 1 s"):
        run_script("import time\ntime.sleep(60)\n", 2, timeout=1.0)


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="transformers loads with accelerate")
def test_a_wrong_plan_is_confirmed_by_the_librarys_loader() -> None:
    result = run_script(script("qwen3_vl_moe_text", PlanSizes(tp=2)), 2)
    assert {name.split(".")[-2] for name in result.parameters} == {"q_norm", "k_norm"}
