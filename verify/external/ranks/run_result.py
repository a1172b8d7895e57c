"""The result of a run of several ranks, and its failures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import torch

from op_registry.source_location import SourceLocation

from nnscaler.runtime.communication.communicator import CommunicationCall

T = TypeVar("T")

FAILURES = ("deadlock", "communication_mismatch", "rank_raises", "rank_died", "timed_out")


@dataclass(frozen=True)
class RankCall:
    """One call that a rank made to torch.distributed.

    kind       "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "scatter", "gather",
               "barrier", "send" or "recv"
    group      global ranks in the order of the group; (source, destination) for messages, -1 for any source
    shapes     of the tensors that this rank gives; of those that it takes where it gives none
    dtype      of these tensors; None without tensors
    reduction  "sum", "avg", "max" and so on; "" where nothing is reduced
    bytes      that this rank gives
    place      "file:line" of the innermost frame of the program; None where there is none
    phase      of the step, as `places.in_phase` named it; empty where it named none
    """

    kind: str
    group: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype | None
    reduction: str
    bytes: int
    place: str | None
    phase: str = ""

    @classmethod
    def of(cls, call: CommunicationCall, given: int) -> RankCall:
        """Make the record of a call that gives so many bytes."""
        return cls(call.kind, call.ranks, call.shapes, call.dtype, call.reduction, given, call.place, call.context)


@dataclass(frozen=True)
class RankRun(Generic[T]):
    """A run that ended well.

    results   of the function, by rank
    calls     of each rank, in its order; a tuple for every rank
    unwaited  functional collectives that no rank waited for
    forgotten lines that begin calls for none of which a rank waited: "all_reduce at check.py:12"
    """

    results: tuple[T, ...]
    calls: tuple[tuple[RankCall, ...], ...]
    unwaited: int = 0
    forgotten: tuple[str, ...] = ()


class RanksFailed(Exception):
    """A run of ranks that failed.

    code     one of FAILURES
    message  for people; of a deadlock or a mismatch it names the lines of the ranks that disagree
    rank     that failed first; None where it is not one rank's failure
    place    "file:line" of that rank, or of the first rank that waits; None where unknown
    by_rank  what each rank was doing, or its traceback
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        rank: int | None = None,
        place: str | None = None,
        by_rank: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        assert code in FAILURES, code
        super().__init__(message)
        self.code = code
        self.message = message
        self.rank = rank
        self.place = place
        self.by_rank: Mapping[int, str] = dict(by_rank)

    @property
    def where(self) -> SourceLocation | None:
        """Return the place as a finding names it."""
        file, _, line = (self.place or "").rpartition(":")
        return SourceLocation(file, int(line), "") if file and line.isdigit() else None

    def __reduce__(self) -> tuple[Any, ...]:
        return _failed, (self.code, self.message, self.rank, self.place, dict(self.by_rank))


def _failed(code: str, message: str, rank: int | None, place: str | None, by_rank: Mapping[int, str]) -> RanksFailed:
    return RanksFailed(code, message, rank=rank, place=place, by_rank=by_rank)
