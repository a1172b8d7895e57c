"""Named policies: the ready plans that nnScaler's paper (Lin et al., OSDI 2024) compares, by name.

`megatron`, or `megatron:dp=2,tp=2,pp=2`. Each says what it does with a graph; its axes say on how many ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from types import MappingProxyType

from nnscaler.errors import NnscalerError
from nnscaler.ir.derive_operand_layouts import explain_illegal_choices
from nnscaler.ir.graph import Graph, Operation, element_bytes
from nnscaler.ir.operation_annotations import Signature
from nnscaler.ir.operation_placement import Choice, Chunk, RunInvariant, RunPartial, Split
from nnscaler.planning.beam_search_axis_choices import cheapest_choices
from nnscaler.planning.constraints import Constraint, all_of, megatron, sequence_parallel
from nnscaler.planning.constraints import replicate as kept_whole
from nnscaler.planning.constraints.megatron import Roles, roles_of
from nnscaler.planning.parse_axes import BALANCED, parse_axes, ranks_in
from nnscaler.planning.plan_from_axes import make_plan, steps_of
from nnscaler.scheduling.schedule import ScheduleKind
from nnscaler.transform.chunked_regions import ChunkedRegion, choose_pieces
from nnscaler.transform.complete_plan import follow_batch
from nnscaler.transform.plan import DP, PP, SHARD, TP, ChunkStep, Plan, RecomputeStep, Step
from nnscaler.transform.propagate_choices import all_candidates
from nnscaler.transform.select_operations import Layer, layers_of

PIECES, REGIONS, RECOMPUTE = "pieces", "regions", "recompute"  # words of a policy that are no axes
_DATA = (DP, SHARD, "zero", "owned")
_ALL = (*_DATA, TP, PP, BALANCED)


@dataclass(frozen=True)
class ReadyPolicy:
    """A constraint set of the paper as a policy.

    text         for people
    axis         the one that has all ranks where no axes are given
    axes         that may be given
    words        numbers that may be given beside axes, with their defaults
    constraint   on choices on tp; None: the cheapest that are legal
    schedule     of the pipeline; None: the default
    """

    text: str
    axis: str
    axes: tuple[str, ...] = _ALL
    words: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({RECOMPUTE: 0}))
    constraint: Callable[[Graph, Mapping[str, Signature]], Constraint] | None = None
    schedule: str | None = None


_COSHARD = MappingProxyType({PIECES: 2, REGIONS: 0, RECOMPUTE: 0})

READY: Mapping[str, ReadyPolicy] = MappingProxyType(
    {
        "data": ReadyPolicy("data parallelism alone: the batch is split over all ranks", DP, _DATA),
        "megatron": ReadyPolicy("Megatron's tensor parallelism, with dp and a 1F1B pipeline", TP, constraint=megatron),
        "sequence": ReadyPolicy(
            "as megatron, with norms and the residual stream split along the sequence", TP, constraint=sequence_parallel
        ),
        "pipeline": ReadyPolicy("a 1F1B pipeline, a stage on each rank", PP),
        "coshard": ReadyPolicy(
            "attention and MLPs with most activations in pieces=2 on the same ranks, each computed again in backward; "
            "regions=4: the first four",
            DP,
            words=_COSHARD,
        ),
        "interlaced": ReadyPolicy(
            "a pipeline between tables and heads that lie over all of its devices", PP, schedule="interlaced"
        ),
        "3f1b": ReadyPolicy(
            "a pipeline for models that run their layers several times and differentiate the last run", PP,
            schedule="3f1b",
        ),
    }
)  # fmt: skip


@dataclass(frozen=True)
class ReadyPlan:
    """A ready policy as it was asked for.

    name    of the policy
    sizes   of axes; empty: all ranks are on the policy's own
    words   the policy's numbers
    """

    name: str
    sizes: Mapping[str, int]
    words: Mapping[str, int]

    @property
    def policy(self) -> ReadyPolicy:
        return READY[self.name]

    @property
    def ranks(self) -> int | None:
        """How many ranks it is for; None: for any number."""
        return ranks_in(self.sizes) if self.sizes else None

    def for_ranks(self, ranks: int) -> Mapping[str, int]:
        """Return the sizes of axes on so many ranks. Raises NnscalerError("plan_illegal") for another number."""
        if self.ranks not in (None, ranks):
            message = f"plan {self.name!r} is for {self.ranks} ranks, and there are {ranks}"
            raise NnscalerError("plan_illegal", message, help=f"--plan {self.name} takes all ranks; or name its axes")
        return self.sizes or {self.policy.axis: ranks}


def parse_ready(text: str) -> ReadyPlan | None:
    """Return the ready policy that `NAME` or `NAME:dp=2,tp=2` names; None for text that names none.

    Raises NnscalerError("plan_illegal") for axes and numbers that the policy has not.
    """
    name, colon, given = text.partition(":")
    if name not in READY or "::" in text:
        return None
    policy = READY[name]
    words, axes = dict(policy.words), []
    for part in filter(None, (p.strip() for p in given.split(","))):
        key, _, number = part.partition("=")
        if key in policy.words and number.isdecimal():
            words[key] = int(number)
        elif key in policy.axes:
            axes.append(part)
        else:
            legal = ", ".join(f"{k}=N" for k in (*policy.axes, *policy.words))
            near = get_close_matches(key, (*policy.axes, *policy.words), 1, 0.5)
            guess = f"did you mean {near[0]}=N? " if near else ""
            raise NnscalerError("plan_illegal", f"--plan {text!r}: {part!r} is no part of {name}", help=guess + legal)
    if PIECES in words and words[PIECES] < 2:
        raise NnscalerError("plan_illegal", f"--plan {text!r}: pieces={words[PIECES]}", help="two pieces or more")
    if colon and not given.strip():
        raise NnscalerError("plan_illegal", f"--plan {text!r} ends with a colon", help=f"{name}, or {name}:dp=2,pp=2")
    return ReadyPlan(name, parse_axes(",".join(axes)), words)


def make_ready(
    graph: Graph,
    signatures: Mapping[str, Signature],
    wanted: ReadyPlan,
    ranks: int,
    *,
    schedule: str | ScheduleKind | None = None,
    micro_batches: int | None = None,
    replicate: Sequence[str] = (),
) -> Plan:
    """Return the plan of a ready policy; the other arguments are those of `plan_from_axes.make_plan`.

    Raises NnscalerError("plan_illegal") as that does, and where the policy finds nothing in the graph that it is for.
    """
    policy, sizes = wanted.policy, wanted.for_ranks(ranks)
    limited = policy.constraint is not None and sizes.get(TP, 1) > 1
    plan = make_plan(
        graph,
        signatures,
        {name: size for name, size in sizes.items() if not (limited and name == TP)},
        schedule=schedule or policy.schedule,
        micro_batches=micro_batches,
        replicate=replicate,
    )
    steps: list[Step] = list(plan.steps)
    if limited and policy.constraint is not None:
        kept = policy.constraint(graph, signatures)
        kept = all_of((kept, kept_whole(graph, replicate))) if replicate else kept
        plan = replace(plan, mesh=tuple((name, sizes[name]) for name in (DP, SHARD, TP, PP) if name in sizes))
        steps = [*constrained_tensor_parallel(graph, signatures, plan, sizes[TP], kept), *steps]
    if PIECES in wanted.words:
        steps += coshard_steps(graph, signatures, plan, wanted.words[PIECES], wanted.words[REGIONS])
    if wanted.words.get(RECOMPUTE):
        pieced = {name for step in steps if isinstance(step, ChunkStep) for name in step.operations}
        layers = layers_of(graph, len(graph.operations))  # of the level that has most
        steps += [RecomputeStep(layer.operations) for layer in layers if pieced.isdisjoint(layer.operations)]
    return replace(plan, steps=tuple(steps))


def constrained_tensor_parallel(
    graph: Graph, signatures: Mapping[str, Signature], plan: Plan, parts: int, constraint: Constraint
) -> tuple[Step, ...]:
    """Return steps for every operation on tp: of the choices that a constraint allows, the cheapest.

    `plan`: its mesh and its micro-batches, with which the choices must be legal. Raises NnscalerError("plan_illegal")
    for an operation that is left without a choice.
    """
    mesh = tuple(axis for axis in plan.device_axes[0] if axis[0] != TP)
    made, axes = follow_batch(graph, signatures, plan, mesh)
    candidates, every = all_candidates(graph, signatures, parts), (*axes, (TP, parts))
    options: dict[str, tuple[Choice, ...]] = {}

    def legal(op: Operation, choice: Choice) -> bool:
        if not constraint.allows(op, choice):
            return False
        return isinstance(choice, RunInvariant) or not explain_illegal_choices(
            graph, op, signatures[op.name], (*made[op.name], choice), every
        )

    for op in graph.operations:
        partial = (RunPartial(slots) for slots in signatures[op.name].linear)
        choices: tuple[Choice, ...] = (RunInvariant(), *candidates[op.name], *partial)
        options[op.name] = tuple(choice for choice in choices if legal(op, choice))
        if not options[op.name]:
            raise NnscalerError(
                "plan_illegal",
                f"{constraint.text} leaves {op.name} ({op.operator}) no choice on tp={parts}",
                where=op.where,
                help=f"its choices: {', '.join(map(str, choices[:8]))}; take fewer ranks on tp",
            )
    return steps_of(graph, TP, cheapest_choices(graph, signatures, parts, options))


# Regions for coshard (Lin et al., nnScaler, OSDI 2024): pairs of weights in layers, found from annotations.
# A region is what lies between the weights that read the residual stream and the one that adds to it: attention with
# its projections, an MLP. Megatron cuts it over ranks, coshard in time.

AXIS = "co"
LARGE = 0.5  # of the bytes that the region with most writes, from which on a region is cut


def coshard_steps(
    graph: Graph, signatures: Mapping[str, Signature], plan: Plan, pieces: int, first: int = 0
) -> list[ChunkStep]:
    """Return a step for each of the `first` pairs of weights in layers; 0: for those that write at least half as many
    bytes as the one that writes most.

    `plan`: its mesh and micro-batches. Raises NnscalerError("plan_illegal") where no pair can be cut into as many
    pieces.
    """
    roles = roles_of(graph, signatures)
    regions = [region for layer in layers_of(graph) for region in _regions(graph, layer, roles)]
    written = [sum(_written(graph, op) for op in region) for region in regions]
    large = [r for r, size in zip(regions, written, strict=True) if size >= LARGE * max(written)]
    axes = tuple(axis for axis in plan.device_axes[0] if axis[0] in plan.data_axes)
    made, axes = follow_batch(graph, signatures, plan, axes)
    steps: list[ChunkStep] = []
    for region in regions[:first] if first else large:
        for identifier in _identifiers(region, roles, signatures):
            step = ChunkStep(tuple(op.name for op in region), AXIS, identifier, pieces)
            chunk = ChunkedRegion(Chunk(f"{AXIS}_{len(steps)}", AXIS, True), step, tuple(region))
            try:
                pieced = choose_pieces(graph, signatures, (AXIS, pieces), (chunk,), made, axes)
            except NnscalerError:
                continue
            cut = ((pieced[op.name], roles.cut[op.name]) for op in region if op.name in roles.cut)
            if all(isinstance(choice, Split) and choice.identifier in wanted for choice, wanted in cut):
                steps.append(step)
                break
    if not steps:
        raise NnscalerError(
            "plan_illegal",
            f"coshard: none of {len(regions)} pairs of weights in layers can be cut into {pieces} pieces",
            help="take as many pieces as divide the heads; or write a plan with chunk steps: docs/coshard.md",
        )
    return steps


def _regions(graph: Graph, layer: Layer, roles: Roles) -> Iterator[Sequence[Operation]]:
    """Yield the operations of each pair of weights of a layer, in order: from its columns to its rows."""
    inside = frozenset(layer.operations)
    for name in layer.operations:
        if name not in roles.cut or name in roles.columns:
            continue
        found = {name}
        waiting = [graph.by_name[name]]
        while waiting:
            op = waiting.pop()
            for tensor in () if op.name in roles.columns else op.inputs:
                producer = graph.producers.get(tensor)
                here = producer is not None and producer.name in inside and producer.name not in roles.whole
                if producer is not None and here and producer.name not in found:
                    found.add(producer.name)
                    waiting.append(producer)
        yield [op for op in graph.operations if op.name in found]


def _identifiers(region: Sequence[Operation], roles: Roles, signatures: Mapping[str, Signature]) -> Iterator[str]:
    """Yield what may be cut, as chunk steps say it: columns first, then identifiers of products without a parameter."""
    for op in region:
        if op.name in roles.columns:
            yield from (f"{op.name}:{identifier}" for identifier in sorted(roles.cut[op.name]))
            break
    product = next((op for op in region if signatures[op.name].flops and op.name not in roles.cut), None)
    if product is not None:
        yield from (f"{product.name}:{identifier}" for identifier in signatures[product.name].identifiers)


def _written(graph: Graph, op: Operation) -> int:
    outputs = [graph.tensors[name] for name in op.outputs if name is not None]
    return sum(tensor.elements * element_bytes(tensor.dtype) for tensor in outputs)
