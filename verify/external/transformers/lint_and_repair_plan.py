"""Read the plans of a model of transformers before it runs (lints), and propose rules that may mend it (repairs)."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from nnscaler.errors import NnscalerError
from verify.external.request import ExternalRequest
from verify.external.transformers.build_program import BuiltModel
from verify.external.transformers.check_parallel_degrees import PlanChanges, PlanSizes
from verify.external.transformers.expand_requests import model_of, program_of
from verify.external.verify import Progress
from verify.external.verify_on_levels import verify_levels
from verify.results.finding import Finding
from verify.results.report import Report
from verify.results.verdict import Verdict

SUMMED = "replicated_with_grad_allreduce"  # style: a whole parameter, whose gradient is summed over the ranks
WHOLE = "replicate"  # style: nothing is done
MOST_REPAIRS = 4
_GATHERED, _SPLIT = "colwise_gather_output", "rowwise_split_input"  # styles that begin and end with whole tensors


@dataclass(frozen=True)
class PlanLint:
    """Something in a plan that is worth a look.

    kind  unmatched_rule: a rule names nothing in the model. unreached_parameter: no rule reaches a parameter that is
          read between sharded tensors, so that each rank has a part of its gradient. uneven_size: a size does not
          divide by the ranks that share it
    plan  tp, ep or fsdp
    name  the rule, parameter or field, `*` for layer numbers
    text  a sentence for people
    """

    kind: str
    plan: str
    name: str
    text: str


@dataclass(frozen=True)
class WrongParameter:
    """A wrong gradient, as the comparison found it.

    name    of the parameter in the plain model
    cause   kind of cause, such as missing_reduction or scaled
    axis    of the mesh; empty where none is known
    factor  that it is too large by; 0 where it is none
    """

    name: str
    cause: str
    axis: str = ""
    factor: float = 0.0


@dataclass(frozen=True)
class PlanRepair:
    """Rules that may mend a plan, to be tried by `transformers_program(..., changes=repair.changes)`.

    text  what to add to which plan
    """

    text: str
    changes: PlanChanges


def styles() -> list[str]:
    """Return the names of the styles that the installed library knows."""
    registry = importlib.import_module("transformers.distributed.parallel_utils").ALL_PARALLEL_STYLES
    importlib.import_module("transformers.distributed.tensor_parallel")  # they are registered on import
    importlib.import_module("transformers.distributed.expert_parallel")
    return sorted(registry.keys())


def generic(name: str) -> str:
    """Write `*` for the numbers in a name, as rules do."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def plan_lints(built: BuiltModel, sizes: PlanSizes) -> tuple[PlanLint, ...]:
    """Return what stands out in the plans that these sizes use. Runs the plain model once, forward."""
    found: list[PlanLint] = []
    for kind, size in (("tp", sizes.tp), ("ep", sizes.ep), ("fsdp", sizes.fsdp)):
        if size > 1:
            found += _unmatched_rules(built.model, kind)
    if sizes.tp > 1:
        found += _unreached_parameters(built)
        found += _uneven_sizes(built, sizes.tp)
    if sizes.ep > 1:
        found += _uneven_experts(built.model, sizes.ep)
    return tuple(found)


# A rule that names nothing.


def _unmatched_rules(model: Any, kind: str) -> Iterator[PlanLint]:
    names = {generic(name) for name, _ in (*model.named_modules(), *model.named_parameters(remove_duplicate=False))}
    for rule in sorted(set(getattr(model, f"{kind}_plan")) - names):
        text = f"the rule {rule!r} of the {kind} plan matches nothing in this {type(model).__name__}"
        yield PlanLint("unmatched_rule", kind, rule, text)


# A parameter that is read between sharded tensors, and that no rule reaches.


def _unreached_parameters(built: BuiltModel) -> Iterator[PlanLint]:
    """Walk the autograd graph of a step from where shards end (rowwise) to where they begin (colwise)."""
    model: Any = built.model
    plan: Mapping[str, str] = model.tp_plan
    graph = _record(built, plan)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    told: set[str] = set()
    for parameter in _read_between(graph):
        name = names.get(id(parameter), "")
        rule = generic(name)
        if not name or rule in told or _has_rule(name, plan):
            continue
        told.add(rule)
        text = f"no rule reaches {rule}, which is read between sharded tensors: each rank has a part of its gradient"
        yield PlanLint("unreached_parameter", "tp", rule, text)


@dataclass(frozen=True)
class _Graph:
    """Nodes of autograd.

    begins  make sharded tensors
    ends    their results are read as sharded tensors
    wholes  a rule makes their results whole
    """

    begins: frozenset[Any]
    ends: tuple[Any, ...]
    wholes: frozenset[Any]


def _record(built: BuiltModel, plan: Mapping[str, str]) -> _Graph:
    begins: set[Any] = set()
    ends: list[Any] = []
    wholes: set[Any] = set()

    def reads(_module: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor) and args[0].grad_fn is not None:
            ends.append(args[0].grad_fn)

    def makes(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        if isinstance(output, Tensor) and output.grad_fn is not None:
            begins.add(output.grad_fn)

    def gathers(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        for item in (output,) if isinstance(output, Tensor) else output if isinstance(output, tuple) else ():
            if isinstance(item, Tensor) and item.grad_fn is not None:
                wholes.add(item.grad_fn)

    with ExitStack() as stack:
        for name, module in built.model.named_modules():
            style = plan.get(generic(name))
            if style is not None and _gives_shards(style):
                stack.callback(module.register_forward_hook(makes).remove)
            elif style is not None and type(_style(style)).__name__ not in _TRANSPARENT:
                stack.callback(module.register_forward_hook(gathers).remove)
            if style is not None and _takes_shards(style):
                stack.callback(module.register_forward_pre_hook(reads).remove)
        with torch.enable_grad():
            built.step(built.model, dict(built.batch))
    return _Graph(frozenset(begins), tuple(ends), frozenset(wholes))


# Classes of styles under which a module gives shards where it is given shards
_TRANSPARENT = ("ReplicatedWithGradAllReduce", "LocalParamsParallel", "TensorParallelLayer", "PackedRowwiseParallel")


def _gives_shards(style: str) -> bool:
    layer = _style(style)
    name = type(layer).__name__
    return name == "PackedColwiseParallel" or (
        name == "ColwiseParallel" and isinstance(getattr(layer, "output_layouts", None), Shard)
    )


def _takes_shards(style: str) -> bool:
    layer = _style(style)
    return type(layer).__name__ == "RowwiseParallel" and isinstance(getattr(layer, "input_layouts", None), Shard)


def _style(name: str) -> Any:
    styles()
    return importlib.import_module("transformers.distributed.parallel_utils").ALL_PARALLEL_STYLES[name]


def _read_between(graph: _Graph) -> Iterator[Tensor]:
    """Yield the parameters that operators between the begins and the ends read, themselves or through operators that
    read nothing else."""
    inside = _between(graph)
    for node in inside:
        for child in _inputs(node):
            if child in inside or child in graph.begins:
                continue
            parameter = _only_parameter(child)
            if parameter is not None:
                yield parameter


def _between(graph: _Graph) -> dict[Any, None]:
    """Return the nodes from which both an end and a begin can be reached, in a fixed order."""
    reached: dict[Any, bool] = {}  # node -> a begin is behind it
    for end in graph.ends:
        stack = [(end, False)]
        while stack:
            node, is_done = stack.pop()
            if is_done:
                reached[node] = any(child in graph.begins or reached.get(child, False) for child in _inputs(node))
            elif node not in reached and node not in graph.begins and node not in graph.wholes:
                reached[node] = False
                stack.append((node, True))
                stack.extend((child, False) for child in _inputs(node))
    return {node: None for node, is_between in reached.items() if is_between}


def _inputs(node: Any) -> list[Any]:
    return [child for child, _ in node.next_functions if child is not None]


def _only_parameter(node: Any) -> Tensor | None:
    """Return the parameter of which the node's result is a function, and of nothing else; None otherwise."""
    seen = 0
    while seen < 8:
        if hasattr(node, "variable"):
            found: Tensor = node.variable
            return found
        inputs = _inputs(node)
        if len(inputs) != 1:
            return None
        node, seen = inputs[0], seen + 1
    return None


def _has_rule(name: str, plan: Mapping[str, str]) -> bool:
    rule = generic(name)
    return rule in plan or rule.rpartition(".")[0] in plan


# Sizes that do not divide.


def _uneven_sizes(built: BuiltModel, ranks: int) -> Iterator[PlanLint]:
    model: Any = built.model
    told: set[str] = set()
    for name, module in model.named_modules():
        rule = generic(name)
        style = model.tp_plan.get(rule)
        attribute = {"ColwiseParallel": "out_features", "RowwiseParallel": "in_features"}.get(
            type(_style(style)).__name__ if style else "", ""
        )
        size = getattr(module, attribute, None)
        if isinstance(size, int) and size % ranks and rule not in told:
            told.add(rule)
            yield PlanLint(
                "uneven_size", "tp", rule, f"{attribute} = {size} of {rule} does not divide by {ranks} ranks"
            )
    text_config = built.config.get_text_config()
    for field_name in ("num_attention_heads", "num_key_value_heads"):
        heads = vars(text_config).get(field_name)
        if isinstance(heads, int) and heads % ranks and any(rule.endswith("k_proj") for rule in model.tp_plan):
            text = f"{field_name} = {heads} does not divide by {ranks} ranks, and the plan shards heads"
            yield PlanLint("uneven_size", "tp", field_name, text)


def _uneven_experts(model: Any, ranks: int) -> Iterator[PlanLint]:
    told: set[str] = set()
    for name, parameter in model.named_parameters():
        rule = generic(name)
        if model.ep_plan.get(rule) == "grouped_gemm" and parameter.shape[0] % ranks and rule not in told:
            told.add(rule)
            text = f"the {parameter.shape[0]} experts of {rule} do not divide by {ranks} ranks"
            yield PlanLint("uneven_size", "ep", rule, text)


# Repairs.


def plan_repairs(model: Any, wrong: Sequence[WrongParameter]) -> tuple[PlanRepair, ...]:
    """Propose rules for wrong gradients, the likeliest first: each proposal is for all of them together.

    A part of the gradient on each rank: sum it. Summed once too often: leave it alone. Where neither fits: whole
    tensors between the modules around it, for one parent after the other.
    """
    known = set(styles())
    rules: dict[str, str] = {}
    for one in wrong:
        owner = generic(one.name).rpartition(".")[0]
        current = model.tp_plan.get(owner)
        if one.cause == "missing_reduction" and current in (None, WHOLE):
            rules[owner] = SUMMED
        elif one.cause == "scaled" and one.factor > 1 and current == SUMMED:
            rules[owner] = WHOLE
    found: list[PlanRepair] = []
    if rules and set(rules.values()) <= known:
        found.append(PlanRepair(_told(rules), PlanChanges(tp=rules)))
    parents = sorted({generic(one.name).rpartition(".")[0].rpartition(".")[0] for one in wrong})
    groups = [{parent} for parent in parents if len(parents) > 1] + [set(parents)]
    for group in groups:
        gathered = _gathered_around(model, group)
        if gathered and set(gathered.values()) <= known:
            found.append(PlanRepair(_told(gathered), PlanChanges(tp=gathered)))
    return tuple(found[:MOST_REPAIRS])


def _gathered_around(model: Any, parents: set[str]) -> dict[str, str]:
    """Return rules that make tensors whole between the colwise and rowwise modules of these parents."""
    swapped = {"colwise": _GATHERED, "rowwise": _SPLIT}
    return {
        rule: swapped[style]
        for rule, style in model.tp_plan.items()
        if rule.rpartition(".")[0] in parents and style in swapped
    }


def _told(rules: Mapping[str, str]) -> str:
    return "in the tp plan: " + ", ".join(f'"{rule}": "{style}"' for rule, style in sorted(rules.items()))


# Advice beside the verdict: what reads oddly in a plan, and rules that mend it, each of them tried.


_GRADIENTS = "gradient_"  # begins the codes of findings about gradients; their norm is no parameter's
_NORM = "gradient_norm_differs"


def verify_plan_of_library(request: ExternalRequest, progress: Progress) -> Report:
    """Verify the one program of a request, and advise. Raises NnscalerError as `program_of`."""
    report = verify_levels(program_of(request), request, progress)
    built, sizes = model_of(request)
    notes = tuple(f"the plan: {lint.text}" for lint in plan_lints(built, sizes) if lint.kind != "unmatched_rule")
    report = replace(report, notes=(*report.notes, *notes))
    wrong = list(_wrong(report.findings))
    if report.verdict is not Verdict.REFUTED or not wrong or request.level == "static":
        return report
    repair = _first_that_mends(request, plan_repairs(built.model, wrong), progress)
    if repair is None:
        return report
    help = f"{repair.text} (tried: with it every check passes)"
    return replace(report, findings=tuple(replace(f, help=help) if _is_of_gradients(f) else f for f in report.findings))


def _is_of_gradients(finding: Finding) -> bool:
    return finding.code.startswith(_GRADIENTS) and finding.code != _NORM


def _wrong(findings: Sequence[Finding]) -> Iterator[WrongParameter]:
    for finding in findings:
        facts = finding.counter_example
        if _is_of_gradients(finding) and "tensors" in facts:
            factor = facts.get("factor", "")
            for name in facts["tensors"].split(", "):
                yield WrongParameter(name, facts.get("cause", ""), facts.get("axis", ""), _number(factor))


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _first_that_mends(request: ExternalRequest, repairs: Sequence[PlanRepair], progress: Progress) -> PlanRepair | None:
    """Return the first repair with which every check of a run passes."""
    how = replace(request, level="run", executor="simulator", checkpoint=False)
    for repair in repairs:
        progress(f"trying {repair.text}")
        try:
            report = verify_levels(program_of(request, repair.changes), how, lambda text: None)
        except NnscalerError:
            continue  # the library refuses the rule
        if report.verdict.passes:
            return repair
    return None
