"""A JSON document as one word, to paste into a shell: a prefix and the base64 of what zlib makes of the text.

The words with which findings end (`nnscaler reproduce nns1:...`) are of a command and of a version of nnscaler, and
others refuse them.
"""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from shlex import join
from typing import Any, TypeVar

from nnscaler.errors import NnscalerError
from verify.results.report import environment

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
