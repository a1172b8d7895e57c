"""`nnscaler list ops --missing`: its stubs, pasted, leave nothing missing, and the operators are split and verified."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from op_registry.registry import default_registry

from nnscaler.cli.commands.list_things import missing_of
from nnscaler.cli.main import main
from nnscaler.cli.output.console import Console
from nnscaler.compile import parallelize
from nnscaler.model_file import load_model_file
from nnscaler.transform.plan import SplitStep
from verify.operators.unannotated.report_missing_operators import missing_lines

RARE = "special_i1e"
MODEL = """\
import torch
from torch import Tensor, nn


@torch.library.custom_op("test_missing::gate", mutates_args=())
def gate(x: Tensor, y: Tensor) -> Tensor:
    return x * torch.sigmoid(y)


@gate.register_fake
def _(x, y):
    return torch.empty_like(x)


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, g):
    x, y = ctx.saved_tensors
    s = torch.sigmoid(y)
    return g * s, g * x * s * (1 - s)


gate.register_autograd(_backward, setup_context=_setup)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, factor):
        ctx.save_for_backward(x, w)
        ctx.factor = factor
        return (x @ w) * factor

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w.t() * ctx.factor, (x.flatten(0, -2).t() @ g.flatten(0, -2)) * ctx.factor, None


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, g):
        return 2 * g


class Block(nn.Module):
    def __init__(self, d, f):
        super().__init__()
        self.up, self.beside = nn.Linear(d, f), nn.Linear(d, f)
        self.down = nn.Parameter(torch.randn(f, d) / f)

    def forward(self, x):
        h = torch.ops.test_missing.gate(self.up(x), self.beside(x))
        h = Double.apply(torch.ops.aten.RARE(h))
        return x + Scaled.apply(h, self.down, 0.5)


class Model(nn.Module):
    def __init__(self, d=16, f=64):
        super().__init__()
        self.blocks = nn.ModuleList(Block(d, f) for _ in range(2))

    def forward(self, x):
        scale = torch.special.bessel_j0(x).mean()
        for block in self.blocks:
            x = block(x)
        return (x * scale).square().mean()


def build_model():
    return Model()


class Last(nn.Module):
    def __init__(self, d, f):
        super().__init__()
        self.up, self.down = nn.Linear(d, f), nn.Parameter(torch.randn(f, d))

    def forward(self, x):
        return Scaled.apply(self.up(x), self.down, 0.5).square().mean()


def without_data():
    with torch.device("meta"):
        return Last(16, 1 << 19)


def untraceable():
    class Untraceable(Model):
        def forward(self, x):
            return super().forward(x) if self.blocks[0].down.sum().item() > 0 else x.sum()

    return Untraceable()


def sample_inputs():
    return {"x": torch.randn(4, 3, 16)}
"""


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget, after the test, the operators that it registers."""
    registry = default_registry()
    registry.names()
    monkeypatch.setattr(registry, "_specs", dict(registry._specs))


@pytest.fixture
def rare(own_registry: None) -> str:
    """An operator of torch as one that nobody has annotated."""
    for name in (RARE, "special_bessel_j0"):
        default_registry()._specs.pop(f"aten.{name}.default")
    return RARE


@pytest.fixture
def model(tmp_path: Path, rare: str) -> Path:
    file = tmp_path / "model.py"
    file.write_text(MODEL.replace("RARE", rare))
    return file


def listed(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 1) -> dict[str, Any]:
    assert main(["list", "ops", "--missing", *arguments, "--json", "-q"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def paste(text: str, stubs: list[Mapping[str, Any]]) -> str:
    """The file's text with each stub where it says."""
    lines = text.split("\n")
    for stub in sorted(stubs, key=lambda s: -s["above"]):
        if stub["above"]:
            lines[stub["above"] - 1 : stub["above"] - 1] = stub["stub"].rstrip("\n").split("\n")
    rest = [stub["stub"] for stub in stubs if not stub["above"]]
    return "\n\n\n".join(["import nnscaler\n" + "\n".join(lines), *rest])


def test_pasted_stubs_leave_nothing_missing(
    model: Path, rare: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = missing_of(str(model), 0, None, False, 60.0, Console(verbosity=0))
    found = report.as_dict()
    rows = {row["name"]: row for row in found["missing"]}
    assert set(rows) == {f"aten.{rare}.default", "test_missing.gate.default", "Scaled", "Double"}
    assert {row["verdict"] for row in rows.values()} == {"TESTED (exact)"}
    assert all(row["own_shapes"] and row["calls"] == 2 for row in rows.values())
    assert [row["operator"] for row in found["local"]] == ["aten.special_bessel_j0.default"]
    assert rows["Scaled"]["annotation"] == "* a+, a+ b -> * b"
    assert rows["Scaled"]["places"][0]["modules"] == ["blocks.0", "blocks.1"]
    flops = found["matmul_flops"]
    assert flops["missing"] == pytest.approx(1 / 3)
    assert flops["divided_now"] < 0.9 and flops["divided_with_stubs"] == 1
    check_text([line.text for line in missing_lines(report)], model)

    pasted = tmp_path / "pasted.py"
    pasted.write_text(paste(model.read_text(), found["missing"]))
    assert listed(capsys, str(pasted), code=0)["missing"] == []
    loaded = load_model_file(str(pasted), 0)
    program = parallelize(loaded.build(), loaded.inputs, ranks=2, plan="tp=2")
    split = {n for step in program.plan.steps if isinstance(step, SplitStep) for n in step.operations}
    by_operator = {op.operator: op.name in split for op in program.graph.operations}
    assert all(by_operator[name] for name in (f"aten.{rare}.default", "test_missing.gate.default", "Scaled", "Double"))
    assert main(["verify-plan", str(pasted), "--plan", "tp=2", "--backend", "simulator", "--quick", "-q"]) == 0
    assert "VERIFIED" in capsys.readouterr().out
    assert main(["verify-op", f"{pasted}::Scaled", "--no-prove", "--cases=4", "--no-cache", "-q"]) == 0
    assert "VERIFIED  Scaled" in capsys.readouterr().out


def check_text(lines: list[str], model: Path) -> None:
    place = MODEL.split("\n").index("        return x + Scaled.apply(h, self.down, 0.5)") + 1
    assert f"  --> {model}:{place} in blocks.0 (Block) and 1 more" in lines
    assert any('Scaled.forward.__annotations__.update({"factor": float})' in line for line in lines)
    samples = "sample_inputs=lambda: (torch.randn(4, 3, 64), torch.randn(64, 16), 0.5)"  # no annotation says the 0.5
    assert f'    nnscaler.register_op("* a+, a+ b -> * b", {samples})(Scaled)' in lines
    assert '    @nnscaler.register_op("* -> *")' in lines
    assert any("no parameter reaches it" in line and "special_bessel_j0.default (1 call)" in line for line in lines)
    assert lines[-1] == "4 of 10 operators without annotation  model.py: 4 with a stub, 0 without"


@pytest.mark.long
def test_a_model_without_data_has_stubs_too(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = listed(capsys, f"{model}::without_data")["missing"]
    assert row["annotation"] == "* a+, a+ b -> * b"
    assert not row["own_shapes"]


@pytest.mark.long
def test_a_gradient_for_one_number_of_dims_has_no_star(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model.write_text(model.read_text().replace("flatten(0, -2)", "flatten(0, 1)"))
    (row,) = listed(capsys, f"{model}::without_data")["missing"]
    assert row["annotation"] == "a b c+, c+ d -> a b d"


@pytest.mark.long
def test_a_model_that_does_not_trace_says_why(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "ops", "--missing", f"{model}::untraceable"]) == 2
    assert "torch.export cannot trace the model" in capsys.readouterr().err


def test_only_ops_can_be_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "plans", "--missing", "model.py"]) == 2
    assert "--missing is about ops" in capsys.readouterr().err


DECIDED = """\
import torch
from torch import nn


class Packed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, options):
        return x * options["factor"]

    @staticmethod
    def backward(ctx, g):
        return 3 * g, None


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.round(x)

    @staticmethod
    def backward(ctx, g):
        return g


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 8, 5))

    def forward(self, x):
        w = x * self.weight
        first = torch.linalg.cross(w, w.exp(), dim=0)
        second = torch.linalg.cross(w[:, 0, :3], w[:, 1, :3].exp(), dim=1)
        inverse = torch.linalg.inv(w[:, :5])
        packed = Packed.apply(w, {"factor": 3})
        return first.square().mean() + second.mean() + packed.sum() + Straight.apply(w).mean() + inverse.mean()


def build_model():
    return Model()


def sample_inputs():
    return (torch.randn(3, 8, 5),)
"""


def test_arguments_that_decide_are_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("aten.linalg_cross.default", "aten.linalg_inv.default"):
        monkeypatch.delitem(default_registry()._specs, name, raising=False)
    file = tmp_path / "decided.py"
    file.write_text(DECIDED)
    rows = {row["name"]: row for row in listed(capsys, str(file))["missing"]}
    cross = rows["aten.linalg_cross.default"]
    assert cross["annotation"] == ["a^ b c, d^ b c -> a^ b c", "a b^, a c^ -> a b^"]
    assert 'call.get(2, "dim", -1)' in cross["stub"] and '((3, 3), 0): "a^ b c, d^ b c -> a^ b c"' in cross["stub"]
    assert '.get(key, "?, ?, ? -> ?")' in cross["stub"]
    assert rows["Packed"]["stub"] is None and "argument 1 is a dict" in rows["Packed"]["problem"]
    assert 'gradient="custom"' in rows["Straight"]["stub"]
    assert rows["aten.linalg_inv.default"]["annotation"].startswith("* a^ a^ -> ")
    pasted = tmp_path / "pasted.py"
    pasted.write_text(paste(DECIDED, [row for row in rows.values() if row["stub"]]))
    assert [row["name"] for row in listed(capsys, str(pasted))["missing"]] == ["Packed"]
