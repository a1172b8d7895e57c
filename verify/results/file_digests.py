"""Files that a run was made of, with the digests that tell whether they have changed since."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nnscaler.errors import NnscalerError
from verify.results.report import environment


@dataclass(frozen=True, slots=True)
class Source:
    """A file, or a folder with a program; `path` is relative to the directory of the run where it lies inside."""

    path: str
    sha256: str

    @staticmethod
    def of(path: str | Path) -> Source:
        """Return the file as it is now. Raises NnscalerError `no_such_file`."""
        absolute = os.path.abspath(path)
        inside = Path(absolute).is_relative_to(Path.cwd())
        return Source(Path(os.path.relpath(absolute)).as_posix() if inside else absolute, digest(Path(absolute)))

    def changed(self) -> bool:
        """Return whether the file's content has changed. Raises NnscalerError `no_such_file` where the file is gone."""
        return digest(Path(self.path)) != self.sha256


def read_source(document: Any) -> Source | None:
    """Return the source of its JSON document; None for none. Raises KeyError and TypeError for what is no document."""
    return None if document is None else Source(str(document["path"]), str(document["sha256"]))


def changes(sources: Iterable[Source | None], torch: str) -> list[str]:
    """Return, as sentences, all that has changed since a run of these files under this version of torch.

    Raises NnscalerError `no_such_file` where a file is gone.
    """
    changed = [source.path for source in sources if source is not None and source.changed()]
    told = [f"{path} was changed since the token was made" for path in changed]
    here = environment()["torch"]
    return told + ([f"found under torch {torch}, replayed under {here}"] if torch != here else [])


def digest(path: Path) -> str:
    """Digest a file's bytes, or all files of a folder. Raises NnscalerError `no_such_file`."""
    whole = hashlib.sha256()
    try:
        if not path.is_dir():
            return hashlib.sha256(path.read_bytes()).hexdigest()
        for file in sorted(path.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                whole.update(f"{file.relative_to(path).as_posix()}\0{digest(file)}\n".encode())
    except OSError as error:
        help = "run it in the directory in which it was found: the token names files relative to that"
        raise NnscalerError("no_such_file", f"cannot read {path}: {error.strerror}", help=help) from None
    return whole.hexdigest()
