"""Hand-written roles whose backwards run in two halves, against the model on one device."""
# ruff: noqa: RUF012 - stages are written here as generated text writes them

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from nnscaler.instructions import Instruction
from nnscaler.runtime import (
    ExecutorSettings,
    Input,
    Loss,
    Parameter,
    Partial,
    ProgramError,
    RankExecutor,
    Receive,
    Send,
    Sharded,
    Simulator,
    Stage,
)
from nnscaler.runtime.communication import differentiable_collectives as comm
from nnscaler.runtime.training.backward import BackwardPasses
from nnscaler.runtime.training.messages import Mail

Role = Callable[..., ModuleType]
aten = torch.ops.aten


def stages(dtype: str, copies: tuple[tuple[int, ...], ...] = ((0, 1), (2, 3))) -> tuple[type[Stage], type[Stage]]:
    """Two stages of two ranks each, with a tied weight that the second one uses twice along one path."""

    class First(Stage):
        index = 0
        ranks = copies[0]
        axes = {"dp": 2}
        micro_batches = 3
        parameters = {"w": Parameter("w", (6, 6), dtype, {}, reduce=("dp",), copies=copies)}
        inputs = {"x": Input("x", {"dp": Sharded(0), "micro": Sharded(0, outer=2)})}
        sends = (Send("h", 1, peers=copies[1]),)

        def forward(self, x):
            h = aten.tanh.default(aten.linear.default(x, self.w))
            return {"h": h}

    class Last(Stage):
        index = 1
        ranks = copies[1]
        axes = {"dp": 2}
        micro_batches = 3
        parameters = {
            "w": Parameter("w", (6, 6), dtype, {}, reduce=("dp",), copies=copies),
            "b": Parameter("b", (6,), dtype, {}, reduce=("dp",)),
        }
        receives = {"h": Receive("h", 0, (2, 6), dtype, peers=copies[0])}
        loss = Loss({"dp": Partial(), "micro": Partial()})

        def forward(self, h):
            y = aten.linear.default(aten.sin.default(aten.linear.default(h, self.w)), self.w, self.b)
            return {"loss": aten.pow.Tensor_Scalar(y, 2).sum()}

    return First, Last


def data(dtype: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    torch.manual_seed(1)
    kind = getattr(torch, dtype)
    state = {"w": torch.randn(6, 6).to(kind), "b": torch.randn(6).to(kind)}
    return state, {"x": torch.randn(12, 6).to(kind)}


def eager(state: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    p = {name: value.clone().requires_grad_() for name, value in state.items()}
    y = torch.sin(torch.tanh(batch["x"] @ p["w"].T) @ p["w"].T) @ p["w"].T + p["b"]
    y.square().sum().backward()
    return {name: leaf.grad for name, leaf in p.items()}


WHOLE = ("F0.0 F0.1 B0.0 F0.2 B0.1 B0.2", "F1.0 B1.0 F1.1 B1.1 F1.2 B1.2")
ORDERS = [
    ("F0.0 F0.1 I0.0 W0.0 F0.2 I0.1 W0.1 I0.2 W0.2", "F1.0 I1.0 W1.0 F1.1 I1.1 W1.1 F1.2 I1.2 W1.2"),
    ("F0.0 F0.1 I0.0 F0.2 I0.1 I0.2 W0.2 W0.0 W0.1", "F1.0 I1.0 F1.1 I1.1 F1.2 I1.2 W1.1 W1.2 W1.0"),
    ("F0.0 F0.1 B0.0 F0.2 I0.1 B0.2 W0.1", "F1.0 I1.0 F1.1 B1.1 W1.0 F1.2 B1.2"),
    ("F0.0 F0.1 F0.2 B0.0 B0.1 B0.2", "F1.0 I1.0 F1.1 I1.1 W1.1 F1.2 I1.2 W1.2 W1.0"),
]


@pytest.mark.parametrize("orders", ORDERS)
def test_halves_of_two_stages(run: Any, role: Role, orders: tuple[str, str]) -> None:
    state, batch = data("float64")
    roles = [role(order, stage) for order, stage in zip(orders, stages("float64"), strict=True)]
    found = run(roles, state, batch, batch).logical("gradient")
    model = eager(state, batch)
    once = {n: p - 0.1 * g for (n, p), g in zip(state.items(), model.values(), strict=True) if g is not None}
    for name, gradient in eager(once, batch).items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("orders", ORDERS)
def test_gradients_of_half_precision_are_added_up_in_float32(
    run: Any, role: Role, orders: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that I computes too: after each instruction none is left where the next one would add to it."""
    state, batch = data("bfloat16")
    right, seen = BackwardPasses.run, []

    def watched(self: BackwardPasses, stage: Stage, instruction: Instruction, scale: float) -> None:
        right(self, stage, instruction, scale)
        assert all(leaf.grad is None for leaf in self._gradients._wanted)
        seen.append(instruction.kind)

    found = []
    monkeypatch.setattr(BackwardPasses, "run", watched)
    for order in (WHOLE, orders):
        roles = [role(text, stage) for text, stage in zip(order, stages("bfloat16"), strict=True)]
        found.append(run(roles, state, batch).logical("gradient"))
    assert {"B", "I", "W"} <= set(seen)
    for name, gradient in found[0].items():
        assert (found[1][name] - gradient).abs().max() <= 2**-8 * gradient.abs().max()


@pytest.mark.parametrize("orders", [WHOLE, ORDERS[1]])
def test_a_sent_value_is_gone_before_its_backward(
    run: Any, role: Role, orders: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Backward needs where it enters the graph, and not the value, which no operator of this stage saves."""

    class First(stages("float64")[0]):  # type: ignore[misc]
        def forward(self, x):
            return {"h": aten.linear.default(aten.tanh.default(x), self.w)}

    sent: dict[tuple[int, int], weakref.ref[Tensor]] = {}
    lived: list[bool] = []
    send, back = Mail.send_value, BackwardPasses.run

    def sending(self: Mail, stage: Stage, message: Send, value: Tensor, micro: int) -> None:
        sent[stage.rank, micro] = weakref.ref(value)
        send(self, stage, message, value, micro)

    def running(self: BackwardPasses, stage: Stage, instruction: Instruction, scale: float) -> None:
        if stage.index == 0:
            lived.append(sent[stage.rank, instruction.micro]() is not None)
        back(self, stage, instruction, scale)

    monkeypatch.setattr(Mail, "send_value", sending)
    monkeypatch.setattr(BackwardPasses, "run", running)
    state, batch = data("float64")
    roles = [role(order, stage) for order, stage in zip(orders, (First, stages("float64")[1]), strict=True)]
    run(roles, state, batch)
    assert len(lived) >= 6
    assert not any(lived)


def test_two_stages_of_one_rank_share_a_tied_weight(run: Any, role: Role) -> None:
    state, batch = data("float64")
    here = stages("float64", ((0, 1), (0, 1)))
    order = "F0.0 F1.0 I1.0 F0.1 F1.1 I1.1 W1.1 I0.0 I0.1 F0.2 F1.2 B1.2 B0.2 W0.1 W1.0 W0.0"
    found = run([role(order, *here)], state, batch)
    for name, gradient in eager(state, batch).items():
        torch.testing.assert_close(found.logical("gradient")[name], gradient, rtol=1e-12, atol=1e-12)
    parameters = found.executors[0].parameters
    assert parameters[0, "w"] is parameters[1, "w"]


def broken(at: str) -> tuple[type[Stage], type[Stage]]:
    """Stages of which the second one's backward fails: that of an activation, or that of a parameter."""

    def fail(_: Tensor) -> None:
        raise ValueError(f"not {at}")

    def failing(x: Tensor) -> Tensor:
        found = x.view_as(x)
        found.register_hook(fail)
        return found

    first, last = stages("float64")

    class Last(last):  # type: ignore[misc, valid-type]
        def forward(self, h):
            y = aten.linear.default(failing(h) if at == "I" else h, self.w if at == "I" else failing(self.w), self.b)
            return {"loss": aten.pow.Tensor_Scalar(y, 2).sum()}

    return first, Last


@pytest.mark.parametrize("at", ["I", "W"])
def test_errors_name_the_half(run: Any, role: Role, at: str) -> None:
    state, batch = data("float64")
    roles = [role(order, stage) for order, stage in zip(ORDERS[1], broken(at), strict=True)]
    wrong = "I1.0" if at == "I" else "W1.1"
    with pytest.raises(ProgramError, match=rf"rank [23], {wrong} at .*: ValueError: not {at}"):
        run(roles, state, batch)


@pytest.mark.parametrize(
    ("order", "said"),
    [
        ("F1.0 I1.0 F1.1 B1.1 F1.2 B1.2", "runs I1.0 and never W1.0"),
        ("F1.0 W1.0 F1.1 B1.1 F1.2 B1.2", "runs W1.0 and never I1.0"),
        ("F1.0 W1.0 I1.0 F1.1 B1.1 F1.2 B1.2", "runs W1.0 before I1.0"),
        ("F1.0 I1.0 B1.0 W1.0 F1.1 B1.1 F1.2 B1.2", "runs B1.0 and I1.0: the same gradients twice"),
        ("F1.0 I1.0 W1.0 W1.0 F1.1 B1.1 F1.2 B1.2", "runs W1.0 twice"),
        ("F1.0 I1.0 W1.0 W0.0 F1.1 B1.1 F1.2 B1.2", "'W0.0', a stage or micro-batch that is not its own"),
    ],
)
def test_an_order_that_is_none_is_not_begun(run: Any, role: Role, order: str, said: str) -> None:
    state, batch = data("float64")
    first, last = stages("float64")
    with pytest.raises(ProgramError) as caught:
        run([role(WHOLE[0], first), role(order, last)], state, batch)
    assert said in str(caught.value)


def test_collectives_are_of_the_half_that_they_belong_to(role: Role) -> None:
    """One of an activation in I, one of a parameter in W, each once, and gradients travel before W."""

    class First(stages("float64")[0]):  # type: ignore[misc]
        parameters = {"w": Parameter("v", (6, 6), "float64", {}, reduce=("dp",))}

    class Last(Stage):
        index = 1
        ranks = (2, 3)
        axes = {"dp": 2}
        micro_batches = 3
        parameters = {"w": Parameter("w", (6, 6), "float64", {"dp": Sharded(0)}), "b": Parameter("b", (6,), "float64")}
        receives = {"h": Receive("h", 0, (2, 6), "float64", peers=(0, 1))}
        loss = Loss({"dp": Partial(), "micro": Partial()})

        def forward(self, h):
            w = comm.all_gather_replicated(self.w, self.dp, dim=0)
            h = comm.all_gather_replicated(h, self.dp, dim=0)
            y = aten.linear.default(h, w, comm.replicate(self.b, self.dp))
            return {"loss": aten.pow.Tensor_Scalar(y, 2).sum()}

    state, batch = data("float64")
    state["v"] = state["w"]
    roles = [role(ORDERS[1][0], First), role(ORDERS[1][1], Last)]
    made: dict[int, list[tuple[str, str]]] = {}

    def work(communicator: Any) -> None:
        calls: list[tuple[str, str]] = []
        communicator.listener = lambda call: calls.append((call.kind, call.context))
        module = next(r for r in roles if communicator.rank in r.RANKS)
        executor = RankExecutor(module, communicator.rank, communicator, state, ExecutorSettings())
        executor.step(batch)
        made[communicator.rank] = calls

    Simulator(4).run(work)
    for rank in (2, 3):
        backward = [call for call in made[rank] if call[1][:1] in "IW" and call[1][1:2] == "1"]
        # I gathers w again, and W finds it there
        wanted = [(kind, f"I1.{m}") for m in range(3) for kind in ("all_gather", "reduce_scatter", "send")]
        wanted += [(kind, f"W1.{m}") for m in (1, 2, 0) for kind in ("all_reduce", "reduce_scatter")]
        assert sorted(backward) == sorted(wanted)
        assert [c for c in backward if c[1][0] == "I"] == wanted[:9]
