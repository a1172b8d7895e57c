"""Random legal plans equal the model. The long run is `pytest -m long` or `python benchmarks/random_plans.py`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from nnscaler.ir.conversion_table_and_paths import ROWS
from nnscaler.runtime.program.import_role_and_user_files import load_user_module
from tests.random_plans import (
    IN_PIECES,
    MESHES,
    ON_ANY_DEVICES,
    PIPELINES,
    SLICED,
    UNLIKE,
    Mesh,
    random_plans,
)
from tests.sampling import every
from verify import verify_plan

COUNTS = {"gpt": 4, "llama_hf": 1, "vit_hf": 1, "t5_hf": 1}
LONG = {"gpt": 400, "llama_hf": 100, "vit_hf": 100, "t5_hf": 100}


def check(factory: Callable[[], Any], inputs: Any, seeds: Sequence[int], meshes: Sequence[Mesh]) -> Counter[str]:
    """How often each function of the conversion table occurs in the plans, all of which are exact."""
    rows: Counter[str] = Counter()
    results = list(random_plans(factory, inputs, seeds, meshes))
    assert len(results) == len(seeds) > 0
    for result in results:
        assert result.verdict is not None, f"seed {result.seed} on {result.mesh} was refused: {result.message}"
        assert result.verdict.passes, f"seed {result.seed} on {result.mesh}: {result.message}"
        rows.update(result.rows)
    return rows


@pytest.mark.long
@pytest.mark.parametrize("name", every(2, sorted(COUNTS)))
def test_random_plans_are_exact(name: str, examples: Path) -> None:
    module = load_user_module(str(examples / f"{name}.py"))
    rows = check(module.build_model, module.sample_inputs(), range(COUNTS[name]), MESHES)
    if name == "gpt":
        local = {"append", "own_rows"}  # over slices alone
        assert set(rows) == {row.function for row in ROWS.values()} - local, "a row of the table never occurs"


def test_random_pipelines_are_exact(examples: Path) -> None:
    module = load_user_module(str(examples / "gpt.py"))
    check(module.build_model, module.sample_inputs(), (0,), PIPELINES)


@pytest.mark.long
def test_random_regions_in_pieces_are_exact(examples: Path) -> None:
    module = load_user_module(str(examples / "gpt.py"))
    rows = check(module.build_model, module.sample_inputs(), range(2), IN_PIECES)
    assert rows["join"] >= 2


@pytest.mark.long
def test_random_plans_in_slices_are_exact(examples: Path) -> None:
    module = load_user_module(str(examples / "gpt.py"))
    rows = check(module.build_model, module.sample_inputs(), range(2), SLICED)
    assert rows["append"] >= 16


def untied_gpt(module: Any) -> Callable[[], Any]:
    """Stages on unlike meshes have no parameter in common."""

    def build() -> Any:
        torch.manual_seed(0)
        model = module.GPT(module.GPTConfig(layers=2, heads=6))
        model.head.weight = torch.nn.Parameter(model.wte.weight.detach().clone())
        return model

    return build


@pytest.mark.long
def test_random_pipelines_of_unlike_meshes_are_exact(examples: Path) -> None:
    module = load_user_module(str(examples / "gpt.py"))
    check(untied_gpt(module), module.sample_inputs(), range(2), UNLIKE)


@pytest.mark.long
def test_random_stages_on_any_devices_are_exact(examples: Path) -> None:
    module = load_user_module(str(examples / "gpt.py"))
    check(untied_gpt(module), module.sample_inputs(), (1, 2), ON_ANY_DEVICES)


def odd_gpt(module: Any, dropout: float = 0.1) -> Callable[[], Any]:
    """A vocabulary of 101 and 7 heads of size 5: hardly any dim divides."""

    def build() -> Any:
        torch.manual_seed(0)
        return module.GPT(module.GPTConfig(vocabulary=101, heads=7, width=35, layers=1, dropout=dropout))

    return build


def odd_inputs(batch: int = 5) -> dict[str, torch.Tensor]:
    text = torch.randint(0, 101, (batch, 8), generator=torch.Generator().manual_seed(0))
    return {"ids": text[:, :-1].contiguous(), "labels": text[:, 1:].masked_fill(text[:, 1:] > 80, -100)}


@pytest.mark.long
def test_random_plans_with_unequal_shards_are_exact(examples: Path) -> None:
    module = load_user_module(str(examples / "gpt.py"))
    check(odd_gpt(module), odd_inputs(), (1, 3), MESHES)


@pytest.mark.parametrize(
    ("plan", "ranks", "backend"),
    [
        pytest.param("tp=3", 3, "gloo", marks=pytest.mark.long),
        pytest.param("dp=2,tp=2", 4, "simulator", marks=pytest.mark.long),
    ],
)
def test_policies_split_unevenly_what_does_not_divide(examples: Path, plan: str, ranks: int, backend: Any) -> None:
    module = load_user_module(str(examples / "gpt.py"))
    report = verify_plan(odd_gpt(module, 0.0)(), odd_inputs(), ranks=ranks, plan=plan, backend=backend)
    assert report.verdict.passes, [f.message for f in report.findings]


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", sorted(LONG))
def test_many_random_plans_are_exact(name: str, examples: Path) -> None:
    module = load_user_module(str(examples / f"{name}.py"))
    check(module.build_model, module.sample_inputs(), range(LONG[name]), MESHES)
    check(module.build_model, module.sample_inputs(), range(LONG[name] // 4), PIPELINES)
    check(module.build_model, module.sample_inputs(), range(LONG[name] // 4), IN_PIECES)
    if name == "gpt":
        check(untied_gpt(module), module.sample_inputs(), range(LONG[name] // 4), ON_ANY_DEVICES)
