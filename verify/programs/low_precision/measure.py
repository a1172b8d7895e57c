"""Compare a low-precision run of a program with the exact result, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from verify.programs.checks.context import Comparison
from verify.programs.checks.logical import Holding, StageTensor, by_rank, put_together
from verify.programs.low_precision.measures import Statistics, statistics
from verify.programs.low_precision.noise import Target
from verify.results.tolerance import Key, is_finite

KINDS = ("loss", "gradient", "parameter", "buffer")


@dataclass(frozen=True)
class Measured:
    """The error of one tensor or loss of a low-precision run.

    key      whose noise it is compared with
    error    the three statistics of `measures`
    holding  where the tensor is held; None for a loss
    rank     of a loss; -1 for a tensor
    code     of the finding, where values cannot be compared
    problem  why values cannot be compared
    finite   whether the program's value is
    """

    key: Key
    error: Statistics = (0.0, 0.0, 0.0)
    holding: Holding | None = None
    rank: int = -1
    code: str = ""
    problem: str = ""
    finite: bool = True

    @property
    def name(self) -> str:
        return self.holding.name if self.holding is not None else f"rank {self.rank}"


def measured(comparison: Comparison, targets: Mapping[Key, Target]) -> tuple[Measured, ...]:
    """Measure every loss, gradient, parameter and buffer of the program. Those that neither side has are left out."""
    last = comparison.steps - 1
    kinds = [("gradient", step) for step in range(comparison.steps)] + [("parameter", last), ("buffer", last)]
    found = list(_losses(comparison, targets))
    for kind, step in kinds:
        entries = by_rank(comparison.results, kind, step)
        holdings = comparison.buffers if kind == "buffer" else comparison.parameters
        for holding in holdings.values():
            one = _held(kind, step, holding, put_together(holding, entries), targets)
            if one is not None:
                found.append(one)
    return tuple(found)


def _losses(comparison: Comparison, targets: Mapping[Key, Target]) -> Iterator[Measured]:
    for step in range(comparison.steps):
        key = ("loss", step, "")
        known = [(r.rank, loss) for r in comparison.results if (loss := r.losses[step]) is not None]
        if not known:
            yield Measured(key, code="loss_missing", problem=f"no rank returns the loss of step {step}")
        for rank, loss in known:
            yield Measured(key, _error(loss, targets[key]), rank=rank, finite=is_finite(loss))


def _held(
    kind: str, step: int, holding: Holding, logical: StageTensor, targets: Mapping[Key, Target]
) -> Measured | None:
    key = (kind, step, holding.name)
    target = targets.get(key)
    noun = f"the {kind} of `{holding.name}`" if kind == "gradient" else f"the {kind} `{holding.name}`"
    missing = "gradient_missing" if kind == "gradient" else f"{kind}_differs"
    if logical.problem:
        problem = f"{noun} cannot be put together from its shards: {logical.problem}"
        return Measured(key, holding=holding, code=missing, problem=problem)
    if target is None and logical.value is None:
        return None
    if target is None:
        if kind != "gradient":
            return None  # the coverage check reports what the model does not have
        problem = f"the program has a gradient of `{holding.name}` at step {step}, and the model has none"
        return Measured(key, holding=holding, code="gradient_extra", problem=problem)
    if logical.value is None:
        problem = f"the program has no {kind} of `{holding.name}` at step {step}, and the model has one"
        return Measured(key, holding=holding, code=missing, problem=problem)
    return Measured(key, _error(logical.value, target), holding, finite=is_finite(logical.value))


def _error(value: Tensor, target: Target) -> Statistics:
    return statistics(value, target.value, target.family)
