"""Check the parallel degrees (tensor, expert, sharded data) that plans of transformers get: which go together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nnscaler.errors import NnscalerError


@dataclass(frozen=True)
class PlanSizes:
    """How many ranks share what.

    tp    tensor plan
    ep    expert plan: among the ranks of tp where tp is above 1, else of fsdp; alone, it has ranks of its own
    fsdp  fully sharded data parallel
    pp    pipeline
    """

    tp: int = 1
    ep: int = 1
    fsdp: int = 1
    pp: int = 1

    @property
    def experts_alone(self) -> bool:
        """True where only the expert plan is applied."""
        return self.ep > 1 and self.tp == 1 and self.fsdp == 1

    @property
    def shared(self) -> int:
        """The number of ranks that see the same rows."""
        return self.ep if self.experts_alone else self.tp

    def mesh(self) -> tuple[tuple[str, int], ...]:
        """Return the axes of the program, in the library's order; data parallel is outermost."""
        axes = (("fsdp", self.fsdp), ("ep" if self.experts_alone else "tp", self.shared))
        return tuple((name, size) for name, size in axes if size > 1) or (("tp", 1),)

    def __str__(self) -> str:
        named = (("tp", self.tp), ("ep", self.ep), ("fsdp", self.fsdp), ("pp", self.pp))
        return " ".join(f"--{name} {size}" for name, size in named if size > 1)


@dataclass(frozen=True)
class PlanChanges:
    """Rules that replace or join those of the model's own plans: generic name -> style."""

    tp: Mapping[str, str] = field(default_factory=dict)
    ep: Mapping[str, str] = field(default_factory=dict)


def other_sizes(model: Any, sizes: PlanSizes) -> PlanSizes | None:
    """Return other sizes for as many ranks, of plans that the model has: axes in the other order, or one axis alone."""
    ranks = sizes.fsdp * sizes.shared
    others = (PlanSizes(tp=sizes.fsdp, fsdp=sizes.shared), PlanSizes(fsdp=ranks), PlanSizes(tp=ranks))
    for other in others:
        has_plans = (other.tp == 1 or model.tp_plan) and (other.fsdp == 1 or model.fsdp_plan)
        if has_plans and other.mesh() != sizes.mesh() and other.tp <= max(2, sizes.shared):
            return other
    return None


def check_sizes(sizes: PlanSizes) -> None:
    if sizes.pp > 1:
        message = "the pipeline of transformers returns logits and no loss, and nothing runs backward through it"
        raise NnscalerError("usage", message, help="it cannot be trained: leave --pp away")
    if sizes.tp * sizes.ep * sizes.fsdp == 1:
        raise NnscalerError("usage", "one rank has no plan to verify", help="--tp 2, --ep 2 or --fsdp 2")
    if not sizes.experts_alone and (sizes.ep % sizes.tp if sizes.ep > 1 else 0):
        raise NnscalerError("usage", f"--ep {sizes.ep} is no multiple of --tp {sizes.tp}, as transformers wants it")
    if not sizes.experts_alone and (sizes.fsdp * sizes.tp) % sizes.ep:
        message = f"--ep {sizes.ep} does not divide the {sizes.fsdp * sizes.tp} ranks of --tp and --fsdp"
        raise NnscalerError("usage", message, help="experts are spread over ranks that are there")


def check_plans(model: Any, sizes: PlanSizes) -> None:
    wanted = {"tp": sizes.tp, "ep": sizes.ep, "fsdp": sizes.fsdp}
    for kind, size in wanted.items():
        if size > 1 and not getattr(model, f"{kind}_plan", None):
            has = [other for other in wanted if getattr(model, f"{other}_plan", None)]
            help = f"it has plans for {', '.join('--' + other for other in has)}" if has else None
            raise NnscalerError("no_plan", f"{type(model).__name__} declares no {kind} plan", help=help)
