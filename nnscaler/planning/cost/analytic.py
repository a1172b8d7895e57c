"""The analytic cost model, from the description of a cluster alone: a roofline (Williams et al. 2009) for operators,
alpha-beta for collectives."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256

from nnscaler.ir.operation_annotations import Signature
from nnscaler.planning.cluster.description import Cluster
from nnscaler.planning.cost import collectives
from nnscaler.planning.cost.flops_and_memory_traffic import Work, shard_work
from nnscaler.planning.cost.model_protocol import AxisPlace, Collective, Overheads, Shapes

EFFICIENCY = 0.7  # of the peak, which kernels reach on large operands


@dataclass(frozen=True)
class AnalyticCost:
    """A roofline: max(FLOP / (0.7 peak), bytes / (0.7 bandwidth)) and a launch, per pass.

    A view, and a backward that hands gradients on as they are, cost nothing.
    """

    cluster: Cluster

    @cached_property
    def identity(self) -> str:
        return f"analytic:{sha256(f'{self.cluster.identity} {EFFICIENCY}'.encode()).hexdigest()[:16]}"

    @property
    def measured(self) -> bool:
        return False

    @property
    def overheads(self) -> Overheads:
        return Overheads()

    def among(self, ranks: int) -> AnalyticCost:
        return self

    def compute(self, signature: Signature, shapes_in: Shapes, shapes_out: Shapes, dtype: str) -> tuple[float, float]:
        forward, backward = shard_work(signature, shapes_in, shapes_out, dtype)
        return self._seconds(forward, dtype), self._seconds(backward, dtype)

    def collective(self, kind: Collective, size: float, ranks: AxisPlace) -> float:
        return collectives.seconds(self.cluster, kind, size, ranks)

    def copied(self, size: float) -> float:
        return 2 * size / (EFFICIENCY * self.cluster.device.bandwidth)

    def _seconds(self, work: Work, dtype: str) -> float:
        if work.nothing:
            return 0.0
        device = self.cluster.device
        calculating = work.flops / (EFFICIENCY * device.flops(dtype))
        return max(calculating, work.bytes / (EFFICIENCY * device.bandwidth)) + device.launch
