"""PipeDream: a pipeline that never drains, with an update after every batch (Narayanan et al., 2019).

Forwards and backwards alternate as under 1F1B. Stage s of p starts p - 1 - s batches before its first gradient is
there, so that each of its batches goes without so many updates by earlier ones. That is no synchronous training:

    W(t+1) = W(t) - lr * grad f(w_0(t-p+1), ..., w_{p-1}(t))
"""

from __future__ import annotations

from nnscaler.scheduling.one_f_one_b import one_f_one_b
from nnscaler.scheduling.schedule import Schedule, ScheduleKind


def pipedream(devices: int, chunks: int, micro_batches: int) -> Schedule:
    """A stream of batches with no end, each with an update of its own, to parameters that are newer than those it read.

    Each micro-batch is a batch. Stage s keeps p - s versions of its parameters: a backward reads the one that its
    forward read.
    """
    made = one_f_one_b(devices, chunks, micro_batches)
    orders = tuple(
        tuple(step for i in order for step in ((i, i.of("U")) if i.kind == "B" else (i,))) for order in made.orders
    )
    return Schedule("pipedream", made.devices, micro_batches, orders, staleness=delays(devices))


def delays(stages: int) -> tuple[int, ...]:
    """Return the staleness of each stage: how many updates by earlier batches one that goes forward there lacks."""
    return tuple(stages - 1 - stage for stage in range(stages))


def written_for(stages: int) -> int:
    """Return for how many batches the order of a stream is written: until each device repeats itself."""
    return stages + 1


PIPEDREAM = ScheduleKind("pipedream", "PipeDream", pipedream, chunks=1, stream=True)
