"""Print `--comm-profile`: the communication of one step of a program, as a table or as JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nnscaler.atomic_writes import write_text
from nnscaler.errors import NnscalerError
from nnscaler.manifest import CommunicationClass, CommunicationProfile, StageMemory, rank_memory
from nnscaler.records_as_json import encode

if TYPE_CHECKING:
    from nnscaler.cli.output.console import Console

HELP = (
    "print every class of collectives of a step: kind, group, bytes, calls, when it runs and what in the model causes "
    "it; json=PATH writes them to a file instead"
)
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


@dataclass(frozen=True, slots=True)
class ProfileOutput:
    """`path` None: print the full table."""

    path: str | None = None


def add_option(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add --comm-profile; `options.comm_profile` is None where it is not given."""
    parser.add_argument(
        "--comm-profile",
        type=profile_output,
        nargs="?",
        const=ProfileOutput(),
        metavar="json=PATH",
        help=HELP,
    )


def profile_output(text: str) -> ProfileOutput:
    """Parse the value of --comm-profile."""
    name, _, path = text.partition("=")
    if name != "json" or not path:
        raise argparse.ArgumentTypeError(f"{text!r} is not json=PATH (for the table, put --comm-profile last)")
    return ProfileOutput(path)


def show_profile(profile: CommunicationProfile | None, output: ProfileOutput | None, console: Console) -> None:
    """Print or write the `communication_profile` of a manifest, as `output` asks. Without `output`, nothing.

    Raises NnscalerError: `not_a_program` for a program without a profile, `cannot_write`.
    """
    if output is None:
        return
    profile = known_profile(profile)
    if output.path is None:
        for line in class_lines(profile):
            console.result(line)
        return
    write_text(output.path, json.dumps(encode(profile), indent=1) + "\n")


def known_profile(profile: CommunicationProfile | None) -> CommunicationProfile:
    """Return the profile, if there is one. Raises NnscalerError `not_a_program`."""
    if profile is None:
        message = "the program has no communication profile: an older version compiled it"
        raise NnscalerError("not_a_program", message, help="compile it again")
    return profile


def total_lines(profile: CommunicationProfile) -> list[str]:
    """Return a line per axis, kind and direction, largest first."""
    rows = [(t.axis, t.kind, t.direction, f"{t.calls:,}", bytes_text(t.bytes)) for t in profile.totals]
    if not rows:
        return ["communication: none"]
    return text_table(("axis", "collective", "direction", "calls a step", "bytes a step"), rows, right=(3, 4))


def memory_lines(memory: Sequence[StageMemory]) -> list[str]:
    """Return a line with the bytes that a rank is estimated to hold, of all of its stages together; ranks that hold the
    same share one."""
    merged: dict[tuple[int, ...], list[int]] = {}
    for stages, held in rank_memory(memory):
        key = (held.parameters, held.gradients, held.optimizer, held.activations, held.total)
        merged.setdefault(key, []).extend(stages)
    rows = [(_stages(stages), *map(bytes_text, key)) for key, stages in merged.items()]
    heads = ("stages", "parameters", "gradients", "optimizer", "activations", "at most on a rank")
    return text_table(heads, rows, right=(1, 2, 3, 4, 5)) if rows else []


def class_lines(profile: CommunicationProfile) -> list[str]:
    """Return a line per class, largest first; stages that do the same share one."""
    merged: dict[object, list[CommunicationClass]] = {}
    for e in profile.classes:
        key = (e.kind, e.direction, e.axis, e.group_size, e.dtype, e.bytes, e.calls, e.module)
        merged.setdefault(key, []).append(e)
    rows = []
    for found in sorted(merged.values(), key=lambda entries: -sum(e.total_bytes for e in entries)):
        first = found[0]
        rows.append(
            (
                first.kind,
                first.direction,
                first.axis,
                _stages(e.stage for e in found),
                f"{first.group_size} ({first.group})",
                str(sum(e.groups for e in found)),
                f"{bytes_text(first.bytes)} {first.dtype}",
                str(first.calls),
                bytes_text(sum(e.total_bytes for e in found)),
                _when(first, len(found)),
                f"{first.module} {first.where}".rstrip(),
            )
        )
    heads = (
        "collective", "direction", "axis", "stages", "ranks", "groups", "bytes a call", "calls", "bytes a step", "when",
        "cause",
    )  # fmt: skip
    return text_table(heads, rows, right=(5, 7, 8)) if rows else ["communication: none"]


def _when(entry: CommunicationClass, stages: int) -> str:
    when = entry.when
    if stages > 1:
        return when.text.replace(f"of stage {entry.stage}", "of its stage")
    span = f" ({when.first} to {when.last} of {when.of})" if when.first is not None else ""
    return f"{when.text}{span}"


def _stages(numbers: Iterable[int]) -> str:
    listed = sorted(set(numbers))
    if len(listed) > 2 and listed[-1] - listed[0] == len(listed) - 1:
        return f"{listed[0]}-{listed[-1]}"
    return ",".join(map(str, listed))


def bytes_text(count: float) -> str:
    """`1.5 GiB`."""
    size = float(count)
    for unit in _UNITS[:-1]:
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} {_UNITS[-1]}"


def text_table(heads: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int]) -> list[str]:
    """Return a line per row, below the heads. `right`: columns that are set to the right."""
    widths = [max(len(row[i]) for row in (heads, *rows)) for i in range(len(heads))]
    return [
        "  ".join(cell.rjust(widths[i]) if i in right else cell.ljust(widths[i]) for i, cell in enumerate(row)).rstrip()
        for row in (heads, *rows)
    ]
