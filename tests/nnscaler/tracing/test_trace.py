"""The inputs of `trace` (modules, inputs, losses), and what becomes of parameters, regions and places."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nnscaler.errors import NnscalerError
from nnscaler.ir.print_graph import print_graph
from nnscaler.tracing import Traced, run_graph, trace
from tests.graph_invariants import check_graph
from tests.graph_text import parse_graph

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))


def checked(module: nn.Module, inputs: Any) -> Traced:
    traced = trace(module, inputs)
    check_graph(traced.graph)
    assert parse_graph(print_graph(traced.graph)) == traced.graph
    return traced


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(6, 6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.proj(x) * y.sum(0)).sum()


def test_arguments_that_share_a_tensor_stay_apart() -> None:
    traced = checked(Two(), (X, X))
    assert [t.name for t in traced.graph.with_role("input")] == ["x", "y"]
    assert list(traced.inputs) == ["x", "y"]
    uses = traced.graph.consumers
    assert uses["x"] and uses["y"]


@dataclasses.dataclass
class Batch:
    ids: Tensor
    scaled: bool
    more: dict[str, Any]


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(6, 6)

    def forward(self, batch: Batch, factor: float = 1.0) -> Tensor:
        pair = batch.more["pair"]
        loss = (self.proj(batch.ids) * pair.first + pair.second * batch.more["list"][1]).sum()
        return loss * (2 if batch.scaled else 1) * factor


def test_nested_inputs_have_readable_names() -> None:
    batch = Batch(X, True, {"pair": Pair(X, X), "list": [None, X]})
    for inputs in ((batch, 3.0), {"batch": batch, "factor": 3.0}):
        traced = checked(Nested(), inputs)
        assert list(traced.inputs) == [
            "batch_ids",
            "batch_more_pair_first",
            "batch_more_pair_second",
            "batch_more_list_1",
        ]
        assert traced.sample is not None
        args, kwargs = traced.sample.rebuild({name: t + 1 for name, t in traced.inputs.items()})
        (rebuilt,) = [*args[:1], *([kwargs["batch"]] if kwargs else [])]
        assert isinstance(rebuilt, Batch)
        assert torch.equal(rebuilt.ids, X + 1)
        assert isinstance(rebuilt.more["pair"], Pair)
        assert rebuilt.more["list"][0] is None
    assert batch.ids is X


class Odd(nn.Module):
    """Names that collide with parameters, keywords and other names."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.add = nn.Linear(6, 6)

    def forward(self, weight: Tensor, **named: Tensor) -> Tensor:
        return (self.add(weight) * self.weight + named["lambda"]).sum()


def test_names_are_identifiers_and_unique() -> None:
    traced = checked(Odd(), {"weight": X, "lambda": X})
    assert list(traced.inputs) == ["weight", "input_lambda"]
    assert [t.fqns for t in traced.graph.with_role("parameter")] == [("weight",), ("add.weight",), ("add.bias",)]


class Returning(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.proj, self.form = nn.Linear(6, 6), form

    def forward(self, x: Tensor) -> Any:
        loss = self.proj(x).mean()
        forms = {
            "scalar": loss,
            "one element": loss.reshape(1, 1),
            "tuple": (loss, x),
            "dict": {"logits": x, "loss": loss},
            "attribute": type("Output", (), {"loss": loss})(),
            "logits": x,
            "integer": x.argmax(),
            "none": None,
            "text": "loss",
        }
        return forms[self.form]


@pytest.mark.parametrize("form", ["scalar", "one element", "tuple", "dict", "attribute"])
def test_losses(form: str) -> None:
    traced = checked(Returning(form), (X,))
    assert traced.graph.tensors[traced.graph.loss].shape == ()


@pytest.mark.parametrize(("form", "what"), [("none", "NoneType"), ("text", "a str")])
def test_no_loss(form: str, what: str) -> None:
    with pytest.raises(NnscalerError, match=what) as caught:
        trace(Returning(form), (X,))
    assert caught.value.code == "no_loss"
    assert caught.value.help is not None
    assert "class WithLoss" in caught.value.help


class Shared(nn.Module):
    """A tied weight, a frozen parameter, an unused one, and an unused buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(3, 2, bias=False)
        self.second.weight = self.first.weight
        self.frozen = nn.Parameter(torch.ones(6), requires_grad=False)
        self.register_buffer("spare", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.second(self.first(x)) * self.frozen).pow(2).sum()


def test_parameters() -> None:
    model = Shared()
    traced = checked(model, (X,))
    found = {t.name: (t.fqns, t.needs_grad) for t in traced.graph.with_role("parameter", "buffer")}
    assert found == {
        "frozen": (("frozen",), False),
        "first_weight": (("first.weight", "second.weight"), True),
        "first_bias": (("first.bias",), True),
        "second_bias": (("second.bias",), True),
        "unused_weight": (("unused.weight",), True),
        "spare": (("spare",), False),
    }
    assert traced.state["second.weight"] is traced.state["first.weight"] is model.first.weight
    assert not traced.graph.consumers["unused_weight"]


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Two(), Two()])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](x, self.blocks[0](x, x))  # the second is called here


class TwiceTheSame(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.proj(x)).sum()


def test_operations_know_their_place() -> None:
    traced = checked(Outer(), (X,))
    modules = dict(Outer().named_modules())
    linears = [op for op in traced.graph.operations if op.operator == "aten.linear.default"]
    assert [(op.module, op.module_type) for op in linears] == [("blocks.0.proj", "Linear"), ("blocks.1.proj", "Linear")]
    assert all(op.module in modules for op in traced.graph.operations)
    assert all(type(modules[op.module]).__name__ == op.module_type for op in traced.graph.operations)
    where = linears[1].where
    assert where is not None
    assert (where.file, where.text) == (__file__, "return (self.proj(x) * y.sum(0)).sum()")
    repeated = checked(TwiceTheSame(), (X,))
    assert [op.module for op in repeated.graph.operations] == ["proj", "proj", ""]


class Regions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            constant = self.proj(x)
            with torch.enable_grad():
                inner = self.proj(x)
        with torch.autocast("cpu", torch.bfloat16):
            low = self.proj(x)
            with torch.autocast("cpu", enabled=False):
                high = self.proj(low.float())
        return (inner * constant + high).sum() + low.sum()


def test_regions_are_attributes() -> None:
    graph = checked(Regions(), (X,)).graph
    linears = [op for op in graph.operations if op.operator == "aten.linear.default"]
    assert [(op.region.grad_enabled, op.region.autocast) for op in linears] == [
        (False, None),
        (True, None),
        (True, "bfloat16"),
        (True, None),
    ]
    assert [graph.tensors[op.outputs[0] or ""].dtype for op in linears] == ["float32", "float32", "bfloat16", "float32"]
    assert [graph.tensors[op.outputs[0] or ""].needs_grad for op in linears] == [False, True, True, True]


class Normed(nn.Module):
    """One batch norm used twice: the second use continues from the statistics of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.proj = nn.BatchNorm1d(6), nn.Linear(6, 6)
        self.frozen = nn.BatchNorm1d(6).eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.norm(self.proj(self.norm(x)))).pow(3).sum()


def test_batch_norm_has_explicit_statistics() -> None:
    graph = checked(Normed(), (X,)).graph
    kept = [op for op in graph.operations if op.operator == "nnscaler.running_statistic"]
    assert [op.outputs for op in kept[:2]] == [("batch_norm_mean",), ("batch_norm_var",)]
    assert [op.inputs[0] for op in kept[2:]] == ["batch_norm_mean", "batch_norm_var"]
    updates = dict(graph.updates)
    assert updates["norm_running_mean"] == kept[2].outputs[0]
    assert list(updates) == ["norm_running_mean", "norm_running_var", "norm_num_batches_tracked"]
    assert any(op.operator == "aten.batch_norm.default" for op in graph.operations)


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj, self.drop = nn.Linear(6, 6), nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        q = F.dropout(self.drop(self.proj(x)), 0.5, False).view(1, 2, 2, 6)
        kv = self.proj(x)[:2].view(1, 1, 2, 6)
        mixed = F.scaled_dot_product_attention(q, kv, kv, dropout_p=0.5, is_causal=True, enable_gqa=True)
        return F.scaled_dot_product_attention(mixed, kv, kv, enable_gqa=True, scale=0.5).pow(2).sum()


def test_dropout() -> None:
    graph = checked(Dropping(), (X,)).graph
    assert [op.args[1] for op in graph.operations if op.operator == "nnscaler.dropout"] == [0.25, 0.5]
    assert len([op for op in graph.operations if "scaled_dot_product" in op.operator]) == 1


class Labelled(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.proj, self.weight, self.options = nn.Linear(6, 9), options.pop("weight", None), options

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.proj(x), labels, self.weight, **self.options).to(torch.float32)


@pytest.mark.parametrize(
    ("options", "lowered"),
    [
        ({}, True),
        ({"reduction": "sum"}, True),
        ({"ignore_index": 3}, True),
        ({"label_smoothing": 0.1}, False),
        ({"weight": torch.arange(1.0, 10.0)}, False),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy(options: dict[str, Any], lowered: bool, dtype: torch.dtype) -> None:
    options = {k: v.to(dtype) if isinstance(v, Tensor) else v for k, v in options.items()}
    labels = torch.tensor([1, 8, 3, 0 if "ignore_index" in options else -100])
    graph = checked(Labelled(**options).to(dtype), (X.to(dtype), labels)).graph
    assert lowered == any(op.operator == "nnscaler.ce_tail" for op in graph.operations)


def test_the_graph_runs_and_needs_grad_is_right() -> None:
    model = Regions()
    traced = checked(model, (X,))
    values = run_graph(traced.graph, traced.state, traced.inputs)
    assert torch.allclose(values[traced.graph.loss], model(X))
    for name, tensor in traced.graph.tensors.items():
        assert values[name].requires_grad == tensor.needs_grad, name
        assert tuple(values[name].shape) == tensor.shape, name
        assert str(values[name].dtype) == f"torch.{tensor.dtype}", name
    exact = run_graph(traced.graph, traced.state, traced.inputs, precision="float64")
    assert all(v.dtype == torch.float64 for v in exact.values())
