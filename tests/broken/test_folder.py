"""Program folders in which something is wrong that no line computes: what the runtime reads beside the lines."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nnscaler
from nnscaler.errors import NnscalerError
from nnscaler.manifest import Manifest, read_manifest
from nnscaler.records_as_json import decode, encode
from nnscaler.runtime.program.program_directory import describe_state
from tests.broken.planting import Edit, Original
from tests.graph_text import parse_graph
from tests.sampling import every
from verify import Report, verify_plan
from verify.programs.typing import check_program
from verify.programs.typing.program_files.check_manifest_and_stored_tensors import NAME
from verify.results.finding import Finding


def first_read(original: Original, program: Path) -> Finding:
    result = original.read(program)
    assert not result.proved
    return next(f for outcome in result.outcomes for f in outcome.findings)


def test_copies_in_another_order_on_one_stage(staged: Original, tmp_path: Path) -> None:
    """The norm of the gradients would count the tied weight twice, or never."""
    assert staged.read(staged.folder).proved
    swapped = Edit("copies=((0, 1), (2, 3))", "copies=((2, 3), (0, 1))")
    found = first_read(staged, staged.broken(tmp_path, [swapped]))
    assert found.code == "gradient_norm_differs"
    assert "`words.weight` lists its copies as ((2, 3), (0, 1))" in found.message
    assert "clipping scales by a wrong norm" in str(found.cause)


def verified(original: Original, program: Path, **options: object) -> Report:
    return original.verify(program, level="static", **options)


@pytest.fixture
def folder(normed: Original, tmp_path: Path) -> Path:
    """The model with batch norm: parameters, buffers and a constant."""
    return normed.broken(tmp_path, [])


def change(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    state = torch.load(folder / "state.pt", weights_only=True)
    edit(state)
    torch.save(state, folder / "state.pt")


def swap(first: str, second: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda state: state.update({first: state[second].clone(), second: state[first].clone()})


CASES = [
    # what, edit, the first message, a part of its cause, whether --own-weights allows it
    (
        "two parameters swapped",
        swap("norm.weight", "norm.bias"),
        "the parameter `norm.bias` in state.pt is not the one that the program was compiled with",
        "it holds the values that `norm.weight` was compiled with",
        True,
    ),
    (
        "two buffers swapped",
        swap("norm.running_mean", "norm.running_var"),
        "the buffer `norm.running_mean` in state.pt is not the one that the program was compiled with",
        "it holds the values that `norm.running_var` was compiled with",
        True,
    ),
    (
        "one number of a constant",
        lambda state: state["_constants.0"].mul_(torch.tensor([1.0, 1.0, 1.0, 1.0, 1.001])),
        "the constant `_constants.0` in state.pt is not the one that the program was compiled with",
        "its values were changed after the program was compiled",
        False,
    ),
    ("a missing tensor", lambda state: state.pop("first.bias"), "state.pt lacks `first.bias`", "cannot start", False),
    (
        "a tensor too many",
        lambda state: state.update(more=torch.ones(2)),
        "state.pt has a tensor `more`, and the model has none of that name",
        "nothing reads it",
        True,
    ),
    (
        "another shape",
        lambda state: state.update(spare=torch.ones(4)),
        "`spare` in state.pt is float32[4], and the model's is float32[3]",
        "",
        False,
    ),
    (
        "another dtype",
        lambda state: state.update(spare=torch.ones(3).double()),
        "`spare` in state.pt is float64[3], and the model's is float32[3]",
        "",
        False,
    ),
]


@pytest.mark.parametrize(
    ("edit", "message", "cause", "allowed"), every(4, [c[1:] for c in CASES]), ids=[c[0] for c in CASES]
)
def test_a_tensor_of_the_folder_is_another(
    edit: Callable[[dict[str, Tensor]], object],
    message: str,
    cause: str,
    allowed: bool,
    normed: Original,
    folder: Path,
) -> None:
    change(folder, edit)
    report = verified(normed, folder)
    assert report.exit_code == 1
    assert report.findings[0].code == "state_differs"
    assert report.findings[0].message == message
    assert cause in (report.findings[0].cause or "")
    assert verified(normed, folder, own_weights=True).exit_code == (0 if allowed else 1)


def test_a_run_that_proves_nothing_reads_the_state_too(normed: Original, folder: Path) -> None:
    """And the run itself has the model's constants, so that a wrong one has this finding alone."""
    change(folder, CASES[2][1])
    report = normed.verify(folder)
    assert [f.code for f in report.findings] == ["state_differs"]


def test_buffers_and_constants_are_those_of_the_model_as_it_is_now(normed: Original) -> None:
    """The folder is as it was compiled; the model's file was changed after that."""

    def changed() -> nn.Module:
        model = normed.factory()
        model.get_buffer("scale").mul_(2.0)
        return model

    report = verified(replace(normed, factory=changed), normed.folder)
    assert report.exit_code == 1
    assert report.findings[0].message == "the buffer `scale` of the program is not the one that the model has now"


@pytest.mark.parametrize("damage", ["cut short", "missing", "no tensors"])
def test_a_state_that_cannot_be_read_is_an_error(damage: str, normed: Original, folder: Path) -> None:
    file = folder / "state.pt"
    if damage == "cut short":
        file.write_bytes(file.read_bytes()[:200])
    elif damage == "missing":
        file.unlink()
    else:
        torch.save([1, 2], file)
    with pytest.raises(NnscalerError) as caught:
        verified(normed, folder)
    assert caught.value.code == "not_a_program"
    assert str(file) in caught.value.message


class Empty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.layer(x).square().mean()
        return loss


def change_manifest(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    edit(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def without_hashes(manifest: dict[str, Any]) -> None:
    for entry in manifest["state"].values():
        entry["sha256"] = None


def test_a_hash_that_is_gone(normed: Original, folder: Path) -> None:
    """Nobody would say then which values the weights had, whether they were changed or not."""
    change_manifest(folder, without_hashes)
    report = verified(normed, folder)
    assert report.exit_code == 1
    assert {finding.code for finding in report.findings} == {"record_differs"}
    first = "manifest.json has no hash of `_constants.0`, and the model has values of it"
    assert report.findings[0].message == first


def test_values_that_a_program_without_hashes_was_given(tmp_path: Path) -> None:
    """The model is on the meta device: the weights are whatever the user made of them."""

    def empty() -> nn.Module:
        with torch.device("meta"):
            return Empty()

    batch = {"x": torch.randn(6, 4)}
    program = nnscaler.parallelize(empty(), batch, ranks=2, plan="dp=2").save(tmp_path / "program")
    torch.save({"layer.weight": torch.randn(4, 4), "layer.bias": torch.randn(4)}, program / "state.pt")
    report = verify_plan(empty, batch, ranks=2, program=program, level="static")
    assert report.exit_code == 0, report.to_json()
    assert any(note.startswith("the values of 2 tensors in state.pt were not checked") for note in report.notes)
    assert [c.count for c in report.checks if c.name == NAME] == [0]


def test_a_tied_weight_with_two_values(tmp_path: Path, staged: Original) -> None:
    """Whoever replaces weights may forget a name; and who edits the hashes too is found out all the same."""
    folder = staged.broken(tmp_path, [])
    change(folder, lambda state: state.update({"head.weight": state["head.weight"] + 1}))
    report = verified(staged, folder, own_weights=True)
    assert report.exit_code == 1
    assert [finding.code for finding in report.findings] == ["state_differs"]
    message = "`words.weight` and `head.weight` in state.pt differ, and in the model they are one tensor"
    assert report.findings[0].message == message
    recorded = encode(describe_state(torch.load(folder / "state.pt", weights_only=True)))
    change_manifest(folder, lambda manifest: manifest.update(state=recorded))
    assert [finding.code for finding in verified(staged, folder).findings] == ["state_differs"]


def test_another_sample_batch(normed: Original, folder: Path) -> None:
    file = folder / "inputs.pt"
    torch.save({name: value * 0 for name, value in torch.load(file, weights_only=True).items()}, file)
    report = verified(normed, folder)
    assert report.exit_code == 1
    assert {finding.code for finding in report.findings} == {"record_differs"}
    assert report.findings[0].message.endswith("in inputs.pt is not the one that the program was compiled with")
    change_manifest(folder, lambda manifest: manifest.pop("batch"))
    with pytest.raises(NnscalerError, match=r"manifest\.json lacks batch"):
        verified(normed, folder)
    file.unlink()
    change_manifest(folder, lambda manifest: manifest.update(batch={}))
    with pytest.raises(NnscalerError, match=r"inputs\.pt does not exist"):
        verified(normed, folder)


def test_a_sample_batch_that_the_model_does_not_take(normed: Original, folder: Path) -> None:
    """The record agrees with the batch, and neither with the model's inputs."""
    file = folder / "inputs.pt"
    batch = {name: value[:1].clone() for name, value in torch.load(file, weights_only=True).items()}
    for changed, words in ((batch, "float32[1, "), ({}, "has nothing for the input `")):
        torch.save(changed, file)
        recorded = {name: encode(entry) for name, entry in describe_state(changed).items()}
        change_manifest(folder, lambda manifest, recorded=recorded: manifest.update(batch=recorded))
        report = verified(normed, folder)
        assert report.exit_code == 1
        assert {finding.code for finding in report.findings} == {"record_differs"}
        assert words in report.findings[0].message


def test_a_record_of_another_shape(normed: Original, folder: Path) -> None:
    change_manifest(folder, lambda manifest: manifest["state"]["norm.weight"].update(shape=[9]))
    report = verified(normed, folder)
    assert report.exit_code == 1
    assert "manifest.json has `norm.weight` as float32[9], and state.pt has float32[" in report.findings[0].message


def test_a_state_that_is_gone_with_one_hash(normed: Original, folder: Path) -> None:
    (folder / "state.pt").unlink()
    change_manifest(folder, lambda manifest: manifest["state"]["norm.weight"].update(sha256=None))
    with pytest.raises(NnscalerError, match=r"state\.pt does not exist"):
        verified(normed, folder)


def role(manifest: dict[str, Any]) -> Any:
    return manifest["roles"][0]


ENTRIES = [
    ("ranks", lambda manifest: manifest.update(ranks=3)),
    ("roles[0]", lambda manifest: role(manifest).update(ranks=[0])),
    (
        "roles of length 2, and the role programs are for length 1",
        lambda manifest: manifest["roles"].append(dict(role(manifest), ranks=[2])),
    ),
    ("micro_batches", lambda manifest: manifest.update(micro_batches=2)),
    ("inputs of length 1, and the model has length 2", lambda manifest: manifest["inputs"].pop()),
    ("inputs[1].dtype int32, and the model has int64", lambda manifest: manifest["inputs"][1].update(dtype="int32")),
    ("parameters[0].fqns of length", lambda manifest: manifest["parameters"][0]["fqns"].append("head.weight")),
    ("buffers", lambda manifest: manifest["buffers"].pop()),
]


@pytest.mark.parametrize(("entry", "edit"), ENTRIES, ids=[f"{i}: {e[0]}" for i, e in enumerate(ENTRIES)])
def test_a_manifest_that_says_something_else(
    entry: str, edit: Callable[[dict[str, Any]], object], normed: Original, folder: Path
) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    edit(manifest)
    graph = parse_graph((normed.folder / "graph.txt").read_text(encoding="utf-8"))
    sources = {"role_0.py": (folder / "role_0.py").read_text(encoding="utf-8")}
    assert check_program(sources, graph, manifest=read_manifest(folder)).proved
    found = [f for o in check_program(sources, graph, manifest=decode(Manifest, manifest)).outcomes for f in o.findings]
    assert [f.code for f in found] == ["record_differs"]
    assert found[0].message.startswith(f"manifest.json has {entry}")
