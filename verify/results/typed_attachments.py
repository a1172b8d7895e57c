"""The attachments of a report: compared tensors, profiles of a step, what a proof rests on.

In JSON each is an entry of `attachments` with the names of its fields; docs/reports/report.schema.json describes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nnscaler.manifest import CommunicationProfile, StageMemory, TimelineRows
from nnscaler.records_as_json import encode
from verify.results.verdict import Verdict


@dataclass(frozen=True, slots=True)
class ComparedTensor:
    """One tensor that was compared: how far it was off, and what was allowed."""

    kind: str
    step: int
    name: str
    error: float
    allowed: float
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class LemmaRow:
    """A lemma that a proof relies on.

    text      what it says
    operator  of which it says it
    strength  how well it is shown
    blocker   why it is not shown for all sizes; empty where it is
    uses      lines of the program that rely on it
    """

    text: str
    operator: str
    strength: Verdict
    blocker: str
    uses: int


@dataclass(frozen=True, slots=True)
class Certificate:
    """The proof of a program, and what it rests on.

    proved         the text is right and every lemma holds
    graph          the hash of the model's graph
    roles          file -> hash of its text
    lines          statements that were typed
    classes        classes of equal lines
    rows           functions of the conversion table that are called
    weakest_lemma  in words; None where there are no lemmas
    sizes          for which sizes it holds, in words
    order          a total order of all instructions, so that no rank waits for ever
    assumed        in words
    environment    versions and platform
    """

    proved: bool
    graph: str
    roles: Mapping[str, str]
    lines: int
    classes: int
    rows: tuple[str, ...]
    weakest_lemma: str | None
    sizes: str | None
    order: tuple[str, ...]
    assumed: tuple[str, ...]
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Attachments:
    """The measurements of a report; None for what was not measured.

    timeline, communication_profile, memory   of a step, from the program's manifest
    tensors                                   every tensor that was compared
    lemmas, certificate                       what a static proof stands on
    """

    timeline: TimelineRows | None = None
    communication_profile: CommunicationProfile | None = None
    memory: tuple[StageMemory, ...] | None = None
    tensors: tuple[ComparedTensor, ...] | None = None
    lemmas: tuple[LemmaRow, ...] | None = None
    certificate: Certificate | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return what there is as JSON data, by name."""
        return {name: value for name, value in encode(self).items() if value is not None}
