"""Train and evaluation mode: every module is traced in the mode that it is in, and keeps it."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

from nnscaler.tracing import Traced, trace
from nnscaler.tracing.models_with_added_loss import with_loss
from tests.nnscaler.tracing.stacks import LAYERS, Stack, same
from tests.sampling import every

NOTE = (
    "the model is in evaluation mode (`.eval()`), and so is its program: dropout is off, and batch norm uses its "
    "running statistics{}. For a program that trains, call `.train()` on the model in build_model()"
)


class Net(nn.Module):
    """A backbone and a head; whatever has a mode is in both."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.25))
        self.head = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.backbone(x)).pow(2).mean()
        return result


X = torch.randn(12, 6, generator=torch.Generator().manual_seed(1))


def net(train: bool, backbone: bool, head: bool) -> Net:
    torch.manual_seed(0)
    model = Net()
    model.train(train)
    model.backbone.train(backbone)
    model.head.train(head)
    return model


def dropped(traced: Traced) -> list[float]:
    return [float(op.args[1]) for op in traced.graph.operations if op.operator == "nnscaler.dropout"]


@pytest.mark.parametrize("root", [True, False])
@pytest.mark.parametrize("backbone", [True, False])
@pytest.mark.parametrize("head", [True, False])
def test_every_part_keeps_its_mode(root: bool, backbone: bool, head: bool) -> None:
    model = net(root, backbone, head)
    modes = {name: part.training for name, part in model.named_modules()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = trace(model, (X,))  # which compares the graph with the model
    parts = {"backbone": backbone, "head": head}
    assert dropped(traced) == [p for p, part in ((0.25, "backbone"), (0.5, "head")) if parts[part]]
    kept = {name.partition("_running")[0] for name, _ in traced.graph.updates if "running_mean" in name}
    assert kept == {f"{part}_1" for part, train in parts.items() if train}
    stored = [op.module for op in traced.graph.operations if op.operator == "aten.batch_norm.default"]
    assert stored == [f"{part}.1" for part, train in parts.items() if not train]
    assert {name: part.training for name, part in model.named_modules()} == modes
    inside = {(True, True): "backbone`, `head` are", (True, False): "backbone` is", (False, True): "head` is"}
    some = inside.get((backbone, head))
    wanted = NOTE.format(f"; only `{some} in train mode" if some else "")
    assert [note for note in traced.notes if "evaluation mode" in note] == ([] if root else [wanted])


@pytest.mark.long
def test_the_mode_of_a_model_with_a_loss_function_is_the_models() -> None:
    model = net(False, False, False)
    with pytest.warns(UserWarning, match="evaluation mode"):
        assert dropped(trace(model, (X,), loss_fn=lambda outputs, batch: outputs * 2)) == []
    with pytest.warns(UserWarning, match="evaluation mode"):
        assert dropped(trace(with_loss(model, lambda outputs, batch: outputs), (X,))) == []
    assert dropped(trace(model.train(), (X,))) == [0.25, 0.5]


def stack(evaluated: tuple[int, ...]) -> Stack:
    made = Stack(lambda layer, x: layer.drop(layer.block(x)))
    for i, layer in enumerate(made.layers):
        layer.drop = nn.Dropout(0.5)
        layer.train(i not in evaluated)
    return made


@pytest.mark.long
@pytest.mark.parametrize(
    "evaluated", every(2, map(pytest.param, [(), (0,), (2,), (0, 1), (1, 3), (0, 1, 2, 3), (0, 1, 2, 3, 4)]))
)
def test_layers_of_different_modes_are_not_copies(evaluated: tuple[int, ...]) -> None:
    kinds = len({i in evaluated for i in range(LAYERS)})
    traced = same(lambda: stack(evaluated), copies=LAYERS - kinds)
    dropping = [op.module for op in traced.graph.operations if op.operator == "nnscaler.dropout"]
    assert dropping == [f"layers.{i}.drop" for i in range(LAYERS) if i not in evaluated]


@pytest.mark.long
def test_a_child_alone_in_another_mode_is_seen_in_repeated_layers() -> None:
    def make() -> Stack:
        made = stack(())
        made.layers[2].drop.eval()
        return made

    traced = same(make, copies=LAYERS - 2)
    assert len(dropped(traced)) == LAYERS - 1


@pytest.mark.long
def test_transformers_gives_models_in_either_mode(tmp_path: object) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=20, n_positions=8)
    made = transformers.AutoModelForCausalLM.from_config(config)
    made.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.randint(0, 20, (2, 8), generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        training, evaluating = (trace(copy.deepcopy(m), {"input_ids": ids, "labels": ids}) for m in (made, loaded))
    assert made.training and len(dropped(training)) == 4
    assert not loaded.training and dropped(evaluating) == []
    assert any("evaluation mode" in note for note in evaluating.notes)
    assert not any("evaluation mode" in note for note in training.notes)
