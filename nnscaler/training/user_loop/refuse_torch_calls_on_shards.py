"""Refuse torch's own functions on the tensors of an engine, where they would be wrong without a word.

torch takes each tensor for a whole one, and what it is given for all there is. A rank has shards: the norm of their
gradients, an update that couples their elements, and a GradScaler's look for what is not finite would be those of this
rank alone. And the module that was compiled is not what a step trains.

The functions are looked at where they do their work, so that it does not matter when they were imported.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from threading import Lock, Thread, current_thread, main_thread
from types import CellType, GeneratorType
from typing import Any, Protocol

from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel

from nnscaler.errors import NnscalerError
from nnscaler.layout import Sharded
from nnscaler.manifest import Manifest
from nnscaler.runtime.stage_base_class import Parameter, Stage
from nnscaler.runtime.training.executor import RankExecutor
from nnscaler.runtime.training.saving.rank_tensors_as_boxes import StoredTensor
from nnscaler.training.splittable_optimizers_and_groups import check_group, groups_checked
from nnscaler.training.user_loop.tell_uses_of_stale_module import version_of

_USE_ENGINE = "engine.clip_grad_norm_(max_norm) has the norm of the whole model; inf for the norm alone"
_OWN = "the engine trains tensors of its own: engine.optimizer(...) updates them, and engine.clip_grad_norm_ clips them"
_NO_SCALER = "bfloat16 needs no scale; nnscaler.LossScaler scales the loss of engine.step"
_AROUND = "put it around what is around the part"
_AVERAGE = (
    "module.load_state_dict(engine.state_dict()), on every rank, gives it the trained values; an average of shards is "
    "kept by an optimizer of yours (docs/train.md)"
)


class Trains(Protocol):
    """The holder of tensors that are trained on a rank: an Engine."""

    world_size: int

    @property
    def executor(self) -> RankExecutor: ...
    @property
    def manifest(self) -> Manifest: ...
    @property
    def parameters(self) -> Mapping[str, nn.Parameter]: ...
    def stored(self) -> list[StoredTensor]: ...


@dataclass(frozen=True)
class _Trained:
    """A tensor that a live engine trains.

    engine  that does
    name    in the model
    tensor  itself
    lacks   why this rank has not all of it and its like; empty where it has
    """

    engine: Trains
    name: str
    tensor: nn.Parameter
    lacks: str


@dataclass(frozen=True)
class _LiveEngine:
    """An engine that may be alive.

    thread    that made it
    module    that its program was compiled from, or nothing
    versions  of the module's parameters then, added up
    """

    thread: Thread
    module: Callable[[], nn.Module | None]
    versions: int

    @property
    def is_others(self) -> bool:
        """True for the engine of a rank that runs as another thread: torch has no lock around its gradients."""
        return self.thread not in (current_thread(), main_thread()) and self.thread.is_alive()


_engines: weakref.WeakKeyDictionary[Trains, _LiveEngine] = weakref.WeakKeyDictionary()
_lock = Lock()  # ranks may be threads
_passed: weakref.WeakKeyDictionary[Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()


def watch(engine: Trains, module: nn.Module | None) -> None:
    """Refuse, while the engine lives, torch's functions where they would be wrong on its tensors, or do nothing on
    those of the module that it was compiled from."""
    with _lock:
        _install()
        held = (lambda: None) if module is None else weakref.ref(module)
        _engines[engine] = _LiveEngine(current_thread(), held, 0 if module is None else _versions(module))


@cache
def _install() -> None:
    _look_first(clip_grad.clip_grad_norm_, "parameters", _clipped)
    _look_first(clip_grad._get_total_norm, "tensors", _measured)
    register_optimizer_step_pre_hook(_before_step)
    _look_before(GradScaler, "_unscale_grads_", _unscaled)
    _look_before(AveragedModel, "update_parameters", _averaged)
    _look_before(DistributedDataParallel, "__init__", _made_equal)


def _look_before(cls: type, name: str, look: Callable[[Any], None]) -> None:
    """Let what a method of torch is given first be looked at before."""
    method = getattr(cls, name)

    @wraps(method)
    def looked(self: Any, *args: Any, **kwargs: Any) -> Any:
        look(next(iter((*args, *kwargs.values()))))
        return method(self, *args, **kwargs)

    setattr(cls, name, looked)


def _look_first(function: Any, argument: str, look: Callable[[list[Tensor]], None]) -> None:
    """Let a function of torch, also where it is imported already, have its tensors looked at before it works on them.
    It is a wrapper, as `no_grad` makes one: what it wraps is exchanged."""
    inner = function.__wrapped__
    signature = inspect.signature(inner)

    def looked(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments[argument]
        tensors = [given] if isinstance(given, Tensor) else list(given)
        look(tensors)
        if isinstance(given, GeneratorType):  # torch tells of an empty one
            bound.arguments[argument] = (tensor for tensor in tensors)
        elif not isinstance(given, Tensor):
            bound.arguments[argument] = tensors
        return inner(*bound.args, **bound.kwargs)

    cell: CellType = next(cell for cell in function.__closure__ if cell.cell_contents is inner)
    cell.cell_contents = looked


def watched() -> list[Trains]:
    """Return the live engines of this rank."""
    with _lock:
        return [engine for engine, found in _engines.items() if not found.is_others]


def _held() -> dict[int, _Trained]:
    """Return by id what the live engines of this rank train."""
    found: dict[int, _Trained] = {}
    for engine in watched():
        for stage in engine.executor.stages.values():
            for name, described in stage.parameters.items():
                tensor = stage.at_rest[name]
                found[id(tensor)] = _Trained(engine, described.fqn, tensor, _lacks(stage, described, engine.world_size))
    return found


def _lacks(stage: Stage, described: Parameter, world_size: int) -> str:
    sizes = stage.sizes()
    cut = [a for a, state in described.at_rest.items() if isinstance(state, Sharded) and sizes.get(a, 1) > 1]
    ranks = {*stage.ranks, *(rank for copy in described.copies for rank in copy)}
    if cut:
        return f"rests in shards over `{'`, `'.join(cut)}`"
    return f"is on ranks {sorted(ranks)} of {world_size} alone" if len(ranks) < world_size else ""


def _refuse_shards(held: Mapping[int, _Trained], given: Iterable[int], what: str, help: str) -> None:
    found = next((held[one] for one in given if one in held and held[one].lacks), None)
    if found is not None:
        message = f"{what} what this rank holds, and `{found.name}` {found.lacks}"
        raise NnscalerError("torch_sees_shards", message, help=help)


def _clipped(parameters: Sequence[Tensor]) -> None:
    _refuse_shards(_held(), map(id, parameters), "torch.nn.utils.clip_grad_norm_ clips by the norm of", _USE_ENGINE)
    if not any(tensor.grad is not None for tensor in parameters):
        _refuse_untrained(parameters, "clip_grad_norm_", _OWN)


def _measured(tensors: Sequence[Tensor]) -> None:
    held = _held()
    gradients = {id(h.tensor.grad): h for h in held.values() if h.tensor.grad is not None}
    _refuse_shards({**held, **gradients}, map(id, tensors), "torch.nn.utils.get_total_norm is that of", _USE_ENGINE)


def _unscaled(optimizer: Optimizer) -> None:
    given = [p for group in optimizer.param_groups for p in group["params"]]
    _refuse_shards(_held(), map(id, given), "a GradScaler skips a step by", _NO_SCALER)


def _averaged(module: nn.Module) -> None:
    _refuse_untrained(list(module.parameters()), "AveragedModel.update_parameters", _AVERAGE, stale=True)


def _made_equal(module: nn.Module) -> None:
    what = "DistributedDataParallel makes equal on all ranks"
    _refuse_shards(_held(), map(id, module.parameters()), what, _AROUND)


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    """Look at an optimizer before its first step, and again when it has more groups or there is another engine; each
    time where it has tensors of before."""
    now = len(optimizer.param_groups), len(_engines)
    if _passed.get(optimizer) == now:
        return
    held = _held()
    for group in optimizer.param_groups[groups_checked.get(optimizer, 0) :]:
        own = [held[id(p)] for p in group["params"] if id(p) in held]
        if any(one.lacks for one in own):
            engine = own[0].engine
            stored = {id(entry.tensor): entry for entry in engine.stored()}
            trained = {entry.fqns[0] for entry in engine.manifest.parameters if entry.trainable}
            here = {one.name for one in held.values() if one.engine is engine}
            check_group(optimizer, group, [stored[id(one.tensor)] for one in own], complete=here >= trained)
    given = [p for group in optimizer.param_groups for p in group["params"]]
    others = [p for p in given if id(p) not in held]  # beside the engine's own, or all there are, without a gradient
    if len(others) < len(given) or not any(tensor.grad is not None for tensor in given):
        _refuse_untrained(others, f"{type(optimizer).__name__}.step", _OWN)
    if not _left_behind(optimizer, [held[id(p)] for p in given if id(p) in held]):
        _passed[optimizer] = now


def _left_behind(optimizer: Optimizer, given: Iterable[_Trained]) -> bool:
    """Return whether the optimizer has tensors that no program reads any more, since `engine.another` started one that
    reads them as they lie there. Raises NnscalerError("not_trained") where there is a gradient that it misses."""
    now = {engine: engine.parameters for engine in {one.engine: None for one in given}}
    without = [one for one in given if one.tensor.grad is None]
    behind = [one for one in without if now[one.engine].get(one.name, one.tensor) is not one.tensor]
    missed = next((one.name for one in behind if now[one.engine][one.name].grad is not None), None)
    if missed is not None:
        message = f"{type(optimizer).__name__} was made before `engine.another`, and `{missed}` lies otherwise since"
        help = "make it after: engine.optimizer(...) has the tensors of all programs that there are"
        raise NnscalerError("not_trained", message, help=help)
    return bool(behind)


def _refuse_untrained(given: Sequence[Tensor], what: str, help: str, stale: bool = False) -> None:
    """Refuse tensors of a module that was compiled. `stale`: only where it has the values that it had then."""
    wanted = {id(tensor) for tensor in given}
    with _lock:
        compiled = [(found.module(), found.versions) for found in _engines.values()]
    modules = [m for m, versions in compiled if m is not None and not (stale and versions != _versions(m))]
    named = ((name, tensor) for module in modules for name, tensor in module.named_parameters())
    name = next((name for name, tensor in named if id(tensor) in wanted), None)
    if name is not None:
        message = f"{what} is given `{name}` of the module that was compiled, which no step of the engine changes"
        raise NnscalerError("not_trained", message, help=help)


def _versions(module: nn.Module) -> int:
    return sum(map(version_of, module.parameters()))
