"""Copies of modules: functions read the copy, memory is shared as in the module, and what no copy has is refused."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nnscaler
import verify
from nnscaler.errors import NnscalerError
from nnscaler.tracing import trace
from nnscaler.tracing.export.independent_module_copies import copied

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))


class Model(nn.Module):
    """`form` gives it a function that reads the module, or memory that two tensors share."""

    out: Any
    held: list[Any]
    c: nn.Parameter

    def __init__(self, form: Callable[[Model], Any] = lambda _: None) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.register_buffer("rows", torch.ones(2, 6))
        form(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(self.a(x)) @ self.rows.t()
        return (self.out(x) if hasattr(self, "out") else x).square().mean()


def scale(module: nn.Module, x: Tensor) -> Tensor:
    return x * module.a.weight.detach().mean()


def set_lambda(m: Model) -> None:
    m.out = lambda x: x * m.a.weight.detach().mean()


def set_default(m: Model) -> None:
    m.out = lambda x, layer=m.a: x * layer.weight.detach().mean()


def set_partial_in_list(m: Model) -> None:
    inner = [partial(scale, m)]
    m.out = lambda x: inner[0](x) * 1


def set_recursive(m: Model) -> None:
    def out(x: Tensor, times: int = 2) -> Tensor:
        return out(scale(m, x), times - 1) if times else x

    m.out = out


def set_hook(m: Model) -> None:
    m.b.register_forward_hook(lambda module, inputs, result: result + F.linear(inputs[0], m.a.weight.detach()))


def set_method(m: Model) -> None:
    m.out = MethodType(lambda self, x: scale(self, x) + scale(m, x), m)


def set_weak(m: Model) -> None:
    m.held = [weakref.ref(m)]
    m.out = lambda x: x * m.held[0]().a.weight.detach().mean()


def set_forward(m: Model) -> None:
    old = m.forward
    m.forward = lambda x: old(x) * 2  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "form", [set_lambda, set_default, set_partial_in_list, set_recursive, set_hook, set_method, set_weak, set_forward]
)
def test_functions_of_a_copy_read_the_copy(form: Callable[[Model], Any]) -> None:
    model = Model(form)
    before, copy = model(X), copied(model)
    assert torch.equal(copy(X), before)
    with torch.no_grad():
        copy.a.weight.mul_(2)
    assert torch.equal(model(X), before)
    after = copy(X)
    model.a.weight = copy.a.weight
    assert torch.equal(after, model(X))


def test_functions_that_read_no_module_stay() -> None:
    model = Model()
    model.out = lambda x: x * X.mean()
    assert copied(model).out is model.out


@pytest.mark.parametrize("form", [set_lambda, lambda m: setattr(m, "out", lambda x: x * m.a.weight.mean())])
def test_a_function_that_holds_the_module_is_verified(form: Callable[[Model], Any]) -> None:
    report = verify.verify_plan(Model(form), (X,), ranks=2, plan="tp=2", depth="quick")
    assert report.exit_code == 0, report.to_json()


def test_what_python_cannot_copy_is_shared() -> None:
    model = Model()
    model.held = [threading.Lock(), Path(__file__).open(), iter(range(3))]  # noqa: SIM115
    copy: Any = copied(model)
    assert copy.held is not model.held and copy.held[0] is model.held[0]
    report = verify.verify_plan(model, (X,), ranks=2, plan="tp=2", depth="quick")
    assert report.exit_code == 0, report.to_json()
    model.held[1].close()


class Holder:
    """Cannot be copied, and holds a part: the copy would read the module's."""

    def __init__(self, part: nn.Module) -> None:
        self.lock, self.parts = threading.Lock(), {"part": part}


def test_an_object_that_holds_parts_is_not_shared() -> None:
    model = Model(lambda m: setattr(m, "held", [Holder(m.a)]))
    with pytest.raises(NnscalerError, match="`held` of the module holds tensors, and cannot be copied: TypeError"):
        verify.verify_plan(model, (X,), ranks=2, plan="tp=2")


def flat(m: Model) -> None:
    """As torch lays the weights of an LSTM on a GPU, and columns of one matrix."""
    memory = torch.randn(6, 12)
    m.a.weight, m.b.weight = nn.Parameter(memory[:, :6]), nn.Parameter(memory[:, 6:])


def in_list(m: Model) -> None:
    m.held = [m.a.weight.data]
    m.out = lambda x: x * m.held[0].mean()


def frozen(m: Model) -> None:
    m.a.weight, m.b.weight = (nn.Parameter(m.rows.repeat(3, 1), False) for _ in range(2))
    m.b.weight.data = m.a.weight.data
    m.c = nn.Parameter(torch.ones(()))
    m.out = lambda x: x * m.c


SHARED: list[tuple[str, Callable[[Model], Any], str]] = [
    ("a parameter of a parameter", lambda m: setattr(m.b, "weight", nn.Parameter(m.a.weight)), "`a.weight` and `b.w"),
    (
        "data of a parameter",
        lambda m: setattr(m.b.weight, "data", m.a.weight.data),
        "`a.weight` and `b.weight` are two",
    ),
    ("a buffer", lambda m: setattr(m, "rows", m.a.weight.data[:2]), "`a.weight` and `rows` are two tensors"),
    ("a frozen one", lambda m: setattr(m.b, "weight", nn.Parameter(m.a.weight.detach().t(), False)), "are two tensors"),
    ("an attribute", in_list, "of the parameter `a.weight` by another"),
]
APART: list[tuple[str, Callable[[Model], Any]]] = [
    ("one tensor", lambda m: setattr(m.b, "weight", m.a.weight)),
    ("pieces", flat),
    ("frozen both", frozen),
    ("what forward replaces", lambda m: torch.nn.utils.spectral_norm(m.a)),
]


@pytest.mark.parametrize(("form", "message"), [row[1:] for row in SHARED], ids=[row[0] for row in SHARED])
def test_memory_that_two_tensors_share_is_refused(form: Callable[[Model], Any], message: str) -> None:
    """In eager, what the optimizer does to one changes the other."""
    torch.manual_seed(0)
    for run in (lambda m: trace(m, (X,)), lambda m: verify.verify_plan(m, (X,), ranks=2, plan="dp=2")):
        with pytest.raises(NnscalerError, match=message):
            run(Model(form))


@pytest.mark.parametrize("form", [row[1] for row in APART], ids=[row[0] for row in APART])
def test_memory_that_an_update_does_not_share_is_verified(form: Callable[[Model], Any]) -> None:
    torch.manual_seed(0)
    report = verify.verify_plan(Model(form), (X,), ranks=2, plan="dp=2", level="run")
    assert report.verdict.passes, report.findings


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_that_no_copy_has(register: str) -> None:
    with pytest.raises(NnscalerError, match=r"the parameter a\.weight has a hook on its gradient"):
        verify.verify_plan(
            Model(lambda m: getattr(m.a.weight, register)(lambda g: None)), (X,), ranks=2, plan="dp=2", level="run"
        )


class Turns(nn.Module):
    """Reads a conjugated buffer, and a part of it that lies in the same memory and is negated."""

    def __init__(self) -> None:
        super().__init__()
        turns = torch.randn(6, dtype=torch.complex64, generator=torch.Generator().manual_seed(2)).conj()
        self.register_buffer("turns", turns)
        self.part = turns.imag
        self.a = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return (self.a(x * self.turns.real + self.part) * self.turns.imag).square().mean()


def test_conjugated_and_negated_memory_is_copied_as_such() -> None:
    model = Turns()
    assert model.turns.is_conj() and model.part.is_neg()
    copy: Any = copied(model)
    assert torch.equal(copy.turns, model.turns) and torch.equal(copy.part, model.part)
    assert copy.turns.untyped_storage().data_ptr() == copy.part.untyped_storage().data_ptr()
    program = nnscaler.parallelize(model, {"x": X}, ranks=1, plan="dp=1")
    assert float(nnscaler.start(program).step({"x": X})) == pytest.approx(float(model(X).detach()), rel=1e-6)
