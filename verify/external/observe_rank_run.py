"""Run the program on one rank, and record what it holds and computes: the loss, every gradient, parameters and buffers
after each step, by the addresses of the plain model's elements."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from nnscaler.errors import NnscalerError, few
from nnscaler.runtime.nested_values import tensors_in
from nnscaler.tracing.export.independent_module_copies import copied_with_hooks
from verify.external.averaged_copies_beside_model import without_copies
from verify.external.parameter_mapping import Lookup, RankPiece, local_value, match, summed
from verify.external.program import Batch, ExternalProgram
from verify.external.ranks.call_sites import in_phase
from verify.external.ranks.torch_private import resting_shards
from verify.external.ranks.torch_private_trace import watch_redistributions
from verify.external.reference import (
    PlainReference,
    batch_of_step,
    computing_in,
    coordinates,
    copied,
    data_part,
    finish_backward,
    part_of,
)
from verify.external.shards_made_anew import with_shards_made_anew
from verify.external.torchrun.cuda_on_cpu import OnCpu
from verify.programs.module_tensors_by_every_name import Kind, state_of


@dataclass(frozen=True)
class ObservedStep:
    """One step on one rank. Tensors are local, by the program's names.

    loss        that `step` returned; None on ranks that have none
    gradients   before clipping, laid out as their parameters are; None where there is none
    state       parameters and buffers after the optimizer's update
    norm        of the gradients, where they were clipped
    late        gradients after the optimizer's update, as far as it made them others: it may average them itself
    unread      parameters whose gradient no optimizer of this rank reads
    replaced    those of them in whose place optimizers hold copies: their gradients are left out, and not compared
    """

    loss: Tensor | None
    gradients: Mapping[str, Tensor | None]
    state: Mapping[str, Tensor]
    norm: Tensor | None = None
    late: Mapping[str, Tensor] = field(default_factory=dict)
    unread: frozenset[str] = frozenset()
    replaced: frozenset[str] = frozenset()


@dataclass(frozen=True)
class RankRecord:
    """A run of the program on one rank.

    coordinate  on the mesh
    pieces      its parameters and buffers
    steps       one for each step
    dtypes      floating dtypes of what its modules return
    optimizer_bytes
                of its states, after the last step
    redistributed
                operators for which DTensor changed the layout of an operand in the first step, one entry each time
    hooked      parameters with a hook of the program's on their gradient
    evaluating  modules in evaluation mode after the steps, where all of the plain model's are in training mode
    placed      coordinate on the meshes of its DTensors, by the names of their axes
    """

    rank: int
    coordinate: Mapping[str, int]
    pieces: tuple[RankPiece, ...]
    steps: tuple[ObservedStep, ...]
    dtypes: frozenset[torch.dtype] = frozenset()
    optimizer_bytes: int = 0
    redistributed: tuple[str, ...] = ()
    hooked: tuple[str, ...] = ()
    evaluating: tuple[str, ...] = ()
    placed: Mapping[str, int] = field(default_factory=dict)


def observe(
    program: ExternalProgram,
    model: nn.Module,
    reference: PlainReference,
    lookup: Lookup,
    rank: int,
    known: Sequence[RankPiece] = (),
    dropout: bool = False,
) -> RankRecord:
    """Parallelise a copy of the plain model on this rank, whose process group is up, and train a few steps.

    `known`: this rank's pieces in float64, for runs in narrower dtypes. Raises what the program raises.
    """
    with parallelised(program, model, reference.dtype, dropout) as made:
        tensors, at = list(tensors_of_program(made, program)), coordinates(program)[rank]
        pieces = match(tensors, lookup, program.names, known)
        places = {axis: (at[axis], size) for axis, size in program.mesh}
        pieces = without_copies(with_shards_made_anew(pieces, tensors, lookup, places, known), lookup.space)
        hooked = tuple(name for name, tensor, _ in tensors_of_program(made, program) if tensor._backward_hooks)
        optimizers = optimizers_of(program, made, reference.learning_rate)
        copies = _copies_of(optimizers, [tensor for _, tensor, _ in tensors_of_program(made, program)])
        filled = _placed_copies(copies, lookup, known)
        held_alone = {piece.local: (copies[piece.local], piece.shape[0]) for piece in filled}
        steps: list[ObservedStep] = []
        dtypes: set[torch.dtype] = set()
        moves: list[str] = []
        for module in (module for part in modules_of(made) for module in part.modules()):
            module.register_forward_hook(partial(_note_dtype, dtypes))
        for number in range(len(reference.steps)):
            for optimizer in optimizers:
                optimizer.zero_grad()
            for parameter in _parameters_of(made, program):
                parameter.grad = None
            with watch_redistributions(moves.append if number == 0 else lambda move: None):
                rows = rows_of(program, reference, rank, number)
                steps.append(_with_copies(_step(program, made, optimizers, rows, number), held_alone))
        states = (getattr(one, "state", None) for one in optimizers)  # by tensor, of an optimizer of torch
        held = sum(map(_bytes, tensors_in([list(s.values()) for s in states if isinstance(s, Mapping)])))
        placed = dict(_placed(tensor for _, tensor, _ in tensors_of_program(made, program)))
        resting = [name or type(module).__name__ for name, module in _named_modules(made) if not module.training]
    pieces = (*pieces, *(p for p in filled if any(step.gradients[p.local] is not None for step in steps)))
    evaluating = tuple(resting) if all(module.training for module in model.modules()) else ()
    return RankRecord(rank, at, pieces, tuple(steps), frozenset(dtypes), held, tuple(moves), hooked, evaluating, placed)


def _placed(tensors: Iterable[Tensor]) -> Iterator[tuple[str, int]]:
    for mesh in (tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)):
        yield from zip(mesh.mesh_dim_names or (), mesh.get_coordinate() or (), strict=False)


def _named_modules(made: Any) -> Iterator[tuple[str, nn.Module]]:
    for part in modules_of(made):
        yield from part.named_modules()


def _bytes(value: Tensor) -> int:
    local = local_value(value)
    return local.numel() * local.element_size()


def _note_dtype(dtypes: set[torch.dtype], _module: nn.Module, _inputs: object, output: object) -> None:
    dtypes.update(t.dtype for t in tensors_in(output) if t.is_floating_point())


@contextmanager
def parallelised(
    program: ExternalProgram, model: nn.Module, dtype: torch.dtype, dropout: bool = False
) -> Iterator[Any]:
    """Parallelise a copy of the plain model on this rank; while open, it computes in the dtype."""
    mine = copied_with_hooks(model)
    torch.manual_seed(0)
    with computing_in(mine, dtype, dropout):
        pass  # the copy is converted for good
    axes = tuple(axis for axis, _ in program.mesh)
    # what is drawn here stays as it is: values that ranks make, and differ in, are to be seen
    with computing_in(None, dtype, True) if dtype == torch.float64 else OnCpu():
        mesh = init_device_mesh("cpu", tuple(size for _, size in program.mesh), mesh_dim_names=axes)
        with in_phase("parallelize"):
            made = program.parallelize(mine, mesh)
    with computing_in(None, dtype, dropout):
        yield mine if made is None else made


def rows_of(program: ExternalProgram, reference: PlainReference, rank: int, number: int) -> Batch:
    """Return this rank's rows of the batch of a step."""
    index, parts = data_part(program, coordinates(program)[rank])
    return copied(part_of(batch_of_step(reference.batch, number), index, parts), reference.dtype)


PHASES = ("forward", "backward", "clip", "optimizer")  # a step that runs its backward pass by itself is all forward


def phase_of_step(name: str, number: int) -> str:
    """Return the name of a phase of a step, which calls of that time are recorded with."""
    return f"{name} of step {number}"


def run_step(program: ExternalProgram, made: Any, batch: Batch, number: int = 0) -> Tensor | None:
    """Run forward and backward, and return what `step` returned."""
    with in_phase(phase_of_step("forward", number)):
        loss = program.step(made, batch)
    with in_phase(phase_of_step("backward", number)):
        finish_backward(loss, _parameters_of(made, program))
    return loss


def _step(
    program: ExternalProgram, made: Any, optimizers: Sequence[Optimizer], batch: Batch, number: int
) -> ObservedStep:
    loss = run_step(program, made, batch, number)
    named = list(tensors_of_program(made, program))
    gradients = {name: local_gradient(tensor) for name, tensor, kind in named if kind == "parameter"}
    with in_phase(phase_of_step("clip", number)):
        norm = _clip(program, made) if program.max_norm is not None else None
    with in_phase(phase_of_step("optimizer", number)):
        for optimizer in optimizers:
            optimizer.step()
    state = {name: local_value(summed(tensor)).clone() for name, tensor, _ in tensors_of_program(made, program)}
    after = {name: local_gradient(tensor) for name, tensor, kind in named if kind == "parameter"}
    unread = unread_by(optimizers, {name: tensor for name, tensor, kind in named if kind == "parameter"})
    return ObservedStep(_whole(loss), gradients, state, norm, changed(gradients, after), unread)


# What an optimizer holds instead of the model's parameters: flat shards of them, copies in a wider dtype.


def _copies_of(optimizers: Sequence[Optimizer], known: Sequence[Tensor]) -> dict[str, Tensor]:
    others = {id(tensor) for tensor in known}
    found: dict[str, Tensor] = {}
    for number, optimizer in enumerate(optimizers):
        whose = "the optimizer" if len(optimizers) == 1 else f"optimizer {number + 1}"
        tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        found |= {f"parameter {i} of {whose}": t for i, t in enumerate(tensors) if id(t) not in others}
    return found


def _placed_copies(copies: Mapping[str, Tensor], lookup: Lookup, known: Sequence[RankPiece]) -> tuple[RankPiece, ...]:
    """Return a piece for each tensor that stands in one place in the model's parameters as they begin, end to end."""
    found = [piece for piece in known if piece.local in copies]
    for name, tensor in () if known else copies.items():
        values = local_value(tensor)
        if len(runs := lookup.runs(values)) == 1:
            (places,) = runs
            names, began = lookup.space.names_at(places), float(values.double().sum())
            found.append(RankPiece(name, "parameter", (len(places),), names, places, "value", "plain", False, began))
    return tuple(found)


def _with_copies(step: ObservedStep, copies: Mapping[str, tuple[Tensor, int]]) -> ObservedStep:
    """Add what an optimizer's step has made of its copies, and the gradients that it has given them: so many elements,
    for padding lies behind them."""
    gradients = dict(step.gradients)
    for name, (tensor, count) in copies.items():
        gradients[name] = None if tensor.grad is None else local_value(tensor.grad).flatten()[:count].clone()
    state = {name: local_value(tensor).flatten()[:count].clone() for name, (tensor, count) in copies.items()}
    return replace(step, gradients=gradients, state={**step.state, **state})


def unread_by(optimizers: Iterable[Any], parameters: Mapping[str, Tensor]) -> frozenset[str]:
    """Return the parameters that no optimizer holds: another rank may, which gets the sum of their gradients alone."""
    held = {id(tensor) for one in optimizers for group in one.param_groups for tensor in group["params"]}
    return frozenset(name for name, tensor in parameters.items() if id(tensor) not in held)


def changed(before: Mapping[str, Tensor | None], after: Mapping[str, Tensor | None]) -> Mapping[str, Tensor]:
    """Return the gradients that became others."""
    pairs = {name: (before.get(name), late) for name, late in after.items() if late is not None}
    return {name: late for name, (one, late) in pairs.items() if one is None or not torch.equal(one, late)}


def local_gradient(parameter: Tensor) -> Tensor | None:
    """Return a copy of the local gradient, laid out as the parameter is: operators of DTensor choose other layouts."""
    gradient: Any = parameter.grad
    if gradient is None:
        return None
    if isinstance(gradient, DTensor):
        if not isinstance(parameter, DTensor):
            gradient = gradient.full_tensor()
        elif gradient.placements != parameter.placements:
            gradient = gradient.redistribute(parameter.device_mesh, parameter.placements)
    return local_value(gradient.to_dense()).clone()


def _clip(program: ExternalProgram, made: Any) -> Tensor | None:
    assert program.max_norm is not None
    if program.clip is not None:
        norm = program.clip(made, program.max_norm)
    else:
        named = [(n, t) for n, t, kind in tensors_of_program(made, program) if kind == "parameter"]
        try:
            norm = torch.nn.utils.clip_grad_norm_([tensor for _, tensor in named], program.max_norm)
        except RuntimeError as error:
            raise _sparse(named, program) or _mixed(named) or error from None
    return _whole(torch.as_tensor(norm)) if norm is not None else None


def note_on_hooks(whose: str, names: Sequence[str]) -> str:
    """Return what is said of parameters whose gradients hooks of the user's see."""
    return (
        f"hooks of {whose} (`register_hook`) see the gradients of {few(names)}: what one does to gradients of another "
        "size, as a clamp does, no run on this batch shows"
    )


def _mixed(parameters: Sequence[tuple[str, Tensor]]) -> RuntimeError | None:
    """Return why no norm can be taken, where some parameters are DTensors and some are not; None for another reason."""
    plain = [name for name, tensor in parameters if not isinstance(tensor, DTensor)]
    if len(plain) in (0, len(parameters)):
        return None
    shown = few(plain, 4)
    return RuntimeError(
        f"`clip_grad_norm_` takes no norm of DTensors and plain tensors together, and {shown} stayed plain: shard the "
        "root module too (`fully_shard(model)` after its layers), or define `clip(model, max_norm)`"
    )


def _sparse(parameters: Sequence[tuple[str, Tensor]], program: ExternalProgram) -> NnscalerError | None:
    """Return why no norm can be taken, of the plain model's gradients either, where some are sparse; None for another
    reason."""
    sparse = [name for name, tensor in parameters if tensor.grad is not None and tensor.grad.layout != torch.strided]
    if not sparse:
        return None
    message = f"`clip_grad_norm_` takes no norm of sparse gradients, and that of {few(sparse, 4)} is sparse"
    help = "define `clip(model, max_norm)`, which leaves them out, or makes them dense by `grad.to_dense()`"
    return NnscalerError("usage", message, program.where, help=help)


def _whole(value: Any) -> Tensor | None:
    """Return a scalar as it is for the whole mesh; None where there is none."""
    return whole_scalar(value) if isinstance(value, Tensor) and value.numel() == 1 else None


def whole_scalar(value: Tensor) -> Tensor:
    """Return a scalar as it is for the whole mesh."""
    whole = value.detach()
    return local_value(whole.full_tensor() if isinstance(whole, DTensor) else whole).reshape(()).clone()


def optimizers_of(program: ExternalProgram, made: Any, learning_rate: float) -> tuple[Optimizer, ...]:
    """Return the program's optimizers of what `parallelize` made, or SGD."""
    if (own := program.optimizers(made)) is not None:
        return own
    parameters = [parameter for parameter in _parameters_of(made, program) if parameter.requires_grad]
    if not parameters:  # a rank may hold nothing that is trained
        return (torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=learning_rate),)
    # one by one: torch's grouped updates refuse a mix of DTensors and plain tensors
    return (torch.optim.SGD(parameters, lr=learning_rate, foreach=False),)


def _parameters_of(made: Any, program: ExternalProgram) -> Iterator[Tensor]:
    return (tensor for _, tensor, kind in tensors_of_program(made, program) if kind == "parameter")


def modules_of(made: Any) -> tuple[nn.Module, ...]:
    """Return the modules in what `parallelize` returned: itself, a pipeline schedule's stages, or those in a container
    or object. Each is returned once, and none that is a part of another: an optimizer would update it twice."""
    found = tuple(dict.fromkeys(_modules(made, 2)))
    inner = {id(part) for module in found for part in module.modules() if part is not module}
    return tuple(module for module in found if id(module) not in inner)


def _modules(made: Any, depth: int) -> Iterator[nn.Module]:
    if isinstance(made, nn.Module):
        yield made
    elif depth and isinstance(made, Mapping):
        for value in made.values():
            yield from _modules(value, depth - 1)
    elif depth and isinstance(made, tuple | list):
        for value in made:
            yield from _modules(value, depth - 1)
    elif depth and hasattr(made, "submod"):  # a stage of torch.distributed.pipelining
        yield made.submod
    elif depth and hasattr(made, "__dict__"):
        stages = [v for k, v in vars(made).items() if k in ("_stages", "_stage")]
        for value in stages or vars(made).values():
            yield from _modules(value, depth if stages else depth - 1)


def tensors_of_program(made: Any, program: ExternalProgram) -> Iterator[tuple[str, Tensor, Kind]]:
    """Yield every parameter and buffer of the program on this rank by one name, each object once.

    Raises NnscalerError `usage` where what `parallelize` returned has no module.
    """
    modules = modules_of(made)
    if not modules:
        message = f"`parallelize` of {program.name} returns {type(made).__name__}, in which there is no torch.nn.Module"
        help = "return the parallel module, a pipeline schedule, or an object or list that holds the modules"
        raise NnscalerError("usage", message, program.where, help=help)
    seen: set[int] = set()
    for number, module in enumerate(modules):
        resting = resting_shards(module)
        for name, registered, kind in state_of(module):
            tensor = resting.get(id(registered), registered)
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield (name if len(modules) == 1 else f"{name} of module {number}"), tensor, kind
