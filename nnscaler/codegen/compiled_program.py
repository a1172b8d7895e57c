"""A compiled program as a record, and its directory: role sources, manifest, plan, graph and state."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import nnscaler
from nnscaler.atomic_writes import save_tensors, whole_folder
from nnscaler.errors import NnscalerError
from nnscaler.ir.graph import Graph
from nnscaler.ir.print_graph import print_graph
from nnscaler.manifest import MANIFEST, PLAN, Manifest
from nnscaler.transform.plan import Plan

if TYPE_CHECKING:
    from nnscaler import Engine


@dataclass(frozen=True)
class Origin:
    """The sources of a program, from which it is compiled again for a batch of another size.

    module         of the user; its tensors are those of the program
    rebuild        makes the module's arguments (positional, by keyword) from tensors by name
    loss_fn        outside of the model; None: forward returns the loss
    specialise     branches on data are those of the sample batch
    repeat_layers  as in `parallelize`
    resize         fits the module to a batch, before it is traced for it; None: it takes any
    modes          part -> whether it was in training mode when it was compiled; without an entry: as it is
    """

    module: torch.nn.Module
    rebuild: Callable[[Mapping[str, torch.Tensor]], tuple[tuple[Any, ...], dict[str, Any]]]
    loss_fn: Callable[..., torch.Tensor] | None = None
    specialise: bool = False
    repeat_layers: str = "auto"
    resize: Callable[[Mapping[str, torch.Tensor]], None] | None = None
    modes: Mapping[str, bool] = field(default_factory=dict)


@dataclass(frozen=True)
class Program:
    """A compiled program. The same model, plan and versions give the same bytes.

    sources    file name -> text of a role
    manifest   describes the program
    plan       by which it was partitioned
    graph      of the whole model
    state      fqn -> logical tensor of the model
    inputs     the sample batch
    origin     what it was compiled from; None for one that was compiled from a graph alone
    """

    sources: Mapping[str, str]
    manifest: Manifest
    plan: Plan
    graph: Graph
    state: Mapping[str, torch.Tensor]
    inputs: Mapping[str, torch.Tensor]
    origin: Origin | None = field(default=None, compare=False, repr=False)

    def source(self, rank: int) -> str:
        """Return the text that this rank runs. Raises NnscalerError for a rank that the program does not have."""
        role = self.manifest.role_of(rank)
        if role is None:
            raise NnscalerError("no_such_rank", f"rank {rank} of a program for {self.manifest.ranks} ranks")
        return self.sources[role.file]

    def start(self, **settings: Any) -> Engine:
        """Start the program on this rank, as `nnscaler.start(program, **settings)`."""
        return nnscaler.start(self, **settings)

    def save(self, directory: str | Path) -> Path:
        """Write the program, whole or not at all. A program that is there is replaced.

        Raises NnscalerError: `not_a_program` for a directory that holds anything else, `cannot_write`.
        """
        path = Path(directory)
        with whole_folder(path) as folder:
            for name, text in self.sources.items():
                (folder / name).write_text(text)
            (folder / PLAN).write_text(self.plan.to_json())
            (folder / "graph.txt").write_text(print_graph(self.graph))
            has_data = not any(t.is_meta for t in self.state.values())
            if has_data:
                save_tensors({k: v.detach() for k, v in self.state.items()}, folder / "state.pt")
            save_tensors(dict(self.inputs), folder / "inputs.pt")
            (folder / MANIFEST).write_text(self._manifest_at(path).to_json())
        for old in path.glob("role_*.py"):
            if old.name not in self.sources:
                old.unlink()
        if not has_data:
            (path / "state.pt").unlink(missing_ok=True)
        return path

    def _manifest_at(self, folder: Path) -> Manifest:
        """Return the manifest with the operators' files relative to the folder: both may be moved together."""
        files = {
            name: replace(entry, from_here=Path(os.path.relpath(entry.file, folder.absolute())).as_posix())
            for name, entry in self.manifest.operator_files.items()
        }
        return replace(self.manifest, operator_files=files)


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
