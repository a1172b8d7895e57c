"""A generated program as files: its manifest, roles and state. It may have been edited by hand."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nnscaler.errors import NnscalerError, SourceLocation
from nnscaler.manifest import MANIFEST, PLAN, Manifest, ManifestError, NoManifest, RoleRecord, read_manifest
from nnscaler.scheduling.registry import SCHEDULES
from nnscaler.transform.plan import EP, Plan, slices_text

if TYPE_CHECKING:
    from types import ModuleType

    from torch import Tensor

    from nnscaler.runtime.stage_base_class import Stage

_HELP = "`nnscaler compile MODEL --ranks N --plan SPEC --out DIR` writes one"
_SCHEDULES = {name: kind.title for name, kind in SCHEDULES.items()}


@dataclass(frozen=True)
class OpenedProgram:
    """A program's folder that was found whole.

    changes  role files, and a plan.json, that are not what the compiler wrote, as notes
    """

    path: Path
    manifest: Manifest
    changes: tuple[str, ...]

    @property
    def ranks(self) -> int:
        return self.manifest.ranks

    def for_ranks(self, ranks: int) -> OpenedProgram:
        """Return the program itself. Raises NnscalerError `plan_illegal` where it is for another number of ranks."""
        if self.ranks != ranks:
            message = f"{self.path} is a program for {self.ranks} ranks, not {ranks}"
            raise NnscalerError("plan_illegal", message, help=f"use --ranks {self.ranks}")
        return self

    @property
    def axes(self) -> dict[str, int]:
        """axis -> size, `pp` included."""
        return dict(self.manifest.axes)

    @property
    def role_files(self) -> list[str]:
        return self.manifest.role_files

    def sources(self) -> dict[str, str]:
        """Return the texts of the role files, by name."""
        return {file: (self.path / file).read_text(encoding="utf-8") for file in self.role_files}

    @property
    def loss(self) -> str | None:
        """`file.py::function` of the loss function outside of the model that the program was compiled with."""
        return self.manifest.model.get("loss")

    @property
    def summary(self) -> str:
        """`dp=2 tp=2 pp=2, 1F1B, 4 micro-batches, bfloat16`; empty for one rank."""
        manifest = self.manifest
        plan = self.plan()
        in_words = bool(manifest.stage_axes) or manifest.shards_parameters or EP in self.axes
        axes = manifest.divided_axes if not in_words else manifest.plan if plan is None else plan.describe()
        parts = [axes] if axes else []
        if self.axes.get("pp", 1) > 1:
            parts.append(_SCHEDULES.get(manifest.schedule, manifest.schedule))
        if manifest.micro_batches > 1:
            parts.append(f"{manifest.micro_batches} micro-batches")
        if plan is not None and plan.slices and not in_words:
            parts.append(f"slices={slices_text(plan.slices)}")
        if plan is not None and plan.precision is not None and not in_words:
            parts.append(plan.precision.describe())
        return ", ".join(parts)

    @property
    def details(self) -> list[str]:
        """How much of the matmul work is divided, and what is communicated."""
        divided = self.manifest.matmul_flops_divided
        lines = [f"matmul FLOPs divided over {axis}: {100 * share:.1f} %" for axis, share in divided.items()]
        for entry in self.manifest.communication:
            calls, elements = entry.calls, round(entry.elements)
            lines += [f"{entry.collective} over {entry.axis}: {calls} calls, {elements} elements a step"]
        return lines

    def plan(self) -> Plan | None:
        """Return the plan that the program was compiled by: the manifest's, for plan.json is there to be edited and
        compiled again. A program of an older version has its plan.json alone, or None where that is gone.

        Raises NnscalerError("plan_illegal").
        """
        if self.manifest.plan_document:
            return Plan.from_json(self.manifest.plan_document, f"{self.path / MANIFEST}: plan_document")
        file = self.path / PLAN
        return Plan.from_json(file.read_text(encoding="utf-8"), str(file)) if file.is_file() else None

    def known_plan(self) -> Plan:
        """Return the plan that it was compiled by. Raises NnscalerError: `not_a_program` where nothing says which."""
        plan = self.plan()
        if plan is None:
            message = f"{self.path} does not say by which plan it was compiled: there is no {self.path / PLAN}"
            help = "put the plan.json back that `nnscaler compile` wrote, or compile the model again"
            raise NnscalerError("not_a_program", message, help=help)
        return plan

    def roles(self) -> list[ModuleType]:
        """Load the module of every role. Raises what its text raises."""
        from nnscaler.runtime.program.import_role_and_user_files import load_role

        return [load_role(self.path / file) for file in self.role_files]

    def stages(self) -> list[type[Stage]]:
        """Return the stage classes of all roles."""
        return [stage for role in self.roles() for stage in role.STAGES]

    def state(self) -> dict[str, Tensor] | None:
        """Return the stored parameters, buffers and constants; None for a program of a model without data.

        Raises NnscalerError `not_a_program` where the file is missing or cannot be read.
        """
        file = self.path / "state.pt"
        if not file.is_file() and all(entry.sha256 is None for entry in self.manifest.state.values()):
            return None
        return _tensors(file)

    def batch(self) -> dict[str, Tensor]:
        """Return the stored sample batch.

        Raises NnscalerError `not_a_program` where it is missing or cannot be read.
        """
        return _tensors(self.path / "inputs.pt")


def _tensors(file: Path) -> dict[str, Tensor]:
    from nnscaler.runtime.communication.communicator import ProgramError
    from nnscaler.runtime.program.program_directory import read_tensors  # imports torch, which a manifest does not need

    try:
        return read_tensors(file)
    except ProgramError as error:
        raise NnscalerError("not_a_program", str(error), help=_HELP) from None


def open_program(path: Path) -> OpenedProgram:
    """Read a program's manifest, and compare its role files with it.

    Raises NnscalerError `not_a_program` if something is missing or cannot be read.
    """
    try:
        manifest = read_manifest(path)
    except NoManifest:
        message = f"{path} holds no program: there is no {path / MANIFEST}"
        raise NnscalerError("not_a_program", message, help=_HELP) from None
    except ManifestError as error:
        raise NnscalerError("not_a_program", str(error), help=_HELP) from None
    changes = [*(_changed(path, role) for role in manifest.roles), _changed_plan(path, manifest)]
    return OpenedProgram(path, manifest, tuple(change for change in changes if change is not None))


def _changed(path: Path, role: RoleRecord) -> str | None:
    file = path / role.file
    if not file.is_file():
        raise NnscalerError("not_a_program", f"{path} lacks {role.file}", help=_HELP)
    content = file.read_bytes()
    _check_text(file, content)
    return role.change(path, content)


def _changed_plan(path: Path, manifest: Manifest) -> str | None:
    """Return a note on a plan.json that says another plan than the program has; None on its own, or on none."""
    file = path / PLAN
    if not manifest.plan_document or not file.is_file():
        return None
    with suppress(ValueError):  # what is no JSON says nothing
        if json.loads(file.read_bytes()) == json.loads(manifest.plan_document):
            return None
    return f"{file} was changed after it was written: until the model is compiled again, the plan before counts"


def _check_text(file: Path, content: bytes) -> None:
    """Raise NnscalerError `not_a_program` with the line that is no UTF-8: Python would not read it either."""
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        place = SourceLocation(str(file), content.count(b"\n", 0, error.start) + 1)
        raise NnscalerError("not_a_program", f"{file} is not UTF-8: {error.reason}", place) from None
