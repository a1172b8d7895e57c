"""The manifest as typed records: what is written is read again, and a damaged one is refused by its entry."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from nnscaler.codegen.compiled_program import Program
from nnscaler.compile import WantedPlan, compile_traced
from nnscaler.manifest import MANIFEST, Manifest, ManifestError, NoManifest, read_manifest
from nnscaler.records_as_json import RecordError, decode, encode
from nnscaler.runtime.communication.communicator import ProgramError
from nnscaler.runtime.program.program_directory import read_program
from tests import traced_examples
from verify.programs.opened_program import open_program

PLANS = [("gpt", "dp=2,tp=2,pp=2", 4), ("gpt", "dp=2,zero=3", 1), ("moe", "pp=2", 2), ("moe", "dp=3,tp=2", 1)]


def compiled(name: str, plan: str, micro_batches: int) -> Program:
    ranks = 1
    for part in plan.split(","):
        axis, size = part.split("=")
        ranks *= 1 if axis == "zero" else int(size)
    traced = traced_examples.traced(name)
    return compile_traced(traced, WantedPlan(ranks, plan, micro_batches=micro_batches), model={"name": name})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled("gpt", "dp=2,tp=2,pp=2", 4).save(tmp_path_factory.mktemp("programs") / "program")


@pytest.mark.parametrize(("name", "plan", "micro_batches"), PLANS)
def test_what_is_written_is_read_again(name: str, plan: str, micro_batches: int, tmp_path: Path) -> None:
    program = compiled(name, plan, micro_batches)
    path = program.save(tmp_path / "program")
    text = (path / MANIFEST).read_text()
    found = read_manifest(path)
    assert found == program.manifest and found.to_json() == text
    assert list(json.loads(text)) == [field.name for field in fields(Manifest)]
    assert read_program(path).manifest == open_program(path).manifest == found
    assert found.shards_parameters is ("zero" in plan)
    assert open_program(path).summary.startswith(program.plan.describe() if "zero" in plan else found.divided_axes)
    assert [found.role_of(rank) for rank in range(found.ranks)] == [
        next(role for role in found.roles if rank in role.ranks) for rank in range(found.ranks)
    ]
    assert found.role_of(found.ranks) is None


def damaged(folder: Path, at: Path, edit: Callable[[dict[str, Any]], object]) -> Path:
    data = json.loads((folder / MANIFEST).read_text())
    edit(data)
    (at / MANIFEST).write_text(json.dumps(data))
    return at


def role(data: dict[str, Any]) -> Any:
    return data["roles"][1]


def profile(data: dict[str, Any]) -> Any:
    return data["communication_profile"]


def bar(data: dict[str, Any]) -> Any:
    return data["timeline"]["rows"][0]["bars"][0]


DAMAGES: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda d: d.pop("roles"), " lacks roles"),
    (lambda d: [d.pop(name) for name in ("format", "axes", "batch")], " lacks format, axes, batch"),
    (lambda d: d.update(format=2), " has format 2, and this nnscaler reads format 1"),
    (lambda d: [d.clear(), d.update(format=0)], " has format 0, and this nnscaler reads format 1"),
    (lambda d: d.update(ranks="8"), ": ranks is '8', and not a whole number"),
    (lambda d: d.update(ranks=True), ": ranks is True, and not a whole number"),
    (lambda d: d.update(micro_batches=1.5), ": micro_batches is 1.5, and not a whole number"),
    (lambda d: d.update(model=["gpt"]), ": model is ['gpt'], and not names with values"),
    (lambda d: d["model"].update(name=7), ": model.name is 7, and not a text"),
    (lambda d: d["axes"].append(["tp"]), ": axes[3] is ['tp'], and not a list of 2"),
    (lambda d: role(d).pop("sha256"), ": roles[1] lacks sha256"),
    (lambda d: role(d).update(ranks=[0, None]), ": roles[1].ranks[1] is None, and not a whole number"),
    (lambda d: d["parameters"][0].update(used=1), ": parameters[0].used is 1, and not true or false"),
    (lambda d: d["tensors"].update(first={}), ": tensors has the name 'first', which is no number"),
    (lambda d: d["state"].update(w=[]), ": state.w is [], and not names with values"),
    (lambda d: profile(d).update(totals="x" * 99), f": communication_profile.totals is '{'x' * 59}..., and not a list"),
    (lambda d: profile(d)["classes"][0].pop("when"), ": communication_profile.classes[0] lacks when"),
    (lambda d: bar(d).update(start="0"), ": timeline.rows[0].bars[0].start is '0', and not a number"),
    (lambda d: d["memory"][0].update(total=None), ": memory[0].total is None, and not a whole number"),
]  # fmt: skip


@pytest.mark.parametrize(("edit", "told"), DAMAGES, ids=[told for _, told in DAMAGES])
def test_a_damaged_manifest_is_refused_by_its_entry(
    edit: Callable[[dict[str, Any]], object], told: str, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ManifestError) as caught:
        read_manifest(damaged(folder, tmp_path, edit))
    assert str(caught.value) == f"{tmp_path / MANIFEST}{told}"
    with pytest.raises(ProgramError):
        read_program(tmp_path)


def test_a_file_that_is_no_manifest(tmp_path: Path) -> None:
    with pytest.raises(NoManifest):
        read_manifest(tmp_path)
    for text, told in (("{", " is not JSON: "), ("[]", " is [], and not names with values"), ("5", " is 5, and not ")):
        (tmp_path / MANIFEST).write_text(text)
        with pytest.raises(ManifestError) as caught:
            read_manifest(tmp_path)
        assert str(caught.value).startswith(f"{tmp_path / MANIFEST}{told}") and type(caught.value) is ManifestError


def test_what_older_versions_lack_and_newer_ones_add(folder: Path, tmp_path: Path) -> None:
    def edit(data: dict[str, Any]) -> None:
        for name in ("communication_profile", "timeline", "memory", "operator_files", "unannotated", "model"):
            del data[name]
        data["added"] = data["roles"][0]["added"] = 5

    found, whole = read_manifest(damaged(folder, tmp_path, edit)), read_manifest(folder)
    assert found.communication_profile is found.timeline is None and found.memory == () and found.model == {}
    assert found.roles == whole.roles and found.state == whole.state


class Color(Enum):
    RED = "red"


@dataclass(frozen=True)
class Leaf:
    color: Color
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Tree:
    leaves: dict[int, Leaf]
    first: Leaf | None = None


def test_records_as_data() -> None:
    tree = Tree({3: Leaf(Color.RED, (1, 2))}, Leaf(Color.RED))
    data = {"leaves": {"3": {"color": "red", "sizes": [1, 2]}}, "first": {"color": "red", "sizes": []}}
    assert encode(tree) == data and decode(Tree, data) == tree
    assert decode(Tree, {"leaves": {}}) == Tree({})
    with pytest.raises(RecordError, match=r"^leaves\.3\.color is 'blue', and not one of red$"):
        decode(Tree, {"leaves": {"3": {"color": "blue"}}})


def test_a_manifest_is_read_without_torch(folder: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from nnscaler.manifest import read_manifest;"
        "read_manifest(Path(sys.argv[1])); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script, str(folder)], check=False).returncode == 0
