"""A request as one word, from which `nnscaler reproduce` verifies exactly the same again.

The word is of a JSON document: a prefix and the base64 of what zlib makes of the text. It packs the fields of the
request, the files that they name with their digests, and the versions of what it ran on. The words with which findings
end (`nnscaler reproduce nns1:...`) are of a command and of a version of nnscaler, and others refuse them.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from shlex import join
from typing import Any, Generic, TypeVar

from nnscaler.errors import NnscalerError
from verify.results.report import environment, version_of

T = TypeVar("T")
LONGEST = 60_000  # characters of a word that still fits into a command line


class Damaged(Exception):
    """The word is not one that `pack` made, or not the whole of it."""


def pack(prefix: str, document: dict[str, Any]) -> str:
    """Return the word."""
    packed = zlib.compress(json.dumps(document, separators=(",", ":")).encode(), 9)
    return prefix + base64.urlsafe_b64encode(packed).decode().rstrip("=")


def unpack(prefix: str, word: str, largest: int) -> dict[str, Any]:
    """Return the document; `largest` bounds its bytes. Raises Damaged."""
    body = word.removeprefix(prefix)
    try:
        packed = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(packed, largest)
        if unpacker.unconsumed_tail or not unpacker.eof:
            raise Damaged("too long, or cut off")
        document = json.loads(data)
    except (binascii.Error, zlib.error, ValueError, RecursionError) as error:
        raise Damaged(str(error)) from None
    if not isinstance(document, dict):
        raise Damaged("not a document")
    return document


@dataclass(frozen=True, slots=True)
class WordKind:
    """The words of one command.

    prefix     with which they begin: "nns2:"
    tool       the command that makes them: "verify-plan"
    largest    bytes of JSON: a word that unpacks to more is not ours
    otherwise  why another version of nnscaler cannot replay one, as the end of a sentence
    """

    prefix: str
    tool: str
    largest: int
    otherwise: str

    def pack(self, fields: dict[str, Any]) -> str:
        """Return the word of a document with these fields."""
        return pack(self.prefix, {"tool": self.tool, **fields})

    def pack_short(self, fields: dict[str, Any]) -> str | None:
        """Return the word; None where it would be too long for a command line."""
        word = self.pack(fields)
        return word if len(word) <= LONGEST else None

    def read(self, text: str, make: Callable[[Mapping[str, Any]], T], again: Callable[[Mapping[str, Any]], str]) -> T:
        """Return what `make` gives for the document of a word, which may be wrapped over lines.

        `again`: the command line that verifies anew, for a word of another version. Raises NnscalerError `bad_token`
        for what is no such word, or is one of another version of nnscaler.
        """
        word = "".join(text.split())
        help = (
            f"a finding of `nnscaler {self.tool}` ends with the line `reproduce: nnscaler reproduce {self.prefix}...`"
        )
        if not word.startswith(self.prefix):
            raise NnscalerError("bad_token", f"{word[:20]!r} is no token: one starts with {self.prefix!r}", help=help)
        here = environment()["nnscaler"]
        try:
            document = unpack(self.prefix, word, self.largest)
            found = str(document["nnscaler"])
            if document["tool"] != self.tool:
                raise Damaged("of another tool")
            if found == here:
                return make(document)
            line = again(document)
        except (Damaged, ValueError, KeyError, TypeError, AttributeError, IndexError):
            raise NnscalerError("bad_token", "the token is damaged: it must be copied whole", help=help) from None
        message = f"the token is of nnscaler {found}, and this is nnscaler {here}, {self.otherwise}"
        raise NnscalerError("bad_token", message, help=f"verify again: {line}")


def reproduce_line(word: str | None, command: Sequence[str]) -> str:
    """Return the line that runs the same again; `command`, the present line, where there is no word."""
    return join(command if word is None else ["nnscaler", "reproduce", word])


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
