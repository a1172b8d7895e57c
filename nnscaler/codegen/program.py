"""A compiled program: role sources, manifest, plan, graph and state; and how it lies in a directory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nnscaler.errors import NnscalerError
from nnscaler.ir.graph import Graph
from nnscaler.ir.printer import print_graph
from nnscaler.transform.plan import Plan

FORMAT = 1


@dataclass(frozen=True)
class Program:
    """`sources`: file name -> text of a role. `state`: fqn -> logical tensor of the model. `inputs`: the sample batch.

    The same model, plan and versions give the same bytes.
    """

    sources: Mapping[str, str]
    manifest: Mapping[str, Any]
    plan: Plan
    graph: Graph
    state: Mapping[str, torch.Tensor]
    inputs: Mapping[str, torch.Tensor]

    def source(self, rank: int) -> str:
        """The text that this rank runs. Raises NnscalerError for a rank that the program does not have."""
        for role in self.manifest["roles"]:
            if rank in role["ranks"]:
                return self.sources[role["file"]]
        raise NnscalerError("no_such_rank", f"rank {rank} of a program for {self.manifest['ranks']} ranks")

    def save(self, directory: str | Path) -> Path:
        """Write the program; replaces a program that is there, and refuses a directory that holds anything else."""
        path = Path(directory)
        if path.exists() and any(path.iterdir()) and not (path / "manifest.json").exists():
            raise NnscalerError("not_a_program", f"{path} is not empty and holds no program", help="name another --out")
        path.mkdir(parents=True, exist_ok=True)
        for old in path.glob("role_*.py"):
            old.unlink()
        for name, text in self.sources.items():
            (path / name).write_text(text)
        (path / "plan.json").write_text(self.plan.to_json())
        (path / "graph.txt").write_text(print_graph(self.graph))
        if any(t.is_meta for t in self.state.values()):
            (path / "state.pt").unlink(missing_ok=True)
        else:
            torch.save({k: v.detach() for k, v in self.state.items()}, path / "state.pt")
        torch.save(dict(self.inputs), path / "inputs.pt")
        (path / "manifest.json").write_text(json.dumps(self.manifest, indent=1) + "\n")
        return path


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
