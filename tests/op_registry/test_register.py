"""`register_op` on every kind of target: one node of an exported graph, with the gradients of eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, List, Optional  # noqa: UP035 (users write them)

import pytest
import torch
from torch import Tensor, nn

from op_registry import (
    AnnotationError,
    Call,
    NnscalerError,
    TensorArgument,
    bind_call,
    default_registry,
    name_of,
    operator_of,
    register_op,
)

PREFIX = "test_register_"  # the registry is the process's: names of these tests are their own


def registered(name: str) -> Any:
    spec = default_registry().lookup(PREFIX + name)
    assert spec is not None
    return spec


class Model(nn.Module):
    """Applies a function of (x, weight) and sums what it returns."""

    def __init__(self, function: Callable[..., Any], *shape: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.weight = nn.Parameter(torch.randn(*shape, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        results = self.function(x, self.weight)
        flat = [results] if isinstance(results, Tensor) else list(results)
        return torch.stack([(i + 1) * r.square().sum() for i, r in enumerate(flat)]).sum()


def exported(function: Callable[..., Any], *shape: int) -> list[str]:
    """The operators of the exported model, after a check that its loss and gradients are eager's, bit by bit."""
    model = Model(function, *shape)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    program = torch.export.export(model, (x.detach(),), strict=False)
    results = []
    for run in (model, program.module()):
        loss = run(x)
        wanted = [x, *run.parameters()]
        results.append([loss, *torch.autograd.grad(loss, wanted)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    names = [operator_of(n.target) for n in program.graph.nodes if n.op == "call_function"]
    return [n.removeprefix(PREFIX) for n in names if n is not None and n.startswith(PREFIX)]


@register_op("m k+, k+ n -> m n", name=PREFIX + "matmul")
def matmul(x, w):
    return torch.sin(x) @ w.exp()


def test_a_plain_function_is_one_node() -> None:
    assert exported(matmul, 4, 5) == ["matmul"]


def test_what_is_recorded() -> None:
    spec = registered("matmul")
    assert spec.annotation == "m k+, k+ n -> m n"
    assert spec.where.file == __file__ and spec.where.text == "def matmul(x, w):"
    assert spec.qualname == "matmul" and matmul.__name__ == "matmul"
    assert spec.target is matmul.__wrapped__  # type: ignore[attr-defined]
    assert [(p.name, p.tensor) for p in spec.parameters] == [("x", True), ("w", True)]
    assert matmul.spec == spec  # type: ignore[attr-defined]


def test_the_facts_of_a_users_operator_are_the_defaults() -> None:
    """Costs and memory are those of a function that computes, and keeps what it reads."""
    spec = registered("matmul")
    assert (spec.moves, spec.detached, spec.gathers, spec.keeps_nothing, spec.hands_on) == (None, *[False] * 4)
    assert (spec.random, spec.draws_if, spec.view, spec.backward_flops) == (False, (), False, 2.0)


def test_name_of() -> None:
    assert name_of(matmul.overload) == PREFIX + "matmul"  # type: ignore[attr-defined]
    assert name_of(torch.ops.aten.linear.default) == "aten.linear.default"
    assert operator_of(torch.ops.aten.add.Tensor) == "aten.add.Tensor"
    assert operator_of(len) is None and operator_of("x") is None


@register_op("a b^, a b^, a b^ -> a b^, a b^", name=PREFIX + "many_arguments")
def many_arguments(
    x: Tensor,
    ws: List[Tensor],  # noqa: UP006
    bias: Optional[Tensor] = None,  # noqa: UP045
    sizes: tuple[int, ...] = (1, 2),
    *,
    scale: float = 2.0,
    mode: str = "up",
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    total = x * scale + sum(ws[1:], ws[0])
    if bias is not None:
        total = total + bias.sum() * len(sizes)
    return total.to(dtype), (total if mode == "up" else -total).cumsum(-1)


def test_lists_optionals_and_keywords() -> None:
    def call(x: Tensor, w: Tensor) -> Any:
        first = many_arguments(x, [w, w * 2])
        return *first, *many_arguments(x, [w], w, (3,), scale=0.5, mode="down")

    assert exported(call, 3, 4) == ["many_arguments", "many_arguments"]


def test_the_default_of_a_size_is_known() -> None:
    @register_op("b (h d) -> b h d", name=PREFIX + "heads")
    def heads(x, h=2):
        return x.unflatten(1, (h, -1))

    def call(x: Tensor, w: Tensor) -> Tensor:
        return heads(x * w) + heads(x, h=2)

    assert exported(call, 4) == ["heads", "heads"]
    assert registered("heads").parameters[1].default == 2


def test_tuples_lists_and_views_as_results() -> None:
    @register_op("a b -> b a, a b", name=PREFIX + "views")
    def views(x):
        return x.t(), x

    @register_op("a b^ -> a b^, a b^", name=PREFIX + "parts")
    def parts(x) -> List[Tensor]:  # noqa: UP006
        return list(x.split(x.shape[1] // 2, dim=1))

    def call(x: Tensor, w: Tensor) -> list[Tensor]:
        first, second = views(x * w)
        return [first.sin(), second.cos(), *parts(x)]

    assert exported(call, 4) == ["views", "parts"]


def test_one_registered_operator_inside_another_is_not_seen() -> None:
    @register_op("a b, b -> a b", name=PREFIX + "inner")
    def inner(x, w):
        return x * w

    @register_op("a b, b -> a b", name=PREFIX + "outer")
    def outer(x, w):
        return inner(x, w).sin()

    assert exported(outer, 4) == ["outer"]


def test_a_closure() -> None:
    def make(power: int) -> Callable[..., Tensor]:
        @register_op("a b, b -> a b", name=f"{PREFIX}power_{power}")
        def raised(x, w):
            return (x * w) ** power

        return raised

    assert exported(make(2), 4) == ["power_2"]
    assert exported(make(3), 4) == ["power_3"]
    assert registered("power_3").qualname.endswith("make.<locals>.raised")


def test_a_lambda_with_a_name() -> None:
    product = register_op("a b, b -> a b", name=PREFIX + "lambda")(lambda x, w: x * w)
    assert exported(product, 4) == ["lambda"]
    assert "lambda x, w" in registered("lambda").where.text


def test_a_decorated_function_is_found_under_its_decorators() -> None:
    @register_op("a b, b -> a b", name=PREFIX + "decorated")
    @torch.enable_grad()
    def decorated(x, w):
        return x * w

    assert exported(decorated, 4) == ["decorated"]
    assert registered("decorated").where.text == "def decorated(x, w):"


def test_a_compiled_function() -> None:
    calls = []

    def backend(graph: Any, inputs: Any) -> Any:
        calls.append("compiled")
        return graph.forward

    @register_op("a b, b -> a b", name=PREFIX + "compiled")
    @torch.compile(backend=backend)
    def compiled(x, w):
        return (x * w).sin()

    assert exported(compiled, 4) == ["compiled"]
    assert calls == ["compiled"]  # eager runs what was compiled, tracing the function itself
    assert registered("compiled").where.text == "def compiled(x, w):"


@register_op("a b, b -> a b", name=PREFIX + "rounded", gradient="custom")
class Rounded(torch.autograd.Function):
    """A straight-through estimator: its backward is not its derivative."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return torch.round(x) * w

    @staticmethod
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        return 3 * gradient * w, (gradient * x).sum(0)


def test_an_autograd_function_is_one_node_with_its_own_gradient() -> None:
    assert isinstance(Rounded, type)
    assert exported(Rounded.apply, 4) == ["rounded"]
    spec = registered("rounded")
    assert spec.gradient == "custom" and spec.qualname == "Rounded"
    assert spec.where.text == "class Rounded(torch.autograd.Function):"
    x = torch.ones(2, 2)
    assert torch.equal(spec.target(x, torch.ones(2)), x)


def test_a_subclass_of_a_registered_function_is_itself() -> None:
    class Doubled(Rounded):
        @staticmethod
        def forward(ctx, x, w):
            return 2 * Rounded.forward(ctx, x, w)

    x = torch.ones(2, 2)
    assert torch.equal(Doubled.apply(x, torch.ones(2)), 2 * x)


def test_an_autograd_function_with_setup_context_and_two_outputs() -> None:
    @register_op("a b, b -> a b, a b", name=PREFIX + "scaled")
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(x, w, factor: float):
            return x * w * factor, x + w

        @staticmethod
        def setup_context(ctx, inputs, output):  # noqa: ARG004
            x, w, ctx.factor = inputs
            ctx.save_for_backward(x, w)

        @staticmethod
        def backward(ctx, first, second):
            x, w = ctx.saved_tensors
            return first * w * ctx.factor + second, (first * x * ctx.factor + second).sum(0), None

    def call(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return Scaled.apply(x, w, 0.5)

    assert exported(call, 4) == ["scaled"]


def test_an_operator_of_torch_library_is_only_annotated() -> None:
    @torch.library.custom_op("test_register::shifted", mutates_args=())
    def shifted(x: Tensor, w: Tensor) -> Tensor:
        return x + w

    shifted.register_fake(lambda x, w: torch.empty_like(x))
    shifted.register_autograd(lambda ctx, g: (g, g.sum(0)))
    assert register_op("a b, b -> a b")(shifted) is shifted

    name = "test_register.shifted.default"
    spec = default_registry().lookup(name)
    assert spec is not None and spec.where is not None
    assert spec.where.file == __file__ and spec.where.text.startswith("def shifted(")
    assert name_of(torch.ops.test_register.shifted.default) == name
    assert [p.name for p in spec.parameters] == ["x", "w"]
    model = Model(shifted, 4)
    program = torch.export.export(model, (torch.randn(3, 4, dtype=torch.float64),), strict=False)
    assert name in [operator_of(n.target) for n in program.graph.nodes]


def test_an_overload_and_a_packet() -> None:
    with torch.library._scoped_library("test_register_two", "DEF") as library:
        library.define("one(Tensor x) -> Tensor")
        library.define("two.a(Tensor x) -> Tensor")
        library.define("two.b(Tensor x, int n) -> Tensor")
        operators = torch.ops.test_register_two
        assert register_op("a -> a")(operators.one) is operators.one
        assert default_registry().lookup("test_register_two.one.default") is not None
        register_op("a -> a")(operators.two.b)
        spec = default_registry().lookup("test_register_two.two.b")
        assert spec is not None and spec.where is not None and "operators.two.b" in spec.where.text
        with pytest.raises(NnscalerError, match="it has 2 overloads") as caught:
            register_op("a -> a")(operators.two)
        assert "`torch.ops.test_register_two.two.a`" in str(caught.value.help)
        with pytest.raises(NnscalerError, match="keeps its name"):
            register_op("a -> a", name="other")(operators.two.a)


def test_calls_outside_tracing_take_any_argument() -> None:
    @register_op("a, ? -> a", name=PREFIX + "callback")
    def callback(x, choice: str = "sin") -> Tensor:
        return choice(x) if callable(choice) else x.sin()

    x = torch.ones(2)
    assert torch.equal(callback(x, torch.cos), x.cos())  # type: ignore[arg-type]


def test_an_argument_of_the_wrong_type_while_tracing() -> None:
    @register_op("a b, b -> a b", name=PREFIX + "strict")
    def strict(x, w):
        return x * w

    with pytest.raises(NnscalerError) as caught:
        torch.export.export(Model(lambda x, w: strict(x, [2]), 4), (torch.ones(3, 4),), strict=False)
    assert caught.value.code == "operator_call_illegal"
    assert "argument 'w'" in str(caught.value)
    assert "(Tensor x, Tensor w) -> Tensor" in str(caught.value.help)


def test_sample_inputs() -> None:
    @register_op("a -> a", name=PREFIX + "sampled", sample_inputs=lambda: (torch.ones(2),))
    def sampled(x):
        return x

    assert torch.equal(registered("sampled").sample_inputs()[0], torch.ones(2))


def plain(x, w):
    return x * w


@pytest.mark.parametrize(
    ("register", "error", "first_line"),
    [
        (
            lambda: register_op("m k+, k n -> m n", name=PREFIX + "bad")(plain),
            AnnotationError,
            "operator `test_register_bad`: the marks of `k` must agree on every occurrence",
        ),
        (
            lambda: register_op("a -> a b, c", name=PREFIX + "bad")(plain),
            NnscalerError,
            (
                "cannot register `test_register_bad`: the annotation has no operand for the parameter `w`, "
                "which has no type"
            ),
        ),
        (
            lambda: register_op("a, b")(plain),
            AnnotationError,
            "operator `plain`: an annotation has one `->` between its inputs and its outputs",
        ),
        (
            lambda: register_op("a -> a")(lambda x: x),
            NnscalerError,
            "cannot register `<lambda>`: a lambda has no name",
        ),
        (lambda: register_op("a -> a")(3), NnscalerError, "cannot register `<class 'int'>`: it is no function"),
        (
            lambda: register_op(3),  # type: ignore[arg-type]
            NnscalerError,
            "cannot register `register_op`: the annotation is neither text nor a function of the call",
        ),
        (
            lambda: register_op("a -> a", gradient="none"),  # type: ignore[arg-type]
            NnscalerError,
            'cannot register `register_op`: gradient=\'none\' is neither "derivative" nor "custom"',
        ),
        (
            lambda: register_op("a -> a", sample_inputs=(1,)),  # type: ignore[arg-type]
            NnscalerError,
            "cannot register `register_op`: sample_inputs is not a function",
        ),
    ],
)
def test_what_cannot_be_registered(register: Callable[[], object], error: type[Exception], first_line: str) -> None:
    with pytest.raises(error) as caught:
        register()
    assert str(caught.value).splitlines()[0] == first_line


def test_an_annotation_may_be_a_function_of_the_call() -> None:
    def annotation(call: Call) -> str:
        return "a b, b -> a b" if len(call.tensors()) == 2 else "a b -> a b"

    @register_op(annotation, name=PREFIX + "called")
    def called(x: Tensor, w: Tensor | None = None) -> Tensor:
        return x if w is None else x * w

    assert exported(called, 4) == ["called"]
    x, w = TensorArgument(0, (2, 3), "float32"), TensorArgument(1, (3,), "float32")
    spec = registered("called")
    assert bind_call(spec, Call(spec.name, (x, w))).text == "a b, b -> a b"
    assert bind_call(spec, Call(spec.name, (x,))).text == "a b -> a b"
