"""Which shards an optimizer may be given, groups of parameters, and owners of whole ones."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import Optimizer

from op_registry.builtin.optimizers import NO_UPDATE, UPDATES

import nnscaler
from nnscaler.errors import NnscalerError
from nnscaler.layout import Invariant, Sharded, State
from nnscaler.runtime.communication.simulator import Simulator
from nnscaler.runtime.program.import_role_and_user_files import load_user_module
from nnscaler.runtime.training.saving.rank_tensors_as_boxes import StoredTensor
from nnscaler.training.engine import Engine
from nnscaler.training.functional_optimizer import make_update, optimizer_name, own_numbers, state_bytes, steps_beyond
from nnscaler.training.program_on_rank import EngineSettings
from nnscaler.training.splittable_optimizers_and_groups import (
    check_update,
    parameter_groups,
    split_of,
    tried_split,
)
from nnscaler.transform.zero_sharded_parameters import assign_owners

OWN = load_user_module(Path(__file__).parents[2] / "data" / "optimizers.py")
CLASSES = [c for c in vars(torch.optim).values() if inspect.isclass(c) and issubclass(c, Optimizer)]
NAMES = {"layers.0.weight": ("layers.0.weight",), "layers.0.bias": ("layers.0.bias",), "head": ("head", "wte")}


@pytest.mark.parametrize(
    ("cls", "defaults", "bytes_"),
    [
        (torch.optim.AdamW, {}, 8),
        (torch.optim.Adam, {"amsgrad": True}, 12),
        (torch.optim.SGD, {"lr": 0.1}, 0),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, 4),
    ],
)
def test_what_an_optimizer_keeps_is_tried(cls: type[Optimizer], defaults: dict[str, Any], bytes_: float) -> None:
    assert state_bytes(cls, defaults) == bytes_


def rests(fqn: str, shape: tuple[int, ...], states: Mapping[str, State] | None = None) -> StoredTensor:
    axes = states or {}
    return StoredTensor(
        fqn, (fqn,), shape, axes, dict.fromkeys(axes, 2), dict.fromkeys(axes, 0), torch.zeros(()), "parameter", True
    )


def error_of(function: Any, *arguments: Any) -> NnscalerError:
    with pytest.raises(NnscalerError) as caught:
        function(*arguments)
    return caught.value


def test_every_optimizer_of_torch_is_classified() -> None:
    assert {optimizer_name(cls) for cls in CLASSES} == {*UPDATES, *NO_UPDATE}
    assert len(CLASSES) >= 15


@pytest.mark.parametrize("cls", [c for c in CLASSES if optimizer_name(c) in UPDATES], ids=lambda c: c.__name__)
def test_the_registry_says_what_a_test_says(cls: Any) -> None:
    known, tested = split_of(cls, {}), tried_split(cls, {})
    assert known.known and not tested.known
    assert known.free == tested.free and known.refused == tested.refused and not tested.coupled
    assert known.elementwise is (UPDATES[optimizer_name(cls)] == "elementwise")


@pytest.mark.parametrize("cls", [c for c in CLASSES if optimizer_name(c) in NO_UPDATE], ids=lambda c: c.__name__)
def test_a_step_that_is_no_update_says_why(cls: Any) -> None:
    error = error_of(split_of, cls, {})
    assert error.code == "no_update" and NO_UPDATE[optimizer_name(cls)] in error.message


def test_users_optimizers_are_tested_on_the_spot() -> None:
    assert split_of(OWN.Lion, {"weight_decay": 0.1}).elementwise
    assert not any(split_of(OWN.LAMB, {}).free.values())
    assert str(split_of(OWN.RowNorm, {})) == "2 dims: 0"
    assert split_of(OWN.Clipped, {}).coupled
    assert split_of(OWN.AfterTheFirst, {}).coupled  # and the first one is not
    assert not split_of(OWN.Late, {}).elementwise  # after ten steps
    assert split_of(OWN.LAMB, {"lr": 0.5}) is split_of(OWN.LAMB, {"lr": 0.5})


@pytest.mark.parametrize("cls", [OWN.NormAfterWarmup, OWN.CountsItself, OWN.ClipsNorm])
def test_what_begins_beyond_a_number_in_its_code_needs_the_whole(cls: Any) -> None:
    split = split_of(cls, {})
    assert not split.known and not any(split.free.values())


def test_what_begins_at_large_dims_needs_the_whole() -> None:
    split = split_of(OWN.FactoredWhereLarge, {})
    assert not split.free[2] and split.free[1] == {0}
    assert split_of(OWN.FactoredWhereLarge, {"least": 2000}).elementwise  # larger than what is tried


@pytest.mark.parametrize("cls", [OWN.LinearWarmup, OWN.ClipsElements])
def test_what_stays_elementwise_beyond_the_numbers_may_be_cut(cls: Any) -> None:
    assert split_of(cls, {}).elementwise


@pytest.mark.parametrize("cls", [OWN.NormAfterWarmup, OWN.CountsInGroup, OWN.CountsInTensor])
def test_counters_of_steps_are_set_beyond_what_can_be_run(cls: Any) -> None:
    assert not any(split_of(cls, {"warmup": 4000}).free.values())


def test_hyper_parameters_are_numbers_to_go_beyond() -> None:
    assert not split_of(OWN.NormAfterWarmup, {"warmup": 200}).elementwise
    assert not split_of(OWN.ClipsNorm, {"most": 1e4}).elementwise
    assert own_numbers(OWN.ClipsNorm, {"most": 7}) == (1e-6, 1e-2, 1.0, 7, 100.0)
    assert own_numbers(torch.optim.Rprop, {}) == () and steps_beyond(()) == 12


def test_a_derived_class_is_not_taken_for_torchs() -> None:
    class AdamW(torch.optim.AdamW):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad = p.grad / p.grad.norm()
            return super().step(closure)

    split = split_of(AdamW, {})
    assert not split.known and not split.elementwise


def test_what_is_no_optimizer_is_refused() -> None:
    assert "is no optimizer" in error_of(split_of, nn.Linear, {}).message
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    assert "not an object" in str(error_of(split_of, optimizer, {}))
    error = error_of(split_of, torch.optim.SGD, {"momntum": 0.9})
    assert "torch.optim.SGD(momntum=0.9)" in error.message and "momentum=0" in (error.help or "")


def test_shards_along_a_frozen_dim_are_refused_with_what_would_do() -> None:
    cut = rests("layers.0.weight", (64, 48), {"dp": Sharded(0)})
    whole = rests("layers.0.weight", (64, 48), {"dp": Invariant()})
    check_update(torch.optim.AdamW, {}, [cut])
    check_update(torch.optim.Muon, {}, [whole])
    error = error_of(check_update, torch.optim.Muon, {}, [whole, cut])
    assert error.code == "update_needs_whole"
    assert error.message == (
        "the update of torch.optim.Muon needs the whole parameter, and `layers.0.weight` (64 x 48) rests in shards: "
        "Sharded(0) over `dp`"
    )
    assert error.help is not None and "no `zero` and no rest step for it over `dp`" in error.help
    check_update(OWN.RowNorm, {}, [cut])
    error = error_of(check_update, OWN.RowNorm, {}, [rests("w", (64, 48), {"tp": Sharded(1)})])
    assert "must not be cut along dim 1" in error.message and "cuts it along dim 0" in (error.help or "")


def test_a_vector_under_muon_gets_torchs_words() -> None:
    error = error_of(check_update, torch.optim.Muon, {}, [rests("layers.0.bias", (64,))])
    assert "`layers.0.bias`" in error.message and "Muon only supports 2D parameters" in error.message


def test_parameters_that_depend_on_each_other_are_all_needed() -> None:
    check_update(OWN.Clipped, {}, [rests("w", (4, 2))])
    assert "depends on others" in error_of(check_update, OWN.Clipped, {}, [rests("w", (4, 2))], False).message
    assert "depends on all" in error_of(check_update, OWN.Clipped, {}, [rests("w", (4,), {"dp": Sharded(0)})]).message


def test_a_step_reads_its_state_and_changes_no_argument() -> None:
    for cls in (torch.optim.RAdam, torch.optim.Adafactor, OWN.LAMB):
        update = make_update(cls, {"lr": 0.1})
        values = [torch.randn(6, 5, dtype=torch.float64) for _ in range(14)]
        state = update.example(values[0], values[1:13])
        tensor = nn.Parameter(values[0].clone())
        optimizer = cls([tensor], lr=0.1)
        for gradient in values[1:]:
            tensor.grad = gradient.clone()
            before = tensor.detach().clone()
            optimizer.step()
        given = [before, values[13], *state]
        kept = [t.clone() for t in given]
        assert torch.equal(update(*given, steps=12)[0], tensor.detach())
        assert all(torch.equal(a, b) for a, b in zip(given, kept, strict=True))
        assert torch.equal(update(*given, steps=1)[0], tensor.detach()) is (cls is OWN.LAMB)  # it counts no steps


def tensors() -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.zeros(2, 3)) for name in NAMES}


def test_groups_are_made_by_the_first_pattern_that_matches() -> None:
    here = tensors()
    groups = {"*.bias": {"weight_decay": 0.0}, "wte": {"lr": 0.5}, "layers.*": {"lr": 0.1}}
    made = parameter_groups(torch.optim.AdamW, NAMES, here, groups)
    assert [group["param_names"] for group in made] == [
        ["layers.0.bias"],
        ["head"],
        ["layers.0.weight"],
    ]
    optimizer = torch.optim.AdamW(made, lr=1.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, 2)
    assert [(g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [(0.5, 0.0), (0.25, 0.01), (0.05, 0.01)]
    optimizer.step()
    schedule.step()
    assert schedule.get_last_lr() == pytest.approx([0.75, 0.375, 0.075])


def test_every_rank_has_the_same_groups() -> None:
    here = tensors()
    made = [
        parameter_groups(torch.optim.SGD, NAMES, part, {"*.bias": {"lr": 0.1}})
        for part in (here, {"head": here["head"]}, {})
    ]
    assert [[len(group["params"]) for group in groups] for groups in made] == [[1, 2], [0, 1], [0, 0]]
    for groups in made:
        torch.optim.SGD(groups)


def test_a_wrong_group_is_told() -> None:
    wrong = [
        ({"*.bais": {}}, "matches no parameter", "layers.0.bias"),
        ({"*": {}, "*.bias": {}}, "'*', which comes first", "the narrow first"),
        ({"*": {"weigth_decay": 0.0}}, "does not take", "did you mean weight_decay?"),
    ]
    for groups, message, help in wrong:
        error = error_of(parameter_groups, torch.optim.AdamW, NAMES, tensors(), groups)
        assert message in error.message and help in (error.help or "")


@pytest.mark.long
@given(st.dictionaries(st.text(max_size=3), st.integers(0, 50), max_size=20), st.integers(1, 5))
def test_owners_are_balanced_and_do_not_depend_on_order(weights: dict[str, int], ranks: int) -> None:
    owners = assign_owners(weights, ranks)
    assert owners == assign_owners(dict(reversed(weights.items())), ranks)
    assert list(owners) == list(weights)
    loads = [sum(w for name, w in weights.items() if owners[name] == rank) for rank in range(ranks)]
    assert max(loads) - min(loads) <= max(weights.values(), default=0)


class Small(nn.Module):
    """A tied table, two matrices of odd sizes, a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.up = nn.Linear(7, 9)
        self.down = nn.Linear(9, 7, bias=False)
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.down(torch.tanh(self.up(self.embed(ids))))
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), ids.flatten())


GROUPS = {"*.bias": {"lr": 0.0}, "head.*": {"lr": 0.01}}
IDS = torch.arange(48).reshape(12, 4) % 11


def trained(engine: Engine, cls: Any, **defaults: Any) -> list[float]:
    optimizer = engine.optimizer(cls, groups=GROUPS, **defaults)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    rows = len(IDS) // engine.data_part.count
    losses = []
    for _ in range(5):
        ids = IDS[engine.data_part.index * rows :][:rows]
        losses.append(float(engine.step({"ids": ids})))
        engine.clip_grad_norm_(0.5)
        optimizer.step()
        schedule.step()
        engine.zero_grad()
    return losses


def on_ranks(plan: str, cls: Any, **defaults: Any) -> list[list[float]]:
    torch.manual_seed(0)
    program = nnscaler.parallelize(Small(), {"ids": IDS}, ranks=3, plan=plan)
    settings = EngineSettings(dtype="float64", device="cpu")
    return Simulator(3).run(lambda communicator: trained(Engine(program, communicator, settings), cls, **defaults))


def eager(cls: Any, **defaults: Any) -> list[float]:
    torch.manual_seed(0)
    module = Small().double()
    named = dict(module.named_parameters())
    names = {name: (name, "head.weight") if name == "embed.weight" else (name,) for name in named}
    optimizer = cls(parameter_groups(cls, names, named, GROUPS), **defaults)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    losses = []
    for _ in range(5):
        loss = module(IDS)
        loss.backward()
        losses.append(float(loss.detach()))
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.long
def test_an_engines_optimizer_trains_as_the_model_does() -> None:
    for cls, plan in ((torch.optim.NAdam, "dp=3,zero=1"), (OWN.Lion, "tp=3"), (OWN.LAMB, "dp=3")):
        wanted = eager(cls, lr=0.1)
        for losses in on_ranks(plan, cls, lr=0.1):
            assert losses == pytest.approx(wanted, rel=1e-12)


def test_an_engine_refuses_shards_that_an_optimizer_needs_whole() -> None:
    for plan in ("dp=3,zero=1", "dp=3,zero=3", "tp=3"):
        with pytest.raises(NnscalerError, match="LAMB needs the whole parameter"):
            on_ranks(plan, OWN.LAMB, lr=0.1)


def test_a_group_that_is_added_later_needs_no_names() -> None:
    engine = Engine(nnscaler.parallelize(Small(), {"ids": IDS}, ranks=1, plan="dp=1"))
    optimizer = engine.optimizer(torch.optim.AdamW, only=lambda name, shape: name.startswith("down"), lr=0.1)
    later = {name: tensor for name, tensor in engine.parameters.items() if name.startswith("up")}
    optimizer.add_param_group({"params": later.values(), "lr": 0.2})
    optimizer.add_param_group({"params": []})  # on a rank that has none of them
    assert [(group["lr"], group["param_names"]) for group in optimizer.param_groups[1:]] == [(0.2, [*later]), (0.1, [])]
    with pytest.raises(ValueError, match="names"):
        optimizer.add_param_group({"params": torch.zeros(2)})
    with pytest.raises(TypeError, match="ordered"):
        optimizer.add_param_group({"params": set(later.values())})
