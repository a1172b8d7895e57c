"""An operator is a function of its inputs: not of its rank, a mode, memory, a dtype that nobody tried, or a file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
import torch.distributed as dist
from torch import Tensor
from torch.distributed import is_initialized

from op_registry.source_location import SourceLocation
from op_registry.spec import OperatorSpec

from nnscaler.ir.operation_placement import Split
from tests.verify import stateful_operators
from tests.verify.lemmas.planted import called, floats, proved, stated
from verify.evidence.inputs.concrete_call import make_call
from verify.evidence.verify_op_options import OpOptions
from verify.operators.audit.side_effects import audit
from verify.operators.report_on_operator import verify_spec
from verify.operators.run.fingerprint import Opaque, fingerprint
from verify.programs.lemmas import check_claims
from verify.results.verdict import Verdict


def spec_of(function: Any, annotation: str = "a b -> a b") -> OperatorSpec:
    return OperatorSpec("planted", annotation, target=function, where=SourceLocation("my_ops.py", 7))


def verdicts(function: Any, annotation: str = "a b -> a b") -> tuple[Verdict, Verdict, str]:
    """Of `verify-op`, of the lemmas of a program, and the code of the first finding."""
    spec = spec_of(function, annotation)
    lemmas = proved(stated(spec, called("planted", [(64, 8)], floats(64, 8)), Split("a")))
    report = verify_spec(spec, OpOptions())
    return report.verdict, lemmas.verdict, report.findings[0].code if report.findings else ""


def by_name(x: Tensor) -> Tensor:
    return x * 2.0 if is_initialized() else x * 1.0


def by_module(x: Tensor) -> Tensor:
    return x * dist.get_world_size() if dist.is_initialized() else x * 1.0


def by_attribute(x: Tensor) -> Tensor:
    return x * 2.0 if torch.distributed.is_initialized() else x * 1.0


def imported(x: Tensor) -> Tensor:
    from torch.distributed import is_available

    return x * 1.0 if is_available() else x * 2.0


@pytest.mark.parametrize("function", [by_name, by_module, by_attribute, imported])
def test_what_an_operator_does_among_ranks_is_not_known_where_it_asks_for_them(function: Any) -> None:
    assert verdicts(function) == (Verdict.INCONCLUSIVE, Verdict.INCONCLUSIVE, "asks_ranks")


@pytest.mark.parametrize("variable", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID"])
def test_another_result_on_another_rank_is_refuted(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def ranked(x: Tensor) -> Tensor:
        return x * (1.0 + int(os.environ.get(variable, "0")))

    before = dict(os.environ)
    assert verdicts(ranked) == (Verdict.REFUTED, Verdict.REFUTED, "not_repeatable")
    assert dict(os.environ) == before


@pytest.mark.parametrize("function", stateful_operators.WRONG)
def test_what_the_first_call_fixes_is_refuted(function: Any) -> None:
    """Here that call is of the whole, and on each rank it is of a shard."""
    assert verdicts(function) == (Verdict.REFUTED, Verdict.REFUTED, "not_repeatable")


@pytest.mark.parametrize("function", stateful_operators.RIGHT)
def test_what_is_kept_and_changes_nothing_passes(function: Any) -> None:
    assert all(verdict.passes for verdict in verdicts(function, "a b^ -> a b^")[:2])


def test_a_variable_that_changes_nothing_passes() -> None:
    def quiet(x: Tensor) -> Tensor:
        return x * 2.0 if os.environ.get("RANK") else x + x

    assert all(verdict.passes for verdict in verdicts(quiet)[:2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_dtype_in_which_it_does_something_else(dtype: torch.dtype) -> None:
    def special(x: Tensor) -> Tensor:
        return (x.double() - x.double().mean(0, keepdim=True)).to(dtype) if x.dtype == dtype else x * 2.0

    assert verdicts(special) == (Verdict.REFUTED, Verdict.REFUTED, "annotation_wrong")


def test_one_draw_is_run_in_narrow_dtypes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no other one shows anything."""

    def special(x: Tensor) -> Tensor:
        return (x.double() - x.double().mean(0, keepdim=True)).half() if x.dtype == torch.float16 else x * 2.0

    every = check_claims._draws
    monkeypatch.setattr(check_claims, "_draws", lambda small: islice(every(small), 1))
    lemmas = proved(stated(spec_of(special), called("planted", [(64, 8)], floats(64, 8)), Split("a")))
    assert lemmas.verdict is Verdict.REFUTED


def test_a_right_operator_passes_in_every_dtype() -> None:
    def row_softmax(x: Tensor) -> Tensor:
        return torch.softmax(x.float(), -1).to(x.dtype)

    report = verify_spec(OperatorSpec("planted", "a b^ -> a b^", target=row_softmax), OpOptions())
    assert report.verdict.passes


def test_code_that_reads_while_it_runs_has_no_digest(tmp_path: Path) -> None:
    """Else a pass would be kept although the file is another one."""
    file = tmp_path / "table.json"

    def of_text(x: Tensor) -> Tensor:
        return x * json.loads(file.read_text())["scale"]

    def of_open(x: Tensor) -> Tensor:
        with open(file) as opened:  # noqa: PTH123 - as users write it
            return x * json.load(opened)["scale"]

    def of_module(x: Tensor) -> Tensor:
        import importlib

        return importlib.import_module("helpers").scaled(x)  # type: ignore[no-any-return]

    def of_variable(x: Tensor) -> Tensor:
        return x * float(os.environ["SCALE"])

    def of_name(x: Tensor) -> Tensor:
        return globals()["by_" + "name"](x)  # type: ignore[no-any-return]

    for function in (of_text, of_open, of_module, of_variable, of_name):
        with pytest.raises(Opaque):
            fingerprint(function)
    assert fingerprint(by_name)


SCRIPT = """
from pathlib import Path
import torch
from op_registry.source_location import SourceLocation
from op_registry.spec import OperatorSpec
from verify.evidence.verify_op_options import OpOptions
from verify.operators.report_on_operator import verify_spec

runs = Path("runs")
runs.write_text(runs.read_text() + "x" if runs.exists() else "x")
assert len(runs.read_text()) < 40, "it starts itself without end"

def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2.0

spec = OperatorSpec("planted", "a b -> a b", target=doubled, where=SourceLocation("script.py", 12))
print(verify_spec(spec, OpOptions()).verdict.name)
"""


def test_a_script_that_verifies_outside_of_functions_ends(tmp_path: Path) -> None:
    """Its file is loaded anew in a child, to see what the operator keeps: which would ask again."""
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(file)], check=False, cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.stdout.split() == ["PROVED_ALL_SIZES"], done.stderr
    assert len((tmp_path / "runs").read_text()) < 10


def in_mode(asked: Callable[[], bool]) -> Callable[[Tensor], Tensor]:
    def of_mode(x: Tensor) -> Tensor:
        return x - x.mean(0, keepdim=True) if asked() else x * 2.0

    return of_mode


@pytest.mark.parametrize(
    "asked",
    [
        torch.is_autocast_enabled,
        lambda: torch.is_autocast_enabled("cpu"),
        torch.is_inference_mode_enabled,
        torch.are_deterministic_algorithms_enabled,
        lambda: torch.get_float32_matmul_precision() == "high",
        lambda: torch.get_num_threads() == 3,
        torch.compiler.is_compiling,
    ],
)
def test_another_result_in_another_mode_of_torch_is_refuted(asked: Callable[[], bool]) -> None:
    assert verdicts(in_mode(asked)) == (Verdict.REFUTED, Verdict.REFUTED, "not_repeatable")
    assert not asked()


def narrow_where_autocast(x: Tensor) -> Tensor:
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
    return torch.tanh(x.to(dtype)).to(x.dtype)


def without_autocast(x: Tensor) -> Tensor:
    """Its float32 rounds otherwise on tensors that lie otherwise."""
    with torch.autocast("cpu", enabled=False):
        return torch.nn.functional.gelu(x.float()).to(x.dtype)


def deterministic_where_asked(x: Tensor) -> Tensor:
    return x + x if torch.are_deterministic_algorithms_enabled() else x * 2.0


@pytest.mark.parametrize("function", [narrow_where_autocast, without_autocast, deterministic_where_asked])
def test_what_a_mode_rounds_alone_passes(function: Any) -> None:
    assert all(verdict.passes for verdict in verdicts(function)[:2])


def triple_where_channels_are_last(x: Tensor) -> Tensor:
    last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return x * 3.0 if last else x * 2.0


class TripleOfExpanded(torch.autograd.Function):
    """Right, but for the gradient of a sum."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x * 2.0

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient * (3.0 if gradient.stride() == (0, 0) else 2.0)


@pytest.mark.parametrize(
    ("function", "annotation"),
    [(triple_where_channels_are_last, "n c h w -> n c h w"), (TripleOfExpanded.apply, "a b -> a b")],
)
def test_values_that_lie_otherwise_are_the_same(function: Any, annotation: str) -> None:
    report = verify_spec(spec_of(function, annotation), OpOptions())
    assert {finding.code for finding in report.findings} == {"strides_matter"}


@pytest.mark.parametrize("seed", range(4))
def test_gradients_that_are_nothing_but_rounding_tell_nothing_of_strides(seed: int) -> None:
    """Those of a sum over a batch norm's output, which is 0 whatever its inputs are."""

    def batch_norm(x: Tensor) -> Tensor:
        return torch.nn.functional.batch_norm(x, None, None, training=True)

    x = torch.randn(6, 3, 2, 2, generator=torch.Generator().manual_seed(seed))
    spec = spec_of(batch_norm, "n^ c h^ w^ -> n^ c h^ w^")
    checks, findings, _ = audit(spec, make_call(spec.name, (x,), {}), 0)
    assert not findings and checks[0].verdict is Verdict.TESTED_EXACT


def test_what_asks_how_values_lie_and_minds_passes() -> None:
    def by_format(x: Tensor) -> Tensor:
        if x.is_contiguous(memory_format=torch.channels_last):
            return (x.permute(0, 2, 3, 1) * 2.0).permute(0, 3, 1, 2)
        return x * 2.0

    assert verify_spec(spec_of(by_format, "n c h w -> n c h w"), OpOptions()).verdict.passes


def narrow_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Of float32 inside, as most are; the gradient of its weight is a sum over rows, and rounds otherwise in parts."""
    h = x.float()
    return (weight.float() * h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def narrow_product(x: Tensor, weight: Tensor) -> Tensor:
    return (x.bfloat16() @ weight.bfloat16()).to(x.dtype)


@pytest.mark.parametrize(
    ("function", "annotation"),
    [pytest.param(narrow_norm, "* d^, d^ -> * d^", marks=pytest.mark.long), (narrow_product, "a k+, k+ n -> a n")],
)
def test_narrower_dtypes_inside_an_operator_only_round(function: Any, annotation: str) -> None:
    assert verify_spec(spec_of(function, annotation), OpOptions()).verdict.passes


def test_a_small_error_is_seen_through_narrower_dtypes_inside() -> None:
    def coupled(x: Tensor) -> Tensor:
        h = x.float()
        return (torch.tanh(h) + 1e-5 * h.mean(0, keepdim=True)).to(x.dtype)

    assert verify_spec(spec_of(coupled), OpOptions()).verdict is Verdict.REFUTED
