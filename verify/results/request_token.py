"""A request as one word, from which `nnscaler reproduce` verifies exactly the same again.

The word packs (`verify.results.packed_json`) the fields of the request, the files that they name with their digests,
and the versions of what it ran on.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Generic, TypeVar

from nnscaler.errors import NnscalerError
from verify.results.packed_json import WordKind
from verify.results.report import version_of

Request = TypeVar("Request")


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


@dataclass(frozen=True, slots=True)
class RequestToken:
    """
    request   its fields, with the paths of `sources`
    sources   the files that decide what is run
    nnscaler  its version
    versions  those of other packages on which it ran
    """

    request: Mapping[str, Any]
    sources: tuple[Source, ...]
    nnscaler: str
    versions: Mapping[str, str]

    @staticmethod
    def of(request: Any, sources: tuple[Source, ...], packages: tuple[str, ...] = ("torch",)) -> RequestToken:
        """Return the token of a request that names its files by the paths of these sources."""
        values = {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(request).items()}
        return RequestToken(values, sources, version_of("nnscaler"), {name: version_of(name) for name in packages})

    def changes(self) -> list[str]:
        """Return, as sentences, all that has changed since the token was made.

        Raises NnscalerError `no_such_file` where a file is gone.
        """
        told = [f"{source.path} was changed since the token was made" for source in self.sources if source.changed()]
        for name, version in self.versions.items():
            if version != (here := version_of(name)):
                told.append(f"found under {name} {version}, replayed under {here}")
        return told


@dataclass(frozen=True, slots=True)
class RequestWords(Generic[Request]):
    """The words of one command.

    kind     of words
    request  its class
    again    from the fields of a request: the words of a command line that verifies anew
    """

    kind: WordKind
    request: type[Request]
    again: Callable[[Mapping[str, Any]], str]

    def encode(self, token: RequestToken) -> str | None:
        """Return the word; None where it would be too long for a command line."""
        return self.kind.pack_short(asdict(token))

    def decode(self, text: str) -> RequestToken:
        """Raises NnscalerError `bad_token` for what is no token, or is one of another version of nnscaler."""
        return self.kind.read(text, _token, lambda document: f"nnscaler {self.again(document['request'])} ...")

    def request_of(self, token: RequestToken) -> Request:
        """Return what the token says is to be verified. Raises NnscalerError `bad_token` for fields that are not known;
        those that came later than the token are as they were."""
        unknown = sorted(set(token.request) - {field.name for field in fields(self.request)})  # type: ignore[arg-type]
        if unknown:
            raise NnscalerError("bad_token", f"the token has options that this nnscaler lacks: {', '.join(unknown)}")
        return self.request(**{name: tuple(v) if isinstance(v, list) else v for name, v in token.request.items()})


def _token(document: Mapping[str, Any]) -> RequestToken:
    request, sources = document["request"], document["sources"]
    if not isinstance(request, dict):
        raise TypeError("request")
    found = tuple(Source(str(source["path"]), str(source["sha256"])) for source in sources)
    return RequestToken(request, found, str(document["nnscaler"]), dict(document["versions"]))
