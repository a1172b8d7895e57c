"""Runs that did not end: what it means that ranks raised, disagreed, waited for each other, died or ran out of time.

The reference ran on the same batch before, so a program that cannot is refuted. Only a time-out with ranks that were
still computing decides nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from op_registry.spec import SourceLocation

from verify.programs.role_text import SourceMap, describe_line
from verify.results.finding import Finding
from verify.results.verdict import Verdict

Kind = Literal["communication_mismatch", "deadlock", "rank_raises", "rank_died", "timed_out"]
_KEY = re.compile(r"key \((?P<tensor>[^\s@)]+)")
_SUMMED = re.compile(r"the gradient sum of (?P<names>`[^`]+`(?:, `[^`]+`)*)")
_PLACE = re.compile(r"(?P<file>[^\s:]+\.py):(?P<line>\d+)")


@dataclass(frozen=True, slots=True)
class Failure:
    """The way in which a run of the program failed.

    message       the text of the runtime
    rank          the rank that failed first, where that is known
    waiting       rank -> the call that it waited for, where that is known
    from_outside  the cause may be the machine (killed for memory), not the program
    """

    kind: Kind
    message: str
    rank: int | None = None
    waiting: Mapping[int, str] = field(default_factory=dict)
    from_outside: bool = False

    @property
    def verdict(self) -> Verdict:
        return Verdict.INCONCLUSIVE if self.kind == "timed_out" or self.from_outside else Verdict.REFUTED


def finding_of(failure: Failure, program: Path, places: SourceMap) -> Finding:
    """Return the finding, with places in the model and in the program, which is in the folder `program`.

    The lines of the generated program that the failure names are looked up, so that the finding names the tensors:
    those of collectives first, for a rank that left one out makes others wait for messages.
    """
    text = "\n".join([failure.message, *failure.waiting.values()])
    named = _named_lines(text, program)
    lines = [line for place in named if (line := describe_line(place.file, place.line)) is not None]
    related = tuple(("generated program", SourceLocation(line.file, line.line, line.text)) for line in lines)
    messages = [m["tensor"] for m in _KEY.finditer(text)]
    summed = [name for m in _SUMMED.finditer(text) for name in m["names"].strip("`").split("`, `")]
    names = [*(name for line in lines if not line.is_arguments for name in line.names), *summed, *messages]
    tensor = " at " + ", ".join(f"`{name}`" for name in dict.fromkeys(names)) if names else ""
    parameters = places.of_parameters() if summed else {}
    found = [
        *(places.of_line(line.model) for line in lines),
        *(parameters.get(name) for name in summed),
        *(places.of_tensor(name) for name in messages),
    ]
    where = next((place for place in found if place is not None), None)
    facts = {f"rank {rank}": waits for rank, waits in sorted(failure.waiting.items())}
    if failure.rank is not None:
        facts = {"rank": str(failure.rank), **facts}
    first, *rest = failure.message.splitlines()
    for number, detail in enumerate(rest):
        facts.setdefault(
            f"detail {number}" if ":" not in detail else detail.split(":")[0].strip(), _after_colon(detail)
        )
    return Finding(
        failure.kind, _message(failure, first, tensor), where, facts, help=_HELP[failure.kind], related=related
    )


def _message(failure: Failure, first: str, tensor: str) -> str:
    match failure.kind:
        case "deadlock":
            return f"the program hangs{tensor}: every rank that still runs waits for another one"
        case "communication_mismatch":
            return f"ranks disagree on a communication{tensor}: {first.rstrip(':')}"
        case "rank_raises":
            return f"the program raises{tensor}, the model does not: {first}"
        case "rank_died":
            return f"a rank's process ended without a result: {first}"
    return f"the time was up while ranks were computing: {first}"


_HELP: Mapping[str, str | None] = {
    "deadlock": "the ranks of a group must make the same calls in the same order, and every send needs its recv",
    "communication_mismatch": "the ranks of a group must make the same calls in the same order",
    "rank_raises": None,
    "rank_died": "a kernel may crash of unchecked sizes; a process that is killed for memory leaves no other trace",
    "timed_out": "give it more time: --timeout SECONDS",
}


def _named_lines(text: str, program: Path) -> list[SourceLocation]:
    """Return the lines of the program that a text names, each once, the first three."""
    every = (SourceLocation(m["file"], int(m["line"])) for m in _PLACE.finditer(text))
    found = dict.fromkeys(place for place in every if Path(place.file).resolve().is_relative_to(program.resolve()))
    return list(found)[:3]


def _after_colon(text: str) -> str:
    return text.partition(":")[2].strip() or text.strip()
