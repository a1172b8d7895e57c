"""The audit: every side effect and hidden input has its own finding; operators without any pass."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from op_registry.registry import default_registry
from op_registry.samples import samples_of
from op_registry.spec import OperatorSpec

from verify import Verdict
from verify.evidence.inputs.concrete_call import make_call
from verify.evidence.inputs.draw_calls import builtin_call
from verify.operators.audit.side_effects import audit
from verify.operators.audit.watch_effects_on_tensors import Probed
from verify.results.finding import Finding
from verify.results.finding_codes import CODES
from verify.self_test.operators.mutants.right_backwards_and_mistakes import with_backward

Function = Callable[..., Any]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def run(function: Function, *args: Any, seed: int = 0, **options: Any) -> Probed:
    return audit(OperatorSpec("op", "", target=function), make_call("op", args, {}), seed, **options)


def finding(function: Function, *args: Any, **options: Any) -> Finding:
    (check,), findings, _ = run(function, *args, **options)
    assert check.verdict is Verdict.REFUTED and check.refuted == len(findings)
    assert len(findings) == 1, [f.message for f in findings]
    assert findings[0].code in CODES
    assert findings[0].counter_example["shapes"]
    return findings[0]


# inputs


def written(x: Tensor) -> None:
    x.detach().numpy()[0] = 7.0


CHANGES: list[tuple[str, Callable[[Tensor], Any], str]] = [
    ("in place", lambda x: x.add_(1), "became"),
    ("through data", lambda x: x.data.mul_(2), "became"),
    ("one element", lambda x: x.detach()[1:2].zero_(), "of 12 values"),
    ("through numpy", written, "became 7"),
    ("by nothing", lambda x: x.add_(0), "written to in place, with the values that it had"),
    ("its shape", lambda x: x.t_(), "torch.float64 of shape (4, 3) became torch.float64 of (3, 4)"),
]


@pytest.mark.parametrize(("change", "how"), [c[1:] for c in CHANGES], ids=[c[0] for c in CHANGES])
def test_changed_inputs(change: Callable[[Tensor], Any], how: str) -> None:
    def operator(x: Tensor) -> Tensor:
        y = x * 2
        change(x)
        return y

    found = finding(operator, normal(4, 3))
    assert found.code == "input_mutated"
    assert found.message == "`op` changes its input `x`"
    assert how in found.counter_example["change"]
    assert found.help == "clone it first: `x = x.clone()`"


def test_changed_inputs_of_every_kind() -> None:
    def of_a_list(xs: list[Tensor]) -> Tensor:
        xs[1].data.neg_()
        return xs[0] * xs[1]

    assert finding(of_a_list, [normal(3), normal(3, seed=1)], seed=0).message == "`op` changes its input `xs[1]`"

    def of_integers(x: Tensor, ids: Tensor) -> Tensor:
        ids.clamp_(min=1)
        return x[0] * 1.0

    assert finding(of_integers, normal(3), torch.tensor([0, 1, 2])).counter_example["tensor"] == "ids"

    def of_statistics(x: Tensor, mean: Tensor) -> Tensor:
        with torch.no_grad():
            mean.lerp_(x.mean(0), 0.1)
        return x - x.mean(0)

    assert finding(of_statistics, normal(4, 3), normal(3)).message == "`op` changes its input `mean`"

    def what_asks_for_gradients(x: Tensor) -> Tensor:
        y = x * 2
        x.requires_grad_(True)
        return y

    assert finding(what_asks_for_gradients, normal(3)).counter_example["change"] == "requires_grad became True"

    def detaches(x: Tensor) -> Tensor:
        y = x * 2
        x.detach_()
        return y

    assert finding(detaches, normal(3)).code == "input_mutated"


def test_a_whole_that_cannot_run_for_its_mutation() -> None:
    """autograd refuses the backward pass: the mutation is still what is reported."""

    def operator(x: Tensor) -> Tensor:
        y = x.exp()
        x.add_(1)
        y.mul_(y.detach())
        return y

    assert finding(operator, normal(3)).code == "input_mutated"


def test_a_backward_that_changes_its_cotangent() -> None:
    found = finding(with_backward(lambda x: x * 2, lambda g, y, x: (g.mul_(2),)), normal(4, 3))
    assert found.code == "input_mutated"
    assert "changes the cotangent of output 0" in found.message
    assert found.counter_example["pass"] == "backward"
    found = finding(with_backward(lambda x: x * 2, lambda g, y, x: (x.data.copy_(g * 2),)), normal(4, 3))
    assert (found.counter_example["tensor"], found.counter_example["pass"]) == ("input 0", "backward")


def test_shared_memory_is_a_note() -> None:
    def views(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x * 2
        return x.t(), y, y[0]

    (check,), findings, notes = run(views, normal(4, 3))
    assert check.verdict is Verdict.TESTED_EXACT
    assert not findings
    assert notes == (
        "output 0 of `op` shares memory with its input `x`",
        "output 2 of `op` shares memory with output 1",
    )


# randomness


def reseeding(x: Tensor) -> Tensor:
    torch.manual_seed(1)
    return x * 1.0


def restoring(x: Tensor) -> Tensor:
    state = torch.get_rng_state()
    noise = torch.randn_like(x)
    torch.set_rng_state(state)
    return x + noise


def restoring_numpy(x: Tensor) -> Tensor:
    state = np.random.get_state()
    noise = float(np.random.rand())
    np.random.set_state(state)
    return x + noise


RANDOM: list[tuple[str, Function, str]] = [
    ("dropout", lambda x: F.dropout(x, 0.5), "torch's generator"),
    ("tiny noise", lambda x: x + 1e-10 * torch.rand_like(x), "torch's generator"),
    ("unused noise", lambda x: x + 0.0 * torch.rand_like(x), "torch's generator"),
    ("seeds", reseeding, "torch's generator"),
    ("numpy", lambda x: x * np.random.rand(), "`numpy.random`"),
    ("Python", lambda x: x * random.random(), "Python's `random`"),
    ("permutation", lambda x: x[torch.randperm(x.shape[0])], "torch's generator"),
    ("in the backward", with_backward(lambda x: x * 1.0, lambda g, y, x: (g + torch.randn_like(g),)), "torch's"),
    ("restored", restoring, "puts back"),
    ("restored numpy", restoring_numpy, "puts back"),
]


@pytest.mark.parametrize(("function", "source"), [r[1:] for r in RANDOM], ids=[r[0] for r in RANDOM])
@pytest.mark.parametrize("seed", [0, 1, 7])
def test_random_operators(function: Function, source: str, seed: int) -> None:
    found = finding(function, normal(4, 3), seed=seed)
    assert found.code == "random_operator"
    assert source in str(found.cause)


def counting() -> Function:
    calls = [0]

    def operator(x: Tensor) -> Tensor:
        calls[0] += 1
        return x * calls[0]

    return operator


def private() -> Function:
    generator = torch.Generator().manual_seed(3)
    return lambda x: x + torch.randn(x.shape, generator=generator, dtype=x.dtype)


def accumulating() -> Function:
    calls = [0.0]

    def backward(g: Tensor, y: Tensor, x: Tensor) -> tuple[Tensor]:
        calls[0] += 1.0
        return (g * calls[0],)

    return with_backward(lambda x: x * 2, backward)


UNREPEATABLE: list[tuple[str, Callable[[], Function]]] = [
    ("counter", counting),
    ("generator of its own", private),
    ("counter in the backward", accumulating),
    ("time", lambda: lambda x: x + (time.perf_counter_ns() % 1000003)),
    ("fresh numpy generator", lambda: lambda x: x + float(np.random.default_rng().normal())),
    ("gradients on", lambda: lambda x: x * (2.0 if torch.is_grad_enabled() else 3.0)),
    ("gradients asked for", lambda: lambda x: x * (2.0 if x.requires_grad else 3.0)),
]


@pytest.mark.parametrize("make", [u[1] for u in UNREPEATABLE], ids=[u[0] for u in UNREPEATABLE])
def test_what_does_not_repeat(make: Callable[[], Function]) -> None:
    found = finding(make(), normal(4, 3))
    assert found.code == "not_repeatable"
    assert found.cause is not None


def test_raising_in_the_second_run() -> None:
    calls = [0]

    def operator(x: Tensor) -> Tensor:
        calls[0] += 1
        if calls[0] == 3:
            raise ValueError("enough")
        return x * 2

    assert finding(operator, normal(4)).counter_example["error"] == "ValueError: enough"


def test_generators_are_left_as_they_were() -> None:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index, union-attr]
    run(lambda x: F.dropout(x) * np.random.rand() * random.random(), normal(3))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]  # type: ignore[index, union-attr]
    assert torch.get_default_dtype() == torch.float32


# dtypes


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sum() + x * torch.ones(3),
        lambda x: torch.linspace(0, 1, 3) * x.mean(),
        lambda x: (x > 0).sum(0) / x.shape[0],
        lambda x: (x, torch.eye(2)),
    ],
)
def test_dtypes_that_follow_the_default(function: Function) -> None:
    found = finding(function, normal(4, 3))
    assert found.code == "output_dtype_wrong"
    assert "follows torch's default dtype" in found.message
    assert found.counter_example["found"] == "torch.float32, torch.float64 under default float64"


def test_float64_from_float32() -> None:
    found = finding(lambda x: x.double().sum(), normal(4, 3))
    assert found.message == "output 0 of `op` is torch.float64 on float32 inputs"


def test_dtypes_without_floating_inputs_are_free() -> None:
    (check,), _, _ = run(lambda ids: ids / 2, torch.arange(4))
    assert check.verdict is Verdict.TESTED_EXACT


# memory


def as_if_contiguous(x: Tensor) -> Tensor:
    if x.is_contiguous():
        return x
    return torch.as_strided(x, (x.numel(),), (1,), x.storage_offset()).view(x.shape)


def test_strides() -> None:
    found = finding(lambda x: as_if_contiguous(x) * 2, normal(4, 3))
    assert found.code == "strides_matter"
    assert found.counter_example["tensor"] == "output 0"
    assert "strides" in found.counter_example
    backward = with_backward(lambda x: x * 2, lambda g, y, x: (as_if_contiguous(g) * 2,))
    assert finding(backward, normal(4, 3)).counter_example["tensor"] == "the gradient of `input 0`"
    assert finding(lambda ids: as_if_contiguous(ids) + 1, torch.arange(12).view(3, 4)).code == "strides_matter"
    (check,), findings, _ = run(lambda x: as_if_contiguous(x) * 2, normal(4, 3), strides=False)
    assert check.verdict is Verdict.TESTED_EXACT
    assert not findings


def test_refusing_strides_is_a_note() -> None:
    (check,), findings, notes = run(lambda x: x.view(-1) * 2, normal(4, 3))
    assert check.verdict is Verdict.TESTED_EXACT
    assert not findings
    assert "raises on non-contiguous tensors: RuntimeError: view size" in notes[0]
    flat = with_backward(lambda x: x * 2, lambda g, y, x: (g.view(12).view(4, 3) * 2,))
    (check,), findings, notes = run(flat, normal(4, 3))
    assert check.verdict is Verdict.TESTED_EXACT
    assert not findings
    assert "raises in its backward on non-contiguous tensors: RuntimeError: view size" in notes[0]


# right ones


def test_undefined_values_are_not_compared() -> None:
    filled = [0.0]

    def empty(x: Tensor) -> Tensor:
        filled[0] += 1
        return torch.full_like(x, filled[0])

    assert run(empty, normal(4)).findings[0].code == "not_repeatable"
    assert not run(empty, normal(4), compare=False).findings


RIGHT: list[tuple[Function, tuple[Any, ...]]] = [
    (lambda x, w, b: F.linear(x, w, b).relu(), (normal(4, 3), normal(5, 3), normal(5))),
    (lambda x: x.softmax(-1), (normal(4, 3),)),
    (lambda x, mask: x.masked_fill(mask, -torch.inf).softmax(-1), (normal(3, 3), torch.eye(3) > 1)),
    (lambda x: x.clone().add_(1), (normal(4),)),
    (torch.cat, ([normal(3), normal(2)],)),
    (lambda x, bias=None: x if bias is None else x + bias, (normal(4), None)),
    (lambda x: (x.max(0).values, x.argmax(0), 3), (normal(4, 3),)),
    (lambda x: torch.fft.fft(x).abs(), (normal(4, 8),)),
    (F.embedding, (torch.tensor([0, 2, 2]), normal(3, 4))),
    (lambda x: x.sum(), (normal(0, 3),)),
    (lambda x: x.log(), (normal(4, 3),)),  # NaN where it is NaN
    (lambda x: x.exp(), (torch.tensor(1.5),)),
    (lambda x, n: torch.zeros(n, dtype=x.dtype) + x.sum(), (normal(3), 4)),
    (with_backward(lambda x, w: x * w, lambda g, y, x, w: (g * w, None)), (normal(4), normal(4))),
]


@pytest.mark.parametrize(("function", "args"), RIGHT)
def test_right_operators(function: Function, args: tuple[Any, ...]) -> None:
    for seed in range(20):
        (check,), findings, _ = run(function, *args, seed=seed)
        assert not findings
        assert check.verdict is Verdict.TESTED_EXACT
        assert check.count >= 3
        assert check.supporting


@pytest.mark.long
def test_built_in_operators() -> None:
    """None has a side effect or a hidden input; those that say that they are random are left out."""
    audited = 0
    for name in default_registry().names():
        spec = default_registry().lookup(name)
        if spec is None or spec.target is not None or spec.random:
            continue
        for sample in samples_of(name)[:2]:
            inverts = "det" in name or name.endswith(("inv.default", "lu_factor.default", "solve.default"))
            kind = "normal" if inverts else "integers"  # which often make singular matrices
            call = builtin_call(sample, kind, torch.Generator().manual_seed(audited))
            (check,), findings, _ = audit(spec, call, audited)
            assert not findings, name
            audited += check.verdict is Verdict.TESTED_EXACT
            assert check.verdict is Verdict.TESTED_EXACT, (name, check.detail)
    assert audited > 300


def test_what_raises_is_open() -> None:
    def raises(x: Tensor) -> Tensor:
        raise ValueError("no")

    (check,), findings, _ = run(raises, normal(3))
    assert not findings
    assert check.verdict is Verdict.INCONCLUSIVE
    assert check.detail == "it raises ValueError: no"


def test_needing_gradients_is_a_note() -> None:
    def force(x: Tensor) -> Tensor:
        y = x.sin().sum()
        return torch.autograd.grad(y, x, create_graph=True)[0]

    (check,), findings, notes = run(force, normal(3))
    assert not findings
    assert check.verdict is Verdict.TESTED_EXACT
    assert "raises when no gradients are recorded" in notes[0]
