"""`nns3:...`: one run of verify-external as a word."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from shlex import quote, split
from typing import Any

from nnscaler.model_file import find_target
from verify.external.request import LIBRARY, ExternalRequest
from verify.results.packed_json import WordKind
from verify.results.request_token import RequestToken, RequestWords, Source

PREFIX = "nns3:"
_CONFIGURATION = "config.json"  # of a local folder with a model's configuration


def _again(request: Mapping[str, Any]) -> str:
    script = request["script"]
    target = request["target"].partition("::")[0]
    return f"verify-external {quote(target) if script is None else f'--torchrun {quote(script)}'}"


_KIND = WordKind(PREFIX, "verify-external", 1 << 20, "which may run another program")
WORDS = RequestWords(_KIND, ExternalRequest, _again)


def make_token(request: ExternalRequest) -> RequestToken:
    """Return the token of a request. Raises NnscalerError `no_such_file`."""
    request = replace(request, emit_script=None)
    if request.kind == "script":
        file = script_file(request.script or "")
        return RequestToken.of(request, () if file is None else (Source.of(file),))
    if request.kind == "library":
        file = Path(request.target.removeprefix(LIBRARY)) / _CONFIGURATION
        sources = (Source.of(file),) if file.is_file() else ()
        return RequestToken.of(request, sources, ("torch", "transformers"))
    file, function = find_target(request.target)
    source = Source.of(file)
    target = f"{source.path}::{function}" if function else source.path
    return RequestToken.of(replace(request, target=target), (source,))


def script_file(script: str) -> Path | None:
    """Return the Python file among a script's words; None where none of them is one, as with `-m module`."""
    return next((Path(word) for word in split(script) if word.endswith(".py") and Path(word).is_file()), None)
