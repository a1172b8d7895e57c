"""The executor beside forward and backward: buffers, precision, dropout, observation, and its errors."""
# ruff: noqa: RUF012 - stages are written here as generated text writes them

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from nnscaler.runtime import (
    Buffer,
    CommunicationError,
    Constant,
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
    dtypes,
    ops,
    recompute,
)
from nnscaler.runtime.communication import differentiable_collectives as comm

Role = Callable[..., ModuleType]
aten = torch.ops.aten


class Normed(Stage):
    """Batch norm and a frozen scale on two tensor-parallel ranks, written in float32."""

    index = 0
    ranks = (0, 1)
    axes = {"tp": 2}
    parameters = {"w": Parameter("bn.weight", (4,), "float32", {"tp": Sharded(0)})}
    frozen = {"scale": Parameter("scale", (4,), "float32", {"tp": Sharded(0)})}
    buffers = {
        "mean": Buffer("bn.mean", (4,), "float32", {"tp": Sharded(0)}),
        "var": Buffer("bn.var", (4,), "float32", {"tp": Sharded(0)}),
    }
    constants = {"half": Constant("half", (), "float32")}
    inputs = {"x": Input("x", {"tp": Sharded(1)})}
    loss = Loss({"tp": Partial()})
    updates = {"new_mean": "mean", "new_var": "var"}

    def forward(self, x):
        mean = ops.batch_mean(x)
        variance = ops.batch_variance(x, mean)
        y = ops.batch_normalise(x, mean, variance, self.w, None, 1e-5)
        new_mean = ops.running_statistic(self.mean, mean, 0.1)
        new_var = ops.running_statistic(self.var, variance[1], 0.1)
        y = y * self.scale * self.half
        loss = aten._to_copy.default(y, dtype=dtypes.float32).pow(3).sum()
        return {"loss": loss, "new_mean": new_mean, "new_var": new_var}


def normed_state() -> dict[str, Tensor]:
    torch.manual_seed(0)
    state = {name: torch.rand(4) + 0.5 for name in ("bn.weight", "bn.mean", "bn.var", "scale")}
    return {**state, "half": torch.tensor(0.5)}


def test_buffers_frozen_parameters_and_precision(run, role: Role) -> None:
    state, batches = normed_state(), [{"x": torch.randn(6, 4)} for _ in range(2)]
    result = run([role("F0.0 B0.0", Normed)], state, *batches, precision="float64")
    w = state["bn.weight"].double().requires_grad_()
    mean, var = state["bn.mean"].double(), state["bn.var"].double()
    for step, batch in enumerate(batches):
        if step:
            w.data.sub_(w.grad, alpha=0.1)
            w.grad = None
        y = F.batch_norm(batch["x"].double(), mean, var, w, None, True, 0.1, 1e-5)
        loss = (y * state["scale"].double() * 0.5).pow(3).sum()
        loss.backward()
        assert result.losses[0][step] == pytest.approx(loss.item(), rel=1e-12)
    torch.testing.assert_close(result.logical("gradient")["bn.weight"], w.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(result.logical("buffer")["bn.mean"], mean, rtol=1e-12, atol=0)
    torch.testing.assert_close(result.logical("buffer")["bn.var"], var, rtol=1e-12, atol=0)
    scale = next(t for _, name, _, t in result.executors[1].local_tensors("parameter") if name == "scale")
    assert scale is not None and torch.equal(scale, state["scale"][2:].double())
    assert result.executors[0].parameters[0, "w"].description.fqn == "bn.weight"


def test_the_program_is_float32_as_written(run, role: Role) -> None:
    result = run([role("F0.0 B0.0", Normed)], normed_state(), {"x": torch.randn(6, 4)})
    assert result.logical("gradient")["bn.weight"].dtype == torch.float32


class Accumulates(Stage):
    index = 0
    ranks = (0, 1)
    axes = {"dp": 2}
    micro_batches = 4
    parameters = {"w": Parameter("w", (3,), "bfloat16", {}, reduce=("dp",))}
    inputs = {"x": Input("x", {"dp": Sharded(0), "micro": Sharded(0, outer=2)})}
    loss = Loss({"dp": Partial(), "micro": Partial()})

    def forward(self, x):
        return {"loss": (self.w * x).sum()}


SCHEDULE = " ".join(f"F0.{m} B0.{m}" for m in range(4))


def test_half_precision_gradients_accumulate_in_float32(run, role: Role) -> None:
    """256 + 7 * 1 is 263, which bfloat16 cannot hold; adding 1 to 256 in bfloat16 seven times leaves 256."""
    x = torch.ones(8, 3, dtype=torch.bfloat16)
    x[0] = 256
    result = run([role(SCHEDULE, Accumulates)], {"w": torch.ones(3)}, {"x": x})
    gradient = result.logical("gradient")["w"]
    assert gradient.dtype == torch.bfloat16 and gradient.tolist() == [264.0] * 3


def test_gradients_of_several_steps_add_up_without_being_summed_twice(role: Role) -> None:
    x = torch.arange(24.0).view(8, 3)

    def work(communicator) -> Tensor:
        executor = RankExecutor(role(SCHEDULE, Accumulates), communicator.rank, communicator, {"w": torch.ones(3)})
        executor.step({"x": x})
        executor.step({"x": x})
        gradient = executor.parameters[0, "w"].grad.clone()
        executor.zero_grad()
        assert executor.parameters[0, "w"].grad is None
        return gradient

    for gradient in Simulator(2).run(work):
        assert torch.equal(gradient, (2 * x.sum(0)).bfloat16())


# -- dropout ----------------------------------------------------------------------------------------------------------


def dropping(axes: dict[str, int], micro: int, recomputed: bool = False) -> type[Stage]:
    count = axes.get("dp", 1) * axes.get("tp", 1)
    batch = {"micro": Sharded(0, outer=axes.get("dp", 1)), **({"dp": Sharded(0)} if "dp" in axes else {})}

    class Dropping(Stage):
        index = 0
        ranks = tuple(range(count))
        parameters = {"w": Parameter("w", (24, 5), "float64")}
        inputs = {"x": Input("x", batch)}
        loss = Loss({"dp": Partial(), "micro": Partial()})

        def forward(self, x):
            def drop(x):
                return ops.dropout(x, 0.25, self, "dropout_1", batch, (24, 5))

            return {"loss": (recompute(drop, x * self.w.sum()) if recomputed else drop(x * self.w.sum())).pow(2).sum()}

    Dropping.axes, Dropping.micro_batches = axes, micro
    return Dropping


def test_dropout_does_not_depend_on_the_mesh(run, role: Role) -> None:
    """One rank, two sharded ranks, replicated ranks, and micro-batches drop the same elements of the same step."""
    data = {"x": torch.randn(24, 5, dtype=torch.float64)}
    state = {"w": torch.ones(24, 5, dtype=torch.float64)}

    def losses(axes: dict[str, int], micro: int, seed: int = 0) -> list[float]:
        schedule = " ".join(f"F0.{m} B0.{m}" for m in range(micro))
        stage = dropping(axes, micro)
        return run([role(schedule, stage)], state, data, seed=seed).losses[0]

    whole = losses({}, 1)
    others = [losses({"dp": 2}, 1), losses({"tp": 3}, 1), losses({"dp": 2, "tp": 2}, 3), losses({}, 4)]
    assert all(other == pytest.approx(whole, rel=1e-12) for other in others)
    assert losses({}, 1, seed=1) != pytest.approx(whole, rel=1e-3)


def test_recomputed_dropout_has_the_mask_of_its_own_micro_batch(run, role: Role) -> None:
    """All forwards come before all backwards, so that the last forward was of another micro-batch."""
    data = {"x": torch.randn(24, 5, dtype=torch.float64)}
    state = {"w": torch.ones(24, 5, dtype=torch.float64)}
    kept, again = (
        run([role("F0.0 F0.1 F0.2 B0.0 B0.1 B0.2", dropping({}, 3, recomputed))], state, data).logical("gradient")["w"]
        for recomputed in (False, True)
    )
    assert torch.equal(kept, again) and kept.abs().sum() > 0


def test_dropout_changes_with_the_step_and_can_be_turned_off(run, role: Role) -> None:
    data = {"x": torch.randn(24, 5, dtype=torch.float64)}
    state = {"w": torch.full((24, 5), 1 / 120, dtype=torch.float64)}
    stage = dropping({}, 1)
    stage.parameters = {}
    stage.frozen = {"w": Parameter("w", (24, 5), "float64")}
    first, second = run([role("F0.0", stage)], state, data, data).losses[0]
    assert first != second
    assert run([role("F0.0", stage)], state, data, dropout=False).losses[0] == pytest.approx(
        [data["x"].square().sum().item()]
    )


# -- observation ------------------------------------------------------------------------------------------------------

OBSERVED = """
import torch
from nnscaler.runtime import Input, Loss, Parameter, Partial, Stage, Sharded, comm, recompute

aten = torch.ops.aten


class Stage0(Stage):
    index = 0
    ranks = (0, 1)
    axes = {"tp": 2}
    parameters = {"w": Parameter("w", (4, 3), "float32", {"tp": Sharded(0)})}
    inputs = {"x": Input("x")}
    prepare_inputs = {"x": Input("x")}
    loss = Loss({"tp": Partial()})

    def prepare(self, x):
        bias = x.sum()
        return {"bias": bias}

    def forward(self, x, bias):
        h = aten.linear.default(x, self.w)

        def block(h):
            inside = aten.tanh.default(h)
            inside = aten.tanh.default(inside)
            return inside

        g = recompute(block, h)
        a, (b, *c) = g.sum(), (g * 2, g)
        with torch.no_grad():
            seen = a + bias
        loss = a + b.sum()
        return {"loss": loss}


STAGES = (Stage0,)
RANKS = (0, 1)
SCHEDULE = "F0.0 B0.0"
"""


def load(path: Path, source: str) -> ModuleType:
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("role_from_file", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_assignment_is_observed_with_its_gradient(tmp_path: Path) -> None:
    module = load(tmp_path / "role_0.py", OBSERVED)
    state, batch = {"w": torch.randn(4, 3)}, {"x": torch.randn(2, 3)}

    def work(communicator, observe: bool) -> tuple[list[tuple[int, int, str, str]], Tensor]:
        seen: list[tuple[int, int, str, str]] = []

        def note(stage: int, micro: int, phase: str, name: str, tensor: Tensor) -> None:
            assert not tensor.requires_grad
            seen.append((stage, micro, phase, name))

        executor = RankExecutor(module, communicator.rank, communicator, state, observe=note if observe else None)
        executor.step(batch)
        return seen, executor.parameters[0, "w"].grad

    (seen, gradient), _ = Simulator(2).run(lambda c: work(c, True))
    (nothing, same), _ = Simulator(2).run(lambda c: work(c, False))
    assert torch.equal(gradient, same) and nothing == []
    names = {phase: [n for _, _, p, n in seen if p == phase] for phase in ("prepare", "forward", "backward")}
    assert names["prepare"] == ["bias"]
    assert names["forward"] == ["x", "h", "inside", "inside", "g", "a", "b", "seen", "loss"]
    assert sorted(names["backward"]) == ["a", "b", "g", "h", "inside", "inside", "loss"]
    assert seen[0][:2] == (0, -1) and seen[1][:2] == (0, 0)


def test_a_failing_line_of_the_program_is_named(tmp_path: Path) -> None:
    source = OBSERVED.replace("h = aten.linear.default(x, self.w)", "h = aten.linear.default(x, self.w.T)")
    line = 1 + source.splitlines().index("        h = aten.linear.default(x, self.w.T)")
    module = load(tmp_path / "role_0.py", source)
    state, batch = {"w": torch.randn(4, 3)}, {"x": torch.randn(2, 3)}
    with pytest.raises(ProgramError, match=rf"rank \d, F0\.0 at .*role_0\.py:{line}: RuntimeError: mat1 and mat2"):
        Simulator(2).run(lambda c: RankExecutor(module, c.rank, c, state).step(batch))


# -- planted faults ---------------------------------------------------------------------------------------------------


class Sender(Stage):
    index = 0
    ranks = (0,)
    parameters = {"w": Parameter("w", (2,), "float32")}
    inputs = {"x": Input("x")}
    sends = (Send("h", 1, (1,)),)

    def forward(self, x):
        return {"h": x * self.w}


class Receiver(Stage):
    index = 1
    ranks = (1,)
    receives = {"h": Receive("h", 0, (2,), "float32", (0,))}
    loss = Loss()

    def forward(self, h):
        return {"loss": h.sum()}


def test_planted_deadlock(run, role: Role) -> None:
    with pytest.raises(CommunicationError, match="deadlock") as caught:
        run([role("F0.0 B0.0", Sender), role("F1.0", Receiver)], {"w": torch.ones(2)}, {"x": torch.ones(2)})
    line = Sender.forward.__code__.co_firstlineno
    assert caught.value.waiting == {0: f"recv float32[2] 1 -> 0 key (h 0 1 0 B) in B0.0 at {__file__}:{line}"}


def test_planted_gradient_that_nobody_wants(run, role: Role) -> None:
    with pytest.raises(CommunicationError, match=r"never received: rank 1: send float32\[2\] 1 -> 0 key \(h 0 1 0 B\)"):
        run([role("F0.0", Sender), role("F1.0 B1.0", Receiver)], {"w": torch.ones(2)}, {"x": torch.ones(2)})


def test_planted_mismatch(run, role: Role) -> None:
    """One rank of the axis gathers where the other reduces: both lines are named."""

    class Left(Stage):
        ranks = (0, 1)
        axes = {"tp": 2}
        inputs = {"x": Input("x")}
        loss = Loss()

        def forward(self, x):
            return {"loss": comm.all_reduce(x, self.tp).sum()}

    class Right(Left):
        def forward(self, x):
            return {"loss": comm.all_gather(x, self.tp, 0).sum()}

    modules = [role("F0.0", Left), role("F0.0", Right)]
    modules[0].RANKS, modules[1].RANKS = (0,), (1,)
    with pytest.raises(CommunicationError, match="different collectives") as caught:
        run(modules, {}, {"x": torch.ones(2)})
    for stage in (Left, Right):
        assert f"in F0.0 at {__file__}:{stage.forward.__code__.co_firstlineno + 1}" in str(caught.value)


STATE = {"w": torch.ones(2)}
BATCH = {"x": torch.ones(2)}


@pytest.mark.parametrize(
    "schedule, state, batch, message",
    [
        ("F0.0 X1", STATE, BATCH, "'X1', which is not an instruction"),
        ("F0.0 F0.1", STATE, BATCH, "has .F0.1., a stage or micro-batch that is not its own"),
        ("F0.0 F0.0", STATE, BATCH, "runs F0.0 twice"),
        ("B0.0 F0.0", STATE, BATCH, "runs B0.0 before its forward"),
        ("", STATE, BATCH, "never runs F0.0"),
        ("F0.0", {}, BATCH, "rank 0, stage 0: 'w' is not in the state"),
        ("F0.0", {"w": torch.ones(3)}, BATCH, r"'w' has shape \(3,\) in the state, \(2,\) in the program"),
        ("F0.0", STATE, {}, "rank 0, F0.0 at .*: the batch has no input 'x'"),
    ],
)
def test_errors(run, role: Role, schedule: str, state: dict, batch: dict, message: str) -> None:
    class Alone(Sender):
        sends = ()

    with pytest.raises(ProgramError, match=message):
        run([role(schedule, Alone)], state, batch)


def test_missing_output(run, role: Role) -> None:
    class Forgets(Sender):
        def forward(self, x):
            return {}

    with pytest.raises(ProgramError, match=r"rank 0, F0\.0 at .*forward does not return \['h'\]"):
        run([role("F0.0", Forgets)], STATE, BATCH)


def test_a_loss_of_several_numbers(run, role: Role) -> None:
    class Many(Sender):
        sends = ()
        loss = Loss({})

        def forward(self, x):
            return {"loss": x * self.w}

    with pytest.raises(
        ProgramError, match=r"rank 0, F0\.0 at .*returns a loss of shape \(2,\), and a loss is one number"
    ):
        run([role("F0.0 B0.0", Many)], STATE, BATCH)
