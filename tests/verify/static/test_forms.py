"""Programs written in another form are proved, and what only looks like another form is not."""
# ruff: noqa: E501 - a table of edits, one to a line

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from nnscaler.compile import WantedPlan, compile_traced
from nnscaler.tracing import trace
from tests.sampling import every, only
from verify.programs.proof import Proof, ProofOptions, prove_program
from verify.programs.typing import check_program
from verify.programs.typing.lines.canonical_calls import _BINARY, _SYMMETRIC, python_operator
from verify.programs.typing.program_files.rank_program_syntax import Variable
from verify.self_test.programs.mutants.editable_program_and_edits import RightProgram
from verify.self_test.programs.right_programs import BASES, build
from verify.self_test.programs.soundness.harmless_edits import FORMS, Rewriting

Get = Callable[[str], RightProgram]
EVERYWHERE = ("sharded stages", "experts", "rotary", "recomputed")  # tp and pp, dp and tp; hooks, regions, sequences
NOWHERE = {("results by their numbers", "experts")}  # no such line


@pytest.fixture(scope="session")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Get:
    known: dict[str, RightProgram] = {}

    def get(name: str) -> RightProgram:
        if name not in known:
            known[name] = build(BASES[name], tmp_path_factory.mktemp("forms")).subject
        return known[name]

    return get


def findings(found: RightProgram, changed: dict[str, str]) -> list[str]:
    result = check_program({**found.program.sources, **changed}, found.program.graph)
    said = [f"{f.counter_example} {f.message} ({f.cause})" for o in result.outcomes for f in o.findings]
    assert result.proved == (not said)
    return said


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.kind)
def test_another_form_is_proved(form: Rewriting, subject: Get) -> None:
    changed = 0
    for name in EVERYWHERE:
        found = subject(name)
        sources = form.sources(found)
        changed += len(sources)
        assert not findings(found, sources), name
        if changed > 1:
            return
    pytest.fail("the form is nowhere")


@pytest.mark.long
@pytest.mark.parametrize("name", BASES)
def test_another_form_of_every_program_is_proved(name: str, subject: Get) -> None:
    found = subject(name)
    for form in FORMS:
        assert not findings(found, form.sources(found)), form.kind


@pytest.mark.long
@pytest.mark.parametrize("first", every(6, range(6)))
def test_forms_are_harmless_when_they_run(first: int, subject: Get, tmp_path: Path) -> None:
    """All of them, or each sixth, are what they are said to be: the ranks compute what they computed, bit for bit."""
    from verify.self_test.programs.judge_mutant import Execution

    base = build(BASES["sharded stages"], tmp_path)
    execution = Execution(base, tmp_path)
    for form in FORMS[first::6]:
        answer = execution.judge({**base.subject.program.sources, **form.sources(base.subject)}).answer
        assert not answer.refuted and not answer.undecided, (form.kind, answer.said)


MISSES = [
    # what, pattern, what it becomes
    ("operands of a difference", r"aten\.div\.Tensor\(exp, add\)", "aten.div.Tensor(add, exp)"),
    ("operands of an operator of Python", r"aten\.div\.Tensor\(exp, add\)", "add / exp"),
    ("another operator of Python", r"aten\.add\.Tensor\(sum_1, view\)", "sum_1 - view"),
    ("an operator in place", r"add = aten\.add\.Tensor\(sum_1, view\)", "add = sum_1\n        add += view"),
    ("a sum with a factor", r"aten\.add\.Tensor\(sum_1, view\)", "aten.add.Tensor(view, sum_1, alpha=2)"),
    ("a factor of one operand", r"aten\.add\.Tensor\(sum_1, view\)", "aten.add.Tensor(sum_1, view, alpha=1.0)"),
    ("a whole number for a float", r"aten\.add\.Tensor\(mean, 0\.01\)", "aten.add.Tensor(mean, 0)"),
    ("integer division", r"aten\.div\.Tensor\(matmul, 2\.0\)", "matmul // 2.0"),
    ("a reciprocal", r"aten\.div\.Tensor\(matmul, 2\.0\)", "2.0 / matmul"),
    ("names bound to the wrong arguments", r"aten\.layer_norm\(embedding, \(16,\), (\S+), (\S+), 1e-05, False\)", r"aten.layer_norm(embedding, (16,), weight=\2, bias=\1)"),
    ("an argument by place and by name", r"aten\.transpose\.int\(unflatten, 1, 2\)", "aten.transpose.int(unflatten, 1, 2, dim1=2)"),
    ("a name that the operator does not have", r"aten\.transpose\.int\(unflatten, 1, 2\)", "aten.transpose.int(unflatten, 1, dim=2)"),
    ("an argument left out", r"aten\.transpose\.int\(unflatten, 1, 2\)", "aten.transpose.int(unflatten, 1)"),
    ("a default that is another", r"aten\.gelu\(linear_2\)", "aten.gelu(linear_2, approximate='tanh')"),
    ("an axis and a tensor by name", r"comm\.replicate\(layer_norm, self\.tp\)", "comm.replicate(axis=self.dp, x=layer_norm)"),
    ("a dim that a row does not take", r"comm\.all_reduce\(linear_1, self\.tp\)", "comm.all_reduce(linear_1, self.tp, dim=0)"),
    ("another dim from the end", r"aten\.transpose\.int\(unflatten, 1, 2\)", "aten.transpose.int(unflatten, 1, -1)"),
    ("two sizes that are inferred", r"(aten\.reshape\(transpose_4, )\(4, 6, 8\)", r"\1(-1, 8, -1)"),
    ("a size that is inferred otherwise", r"(aten\.reshape\(transpose_4, )\(4, 6, 8\)", r"\1(-1, 8, 6)"),
    ("permuted, and not back", r"(        )(gelu = .*)", r"\1\2\n\1gelu = aten.permute(gelu, [1, 2, 0])\n\1gelu = aten.permute(gelu, [1, 2, 0])"),
    ("transposed, and viewed as if it were back", r"(        )(gelu = .*)", r"\1\2\n\1gelu = aten.transpose.int(gelu, 0, 1)\n\1gelu = aten.reshape(gelu, (4, 6, 14))"),
    ("a part of a dim", r"(        )(gelu = .*)", r"\1\2\n\1gelu = aten.slice.Tensor(gelu, 0, 1)"),
    ("a shift by slices", r"(        )(gelu = .*)", r"\1\2\n\1gelu = aten.slice.Tensor(aten.expand(aten.unsqueeze(gelu, 0), (2, 4, 6, 14)), 0, 1)[0]"),
    ("moved without gradient", r"(        )(gelu = .*)", r"\1\2\n\1with torch.no_grad():\n\1    gelu = aten.alias(gelu)"),
    ("detached", r"(        )(gelu = .*)", r"\1\2\n\1gelu = aten.detach(gelu)"),
    ("rounded by autocast's own cast", r"(        )(gelu = .*)", r"\1\2\n\1gelu = aten._autocast_to_reduced_precision(gelu, True, True, dtypes.bfloat16, dtypes.bfloat16)"),
    ("rounded by autocast's own casts, and back", r"(        )(gelu = .*)", r"\1\2\n\1gelu = aten._autocast_to_full_precision(aten._autocast_to_reduced_precision(gelu, True, True, dtypes.bfloat16, dtypes.bfloat16), True, True)"),
    ("rounded by autocast's own cast on GPUs", r"(        )(gelu = .*)", r"\1\2\n\1gelu = aten._autocast_to_reduced_precision(gelu, True, False, dtypes.bfloat16, dtypes.bfloat16)"),
    ("a dtype by its number", r"(        )(gelu = .*)", r"\1\2\n\1gelu = aten.to.prim_dtype(gelu, 6)"),
    ("an unused line of a dtype that is none", r"(        )(gelu = .*)", r"\1\2\n\1unused = aten.to.prim_dtype(gelu, 200)"),
    ("conjugated", r"(        )(gelu = .*)", r"\1\2\n\1gelu = aten._neg_view(gelu)"),
    ("a view that memory does not allow", r"(        )(transpose = .*)", r"\1\2\n\1unused = aten.view(transpose, (-1,))"),
    ("a view like another tensor that memory does not allow", r"(        )(transpose = .*)", r"\1\2\n\1unused = aten.view_as(transpose, aten.reshape(transpose, (-1,)))"),
    ("a view of another name that memory does not allow", r"(        )(transpose = .*)", r"\1\2\n\1unused = aten._unsafe_view(transpose, (-1,))"),
    ("turned, and turned elsewhere", r"(        )(gelu = .*)", r"\1\2\n\1gelu = aten.mT(aten.swapdims(gelu, 0, 1))"),
    ("padded, and cut at the wrong end", r"(        )(gelu = .*)", r"\1\2\n\1gelu = aten.slice.Tensor(aten.constant_pad_nd(gelu, [1, 0]), -1, 0, -1)"),
    ("an unused line that fails", r"(        )(gelu = .*)", r"\1\2\n\1unused = aten.reshape(gelu, (5, 5))"),
    ("an unused line that fails in its kernel", r"(        )(gelu = .*)", r"\1\2\n\1unused = aten.bitwise_not(gelu)"),
    ("an unused line of a dim that is not there", r"(        )(gelu = .*)", r"\1\2\n\1unused = aten.softmax.int(gelu, 77)"),
    ("an unused line of one dim twice", r"(        )(gelu = .*)", r"\1\2\n\1unused = aten.sum.dim_IntList(gelu, [0, -3])"),
    ("an unused line for another device's memory", r"(        )(gelu = .*)", r"\1\2\n\1unused = aten.zeros_like(gelu, pin_memory=True)"),
    ("an unused line of another memory format", r"(        )(gelu = .*)", r"\1\2\n\1unused = aten.contiguous(gelu, memory_format=2)"),
    ("a copy of a memory format that is none", r"(        )(gelu = .*)", r"\1\2\n\1gelu = aten.clone(gelu, memory_format='a')"),
    ("an unused line that no memory holds", r"(        )(gelu = .*)", r"\1\2\n\1unused = aten.expand(gelu, (1000000000, 4, 6, 14)) * 2.0"),
    ("an unused line in place", r"(        )(gelu = .*)", r"\1\2\n\1unused = aten.mul_.Tensor(gelu, 2.0)"),
    ("an unused line that draws", r"(        )(gelu = .*)", r"\1\2\n\1unused = aten.rand_like(gelu)"),
    ("an unused line that communicates", r"(        )(gelu = .*)", r"\1\2\n\1unused = comm.all_reduce(gelu, self.tp)"),
    ("an unused line that only one rank runs", r"(        )(gelu = .*)", r"\1\2\n\1unused = gelu * self.tp.index"),
    ("a line that looks unused", r"aten\.linear\(gelu, ", "aten.linear(aten.mul.Tensor(gelu, 1.0), "),
    ("an unused line that is used after all", r"(        )(gelu = .*)", r"\1\2\n\1more = gelu * 2.0\n\1more = more + more\n\1gelu = more"),
    ("an unused line that is returned", r'return \{"loss": (\w+)\}', r'return {"loss": \1 * 1.0}'),
    ("a result by the wrong number", r"chunk_a, chunk_b, chunk_c = (.*?)  #", r"parts = \1\n        chunk_a, chunk_b, chunk_c = parts[0], parts[2], parts[1]  #"),
    ("the number of another result", r"chunk_a, chunk_b, chunk_c = (.*?)  #", r"parts = \1\n        chunk_a = parts[0]\n        chunk_b = parts[2]\n        chunk_c = parts[1]  #"),
    ("a number that is not there", r"chunk_a, chunk_b, chunk_c = (.*?)  #", r"parts = \1\n        chunk_a = parts[0]\n        chunk_b = parts[1]\n        chunk_c = parts[3]  #"),
    ("a number before the first", r"chunk_a, chunk_b, chunk_c = (.*?)  #", r"parts = \1\n        chunk_a = parts[0]\n        chunk_b = parts[-5]\n        chunk_c = parts[2]  #"),
    ("a row of a tensor", r"aten\.gelu\(linear_2\)", "aten.gelu(linear_2[0])"),
    ("a sequence as a tensor", r"chunk_a, chunk_b, chunk_c = (.*?)  #", r"chunk_a = chunk_b = chunk_c = \1  #"),
    ("the name of another tensor", r"aten\.gelu\(linear_2\)", "aten.gelu(layer_norm_1_v1)"),
    ("lines that read each other in another order", r"(        gelu = .*)\n(.*\n)(        linear_3 = .*)", r"\3\n\2\1"),
    ("one name for two variables", r"\blinear_2\b", "add_2"),
    ("parentheses that change the order", r"add_2 = aten\.add\.Tensor\(embedding, linear_1_v1\)", "add_2 = embedding * (embedding + linear_1_v1)"),
    ("a call inside of the wrong call", r"aten\.gelu\(linear_2\)", "aten.gelu(aten.gelu(linear_2))"),
    ("a conversion inside of a call left out", r"aten\.linear\(layer_norm_1_v1, ", "aten.linear(comm.replicate(layer_norm_1, self.dp), "),
    ("another overload", r"aten\.sum\.dim_IntList\(exp, \(-1,\), True\)", "aten.sum.default(exp)"),
    ("keepdim by its place", r"aten\.sum\.dim_IntList\(exp, \(-1,\), True\)", "aten.sum.dim_IntList(exp, (-1,), False)"),
    ("numbers computed to others", r"aten\.div\.Tensor\(matmul, 2\.0\)", "aten.div.Tensor(matmul, 8.0 / 2)"),
    ("a number that is divided by zero", r"aten\.div\.Tensor\(matmul, 2\.0\)", "aten.div.Tensor(matmul, 8.0 / 0)"),
    ("a string that runs", r"(        )(gelu = .*)", r"\1f'{self.dp.close()}'\n\1\2"),
    ("a name deleted", r"(        )(gelu = .*)", r"\1del linear_2\n\1\2"),
]  # fmt: skip


@pytest.mark.parametrize(("pattern", "new"), [m[1:] for m in MISSES], ids=[m[0] for m in MISSES])
def test_what_only_looks_like_another_form_is_not_proved(pattern: str, new: str, subject: Get) -> None:
    found = subject("sharded")
    text = found.program.sources["role_0.py"]
    changed, times = re.subn(pattern, new, text, count=0 if pattern == r"\blinear_2\b" else 1)
    assert times
    assert findings(found, {"role_0.py": changed})


SIGNS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Add": operator.add, "Sub": operator.sub, "Mult": operator.mul, "Div": operator.truediv, "FloorDiv": operator.floordiv,
    "Mod": operator.mod, "Pow": operator.pow, "MatMult": operator.matmul, "BitAnd": operator.and_, "BitOr": operator.or_,
    "BitXor": operator.xor, "Lt": operator.lt, "LtE": operator.le, "Gt": operator.gt, "GtE": operator.ge, "Eq": operator.eq,
    "NotEq": operator.ne,
}  # fmt: skip


class _Signs(nn.Module):
    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.rand(3, 3))
        self.whole = whole

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        total = self.w.sum()
        for name, sign in SIGNS.items():
            if name.startswith("Bit") == self.whole:
                total = total + sign(x, y).sum()
                if name != "MatMult":
                    total = total + sign(x, 3 if self.whole else 3.0).sum()  # type: ignore[arg-type]
                    total = total + sign(3 if self.whole else 3.0, x).sum()  # type: ignore[arg-type]
        return total


@pytest.mark.parametrize("whole", [False, True])
def test_operators_of_python_are_those_that_tracing_finds(whole: bool) -> None:
    """`x + y` is read as what torch calls for it."""
    import ast

    given = torch.randint(1, 5, (3, 3)) if whole else torch.rand(3, 3) + 1
    graph = trace(_Signs(whole), {"x": given, "y": given + 1}).graph
    traced = [op.operator for op in graph.operations]
    x, y, number = Variable("x"), Variable("y"), 3 if whole else 3.0
    expected: list[str] = []
    assert {kind.__name__ for kind in _BINARY} == set(SIGNS)
    for name in SIGNS:
        if name.startswith("Bit") != whole:
            continue
        for left, right in ((x, y), (x, number), (number, x)):
            sign = getattr(ast, name)()
            node = (
                ast.Compare(ast.Name("a"), [sign], [ast.Name("b")])
                if isinstance(sign, ast.cmpop)
                else ast.BinOp(ast.Name("a"), sign, ast.Name("b"))
            )
            found = python_operator(node, (left, right))
            if found is not None and (name != "MatMult" or right is y):
                expected.append(found[0] if found[0].count(".") == 2 else f"{found[0]}.default")
                assert [type(a) for a in found[1]] == ([Variable] * 2 if right is y else [Variable, type(number)])
    remaining = list(traced)
    for one in expected:  # in order, with the sums between them
        assert one in remaining, one
        remaining = remaining[remaining.index(one) + 1 :]


@pytest.mark.parametrize("name", _SYMMETRIC)
def test_symmetric_operators_are(name: str) -> None:
    """With their gradients, also where both operands are equal, of one dtype or of two."""

    def run(function: str, first: Tensor, second: Tensor, swap: bool) -> list[Tensor]:
        operator_ = torch.ops.aten
        for part in (function if function.count(".") == 2 else f"{function}.default").split(".")[1:]:
            operator_ = getattr(operator_, part)
        a, b = (t.clone().requires_grad_(t.is_floating_point()) for t in (first, second))
        result = operator_(b, a) if swap else operator_(a, b)  # type: ignore[operator]
        if result.requires_grad:
            result.backward(torch.arange(1.0, result.numel() + 1, dtype=result.dtype).view(result.shape))
        return [result.detach(), *(t.grad for t in (a, b) if t.grad is not None)]

    values = [torch.tensor([-1.5, 0.0, 2.0, 2.0, 7.0]), torch.tensor([2.0, 0.0, -1.0, 2.0, 3.0])]
    pairs = [(torch.int64, torch.int64), (torch.bool, torch.int32)]
    if "xor" not in name and "and" not in name and "or" not in name.replace("Tensor", ""):
        pairs += [(torch.float32, torch.float32), (torch.float32, torch.float64), (torch.int32, torch.float32)]
    for one, other in pairs:
        first, second = values[0].to(one), values[1].to(other)
        right, swapped = run(name, first, second, False), run(_SYMMETRIC[name], first, second, True)
        assert len(right) == len(swapped)
        for a, b in zip(right, swapped, strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b), (one, other)


class _Largest(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.rand(4, 6))

    def forward(self, x: Tensor) -> Tensor:
        values, _ = torch.topk(x @ self.w, 1, 1)
        return values.sum()


def test_a_result_that_the_model_does_not_use_stands_for_nothing() -> None:
    """Nothing is known of it, and nothing wrong was said before."""
    traced = trace(_Largest(), {"x": torch.rand(8, 4)})
    program = compile_traced(traced, WantedPlan(2, "dp=2"), model={"name": "largest"})
    text = program.sources["role_0.py"]
    assert check_program({"role_0.py": text}, program.graph).proved
    changed, times = re.subn(r"(\w+), _ = aten\.topk", r"\1, other = aten.topk", text)
    assert times == 1 and check_program({"role_0.py": changed}, program.graph).proved
    changed, times = re.subn(r'return \{"loss": \w+\}', 'return {"loss": other}', changed)
    assert times == 1
    assert not check_program({"role_0.py": changed}, program.graph).proved


@pytest.fixture(scope="module")
def unedited(subject: Get) -> Proof:
    program = subject("sharded stages").program
    return prove_program(program.sources, program.graph, options=ProofOptions(cached=False))


@pytest.mark.long
@pytest.mark.parametrize(
    ("edit", "line"),
    only(
        (0, 4),
        [
            ("gelu = aten.slice(gelu, 0, 0, 6)", "gelu = aten.slice(gelu, 0, 0, 6)"),
            ("gelu = aten.view(gelu, {shape})", "gelu = aten.view(gelu"),
            ("unread = aten.add(gelu, gelu)", "unread = aten.add(gelu, gelu)"),
            ("gelu = aten.squeeze(aten.unsqueeze(gelu, 0), 0)", "aten.squeeze("),
            ("gelu = aten.transpose(aten.transpose(gelu, 0, 1), 1, 0)", ""),
            ("gelu = aten.clone(gelu)", ""),
            ("unread = aten.exp(gelu)", ""),
        ],
    ),
)
def test_an_idle_line_holds_for_the_sample_only_if_it_has_sizes(
    edit: str, line: str, subject: Get, unedited: Proof
) -> None:
    found = subject("sharded stages")
    graph, sources = found.program.graph, dict(found.program.sources)
    file = next(name for name, text in sources.items() if " gelu = " in text)
    width = next(op for op in graph.operations if op.operator == "aten.gelu.default").outputs[0]
    edit = edit.format(shape=(-1, *graph.tensors[width].shape[1:-1], graph.tensors[width].shape[-1] // 2))
    sources[file], count = re.subn(r"(        )(gelu = .*)", rf"\1\2\n\1{edit}", sources[file], count=1)
    assert count == 1
    whole = unedited
    proof = prove_program(sources, graph, options=ProofOptions(cached=False))
    assert proof.holds and proof.sizes is not None and whole.sizes is not None
    assert whole.all_sizes or any(not s.blocker for s in whole.sizes.symbols)
    if line:
        assert proof.sizes.text.startswith("holds for the sizes of the sample\n")
        assert all(line in s.blocker and file in s.blocker for s in proof.sizes.symbols)
    else:
        assert proof.sizes == whole.sizes
