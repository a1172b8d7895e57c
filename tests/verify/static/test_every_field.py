"""Every field that the runtime reads of a role module, and every entry of the manifest, has a check: an edit of it in a
pipelined program with tensor parallelism is refuted without running it, or the field does not matter."""
# ruff: noqa: E501 - a table of edits, one to a line

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nnscaler
from nnscaler.codegen.compiled_program import Program
from nnscaler.ir.mixed_precision_dtypes import Precision
from nnscaler.manifest import Manifest, read_manifest
from nnscaler.runtime import stage_base_class
from nnscaler.transform.plan import ChunkStep
from tests.broken import models
from verify.programs.typing import check_program

DECLARED = ("Parameter", "Buffer", "Constant", "Input", "Receive", "Send", "Exchange", "Loss", "Result")
ROW = re.compile(r"^\| (?P<names>`[^|]*`) \|", re.MULTILINE)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(12, 24)
        self.down = nn.Linear(24, 12)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(torch.tanh(self.up(x))), 0.1, self.training)


class Model(nn.Module):
    """Tied, frozen and unused weights, buffers of which some change, and a constant, over two stages."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(24, 12)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.BatchNorm1d(12)
        self.head = nn.Linear(12, 24, bias=False)
        self.head.weight = self.words.weight
        self.fixed = nn.Parameter(torch.rand(12), requires_grad=False)
        self.spare = nn.Parameter(torch.ones(3))
        self.register_buffer("scale", torch.rand(12))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.norm(self.words(ids)) * self.scale * torch.tensor([0.5, 1.5, 2.0] * 4)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x * self.fixed), labels, ignore_index=0)


def _batch() -> dict[str, Tensor]:
    ids = torch.arange(12) % 24
    return {"ids": ids, "labels": ids.flip(0)}


class Rounding(Model):
    """Casts its loss at the end, as models of half precision do."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return super().forward(ids, labels).to(torch.bfloat16)


class Returning(nn.Module):
    """Returns what it counts and what it finds beside its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        found = self.up(x)
        return {"loss": self.down(found.relu()).square().mean(), "found": found}


class Running(nn.Module):
    """Adds up the tokens before each one."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x).cumsum(1).square().mean()


def _exchanging() -> Program:
    """A stage of one rank before one of two, with micro-batches: what crosses is exchanged."""
    plan = nnscaler.parallelize(models.perceptron(), models.points(), ranks=2, plan="pp=2", micro_batches=2).plan
    uneven = dataclasses.replace(plan, mesh=(("pp", 2),), stage_axes=((("dp", 1),), (("tp", 2),)))
    return nnscaler.parallelize(models.perceptron(), models.points(), ranks=3, plan=uneven)


@pytest.fixture(scope="module")
def programs() -> dict[str, Program]:
    torch.manual_seed(0)
    batch = {"ids": torch.arange(12), "labels": torch.arange(12).flip(0)}
    piped = nnscaler.parallelize(Model(), batch, ranks=4, plan="tp=2,pp=2")
    returning = nnscaler.parallelize(Returning(), {"x": torch.rand(6, 4)}, ranks=2, plan="tp=2")
    half = Precision(param="bfloat16")
    rested = nnscaler.parallelize(models.perceptron(), models.points(), ranks=2, plan="dp=2,zero=1", precision=half)
    cast = nnscaler.parallelize(Rounding(), batch, ranks=2, plan="pp=2")
    region = ChunkStep(("up", "relu", "down"), "co", "n", 2)
    pieces = nnscaler.parallelize(Returning(), {"x": torch.rand(6, 4)}, ranks=1, plan=nnscaler.Plan((), (region,)))
    return {
        "piped": piped,
        "exchanging": _exchanging(),
        "returning": returning,
        "rested": rested,
        "cast": cast,
        "pieces": pieces,
        "sliced": nnscaler.parallelize(Running(), {"x": torch.rand(2, 4, 3)}, ranks=1, plan="slices=2"),
        "stream": nnscaler.parallelize(
            models.perceptron(), models.points(), ranks=2, plan="pp=2", schedule="pipedream"
        ),
    }


EDITS: dict[str, tuple[str, str, str]] = {
    # field: program, the text's pattern, what it becomes
    "STAGES": ("piped", r"STAGES = \(Stage1,\)", "STAGES = ()"),
    "RANKS": ("piped", r"RANKS = \(2, 3\)", "RANKS = (3, 2)"),
    "SCHEDULE": ("exchanging", r"B1\.0 F1\.1", "F1.1 F1.0"),
    "Stage.index": ("piped", r"index = 1", "index = 2"),
    "Stage.ranks": ("piped", r"ranks = \(2, 3\)\n    axes", "ranks = (3, 2)\n    axes"),
    "Stage.axes": ("piped", r'axes = \{"tp": 2\}', 'axes = {"dp": 2}'),
    "Stage.micro_batches": ("exchanging", r"micro_batches = 2", "micro_batches = 1"),
    "Stage.staleness": ("stream", r"staleness = 1", "staleness = 0"),
    "Stage.versions": ("stream", r"versions = 2", "versions = 1"),
    "Stage.slices": ("sliced", r"slices = 2", "slices = 4"),
    "Stage.time_axes": ("pieces", r'time_axes = \{"co": 2\}', 'time_axes = {"co": 3}'),
    "Stage.parameters": ("piped", r'        "spare": Parameter[^\n]*\n', ""),
    "Stage.frozen": ("piped", r"    frozen = \{", "    buffers = {"),
    "Stage.buffers": ("piped", r'        "norm_running_mean": Buffer[^\n]*\n', ""),
    "Stage.constants": ("piped", r"    constants = \{", "    buffers = {"),
    "Stage.inputs": ("piped", r'"ids": Input\("ids"', '"ids": Input("labels"'),
    "Stage.prepare_inputs": ("piped", r"    inputs = \{", "    prepare_inputs = {"),
    "Stage.receives": ("piped", r'"add": Receive', '"added": Receive'),
    "Stage.sends": ("piped", r"        Send\([^\n]*\n", ""),
    "Stage.loss": ("piped", r"    loss = Loss\(\{\}\)\n", ""),
    "Stage.updates": ("piped", r'"new norm_running_mean": "norm_running_mean", "new norm_running_var": "norm_running_var"', '"new norm_running_mean": "norm_running_var", "new norm_running_var": "norm_running_mean"'),
    "Parameter.fqn": ("piped", r'Parameter\("layers\.0\.up\.weight"', 'Parameter("layers.1.up.weight"'),
    "Parameter.shape": ("piped", r'"words\.weight", \(24, 12\)', '"words.weight", (24, 6)'),
    "Parameter.dtype": ("piped", r'"spare", \(3,\), "float32"', '"spare", (3,), "float64"'),
    "Parameter.states": ("piped", r'("layers\.0\.up\.weight".*)Sharded\(0\)', r"\1Sharded(0, outer=2)"),
    "Parameter.reduce": ("exchanging", r'("layers\.1\.bias".*), reduce=\("tp",\)', r"\1"),
    "Parameter.copies": ("piped", r"copies=\(\(0, 1\), \(2, 3\)\)", "copies=((2, 3), (0, 1))"),
    "Parameter.used": ("piped", r", used=False", ""),
    "Parameter.rest": ("rested", r'rest=\{"dp": Sharded\(0\)', 'rest={"tp": Sharded(0)'),
    "Parameter.scatter": ("rested", r'(rest=\{"dp": Sharded\(0\)\})', r'\1, scatter="often"'),
    "Parameter.master": ("rested", r'master="float32"', 'master="float64"'),
    "Parameter.sums": ("rested", r'master="float32"', 'master="float32", sums="bfloat16"'),
    "Buffer.fqn": ("piped", r'Buffer\("norm\.running_mean"', 'Buffer("norm.running_var"'),
    "Buffer.shape": ("piped", r'Buffer\("scale", \(12,\)', 'Buffer("scale", (12, 1)'),
    "Buffer.dtype": ("piped", r'Buffer\("scale", \(12,\), "float32"', 'Buffer("scale", (12,), "bfloat16"'),
    "Buffer.states": ("piped", r'(Buffer\("scale".*)\{\}', r'\1{"tp": Sharded(0)}'),
    "Constant.fqn": ("piped", r'Constant\("_constants\.0"', 'Constant("_constants.1"'),
    "Constant.shape": ("piped", r'Constant\("_constants\.0", \(12,\)', 'Constant("_constants.0", (1, 12)'),
    "Constant.dtype": ("piped", r'(Constant\("_constants\.0", \(12,\)), "float32"', r'\1, "float64"'),
    "Constant.states": ("piped", r'(Constant\("_constants\.0".*)\{\}', r'\1{"tp": Sharded(0)}'),
    "Input.name": ("piped", r'Input\("labels"', 'Input("ids"'),
    "Input.states": ("exchanging", r'Input\("y", \{"micro": Sharded\(0\)', 'Input("y", {"micro": Sharded(0, outer=2)'),
    "Receive.key": ("piped", r'Receive\("add@1"', 'Receive("add@2"'),
    "Receive.stage": ("piped", r'Receive\("add@1", 0', 'Receive("add@1", 1'),
    "Receive.shape": ("piped", r'Receive\("add@1", 0, \(12, 6\)', 'Receive("add@1", 0, (6, 12)'),
    "Receive.dtype": ("piped", r'(Receive\("add@1", 0, \(12, 6\)), "float32"', r'\1, "float64"'),
    "Receive.peers": ("piped", r"peers=\(0, 1\)", "peers=(1, 0)"),
    "Receive.needs_grad": ("piped", r"peers=\(0, 1\)", "peers=(0, 1), needs_grad=False"),
    "Send.key": ("piped", r'Send\("add@1"', 'Send("add@2"'),
    "Send.stage": ("piped", r'Send\("add@1", 1', 'Send("add@1", 0'),
    "Send.peers": ("piped", r"peers=\(2, 3\)", "peers=(3, 2)"),
    "Send.needs_grad": ("piped", r"peers=\(2, 3\)", "peers=(2, 3), needs_grad=False"),
    "Exchange.key": ("exchanging", r'Exchange\("linear@1"', 'Exchange("linear@2"'),
    "Exchange.stage": ("exchanging", r'Exchange\("linear@1", 1', 'Exchange("linear@1", 0'),
    "Exchange.messages": ("exchanging", r'(Exchange\("linear@1", 1, )(\(\(0, 1, .*?\)\)\), )(\(0, 2, .*?\)\)\), )\)', r"\1(\3\2)"),
    "Exchange.backward": ("exchanging", r"\(\(1, 0, ", "((2, 0, "),
    "Exchange.shape": ("exchanging", r"\(6, 10\), \"float32\"", '(10, 6), "float32"'),
    "Exchange.dtype": ("exchanging", r'("linear": Exchange.*)"float32"', r'\1"float64"'),
    "Exchange.needs_grad": ("exchanging", r'(Exchange.*)"float32"\)', r'\1"float32", needs_grad=False)'),
    "Stage.results": ("returning", r'        "found": Result[^\n]*\n', ""),
    "Result.shape": ("returning", r"Result\(\(6, 6\)", "Result((6, 12)"),
    "Result.dtype": ("returning", r'Result\(\(6, 6\), "float32"', 'Result((6, 6), "float64"'),
    "Result.states": ("returning", r'("found": Result.*)Sharded\(1\)', r"\1Sharded(0)"),
    "Loss.casts": ("cast", r', casts=\("bfloat16",\)', ""),
    "Loss.states": ("exchanging", r'Loss\(\{"micro": Partial\(\)\}\)', "Loss({})"),
}  # fmt: skip
EDITS_BESIDE = {
    "use of what is frozen": ("piped", r'("fixed", \(12,\), "float32", \{[^}]*\})', r"\1, used=False"),
}
HARMLESS = {
    "the order of parameters": ("piped", r'(        "spare": Parameter[^\n]*\n)(        "words_weight": Parameter[^\n]*\n)', r"\2\1"),
    "the order of buffers": ("piped", r'(        "scale": Buffer[^\n]*\n)(        "norm_running_mean": Buffer[^\n]*\n)', r"\2\1"),
    "the order of updates": ("piped", r'updates = \{("new norm_running_mean": "norm_running_mean"), ("new norm_running_var": "norm_running_var")', r"updates = {\2, \1"),
    "what is so by default": ("piped", r"peers=\(2, 3\)", "peers=(2, 3), needs_grad=True"),
    "where a parameter rests": ("rested", r', rest=\{"dp": Sharded\(0\)\}', ""),
    "when a gradient is divided": ("rested", r'(rest=\{"dp": Sharded\(0\)\})', r'\1, scatter="micro_batch"'),
    "the dtype that a sender declares": ("exchanging", r'( +Exchange\("linear@1", 1.*)"float32"', r'\1"float64"'),
}  # fmt: skip


def edited(program: Program, pattern: str, new: str) -> dict[str, str]:
    """The texts with the edit at its first place."""
    sources = dict(program.sources)
    for file, text in sources.items():
        changed, times = re.subn(pattern, new, text, count=1)
        if times:
            assert changed != text
            return {**sources, file: changed}
    raise AssertionError(f"no text has {pattern}")


@pytest.mark.parametrize(
    ("name", "pattern", "new"), [*EDITS.values(), *EDITS_BESIDE.values()], ids=[*EDITS, *EDITS_BESIDE]
)
def test_an_edit_of_a_field_is_refuted(name: str, pattern: str, new: str, programs: dict[str, Program]) -> None:
    program = programs[name]
    assert not check_program(edited(program, pattern, new), program.graph).proved


@pytest.mark.parametrize(("name", "pattern", "new"), HARMLESS.values(), ids=list(HARMLESS))
def test_what_does_not_matter_is_proved(name: str, pattern: str, new: str, programs: dict[str, Program]) -> None:
    program = programs[name]
    assert check_program(edited(program, pattern, new), program.graph, manifest=program.manifest).proved


def fields_of_roles() -> set[str]:
    """All that the runtime can read of a role module: its declarations have no other attributes."""
    declared = {f"{name}.{f.name}" for name in DECLARED for f in dataclasses.fields(getattr(stage_base_class, name))}
    stage = {
        f"Stage.{name}" for name, kind in stage_base_class.Stage.__annotations__.items() if "ClassVar" in str(kind)
    }
    return declared | stage | {"STAGES", "RANKS", "SCHEDULE"}


def entries_read() -> set[str]:
    """Entries of the manifest that the source of the runtime names, in itself or through the reader and the properties
    of the manifest."""
    folder, entries = Path(stage_base_class.__file__).parent, {field.name for field in dataclasses.fields(Manifest)}
    named = {name for file in folder.rglob("*.py") for name in _attributes(file.read_text(encoding="utf-8"))}
    through = {
        entry
        for name in named - entries
        for entry in _attributes(textwrap.dedent(_source_of(getattr(Manifest, name))), "self")
    }
    assert "format" in inspect.getsource(read_manifest)  # before anything else is read
    return (named & entries) | (through & entries) | {"format"}


def _attributes(source: str, of: str = "manifest") -> Iterator[str]:
    """Attributes of what is called so, or of what `read_manifest` returns."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            if owner.rpartition(".")[2] == of or owner.startswith("read_manifest("):
                yield node.attr


def _source_of(member: Any) -> str:
    return inspect.getsource(member.fget if isinstance(member, property) else member)


def in_tables(repository: Path) -> list[str]:
    text = (repository / "docs" / "program-folder.md").read_text(encoding="utf-8")
    rows = [re.findall(r"`([^`]+)`", row["names"]) for row in ROW.finditer(text[text.index("## Role modules") :])]
    return [name for row in rows for name in row]


@pytest.mark.long
def test_every_field_is_in_the_table_and_has_an_edit(repository: Path) -> None:
    tables = in_tables(repository)
    assert len(tables) == len(set(tables))
    assert fields_of_roles() == set(EDITS)
    assert fields_of_roles() | entries_read() == set(tables)


# in the launcher's first line, and nowhere else
TOLD: dict[str, Any] = {"model": {}, "axes": (), "plan": "", "schedule": ""}
REFUSED = {"format"}  # by whoever opens the folder
STATE = {"state", "batch"}  # compared with the tensors: tests/broken/test_folder.py
OF_FILES = {"operator_files"}  # compared with the files: tests/verify/test_program_folder.py
CHANGES: dict[str, Callable[[Any], Any]] = {
    "ranks": lambda ranks: ranks + 1,
    "roles": lambda roles: roles[:1],
    "inputs": lambda inputs: (dataclasses.replace(inputs[0], shape=(1, *inputs[0].shape)), *inputs[1:]),
    "parameters": lambda parameters: tuple(dataclasses.replace(p, fqns=p.fqns[:1]) for p in parameters),
    "buffers": lambda buffers: buffers[1:],
    "micro_batches": lambda count: count + 1,
    "returns": lambda returns: dataclasses.replace(returns, structure='{"tuple": [{"tensor": "loss"}]}'),
}


@pytest.mark.long
def test_an_edit_of_an_entry_of_the_manifest_is_refuted(programs: dict[str, Program]) -> None:
    assert entries_read() == CHANGES.keys() | TOLD.keys() | REFUSED | STATE | OF_FILES
    program = programs["piped"]
    manifest = program.manifest
    assert check_program(program.sources, program.graph, manifest=manifest).proved
    for entry, change in CHANGES.items():
        changed = dataclasses.replace(manifest, **{entry: change(getattr(manifest, entry))})
        assert changed != manifest
        result = check_program(program.sources, program.graph, manifest=changed)
        found = [finding for outcome in result.outcomes for finding in outcome.findings]
        assert [finding.code for finding in found] == ["record_differs"], entry
        assert found[0].message.startswith(f"manifest.json has {entry}")
    last = dataclasses.replace(manifest.parameters[-1], dtype="bfloat16")
    changed = dataclasses.replace(manifest, parameters=(*manifest.parameters[:-1], last))
    ((finding,),) = [
        o.findings for o in check_program(program.sources, program.graph, manifest=changed).outcomes if o.findings
    ]
    at = f"parameters[{len(manifest.parameters) - 1}].dtype"
    assert finding.message == f"manifest.json has {at} bfloat16, and the model has float32"
    for entry, value in TOLD.items():
        changed = dataclasses.replace(manifest, **{entry: value})
        assert changed != manifest
        assert check_program(program.sources, program.graph, manifest=changed).proved
