"""The second oracle: wrong backwards are refuted, with the cause and the place; what cannot be told is open."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.verify.backwards import (
    Clamped,
    ForgetsTheMean,
    Function,
    Kinked,
    RmsNorm,
    Sorted,
    assert_right,
    call,
    check,
    finding,
    normal,
)
from tests.verify.size_branches import as_of_library
from verify import Verdict
from verify.operators.audit.handwritten_backward import handwritten
from verify.operators.audit.watch_effects_on_tensors import Probed
from verify.self_test.operators.mutants.right_backwards_and_mistakes import with_backward


class IgnoresItsCotangent(RmsNorm):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return RmsNorm.backward(ctx, torch.full_like(g, 0.7))


class RightForOnes(RmsNorm):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return RmsNorm.backward(ctx, g * g)


class NoGradientOfWeight(RmsNorm):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return RmsNorm.backward(ctx, g)[0], None


WRONG_NORMS: list[tuple[Any, str, str]] = [
    (ForgetsTheMean, "`x`", "the backward of `ForgetsTheMean` is wrong in `x`"),
    (IgnoresItsCotangent, "`x` and `weight`", "the backward of `IgnoresItsCotangent` does not use its cotangent"),
    (RightForOnes, "`x` and `weight`", "the backward of `RightForOnes` is right for a cotangent of all ones only"),
    (NoGradientOfWeight, "`weight`", "the backward of `NoGradientOfWeight` returns None for `weight`"),
]


@pytest.mark.parametrize(("cls", "names", "cause"), WRONG_NORMS, ids=lambda v: getattr(v, "__name__", ""))
def test_wrong_norms(cls: Any, names: str, cause: str) -> None:
    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return cls.apply(x, weight)  # type: ignore[no-any-return]

    found = finding(norm, normal(12, 8), normal(8))
    assert f"for {names} is not the derivative" in found.message
    assert found.cause == cause
    assert found.counter_example["input"] in names
    assert "by autograd through its forward" in found.counter_example
    ((what, place),) = found.related
    assert what == f"backward of `{cls.__name__}`"
    assert place.file == inspect.getsourcefile(cls)
    assert place.text == "def backward(ctx: Any, g: Tensor) -> Any:"
    assert 'gradient="custom"' in str(found.help)


WRONG: list[tuple[str, Function, tuple[Tensor, ...], str, str | None]] = [
    (
        "three for two",
        with_backward(lambda x: x * 2, lambda g, y, x: (g * 3,)),
        (normal(4, 3),),
        "inputs[0]",
        "1.5 times",
    ),
    (
        "silu forgets a term",
        with_backward(F.silu, lambda g, y, x: (g * x.sigmoid(),)),
        (normal(5, 3),),
        "inputs[0]",
        None,
    ),
    ("sign", with_backward(torch.sin, lambda g, y, x: (-g * x.cos(),)), (normal(4, 3),), "inputs[0]", "-1 times"),
    (
        "swapped",
        with_backward(lambda x, w: x * w, lambda g, y, x, w: (g * x, g * w)),
        (normal(4, 3), normal(4, 3, seed=1)),
        "inputs[0]",
        "in each other's place",
    ),
    (
        "bias doubled",
        with_backward(lambda x, b: x + b, lambda g, y, x, b: (g, 2 * g.sum(0))),
        (normal(4, 3), normal(3)),
        "inputs[1]",
        "2 times",
    ),
    (
        "transpose missing",
        with_backward(lambda x, w: x @ w, lambda g, y, x, w: (g @ w, x.t() @ g)),
        (normal(4, 3), normal(3, 3, seed=1)),
        "inputs[0]",
        None,
    ),
    (
        "detached in part",
        with_backward(lambda x: x * x.sum(), lambda g, y, x: (g * x.sum(),)),
        (normal(4, 3),),
        "inputs[0]",
        None,
    ),
    (
        "wrong for negative values only",
        with_backward(lambda x: F.leaky_relu(x, 0.1), lambda g, y, x: (torch.where(x > 0, g, 0.2 * g),)),
        (normal(4, 3),),
        "inputs[0]",
        None,
    ),
    ("not a number", with_backward(torch.sin, lambda g, y, x: (g * float("nan"),)), (normal(4),), "inputs[0]", None),
    ("none", with_backward(torch.sin, lambda g, y, x: (None,)), (normal(4, 3),), "inputs[0]", "returns None"),
]


@pytest.mark.parametrize(
    ("function", "inputs", "cause"), [(w[1], w[2], w[4]) for w in WRONG], ids=[w[0] for w in WRONG]
)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_wrong_backwards(function: Function, inputs: tuple[Tensor, ...], cause: str | None, seed: int) -> None:
    found = finding(function, *inputs, seed=seed)
    if cause is not None:
        assert cause in str(found.cause)


def test_a_wrong_function_in_a_composition_is_named() -> None:
    double = with_backward(lambda x: x * 2, lambda g, y, x: (g * 2,))

    def operator(x: Tensor, weight: Tensor) -> Tensor:
        return double(ForgetsTheMean.apply(x.tanh(), weight) @ weight)

    found = finding(operator, normal(12, 8), normal(8))
    assert [what for what, _ in found.related] == ["backward of `ForgetsTheMean`"]
    assert found.cause == "the backward of `ForgetsTheMean` is wrong in `x`"


@pytest.mark.long
def test_float32_inside_hides_nothing() -> None:
    class Inside(RmsNorm):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            return RmsNorm.forward(ctx, x.float(), weight.float()).to(x.dtype)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            return tuple(d.double() for d in RmsNorm.backward(ctx, g.to(torch.float32)))

    class Wrong(Inside):
        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            return tuple(d.double() for d in ForgetsTheMean.backward(ctx, g.to(torch.float32)))

    assert_right(Inside.apply, normal(12, 8), normal(8))
    for seed in range(5):
        finding(Wrong.apply, normal(12, 8), normal(8), seed=seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_backward_that_is_wrong_in_one_dtype(dtype: torch.dtype) -> None:
    half = with_backward(torch.sin, lambda g, y, x: (g * x.cos() * (0.5 if g.dtype == dtype else 1.0),))
    found = finding(half, normal(6, 5))
    assert str(dtype).removeprefix("torch.") in found.message


def test_what_packs_saved_values_is_hand_written() -> None:
    def rounded(x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.round(), lambda t: t):
            return x * x

    def kept(x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            return x * x

    for function in (rounded, as_of_library(rounded)):  # torchao's are not torch's
        assert finding(function, normal(4, 3)).code == "gradient_is_not_derivative"
    assert_right(kept, normal(4, 3))
    assert not handwritten(*call(lambda x: checkpoint(torch.sin, x, use_reentrant=False), normal(4, 3)))  # torch's own


def test_hooks_are_hand_written() -> None:
    def operator(x: Tensor) -> Tensor:
        y = x.sin()
        if y.requires_grad:
            y.register_hook(lambda g: g * 3)
        return y * 2

    def on_node(x: Tensor) -> Tensor:
        y = x.sin()
        if y.requires_grad:
            y.grad_fn.register_prehook(lambda g: (g[0] * 3,))  # type: ignore[union-attr]
        return y * 2

    def by_an_edge(x: Tensor) -> Tensor:  # torch's own file asks for the node
        y = x.sin()
        if y.requires_grad:
            torch.autograd.graph.get_gradient_edge(y).node.register_prehook(lambda g: (g[0] * 3,))
        return y * 2

    for function in (operator, on_node, by_an_edge):
        assert "3 times" in str(finding(function, normal(4, 3)).cause)

    def harmless(x: Tensor) -> Tensor:
        if (y := x.sin()).requires_grad:
            y.register_hook(lambda g: None)
        return y * 2

    assert_right(harmless, normal(4, 3))


# straight-through estimators


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(_ctx: Any, g: Tensor) -> Tensor:
        return g


def test_custom_gradients_get_a_note() -> None:
    def operator(x: Tensor) -> Tensor:
        return Rounded.apply(x)  # type: ignore[no-any-return]

    finding(operator, normal(6, 4))
    checks, findings, notes = check(operator, normal(6, 4), gradient="custom")
    assert not checks
    assert not findings
    assert notes[0].startswith('the gradient of `op` is not the derivative, as gradient="custom" says: slope')
    _, _, notes = check(with_backward(torch.sin, lambda g, y, x: (g * x.cos(),)), normal(3, 4), gradient="custom")
    assert notes == ('the gradient of `op` is the derivative: gradient="custom" is not needed',)


def test_a_gradient_that_depends_on_a_forgotten_attribute_is_open() -> None:
    """`Sorted.backward` raises: that is no pass, and no wrong derivative either."""
    checks, findings, notes = check(Sorted.apply, normal(4, 3))
    assert not findings
    assert [c.verdict for c in checks] == [Verdict.INCONCLUSIVE]
    assert "AttributeError" in checks[0].detail
    assert len(notes) == 1


def test_kinks_everywhere_are_open() -> None:
    """Whose slope depends on the step has no derivative to compare with."""
    noise = with_backward(lambda x: x + 1e-3 * (x * 1e12).sin(), lambda g, y, x: (g,))
    checks, findings, _ = check(noise, normal(40, 3))
    assert not findings
    assert [c.verdict for c in checks] == [Verdict.INCONCLUSIVE]
    assert "depend on the step" in checks[0].detail


def test_nothing_to_compare() -> None:
    assert check(torch.sin, normal(4)) == Probed()
    assert check(lambda x: Kinked.apply(x).detach(), normal(4)) == Probed()
    checks, _, notes = check(lambda x: x.argmax(-1), normal(4, 3), always=True)
    assert not checks
    assert "no output of `op` has a gradient" in notes[0]
    checks, _, notes = check(lambda x: x + 1, torch.arange(4), always=True)
    assert not checks
    assert "no input of `op` has a gradient" in notes[0]


def test_what_raises_is_open() -> None:
    def raises(x: Tensor) -> Tensor:
        raise ValueError("no")

    checks, findings, _ = check(raises, normal(4))
    assert not findings
    assert [c.verdict for c in checks] == [Verdict.INCONCLUSIVE]


# who wrote it


def names_found(function: Function, *args: Any) -> list[tuple[str, str]]:
    return [(h.name, h.way) for h in handwritten(*call(function, *args))]


def test_who_wrote_the_backward() -> None:
    def kinked(x: Tensor) -> Tensor:
        return Kinked.apply(x)  # type: ignore[no-any-return]

    assert names_found(torch.sin, normal(4)) == []
    assert names_found(lambda x: F.silu(x.detach() * x), normal(4)) == []
    nested = names_found(lambda x: Kinked.apply(Clamped.apply(x, 0.0, 1.0) @ x).sum(), normal(3, 3))
    assert sorted(nested) == [("Clamped", "autograd.Function"), ("Kinked", "autograd.Function")]
    compiled = torch.compile(kinked, backend="eager")
    assert names_found(compiled, normal(3)) == [("Kinked", "autograd.Function")]


def test_operators_of_torch_library() -> None:
    @torch.library.custom_op("test_derivative::cube", mutates_args=())
    def cube(x: Tensor, scale: float) -> Tensor:
        return x**3 * scale

    def keep(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.scale = inputs[1]

    def backward(ctx: Any, g: Tensor) -> Any:
        return g * 2 * ctx.saved_tensors[0] ** 2 * ctx.scale, None

    cube.register_autograd(backward, setup_context=keep)
    (found,) = handwritten(*call(cube, normal(4), 2.0))
    assert (found.name, found.way) == ("test_derivative.cube.default", "register_autograd")
    assert found.where is not None
    assert found.where.text == "def backward(ctx: Any, g: Tensor) -> Any:"
    wrong = finding(cube, normal(4), 2.0)
    assert wrong.related == (("backward of `test_derivative.cube.default`", found.where),)
    assert "0.666667 times" in str(wrong.cause)


def test_the_user_s_classes_are_left_as_they_were() -> None:
    before = dict(vars(ForgetsTheMean)), dict(vars(RmsNorm))
    state = torch.get_rng_state()
    finding(ForgetsTheMean.apply, normal(12, 8), normal(8))
    assert (dict(vars(ForgetsTheMean)), dict(vars(RmsNorm))) == before
    assert torch.equal(torch.get_rng_state(), state)


def saturated(x: Tensor) -> Tensor:
    return F.softplus(x, threshold=20)


FAR: list[tuple[str, Function, tuple[Any, ...], str]] = [
    (
        "zero beyond 20",
        with_backward(saturated, lambda g, y, x: (torch.where(x > 20, 0.0, g * torch.sigmoid(x)),)),
        (normal(6, 5),),
        "20",
    ),
    (
        "saturation forgotten",
        with_backward(lambda x: x.clamp(-1000, 1000), lambda g, y, x: (g.clone(),)),
        (normal(6, 5),),
        "1000",
    ),
    (
        "of one sign, one number",
        with_backward(lambda x: x.clamp(min=-300.5), lambda g, y, x: (g.clone(),)),
        (torch.tensor(0.5).double(),),
        "300.5",
    ),
    (
        "in the second input",
        with_backward(lambda x, w: x * w.clamp(max=50), lambda g, y, x, w: (g * w.clamp(max=50), g * x)),
        (normal(6, 5), normal(6, 5, seed=1)),
        "50",
    ),
    (
        "in a domain of positive numbers",
        with_backward(lambda x: torch.where(x < 81, x.sqrt(), 9.0), lambda g, y, x: (g * 0.5 / x.sqrt(),)),
        (normal(6, 5).abs() + 0.5,),
        "81",
    ),
]


@pytest.mark.parametrize(("function", "args", "number"), [r[1:] for r in FAR], ids=[r[0] for r in FAR])
def test_backwards_that_are_wrong_beyond_a_number_in_the_code(
    function: Function, args: tuple[Any, ...], number: str
) -> None:
    for seed in range(5):
        found = finding(function, *args, seed=seed)
        assert found.counter_example["values"] == f"about {number} and -{number}, since {number} stands in its code"


def _ratio_of_exponentials(g: Tensor, y: Tensor, x: Tensor) -> tuple[Tensor]:
    return (g * x.exp() / (1 + x.exp()),)


@pytest.mark.parametrize(
    ("function", "where"),
    [
        (with_backward(lambda x: x * x, lambda g, y, x: (2 * g * y / x,)), "zeros among them"),
        (with_backward(F.softplus, _ratio_of_exponentials), "about 1000 and -1000, since exponentials overflow there"),
    ],
)
def test_backwards_that_are_no_numbers_somewhere(function: Function, where: str) -> None:
    found = finding(function, normal(6, 5))
    assert found.counter_example["values"] == where and "nan" in found.counter_example["found"]
