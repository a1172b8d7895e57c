"""Calls that an earlier compiler of this kind got wrong, could not split, or did not know: each one is right here.

A row is a call as a user writes it, traced. Every operation that it becomes is split in 2 and in 3 along every
identifier that may be, and compared with the whole, values and gradients; what must be splittable is named. Then random
plans of all rows together, on meshes of two axes, equal the model.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from op_registry.annotation.bind_sizes import BoundOperand, bind
from op_registry.annotation.splits import splittable
from op_registry.annotation.well_formed import parse_checked
from op_registry.bind_and_localise_call import bind_call
from op_registry.call import AxisShard
from op_registry.errors import AnnotationError
from op_registry.registry import default_registry

from nnscaler.ir.graph import Operation, as_call
from nnscaler.tracing import Traced, trace
from nnscaler.tracing.run_graph import run_graph
from tests.op_registry.builtin.oracle import Whole, as_leaf, check_split, differentiable, gradients, run
from tests.random_plans import Mesh, random_plans
from tests.sampling import every

MESHES = (Mesh((("a", 2), ("b", 3))), Mesh((("a", 3), ("b", 2))))


@dataclass(frozen=True)
class Row:
    """A call of `function` on parameters of these shapes, integers below `high` and booleans (dtype given).

    `splits`: "0.1" says that dim 1 of tensor 0 must be splittable where the call reads it; "0.1:2" by two factors.
    """

    name: str
    function: Callable[..., Any]
    tensors: tuple[tuple[int, ...] | Tensor, ...]
    splits: str = ""

    def build(self) -> Case:
        return Case(self)


class Case(nn.Module):
    """One row as a module: what it reads are its own parameters and buffers."""

    def __init__(self, row: Row) -> None:
        super().__init__()
        self.row = row
        generator = torch.Generator().manual_seed(len(row.name))
        for number, made in enumerate(row.tensors):
            if isinstance(made, Tensor):
                self.register_buffer(f"t{number}", made)
            else:
                setattr(self, f"t{number}", nn.Parameter(torch.randn(made, generator=generator)))

    def forward(self) -> Tensor:
        found = self.row.function(*(getattr(self, f"t{n}") for n in range(len(self.row.tensors))))
        outputs = [found] if isinstance(found, Tensor) else list(found)
        parts = [o.abs() if o.is_complex() else o.to(torch.float32) for o in outputs]
        return torch.stack([p.square().mean() for p in parts]).sum()


class Cases(nn.Module):
    def __init__(self, rows: Sequence[Row]) -> None:
        super().__init__()
        for row in rows:
            self.add_module(row.name, row.build())

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([case() for case in self.children()]).sum() * x.mean()


def whole_numbers(*shape: int, high: int) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(high))


def flags(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(3)) < 0.5


def implicit_softmax(x: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return F.softmax(x)


def ignoring(high: int, *shape: int) -> Tensor:
    """Labels, some of them ignored, not as many in each shard."""
    labels = whole_numbers(*shape, high=high)
    labels.view(-1)[: labels.numel() // 3] = -100
    return labels


def attention(**options: Any) -> Callable[..., Tensor]:
    return lambda q, k, v, *mask: F.scaled_dot_product_attention(q, k, v, *mask, **options)


CHANNELS = "0.0 0.1 1.0"  # the batch, and the channels that a convolution reads and writes
WRONG = (
    Row("conv_transpose2d_bias", F.conv_transpose2d, ((6, 12, 5, 4), (12, 6, 3, 3), (6,)), "0.0 0.1 1.0 1.1"),
    Row("softmax_without_dim", implicit_softmax, ((6, 12),), "0.0"),
    Row("softmax_without_dim_3d", implicit_softmax, ((5, 6, 12),), "0.1 0.2"),
    Row(
        "cross_entropy_each_position",
        lambda x, y: F.cross_entropy(x, y, reduction="none"),
        ((6, 5, 12), ignoring(5, 6, 12)),
        "0.0 0.2",
    ),
    Row("conv2d_same_even", lambda x, w: F.conv2d(x, w, padding="same"), ((6, 12, 8, 7), (6, 12, 4, 4)), "0.0 0.1 1.0"),
    Row("conv1d_unbatched", lambda x, w, b: F.conv1d(x, w, b, groups=6), ((12, 7), (18, 2, 3), (18,)), "0.0 1.0"),
    Row("attention_grouped", attention(enable_gqa=True), ((6, 12, 5, 4), (6, 6, 5, 4), (6, 6, 5, 4)), "0.0 0.1 1.1"),
    Row("cross_entropy_soft", lambda x, y: F.cross_entropy(x, y.softmax(-1)), ((12, 6), (12, 6)), "0.0"),
    Row(
        "conv2d_padding_list",
        lambda x, w: F.conv2d(x, w, padding=[1, 2]),
        ((6, 12, 5, 4), (6, 12, 3, 3)),
        "0.0 0.1 1.0",
    ),
    Row("bitwise_not", torch.bitwise_not, (whole_numbers(6, 12, high=9),), "0.0 0.1"),
    Row("einsum_batched", lambda a, b: torch.einsum("bij,bjk->bik", a, b), ((6, 5, 12), (6, 12, 18)), "0.0 0.2 1.2"),
    Row("einsum_ellipsis", lambda a, b: torch.einsum("...ij,...jk", a, b), ((6, 5, 12), (6, 12, 18)), "0.0 0.2 1.2"),
    Row(
        "einsum_spaces",
        lambda a, b: torch.einsum("b h q d, b h k d -> b h q k", a, b),
        ((6, 12, 5, 4), (6, 12, 18, 4)),
        "0.0 0.1 1.2",
    ),
    Row("index_select_last", lambda x, i: x.index_select(-1, i), ((6, 12), whole_numbers(18, high=12)), "0.0 1.0"),
)
FROZEN = (
    Row("linear_bias", F.linear, ((5, 12), (18, 12), (18,)), "0.1 1.0 1.1 2.0"),
    Row("addmm", torch.addmm, ((18,), (6, 12), (12, 18)), "0.0 1.0 1.1 2.1"),
    Row("conv2d_bias", F.conv2d, ((6, 12, 5, 4), (18, 12, 3, 3), (18,)), "0.0 0.1 1.0 2.0"),
    Row("mean", torch.mean, ((6, 12),), "0.0 0.1"),
    Row("mean_of_dim", lambda x: x.mean(-1), ((5, 12),), "0.1"),
    Row("cross_entropy_mean", F.cross_entropy, ((12, 6), ignoring(6, 12)), "0.0 0.1"),
    Row(
        "cross_entropy_weights",
        lambda x, y, w: F.cross_entropy(x, y, w, label_smoothing=0.1),
        ((12, 6), ignoring(6, 12), torch.linspace(0.5, 2, 6)),
        "0.0",
    ),
    Row("nll_mean", lambda x, y: F.nll_loss(x.log_softmax(-1), y), ((12, 6), ignoring(6, 12)), "0.0"),
    Row("cat", lambda a, b: torch.cat([a, b], 1), ((6, 12), (6, 18)), "0.0 0.1 1.1"),
    Row("split", lambda x: x.split(12, -1), ((6, 36),), "0.0 0.1"),
    Row("chunk", lambda x: [c * c for c in x.chunk(3, 1)], ((6, 36),), "0.0 0.1"),
    Row("slice", lambda x: x[:, 2:8], ((6, 12),), "0.0"),
    Row("repeat", lambda x: x.repeat(1, 3), ((6, 12),), "0.0 0.1"),
    Row("layer_norm", lambda x, w, b: F.layer_norm(x, (12,), w, b), ((6, 18, 12), (12,), (12,)), "0.0 0.1"),
    Row("attention_mask", attention(), ((6, 12, 18, 4), (6, 12, 5, 4), (6, 12, 5, 4), (18, 5)), "0.0 0.1 0.2"),
    Row("attention_causal", attention(is_causal=True), ((6, 12, 5, 4), (6, 12, 5, 4), (6, 12, 5, 4)), "0.0 0.1"),
    Row("view_factors", lambda x: x.view(5, 6, 12), ((5, 72),), "0.1:2"),
    Row("dropout", lambda x: F.dropout(x, 0.5), ((6, 12),), "0.0 0.1"),
)
UNKNOWN = (
    Row("relu", torch.relu, ((6, 12),), "0.0 0.1"),
    Row("mse_loss", F.mse_loss, ((6, 12), (6, 12)), "0.0 0.1 1.1"),
    Row("rms_norm", lambda x, w: F.rms_norm(x, (5,), w), ((6, 12, 5), (5,)), "0.0 0.1"),
    Row("group_norm", lambda x, w, b: F.group_norm(x, 6, w, b), ((6, 12, 5), (12,), (12,)), "0.0 0.1"),
    Row("max_pool2d", lambda x: F.max_pool2d(x, 2), ((6, 12, 4, 6),), "0.0 0.1"),
    Row("leaky_relu", F.leaky_relu, ((6, 12),), "0.0 0.1"),
    Row(
        "bce_with_logits",
        lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()),
        ((6, 12), (6, 12)),
        "0.0 0.1",
    ),
    Row("argmax", lambda x: (x.argmax(-1), x.square()), ((6, 5),), "0.0"),
    Row("sort", lambda x: torch.sort(x, -1)[0], ((6, 5),), "0.0"),
    Row("var", lambda x: x.var(-1), ((6, 5),), "0.0"),
    Row("std", lambda x: x.std(0), ((5, 12),), "0.1"),
    Row("scatter", lambda x, i, s: x.scatter(1, i, s), ((6, 5), whole_numbers(6, 1, high=5), (6, 1)), "0.0 2.0"),
    Row("unbind", lambda x: x.unbind(1), ((6, 3, 12),), "0.0 0.2"),
    Row("narrow", lambda x: x.narrow(1, 1, 3), ((6, 5),), "0.0"),
    Row("roll", lambda x: x.roll(1, -1), ((6, 5),), "0.0"),
    Row("flip", lambda x: x.flip(-1), ((6, 5),), "0.0"),
    Row("amax", lambda x: x.amax(-1), ((6, 5),), "0.0"),
    Row("logsumexp", lambda x: x.logsumexp(-1), ((6, 5),), "0.0"),
    Row("maximum", torch.maximum, ((6, 12), (6, 12)), "0.0 1.1"),
    Row("logical_and", torch.logical_and, (flags(6, 12), flags(12)), "0.0 0.1"),
    Row("logical_not", torch.logical_not, (flags(6, 12),), "0.0 0.1"),
    Row("logical_or", torch.logical_or, (flags(6, 12), flags(12)), "0.0 0.1"),
    Row("one_hot", lambda i: F.one_hot(i, 5), (whole_numbers(6, 12, high=5),), "0.0 0.1"),
    Row(
        "batch_norm",
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
        ((6, 12, 5), (12,), (12,)),
        "0.1 1.0",
    ),
    Row("fft", torch.fft.fft, ((6, 5),), "0.0"),
    Row("rfft", lambda x: torch.fft.irfft(torch.fft.rfft(x, dim=0), n=5, dim=0), ((5, 6),), "0.1"),
)
NEGATIVE = (  # dims counted from the back
    Row("softmax", lambda x: x.softmax(-2), ((6, 5, 12),), "0.0 0.2"),
    Row("cumsum", lambda x: x.cumsum(-1), ((6, 5),), "0.0"),
    Row("transpose", lambda x: x.transpose(-1, -2) * 2, ((6, 12),), "0.0 0.1"),
    Row("sum", lambda x: x.sum(-1), ((6, 12),), "0.0 0.1"),
    Row("stack", lambda a, b: torch.stack([a, b], -1), ((6, 12), (6, 12)), "0.0 1.1"),
    Row("gather", lambda x, i: x.gather(-1, i), ((6, 5), whole_numbers(6, 3, high=5)), "0.0"),
    Row("embedding", lambda w, i: F.embedding(i, w, padding_idx=-1), ((12, 6), whole_numbers(18, high=12)), "0.0 0.1"),
)
GROUPS = {"wrong": WRONG, "frozen": FROZEN, "unknown": UNKNOWN, "negative": NEGATIVE}


@dataclass(frozen=True)
class Group:
    traced: Traced
    values: dict[str, Tensor] = field(repr=False)


def build(group: str) -> nn.Module:
    torch.manual_seed(0)
    return Cases(GROUPS[group])


@functools.cache
def traced_group(group: str) -> Group:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = trace(build(group), {"x": torch.linspace(1, 2, 6)})
    state = {name: t.detach() for name, t in traced.state.items()}
    with torch.no_grad():
        return Group(traced, run_graph(traced.graph, state, traced.inputs, precision="float64"))


def whole(group: Group, operation: Operation) -> Whole:
    """One run of an operation on the values that it has in the model."""
    tensors = group.traced.graph.tensors
    inputs = [as_leaf(group.values[n], tensors[n].needs_grad) for n in operation.inputs]
    shown = {n: replace(tensors[n], dtype=str(group.values[n].dtype)[6:]) for n in operation.inputs}
    shown |= {n: tensors[n] for n in operation.outputs if n is not None}
    call = as_call(operation, shown)
    outputs = run(call, inputs, {})
    outputs = [o if n is not None else None for o, n in zip(outputs, operation.outputs, strict=True)]
    generator = torch.Generator().manual_seed(1)
    cotangents = [
        torch.randn(o.shape, generator=generator, dtype=o.dtype) if o is not None and differentiable(o) else None
        for o in outputs
    ]
    spec = default_registry().lookup(operation.operator)
    assert spec is not None, f"{operation.operator} has no annotation"
    found = gradients(outputs, inputs, cotangents)
    return Whole(spec, call, bind_call(spec, call), inputs, outputs, cotangents, found, True)


ROWS = [pytest.param(group, row, id=f"{group}-{row.name}") for group, rows in GROUPS.items() for row in rows]


@pytest.mark.parametrize(("group", "row"), ROWS)
def test_every_split_is_right(group: str, row: Row) -> None:
    found = traced_group(group)
    operations = [op for op in found.traced.graph.operations if op.module.split(".")[0] == row.name]
    assert operations
    checked = 0
    for operation in operations:
        spec = default_registry().lookup(operation.operator)
        assert spec is not None, f"{operation.operator} has no annotation"
        if spec.random:  # its numbers are the program's; random plans compare them
            continue
        w = whole(found, operation)
        for name in w.bound.sizes:
            for parts in (2, 3):
                if w.bound.tied[name][0] == name and splittable(w.bound, name, parts) is None:
                    check_split(w, {name: (AxisShard("x", parts),)})
                    checked += 1
    assert checked


@pytest.mark.parametrize(("group", "row"), ROWS)
def test_what_must_be_splittable(group: str, row: Row) -> None:
    graph = traced_group(group).traced.graph
    by_fqn = {t.fqns[0]: t for t in graph.tensors.values() if t.fqns and t.role != "input"}
    assert row.splits
    for text in row.splits.split():
        place, _, wanted = text.partition(":")
        index, dim = map(int, place.split("."))
        tensor = by_fqn[f"{row.name}.t{index}"]
        readers = graph.consumers[tensor.name]
        assert readers
        for operation, slot in readers:
            call = as_call(operation, graph.tensors)
            spec = default_registry().lookup(operation.operator)
            assert spec is not None, f"{operation.operator} has no annotation"
            bound = bind_call(spec, call)
            operand = bound.inputs[slot]
            names = [n for n in _identifiers(operand, dim) if splittable(bound, n, 2) is None]
            assert len(names) >= int(wanted or 1), f"{operation.operator} `{bound.text}` cannot split {place}"


def _identifiers(operand: BoundOperand | None, dim: int) -> list[str]:
    return [] if operand is None else [f.identifier for f in operand.dims[dim].factors if f.identifier]


@pytest.mark.long
@pytest.mark.parametrize("group", every(4, GROUPS))
def test_a_random_plan_equals_the_model(group: str) -> None:
    check_random_plans(lambda: build(group), {"x": torch.linspace(1, 2, 6)}, [len(group)])


@pytest.mark.long
@pytest.mark.parametrize("group", GROUPS)
def test_random_plans_equal_the_model(group: str) -> None:
    check_random_plans(lambda: build(group), {"x": torch.linspace(1, 2, 6)}, range(6))


def check_random_plans(factory: Callable[[], nn.Module], inputs: dict[str, Tensor], seeds: Sequence[int]) -> None:
    results = list(random_plans(factory, inputs, seeds, MESHES))
    assert len(results) == len(seeds)
    for result in results:
        assert result.verdict is not None and result.verdict.passes, f"seed {result.seed}: {result.message}"


def test_one_identifier_of_two_lengths_is_refused_with_both() -> None:
    with pytest.raises(AnnotationError) as caught:
        bind("m k+, k+ n -> m n", [(2, 3), (4, 5)], [(2, 5)], {})
    assert "`k`" in str(caught.value) and "3" in str(caught.value) and "4" in str(caught.value)


def test_an_identifier_twice_in_one_operand_is_refused() -> None:
    with pytest.raises(AnnotationError, match="`n`"):
        parse_checked("n n -> n", False)


@pytest.mark.long
@pytest.mark.parametrize("sizes", [(7, 5, 9), (3, 7, 11)])
def test_sizes_that_do_not_divide_are_no_error(sizes: tuple[int, int, int]) -> None:
    rows, width, classes = sizes

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(width, 2 * width + 1), nn.Linear(2 * width + 1, classes)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.down(torch.relu(self.up(x))), y)

    batch = {"x": torch.randn(rows, width), "y": whole_numbers(rows, high=classes)}
    check_random_plans(Odd, batch, range(2))
