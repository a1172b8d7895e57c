"""The cost model of a measured profile; where it has no entry, the analytic model times its usual error for that
operator."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from statistics import median

from op_registry.registry import facts_of

from nnscaler.ir.operation_annotations import Signature
from nnscaler.planning.cluster.description import Cluster
from nnscaler.planning.cost.analytic import AnalyticCost
from nnscaler.planning.cost.build_machine_profile import Factors, operator_factors
from nnscaler.planning.cost.calls_to_measure import Key, key_of
from nnscaler.planning.cost.collectives import Curve, fit_curves
from nnscaler.planning.cost.measured_profile import CostEntry, Profile
from nnscaler.planning.cost.model_protocol import AxisPlace, Collective, Overheads, Shapes


@dataclass(frozen=True, slots=True)
class Coverage:
    """How complete a profile is.

    asked     number of different shards that were asked for
    missing   keys of those that the table lacks
    """

    asked: int
    missing: tuple[Key, ...]

    def describe(self) -> str:
        return f"{len(self.missing)} of {self.asked} shards are not in the profile"


@dataclass(frozen=True)
class TableCost:
    """A cost model from measurements.

    Nothing is interpolated: a shard is in the table, or it is predicted by the analytic model on the profile's machine
    times the operator's factor. Collectives inside of a host are lines through the measured ones. Its answers never
    change; that it remembers what it was asked serves `coverage` alone.

    profile   the measurements
    cluster   where the plan runs; None: the profile's machine
    ranks     that run at once and share the profile's machine; None: as many as were measured at once
    """

    profile: Profile
    cluster: Cluster | None = None
    ranks: int | None = None
    _asked: dict[Key, bool] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def identity(self) -> str:
        among = "" if self._share == 1.0 else f" {self.ranks}"
        text = f"{self.profile.identity} {self._links.identity}{among}"
        return f"table:{sha256(text.encode()).hexdigest()[:16]}"

    @property
    def measured(self) -> bool:
        return True

    @property
    def overheads(self) -> Overheads:
        found, share = self.profile.overheads, self._share
        if not self._is_measured_host:
            return replace(found, crowding=(), hidden=())
        return replace(
            found,
            statement=found.statement * share,
            again=found.again * share,
            step=found.step * share,
            moved=found.moved * share,
            crowding=found.crowding[: self.ranks],
            hidden=found.hidden[: self.ranks],
        )

    def among(self, ranks: int) -> TableCost:
        return replace(self, ranks=ranks)

    def compute(self, signature: Signature, shapes_in: Shapes, shapes_out: Shapes, dtype: str) -> tuple[float, float]:
        started, share = self.overheads.statement, self._share
        if facts_of(signature.call.operator).view:
            return started, 0.0
        key = key_of(signature, tuple(shapes_in), tuple(shapes_out), dtype)
        entry = self._entries.get(key)
        self._asked[key] = entry is not None
        if entry is not None:
            return started + share * entry.forward, share * entry.backward
        forward, backward = self._operators.compute(signature, shapes_in, shapes_out, dtype)
        factors = self._factors.get(signature.call.operator, self._usual)
        return started + share * forward * factors[0], share * backward * factors[1]

    def collective(self, kind: Collective, size: float, ranks: AxisPlace) -> float:
        predicted = self._links.collective(kind, size, ranks)
        cluster = self._links.cluster
        if ranks.size == 1 or cluster.spans[0] % (ranks.size * ranks.inner) or not self._is_measured_host:
            return predicted
        curve = self._curves.get((kind, ranks.size))
        return predicted if curve is None else curve.seconds(size)

    def copied(self, size: float) -> float:
        return self._share * self._operators.copied(size)

    def coverage(self) -> Coverage:
        """Return how many of the shards that were asked for so far the table has."""
        return Coverage(len(self._asked), tuple(key for key, found in self._asked.items() if not found))

    @cached_property
    def _entries(self) -> dict[Key, CostEntry]:
        return {entry.key: entry for entry in self.profile.operators}

    @cached_property
    def _operators(self) -> AnalyticCost:
        return AnalyticCost(self.profile.cluster)

    @cached_property
    def _links(self) -> AnalyticCost:
        return AnalyticCost(self.cluster or self.profile.cluster)

    @cached_property
    def _is_measured_host(self) -> bool:
        """True where the innermost links are those that were measured."""
        return self._links.cluster.levels[0].name == self.profile.cluster.levels[0].name

    @cached_property
    def _curves(self) -> dict[tuple[Collective, int], Curve]:
        """By kind and ranks of a group: while so many ranks communicate as there are, or the next larger measured
        number."""
        curves = fit_curves(self.profile.collectives)
        enough = [at_once for _, _, at_once in curves if self.ranks is not None and at_once >= self.ranks]
        among = min(enough, default=max((at_once for _, _, at_once in curves), default=0))
        return {(kind, group): curve for (kind, group, at_once), curve in curves.items() if at_once == among}

    @cached_property
    def _share(self) -> float:
        """The share of measured times that operators take, where fewer ranks run than were measured at once."""
        if self.ranks is None or not self._is_measured_host:
            return 1.0
        return self.profile.overheads.relief(self.ranks)

    @cached_property
    def _factors(self) -> Factors:
        return operator_factors(self.profile.operators)

    @cached_property
    def _usual(self) -> tuple[float, float]:
        """Factors for operators that the table lacks altogether: the median of those that it has."""
        found = list(self._factors.values())
        return (median(f for f, _ in found), median(b for _, b in found)) if found else (1.0, 1.0)
