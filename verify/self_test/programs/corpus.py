"""The right programs that mutants are made of: the example models, made small, each under several plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from nnscaler.compile import PlanSource, compile_traced
from nnscaler.errors import NnscalerError
from nnscaler.runtime.program.loader import load_user_module
from nnscaler.tracing import Traced
from verify.programs.prepare import Prepared, prepare
from verify.programs.request import PlanRequest
from verify.programs.subject import PlanSubject
from verify.self_test.programs.mutants.role_source import RightProgram, take_apart

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
LAYERS = 2  # blocks that are left of each model
BATCH = 12
TIMEOUT = 20.0  # seconds; a run takes a fraction of one


@dataclass(frozen=True, slots=True)
class Spec:
    """A model of `examples/` and a plan for it."""

    model: str
    plan: str
    ranks: int
    micro_batches: int = 1
    dropout: float = 0.0

    @property
    def name(self) -> str:
        """`dp=2,pp=2/4`: the plan and its micro-batches."""
        text = f"{self.plan}/{self.micro_batches}" if self.micro_batches > 1 else self.plan
        return f"{text} with dropout" if self.dropout else text


PLANS = (
    ("tp=2", 2, 1),
    ("dp=2,tp=2", 4, 1),
    ("dp=2,tp=3", 6, 1),
    ("pp=2", 2, 4),
    ("tp=2,pp=2", 4, 2),
    ("dp=3,pp=2", 6, 2),
)
MODELS = ("gpt", "llama_hf", "t5_hf", "vit_hf", "moe", "custom_op")


def specs(models: tuple[str, ...] = MODELS, quick: bool = False) -> tuple[Spec, ...]:
    """Return every model under every plan; `quick`: three plans, of which each model has one."""
    every = [Spec(model, *plan) for model in models for plan in PLANS]
    if quick:
        chosen = (PLANS[1], PLANS[4])
        return tuple(Spec(model, *chosen[i % 2]) for i, model in enumerate(models))
    if "gpt" in models:
        every.append(Spec("gpt", "dp=2,tp=2", 4, 1, 0.25))
    return tuple(every)


@dataclass(frozen=True)
class Base:
    """A right program, taken apart, and what it is compared with."""

    spec: Spec
    request: PlanRequest
    prepared: Prepared
    traced: Traced
    subject: RightProgram


def build(spec: Spec, folder: Path) -> Base:
    """Compile one subject; its program is written into `folder`.

    Raises NnscalerError where the examples are not there.
    """
    file = EXAMPLES / f"{spec.model}.py"
    if not file.is_file():
        message = f"there is no example model {spec.model!r}"
        help = "the examples come with the project's sources, not with the wheel: run this in a checkout"
        raise NnscalerError("usage", message, help=help)
    module = load_user_module(file)
    model = module.build_model() if not spec.dropout else _with_dropout(module, spec.dropout)
    shorten(model)
    return build_from(spec, model, module.sample_inputs(BATCH), spec.plan, folder)


def build_from(spec: Spec, model: nn.Module, sample: Mapping[str, Any], plan: PlanSource, folder: Path) -> Base:
    """The program of any model, which is left as it is."""
    described = {"name": spec.model}
    request = PlanRequest(ranks=spec.ranks, micro_batches=spec.micro_batches, backend="simulator", timeout=TIMEOUT)
    prepared = prepare(request, PlanSubject(model, sample, plan, described), folder / "right")
    assert prepared.traced is not None, "it was traced just now"
    program = compile_traced(
        prepared.traced, ranks=spec.ranks, plan=plan, micro_batches=spec.micro_batches, model=described
    )
    return Base(spec, request, prepared, prepared.traced, take_apart(spec.model, spec.name, program))


def _with_dropout(module: Any, chance: float) -> nn.Module:
    model: nn.Module = module.GPT(replace(module.GPTConfig(), dropout=chance))
    return model


def shorten(model: nn.Module) -> None:
    """Leave the first blocks of every list of blocks."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) > LAYERS and len({type(m) for m in module}) == 1:
            del module[LAYERS:]
