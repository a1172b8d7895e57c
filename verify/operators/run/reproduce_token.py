"""`nns1:...`: one finding as a word, from which `nnscaler reproduce` replays exactly its case.

The word is the base64 of zlib-packed JSON: the operator's address, the annotation that was given, the finding's code,
the seed, the case, and the versions of nnscaler and torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from shlex import quote
from typing import Any, get_args

from nnscaler.ir.operation_placement import Choice, RunPartial, Split
from nnscaler.records_as_json import with_tuples
from verify.evidence.split_case import Inputs, SplitCase
from verify.evidence.verify_op_options import Kind
from verify.results.request_tokens import WordKind

PREFIX = "nns1:"
_WORDS = WordKind(PREFIX, "verify-op", 1 << 16, "which may mean something else by its cases")


@dataclass(frozen=True, slots=True)
class Token:
    """
    samples  the name of the function that was given for sample inputs
    case     None for a finding about the operator itself, which is found again by verifying it
    modules  what must be imported for the address to be known
    """

    address: str
    annotation: str | None
    samples: str | None
    code: str
    seed: int
    case: SplitCase | None
    modules: tuple[str, ...]
    nnscaler: str
    torch: str


def encode(token: Token) -> str:
    """Return the word."""
    document = {
        "target": token.address,
        "annotation": token.annotation,
        "samples": token.samples,
        "code": token.code,
        "seed": token.seed,
        "case": None if token.case is None else _case(token.case),
        "nnscaler": token.nnscaler,
        "torch": token.torch,
        "modules": list(token.modules),
    }
    return _WORDS.pack(document)


def decode(text: str) -> Token:
    """Raises NnscalerError `bad_token` for what is no token, or is one of another version of nnscaler."""
    return _WORDS.read(text, _token, _again)


def _again(document: Mapping[str, Any]) -> str:
    return f"nnscaler verify-op {quote(str(document.get('target')))} --seed {document.get('seed')}"


def _token(document: Mapping[str, Any]) -> Token:
    annotation, samples, case = document["annotation"], document["samples"], document["case"]
    if any(text is not None and not isinstance(text, str) for text in (annotation, samples)):
        raise TypeError("annotation")
    return Token(
        str(document["target"]),
        annotation,
        samples,
        str(document["code"]),
        int(document["seed"]),
        None if case is None else _read_case(case),
        tuple(map(str, document["modules"])),
        str(document["nnscaler"]),
        str(document["torch"]),
    )


def _case(case: SplitCase) -> dict[str, Any]:
    return {
        "inputs": {name: value for name, value in asdict(case.inputs).items() if value not in ((), None)},
        "choices": [_choice(choice) for choice in case.choices],
        "parts": list(case.parts),
        "uneven": case.uneven,
    }


def _choice(choice: Choice) -> dict[str, Any]:
    if isinstance(choice, Split):
        slices = {"slices": True} if choice.prefix else {}
        return {"split": choice.identifier, "outer": choice.outer, "sections": list(choice.sections), **slices}
    if isinstance(choice, RunPartial):
        return {"partial": sorted(choice.slots)}
    raise TypeError(f"{choice} is no choice of a case")


def _read_case(document: Mapping[str, Any]) -> SplitCase:
    inputs = Inputs(**{"sample": None, **{name: with_tuples(value) for name, value in document["inputs"].items()}})
    if inputs.kind not in get_args(Kind):
        raise ValueError("kind")
    choices = tuple(_read_choice(choice) for choice in document["choices"])
    parts = tuple(map(int, document["parts"]))
    if len(choices) != len(parts) or not choices:
        raise ValueError("parts")
    return SplitCase(inputs, choices, parts, bool(document["uneven"]))


def _read_choice(document: Mapping[str, Any]) -> Choice:
    if "partial" in document:
        return RunPartial(frozenset(map(int, document["partial"])))
    sections = tuple(map(int, document["sections"]))
    return Split(str(document["split"]), int(document["outer"]), sections, prefix=bool(document.get("slices")))
