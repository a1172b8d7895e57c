"""Rotate the checkpoints in the folder of a run: one a step, `last` and `best`, and what killed saves left."""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path

from nnscaler.runtime.training.saving.checkpoint import OLD, SAVING, read_run, recover
from nnscaler.runtime.training.saving.dcp import METADATA, Folder

_STEP = re.compile(r"step_(\d+)$")


class RunFolder:
    """The whole checkpoints in a folder. One rank changes it.

    keep  newest ones that stay, besides the best; None: all
    best  "min" or "max": which score is best
    """

    def __init__(self, path: Path, keep: int | None = None, best: str = "min") -> None:
        self.path, self.keep = path, keep
        self._sign = 1.0 if best == "min" else -1.0
        self._scores: dict[int, float | None] = {}

    def at(self, step: int) -> Path:
        """Return the checkpoint of a step."""
        return self.path / f"step_{step:06d}"

    def steps(self) -> list[int]:
        """Return the steps of which there is a whole checkpoint, in order."""
        found = [(m, path) for path in self.path.glob("step_*") if (m := _STEP.match(path.name))]
        return sorted(int(match[1]) for match, path in found if (path / METADATA).is_file())

    def newest(self) -> int:
        """Return the newest step, -1 where there is none; take back a checkpoint that was being replaced."""
        for path in self.path.glob(f"step_*{OLD}"):
            recover(path.with_name(path.name.removesuffix(OLD)))
        return max(self.steps(), default=-1)

    def best(self) -> int | None:
        """Return the step with the best score; the later of equal ones. One that is no number is none."""
        for step in self.steps():
            if step not in self._scores:
                self._scores[step] = read_run(Folder(self.at(step))).metric
        scores = {step: self._scores[step] for step in self.steps()}
        scored = {step: s * self._sign for step, s in scores.items() if s is not None and not math.isnan(s)}
        return min(scored, key=lambda step: (scored[step], -step)) if scored else None

    def clean(self) -> None:
        """Remove what killed saves left."""
        for path in self.path.glob(f"*{SAVING}"):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def rotate(self, new: int) -> None:
        """After the checkpoint of step `new`, remove those that need not stay, and let `last` and `best` point."""
        self._scores.pop(new, None)
        steps, best = self.steps(), self.best()
        self._point("last", new)
        if best is not None:
            self._point("best", best)
        for step in steps[: -self.keep] if self.keep else []:
            if step not in (best, new):
                gone = self.at(step).with_name(self.at(step).name + SAVING)  # one half removed is not taken for whole
                self.at(step).rename(gone)
                shutil.rmtree(gone, ignore_errors=True)

    def _point(self, name: str, step: int) -> None:
        link, new = self.path / name, self.path / f"{name}{SAVING}"
        new.unlink(missing_ok=True)
        new.symlink_to(self.at(step).name, target_is_directory=True)
        new.replace(link)
