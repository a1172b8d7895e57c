"""torch's four tests of a registration, as checks and findings of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from op_registry.spec import OperatorSpec

from verify import Verdict
from verify.evidence.inputs.concrete_call import make_call
from verify.operators.audit.torch_library_opcheck import TESTS, library_overload, opcheck, shortened
from verify.operators.audit.watch_effects_on_tensors import Probed


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(_ctx: Any, g: Tensor) -> Tensor:
        return g * 2


@pytest.fixture(scope="module")
def library() -> Iterator[torch.library.Library]:
    with torch.library._scoped_library("test_opcheck", "FRAGMENT") as found:
        yield found


def custom(name: str, kernel: Callable[[Tensor], Tensor], fake: bool = True, backward: Any = None) -> Any:
    operator = torch.library.custom_op(f"test_opcheck_of::{name}", kernel, mutates_args=())
    if fake:
        operator.register_fake(torch.empty_like)
    operator.register_autograd(backward or (lambda ctx, g: g * 2))
    return operator


def double(x: Tensor) -> Tensor:
    return x * 2


def run(target: Any, *args: Any) -> Probed:
    name = str(getattr(target, "_opoverload", target))
    return opcheck(OperatorSpec(name, "", target=target), make_call(name, args or (torch.randn(4, 3).double(),), {}))


def refuted(probed: Probed) -> dict[str, str]:
    assert [c.name for c in probed.checks if c.verdict is Verdict.REFUTED] == [
        f.counter_example["test"] for f in probed.findings
    ]
    assert all(f.code == "opcheck_failed" and f.help for f in probed.findings)
    return {f.counter_example["test"]: f.message for f in probed.findings}


@pytest.mark.long
def test_a_right_registration() -> None:
    operator = custom("right", double)
    for target in (operator, operator._opoverload, torch.ops.test_opcheck_of.right):
        probed = run(target)
        assert [c.name for c in probed.checks] == list(TESTS)
        assert [c.verdict for c in probed.checks] == [Verdict.TESTED_EXACT] * 4
        assert all(c.count == 1 and c.supporting for c in probed.checks)
        assert not probed.findings


def test_without_gradients_one_test_says_nothing() -> None:
    @torch.library.custom_op("test_opcheck_of::next_id", mutates_args=())
    def next_id(ids: Tensor) -> Tensor:
        return ids + 1

    next_id.register_fake(torch.empty_like)
    probed = run(next_id, torch.arange(4))
    assert [c.name for c in probed.checks] == [t for t in TESTS if t != "test_autograd_registration"]
    assert "test_autograd_registration" in probed.notes[0]
    assert not probed.findings


def test_a_schema_that_hides_a_mutation() -> None:
    def mutates(x: Tensor) -> Tensor:
        x.add_(1)
        return x * 2

    messages = refuted(run(custom("mutates", mutates)))
    assert "Argument x is not defined as mutable but was mutated" in messages["test_schema"]


def test_no_fake_kernel() -> None:
    messages = refuted(run(custom("no_fake", double, fake=False)))
    assert set(messages) == {"test_faketensor", "test_aot_dispatch_dynamic"}
    assert "There was no fake impl registered" in messages["test_faketensor"]


def test_a_wrong_fake_kernel() -> None:
    operator = custom("wrong_fake", double, fake=False)
    operator.register_fake(lambda x: torch.empty_like(x).t())
    assert "mismatched tensor metadata" in refuted(run(operator))["test_faketensor"]


def test_a_backward_that_cannot_be_traced() -> None:
    operator = custom("numpy_backward", double, backward=lambda ctx, g: torch.from_numpy(g.numpy() * 2))
    assert set(refuted(run(operator))) == {"test_aot_dispatch_dynamic"}


def test_a_backward_at_the_wrong_key(library: torch.library.Library) -> None:
    library.define("misplaced(Tensor x) -> Tensor")
    library.impl("misplaced", lambda x: Doubled.apply(x), "CPU")  # noqa: PLW0108 - a function of the key's own
    library.impl("misplaced", lambda x: torch.empty_like(x), "Meta")  # noqa: PLW0108
    messages = refuted(run(torch.ops.test_opcheck.misplaced))
    assert "does not have an autograd kernel" in messages["test_autograd_registration"]


def test_other_operators_are_left_out() -> None:
    for target in (double, Doubled.apply, torch.ops.aten.sin.default, torch.ops.prims.sin, None):
        assert library_overload(OperatorSpec("op", "", target=target)) is None
    assert run(torch.ops.aten.sin.default) == Probed()


def test_whatever_torch_raises_is_a_finding() -> None:
    def broken(*args: Any, **kwargs: Any) -> dict[str, Any]:
        raise RuntimeError("opcheck itself failed. And more")

    operator = custom("broken", double)
    spec = OperatorSpec("broken", "", target=operator)
    probed = opcheck(spec, make_call("broken", (torch.randn(3),), {}), check=broken)
    assert [c.verdict for c in probed.checks] == [Verdict.REFUTED] * 4
    assert probed.findings[0].message == "`broken` fails torch's `test_schema`: opcheck itself failed"


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("One. Two", "One"),
        (
            "opcheck(op, ...): test_schema failed with Argument x was mutated (scroll up for stack trace)",
            "Argument x was mutated",
        ),
        ("f (with implementation in <module 'm' from 'm.py'>): The output is an input. More", "The output is an input"),
        ("a key (e.g. DispatchKey::Autograd). More", "a key (e.g. DispatchKey::Autograd)"),
        ("a\n  b", "a b"),
        ("", "it gives no reason"),
    ],
)
def test_messages_are_shortened(text: str, short: str) -> None:
    assert shortened(text) == short
