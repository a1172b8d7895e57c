"""The programs in which the rows of Table T are planted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from nnscaler.compile import make
from nnscaler.ir.graph import Graph
from nnscaler.transform.plan import Plan, RecomputeStep, SplitStep, Step
from verify.self_test.programs import models
from verify.self_test.programs.corpus import Base, Spec, build_from


@dataclass(frozen=True, slots=True)
class TableBase:
    """`steps`: added to the plan that the policy makes. `whole`: the plan, where no policy makes it."""

    model: Callable[[], nn.Module]
    sample: Callable[[], models.Sample]
    plan: str
    ranks: int
    micro_batches: int = 1
    steps: tuple[Step, ...] = ()
    whole: Plan | None = None

    def build(self, folder: Path, name: str = "") -> Base:
        """Compile the base."""
        model = models.made(self.model)
        spec = Spec(name or type(model).__name__, self.plan, self.ranks, self.micro_batches)
        return build_from(spec, model, self.sample(), self.whole or self._plan, folder)

    def _plan(self, graph: Graph, ranks: int) -> Plan:
        made = make(graph, ranks, self.plan, None, self.micro_batches, ()).plan
        return replace(made, steps=(*made.steps, *self.steps))


def _split(operation: str, identifier: str) -> SplitStep:
    return SplitStep((operation,), "tp", identifier)


BASES: dict[str, TableBase] = {
    "sharded": TableBase(models.Transformer, models.text, "dp=2,tp=2", 4),
    "staged": TableBase(models.Transformer, models.text, "dp=2,pp=2", 4, 4),
    "sharded stages": TableBase(models.Transformer, models.text, "tp=2,pp=2", 4, 2),
    "sequence": TableBase(
        models.Transformer, models.text, "dp=2,tp=2", 4, 1, (_split("layer_norm", "b"), _split("layer_norm_1", "b"))
    ),
    "recomputed": TableBase(
        models.Transformer, models.text, "dp=2,tp=2", 4, 1, (RecomputeStep(("blocks.0.*", "blocks.0")),)
    ),
    "experts": TableBase(models.Mixture, models.text, "dp=2,tp=2", 4),
    "router": TableBase(
        models.Mixture,
        models.text,
        "dp=2,tp=2",
        4,
        1,
        tuple(_split(n, i) for n, i in (("layer_norm", "b"), ("linear", "*1"), ("softmax", "b"))),
    ),
    "losses": TableBase(models.TwoLosses, models.longer_text, "dp=2,tp=2", 4),
    "rotary": TableBase(models.Rotary, models.text, "dp=2,tp=2", 4),
    "adapted": TableBase(models.Adapted, models.text, "dp=2,tp=2", 4),
}
