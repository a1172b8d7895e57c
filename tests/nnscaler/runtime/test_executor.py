"""Hand-written roles against the model on one device, in float64: losses and gradients of two steps, to 1e-12."""
# ruff: noqa: RUF012 - stages are written here as generated text writes them

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from nnscaler.runtime import Exchange, Input, Loss, Parameter, Partial, Receive, Send, Sharded, Stage, ops, recompute
from nnscaler.runtime.communication import differentiable_collectives as comm

Role = Callable[..., ModuleType]
aten = torch.ops.aten


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def train(loss_of: Callable[..., Tensor], state: Mapping[str, Tensor], *batches: Mapping[str, Tensor]) -> tuple:
    """Losses of each step and the last gradients of eager training with SGD of 0.1."""
    leaves = {name: value.clone().requires_grad_() for name, value in state.items()}
    losses = []
    for step, batch in enumerate(batches):
        if step:
            for leaf in leaves.values():
                leaf.data.sub_(leaf.grad, alpha=0.1)
                leaf.grad = None
        loss = loss_of(leaves, batch)
        loss.backward()
        losses.append(loss.item())
    return losses, {name: leaf.grad for name, leaf in leaves.items()}


def check(result, losses: list[float], gradients: Mapping[str, Tensor], ranks_with_loss: set[int]) -> None:
    for rank, seen in enumerate(result.losses):
        if rank in ranks_with_loss:
            assert seen == pytest.approx(losses, rel=1e-12)
        else:
            assert seen == [None] * len(losses)
    found = result.logical("gradient")
    assert set(found) == set(gradients)
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-12)


# -- data and tensor parallel, with the number of labels counted before the first micro-batch -------------------------


class Megatron(Stage):
    index = 0
    ranks = (0, 1, 2, 3)
    axes = {"dp": 2, "tp": 2}
    micro_batches = 3
    parameters = {
        "w1": Parameter("up.weight", (8, 6), "float64", {"tp": Sharded(0)}, reduce=("dp",)),
        "b1": Parameter("up.bias", (8,), "float64", {"tp": Sharded(0)}, reduce=("dp",)),
        "w2": Parameter("down.weight", (5, 8), "float64", {"tp": Sharded(1)}, reduce=("dp",)),
        "b2": Parameter("down.bias", (5,), "float64", {}, reduce=("dp",)),
    }
    inputs = {
        "x": Input("x", {"dp": Sharded(0), "micro": Sharded(0, outer=2)}),
        "labels": Input("labels", {"dp": Sharded(0), "micro": Sharded(0, outer=2)}),
    }
    prepare_inputs = {"labels": Input("labels", {"dp": Sharded(0)})}
    loss = Loss({"dp": Partial(), "micro": Partial()})

    def prepare(self, labels):
        k = ops.ce_count(labels, -100)
        k = comm.all_reduce(k, self.dp)
        return {"count": k}

    def forward(self, x, labels, count):
        def block(x):
            x = comm.replicate(x, self.tp)
            h = aten.gelu.default(aten.linear.default(x, self.w1, self.b1))
            y = comm.all_reduce(aten.linear.default(h, self.w2), self.tp)
            return aten.tanh.default(aten.add.Tensor(y, self.b2))

        y = recompute(block, x)
        m = ops.ce_max(y)
        s = ops.ce_sumexp(y, m)
        t = ops.ce_pick(y, labels, -100)
        loss = ops.ce_tail(s, m, t, labels, -100)
        return {"loss": aten.div.Tensor(loss, count)}


def megatron_loss(p: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    h = F.gelu(F.linear(batch["x"], p["up.weight"], p["up.bias"]))
    return F.cross_entropy(torch.tanh(F.linear(h, p["down.weight"], p["down.bias"])), batch["labels"])


def megatron_data() -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    torch.manual_seed(0)
    state = {p.fqn: randn(*p.shape) for p in Megatron.parameters.values()}
    batches = []
    for _ in range(2):
        labels = torch.randint(0, 5, (12,))
        labels[:4] = -100  # the first rank has fewer labels than the second
        batches.append({"x": randn(12, 6), "labels": labels})
    return state, batches


def test_data_and_tensor_parallel(run, role: Role) -> None:
    state, batches = megatron_data()
    result = run([role("F0.0 B0.0 F0.1 B0.1 F0.2 B0.2", Megatron)], state, *batches)
    check(result, *train(megatron_loss, state, *batches), {0, 1, 2, 3})


def test_prepare_is_at_the_first_micro_batch_in_every_step(run, role: Role) -> None:
    """`prepare` computes the same in every step: it knows nothing of the micro-batch that ran last."""
    places: list[int] = []

    class Noting(Megatron):
        def prepare(self, labels):
            places.append(self.micro.index)
            return super().prepare(labels)

    state, batches = megatron_data()
    run([role("F0.0 B0.0 F0.1 B0.1 F0.2 B0.2", Noting)], state, *batches)
    assert places == [0] * (4 * len(batches))


# -- a pipeline with a tied weight: embedding in stage 0, classifier in stage 1, data parallel in each ----------------

COPIES = ((0, 1), (2, 3))


class First(Stage):
    index = 0
    ranks = (0, 1)
    axes = {"dp": 2}
    micro_batches = 4
    parameters = {
        "wte": Parameter("wte", (7, 6), "float64", {}, reduce=("dp",), copies=COPIES),
        "w": Parameter("w", (6, 6), "float64", {}, reduce=("dp",)),
    }
    inputs = {"ids": Input("ids", {"dp": Sharded(0), "micro": Sharded(0, outer=2)})}
    sends = (Send("h", 1, peers=(2, 3)),)

    def forward(self, ids):
        x = aten.embedding.default(self.wte, ids)
        h = aten.tanh.default(aten.linear.default(x, self.w))
        return {"h": h}


class Last(Stage):
    index = 1
    ranks = (2, 3)
    axes = {"dp": 2}
    micro_batches = 4
    parameters = {"head": Parameter("wte", (7, 6), "float64", {}, reduce=("dp",), copies=COPIES)}
    receives = {"h": Receive("h", 0, (2, 6), "float64", peers=(0, 1))}
    loss = Loss({"dp": Partial(), "micro": Partial()})

    def forward(self, h):
        y = aten.linear.default(h, self.head)
        return {"loss": aten.pow.Tensor_Scalar(y, 2).sum()}


def tied_loss(p: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    h = torch.tanh(F.embedding(batch["ids"], p["wte"]) @ p["w"].T)
    return ((h @ p["wte"].T) ** 2).sum()


def tied_data() -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    torch.manual_seed(1)
    batches = [{"ids": torch.randint(0, 7, (16,))} for _ in range(2)]
    return {"wte": randn(7, 6) * 0.3, "w": randn(6, 6)}, batches


def test_pipeline_with_a_tied_weight(run, role: Role) -> None:
    state, batches = tied_data()
    roles = [
        role("F0.0 F0.1 B0.0 F0.2 B0.1 F0.3 B0.2 B0.3", First),
        role("F1.0 B1.0 F1.1 B1.1 F1.2 B1.2 F1.3 B1.3", Last),
    ]
    result = run(roles, state, *batches)
    check(result, *train(tied_loss, state, *batches), {2, 3})


def test_two_stages_on_one_rank_share_a_tied_weight(run, role: Role) -> None:
    state, batches = tied_data()
    copies = ((0, 1), (0, 1))
    wte = Parameter("wte", (7, 6), "float64", {}, reduce=("dp",), copies=copies)

    class Here(First):
        parameters = {**First.parameters, "wte": wte}
        sends = (Send("h", 1, peers=(0, 1)),)

    class There(Last):
        ranks = (0, 1)
        parameters = {"head": wte}

    schedule = " ".join(f"F0.{m} F1.{m} B1.{m} B0.{m}" for m in range(4))
    result = run([role(schedule, Here, There)], state, *batches)
    check(result, *train(tied_loss, state, *batches), {0, 1})
    parameters = result.executors[0].parameters
    assert parameters[0, "wte"] is parameters[1, "head"]


def test_a_tied_weight_at_other_positions_of_the_same_ranks(run, role: Role) -> None:
    """The second stage runs on the same ranks in another order: two local copies of one group, one sum."""
    state, batches = tied_data()
    wte = Parameter("wte", (7, 6), "float64", {}, reduce=("dp",), copies=((0, 1), (1, 0)))

    class Here(First):
        parameters = {**First.parameters, "wte": wte}
        sends = (Send("h", 1, peers=(1, 0)),)

    class There(Last):
        ranks = (1, 0)
        parameters = {"head": wte}
        receives = {"h": Receive("h", 0, (2, 6), "float64", peers=(0, 1))}

    schedule = " ".join(f"F0.{m} F1.{m} B1.{m} B0.{m}" for m in range(4))
    losses, gradients = train(tied_loss, state, *batches)
    check(run([role(schedule, Here, There)], state, *batches), losses, gradients, {0, 1})


# -- meshes of 2 and 3 ranks ------------------------------------------------------------------------------------------


def rows(*bounds: tuple[int, int]) -> tuple[tuple[int, int, int], ...]:
    return tuple((a, b, 1) for a, b in bounds)


def crossing(width: int) -> tuple[tuple, tuple]:
    """Messages from 2 ranks with 3 rows each to 3 ranks with 2 rows each, and back."""
    forward = []
    for row_from, row_to, source, target in [(0, 0, 0, 2), (2, 0, 0, 3), (0, 1, 1, 3), (1, 0, 1, 4)]:
        count = 1 if target == 3 else 2
        here, there = rows((row_from, row_from + count), (0, width)), rows((row_to, row_to + count), (0, width))
        forward.append((source, target, here, there))
    return tuple(forward), tuple((t, s, there, here) for s, t, here, there in forward)


class Two(Stage):
    index = 0
    ranks = (0, 1)
    axes = {"dp": 2}
    micro_batches = 2
    parameters = {"w": Parameter("w", (4, 5), "float64", {}, reduce=("dp",))}
    inputs = {"x": Input("x", {"dp": Sharded(0, outer=2), "micro": Sharded(0)})}
    sends = (Exchange("h", 1, *crossing(4), (3, 4), "float64"),)

    def forward(self, x):
        h = aten.sin.default(aten.linear.default(x, self.w))
        return {"h": h}


class Three(Stage):
    index = 1
    ranks = (2, 3, 4)
    axes = {"dp": 3}
    micro_batches = 2
    parameters = {"v": Parameter("v", (3, 4), "float64", {}, reduce=("dp",))}
    receives = {"h": Exchange("h", 0, *crossing(4), (2, 4), "float64")}
    loss = Loss({"dp": Partial(), "micro": Partial()})

    def forward(self, h):
        y = aten.linear.default(h, self.v)
        return {"loss": aten.exp.default(y).sum()}


def test_meshes_of_two_and_three_ranks(run, role: Role) -> None:
    torch.manual_seed(2)
    state = {"w": randn(4, 5), "v": randn(3, 4)}
    batches = [{"x": randn(12, 5)} for _ in range(2)]
    result = run([role("F0.0 F0.1 B0.0 B0.1", Two), role("F1.0 B1.0 F1.1 B1.1", Three)], state, *batches)
    expected = train(lambda p, b: torch.exp(torch.sin(b["x"] @ p["w"].T) @ p["v"].T).sum(), state, *batches)
    check(result, *expected, {2, 3, 4})


# -- a tensor that two later stages read, one of them not using it on this path ----------------------------------------


class Head(Stage):
    index = 0
    ranks = (0,)
    micro_batches = 2
    parameters = {"a": Parameter("a", (3, 3), "float64")}
    inputs = {"x": Input("x", {"micro": Sharded(0)})}
    sends = (Send("h", 1, (1,)), Send("h", 2, (2,)), Send("mask", 2, (2,), needs_grad=False))

    def forward(self, x):
        h = aten.linear.default(x, self.a)
        return {"h": h, "mask": aten.gt.Scalar(x, 0)}


class Middle(Stage):
    index = 1
    ranks = (1,)
    micro_batches = 2
    parameters = {"b": Parameter("b", (3, 3), "float64"), "idle": Parameter("idle", (2,), "float64", used=False)}
    receives = {"h": Receive("h", 0, (2, 3), "float64", (0,))}
    sends = (Send("g", 2, (2,)), Send("unread", 2, (2,)))

    def forward(self, h):
        g = aten.tanh.default(aten.linear.default(h, self.b))
        return {"g": g, "unread": g * 2}


class Tail(Stage):
    index = 2
    ranks = (2,)
    micro_batches = 2
    receives = {
        "h": Receive("h", 0, (2, 3), "float64", (0,)),
        "mask": Receive("mask", 0, (2, 3), "bool", (0,), needs_grad=False),
        "g": Receive("g", 1, (2, 3), "float64", (1,)),
        "unread": Receive("unread", 1, (2, 3), "float64", (1,)),
    }
    loss = Loss({"micro": Partial()})

    def forward(self, h, mask, g, unread):
        return {"loss": (aten.where.self(mask, h, g) * g).sum()}


def test_skip_connection_over_a_stage(run, role: Role) -> None:
    torch.manual_seed(3)
    state = {"a": randn(3, 3), "b": randn(3, 3), "idle": randn(2)}
    batches = [{"x": randn(4, 3)} for _ in range(2)]

    def loss(p: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
        h = batch["x"] @ p["a"].T
        g = torch.tanh(h @ p["b"].T)
        return (torch.where(batch["x"] > 0, h, g) * g).sum()

    roles = [
        role("F0.0 F0.1 B0.0 B0.1", Head),
        role("F1.0 F1.1 B1.0 B1.1", Middle),
        role("F2.0 B2.0 F2.1 B2.1", Tail),
    ]
    result = run(roles, state, *batches)
    losses, gradients = train(loss, {k: v for k, v in state.items() if k != "idle"}, *batches)
    found = result.logical("gradient")
    assert found.pop("idle") is None
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-12)
    assert result.losses[2] == pytest.approx(losses, rel=1e-12) and result.losses[0] == [None, None]
