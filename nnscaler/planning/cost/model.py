"""What an operation and a collective cost, whoever says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from nnscaler.transform.signature import Signature


@dataclass(frozen=True, slots=True)
class AxisPlace:
    size: int
    inner: int = 1


class CostModel(Protocol):
    @property
    def identity(self) -> str: ...

    def compute(
        self,
        signature: Signature,
        shapes_in: Sequence[tuple[int, ...]],
        shapes_out: Sequence[tuple[int, ...]],
        dtype: str,
    ) -> tuple[float, float]: ...

    def collective(self, kind: str, bytes: float, ranks: AxisPlace) -> float: ...
