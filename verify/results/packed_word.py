"""A JSON document as one word, to paste into a shell: a prefix and the base64 of what zlib makes of the text."""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from typing import Any


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
