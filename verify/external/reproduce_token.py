"""`nns3:...`: one run of verify-external as a word, from which `nnscaler reproduce` verifies exactly the same again.

The word packs (`verify.results.packed_json`) the check file, the script or the configuration with its digest, the
options, and the versions of nnscaler, torch and, where its models are verified, transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from shlex import quote, split
from typing import Any

from nnscaler.model_file import find_target
from verify.external.request import LIBRARY, ExternalRequest
from verify.results.file_digests import Source, changes, read_source
from verify.results.packed_json import WordKind, check_options
from verify.results.report import environment, version_of

PREFIX = "nns3:"
_WORDS = WordKind(PREFIX, "verify-external", 1 << 20, "which may run another program")
_CONFIGURATION = "config.json"  # of a local folder with a model's configuration
_APART = ("target", "script", "emit_script")  # fields of a request that a token has otherwise, or not at all


@dataclass(frozen=True, slots=True)
class ExternalToken:
    """
    source        the check file, the script's file, or a local configuration; None for a model of the library
    function      of a check file, where one is named; the whole target where there is no check file
    script        the script's words
    options       every other field of the request, by its name in Python
    transformers  its version; None where none of its models is verified
    """

    source: Source | None
    function: str
    script: str | None
    options: Mapping[str, Any]
    nnscaler: str
    torch: str
    transformers: str | None = None

    def changes(self) -> list[str]:
        """Return, as sentences, all that has changed since the token was made. Raises NnscalerError for a file that is
        gone."""
        told = changes((self.source,), self.torch)
        here = version_of("transformers")
        if self.transformers not in (None, here):
            told.append(f"found under transformers {self.transformers}, replayed under {here}")
        return told


def make_token(request: ExternalRequest) -> ExternalToken:
    """Return the token of a request. Raises NnscalerError `no_such_file`."""
    values = {field.name: getattr(request, field.name) for field in fields(request) if field.name not in _APART}
    options = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    here = environment()
    source, function = _source(request)
    library = version_of("transformers") if request.kind == "library" else None
    return ExternalToken(source, function, request.script, options, here["nnscaler"], here["torch"], library)


def _source(request: ExternalRequest) -> tuple[Source | None, str]:
    if request.kind == "script":
        file = script_file(request.script or "")
        return (None if file is None else Source.of(file)), ""
    if request.kind == "library":
        configuration = Path(request.target.removeprefix(LIBRARY)) / _CONFIGURATION
        return (Source.of(configuration) if configuration.is_file() else None), request.target
    file, function = find_target(request.target)
    return Source.of(file), function


def script_file(script: str) -> Path | None:
    """Return the Python file among a script's words; None where none of them is one, as with `-m module`."""
    return next((Path(word) for word in split(script) if word.endswith(".py") and Path(word).is_file()), None)


def request_of(token: ExternalToken) -> ExternalRequest:
    """Return what the token says is to be verified. Raises NnscalerError `bad_token` for options that are not known."""
    check_options(token.options, ExternalRequest, _APART)
    options: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in token.options.items()}
    target = token.function
    if token.script is None and token.source is not None and not target.startswith(LIBRARY):
        target = f"{token.source.path}::{token.function}" if token.function else token.source.path
    return ExternalRequest(target=target, script=token.script, **options)


def encode(token: ExternalToken) -> str | None:
    """Return the word; None where it would be too long for a command line."""
    return _WORDS.pack_short(asdict(token))


def decode(text: str) -> ExternalToken:
    """Raises NnscalerError `bad_token` for what is no token, or is one of another version of nnscaler."""
    return _WORDS.read(text, _token, _again)


def _again(document: Mapping[str, Any]) -> str:
    if document["script"] is not None:
        return f"nnscaler verify-external --torchrun {quote(document['script'])} ..."
    source = document["source"]
    target = document["function"] if source is None else source["path"]
    return f"nnscaler verify-external {quote(target)} ..."


def _token(document: Mapping[str, Any]) -> ExternalToken:
    texts = [document[name] for name in ("script", "transformers")]
    if any(text is not None and not isinstance(text, str) for text in texts) or not isinstance(
        document["options"], dict
    ):
        raise TypeError("script")
    return ExternalToken(
        read_source(document["source"]),
        str(document["function"]),
        document["script"],
        document["options"],
        str(document["nnscaler"]),
        str(document["torch"]),
        document["transformers"],
    )
