"""Watch a script from inside of its process: what its models take in, its losses, its optimizers' steps.

Torch's public entry points are wrapped while a `Watch` is open: calls of modules, data loaders, pipeline schedules,
backward passes and optimizers. Data come in three ways: from a data loader, as inputs of a model, and in what is
computed of a model's output (targets). Each is an event with a number. In a run on one rank, a feed says what is used
in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, TypeGuard

import torch
import torch.distributed.pipelining.schedules as schedules
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from nnscaler.errors import few
from nnscaler.runtime.nested_values import tensors_in
from nnscaler.runtime.training.autocast_on_any_device import autocast_on
from nnscaler.tracing.float64_run import exact, exact_tensor
from verify.external.observe_rank_run import changed, local_gradient, note_on_hooks, whole_scalar
from verify.external.torchrun.cuda_on_cpu import left_as_filled, replaced
from verify.external.torchrun.feed_data_of_all_ranks import RanksFeed
from verify.external.torchrun.replace_data_given_to_model import ScriptMode, exchanged, settings_of, thinned, varied
from verify.external.torchrun.tensors_that_steps_change import ScriptState
from verify.external.torchrun.watch_clipping import ClippingWatch
from verify.external.torchrun.watched_script_record import (
    SampledEpochs,
    ScriptRecord,
    SeenStep,
    Start,
    Stopped,
    Tensors,
    Unmatched,
)

_ADDED = (
    "a schedule adds up the gradients of its micro-batches (`scale_grads=False`), on one rank too: that they are those "
    "of the sum of their losses, and not of the mean, is taken to be meant"
)
_DRAWN = 1_000_000  # elements; larger draws are data sets, of which batches come in


class ScriptWatch:
    """Watches one process. `save`: keeps the record, before the script is stopped."""

    def __init__(self, start: Start, save: Callable[[ScriptRecord], None], feed: RanksFeed | None = None) -> None:
        self.notes: dict[str, None] = {}
        self.groups: list[tuple[int, ...]] = []
        self._rank, self._wanted, self._double, self._start = start.rank, start.steps, start.double, start
        self._save, self._feed, self._louder = save, feed, start.louder
        self._inside = 0  # models, backward passes and schedules that run
        self._stepping = 0
        self._clipping = ClippingWatch(self._own_gradients)
        self._state = ScriptState()
        self._events: dict[str, list[Tensors]] = {}
        self._draws: list[Tensor] = []
        self._loaders: dict[int, int] = {}
        self._sampled = SampledEpochs()
        self._losses: list[Tensor] = []
        self._loss_unit = 0.0
        self._own: dict[str, Tensor | None] = {}
        self._gradients: dict[str, Tensor | None] = {}
        self._steps: list[SeenStep] = []
        self._made: dict[int, int] = {}  # optimizer -> its steps
        self._backward: set[int] = set()  # inputs of models whose outputs a backward pass has met
        self._follows: list[int] = []  # for each target, the number of inputs before it
        self._drew = self._stopped = self._scheduled = False
        self._mode = ScriptMode(self.tell, self._outside, self._own_code, self._take, self._draw, start.dropout)

    def _own_gradients(self) -> Iterable[Tensor | None]:
        return self._own.values()

    @property
    def stopped(self) -> bool:
        """Return whether enough was seen."""
        return self._stopped

    def tell(self, note: str) -> None:
        """Keep a note for the report."""
        self.notes[note] = None

    @contextmanager
    def open(self) -> Iterator[None]:
        """Wrap torch's entry points in this process."""
        hooks = (register_optimizer_step_pre_hook(self._before), register_optimizer_step_post_hook(self._after))
        with ExitStack() as stack:
            stack.enter_context(replaced(self._changes()))
            stack.enter_context(exact(dropout=True, recorded=False) if self._double else autocast_on("cpu"))
            stack.enter_context(self._mode)
            try:
                yield
            finally:
                for hook in hooks:
                    hook.remove()

    def _settle(self) -> None:
        """Note what the last step left, before it is used: a script may hand out what one rank has updated."""
        if self._steps and not self._steps[-1].state:
            self._steps[-1] = replace(self._steps[-1], state=self._state.values())

    def record(self) -> ScriptRecord:
        """Return what was seen."""
        self._settle()
        state = self._state
        if (note := self._mode.note_of_kept(one.tensor for one in state.tensors())) is not None:
            self.tell(note)
        dtypes = [state.start[name].dtype for name, held in state.held.items() if held.kind == "parameter"]
        dtype = max(set(dtypes), key=lambda d: (dtypes.count(d), str(d))) if dtypes else torch.get_default_dtype()
        return ScriptRecord(
            self._rank,
            tuple(state.held.values()),
            dict(state.start),
            tuple(self._steps),
            {kind: tuple(events) for kind, events in self._events.items()},
            tuple(dict.fromkeys(self.groups)),
            tuple(self.notes),
            self._drew,
            dtype,
            state.unseen(),
            state.replica(),
            self._mode.dropped,
            tuple(self._draws),
            tuple(self._mode.numbers),
            self._mode.measured,
            tuple(self._mode.ignored),
            frozenset(self._trained()),
            self._sampled.found,
            self._stopped,
        )

    def _trained(self) -> Iterator[tuple[str, int]]:
        yield from (("input", number) for number in self._backward)
        yield from (("target", number) for number, count in enumerate(self._follows) if count - 1 in self._backward)

    # Data.

    def _outside(self) -> bool:
        return not self._inside and not self._stepping and torch.is_grad_enabled()

    def _own_code(self) -> bool:
        return not (self._inside or self._stepping or self._clipping.clipping)

    def _take(self, kind: str, tensors: Tensors) -> Tensors:
        """Count an event, and return what is to be used."""
        used = tuple(exact_tensor(t) if self._double else t for t in tensors)
        events = self._events.setdefault(kind, [])
        if self._feed is not None:
            used = self._feed.data(kind, len(events), used)
        elif self._start.vary is not None:
            used = tuple(varied(t, self._start.vary, len(events)) for t in used)
        used = tuple(thinned(t, self._start.kept, self._start.ignored) for t in used)
        if kind == "target":
            self._follows.append(len(self._events.get("input", ())))
        events.append(tuple(t.detach().clone() for t in used))
        return used

    def _draw(self, numbers: Tensor) -> Tensor:
        """Note random numbers that the script draws for itself, and return what is to be used."""
        used = numbers if self._feed is None else self._feed.drawn(len(self._draws), numbers)
        self._draws.append(used.clone() if used.numel() <= _DRAWN else used.new_empty(0))
        return used

    def _changes(self) -> list[tuple[Any, str, Any]]:
        add_group = Optimizer.add_param_group
        call, loader, autograd = nn.Module.__call__, DataLoader.__iter__, torch.autograd.backward
        single, several = schedules.PipelineScheduleSingle.step, schedules.PipelineScheduleMulti.step
        from_numpy = torch.from_numpy

        def called(module: nn.Module, *args: Any, **named: Any) -> Any:
            if self._inside or not torch.is_grad_enabled() or next(module.parameters(), None) is None:
                if self._inside == 1 and self._scheduled:
                    self._enter(module)
                return call(module, *args, **named)
            self._enter(module)
            if self._feed is not None and isinstance(module, DistributedDataParallel):
                self._feed.send(list(module.buffers()) if module.will_sync_module_buffers() else [])
            number = len(self._events.get("input", ()))
            args, named = exchanged([args, named], "input", self._take)
            with self._entered():
                output = call(module, *args, **named)
            for tensor in tensors_in(output) if len(self._events.get("input", ())) > number else ():
                if tensor.grad_fn is not None:
                    tensor.register_hook(lambda gradient: self._backward.add(number))
            return output

        def loaded(this: Any) -> Iterator[Any]:
            number = self._loaders.setdefault(id(this), len(self._loaders))
            kind = f"batch {number}"
            self._sampled.begin(kind, this.sampler)
            for batch in loader(this):
                yield exchanged(batch, kind, self._take)
            self._sampled.end(kind)

        def added(this: Optimizer, group: dict[str, Any]) -> None:
            self._state.meet_optimizer(this)
            add_group(this, group)

        def backward(tensors: Any, grad_tensors: Any = None, *rest: Any, **named: Any) -> None:
            if self._inside:
                return autograd(tensors, grad_tensors, *rest, **named)
            roots = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
            self._losses += self._scalars(roots)
            if self._louder != 1:
                with torch.enable_grad():
                    tensors = tuple(root * self._louder if _is_loss(root) else root for root in roots)
            with self._differentiating():
                autograd(tensors, grad_tensors, *rest, **named)
            return None

        return [
            (nn.Module, "__call__", called),
            (DataLoader, "__iter__", loaded),
            (Optimizer, "add_param_group", added),
            (torch.autograd, "backward", backward),
            (schedules.PipelineScheduleSingle, "step", self._schedule(single)),
            (schedules.PipelineScheduleMulti, "step", self._schedule(several)),
            *self._clipping.changes(),
            *self._sampled.changes(),
            *self._mode.collectives(),
            (torch, "from_numpy", lambda array: exact_tensor(from_numpy(array)) if self._double else from_numpy(array)),
        ]

    def _schedule(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def stepped(this: Any, *args: Any, target: Any = None, losses: Any = None, **named: Any) -> Any:
            if self._inside or not torch.is_grad_enabled():
                return step(this, *args, target=target, losses=losses, **named)
            args = self._given("input", args)
            (target,) = self._given("target", (target,) if target is not None else ()) or (None,)
            losses = [] if losses is None else losses
            before = len(losses)
            self._scheduled, loss_of = True, this._loss_fn
            if not getattr(this, "scale_grads", True):
                self.tell(_ADDED)
            if self._louder != 1 and loss_of is not None:
                this._loss_fn = lambda *given: loss_of(*given) * self._louder
            try:
                with self._differentiating():
                    output = step(this, *args, target=target, losses=losses, **named)
            finally:
                self._scheduled, this._loss_fn = False, loss_of
            losses[before:] = [loss / self._louder for loss in losses[before:]]
            if found := self._scalars(losses[before:]):
                self._losses.append(torch.stack(found).mean())
            return output

        return stepped

    def _scalars(self, roots: Iterable[Any]) -> list[Tensor]:
        """Return the losses among what a backward pass starts from, and note how coarsely they are rounded."""
        losses = [root for root in roots if _is_loss(root)]
        self._loss_unit = max([self._loss_unit, *(torch.finfo(loss.dtype).eps for loss in losses)])
        return [whole_scalar(loss).double() for loss in losses]

    def _given(self, kind: str, values: Any) -> Any:
        """Return what a schedule is given. One rank is first and last stage: it may lack what other ranks have."""
        values = tuple(values)
        if values or self._feed is None:
            return exchanged(values, kind, self._take)
        return self._take(kind, ())

    @contextmanager
    def _entered(self) -> Iterator[None]:
        before = torch.get_rng_state()
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1
            self._drew = self._drew or not torch.equal(before, torch.get_rng_state())

    # Models and their parameters.

    def _enter(self, module: nn.Module) -> None:
        """Get to know the model of a module that is called, and give it its values at the start."""
        if self._stopped:
            raise Stopped
        self._settle()
        if self._state.knows(module):
            return
        self._state.meet_model(module)
        self._state.meet_aside()
        new = self._state.new()
        forgotten = [one.names[0] for one in new if one.kind == "parameter" and left_as_filled(one.tensor)]
        if forgotten:
            self.tell(f"after `to_empty` nothing initialises {few(forgotten, 2)}: they were given small numbers")
        hooked = [one.names[0] for one in new if one.kind == "parameter" and one.tensor._backward_hooks]
        if hooked:
            self.tell(note_on_hooks("the script", hooked))
        if self._feed is not None:
            self._feed.start({one.names[0]: one.tensor for one in new if one.given})
            for part in (p for p in module.modules() if isinstance(p, FSDPModule)):
                part.reshard()  # what it has gathered by now has the values from before
            self._state.hold(new)

    # Backward passes and steps.

    @contextmanager
    def _differentiating(self) -> Iterator[None]:
        """Run a backward pass. On one rank, note what it adds to each gradient, then average over the data parts."""
        outside = self._state.watch_outside()
        before = {} if self._feed is None else self._state.gradients()
        steps = len(self._steps)
        with self._entered():
            yield
        new = outside()
        if self._feed is None:
            return
        self._feed.started({one.names[0]: one.tensor for one in new})
        parameters = self._state.parameters()
        gone = steps == len(self._steps) and all(parameter.grad is None for parameter in parameters.values())
        if gone and self._feed.add_up is not None:
            raise Unmatched("the backward pass leaves no gradient in `.grad`, where the data parts' are averaged")
        self._share(self._feed, parameters, before)

    def _share(self, feed: RanksFeed, parameters: Mapping[str, Tensor], before: Mapping[str, Tensor | None]) -> None:
        """Note what was added to the gradients from `before`, and average over the data parts."""
        for name, parameter in parameters.items():
            added = local_gradient(parameter)
            if added is not None:
                earlier, own = before.get(name), self._own.get(name)
                added = added if earlier is None else added - earlier
                self._own[name] = added if own is None else own + added
        feed.after_backward(list(parameters.values()))

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if self._stopped:
            raise Stopped
        self._stepping += 1
        if self._stepping > 1:
            return None
        self._settle()
        if self._feed is not None:
            self._feed.before_step(len(self._steps), optimizer)
            if self._inside:  # of a backward pass, which has made these gradients
                mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
                self._share(self._feed, {n: p for n, p in self._state.parameters().items() if id(p) in mine}, {})
        self._state.meet_filled(optimizer)
        self._gradients = self._state.gradients()
        watched = [self._watched(value) if callable(value) else value for value in args]
        return tuple(watched), {name: self._watched(v) if callable(v) else v for name, v in kwargs.items()}

    def _watched(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure that an optimizer's step runs, as what is outside of the step: the model and its loss."""

        def called() -> Any:
            depth, self._stepping = self._stepping, 0
            try:
                return closure()
            finally:
                self._stepping = depth
                self._gradients = self._state.gradients()

        return called

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._stepping -= 1
        if self._stepping:
            return
        self._mode.forget_gradients()
        settings = tuple(settings_of(group) for group in optimizer.param_groups)
        taken = {kind: len(events) for kind, events in self._events.items()}
        if self._feed is not None:
            self._feed.after_step(len(self._steps), taken)
        losses, self._losses = tuple(self._losses), []
        own, self._own = self._own, {}
        norm, clipped = self._clipping.taken()
        late = changed(self._gradients, self._state.gradients())
        unread = self._state.unread()
        unit, self._loss_unit = self._loss_unit, 0.0
        self._steps.append(
            SeenStep(losses, self._gradients, own, {}, settings, taken, norm, late, unread, clipped, unit)
        )
        self._made[id(optimizer)] = self._made.get(id(optimizer), 0) + 1
        enough = (
            min(self._made.values()) >= self._wanted if self._feed is None else len(self._steps) >= self._feed.steps
        )
        if enough:
            self._stopped = True
            if self._feed is None:
                told = "a step" if self._wanted == 1 else f"{self._wanted} steps"
                self.tell(f"the script was stopped after {told} of its optimizer: `--steps` says how many are watched")
            self._save(self.record())
            raise Stopped


def _is_loss(root: Any) -> TypeGuard[Tensor]:
    """Return whether a backward pass starts here, and does not go on with a gradient that another stage has sent."""
    return isinstance(root, Tensor) and root.numel() == 1
