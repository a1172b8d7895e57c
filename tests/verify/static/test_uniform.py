"""A value that is the same in every cut stands wherever its shape does; one that is not, does not."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import product

import pytest
import torch
from torch import Tensor, nn

import nnscaler
from nnscaler.codegen.compiled_program import Program
from nnscaler.compile import WantedPlan, compile_traced
from nnscaler.ir.conversion_table_and_paths import explain_illegal
from nnscaler.ir.graph import Graph
from nnscaler.ir.operation_annotations import signatures
from nnscaler.layout import INVARIANT, PARTIAL, Layout, Sharded, State
from nnscaler.runtime.shards import shard
from nnscaler.tracing import trace
from nnscaler.transform.plan import Plan, ReplicateStep
from verify.programs.typing import StaticResult, check_program
from verify.programs.typing.lines.uniform_value_dims import Dims, equal_layouts, uniform_dims


class Attention(nn.Module):
    """Scores are added to zeros, by the kernel that scales them."""

    def __init__(self, heads: int = 4, width: int = 24) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        size = d // self.heads

        def split(z: Tensor) -> Tensor:
            return z.view(b, t, self.heads, size).transpose(1, 2).reshape(b * self.heads, t, size)

        q, k, v = map(split, self.qkv(x).chunk(3, -1))
        scores = torch.baddbmm(torch.zeros(b * self.heads, t, t), q, k.transpose(1, 2), beta=1.0, alpha=size**-0.5)
        y = torch.bmm(scores.softmax(-1), v).view(b, self.heads, t, size).transpose(1, 2).reshape(b, t, d)
        result: Tensor = self.out(y).square().mean()
        return result


@pytest.mark.parametrize(("plan", "ranks"), [("tp=2", 2), ("tp=4", 4), ("dp=2,tp=2", 4)])
def test_zeros_that_scores_are_added_to(plan: str, ranks: int) -> None:
    program = nnscaler.parallelize(Attention(), {"x": torch.randn(2, 6, 24)}, ranks=ranks, plan=plan)
    result = check_program(program.sources, program.graph)
    assert result.proved, [f.message for o in result.outcomes for f in o.findings]


def test_three_parts() -> None:
    program = nnscaler.parallelize(Attention(6), {"x": torch.randn(4, 5, 24)}, ranks=3, plan="tp=3")
    assert re.search(r"zeros = .*\(24/4\*tp, 5, 5\)", program.sources["role_0.py"])
    assert check_program(program.sources, program.graph).proved


@pytest.mark.long
def test_a_model_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.GPTNeoXJapaneseConfig(**sizes, bos_token_id=1, eos_token_id=2, max_position_embeddings=32)
    ids = torch.randint(3, 64, (2, 8), generator=torch.Generator().manual_seed(0))
    model = transformers.GPTNeoXJapaneseForCausalLM(config).train()
    program = nnscaler.parallelize(model, {"input_ids": ids, "labels": ids}, ranks=2, plan="tp=2")
    assert re.search(r"zeros_1 = .*\(8/2\*tp, 8, 8\)", program.sources["role_0.py"])
    assert check_program(program.sources, program.graph).proved


Value = Callable[[Tensor], Tensor]


class Plus(nn.Module):
    """A value made of nothing, or of the input, beside a tensor whose rows are cut."""

    def __init__(self, value: Value) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.rand(6))
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.w * self.value(x)).sum()


@nnscaler.register_op("-> n", name="uniform_ramp")
def ramp(n: int) -> Tensor:
    return torch.arange(float(n))


UNIFORM: dict[str, Value] = {
    "ones": lambda x: torch.ones(12, 6),
    "full": lambda x: torch.full((12, 6), 2.5),
    "of elementwise operators": lambda x: (torch.zeros(12, 1) + 2.0).cos().exp(),
    "of two": lambda x: torch.where(torch.zeros(12, 6) < torch.ones(12, 6), 3.0, 4.0),
    "expanded": lambda x: torch.arange(6.0).expand(12, 6),
    "viewed": lambda x: torch.ones(4, 3, 6).reshape(12, 6) * 2.0,
    "data, along another dim": lambda x: x.detach().mean(0).expand(12, 6),
}
OTHERS: dict[str, Value] = {
    "positions": lambda x: torch.arange(12.0)[:, None],
    "of integer positions": lambda x: torch.arange(12)[:, None] * torch.ones(12, 1),
    "random": lambda x: torch.rand(12, 1),
    "data": lambda x: x.detach().mean(1)[:, None],
    "filled with data": lambda x: torch.ones(12, 1) * x.detach().sum(1)[:, None],
    "of the user": lambda x: ramp(12)[:, None],
    "summed up": lambda x: torch.ones(12, 1).cumsum(0),
}


def value_dims(graph: Graph) -> bool:
    """Return whether the value that the input is multiplied by is uniform along the rows."""
    known = uniform_dims(graph, signatures(graph))
    last = next(op for op in reversed(graph.operations) if op.operator == "aten.mul.Tensor")
    return 0 in known.get(last.inputs[1], ())


@pytest.mark.parametrize("name", [*UNIFORM, *OTHERS])
def test_which_values_are_uniform(name: str) -> None:
    value = (UNIFORM | OTHERS)[name]
    graph = trace(Plus(value), {"x": torch.randn(12, 6)}).graph
    assert value_dims(graph) == (name in UNIFORM)


def test_what_has_a_gradient_is_not_uniform() -> None:
    """Each copy of an expanded parameter has a gradient of its own."""

    class Expanded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.rand(1, 6))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.w.expand(12, 6)).sum()

    graph = trace(Expanded(), {"x": torch.randn(12, 6)}).graph
    assert not value_dims(graph)
    assert not any(graph.tensors[name].needs_grad for name in uniform_dims(graph, signatures(graph)))


def strided(value: Value, made: str) -> tuple[Program, StaticResult]:
    """The rows of the input in strided shards, beside a value that every rank makes contiguous. `made`: the lines of
    one shard in place of those of the whole value."""
    traced = trace(Plus(value), {"x": torch.randn(12, 6)})
    plan = Plan((("tp", 2),), (ReplicateStep(tuple(op.name for op in traced.graph.operations), "tp"),))
    program = compile_traced(traced, WantedPlan(2, plan), model={"name": "plus"})
    lines = program.sources["role_0.py"].splitlines()
    first = next(i for i, line in enumerate(lines) if "aten.ones" in line or "aten.arange" in line)
    lines[first] = f"        {made}"
    text = "\n".join(lines)
    for old, new in (
        ('Input("x", {})', 'Input("x", {"tp": Sharded(0, outer=3)})'),
        ('"float32", {})', '"float32", {}, reduce=("tp",))'),
        ("loss = Loss({})", 'loss = Loss({"tp": Partial()})'),
    ):
        assert text.count(old) == 1, (old, text)
        text = text.replace(old, new)
    return program, check_program({"role_0.py": text}, program.graph)


@pytest.mark.long
def test_only_what_is_uniform_may_be_cut_otherwise() -> None:
    """The comment says how the value was cut: contiguous, where the rows beside it are strided."""
    ones = "ones = aten.ones((6, 6), dtype=dtypes.float32, device=self.device)  # (12/tp, 6)"
    program, result = strided(lambda x: torch.ones(12, 6), ones)
    assert result.proved, (program.sources, [f.message for o in result.outcomes for f in o.findings])
    short = ones.replace("(6, 6)", "(4, 6)")
    assert not strided(lambda x: torch.ones(12, 6), short)[1].proved
    other = "ones = aten.ones((12, 3), dtype=dtypes.float32, device=self.device)  # (12, 6/tp)"
    assert not strided(lambda x: torch.ones(12, 6), other)[1].proved
    ramp = "arange = aten.arange.start(6*self.tp.index, 6*self.tp.index + 6, dtype=dtypes.int64, device=self.device)"
    _, wrong = strided(lambda x: torch.arange(12)[:, None], ramp)
    found = [f for o in wrong.outcomes for f in o.findings]
    assert not wrong.proved
    assert found[0].code == "layouts_disagree", found
    assert "outer=3" in found[0].message, found[0].message


def cuts(names: Sequence[str], layout: Layout) -> dict[str, State]:
    """How the runtime says where a layout cuts."""
    cut = [(name, state) for name, state in zip(names, layout, strict=True) if isinstance(state, Sharded)]
    return {name: Sharded(state.dim, state.outer) for name, state in cut}


@pytest.mark.parametrize("sizes", [(2, 2), (2, 3), (2, 2, 2), (4, 2, 2)])
@pytest.mark.parametrize("uniform", [frozenset({0}), frozenset({1}), frozenset({0, 1})])
def test_layouts_of_the_same_pieces(sizes: tuple[int, ...], uniform: Dims) -> None:
    """Each is legal, and of a tensor that is uniform in these dims every rank holds the same piece in all of them."""
    shape = (24, 48)
    tensor = torch.rand([1 if dim in uniform else size for dim, size in enumerate(shape)]).expand(shape)
    names = [f"axis{i}" for i in range(len(sizes))]
    mesh = dict(zip(names, sizes, strict=True))
    found = 0
    states = (INVARIANT, PARTIAL, *(Sharded(dim, outer) for dim in (0, 1) for outer in (1, 2)))
    for layout in product(states, repeat=len(sizes)):
        if explain_illegal(layout, sizes, shape):
            continue
        first, *others = equal_layouts(layout, uniform, sizes)
        assert first == layout and len({first, *others}) == 1 + len(others)
        found += len(others)
        for other in others:
            assert explain_illegal(other, sizes, shape) is None, (layout, other)
            assert [s == PARTIAL for s in other] == [s == PARTIAL for s in layout]
            for rank in product(*map(range, sizes)):
                at = dict(zip(names, rank, strict=True))
                pieces = [shard(tensor, dict(zip(names, states, strict=True)), mesh, at) for states in (layout, other)]
                assert torch.equal(*pieces), (layout, other, at)
    assert (found > 3) == (sizes != (2, 3))  # no two of these axes make as many parts


class Shifted(nn.Module):
    """Rows are put into zeros: of a shard's shape, and four rows by either axis, or three by none."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        shifted = torch.zeros(8, 6)
        shifted[:, 1:] = x[:, :-1]
        y: Tensor = self.down(self.up(shifted).relu())
        return y.square().mean()


def test_zeros_do_not_say_which_axis_cut_them() -> None:
    """Without the comments, too. But what is put into them does."""
    inputs = {"x": torch.randn(8, 6)}
    program = nnscaler.parallelize(Shifted(), inputs, ranks=4, plan="dp=2,tp=2")
    bare = re.sub(r"  # .*", "", program.sources["role_0.py"])
    assert "aten.zeros((4, 6)" in bare, bare
    assert check_program({"role_0.py": bare}, program.graph).proved
    for wrong in ("(2, 6)", "(8, 6)", "(4, 3)"):
        assert not check_program({"role_0.py": bare.replace("(4, 6)", wrong)}, program.graph).proved
    other = bare.replace('Input("x", {"dp": Sharded(0)})', 'Input("x", {"tp": Sharded(0)})')
    assert other != bare
    assert not check_program({"role_0.py": other}, program.graph).proved


def test_constants_that_nothing_reads_are_in_no_program() -> None:
    """The same model: what it makes and drops again would be in the state, and the graph knows nothing of it."""

    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.rand(6))

        def forward(self, x: Tensor) -> Tensor:
            torch.tensor([1.0, 2.0]).sin()
            return (x * self.w * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])).sum()

    traced = trace(Dropping(), {"x": torch.randn(12, 6)})
    kept = {name for t in traced.graph.with_role("constant") for name in t.fqns}
    assert len(kept) == 1
    assert {name for name in traced.state if name.startswith("_constants.")} == kept
