"""Activations of a region fall with the number of its pieces: in the memory profile, and as autograd keeps them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nnscaler.codegen.compiled_program import Program
from nnscaler.communication.communicated_graph import StageProgram
from nnscaler.communication.insert_conversions import materialise
from nnscaler.communication.stage_memory_and_work import kept_bytes, piece_bytes
from nnscaler.compile import WantedPlan, compile_traced
from nnscaler.ir.operation_annotations import signatures
from nnscaler.runtime.communication.communicator import Communicator
from nnscaler.runtime.communication.simulator import Simulator
from nnscaler.runtime.program.import_role_and_user_files import load_role
from nnscaler.runtime.training.executor import RankExecutor
from nnscaler.runtime.training.executor_settings import ExecutorSettings
from nnscaler.transform.apply import apply_plan
from nnscaler.transform.plan import ChunkStep, Plan, RecomputeStep
from tests.traced_examples import traced

LAYER = "swin.encoder.layers.0.blocks.1"
HEADS = "scaled_dot_product_attention*:b"
REGIONS = {f"{LAYER}.attention": HEADS, f"{LAYER}.mlp": "n"}


@cache
def stage(*steps: Any) -> StageProgram:
    graph = traced("swin_hf").graph
    known = dict(signatures(graph))
    return materialise(apply_plan(graph, known, Plan((), steps)), known).stages[0]


@pytest.mark.long
@pytest.mark.parametrize("module", REGIONS)
def test_the_profile_counts_one_piece(module: str) -> None:
    graph = traced("swin_hf").graph
    whole = kept_bytes(graph, stage())
    for parts in (2, 4):
        step = ChunkStep((module,), "co", REGIONS[module], parts)
        again, kept = stage(step), stage(ChunkStep((module,), "co", REGIONS[module], parts, recompute=False))
        (piece,) = piece_bytes(graph, again).values()
        assert piece * parts == pytest.approx(whole - kept_bytes(graph, again), rel=0.05)
        assert not piece_bytes(graph, kept) and kept_bytes(graph, kept) == pytest.approx(whole, rel=0.01)


def program(*steps: Any) -> Program:
    return compile_traced(traced("swin_hf"), WantedPlan(1, Plan((), steps)), model={"name": "swin"})


def test_the_manifest_has_the_largest_region(tmp_path: Path) -> None:
    steps = [ChunkStep((m,), "co", i, 2) for m, i in REGIONS.items()]
    largest = max(piece_bytes(traced("swin_hf").graph, stage(*steps)).values())
    kept = kept_bytes(traced("swin_hf").graph, stage(*steps))
    assert program(*steps).manifest.memory[0].activations == kept + largest


def kept_by_autograd(made: Program, folder: Path) -> int:
    """Return the bytes that a call of a recomputed function keeps, beside parameters and what it is given; the most of
    all calls."""
    path = made.save(folder)
    role = load_role(path / made.manifest.roles[0].file)
    found: list[int] = []

    def counted(function: Callable[..., Any], *tensors: Tensor) -> Any:
        storages: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            results = function(*tensors)
        for outside in (*tensors, *stored):
            storages.pop(outside.untyped_storage().data_ptr(), None)
        found.append(sum(storages.values()))
        return results

    def run(communicator: Communicator) -> None:
        executor = RankExecutor(role, 0, communicator, made.state, ExecutorSettings(dropout=False))
        stored.extend(
            getattr(s, n) for s in executor.stages.values() for n in (*s.parameters, *s.buffers, *s.constants)
        )
        executor.step(made.inputs)

    stored: list[Tensor] = []
    role.__dict__["recompute"] = counted
    Simulator(1).run(run)
    return max(found)


@pytest.mark.long
@pytest.mark.parametrize("module", REGIONS)
def test_autograd_keeps_one_piece(module: str, tmp_path: Path) -> None:
    whole = kept_by_autograd(program(RecomputeStep((module,))), tmp_path / "whole")
    for parts in (2, 4):
        step = ChunkStep((module,), "co", REGIONS[module], parts)
        piece = kept_by_autograd(program(step), tmp_path / str(parts))
        assert 1 - piece / whole == pytest.approx(1 - 1 / parts, rel=0.05)
