"""The manifest of a program: what it is for, which rank runs which file, and what a step takes, as typed records.

The compiler makes it, `manifest.json` is the same entry by entry, and the runtime and the verification read it with
`read_manifest`. It stands on the standard library alone: ranks import it, and so does a command line before torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from nnscaler.records_as_json import RecordError, decode, encode

MANIFEST = "manifest.json"  # a folder with this file is a program
PLAN = "plan.json"  # beside it: the plan by which it was compiled
FORMAT = 1  # of the programs that are written and read
Axes = tuple[tuple[str, int], ...]  # (name, size) of each mesh axis, the outermost first


class ManifestError(Exception):
    """Say why a folder's manifest cannot be read, and name the file and the entry. `missing`: entries that it lacks."""

    def __init__(self, message: str, missing: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.missing = missing


class NoManifest(ManifestError):
    """Say that a folder has no manifest: it is no program."""


@dataclass(frozen=True, slots=True)
class RoleRecord:
    """A role file.

    file    name in the folder
    sha256  of its text as it was generated
    ranks   that run it
    stages  that it has
    """

    file: str
    sha256: str
    ranks: tuple[int, ...]
    stages: tuple[int, ...]

    def change(self, folder: Path, text: bytes) -> str | None:
        """Return a note on a text that is not the one that was generated; None on one that is."""
        same = hashlib.sha256(text).hexdigest() == self.sha256
        return None if same else f"{folder / self.file} was changed after it was generated"


@dataclass(frozen=True, slots=True)
class InputRecord:
    """An input of the model. `shape`: of the global batch."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class ParameterRecord:
    """A parameter of the model.

    fqns       all its names; a tied one has several
    shape      of the logical tensor
    dtype      by its name in torch
    trainable  it has a gradient
    used       some operation reads it
    """

    fqns: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    used: bool


@dataclass(frozen=True, slots=True)
class BufferRecord:
    """A buffer of the model. `fqns`: all its names; `shape`: of the logical tensor."""

    fqns: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class ResultRecord:
    """A tensor that the model returns. `shape`: of the logical tensor; `ranks`: of the stage that makes it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Returns:
    """The results of the model. `structure`: how (`nnscaler.runtime.output_structure`), empty where it is the loss
    alone; `results`: the tensors, the loss first."""

    structure: str = ""
    results: tuple[ResultRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A logical tensor in the folder. `sha256`: of its bytes; None where it has no data (on the meta device)."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str | None


@dataclass(frozen=True, slots=True)
class OperatorFile:
    """A file of the user's operators.

    file       its absolute path
    sha256     as it was when the program was compiled; None where it was no longer there
    from_here  its path from the program's folder, since both may be moved together; None before it is saved
    imports    dotted name -> hash of each file of the user's that it imports; None in programs of older versions
    """

    file: str
    sha256: str | None
    from_here: str | None = None
    imports: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class AxisVolume:
    """The calls of one collective over one axis in a step, and the elements that they send."""

    axis: str
    collective: str
    calls: float
    elements: float


@dataclass(frozen=True, slots=True)
class When:
    """A time within a step.

    text    in words
    first   position of the first call among the instructions of the ranks that call; None outside of the schedule
    last    position of the last call
    of      how many instructions there are
    """

    text: str
    first: int | None
    last: int | None
    of: int


@dataclass(frozen=True, slots=True)
class CommunicationTotal:
    """Sums over classes of one axis of the mesh, kind of collective, and direction: forward, backward, recompute,
    parameter, gradient or loss. `calls`: over all groups; `bytes`: over all ranks."""

    axis: str
    kind: str
    direction: str
    calls: int
    bytes: int


@dataclass(frozen=True, slots=True)
class CommunicationClass:
    """Equal calls of one stage in a step.

    kind         of the collective, or "send/recv"
    direction    forward, backward, recompute, parameter, gradient or loss
    stage        that calls
    to_stage     the other stage of a message
    axis         of the mesh
    group        the ranks of the first group, as text
    group_size   ranks of a group
    groups       how many groups make the calls
    dtype        of the tensor
    reduction    of a reducing collective
    bytes        that a rank hands to one call
    calls        per step and rank of a group
    total_bytes  per step, over all ranks that hand something over
    wire_bytes   that one rank sends in one step, in a ring algorithm
    when         in a step
    module       the part of the model that causes it, layers written `*`
    where        file and line that cause it
    """

    kind: str
    direction: str
    stage: int
    to_stage: int | None
    axis: str
    group: str
    group_size: int
    groups: int
    dtype: str
    reduction: str
    bytes: int
    calls: int
    total_bytes: int
    wire_bytes: int
    when: When
    module: str
    where: str


@dataclass(frozen=True, slots=True)
class CommunicationProfile:
    """The communication of one step; docs/reports/comm-profile.schema.json, of this `version`, describes it. `unit`: of
    the numbers, in words; `totals`: largest first; `classes`: in the order of stages and of first occurrence."""

    version: int
    unit: str
    totals: tuple[CommunicationTotal, ...]
    classes: tuple[CommunicationClass, ...]


@dataclass(frozen=True, slots=True)
class Bar:
    """The time in which an instruction runs, in the unit of the timeline: a pass of a micro-batch through a stage.
    `kind`: F forward, B backward, I and W the two halves of one."""

    kind: str
    stage: int
    micro: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class TimelineRow:
    """The bars of one role. `ranks`: as text."""

    role: int
    ranks: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True)
class TimelineRows:
    """A timeline for drawing. `unit`: the meaning of one unit of time, in words; `rows`: one per role; `makespan`: in
    units; `bubble`: the idle fraction."""

    unit: str
    rows: tuple[TimelineRow, ...]
    makespan: float
    bubble: float


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes on one rank of a stage, on that with the largest shards. Several stages of one role add up (`rank_memory`).

    ranks        as text
    parameters   as they rest, and as they are read where that is another tensor; with buffers and constants
    gradients    as they are added up over micro-batches
    activations  of all micro-batches in flight, when the stages of the role keep most together
    total        at the moment of the step when most is held
    optimizer    its states; 0 in programs of older versions, which did not count them
    """

    stage: int
    role: int
    ranks: str
    parameters: int
    gradients: int
    activations: int
    total: int
    optimizer: int = 0


def rank_memory(rows: Sequence[StageMemory]) -> list[tuple[list[int], StageMemory]]:
    """Return, by role, its stages and what they hold together."""
    found = []
    for role in sorted({row.role for row in rows}):
        own = [row for row in rows if row.role == role]
        names = ("parameters", "gradients", "activations", "total", "optimizer")
        held = {name: sum(getattr(row, name) for row in own) for name in names}
        found.append(([row.stage for row in own], replace(own[0], **held)))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """All entries of `manifest.json`, in its order.

    format                 of the folder
    nnscaler, torch        versions that compiled it
    model                  its name and file, and the loss function outside of it where there is one
    ranks                  how many run it
    plan                   in words, as `Plan.describe` gives it
    plan_document          itself, as plan.json was written; empty in programs of older versions, which have that alone
    axes                   of the mesh, `pp` included
    stage_axes             of each stage where they differ; else empty
    micro_batches          of a step
    schedule               its name
    roles                  in the order of pipeline devices
    inputs, parameters, buffers   of the model
    returns                what the model returns; empty in programs of older versions
    tensors                stage -> variable -> (logical tensor, layout); it is told, and never trusted
    communication          by axis and collective
    matmul_flops_divided   axis -> the fraction of the FLOPs of matmul-like operations that it divides
    unannotated            operators without annotation, which run whole on every rank
    operator_files         by name as it stands in the role files
    communication_profile, timeline, memory   of a step; None and empty in programs of older versions
    state                  name -> what lies in state.pt
    batch                  input -> what lies in inputs.pt
    """

    format: int
    nnscaler: str = ""
    torch: str = ""
    model: Mapping[str, str] = field(default_factory=dict)
    ranks: int
    plan: str = ""
    plan_document: str = ""
    axes: Axes
    stage_axes: tuple[Axes, ...] = ()
    micro_batches: int
    schedule: str
    roles: tuple[RoleRecord, ...]
    inputs: tuple[InputRecord, ...]
    parameters: tuple[ParameterRecord, ...] = ()
    buffers: tuple[BufferRecord, ...] = ()
    returns: Returns = Returns()
    tensors: Mapping[int, Mapping[str, tuple[str, str]]]
    communication: tuple[AxisVolume, ...] = ()
    matmul_flops_divided: Mapping[str, float] = field(default_factory=dict)
    unannotated: tuple[str, ...] = ()
    operator_files: Mapping[str, OperatorFile] = field(default_factory=dict)
    communication_profile: CommunicationProfile | None = None
    timeline: TimelineRows | None = None
    memory: tuple[StageMemory, ...] = ()
    state: Mapping[str, StoredTensor]
    batch: Mapping[str, StoredTensor]

    @property
    def role_files(self) -> list[str]:
        """The names of the role files."""
        return [role.file for role in self.roles]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the global batch, by input."""
        return {entry.name: entry.shape for entry in self.inputs}

    @property
    def tied(self) -> list[tuple[str, ...]]:
        """All names of each parameter and buffer that has several."""
        stored: tuple[ParameterRecord | BufferRecord, ...] = (*self.parameters, *self.buffers)
        return [entry.fqns for entry in stored if len(entry.fqns) > 1]

    @property
    def divided_axes(self) -> str:
        """The axes of more than one rank: `dp=2 tp=2`."""
        return " ".join(f"{axis}={size}" for axis, size in self.axes if size > 1)

    @property
    def shards_parameters(self) -> bool:
        """Return whether parameters rest in shards (ZeRO). Of the entries only the plan's words say so."""
        return "zero=" in self.plan

    def role_of(self, rank: int) -> RoleRecord | None:
        """Return the role that a rank runs; None for a rank that the program does not have."""
        return next((role for role in self.roles if rank in role.ranks), None)

    def to_json(self) -> str:
        """Return the text of `manifest.json`."""
        return json.dumps(encode(self), indent=1) + "\n"


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a program's folder. Raises ManifestError, and NoManifest where there is none to read."""
    file = folder / MANIFEST
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except OSError:
        raise NoManifest(f"{folder} has no {MANIFEST}") from None
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{file} is not JSON: {error}") from None
    if isinstance(manifest, dict) and manifest.get("format", FORMAT) != FORMAT:
        raise ManifestError(f"{file} has format {manifest['format']!r}, and this nnscaler reads format {FORMAT}")
    try:
        return decode(Manifest, manifest)
    except RecordError as error:
        if error.at:
            raise ManifestError(f"{file}: {error}") from None
        raise ManifestError(f"{file} {error}", error.missing) from None
