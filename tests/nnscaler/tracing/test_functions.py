"""User-defined functions: registered ones, and autograd.Functions that nobody registered."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from op_registry.register import register_op

from nnscaler.errors import NnscalerError
from nnscaler.tracing import run_graph, trace
from tests.graph_invariants import check_graph

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))


class Rounded(torch.autograd.Function):
    """Its backward is not the derivative of its forward, so that tracing into it shows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, options: dict[str, int], _nothing: None) -> Tensor:
        ctx.scale = scale
        return torch.round(x * scale * options["times"])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient * ctx.scale * 7, None, None, None


class SumAndProduct(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, y: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        return x * y, x.sum(dims) + y.sum(dims)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG004
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, product: Tensor, total: Tensor) -> Any:  # type: ignore[override]
        x, y = ctx.saved_tensors
        return product * y * 2 + total, product * x + total, None


class UsesFunctions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        a = Rounded.apply(self.proj(x), 2.0, {"times": 3}, None)
        b = Rounded.apply(x @ self.proj.weight, 3.0, {"times": 1}, None)
        product, total = SumAndProduct.apply(a, self.proj(x), (0,))
        with torch.no_grad():
            c = Rounded.apply(x, 1.0, {"times": 1}, None)
        return (product * c).sum() + (b * total).sum()


@pytest.mark.long
def test_unregistered_functions_are_one_operation_each() -> None:
    with pytest.warns(UserWarning, match="is not registered: every rank runs it whole"):
        traced = trace(UsesFunctions(), (X,))
    check_graph(traced.graph)
    called = [op for op in traced.graph.operations if op.operator in traced.functions]
    classes = [traced.functions[op.operator].function for op in called]
    assert classes == [Rounded, Rounded, SumAndProduct, Rounded]
    assert called[2].args[2] == (0,)
    assert [note.split(":")[0] for note in traced.notes] == [__file__] * 2
    first = traced.functions[called[0].operator]
    assert [position for position, _ in first.constants] == [2]
    assert first.where is not None
    assert first.where.text == "class Rounded(torch.autograd.Function):"
    with pytest.warns(UserWarning, match="is not registered"):
        again = trace(UsesFunctions(), (X,))
    assert again.graph == traced.graph, "names do not depend on what was traced before"
    apply = torch.autograd.Function.__dict__["apply"]
    assert Rounded.apply.__func__ is apply.__func__, "the patch is gone"


def _scaling_by(factor: float) -> type[torch.autograd.Function]:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, x: Tensor) -> Tensor:
            return x * factor

        @staticmethod
        def backward(_ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return gradient * factor * 2

    return Scaled


class UsesTwins(UsesFunctions):
    def forward(self, x: Tensor) -> Tensor:
        first, second = _scaling_by(2.0), _scaling_by(3.0)
        return second.apply(first.apply(self.proj(x))).sum()


BESIDE: list[Tensor] = []


def work_beside() -> None:
    BESIDE.append(Rounded.apply(X, 2.0, {"times": 3}, None))


class WorksBeside(nn.Module):
    """A program that still runs in another thread while a model is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        thread = threading.Thread(target=work_beside)
        thread.start()
        thread.join()
        return self.proj(x).sum()


def test_functions_of_other_threads_are_none_of_the_model() -> None:
    traced = trace(WorksBeside(), (X,), self_check=False)
    assert traced.notes == ()
    assert [op.operator for op in traced.graph.operations] == ["aten.linear.default", "aten.sum.default"]
    torch.testing.assert_close(BESIDE[0], torch.round(X * 6))


def test_two_classes_of_one_name() -> None:
    with pytest.warns(UserWarning, match="is not registered"):
        assert len(trace(UsesTwins(), (X,)).functions) == 2


@register_op("*, * -> *", name="tracing_test.gated")
def gated(x: Tensor, gate: Tensor, scale: float = 1.0) -> Tensor:
    return x * torch.sigmoid(gate) * scale


@register_op("l m, l n^ -> l m", name="tracing_test_windows")
def windows(x: Tensor, y: Tensor, sizes: list[int], dtype: torch.dtype) -> Tensor:
    assert isinstance(sizes, list)
    return x * y.to(dtype)[:, : sum(sizes)].sum(1, keepdim=True)


@register_op("* -> *")
class TracingTestStraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return torch.round(x)

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 3


class UsesOperators(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = gated(self.proj(x), x, scale=2.0)
        h = windows(h, x, [1, 2], torch.float32)
        return TracingTestStraightThrough.apply(h).pow(2).sum()


def test_registered_functions_have_their_names() -> None:
    traced = trace(UsesOperators(), (X,))
    check_graph(traced.graph)
    names = [op.operator for op in traced.graph.operations]
    assert names == [
        "aten.linear.default",
        "tracing_test.gated",
        "tracing_test_windows",
        "TracingTestStraightThrough",
        "aten.pow.Tensor_Scalar",
        "aten.sum.default",
    ]
    assert not traced.notes
    values = run_graph(traced.graph, traced.state, traced.inputs)
    assert values[traced.graph.loss].requires_grad


class OfFunction(torch.autograd.Function):
    """Differentiates a function that it is given, which closes over a parameter."""

    @staticmethod
    def forward(ctx: Any, function: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(x, weight)
        return function(x).detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return None, *torch.autograd.grad(ctx.function(x), (x, weight), gradient)


def test_a_registered_function_that_draws_is_named() -> None:
    @register_op("* -> *", name="tracing_test.noisy")
    def noisy(x: Tensor) -> Tensor:
        return x + torch.randn_like(x)

    class Noisy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return gated(noisy(super().forward(x)), x).square().sum()

    with pytest.raises(NnscalerError, match=r"tracing_test\.noisy draws random numbers") as refused:
        trace(Noisy(6, 6), (X,))
    assert refused.value.where is not None and "super().forward(x)" in (refused.value.where.text or "")


class Drawn(torch.autograd.Function):
    """It draws by an operator that has no formula, so that both sides of a self-check draw alike."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x + torch.poisson(x.abs())

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


def test_a_function_of_autograd_that_draws_is_refused() -> None:
    class Noisy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return Drawn.apply(super().forward(x)).square().sum()  # type: ignore[no-any-return]

    with pytest.raises(NnscalerError, match=r"Drawn_0\.default draws random numbers from torch's generator") as refused:
        trace(Noisy(6, 6), (X,))
    assert refused.value.where is not None and refused.value.where.file == __file__


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return torch.round(x)

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


straight = Straight.apply  # bound when the file is loaded, before any trace


def test_a_function_that_was_bound_before_keeps_its_backward() -> None:
    class Bound(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return straight(super().forward(x) * 3).sum()  # type: ignore[no-any-return]

    graph = trace(Bound(6, 6), (X,)).graph  # its self-check compares gradients
    assert [op.operator for op in graph.operations if "Straight" in op.operator]


def test_a_function_that_reads_parameters_behind_its_arguments_is_refused() -> None:
    class Solves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6))

        def forward(self, x: Tensor) -> Tensor:
            return OfFunction.apply(lambda x: x * self.weight, x, self.weight).square().sum()

    with pytest.raises(NnscalerError, match="it raises, and the model does not: RuntimeError") as caught:
        trace(Solves(), (torch.randn(4, 6),))
    assert caught.value.code == "trace_unfaithful"
    assert caught.value.where is not None and caught.value.where.file == __file__


def test_a_shape_that_the_model_itself_checks_is_known() -> None:
    """The number of features of a mask in a buffer depends on data, until a layer asks for so many."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.tensor([True, False, True, False]))
            self.proj = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.proj(x[:, self.mask.nonzero().squeeze(-1)]).square().sum()

    assert trace(Masked(), (torch.randn(3, 4),)).notes == ()
