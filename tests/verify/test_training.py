"""Training features of the runtime, on compiled programs: clipping, loss scale, forward only, checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nnscaler
from nnscaler.codegen.compiled_program import Program
from nnscaler.runtime import ExecutorSettings, ProgramError, RankExecutor, Simulator
from nnscaler.runtime.program.program_directory import ProgramDirectory, read_program
from nnscaler.runtime.training.saving import checkpoint
from nnscaler.runtime.training.saving.checkpoint import load_checkpoint, save_checkpoint
from nnscaler.runtime.training.saving.rank_tensors_as_boxes import StoredTensor, leads
from nnscaler.tracing.float64_run import exact
from tests.sampling import every

Batch = Mapping[str, Tensor]
PLANS = [("dp=3", 1), ("tp=3", 1), ("dp=2,tp=3,pp=2", 2), ("tp=2,pp=2", 3)]  # the embedding is tied to the head


def ranks_of(plan: str) -> int:
    count = 1
    for part in plan.split(","):
        count *= int(part.partition("=")[2])
    return count


@pytest.fixture(scope="module", params=PLANS, ids=[plan for plan, _ in PLANS])
def saved(
    request: pytest.FixtureRequest, tiny: Callable[[], nn.Module], batch: Batch, tmp_path_factory: Any
) -> ProgramDirectory:
    plan, micro_batches = request.param
    compiled: Program = nnscaler.parallelize(
        tiny(), batch, ranks=ranks_of(plan), plan=plan, micro_batches=micro_batches
    )
    return read_program(compiled.save(tmp_path_factory.mktemp("program")))


def on_ranks(program: ProgramDirectory, work: Callable[[RankExecutor], Any], **options: Any) -> list[Any]:
    """work(executor) on every rank, without dropout, in float64."""
    state, observe = options.pop("state", program.state()), options.pop("observe", None)

    def run(communicator: Any) -> Any:
        rank = communicator.rank
        settings = ExecutorSettings(**{"precision": "float64", "dropout": False, **options})
        return work(RankExecutor(program.role(rank), rank, communicator, state, settings, observe=observe))

    return Simulator(program.ranks).run(run)


def eager(tiny: Callable[[], nn.Module], batch: Batch) -> nn.Module:
    """The model after a backward pass in float64."""
    model = tiny()
    with exact(model):
        model(**batch).backward()
    return model


@pytest.mark.parametrize("norm_type", every(2, [2.0, 1.0, 3.0, inf]))
@pytest.mark.parametrize("share", [0.5, 2.0])
def test_the_norm_is_that_of_the_whole_model(
    saved: ProgramDirectory, tiny: Callable[[], nn.Module], batch: Batch, norm_type: float, share: float
) -> None:
    model = eager(tiny, batch)
    trained = [p for p in model.parameters() if p.grad is not None]
    limit = share * float(torch.nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None], norm_type))
    expected = torch.nn.utils.clip_grad_norm_(trained, limit, norm_type)

    def work(executor: RankExecutor) -> Any:
        executor.step(batch)
        before = [p.grad.clone() for p in executor.parameters.values() if p.grad is not None]
        norm = executor.clip_grad_norm(limit, norm_type)
        after = [p.grad for p in executor.parameters.values() if p.grad is not None]
        return norm, [float(a.norm() / b.norm()) for a, b in zip(after, before, strict=True) if float(b.norm()) > 0]

    results = on_ranks(saved, work)
    assert all(factors for _, factors in results)
    for norm, factors in results:
        assert norm.dtype == torch.float64 and torch.equal(norm, results[0][0])
        torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
        assert factors == pytest.approx([min(1.0, share)] * len(factors), rel=1e-5)


def test_a_norm_that_does_not_exist(saved: ProgramDirectory, batch: Batch) -> None:
    with pytest.raises(ProgramError, match="norm of type -1"):
        on_ranks(saved, lambda executor: executor.clip_grad_norm(1.0, -1.0))


@pytest.mark.parametrize("scale", every(2, [1024.0, 2.0**-10, 3.0]))
def test_the_loss_scale_is_taken_out(saved: ProgramDirectory, batch: Batch, scale: float) -> None:
    def work(executor: RankExecutor) -> list[Tensor | None]:
        loss = executor.step(batch)
        return [None if loss is None else loss.clone(), *(p.grad for p in executor.parameters.values())]

    plain, scaled = on_ranks(saved, work), on_ranks(saved, work, loss_scale=scale)
    for one, other in zip(plain, scaled, strict=True):
        for a, b in zip(one, other, strict=True):
            if a is None or b is None:
                assert a is b
            elif scale == 3.0:
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-15)
            else:
                assert torch.equal(a, b)


def test_a_scaled_loss_starts_backward_from_the_scale(saved: ProgramDirectory, batch: Batch) -> None:
    """The gradients inside of backward are larger: what float16 needs."""
    seen: dict[float, dict[str, Tensor]] = {1.0: {}, 64.0: {}}
    for scale, tensors in seen.items():

        def note(stage: int, micro: int, phase: str, name: str, value: Tensor, into: Any = tensors) -> None:
            if phase == "backward":
                into[f"{stage} {micro} {name}"] = value

        on_ranks(saved, lambda executor: executor.step(batch), loss_scale=scale, observe=note)
    assert seen[1.0]
    assert any(float(t.abs().max()) > 0 for t in seen[1.0].values())
    assert sum(float(t.abs().max()) for t in seen[64.0].values()) > 32 * sum(
        float(t.abs().max()) for t in seen[1.0].values()
    )


def test_a_scale_that_the_dtype_lacks(saved: ProgramDirectory, batch: Batch) -> None:
    """It is infinite there, as torch's is, and no gradient is a number: the scaler skips the step and halves it."""

    def work(executor: RankExecutor) -> list[bool]:
        executor.step(batch)
        gradients = [p.grad for p in executor.parameters.values() if p.grad is not None]
        return [bool(gradient.isfinite().all()) for gradient in gradients if gradient.numel()]

    found = on_ranks(saved, work, loss_scale=1e300, precision="float32")
    assert any(found) and not any(map(all, filter(None, found)))


def test_forward_only_is_the_loss_and_changes_nothing(saved: ProgramDirectory, batch: Batch) -> None:
    def work(executor: RankExecutor) -> Any:
        without = executor.forward_only(batch)
        assert all(p.grad is None for p in executor.parameters.values()) and executor.context.step == 0
        return without, executor.step(batch)

    results = on_ranks(saved, work)
    assert any(loss is not None for _, loss in results)
    for without, loss in results:
        assert (without is None) == (loss is None) and (loss is None or torch.equal(without, loss))


def descend(executor: RankExecutor, batch: Batch) -> None:
    executor.zero_grad()
    executor.step(batch)
    with torch.no_grad():
        for parameter in {id(p): p for p in executor.parameters.values()}.values():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.1)


@pytest.mark.long
def test_a_checkpoint_goes_on_under_another_plan(
    saved: ProgramDirectory, tiny: Callable[[], nn.Module], batch: Batch, tmp_path: Path
) -> None:
    """With dropout, whose draws depend on the number of the step."""

    def train(executor: RankExecutor) -> None:
        descend(executor, batch)
        save_checkpoint(executor, tmp_path / "middle")
        descend(executor, batch)
        save_checkpoint(executor, tmp_path / "end")

    on_ranks(saved, train, dropout=True, seed=3)
    middle, end = load_checkpoint(tmp_path / "middle"), load_checkpoint(tmp_path / "end")
    assert (middle.step, end.step) == (1, 2)
    assert {"words.weight", "unused", "frozen", "scale", "layers.1.up.weight"} <= set(middle.state)
    compiled = nnscaler.parallelize(tiny(), batch, ranks=6, plan="dp=3,pp=2", micro_batches=2)
    other = read_program(compiled.save(tmp_path / "other"))

    def go_on(executor: RankExecutor) -> None:
        descend(executor, batch)
        save_checkpoint(executor, tmp_path / "resumed")

    state = {**other.state(), **middle.state}
    on_ranks(other, go_on, dropout=True, seed=3, state=state, first_step=middle.step)
    resumed = load_checkpoint(tmp_path / "resumed")
    assert resumed.step == 2 and set(resumed.state) == set(end.state)
    for name, tensor in end.state.items():
        torch.testing.assert_close(resumed.state[name], tensor, rtol=1e-11, atol=1e-13)
    assert not torch.equal(middle.state["words.weight"], end.state["words.weight"])


def test_checkpoints_that_are_not_whole(
    saved: ProgramDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "saved"
    on_ranks(saved, lambda executor: save_checkpoint(executor, folder))
    before = load_checkpoint(folder)
    stored = checkpoint.stored_tensors
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "stored_tensors", lambda *a: [replace(s, first=leads(s)) for s in stored(*a)])
        if any(s.first and not leads(s) for found in on_ranks(saved, stored_of) for s in found):
            with pytest.raises(ProgramError, match=r"were written by no rank|rank 0 failed"):
                on_ranks(saved, lambda executor: save_checkpoint(executor, folder))
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]  # nothing half-written, and the old one as it was
    after = load_checkpoint(folder)
    assert all(torch.equal(before.state[name], tensor) for name, tensor in after.state.items())
    folder.rename(tmp_path / "saved.old")  # killed while it was being replaced
    assert set(load_checkpoint(folder).state) == set(before.state)
    (tmp_path / "saved.old" / ".metadata").unlink()
    with pytest.raises(ProgramError, match="no checkpoint"):
        load_checkpoint(folder)


def stored_of(executor: RankExecutor) -> list[StoredTensor]:
    return checkpoint.stored_tensors(list(executor.stages.values()), executor.tied)


def test_a_checkpoint_is_a_state_dict_of_the_model(
    saved: ProgramDirectory, tiny: Callable[[], nn.Module], tmp_path: Path
) -> None:
    """The head's weight is the embedding's: the program holds it under one of its names."""
    on_ranks(saved, lambda executor: save_checkpoint(executor, tmp_path / "saved"), tied=saved.manifest.tied)
    state = load_checkpoint(tmp_path / "saved").state
    model = tiny()
    model.load_state_dict(state)
    assert set(state) == set(model.state_dict())
    assert state["head.weight"] is state["words.weight"]


def test_optimizer_steps_are_counted_and_not_batches(saved: ProgramDirectory, batch: Batch) -> None:
    """Two batches of one step draw different numbers, and so does a step that is made again."""

    def work(executor: RankExecutor) -> Any:
        losses = [executor.step(batch, last=False), executor.step(batch)]
        counted = [(executor.context.step, executor.context.passes)]
        executor.skip()
        losses.append(executor.step(batch))
        return losses, [*counted, (executor.context.step, executor.context.passes)]

    results = on_ranks(saved, work, dropout=True, seed=3)
    assert all(counted == [(1, 2), (1, 3)] for _, counted in results)
    for losses, _ in results:
        assert losses[0] is None or len({float(loss) for loss in losses}) == 3
    (again,) = {str(on_ranks(saved, lambda e: e.step(batch), dropout=True, seed=3, first_step=1, first_pass=2))}
    assert again == str([losses[2] for losses, _ in results])
