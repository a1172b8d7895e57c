"""Compare a traced graph with its module: results, gradients and buffers on the sample batch, against eager."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from math import inf

import torch
from torch import Tensor, nn

from op_registry.registry import facts_of
from op_registry.source_location import SourceLocation

from nnscaler.errors import NnscalerError, few
from nnscaler.global_random_generators import python_states, set_states
from nnscaler.ir.graph import LOSS, Graph
from nnscaler.runtime.tensor_bits_and_differences import FAMILY_SHARE, FILL, FLOAT64_BOUND, difference, family_scale
from nnscaler.runtime.training.autocast_on_any_device import AskedDtypes
from nnscaler.tracing.export.independent_module_copies import copied
from nnscaler.tracing.export.loss_module import results_of
from nnscaler.tracing.export.mutated_attributes_and_draws import (
    Again,
    attributes_kept,
    draws_located,
)
from nnscaler.tracing.export.user_source_locations import location_of_exception, model_errors
from nnscaler.tracing.float64_run import exact, exact_tensor, own_dtype, run_backward, without_dropout
from nnscaler.tracing.run_graph import run_graph
from nnscaler.tracing.sample_inputs import SampleInputs

_ROUNDING = 1e-5  # relative, between two runs of the same operations in the model's own dtype
_DRAWS = 16  # forwards that may draw other numbers

_HELP = (
    "export followed another path than eager does: look for branches on torch.compiler.is_exporting(), hooks, "
    "torch.utils.checkpoint(use_reentrant=True), batch norm in torch.utils.checkpoint (whose statistics eager updates "
    "once more in backward), in-place changes under no_grad, or torch.Tensor(data), whose dtype is torch's default "
    "(torch.tensor(data) has its own), near this line"
)


@dataclass(frozen=True)
class TrainingStep:
    """The results of one forward and backward. Tensors are by their first name in the model.

    results     by name, the loss first
    gradients   by parameter; None where the loss does not reach it
    buffers     after forward
    """

    results: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor | None]
    buffers: Mapping[str, Tensor]


def check_trace(module: nn.Module, graph: Graph, state: Mapping[str, Tensor], sample: SampleInputs) -> tuple[str, ...]:
    """Compare in float64, or in the model's own dtype where it cannot run in float64; gives notes.

    Raises NnscalerError "trace_unfaithful", naming the first thing that differs.
    """
    try:
        model = copied(module)
    except NnscalerError:
        raise
    except Exception as error:  # noqa: BLE001 - a module may hold anything
        return (f"the trace is not checked: the module cannot be copied ({type(error).__name__})",)
    try:
        with attributes_kept(model, {}), exact(model, told=own_dtype(module)):
            eager = _eager_step(model, graph, sample, "float64")
        traced = _graph_step(graph, state, sample, "float64")
    except NnscalerError:
        raise
    except Exception as error:  # noqa: BLE001 - an operator without float64 raises whatever it raises
        note = f"the trace is checked in the model's own dtype: it does not run in float64 ({type(error).__name__})"
        eager = _native_step(module, graph, sample)
        traced = _graph_step_or_refusal(graph, state, sample)
        _compare(graph, eager, traced, _loose_tolerance(graph))
        return (note, *_zero_gradients(eager, traced))
    _compare(graph, eager, traced, FLOAT64_BOUND)
    return _zero_gradients(eager, traced)


def _loose_tolerance(graph: Graph) -> float:
    """Return the square root of the coarsest precision in the graph: 3e-4 for float32, 9e-2 for bfloat16."""
    floating = [d for d in {getattr(torch, t.dtype) for t in graph.tensors.values()} if d.is_floating_point]
    return float(max(torch.finfo(d).eps for d in floating) ** 0.5)


def _eager_step(model: nn.Module, graph: Graph, sample: SampleInputs, precision: str | None) -> TrainingStep:
    inputs = _inputs(sample, precision)
    model.zero_grad(set_to_none=True)
    args, kwargs = sample.rebuild(inputs)
    with torch.random.fork_rng(devices=_generators()):
        torch.manual_seed(0)
        found = results_of(model(*args, **kwargs))
        loss = found.loss
        if loss is not None and loss.requires_grad:
            run_backward(loss, torch.ones_like(loss))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    return TrainingStep(
        {name: tensor.detach() for name, tensor in found.tensors.items()},
        {t.fqns[0]: _dense(parameters[t.fqns[0]].grad) for t in graph.with_role("parameter")},
        {t.fqns[0]: buffers[t.fqns[0]].detach() for t in graph.with_role("buffer")},
    )


def second_forward(module: nn.Module, sample: SampleInputs) -> Again | None:
    """Run the second step of copies of the module, from the buffers that the first one leaves: one with the attributes
    of before the first, as a program has them, one with those of after it; then both on other values, where the module
    may have kept something of the first batch. None where that cannot be seen."""
    changed: dict[str, str] = {}
    try:
        program, eager = copied(module), copied(module)
        with attributes_kept(program, {}):
            _forward(program, sample, advance=True)
        with attributes_kept(program, {}):
            expected = _forward(program, sample)
        with attributes_kept(program, {}):
            fresh = _other_forward(program, sample)
        with attributes_kept(eager, {}):  # attributes of classes, and globals, are those of the module
            _forward(eager, sample, advance=True)
            with attributes_kept(eager, changed):
                found = _forward(eager, sample)
            differs = _first_difference(expected, found)
            if not differs and fresh is not None:
                later = _other_forward(eager, sample)
                differs = "a result differs" if later is None else _first_difference(fresh, later)
    except Exception:  # noqa: BLE001 - a module may hold and raise anything; the self-check tells what it is
        return None
    return Again(changed, differs)


def _other_forward(model: nn.Module, sample: SampleInputs) -> dict[str, Tensor] | None:
    """Return what a forward gives on the sample's numbers in another order, smaller where they are floating; None where
    the model refuses them."""
    generator = torch.Generator().manual_seed(1)
    values = {
        name: t.flatten()[torch.randperm(t.numel(), generator=generator)].view(t.shape)
        for name, t in sample.tensors.items()
    }
    other = replace(sample, tensors={n: t * 0.75 if t.is_floating_point() else t for n, t in values.items()})
    try:
        return _forward(model, other)
    except Exception:  # noqa: BLE001 - these values are our choice
        return None


def forwards_of_draws(module: nn.Module, sample: SampleInputs) -> Again | None:
    """Run a copy of the module from several states of Python's generators; None where that cannot be seen."""
    places: dict[str, SourceLocation | None] = {}
    before = python_states()
    try:
        model = copied(module)
        with draws_located(places), attributes_kept(model, {}):
            first = _forward(model, sample)
        for _ in range(_DRAWS):  # the generators go on
            with attributes_kept(model, {}):
                differs = _first_difference(first, _forward(model, sample))
            if differs:
                return Again({}, differs, places)
    except Exception:  # noqa: BLE001 - as above
        return None
    finally:
        set_states(before)
    return Again({}, "", places)


def _forward(model: nn.Module, sample: SampleInputs, advance: bool = False) -> dict[str, Tensor]:
    """Return the results of a forward, and the buffers that it leaves, in words. The buffers that the model had stay as
    they were, unless it is to `advance`; one that forward makes is there for the next."""
    held = [(part._buffers, dict(part._buffers)) for part in model.modules()]
    values = {t: t.clone() for _, tensors in held for t in tensors.values() if t is not None}
    try:
        with without_dropout(model), torch.no_grad(), torch.random.fork_rng(devices=_generators()):
            torch.manual_seed(0)
            args, kwargs = sample.rebuild(_inputs(sample, None))
            results = results_of(model(*args, **kwargs)).tensors
        found = {"the loss" if name == LOSS else f"the result `{name}`": t.clone() for name, t in results.items()}
        return {**found, **{f"the buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}}
    finally:
        if not advance:
            for now, before in held:
                now.update({name: buffer for name, buffer in before.items() if buffer is not None})
            for tensor, value in values.items():
                tensor.data = value


def _first_difference(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> str:
    """Name what differs by more than rounding; "" where nothing does."""
    for name, value in first.items():
        other = second.get(name)
        if other is None or difference(other, value, _scale([value])).relative > _ROUNDING:
            return f"{name} differs"
    return ""


def _native_step(module: nn.Module, graph: Graph, sample: SampleInputs) -> TrainingStep:
    """Run a step of the module in its own dtype. Raises NnscalerError "model_raised"."""
    with model_errors("the model itself raises on the sample batch"), without_dropout(module):
        return _eager_step(copied(module), graph, sample, None)


def _returned(graph: Graph, name: str, value: Tensor, precision: str | None) -> Tensor:
    """Return a result as forward returns it; in an exact run nothing is cast."""
    for dtype in graph.loss_casts if name == LOSS and precision is None else ():
        value = value.to(getattr(torch, dtype))
    return value


def _graph_step(graph: Graph, state: Mapping[str, Tensor], sample: SampleInputs, precision: str | None) -> TrainingStep:
    leaves: dict[str, Tensor] = {}
    for tensor in graph.with_role("parameter", "buffer", "constant"):
        fqn = tensor.fqns[0]
        value = state[fqn].detach()
        value = value.clone() if precision is None else exact_tensor(value, getattr(torch, precision)).clone()
        leaves[fqn] = value.requires_grad_(state[fqn].requires_grad) if tensor.role == "parameter" else value
    with torch.random.fork_rng(devices=_generators()):
        torch.manual_seed(0)
        values = run_graph(graph, leaves, _inputs(sample, precision), precision=precision)
    loss = values.get(graph.loss)
    trainable = [t.fqns[0] for t in graph.with_role("parameter") if leaves[t.fqns[0]].requires_grad]
    found: tuple[Tensor | None, ...] = (None,) * len(trainable)
    if loss is not None and loss.requires_grad:
        with AskedDtypes() if precision == "float64" else nullcontext():
            found = torch.autograd.grad(loss, [leaves[n] for n in trainable], allow_unused=True)
    by_name = dict(zip(trainable, map(_dense, found), strict=True))
    after = {graph.tensors[name].fqns[0]: values[value].detach() for name, value in graph.updates}
    return TrainingStep(
        {name: _returned(graph, name, values[tensor].detach(), precision) for name, tensor in graph.results},
        {t.fqns[0]: by_name.get(t.fqns[0]) for t in graph.with_role("parameter")},
        {t.fqns[0]: after.get(t.fqns[0], leaves[t.fqns[0]]) for t in graph.with_role("buffer")},
    )


def _graph_step_or_refusal(graph: Graph, state: Mapping[str, Tensor], sample: SampleInputs) -> TrainingStep:
    """Run the graph in the model's own dtype. Raises NnscalerError "trace_unfaithful" where that raises."""
    try:
        return _graph_step(graph, state, sample, None)
    except Exception as error:
        told = f"it raises, and the model does not: {type(error).__name__}: {error}"
        raise NnscalerError(
            "trace_unfaithful",
            f"the traced graph is not the model: {told}",
            location_of_exception(error),
            "give an autograd.Function tensors and plain values: one that calls a function or module which it is given "
            "reads that one's parameters, not those of a rank",
        ) from error


def _generators() -> list[int]:
    return list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []


def _inputs(sample: SampleInputs, precision: str | None) -> dict[str, Tensor]:
    if precision is None:
        return {name: t.clone() for name, t in sample.tensors.items()}
    floating = getattr(torch, precision)
    return {name: exact_tensor(t, floating).clone() for name, t in sample.tensors.items()}


def _compare(graph: Graph, eager: TrainingStep, traced: TrainingStep, tolerance: float) -> None:
    for name, tensor in graph.results:  # each has a size of its own
        what = "the loss" if name == LOSS else f"the result `{name}`"
        place = graph.producers[tensor].where
        _compare_family(graph, what, {"": eager.results[name]}, {"": traced.results[name]}, tolerance, place)
    _compare_family(graph, "the gradient of {}", eager.gradients, traced.gradients, tolerance, fill=inf)
    _compare_family(graph, "the buffer {} after the step", eager.buffers, traced.buffers, tolerance)


def _compare_family(
    graph: Graph,
    what: str,
    right: Mapping[str, Tensor | None],
    found: Mapping[str, Tensor | None],
    tolerance: float,
    place: SourceLocation | None = None,
    fill: float = FILL,
) -> None:
    scale = _scale(right.values(), fill)
    for name, expected in right.items():
        actual = found[name]
        if expected is None and actual is None:
            continue
        if actual is None and expected is not None and not expected.any():
            continue  # a tensor that is overwritten as a whole: `_zero_gradients` tells the user
        if expected is None or actual is None:
            side = "the model gives none" if expected is None else "the traced graph gives none"
            raise _unfaithful(graph, what.format(name), side, place or _first_use(graph, name))
        error = difference(actual, expected, scale).relative
        if error > tolerance:
            text = f"differs by {error:.1e} (relative)"
            raise _unfaithful(graph, what.format(name), text, place or _first_use(graph, name))


def _scale(family: Iterable[Tensor | None], fill: float = FILL) -> float:
    """Return the scale of tensors; that of the number 1 for zeros alone."""
    return family_scale(family, fill) or 1.0 / FAMILY_SHARE


def _zero_gradients(eager: TrainingStep, traced: TrainingStep) -> tuple[str, ...]:
    """Eager's autograd gives zeros for what is overwritten in place; in a graph of values nothing leads there."""
    names = [n for n, g in eager.gradients.items() if g is not None and traced.gradients[n] is None]
    listed = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return (f"the gradient of {listed} is zero in eager, and there is none in the traced graph",) if names else ()


def _dense(gradient: Tensor | None) -> Tensor | None:
    """Return the gradient of an embedding with `sparse=True` as any other one."""
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient


def _first_use(graph: Graph, fqn: str) -> SourceLocation | None:
    names: Iterable[str] = [t.name for t in graph.tensors.values() if fqn in t.fqns]
    for operation in graph.operations:
        if not set(names).isdisjoint(operation.inputs):
            return operation.where
    return None


def _unfaithful(graph: Graph, what: str, how: str, where: SourceLocation | None) -> NnscalerError:
    """Return the error, whose help begins with the user's operators: one that draws or remembers is none."""
    own = list(dict.fromkeys(op.operator for op in graph.operations if facts_of(op.operator).where is not None))
    known = (
        f"`nnscaler verify-op` says whether {few(own)} draws random numbers or keeps state; otherwise, " if own else ""
    )
    return NnscalerError("trace_unfaithful", f"the traced graph is not the model: {what}: {how}", where, known + _HELP)
