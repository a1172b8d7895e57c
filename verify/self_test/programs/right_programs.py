"""The right programs that errors are planted in: a model under a plan, one row each.

SPECS of the example models, made small; BASES of models that have the mechanisms of known bugs; TINY of a few lines
each, whose programs have, together, everything that a rank program can say. A tiny program is read in milliseconds, so
that many thousand variants of it can be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from nnscaler.compile import WantedPlan, compile_traced, make
from nnscaler.errors import NnscalerError
from nnscaler.ir.graph import Graph
from nnscaler.runtime.program.import_role_and_user_files import load_user_module
from nnscaler.tracing import Traced
from nnscaler.transform.plan import AssignStep, Plan, RecomputeStep, SplitStep, Step
from verify.programs.loaded_model_and_plan import PlanSubject
from verify.programs.prepare_verification import Prepared, prepare
from verify.programs.request import PlanRequest
from verify.self_test.programs import models_of_real_bugs, tiny_models
from verify.self_test.programs.mutants.editable_program_and_edits import RightProgram, take_apart

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
LAYERS = 2  # blocks that are left of each example
BATCH = 12
TIMEOUT = 20.0  # seconds; a run takes a fraction of one


@dataclass(frozen=True, slots=True)
class SmallModel:
    """A model of our own, and its batch."""

    make: Callable[[], nn.Module]
    sample: Callable[[], Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Spec:
    """A model, and a plan for it.

    model    its name
    dropout  of an example that is built with some
    small    how it is made; None: by its file in `examples/`
    steps    added to the plan that the policy makes
    whole    the plan, where no policy makes it
    schedule its name; None: the policy's
    """

    model: str
    plan: str
    ranks: int
    micro_batches: int = 1
    dropout: float = 0.0
    small: SmallModel | None = None
    steps: tuple[Step, ...] = ()
    whole: Plan | None = None
    schedule: str | None = None

    @property
    def name(self) -> str:
        """`dp=2,pp=2/4`: the plan and its micro-batches."""
        text = f"{self.plan}/{self.micro_batches}" if self.micro_batches > 1 else self.plan
        return f"{text} with dropout" if self.dropout else text

    def steps_of(self, graph: Graph, ranks: int) -> Plan:
        """Return the policy's plan with the spec's own steps."""
        wanted = WantedPlan(ranks, self.plan, self.schedule, self.micro_batches)
        made = make(graph, wanted).plan
        return replace(made, steps=(*made.steps, *self.steps))


# -- example models ---------------------------------------------------------------------------------------------------

PLANS = (
    ("tp=2", 2, 1),
    ("dp=2,tp=2", 4, 1),
    ("dp=2,tp=3", 6, 1),
    ("pp=2", 2, 4),
    ("tp=2,pp=2", 4, 2),
    ("dp=3,pp=2", 6, 2),
)
MODELS = ("gpt", "llama_hf", "t5_hf", "vit_hf", "moe", "custom_op")


def specs(names: tuple[str, ...] = MODELS, quick: bool = False) -> tuple[Spec, ...]:
    """Return every example model under every plan; `quick`: two plans, of which each model has one."""
    every = [Spec(model, *plan) for model in names for plan in PLANS]
    if quick:
        chosen = (PLANS[1], PLANS[4])
        return tuple(Spec(model, *chosen[i % 2]) for i, model in enumerate(names))
    if "gpt" in names:
        every.append(Spec("gpt", "dp=2,tp=2", 4, 1, 0.25))
    return tuple(every)


# -- models of our own ------------------------------------------------------------------------------------------------


def _split(operation: str, identifier: str) -> SplitStep:
    return SplitStep((operation,), "tp", identifier)


_TRANSFORMER = SmallModel(models_of_real_bugs.Transformer, models_of_real_bugs.text)
_MIXTURE = SmallModel(models_of_real_bugs.Mixture, models_of_real_bugs.text)
_LOSSES = SmallModel(models_of_real_bugs.TwoLosses, models_of_real_bugs.longer_text)
_NORMS = (_split("layer_norm", "b"), _split("layer_norm_1", "b"))
_ROUTED = tuple(_split(n, i) for n, i in (("layer_norm", "b"), ("linear", "*1"), ("softmax", "b")))
_AGAIN = RecomputeStep(("blocks.0.*", "blocks.0"))

BASES: dict[str, Spec] = {
    "sharded": Spec("Transformer", "dp=2,tp=2", 4, small=_TRANSFORMER),
    "staged": Spec("Transformer", "dp=2,pp=2", 4, 4, small=_TRANSFORMER),
    "sharded stages": Spec("Transformer", "tp=2,pp=2", 4, 2, small=_TRANSFORMER),
    "sequence": Spec("Transformer", "dp=2,tp=2", 4, small=_TRANSFORMER, steps=_NORMS),
    "recomputed": Spec("Transformer", "dp=2,tp=2", 4, small=_TRANSFORMER, steps=(_AGAIN,)),
    "experts": Spec("Mixture", "dp=2,tp=2", 4, small=_MIXTURE),
    "router": Spec("Mixture", "dp=2,tp=2", 4, small=_MIXTURE, steps=_ROUTED),
    "losses": Spec("TwoLosses", "dp=2,tp=2", 4, small=_LOSSES),
    "rotary": Spec("Rotary", "dp=2,tp=2", 4, small=SmallModel(models_of_real_bugs.Rotary, models_of_real_bugs.text)),
    "adapted": Spec("Adapted", "dp=2,tp=2", 4, small=SmallModel(models_of_real_bugs.Adapted, models_of_real_bugs.text)),
}

_UNLIKE = Plan(
    (("pp", 2),),
    (AssignStep(("up*", "gelu*"), (0,)), AssignStep(("down*", "mse*"), (1,))),
    stage_axes=((("dp", 2),), (("tp", 2),)),
)
_LAYERS = SmallModel(tiny_models.Layers, tiny_models.pairs)
_UNEVEN = SmallModel(tiny_models.Uneven, tiny_models.pairs)
_PACKED = SmallModel(tiny_models.Packed, tiny_models.tokens)
_TIED = SmallModel(tiny_models.Tied, tiny_models.text)
_WORDS = SmallModel(tiny_models.Words, tiny_models.text)
_CHAIN = SmallModel(tiny_models.Chain, tiny_models.pairs)
_CAUSAL = SmallModel(tiny_models.Causal, tiny_models.text)
_RECYCLED = SmallModel(tiny_models.Recycled, tiny_models.pairs)
_ROWS = tiny_models.rows

TINY: dict[str, Spec] = {
    spec.model: spec
    for spec in (
        Spec("shuffled", "tp=2", 2, small=SmallModel(tiny_models.Shuffled, tiny_models.image)),
        Spec("layers", "dp=2,tp=2", 4, small=_LAYERS),
        Spec("uneven", "tp=3", 3, small=_UNEVEN),
        Spec("packed", "tp=2", 2, small=_PACKED),
        Spec("packed, dp", "dp=2,tp=2", 4, small=_PACKED),
        Spec("strided", "tp=2", 2, small=SmallModel(tiny_models.Strided, _ROWS)),
        Spec("rested", "dp=2,zero=3", 2, small=_UNEVEN),
        Spec("rested, tp", "dp=2,tp=2,zero=3", 4, small=_LAYERS),
        Spec("dropped", "dp=2,tp=2", 4, small=SmallModel(tiny_models.Dropped, tiny_models.pairs)),
        Spec("normed", "dp=2", 2, small=SmallModel(tiny_models.Normed, _ROWS)),
        Spec("experts", "dp=2,tp=2", 4, small=SmallModel(tiny_models.Experts, _ROWS)),
        Spec("tied", "dp=2,pp=2", 4, 2, small=_TIED),
        Spec("cube", "dp=2,tp=2,pp=2", 8, 2, small=_TIED),
        Spec("averaged", "dp=2", 2, 2, small=_WORDS),
        Spec("words", "tp=2", 2, small=_WORDS),
        Spec("words, 3", "tp=3", 3, small=_WORDS),
        Spec("unlike", "pp=2 (dp=2 | tp=2)", 4, small=_LAYERS, whole=_UNLIKE),
        Spec("recomputed", "dp=2,tp=2", 4, small=SmallModel(tiny_models.Recomputed, _ROWS)),
        Spec("losses", "dp=2,tp=2", 4, small=_LOSSES),
        Spec("turned", "tp=2", 2, small=SmallModel(tiny_models.Turned, tiny_models.tokens)),
        Spec("adapted", "dp=2,tp=2", 4, small=SmallModel(tiny_models.Adapted, _ROWS)),
        Spec("convolved", "dp=3", 3, 2, small=SmallModel(tiny_models.Convolved, tiny_models.six_rows)),
        Spec("sequence", "tp=2", 2, small=SmallModel(tiny_models.Residual, tiny_models.tokens), steps=_NORMS[:1]),
        Spec("staged", "tp=2,pp=2", 4, 2, small=_TIED),
        Spec("recycled", "pp=2", 2, 2, small=_RECYCLED, schedule="3f1b"),
        Spec("recycled, dp", "dp=2", 2, small=_RECYCLED),
        Spec("stream", "dp=2,pp=3", 6, small=_CHAIN, schedule="pipedream"),
        Spec("interlaced", "dp=2,pp=2", 4, 2, small=_TIED, schedule="interlaced"),
        Spec("sliced", "tp=2,pp=2,slices=2", 4, 2, small=_CAUSAL),
        Spec("searched", "pp=2", 2, 4, small=_CHAIN, schedule="search:zb-v"),
    )
}
# those with sections, outer sizes, unequal sizes, copies, buffers and constants, shared stages, slices, searched orders
SMALL = (
    "packed", "packed, dp", "strided", "uneven", "words", "words, 3", "rested", "tied", "cube", "staged", "normed",
    "turned", "adapted", "recycled", "interlaced", "sliced", "searched",
)  # fmt: skip
NAMES = (*MODELS, *SMALL)  # of the programs that mutants are made of


# -- programs ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Base:
    """A right program, taken apart, and what it is compared with."""

    spec: Spec
    request: PlanRequest
    prepared: Prepared
    traced: Traced
    subject: RightProgram


def make_model(spec: Spec) -> tuple[nn.Module, Mapping[str, Any]]:
    """Return the model and its batch. Raises NnscalerError where the examples are not there."""
    if spec.small is not None:
        return models_of_real_bugs.made(spec.small.make), spec.small.sample()
    file = EXAMPLES / f"{spec.model}.py"
    if not file.is_file():
        message = f"there is no example model {spec.model!r}"
        help = "the examples come with the project's sources, not with the wheel: run this in a checkout"
        raise NnscalerError("usage", message, help=help)
    module = load_user_module(file)
    model = module.GPT(replace(module.GPTConfig(), dropout=spec.dropout)) if spec.dropout else module.build_model()
    shorten(model)
    return model, module.sample_inputs(BATCH)


def build(spec: Spec, folder: Path) -> Base:
    """Compile a right program; it is written into `folder`."""
    model, sample = make_model(spec)
    plan = spec.plan if spec.small is None else spec.whole or spec.steps_of
    described = {"name": spec.model}
    request = PlanRequest(ranks=spec.ranks, micro_batches=spec.micro_batches, backend="simulator", timeout=TIMEOUT)
    prepared = prepare(request, PlanSubject(model, sample, plan, described), folder / "right")
    assert prepared.traced is not None, "it was traced just now"
    program = compile_traced(
        prepared.traced, WantedPlan(spec.ranks, plan, micro_batches=spec.micro_batches), model=described
    )
    return Base(spec, request, prepared, prepared.traced, take_apart(spec.model, spec.name, program))


def shorten(model: nn.Module) -> None:
    """Leave the first blocks of every list of blocks."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) > LAYERS and len({type(m) for m in module}) == 1:
            del module[LAYERS:]
