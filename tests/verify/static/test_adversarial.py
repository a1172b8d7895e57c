"""Texts that look right to a reader and mean something else to Python or to the runtime: none of them is proved."""
# ruff: noqa: E501 - a table of edits, one to a line

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nnscaler
from nnscaler.codegen.compiled_program import Program
from nnscaler.compile import WantedPlan, compile_traced
from nnscaler.tracing import trace
from nnscaler.transform.plan import Plan, RecomputeStep
from verify.programs.typing import check_program


@nnscaler.register_op("n d -> n d", name="adversarial_gate")
def gate(x: Tensor, power: float) -> Tensor:
    return x * torch.sigmoid(x) ** power


@nnscaler.register_op("n d, n d -> n d", name="adversarial_mix")
def mix(x: Tensor, y: Tensor, share: int) -> Tensor:
    return x * share + y.tanh()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(12, 24)
        self.down = nn.Linear(24, 12)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + F.dropout(self.down(F.relu(self.up(x))), 0.1, self.training)
        return result


class Tied(nn.Module):
    """Two tied weights, each with two names, on both stages; and a buffer as long as the batch."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(24, 12)
        self.more = nn.Embedding(24, 12)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(12, 24, bias=False)
        self.head.weight = self.words.weight
        self.again = self.more
        self.register_buffer("scale", torch.rand(12, 1))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(ids) * self.scale + self.more(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x + self.again(labels)), labels)


class Users(nn.Module):
    """User operators with numbers, buffers that change, and a region of low precision."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 12)
        self.b = nn.Linear(6, 12)
        self.norm = nn.BatchNorm1d(12)
        self.c = nn.Linear(12, 6)
        self.low = nn.Parameter(torch.rand(6, 6))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x * 2.0
        h = mix(gate(self.a(x), 2.0), self.b(x), 1)
        h = self.norm(mix(h, gate(h, 2.0), 1))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = F.linear(y, self.low) + y
        loss: Tensor = ((self.c(h) - y) ** 2).mean()
        return loss


def _tied() -> Program:
    ids = torch.arange(12) % 24
    traced = trace(Tied(), {"ids": ids, "labels": ids.flip(0)})
    return compile_traced(traced, WantedPlan(4, "tp=2,pp=2", micro_batches=2), model={"name": "tied"})


def _users(plan: Plan | str, ranks: int = 2) -> Program:
    traced = trace(Users(), {"x": torch.rand(12, 6), "y": torch.rand(12, 6)})
    return compile_traced(traced, WantedPlan(ranks, plan, micro_batches=1), model={"name": "users"})


PROGRAMS: dict[str, Callable[[], Program]] = {
    "tied": _tied,
    "users": lambda: _users("dp=2"),
    "recomputed": lambda: _users(Plan((("dp", 2),), (RecomputeStep(("a", "b")),))),
}


@pytest.fixture(scope="module")
def programs() -> dict[str, Program]:
    return {name: make() for name, make in PROGRAMS.items()}


LINE = r"^( +)(linear = aten\.linear\(.*?\))  #.*?$"
BLOCK = r"\1def block(mul):\n\1    \2\n\1    return linear\n\1linear = recompute(block, mul)"
FORWARD = r"def forward\(self, x, y"
CASES: list[tuple[str, str, tuple[tuple[str, str], ...]]] = [
    # what, program, (pattern, replacement) in all of its files...
    ("a keyword twice", "tied", ((r"(comm\.all_gather_replicated\(add, self\.tp, dim=1)\)", r"\1, dim=1)"),)),
    ("an argument by place and by name", "tied", ((r"(comm\.all_gather_replicated\(add, self\.tp, )dim=1\)", r"\g<1>1, dim=1)"),)),
    ("an argument that the row lacks", "tied", ((r"(comm\.keep_first\(self\.blocks_0_down_bias, self\.tp)\)", r"\1, dim=0)"),)),
    ("a dict unpacked in a layout", "tied", ((r'(Input\("ids", \{"micro": Sharded\(0\))\}', r'\1, **{"tp": Sharded(0)}}'),)),
    ("a dict unpacked in a state", "tied", ((r'Input\("ids", \{"micro": Sharded\(0\)', r'Input("ids", {"micro": Sharded(0, **{"outer": 2})'),)),
    ("keywords unpacked in a declaration", "users", ((r'("a_bias": Parameter\([^\n]*)\),$', r'\1, **{"used": False}),'),)),
    ("a decorator on what is recomputed", "users", ((LINE, r"\1@torch.no_grad()\n" + BLOCK),)),
    ("recompute defined anew", "users", ((LINE, r"\1def recompute(f, x): return f(x) * 2.0\n" + BLOCK),)),
    ("a keyword of recompute", "recomputed", ((r"(= recompute\(recompute_0, mul)\)", r"\1, deep=True)"),)),
    ("a function named as a variable", "recomputed", ((r"^( +)(linear, = recompute)", r"\1recompute_0 = mul\n\1\2"),)),
    ("one result not taken apart", "recomputed", ((r"^( +)linear, = recompute", r"\1linear = recompute"),)),
    ("a region that is named", "users", ((LINE, r"\1with torch.no_grad() as mul:\n\1    pass\n\1\2"),)),
    ("a region that is off", "users", ((r"(with torch\.autocast\(self\.device\.type, dtypes\.bfloat16)\)", r"\1, enabled=0)"),)),
    ("a loss of another kind", "users", ((r"loss = Loss\(", "loss = Input("),)),
    ("a parameter that changes", "users", ((r"updates = \{", 'updates = {"lin": "a_weight", '), (r'return \{"loss"', r'return {"lin": self.a_weight, "loss"'),)),
    ("a buffer that changes twice", "users", ((r"updates = \{", 'updates = {"old": "norm_running_mean", '), (r'return \{"loss"', r'return {"old": self.norm_running_mean, "loss"'),)),
    ("a buffer cut by micro-batches", "tied", ((r'(Buffer\("scale", \(12, 1\), "float32", \{)', r'\1"micro": Sharded(0)'), (r"comm\.shard\(self\.scale, self\.micro, dim=0\)", "self.scale"),)),
    ("new values returned by prepare and forward", "users", ((FORWARD, 'def prepare(self):\n        return {"new norm_running_mean": self.norm_running_mean}\n\n    ' + r"\g<0>"),)),
    ("an operator that is another function", "users", ((r"'adversarial_gate', '([^']*)', 'gate'", r"'adversarial_gate', '\1', 'mix'"),)),
    ("an operator of another file", "users", ((r"'adversarial_gate', '([^']*)', 'gate'", r"'adversarial_gate', 'other.py', 'gate'"),)),
    ("an operator that the file does not name", "users", ((r"^    adversarial_gate=\([^\n]*\n", ""),)),
    ("no header of operators", "users", ((r"user = user_operators\(", "user = dict("),)),
    ("a name that is not made", "users", ((r"^aten = torch\.ops\.aten$", ""),)),
    ("a name that is not imported", "tied", ((r"comm, dtypes", "dtypes"),)),
    ("an import from beside", "tied", ((r"from nnscaler", "from .nnscaler"),)),
    ("a default that runs", "users", ((r"(def forward\(self, [^)]*)\):", r"\1=torch.set_grad_enabled(False)):"),)),
    ("an annotation that runs", "users", ((FORWARD, "def forward(self, x, y: torch.set_grad_enabled(False)"),)),
    ("a stage by another name", "users", ((FORWARD, "def forward(this, x, y"),)),
    ("a metaclass", "users", ((r"class Stage0\(Stage\)", "class Stage0(Stage, metaclass=type)"),)),
    ("a class with another number", "users", ((r"class Stage0\(", "class Stage1("),)),
    ("names that Python changes", "users", ((LINE, r"\1\2\n\1_Stage0__t = linear\n\1__t = mul"), (r"user\.adversarial_gate\(linear,", "user.adversarial_gate(_Stage0__t,"))),
    ("a tensor unpacked", "users", ((r"^( +)(mean) = ", r"\1\2, = "),)),
    ("a number in a tensor's place", "users", ((r"user\.adversarial_mix\((\w+), (\w+), 1\)(.*)user\.adversarial_mix\((\w+), (\w+), 1\)", r"user.adversarial_mix(\1, \2, 1)\3user.adversarial_mix(\4, 1, \5)"),)),
    ("a device where none is due", "users", ((r"(linear = aten\.linear\([^)]*)\)", r"\1, device=self.device)"),)),
    ("copies by other names", "tied", ((r'Parameter\("words\.weight"', 'Parameter("head.weight"'), (r'Parameter\("more\.weight"', 'Parameter("again.weight"'),)),
    ("copies in another order on one stage", "tied", ((r'("words\.weight".*)copies=\(\(0, 1\), \(2, 3\)\)', r"\1copies=((2, 3), (0, 1))"),)),
    ("ranks of a copy in another order", "tied", ((r"copies=\(\(0, 1\), \(2, 3\)\)", "copies=((1, 0), (2, 3))"),)),
    ("copies that are no tuples of ranks", "tied", ((r"copies=\(\(0, 1\), \(2, 3\)\)", "copies=([0, 1], [2, 3])"),)),
    ("a name where axes are due", "users", ((r'reduce=\("dp",\)', 'reduce="dp"'),)),
    ("a number for a truth", "tied", ((r"peers=\(2, 3\)", "peers=(2, 3), needs_grad=1"),)),
    ("the whole shape of a repeated draw", "tied", ((r"('dropout_1', [^\n]*)\(12, 12\)\)", r"\1(12, 1))"),)),
    ("a conversion without gradients over one rank", "users", (("axes = {\"dp\": 2}", 'axes = {"dp": 2, "one": 1}'), (LINE, r"\1\2\n\1with torch.no_grad():\n\1    linear = comm.invariant(linear, self.one)"))),
    ("no micro-batches", "users", ((r"micro_batches = 1", "micro_batches = 0"),)),
    ("a negative dim", "users", ((r'Input\("x", \{"dp": Sharded\(0\)\}\)', 'Input("x", {"dp": Sharded(-2)})'),)),
    ("a variable like what is dropped", "users", ((LINE, r"\1def block(_):\n\1    _ = aten.relu(_)\n\1    \2\n\1    return linear\n\1linear = recompute(block, mul)"), (r"aten\.linear\(mul, ", "aten.linear(_, "))),
    ("a default of a function that nobody calls", "users", ((LINE, r"\1\2\n\1def idle(a=(linear := linear * 2.0)):\n\1    return a"),)),
    ("a decorator of a function that nobody calls", "users", ((LINE, r"\1\2\n\1@aten.mul_.Tensor(linear, 2.0)\n\1def idle(a):\n\1    return a"),)),
    ("an annotation of a function that nobody calls", "users", ((LINE, r"\1\2\n\1def idle(a: aten.mul_.Tensor(linear, 2.0)):\n\1    return a"),)),
    ("a default inside of what is recomputed", "recomputed", ((r"^( +)(linear = aten\.linear\(.*?\))  #.*?$", r"\1\2\n\1def idle(a=aten.mul_.Tensor(linear, 2.0)):\n\1    return a"),)),
    ("a built-in operator from a file", "users", ((r"user = user_operators\(", 'user = user_operators(m=("nnscaler.mean_over", "other.py", "f"), '), (r"ops\.mean_over\(", "user.m("))),
    ("an overload from a file", "users", ((r"user = user_operators\(", 'user = user_operators(m=("aten.relu.default", "other.py", "f"), '),)),
    ("an operator that nobody knows from a file", "users", ((r"user = user_operators\(", 'user = user_operators(m=("other::f", "other.py", "f"), '),)),
    ("a name that the runtime has for itself", "users", ((r"user_operators,", "user_operators, nothing_there,"),)),
    ("a conversion of a list", "tied", ((r"comm\.all_gather_replicated\(add, ", "comm.all_gather_replicated([add], "),)),
    ("a conversion of a dict", "tied", ((r"comm\.all_gather_replicated\(add, ", "comm.all_gather_replicated({'a': add}, "),)),
    ("a truth for a dim", "tied", ((r"^( +)(dropout_1 = .*)", r"\1\2\n\1dropout_1 = comm.shard(comm.all_gather(dropout_1, self.tp, 1), self.tp, True)"),)),
    ("a loss that is cut over one rank", "users", ((r'axes = {"dp": 2}', 'axes = {"dp": 2, "one": 1}'), (r'Loss\({', 'Loss({"one": Sharded(0), '))),
    ("a name given to forward twice", "tied", ((r'(    prepare_inputs = )', r'    inputs = {"cross_entropy_loss_count_of_step": Input("labels", {}), "labels_v1": Input("labels", {"micro": Sharded(0)})}\n\1'),)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "edits"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_what_python_reads_otherwise_is_not_proved(
    name: str, edits: tuple[tuple[str, str], ...], programs: dict[str, Program]
) -> None:
    program = programs[name]
    sources = dict(program.sources)
    for pattern, new in edits:
        times = 0
        for file, text in sources.items():
            sources[file], found = re.subn(
                pattern, new, text, count=1, flags=re.DOTALL if "mix" in pattern else re.MULTILINE
            )
            times += found
            if found:
                break
        assert times == 1, pattern
    assert not check_program(sources, program.graph).proved


@pytest.mark.parametrize("name", PROGRAMS)
def test_their_originals_are(name: str, programs: dict[str, Program]) -> None:
    program = programs[name]
    assert check_program(program.sources, program.graph).proved


def test_a_recomputed_function_may_return_what_it_computes(programs: dict[str, Program]) -> None:
    program = programs["recomputed"]
    lines = r"^( +)linear = (aten\.linear\(.*?\))  #.*\n +return linear,$"
    for more, right in (("", True), (" * 2.0", False)):
        changed = {f: re.sub(lines, rf"\1return \2{more},", t, flags=re.MULTILINE) for f, t in program.sources.items()}
        assert changed != program.sources
        assert check_program(changed, program.graph).proved == right


def test_copies_in_one_order_on_all_stages_are_proved(programs: dict[str, Program]) -> None:
    program = programs["tied"]
    swapped = {f: t.replace("copies=((0, 1), (2, 3))", "copies=((2, 3), (0, 1))") for f, t in program.sources.items()}
    assert all(text != swapped[file] for file, text in program.sources.items())
    assert check_program(swapped, program.graph).proved


def test_a_result_that_the_model_never_uses_is_not_read() -> None:
    """Nothing is known of it. What was computed from it was passed over in silence, up to the loss."""

    class Spread(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.rand(6))

        def forward(self, x: Tensor) -> Tensor:
            variance, _ = torch.var_mean(x * self.w, dim=1)
            return variance.square().sum()

    program = nnscaler.parallelize(Spread(), {"x": torch.randn(12, 6)}, ranks=2, plan="dp=2")
    text = program.sources["role_0.py"]
    named = text.replace("var_mean_a, _ = ", "var_mean_a, mean = ")
    assert named != text and check_program({"role_0.py": named}, program.graph).proved
    read = named.replace("aten.square.default(var_mean_a)", "aten.square.default(mean)").replace(
        "aten.square(var_mean_a)", "aten.square(mean)"
    )
    assert read != named
    result = check_program({"role_0.py": read}, program.graph)
    findings = [f for outcome in result.outcomes for f in outcome.findings]
    assert not result.proved
    assert "`mean` is read, and the model uses no such result" in findings[0].message, findings


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x * 2.0

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient * 2.0


class Thrice(Twice):
    pass


def test_a_function_that_is_not_registered_is_that_of_the_model() -> None:
    """The header alone says which one the text calls."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.rand(6))

        def forward(self, x: Tensor) -> Tensor:
            return Twice.apply(x * self.w).sum()

    program = nnscaler.parallelize(Scaled(), {"x": torch.randn(12, 6)}, ranks=2, plan="dp=2")
    text = program.sources["role_0.py"]
    assert check_program({"role_0.py": text}, program.graph).proved
    file = re.search(r"default', ('[^']*'), 'Twice'\)", text)
    assert file is not None, text
    for edited in (text.replace("'Twice')", "'Thrice')"), text.replace(file[1], "'other.py'")):
        assert edited != text
        result = check_program({"role_0.py": edited}, program.graph)
        assert not result.proved
        finding = next(f for outcome in result.outcomes for f in outcome.findings)
        assert finding.code == "program_unreadable" and "is taken from" in finding.message, finding
