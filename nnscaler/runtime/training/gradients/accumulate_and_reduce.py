"""Accumulate the gradients of a step on one rank over micro-batches, and sum them over ranks while backward goes on.

A bucket leaves with the last backward that adds to it. Buckets of one group leave in the order of the plan, whichever
is complete first, and no group waits for another: so the ranks of a group meet in the same order, whatever other groups
they are in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import Parameter as Leaf
from torch.utils.hooks import RemovableHandle

from nnscaler.runtime.communication.communicator import Communicator, ProgramError
from nnscaler.runtime.communication.sharded_parameter_gathers import ParameterReads
from nnscaler.runtime.stage_base_class import Stage
from nnscaler.runtime.training.gradients.buckets import Departures, DivisionBucket, SumBucket
from nnscaler.runtime.training.gradients.gradient_norm_and_clipping import separate_gradients
from nnscaler.runtime.training.gradients.gradient_plan import (
    HALF,
    Slot,
    WantedGradient,
    divisions_of_leaves,
    is_plain,
    sums_of,
    wanted,
    widened,
)
from nnscaler.runtime.training.zero_1_2_and_master_weights import AtRest


class Gradients:
    """From the gradients of leaves to those of tensors at rest.

    What `.grad` had before the step is held apart, so that only this step's gradients are summed over ranks. A used
    parameter that got no gradient here contributes zeros; an unused one keeps `.grad` as it was.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        resting: Sequence[AtRest],
        communicator: Communicator,
        precision: str | None = None,
        reads: ParameterReads | None = None,
        passes: Mapping[int, int] = {},
    ) -> None:
        """`reads`: adds to gradients at the end of a backward. `passes`: by stage, how many backwards, or halves of
        them, a step has; a stage that is not there has several."""
        self._communicator, self._reads = communicator, reads
        self._rest = {getattr(s, name): s.at_rest[name] for s in stages.values() for name in s.parameters}
        self._names = {getattr(s, name): d.fqn for s in stages.values() for name, d in s.parameters.items()}
        self._wanted = wanted(stages, resting, precision)
        # what is neither summed over ranks nor added up elsewhere than in `.grad` is left to autograd
        self._plain = [leaf for leaf, one in self._wanted.items() if is_plain(one, passes)]
        self._moved = [one for one in self._wanted.values() if not is_plain(one, passes)]
        self._unused = {leaf: rest for leaf, rest in self._rest.items() if leaf not in self._wanted}
        self._sum_buckets = [(_sum_bucket(slots), slots) for slots in sums_of(self._moved)]
        self._divisions = divisions_of_leaves([one for one in self._moved if not one.at_once], 0)
        self._at_once = {index: [o for o in self._moved if o.at_once and index in o.stages] for index in stages}
        self._of_stage = {index: [o for o in self._moved if index in o.stages] for index in stages}
        self._before: dict[Leaf, Tensor] = {}
        self._frozen: list[Leaf] = []  # leaves whose gradient is not wanted in this step
        self._handles: list[RemovableHandle] = []
        self._place: dict[WantedGradient, tuple[SumBucket, int]] = {}  # where they may lie from the first backward on
        for bucket, slots in self._sum_buckets:
            for position, slot in enumerate(slots):
                if not slot[0].late and len(slot) == 1:
                    self._place[slot[0]] = (bucket, position)
        self._unplaced = [one for one in self._wanted.values() if one not in self._place]
        # where all that is to be done with a gradient that one backward makes is to put it there
        self._only_placed = {
            o for o in self._place if len(o.stages) == 1 and o.dtype == o.leaf.dtype == widened(o.leaf.dtype)
        }
        self._clear()

    def _clear(self) -> None:
        self._departures = Departures(self._communicator)
        self._running: tuple[int, bool, bool] | None = None  # a backward: of which stage, and what it completes
        self._own: set[WantedGradient] = set()  # those that share no memory
        self._ended: set[int] = set()  # stages whose last backward has run
        self._added: set[WantedGradient] = set()  # those that lie in their place
        self._apart: dict[WantedGradient, Tensor] = {}  # of half precision, without a place yet, added up
        self._divided: dict[WantedGradient, Tensor] = {}  # parts of them
        self._complete: set[WantedGradient] = set()
        for bucket, _ in self._sum_buckets:
            bucket.begin()
        self._division_buckets = [(_division_bucket(o, 0, named=True), o) for o in self._divisions]
        self._passing: list[tuple[DivisionBucket, list[WantedGradient]]] = []  # of the backward that runs
        self._departures.expect([bucket for bucket, _ in (*self._division_buckets, *self._sum_buckets)])
        self._where: dict[WantedGradient, tuple[DivisionBucket, int]] = {}
        for division, ones in self._division_buckets:
            self._where.update((one, (division, position)) for position, one in enumerate(ones))

    # -- a step ---------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a step: gradients that backward makes from now on are those of this step.

        Raises ProgramError for a parameter with a hook of the user's.
        """
        self._clear()
        self._release()
        self._refuse_hooks()
        self._frozen = [leaf for leaf, rest in self._rest.items() if not rest.requires_grad]
        self._before = {leaf: rest.grad for leaf, rest in self._rest.items() if rest.grad is not None}
        for leaf, rest in self._rest.items():
            leaf.grad = rest.grad = None
            leaf.requires_grad_()  # which backward needs of all: ranks meet in sums of all gradients
        self._handles = [one.leaf.register_post_accumulate_grad_hook(partial(self._made, one)) for one in self._moved]

    def enter(self, stage: int, *, divides: bool, last: bool) -> None:
        """A backward of this stage begins. `divides`: those gradients that are divided at once are complete with it;
        `last`: all of the stage are."""
        self._running = (stage, divides, last)
        if divides and self._at_once[stage]:
            self._passing = [
                (_division_bucket(ones, 0, named=False), ones) for ones in divisions_of_leaves(self._at_once[stage], 0)
            ]
            self._departures.expect([bucket for bucket, _ in self._passing], first=True)
            for bucket, ones in self._passing:
                self._where.update((one, (bucket, position)) for position, one in enumerate(ones))

    def widen(self, kept: bool = False) -> None:
        """After any backward, add its gradients up where those of other micro-batches are.

        `kept`: what arrived in it is kept for W, and gradients that lie there must not be added to.
        """
        for one in self._moved:
            if one.leaf.grad is not None:
                self._add(one)
        if len(self._own) == len(self._unplaced):
            return
        new = [one for one in self._unplaced if one.leaf.grad is not None and one not in self._own]
        for one in new if kept else ():
            one.leaf.grad = None if one.leaf.grad is None else one.leaf.grad.clone()
        if new and not kept:
            separate_gradients(one.leaf for one in self._unplaced)
        self._own.update(new)

    def collect(self, stage: int) -> None:
        """After a backward that completes the gradients of this stage, B or W, add them up, and divide those of ZeRO-2.

        Every rank of the stage calls it after the same backward.
        """
        self.widen()
        _, divides, last = self._running or (stage, False, False)
        self._running = None
        if divides and self._at_once[stage]:
            self._divide_at_once(stage)
        if last:
            self._ended.add(stage)
            for one in self._of_stage[stage] if len(self._complete) < len(self._moved) else ():
                if one.stages <= self._ended:
                    self._completed(one)

    def finish(self, loss_scale: float = 1.0) -> None:
        """Wait for the sums over ranks, take the scale of the loss out, and leave the result, plus what was there
        before the step, in `.grad` of the tensors at rest."""
        self.widen()
        self._release()
        if len(self._complete) < len(self._moved):
            for one in self._moved:
                self._completed(one)
        values = self._divide_rest()
        self._sum_late(values)
        for bucket, slots in self._sum_buckets:
            bucket.wait()
            for position, slot in enumerate(slots):
                place = bucket.place(position)
                values[slot[0]] = place.detach()
                for one in slot[1:]:
                    values[one] = place.clone()
        for one in self._moved:
            gradient, before = values.pop(one), self._before.get(one.leaf) if self._before else None
            if gradient.dtype in HALF:
                gradient = gradient.float()
            if loss_scale != 1.0:
                gradient = gradient.div_(loss_scale)
            if before is not None:
                gradient = gradient.add_(before.to(gradient.dtype))
            if one.leaf is not one.rest:
                one.leaf.grad = None
            one.rest.grad = gradient if gradient.dtype == one.rest.dtype else gradient.to(one.rest.dtype)
        for leaf in self._plain:
            self._finish_plain(leaf, loss_scale)
        self._leave_others()
        self._before = {}
        self._clear()

    def _finish_plain(self, leaf: Leaf, loss_scale: float) -> None:
        """Finish a gradient where autograd left it."""
        gradient, before = leaf.grad, self._before.get(leaf) if self._before else None
        if gradient is None:
            gradient = torch.zeros_like(leaf)
        elif loss_scale == 1.0 and before is None and gradient.dtype == leaf.dtype:
            return
        if loss_scale != 1.0 or before is not None:  # rounded once, as what is added up in float32
            gradient = gradient.to(widened(leaf.dtype)).div_(loss_scale)
        if before is not None:
            gradient = gradient.add_(before)
        leaf.grad = gradient.to(leaf.dtype)

    def _leave_others(self) -> None:
        """Leave what is unused, or requires no gradient in this step, as it was before."""
        for leaf in self._frozen:
            self._rest[leaf].requires_grad_(False)
        for leaf in (*self._unused, *self._frozen):
            self._rest[leaf].grad = self._before.get(leaf)

    # -- a gradient -----------------------------------------------------------------------------------------------

    def moved(self, stage: Stage) -> dict[str, int]:
        """Return the numbers by which `hand_on` knows what moves of the gradients of a stage's parameters."""
        numbers = {one.leaf: number for number, one in enumerate(self._moved)}
        leaves = {name: getattr(stage, name) for name in stage.parameters}
        return {name: numbers[leaf] for name, leaf in leaves.items() if leaf in numbers}

    def hand_on(self, number: int, gradient: Tensor) -> None:
        """Take what a backward that runs has made for a leaf, as from autograd; its memory is used again afterwards."""
        one = self._moved[number]
        leaf, before = one.leaf, one.leaf.grad
        if before is None and self._placed_whole(one, gradient):
            return
        leaf.grad = gradient if before is None else before.add_(gradient)
        self._made(one, leaf)
        if leaf.grad is not None and leaf.grad.data_ptr() == gradient.data_ptr():
            leaf.grad = gradient.clone()

    def _made(self, one: WantedGradient, leaf: Tensor) -> None:
        """Autograd has added to the gradient of a leaf: all that this backward has for it."""
        if self._reads is not None and self._reads.awaits(one.leaf):
            return
        if leaf.grad is not None and self._placed_whole(one, leaf.grad):  # as below, in fewer steps: most come here
            leaf.grad = None
            return
        self._add(one)
        if self._running is None or (leaf.grad is None and one not in self._added and one not in self._apart):
            return
        stage, divides, last = self._running
        if stage not in one.stages:
            return
        if one.at_once:
            if divides and one.travels:  # one that is only cut waits for the end of the backward
                self._take(one)
        elif last and (len(one.stages) == 1 or one.stages <= {*self._ended, stage}):
            self._completed(one)

    def _placed_whole(self, one: WantedGradient, gradient: Tensor) -> bool:
        """Put a gradient in its place where the backward that runs makes the whole of it, and it needs nothing more.
        Return whether it was."""
        running = self._running
        if running is None or not running[2] or one not in self._only_placed:
            return False
        if running[0] not in one.stages or one in self._added:
            return False
        bucket, position = self._place[one]
        bucket.place(position).copy_(gradient)
        self._added.add(one)
        self._complete.add(one)
        self._departures.filled(bucket)
        return True

    def _add(self, one: WantedGradient) -> None:
        """Bring what lies in `.grad` of a leaf to where it is added up."""
        leaf, at = one.leaf, self._place.get(one)
        gradient, wide = leaf.grad, widened(leaf.dtype)
        if gradient is None:
            return
        if at is None or one.dtype != wide:
            if leaf.dtype in HALF:
                self._apart[one] = self._apart[one].add_(gradient) if one in self._apart else gradient.to(wide)
                leaf.grad = None
            return
        place = at[0].place(at[1])
        if one in self._added and leaf.dtype in HALF:
            place.add_(gradient)
        elif one not in self._added or gradient.data_ptr() != place.data_ptr():  # `.grad` says what it is
            place.copy_(gradient)
            self._added.add(one)
        leaf.grad = place.detach() if leaf.dtype == wide else None  # what a step leaves that fails is not written over

    def _local(self, one: WantedGradient) -> Tensor:
        """Return this rank's gradient of a leaf without a place, in the dtype in which it is summed."""
        found = self._apart.pop(one, None) if one.leaf.dtype in HALF else one.leaf.grad
        one.leaf.grad = None
        if found is None:
            found = torch.zeros_like(one.leaf, dtype=widened(one.leaf.dtype))
        return found if found.dtype == one.dtype else found.to(one.dtype)

    def _completed(self, one: WantedGradient) -> None:
        """Let a gradient travel, to which nothing is added any more."""
        if one in self._complete:
            return
        self._complete.add(one)
        if one.travels and not one.at_once:
            self._take(one)
        elif one in self._place:
            bucket, position = self._place[one]
            if one not in self._added or (one.leaf.grad is None and one.leaf.dtype not in HALF):
                bucket.place(position).copy_(self._local(one))
            one.leaf.grad = None
            self._departures.filled(bucket)

    # -- division -------------------------------------------------------------------------------------------------

    def _take(self, one: WantedGradient) -> None:
        """Put the gradient of a leaf into the bucket in which it is divided."""
        bucket, position = self._where.pop(one)
        bucket.take(position, self._local(one))
        self._departures.filled(bucket)

    def _divide_at_once(self, stage: int) -> None:
        for one in self._at_once[stage]:
            if one.travels and one in self._where:
                self._take(one)
        buckets, self._passing = self._passing, []
        for one, part in self._divide(self._at_once[stage], buckets).items():
            wide = part.to(widened(part.dtype))
            self._divided[one] = self._divided[one].add_(wide) if one in self._divided else wide

    def _divide_rest(self) -> dict[WantedGradient, Tensor]:
        """Return the parts of gradients that are divided, and those that nothing is done with."""
        apart = [one for one in self._moved if one not in self._place]
        values = {one: self._divided[one] for one in apart if one in self._divided}
        values.update(self._divide([one for one in apart if one not in values], self._division_buckets))
        return values

    def _divide(
        self, ones: Sequence[WantedGradient], buckets: Iterable[tuple[DivisionBucket, list[WantedGradient]]]
    ) -> dict[WantedGradient, Tensor]:
        """Return this rank's parts of gradients. `buckets`: those of the first axis, which have left."""
        values = {one: self._local(one) for one in ones if not one.travels}
        for bucket, taken in buckets:
            bucket.wait()
            values.update(zip(taken, bucket.parts(), strict=True))
        for depth in range(max((len(one.divisions) for one in ones), default=0)):
            for one in ones:
                if len(one.divisions) > depth and not one.divisions[depth].sums:
                    division = one.divisions[depth]
                    values[one] = division.part(values[one], division.index).clone()
            if depth:
                self._divide_further(ones, values, depth)
        return values

    def _divide_further(self, ones: Sequence[WantedGradient], values: dict[WantedGradient, Tensor], depth: int) -> None:
        taken = [(_division_bucket(o, depth, named=not o[0].at_once), o) for o in divisions_of_leaves(ones, depth)]
        self._departures.expect([bucket for bucket, _ in taken], first=True)
        for bucket, members in taken:
            for position, one in enumerate(members):
                bucket.take(position, values[one])
                self._departures.filled(bucket)
        for bucket, members in taken:
            bucket.wait()
            values.update(zip(members, bucket.parts(), strict=True))

    def _sum_late(self, values: Mapping[WantedGradient, Tensor]) -> None:
        """Begin the sums of what other stages, or divisions, had to be waited for."""
        for bucket, slots in self._sum_buckets:
            for position, slot in enumerate(slots):
                if slot[0] not in self._place:
                    place = bucket.place(position)
                    place.copy_(values[slot[0]])
                    for one in slot[1:]:
                        place.add_(values[one])
                    self._departures.filled(bucket)

    def _refuse_hooks(self) -> None:
        """A hook would see this rank's share of a gradient, of each micro-batch; or nothing, on a tensor at rest."""
        for leaf, rest in self._rest.items():
            hooked = leaf._backward_hooks or leaf._post_accumulate_grad_hooks
            if hooked or (rest is not leaf and (rest._backward_hooks or rest._post_accumulate_grad_hooks)):
                message = f"the parameter `{self._names[leaf]}` has a hook on its gradient, which would not see the "
                raise ProgramError(f"{message}whole of it: change `.grad` between the step and the optimizer's step")

    def _release(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _sum_bucket(slots: Sequence[Slot]) -> SumBucket:
    first = slots[0][0]
    names = tuple(slot[0].held.fqn for slot in slots)
    shapes = [tuple(slot[0].rest.shape) for slot in slots]
    return SumBucket(first.held.group, names, shapes, first.sum_dtype, first.leaf.device)


def _division_bucket(ones: Sequence[WantedGradient], depth: int, *, named: bool) -> DivisionBucket:
    names = tuple(one.held.fqn for one in ones) if named else ()
    return DivisionBucket(names, [one.divisions[depth] for one in ones], ones[0].dtype, ones[0].leaf.device)
