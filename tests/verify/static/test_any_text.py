"""No text makes the prover crash, or go on for ever: what it cannot make sense of is a finding, and never a proof."""
# ruff: noqa: E501 - a table of edits, one to a line

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nnscaler
from nnscaler.codegen.compiled_program import Program
from nnscaler.errors import NnscalerError
from nnscaler.manifest import MANIFEST, read_manifest
from nnscaler.runtime.communication.communicator import ProgramError
from nnscaler.runtime.program.program_directory import read_program
from verify.programs.opened_program import open_program
from verify.programs.typing import check_program, check_text_computes_graph
from verify.programs.typing.lines.canonical_calls import NoCall, canonical
from verify.programs.typing.lines.type_operation_lines import Typer
from verify.programs.typing.program_files.rank_program_syntax import Assignment, Variable
from verify.results.finding import Finding

HUGE = "1" + "0" * 400
FAR = "1" + "0" * 12


class _Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(F.dropout(self.a(x), 0.5)) + torch.zeros(4, 8)
        return y.square().mean()


class _Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.square().mean()


class _Taken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight)
        return (y.sort(-1).values * y).mean()


@pytest.fixture(scope="module")
def dropping() -> Program:
    return nnscaler.parallelize(_Dropping(), {"x": torch.randn(4, 8)}, ranks=2, plan="dp=2")


@pytest.fixture(scope="module")
def deep() -> Program:
    return nnscaler.parallelize(_Deep(), {"x": torch.randn(8, 8)}, ranks=2, plan="pp=2", micro_batches=2)


def read(program: Program, *edits: tuple[str, str]) -> list[Finding]:
    """The findings, of which there is at least one."""
    sources = dict(program.sources)
    for pattern, new in edits:
        changed = {file: re.sub(pattern, new, text, flags=re.MULTILINE) for file, text in sources.items()}
        assert changed != sources, pattern
        sources = changed
    result = check_program(sources, program.graph)
    found = [f for outcome in result.outcomes for f in outcome.findings]
    assert found and not result.proved
    return found


LINES = [
    "unused = aten.__class__(linear)",
    "unused = aten.name(linear)",
    "unused = ops.__dict__(linear)",
    "linear = comm.__dict__(linear, self.dp)",
    "unused = aten.sum(linear, dtype=dtypes.nope)",
    "unused = aten.to.dtype(linear, dtypes.nope)",
    "unused = aten.to.dtype(linear, dtypes.nn)",
    f"unused = aten.add(linear, {HUGE})",
    f"unused = aten.add.Tensor(linear, {HUGE})",
    f"unused = aten.leaky_relu(linear, {HUGE})",
    f"unused = linear * float({HUGE})",
    f"unused = linear * ({HUGE} * 1.5)",
    f"unused = aten.add.Tensor(linear, {' * '.join(['9223372036854775807'] * 3)})",
    f"unused = aten.add.Tensor(linear, -{HUGE} - 1)",
    "unused = linear * float('many')",
    "unused = linear * complex(linear)",
    "unused = linear * float()",
    "unused = " + "+".join(["linear"] * 150),  # Python could read it
    "unused = " + "+".join(["linear"] * 300),
    "unused = " + "+".join(["linear"] * 1500),
    "unused = " + "-" * 900 + "linear",
    "unused = " + "-" * 50000 + "linear",
    "unused = aten.add(linear, ...)",
    "unused = aten.add(linear, {linear: 1})",
    "unused = aten.add(linear, {[]: 1})",
    "linear = comm.all_reduce([], self.dp)",
    "linear = comm.all_reduce(x=self, axis=self.dp)",
    "parts = aten.chunk(linear, 2)\n        linear = parts[-9223372036854775808]",
]


@pytest.mark.parametrize("line", LINES, ids=[line[:60] for line in LINES])
def test_a_line_that_makes_no_sense_is_a_finding(line: str, dropping: Program) -> None:
    found = read(dropping, (r"^( +)(linear = .*)$", lambda m: f"{m[0]}\n{m[1]}{line}"))  # type: ignore[arg-type]
    assert {f.code for f in found} <= {"program_unreadable", "operation_differs"}


PIECE = "((0, 4, 1), (0, 8, 1))"
DECLARATIONS: list[tuple[str, str, str]] = [
    # what, pattern, what it becomes in every file
    ("micro-batches without end", r"micro_batches = 2", "micro_batches = 1000000000"),
    ("many micro-batches", r"micro_batches = 2", "micro_batches = 1000000"),
    ("an axis without end", r"axes = \{\}", 'axes = {"dp": 1000000000}'),
    ("a long axis", r"axes = \{\}", 'axes = {"dp": 1000000}'),
    ("no stages", r"\A(.|\n)*\Z", 'STAGES = ()\nRANKS = ()\nSCHEDULE = ""\n'),
    ("stages that are none", r"STAGES = .*", "STAGES = 1"),
    ("stages that are numbers", r"STAGES = .*", "STAGES = (1,)"),
    ("a word of many digits", r"F0\.0", "F0." + "9" * 5000),
    ("a word of other digits", r"F0\.1", "F0.\u0661"),
    ("an outer without end", r'\{"micro": Sharded\(0\)\}', f'{{"micro": Sharded(0, outer={FAR})}}'),
    ("a peer of many digits", r"peers=\(1,\)", f"peers=({HUGE},)"),
    *(
        (f"messages {messages}", r"(Send|Receive)\((\"\w+@1\", \d),.*\)", rf"Exchange(\2, {messages}, {messages}, (4, 8))")
        for messages in (
            "5",
            "(5,)",
            "((0, 1),)",
            "((0, 1, 5, 5),)",
            f"(([], 1, {PIECE}, {PIECE}),)",
            f"((0, 1, {PIECE}, {PIECE}, 9),)",
            "((0, 1, ((0, 4, 1), 5), ((0, 4, 1), 5)),)",
            "((0, 1, ((0, 4), (0, 8)), ((0, 4), (0, 8))),)",
            f"((0, 1, {PIECE}, ()),)",
            f"((0, 7, {PIECE}, {PIECE}),)",
        )
    ),
    ("a table of sizes without end", r"(Send|Receive)\((\"\w+@1\", \d),.*\)", rf'Exchange(\2, (), (), ({{"micro": ({FAR}, {FAR})}}, 8))'),
]  # fmt: skip


@pytest.mark.parametrize(("pattern", "new"), [d[1:] for d in DECLARATIONS], ids=[d[0] for d in DECLARATIONS])
def test_a_declaration_that_makes_no_sense_is_a_finding(pattern: str, new: str, deep: Program) -> None:
    read(deep, (pattern, new))


@pytest.mark.parametrize(
    ("pattern", "new", "said"),
    [
        (r", peers=\(\d,\)", "", "does not say its peers"),
        (r"^( +\"\w+\": Parameter\(\"[\w.]+\").*\)", r"\1)", "does not say its shape and dtype"),
        (r"ranks = \(0,\)", "ranks = ()", "has the ranks ()"),
    ],
)
def test_a_declaration_that_lacks_something_says_what(pattern: str, new: str, said: str, deep: Program) -> None:
    messages = [finding.message for finding in read(deep, (pattern, new))]
    assert all(said in message and "Error" not in message for message in messages), messages


def test_a_line_that_reads_two_wrong_ones_hides_neither(dropping: Program) -> None:
    """One of which nothing is known, and one that would be idle if nobody read it."""
    found = read(
        dropping,
        (r"^( +)(linear_1 = .*)$", r"\1\2\n\1linear_1 = comm.all_reduce(linear_1, self.dp)"),
        (r"^( +)(zeros = .*)$", r"\1\2\n\1zeros = aten.mul.Tensor(zeros, 3)"),
    )
    assert {f.code for f in found} == {"layouts_disagree", "operation_differs"}
    assert any("aten.mul.Tensor(zeros, 3)" in f.message for f in found)


def test_a_wrong_line_that_two_lines_read_is_told_once() -> None:
    """The first of which takes apart what it is given."""
    program = nnscaler.parallelize(_Taken(), {"x": torch.randn(4, 8)}, ranks=2, plan="dp=2")
    (finding,) = read(program, (r"(linear = aten\.linear\(x, self\.weight)\)", r"\1) * 3"))
    assert "linear" in finding.message


@pytest.mark.parametrize("text", ["", "\0", "# \ud800", '"""text"""', "(" * 5000, "x = " + "+".join("x" * 50000)])
def test_a_text_that_is_no_program_is_a_finding(text: str, dropping: Program) -> None:
    result = check_program({"role_0.py": text}, dropping.graph)
    assert [f.code for outcome in result.outcomes for f in outcome.findings] == ["program_unreadable"]
    assert not result.proved


@pytest.mark.parametrize("table", [f"({FAR}, {FAR})", f"(0, {FAR})", f"({FAR}, -{FAR})", "(0, 0)"])
def test_a_table_of_large_numbers_is_a_finding(table: str, dropping: Program) -> None:
    read(dropping, (r"aten\.zeros\(\(2,", f"aten.zeros(({table}[self.dp.index],"))


@pytest.mark.parametrize("state", ["Sharded(7)", "Sharded(1, sizes=(3,))", "Sharded(1, outer=16)"])
def test_a_draw_that_is_cut_as_it_cannot_be_is_a_finding(state: str, dropping: Program) -> None:
    """Also over an axis of one rank, where the runtime cuts as well."""
    found = read(
        dropping, (r'axes = \{"dp": 2\}', 'axes = {"dp": 2, "one": 1}'), (r"('dropout', \{)", rf'\1"one": {state}, ')
    )
    assert "cannot draw so" in found[0].message


def test_an_error_in_a_line_is_a_finding_of_that_line(dropping: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("by nothing")

    monkeypatch.setattr(Typer, "type_line", fail)
    found = read(dropping, (r"\Z", "\n"))
    assert found[0].code == "program_unreadable"
    assert "cannot be read: ZeroDivisionError: by nothing" in found[0].message
    assert "`linear = aten.linear(x, self.a_weight" in found[0].message


@pytest.mark.parametrize("name", ["check_ranks", "arrivals", "check_stored", "check_ends", "uniform_dims"])
def test_an_error_elsewhere_is_a_finding_of_the_program(
    name: str, dropping: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RecursionError("too deep")

    monkeypatch.setattr(check_text_computes_graph, name, fail)
    found = read(dropping, (r"\Z", "\n"))
    assert found[-1].code == "program_unreadable"
    assert "the program cannot be read: RecursionError: too deep" in found[-1].message


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"operator_files": 5}, ": operator_files is 5, and not names with values"),
        ({"roles": 5}, ": roles is 5, and not a list"),
        ({"ranks": []}, ": ranks is [], and not a whole number"),
        ({"operator_files": {5: 5}}, ": operator_files.5 is 5, and not names with values"),
        ({"format": 2}, " has format 2, and this nnscaler reads format 1"),
    ],
)
def test_a_manifest_that_makes_no_sense_is_refused(
    change: dict[str, Any], told: str, dropping: Program, tmp_path: Path
) -> None:
    """By whoever opens the folder, before the text is read."""
    assert check_program(dropping.sources, dropping.graph, "", dropping.manifest).proved
    file = dropping.save(tmp_path / "program") / MANIFEST
    assert open_program(file.parent).manifest == read_manifest(file.parent)
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(NnscalerError) as caught:
        open_program(file.parent)
    assert (caught.value.code, caught.value.message) == ("not_a_program", f"{file}{told}")
    with pytest.raises(ProgramError) as raised:
        read_program(file.parent)
    assert str(raised.value) == f"{file}{told}: compile the model again"


def _calls(make: Callable[[], Tensor]) -> dict[tuple[str, str], list[Any]]:
    """(operator of torch, schema) -> arguments for what has to be given, with such tensors after the first."""
    found: dict[tuple[str, str], list[Any]] = {}
    values: dict[str, Any] = {"int": 1, "float": 1.5, "number": 2, "List[int]": [1], "bool": True}
    for schema in torch._C._jit_get_all_schemas():
        needed = [a for a in schema.arguments if not a.has_default_value() and not a.kwarg_only]
        kinds = [str(a.type) for a in needed]
        if not schema.name.startswith("aten::") or schema.is_mutable or kinds[:1] != ["Tensor"]:
            continue
        if "Tensor" in kinds[1:] and all(kind == "Tensor" or kind in values for kind in kinds):
            given = [make() if kind == "Tensor" else values[kind] for kind in kinds[1:]]
            found[schema.name[6:], str(schema)] = [torch.randn(3), *given]
    return found


@pytest.mark.parametrize("number", [1.0, 1, True])
def test_an_overload_that_depends_on_values_is_not_chosen(number: float) -> None:
    """Compare what the prover chooses for tensors that may stand for numbers with what torch chooses, where it does."""
    known = refused = 0
    for (packet, _), args in _calls(lambda: torch.tensor(number)).items():
        variables = [Variable(f"x{i}") if isinstance(a, Tensor) else a for i, a in enumerate(args)]
        line = Assignment(1, "", ("y",), f"aten.{packet}", tuple(variables), {})
        if not hasattr(torch.ops.aten, packet):
            continue
        try:
            function = canonical(line, {}).function
        except NoCall as error:
            refused += "by what its tensors hold" in str(error)
            continue
        if function.count(".") == 2:
            assert function == f"aten.{packet}.{torch._C._jit_resolve_packet(f'aten::{packet}', *args)}"
            known += 1
    assert known > 150 and refused >= 5


def test_a_right_line_may_leave_the_overload_out(dropping: Program) -> None:
    text = dropping.sources["role_0.py"]
    shorter = re.sub(r"aten\.(\w+)\.\w+\(", r"aten.\1(", text)
    assert shorter != text and check_program({"role_0.py": shorter}, dropping.graph).proved
