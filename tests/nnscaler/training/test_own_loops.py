"""Loops of the user's around `engine.step`: as with the eager model, or refused."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm
from torch.optim.swa_utils import SWALR, AveragedModel

import nnscaler
from nnscaler.errors import NnscalerError
from nnscaler.runtime.communication.communicator import Communicator, ProgramError
from nnscaler.runtime.communication.simulator import Simulator
from nnscaler.tracing import trace
from nnscaler.training.engine import Engine
from nnscaler.training.model_part.compile_submodule_as_program import compile_part
from nnscaler.training.model_part.engine import PartEngine
from nnscaler.training.model_part.module import Part
from nnscaler.training.program_on_rank import EngineSettings
from nnscaler.transform.plan import AssignStep, Plan

FLOAT64 = EngineSettings(dtype="float64", device="cpu")
CUT = [("dp=2,zero=1", 2), ("dp=2,zero=3", 2), ("tp=2", 2), ("pp=2", 2), ("dp=2,zero=1,owned=1", 2)]
WHOLE = [("dp=1", 1), ("dp=2", 2)]
Parameters = dict[str, nn.Parameter]
Loop = Callable[[Parameters, torch.optim.Optimizer, int, Engine | None], None]
Make = Callable[[Any], torch.optim.Optimizer]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(6, 10), nn.Linear(10, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(torch.tanh(self.up(x))), y)


def model() -> Model:
    torch.manual_seed(0)
    return Model()


def batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(12, 6, generator=generator, dtype=torch.float64)
    return {"x": x, "y": torch.randint(0, 3, (12,), generator=generator)}


def rows(whole: dict[str, Tensor], engine: Engine) -> dict[str, Tensor]:
    part = engine.data_part
    return {name: tensor.tensor_split(part.count)[part.index] for name, tensor in whole.items()}


def on_ranks(module: Model, plan: str, ranks: int, work: Callable[[Engine], Any]) -> list[Any]:
    program = nnscaler.parallelize(module, batch(0) | {"x": batch(0)["x"].float()}, ranks=ranks, plan=plan)
    return Simulator(ranks).run(lambda communicator: work(Engine(program, communicator, FLOAT64)))


def adamw(trained: Any) -> torch.optim.Optimizer:
    if isinstance(trained, Engine):
        return trained.optimizer(torch.optim.AdamW, {"*.bias": {"lr": 0.1, "weight_decay": 0.0}}, lr=0.05)
    named = dict(trained.named_parameters())
    biases = {"params": [p for n, p in named.items() if n.endswith("bias")], "lr": 0.1, "weight_decay": 0.0}
    return torch.optim.AdamW([biases, {"params": [p for n, p in named.items() if n.endswith("weight")]}], lr=0.05)


def trained(engine: Engine, between: Loop, make: Make = adamw) -> dict[str, Tensor]:
    optimizer = make(engine)
    for step in range(4):
        engine.step(rows(batch(step), engine))
        between(engine.parameters, optimizer, step, engine)
        optimizer.step()
        optimizer.zero_grad()
    return engine.state_dict()


def eager(between: Loop, make: Make = adamw) -> dict[str, Tensor]:
    module = model().double()
    optimizer = make(module)
    for step in range(4):
        module(**batch(step)).backward()
        between(dict(module.named_parameters()), optimizer, step, None)
        optimizer.step()
        optimizer.zero_grad()
    return module.state_dict()


def check(plan: str, ranks: int, between: Loop, make: Make = adamw) -> None:
    expected = eager(between, make)
    for found in on_ranks(model(), plan, ranks, lambda engine: trained(engine, between, make)):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


def gradients(parameters: Parameters) -> list[Tensor]:
    return [p.grad for p in parameters.values() if p.grad is not None]


def clip(parameters: Parameters, *_: Any) -> None:
    clip_grad_norm_(parameters.values(), 0.1)


def clip_generator(parameters: Parameters, *_: Any) -> None:
    clip_grad_norm_((p for p in parameters.values()), 0.1, norm_type=float("inf"))


def clip_in_two(parameters: Parameters, *_: Any) -> None:
    clip_grads_with_norm_(parameters.values(), 0.1, get_total_norm(gradients(parameters)))


def clip_by_engine_norm(parameters: Parameters, _o: Any, _s: int, engine: Engine | None) -> None:
    norm = get_total_norm(gradients(parameters)) if engine is None else engine.clip_grad_norm_(float("inf"))
    clip_grads_with_norm_(parameters.values(), 0.1, norm)


def clip_elements(parameters: Parameters, *_: Any) -> None:
    clip_grad_value_(parameters.values(), 0.01)


def freeze_some(parameters: Parameters, _o: Any, step: int, _e: Any) -> None:
    """Freeze two after the first step, of which one has a gradient that stays, and let one train again."""
    frozen = {0: ("up.weight", "head.bias"), 1: ("head.bias",)}.get(step, ())
    for name, parameter in parameters.items():
        parameter.requires_grad_(name not in frozen)


def change_state(_p: Any, optimizer: torch.optim.Optimizer, step: int, _e: Any) -> None:
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0]["lr"] *= 1.5
    optimizer.load_state_dict(state)


def average_rates(_p: Any, optimizer: torch.optim.Optimizer, step: int, _e: Any) -> None:
    SWALR(optimizer, 0.01 * (step + 1), anneal_epochs=2).step()


@pytest.mark.parametrize(("plan", "ranks"), WHOLE)
@pytest.mark.parametrize("between", [clip, clip_generator, clip_in_two])
def test_torchs_norm_is_right_where_each_rank_has_all(plan: str, ranks: int, between: Loop) -> None:
    check(plan, ranks, between)


@pytest.mark.parametrize(("plan", "ranks"), CUT)
@pytest.mark.parametrize("between", [clip, clip_generator, clip_in_two])
def test_torchs_norm_of_shards_is_refused(plan: str, ranks: int, between: Loop) -> None:
    with pytest.raises(NnscalerError, match="what this rank holds") as caught:
        on_ranks(model(), plan, ranks, lambda engine: trained(engine, between))
    assert caught.value.code == "torch_sees_shards" and "engine.clip_grad_norm_" in (caught.value.help or "")


@pytest.mark.parametrize(("plan", "ranks"), CUT)
@pytest.mark.parametrize("between", [clip_by_engine_norm, clip_elements, freeze_some, change_state, average_rates])
def test_what_a_loop_may_do_is_as_with_the_eager_model(plan: str, ranks: int, between: Loop) -> None:
    check(plan, ranks, between)


def test_the_gradients_of_another_rank_are_left_alone() -> None:
    """torch has no lock around `.grad`: to read it while its rank lets go of it may end the process."""
    both = threading.Barrier(2)

    class Mine(dict[str, Any]):
        def __init__(self, held: dict[str, Any]) -> None:
            super().__init__(held)
            self.owner = threading.current_thread()

        def __getitem__(self, name: str) -> Any:
            assert threading.current_thread() is self.owner
            return super().__getitem__(name)

    def work(engine: Engine) -> None:
        engine.step(rows(batch(0), engine))
        (stage,) = engine.executor.stages.values()
        stage.at_rest = Mine(stage.at_rest)
        both.wait(60)
        clip_grad_norm_(engine.parameters.values(), 0.1)
        both.wait(60)
        stage.at_rest = dict(stage.at_rest.items())

    on_ranks(model(), "dp=2", 2, work)


def test_an_empty_generator_is_told_as_torch_does() -> None:
    on_ranks(model(), "dp=1", 1, lambda engine: None)
    with pytest.warns(UserWarning, match="empty generator"):
        clip_grad_norm_((p for p in ()), 1.0)


@pytest.mark.parametrize("plan", ["dp=2", "tp=2"])
def test_rows_that_several_data_parts_are_given_are_told(plan: str) -> None:
    def work(engine: Engine, same: bool) -> None:
        for step in range(4):
            whole = {name: tensor[:1] for name, tensor in batch(step).items()} if step == 1 else batch(step)
            engine.step(whole if same else rows(whole, engine))
            engine.zero_grad()

    def told(same: bool) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            on_ranks(model(), plan, 2, lambda engine: work(engine, same))
        return [str(warning.message) for warning in caught if "same rows" in str(warning.message)]

    assert not told(same=False)
    assert len(told(same=True)) == (2 if plan == "dp=2" else 0)  # of the first two steps


def raw(cls: Any) -> Make:
    def make(trained: Any) -> torch.optim.Optimizer:
        given = trained.parameters.values() if isinstance(trained, Engine) else trained.parameters()
        made: torch.optim.Optimizer = cls(list(given), lr=0.05)
        return made

    return make


def in_two_groups(trained: Any) -> torch.optim.Optimizer:
    found = dict(trained.parameters if isinstance(trained, Engine) else trained.named_parameters())
    optimizer = torch.optim.Adafactor([p for n, p in found.items() if n.endswith("bias")], lr=0.05)
    optimizer.add_param_group({"params": [p for n, p in found.items() if n.endswith("weight")]})
    return optimizer


def nothing(*_: Any) -> None:
    """Do nothing."""


@pytest.mark.parametrize("make", [raw(torch.optim.Adafactor), in_two_groups])
def test_an_optimizer_made_by_hand_is_checked_too(make: Make) -> None:
    check("dp=2", 2, nothing, make)
    with pytest.raises(NnscalerError) as caught:
        on_ranks(model(), "dp=2,zero=1", 2, lambda engine: trained(engine, nothing, make))
    assert caught.value.code == "update_needs_whole"
    check("dp=2,zero=1", 2, nothing, raw(torch.optim.AdamW))


@pytest.mark.parametrize(
    "use",
    [
        lambda module: torch.optim.AdamW(module.parameters()).step(),
        lambda module: clip_grad_norm_(module.parameters(), 1.0),
        lambda module: AveragedModel(module).update_parameters(module),
    ],
)
def test_what_is_done_to_the_modules_own_parameters_is_refused(use: Callable[[Model], Any]) -> None:
    module = model()

    def work(engine: Engine) -> None:
        engine.step(rows(batch(0), engine))
        with pytest.raises(NnscalerError) as caught:
            use(module)
        assert caught.value.code == "not_trained"
        use(model())  # of another model
        module.load_state_dict(engine.state_dict())
        AveragedModel(module).update_parameters(module)
        for parameter in module.parameters():  # the user trains it himself
            parameter.grad = torch.zeros_like(parameter)
        torch.optim.AdamW(module.parameters()).step()

    on_ranks(module, "dp=1", 1, work)


def test_parameters_of_the_module_beside_those_of_the_engine_are_refused() -> None:
    module, own = model(), nn.Linear(2, 2)
    module.head.requires_grad_(False)

    def work(engine: Engine) -> None:
        optimizer = engine.optimizer(torch.optim.SGD, lr=0.1)
        optimizer.add_param_group({"params": list(own.named_parameters())})  # of something else in the loop
        engine.step(rows(batch(0), engine))
        optimizer.step()
        optimizer.add_param_group({"params": list(module.head.named_parameters())})  # unfrozen
        with pytest.raises(NnscalerError, match=r"SGD\.step is given `head.weight` of the module that was compiled"):
            optimizer.step()

    on_ranks(module, "dp=2", 2, work)


def test_a_scaler_that_sees_shards_is_refused() -> None:
    def work(engine: Engine) -> None:
        optimizer, scaler = adamw(engine), torch.amp.GradScaler("cpu")
        scaler.scale(engine.step(rows(batch(0), engine)))
        scaler.unscale_(optimizer)

    on_ranks(model(), "dp=2", 2, work)
    with pytest.raises(NnscalerError) as caught:
        on_ranks(model(), "dp=2,zero=1", 2, work)
    assert caught.value.code == "torch_sees_shards"


@pytest.mark.parametrize(("plan", "ranks"), [("dp=1", 1), ("dp=2", 2), ("dp=2,zero=1", 2)])
@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_what_the_engine_trains_are_refused(plan: str, ranks: int, register: str) -> None:
    def work(engine: Engine) -> None:
        parameter = engine.parameters["head.weight"]
        handle = getattr(parameter, register)(lambda _: None)
        with pytest.raises(ProgramError, match=r"`head\.weight` has a hook"):
            engine.step(rows(batch(0), engine))
        handle.remove()
        engine.step(rows(batch(0), engine))

    on_ranks(model(), plan, ranks, work)


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,zero=1"])
def test_a_part_hands_gradients_through_where_it_is_frozen_and_is_not_wrapped_or_copied(plan: str) -> None:
    def layers() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 4)).double()

    program, x = compile_part(layers(), (torch.randn(12, 6),), ranks=2, plan=plan), batch(0)["x"]
    wrapped = "Default process group" if plan == "dp=2" else "DistributedDataParallel makes equal .* `0.weight` rests"

    def work(communicator: Communicator) -> Tensor:
        part = Part(PartEngine(program, communicator, FLOAT64))
        with pytest.raises((ValueError, NnscalerError), match=wrapped):  # torch's own words where it could be done
            DistributedDataParallel(nn.Sequential(part, nn.Linear(4, 4)))
        with pytest.raises(NnscalerError, match="cannot be copied"):
            AveragedModel(part)
        part.requires_grad_(False)
        whole = x.clone().requires_grad_()
        piece = whole.chunk(2)[communicator.rank]
        part(piece).square().sum().backward()
        assert all(parameter.grad is None and not parameter.requires_grad for parameter in part.parameters())
        assert whole.grad is not None
        return whole.grad

    plain, leaf = layers().requires_grad_(False), x.clone().requires_grad_()
    plain(leaf).square().sum().backward()
    torch.testing.assert_close(sum(Simulator(2).run(work)), leaf.grad)


class Across(nn.Module):
    """Its targets have the batch in dim 1, and twice in dim 0."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.up = nn.Linear(6, features)

    def forward(self, x: Tensor, across: Tensor, twice: Tensor) -> Tensor:
        up = torch.tanh(self.up(x))
        return nn.functional.mse_loss(up, across.T) + nn.functional.mse_loss(up.repeat(2, 1), twice)


@pytest.mark.parametrize("features", [12, 5])
def test_an_input_may_have_the_batch_elsewhere_than_in_its_rows(features: int) -> None:
    """Every rank is given the whole of it, or its rows where it has as many as the batch, and cuts what it needs."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"x": (12, 6), "across": (features, 12), "twice": (24, features)}
    given = {n: torch.randn(size, generator=generator, dtype=torch.float64) for n, size in sizes.items()}
    torch.manual_seed(0)
    module = Across(features)
    program = nnscaler.parallelize(module, {n: t.float() for n, t in given.items()}, ranks=2, plan="dp=2,zero=1")
    loss = module.double()(**given)
    loss.backward()

    def work(communicator: Communicator) -> tuple[float, float]:
        engine = Engine(program, communicator, FLOAT64)
        by_rows = {name: tensor for name, tensor in given.items() if len(tensor) == 12}
        return float(engine.step(given | rows(by_rows, engine))), float(engine.clip_grad_norm_(float("inf"), 2.0))

    norm = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None]).norm()
    for found in Simulator(2).run(work):
        assert found == pytest.approx((float(loss.detach()), float(norm)), rel=1e-12)


def test_stages_that_divide_the_batch_otherwise_are_given_all_of_it() -> None:
    steps = (AssignStep(("*",), (1,)), AssignStep(("up",), (0,)))
    plan = Plan((("pp", 2),), steps, 1, stage_axes=((("dp", 2),), (("dp", 3),)))
    program = nnscaler.parallelize(model(), batch(0) | {"x": batch(0)["x"].float()}, ranks=plan.ranks, plan=plan)
    expected = eager(lambda *_: None)

    def work(communicator: Communicator) -> dict[str, Tensor]:
        engine = Engine(program, communicator, FLOAT64)
        assert engine.data_part.count == 1
        return trained(engine, lambda *_: None)

    for found in Simulator(plan.ranks).run(work):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


def test_autocast_around_a_program_is_refused_and_inference_mode_left() -> None:
    single = batch(0) | {"x": batch(0)["x"].float()}
    engine = Engine(nnscaler.parallelize(model(), single, ranks=1, plan="dp=1"))
    with torch.autocast("cpu", torch.bfloat16):
        for call in (engine.step, engine.evaluate, engine.predict, partial(trace, model())):
            with pytest.raises(NnscalerError, match=r'torch.autocast\("cpu", bfloat16\) is on around the') as error:
                call(single)
            assert error.value.code == "autocast_around" and Path(error.value.where.file) == Path(__file__)
    with torch.inference_mode():  # as under no_grad: a step trains
        assert engine.step(single).isfinite() and all(p.grad is not None for p in engine.parameters.values())
