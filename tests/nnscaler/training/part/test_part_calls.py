"""Calls of a part: other sizes, other modes, several before their backwards, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import verify
from nnscaler.codegen.compiled_program import Program
from nnscaler.errors import NnscalerError
from nnscaler.runtime.communication.communicator import Communicator
from nnscaler.training.model_part.compile_submodule_as_program import compile_part
from nnscaler.training.model_part.engine import PartEngine
from nnscaler.training.model_part.module import Part
from nnscaler.training.program_on_rank import EngineSettings
from tests.nnscaler.training.part.test_part import (
    CASES,
    FLOAT64,
    LENGTH,
    PLANS,
    WIDTH,
    Around,
    Blocks,
    Two,
    compiled,
    ids_of,
    made,
    on_ranks,
    rows_of,
)
from tests.sampling import every

SIZES = (12, 5, 1, 5, 12)


def rows(count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, LENGTH, WIDTH, dtype=torch.float64, generator=generator)


def close(found: Tensor | None, wanted: Tensor | None) -> None:
    assert found is not None
    assert wanted is not None
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-13)


def alone(module: nn.Module, sample: Any, settings: EngineSettings = FLOAT64, **options: Any) -> Part:
    return Part(PartEngine(compile_part(module, sample, ranks=1, plan="dp=1", **options), Communicator(0, 1), settings))


def squares(module: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs, and the gradient of the input of the sum of their squares; parameters have theirs."""
    x = x.detach().requires_grad_()
    if isinstance(module, nn.Module):
        module.zero_grad()
    y = module(x)
    y.square().sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


@pytest.mark.long
@pytest.mark.parametrize("plan", every(2, ["dp=1", "dp=2", "dp=3", "tp=2", "pp=2", "dp=2,zero=1", "dp=2,zero=3"]))
def test_batches_of_other_sizes_are_compiled_once(plan: str) -> None:
    """Also one that has fewer rows than there are data parts."""
    checked: list[str] = []
    eager = made(CASES["mlp"]).double()

    def vouch(program: Program) -> None:
        verify.vouch(program)
        checked.append(program.plan.describe())

    def work(part: Part) -> None:
        module = copy.deepcopy(eager)
        for count in SIZES:
            whole = rows(count, count)
            (y, x), (mine, its) = squares(module, whole), squares(part, rows_of(whole, part))
            close(mine, rows_of(y, part))
            close(its, rows_of(x, part))
            held = {name: p.grad for name, p in part.named_parameters()}
            for name, parameter in module.named_parameters():
                if name in held and held[name].shape == parameter.shape:  # type: ignore[union-attr]
                    close(held[name] * part.engine.data_part.count, parameter.grad)  # type: ignore[operator]
        assert len(part.engine.compilations) == 2

    settings = EngineSettings(dtype="float64", device="cpu", vouch=vouch)
    on_ranks(plan, compiled(CASES["mlp"], plan), work, settings)
    assert len(checked) == 2


@pytest.mark.long
@pytest.mark.parametrize("plan", every(3, ["dp=2", "pp=2", "dp=2,tp=2"]))
def test_the_program_of_a_part_is_proved(plan: str) -> None:
    for name in CASES:
        verify.vouch(compiled(CASES[name], plan).program)


@pytest.mark.long
def test_micro_batches_give_the_same() -> None:
    eager = made(CASES["mlp"]).double()

    def work(part: Part) -> None:
        y, x = squares(copy.deepcopy(eager), rows(12))
        mine, its = squares(part, rows_of(rows(12), part))
        close(mine, rows_of(y, part))
        close(its, rows_of(x, part))

    for plan in ("pp=2", "dp=2"):
        on_ranks(plan, compiled(CASES["mlp"], plan, micro_batches=3), work)


@pytest.mark.parametrize("plan", ["dp=1", "dp=2", "pp=2"])
def test_evaluation_and_calls_without_gradient(plan: str) -> None:
    """Evaluation mode draws nothing, changes nothing, and has gradients as in eager; no_grad trains batch norm."""
    eager = made(CASES["norm"]).double()

    def work(part: Part) -> None:
        module = copy.deepcopy(eager)
        for step in range(3):
            whole = rows(12, step)
            mine = rows_of(whole, part)
            if step == 1:
                with torch.no_grad():
                    close(part(mine), rows_of(module(whole), part))
            else:
                close(squares(part, mine)[1], rows_of(squares(module, whole)[1], part))
            module.eval()
            part.eval()
            with torch.no_grad():
                found = part(mine)
            assert not found.requires_grad
            close(found, rows_of(module(whole), part))
            close(squares(part, mine)[1], rows_of(squares(module, whole)[1], part))
            module.train()
            part.train()
            state = part.engine.state_dict()
            assert state["norm.num_batches_tracked"] == step + 1
            close(state["norm.running_mean"], module.state_dict()["norm.running_mean"])

    on_ranks(plan, compiled(CASES["norm"], plan), work)


@pytest.mark.parametrize("plan", ["dp=1", "dp=2", "tp=2", "pp=2"])
def test_each_backward_sees_what_its_forward_saw(plan: str) -> None:
    """Two calls before their backwards, one without, and a second backward of one: dropout draws for each call."""
    eager = made(CASES["dropout"]).double()
    CASES["dropout"].eager(eager)

    def work(part: Part) -> None:
        module = copy.deepcopy(eager)
        found = []
        for each, cut in ((module, lambda t: t), (part, lambda t: rows_of(t, part))):
            inputs = [cut(rows(12, seed)).requires_grad_() for seed in range(3)]
            first, _, third = (each(x) for x in inputs)
            third.square().sum().backward()
            first.square().sum().backward(retain_graph=True)
            first.square().sum().backward()
            assert inputs[1].grad is None
            found.append((inputs, {n: p.grad for n, p in each.named_parameters()}))
        (wanted, theirs), (inputs, own) = found
        for x, right in zip(inputs, wanted, strict=True):
            if right.grad is not None:
                close(x.grad, rows_of(right.grad, part))
        count = part.engine.data_part.count
        for name, gradient in own.items():
            if plan != "tp=2":
                close(gradient * count, theirs[name])  # type: ignore[operator]

    on_ranks(plan, compiled(CASES["dropout"], plan), work)


@pytest.mark.long
def test_gradients_are_asked_for_as_in_eager() -> None:
    """torch.autograd.grad, frozen inputs, an output that nothing uses, and gradients that add up."""
    part = alone(made(CASES["two"]), CASES["two"].sample(12))
    module = made(CASES["two"]).double()
    x, shift = rows(12), torch.randn(10, dtype=torch.float64)
    for use in ("y", "size"):
        results = []
        for each in (module, part):
            given = x.clone().requires_grad_()
            out = each({"x": given, "shift": [shift]})[use].sum()
            results.append(torch.autograd.grad(out, [given, *each.parameters()], allow_unused=True))
        for mine, right in zip(results[1], results[0], strict=True):
            close(mine, torch.zeros_like(mine) if right is None else right)
    assert all(p.grad is None for p in part.parameters())
    for _ in range(2):
        part({"x": x, "shift": [shift]})["y"].sum().backward()
        module({"x": x, "shift": [shift]})["y"].sum().backward()
    for mine, right in zip(part.parameters(), module.parameters(), strict=True):
        close(mine.grad, right.grad)


def test_a_part_that_returns_a_scalar() -> None:
    class Penalty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.arange(8.0))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.weight).square().mean()

    part, module, x = alone(Penalty(), (torch.randn(12, WIDTH),)), Penalty().double(), rows(12)[:, 0]
    (mine, its), (right, theirs) = squares(part, x), squares(module, x)
    close(mine, right)
    close(its, theirs)
    close(next(part.parameters()).grad, module.weight.grad)


class Ends(nn.Module):
    """Ends in a norm, whose elements add up to zero, and returns a parameter and the batch in another dim."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.scale = nn.Linear(WIDTH, 5), nn.LayerNorm(5), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.norm(torch.tanh(self.up(x)) * self.scale)
        return y, self.scale, y.transpose(0, 1)


@pytest.mark.parametrize("plan", ["dp=2,zero=1", "tp=2"])
def test_a_part_that_ends_in_a_norm_and_returns_a_parameter(plan: str) -> None:
    def loss(outputs: tuple[Tensor, Tensor, Tensor], share: float = 1.0) -> Tensor:
        y, scale, across = outputs
        return y.square().sum() + share * (scale * across).exp().sum()

    torch.manual_seed(0)
    module = Ends()
    program = compile_part(module, (rows(12).float(),), ranks=PLANS[plan], plan=plan)

    def work(part: Part) -> None:
        right, parts = copy.deepcopy(module).double(), part.engine.data_part.count
        loss(right(rows(12)), share=parts).backward()
        loss(part(rows_of(rows(12), part))).backward()
        mine = {name: p.grad for name, p in part.named_parameters() if p.grad is not None}
        for name, parameter in right.named_parameters():
            assert parameter.grad is not None
            if parameter.shape == mine[name].shape:  # what rests in shards is compared elsewhere
                close(mine[name], parameter.grad / parts)
        wanted = torch.cat([p.grad.flatten() for p in right.parameters() if p.grad is not None]).norm() / parts
        close(part.engine.clip_grad_norm_(float("inf")), wanted)

    on_ranks(plan, program, work)


def test_a_part_without_parameters() -> None:
    x = rows(12)
    close(squares(alone(nn.Tanh(), (rows(12).float(),)), x)[1], squares(nn.Tanh(), x)[1])


@pytest.mark.parametrize("plan", ["dp=1", "dp=2,zero=3", "pp=2"])
def test_a_part_in_bfloat16(plan: str) -> None:
    """Its parameters rest in float32, and gradients of inputs come back in their own dtype."""
    eager = made(CASES["mlp"])

    def work(part: Part) -> None:
        x = rows(12).float()
        y, gradient = squares(part, rows_of(x, part))
        right, wanted = squares(copy.deepcopy(eager), x)
        assert gradient.dtype == torch.float32
        assert all(p.dtype == torch.float32 and p.grad is not None for p in part.parameters())
        torch.testing.assert_close(y.float(), rows_of(right, part), rtol=0.05, atol=0.05)
        torch.testing.assert_close(gradient, rows_of(wanted, part), rtol=0.1, atol=0.1)

    on_ranks(plan, compiled(CASES["mlp"], plan, precision="bfloat16"), work, EngineSettings(device="cpu"))


@pytest.mark.long
@pytest.mark.parametrize("plan", ["dp=1", "tp=2", "pp=2"])
def test_frozen_parameters_stay_and_pass_gradients_on(plan: str) -> None:
    module = made(CASES["blocks"]).double()
    for parameter in module.get_submodule("layers.0").parameters():
        parameter.requires_grad_(False)
    program = compile_part(module.float(), CASES["blocks"].sample(12), ranks=PLANS[plan], plan=plan)
    mask, eager = torch.ones(12, LENGTH, dtype=torch.long), module.double()

    def work(part: Part) -> None:
        right = copy.deepcopy(eager)
        both = [squares(lambda x, each=each: each(x, mask=mask), rows(12)) for each in (right, part)]
        for mine, theirs in zip(both[1], both[0], strict=True):
            close(mine, theirs)
        wanted = torch.cat([p.grad.flatten() for p in right.parameters() if p.grad is not None]).norm()
        close(part.engine.clip_grad_norm_(float("inf")), wanted)
        assert all(name.startswith("layers.1") for name, _ in part.named_parameters())

    on_ranks(plan, program, work)


def test_precision_around_a_part_does_not_reach_in() -> None:
    part, module = (
        alone(made(CASES["mlp"]), CASES["mlp"].sample(12), EngineSettings(device="cpu")),
        made(CASES["mlp"]),
    )
    x = rows(12).float()
    right, wanted = squares(module, x)
    with torch.autocast("cpu", torch.bfloat16):
        y, gradient = squares(part, x)
    torch.testing.assert_close(y, right)
    torch.testing.assert_close(gradient, wanted)
    right, wanted = squares(module, x[:5])
    with torch.autocast("cpu", torch.bfloat16):  # nor into a program for another size, which is compiled here
        y, gradient = squares(part, x[:5])
    torch.testing.assert_close(y, right)
    torch.testing.assert_close(gradient, wanted)
    right, wanted = squares(module, x)
    y, gradient = squares(part, x.bfloat16())
    assert (y.dtype, gradient.dtype) == (torch.float32, torch.bfloat16)
    torch.testing.assert_close(gradient.float(), wanted, rtol=0.1, atol=0.1)


def test_the_optimizer_of_the_engine_updates_the_part() -> None:
    case = CASES["mlp"]
    part = Part(PartEngine(compiled(case, "dp=1"), Communicator(0, 1), FLOAT64))
    model, right = Around(part, case), Around(made(case).double(), case)
    groups = {"*.bias": {"weight_decay": 0.0}}
    optimizer = part.engine.optimizer(torch.optim.SGD, groups=groups, lr=0.1, weight_decay=0.1)
    decayed = [[p for n, p in right.part.named_parameters() if n.endswith("bias") is bias] for bias in (False, True)]
    other = torch.optim.SGD([{"params": decayed[0], "weight_decay": 0.1}, {"params": decayed[1]}], lr=0.1)
    for step in range(3):
        for each, updates in ((model, optimizer), (right, other)):
            each.zero_grad()
            each.loss(ids_of(step))[0].backward()
            updates.step()
    for name, parameter in right.part.named_parameters():
        close(part.engine.state_dict()[name], parameter.detach())
    assert part.engine.check_replicas(optimizer) == 0
    assert part.to(torch.float32).engine is part.engine
    assert next(part.parameters()).dtype == torch.float64


# -- what is refused -----------------------------------------------------------------------------------------------


def refused(what: Callable[[], object], code: str, text: str) -> None:
    with pytest.raises(NnscalerError, match=text) as error:
        what()
    assert error.value.code == code


def test_calls_of_another_form_are_refused() -> None:
    two = alone(Two(), CASES["two"].sample(12))
    x, shift = rows(12), torch.zeros(10, dtype=torch.float64)
    for given, text in (
        ({"x": x, "shift": (1.0,)}, r"takes a tensor as `states`\['shift'\]\[0\], and was given float"),
        ({"x": x, "shift": (shift, shift)}, r"compiled for `states`\['shift'\] \[0\], and was given \[0, 1\]"),
        ({"x": x}, r"compiled for `states` \['shift', 'x'\], and was given \['x'\]"),
        (x, r"compiled for `states` = dict, and was given a tensor \[12, 4, 8\]"),
        ({"x": x[0], "shift": (shift,)}, r"compiled for `states`\['x'\] of 3 dims, and was given \[4, 8\]"),
        ({"x": x.long(), "shift": (shift,)}, r"compiled for `states`\['x'\] of torch.float32, and was given torch.int"),
    ):
        refused(lambda given=given: two(given), "inputs_differ", text)  # type: ignore[misc]
    refused(two, "inputs_differ", "part Two takes .*missing a required argument")
    good = {"x": x, "shift": (shift,)}
    refused(lambda: two(good, scale=0.25), "inputs_differ", "compiled for `scale` = 0.5, and was given 0.25")
    assert two(good, 0.5)["y"].shape == x.shape


def test_gradients_that_the_part_does_not_give_are_refused() -> None:
    sample = CASES["two"].sample(12)
    part = alone(Two(), sample, input_gradients=["states_x"])
    x, shift = rows(12).requires_grad_(), torch.zeros(10, dtype=torch.float64, requires_grad=True)
    refused(lambda: part({"x": x, "shift": (shift,)}), "no_input_gradient", r"'states_shift_0' .* gives those of \['st")
    part({"x": x, "shift": (shift.detach(),)})["y"].sum().backward()
    assert x.grad is not None
    wrong = lambda: alone(Blocks(), CASES["blocks"].sample(12), input_gradients=["mask"])  # noqa: E731
    refused(wrong, "inputs_differ", r"names 'mask', and the floating inputs are \['x'\]")
    refused(lambda: alone(nn.Flatten(), (torch.ones(4, 2, dtype=torch.long),)), "no_loss", "returns output, and none")


def test_a_backward_that_comes_too_late_is_refused() -> None:
    part = alone(made(CASES["mlp"]), CASES["mlp"].sample(12))
    loss = part(rows(12)).sum()
    with torch.no_grad():
        next(part.parameters()).add_(1.0)
    refused(loss.backward, "part_changed", "computes it again, .* modified by an inplace operation")
    loss = part(rows(12)).sum()
    loss.backward()
    refused(loss.backward, "part_changed", "backward through the graph a second time")
    x = rows(12).requires_grad_()
    (gradient,) = torch.autograd.grad(part(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_the_module_is_left_as_it_was() -> None:
    module = made(CASES["norm"])
    before = copy.deepcopy(module.state_dict())
    part = alone(module, CASES["norm"].sample(12), EngineSettings(device="cpu"))
    squares(part, rows(12).float())
    assert module.state_dict().keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert {n for n, _ in part.named_parameters()} == {n for n, _ in module.named_parameters()}
