"""Schedule slices of tokens in time, under every schedule of whole backward passes: TeraPipe (Li et al., 2021).

A micro-batch runs slice by slice, so that the next stage starts when the first slice is there, and not the whole
micro-batch: filling and draining a pipeline take slices. Slices run forward in order and backward in reverse order. How
long each of them should be, with the cost of a slice growing with what is before it, is the paper's dynamic program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from nnscaler.errors import NnscalerError
from nnscaler.instructions import Instruction
from nnscaler.scheduling.schedule import Schedule, ScheduleKind


def in_slices(kind: ScheduleKind, made: Schedule, slices: int) -> Schedule:
    """Return the schedule `made` by `kind` with each micro-batch in slices.

    Raises NnscalerError("plan_illegal") for one that runs backward in halves.
    """
    halves = next((i for order in made.orders for i in order if i.kind in "IW"), None)
    if halves is not None:
        message = f"schedule {made.name} runs backward in halves ({halves}), and slices run a whole one"
        help = "with slices, use schedule 1f1b, gpipe or interleaved; or leave slices away"
        raise NnscalerError("plan_illegal", message, help=help)
    if kind.sliced is not None:
        return kind.sliced(len(made.orders), made.micro_batches, slices)
    orders = tuple(tuple(part for i in order for part in slices_of(i, slices)) for order in made.orders)
    return replace(made, orders=orders, slices=slices)


def slices_of(instruction: Instruction, slices: int) -> Iterator[Instruction]:
    """Yield the slices of a pass, in the order in which they run."""
    for index in range(slices) if instruction.kind == "F" else reversed(range(slices)):
        yield replace(instruction, at=(*instruction.at, index))


SliceCost = Callable[[int, int], float]  # (tokens of a slice, tokens before it) -> seconds in the slowest stage


def best_slices(tokens: int, stages: int, cost: SliceCost, step: int = 1) -> tuple[int, ...]:
    """Return the lengths of slices with which one micro-batch passes `stages` stages soonest.

    That takes the sum of the slices' times, and the longest of them once more for each stage after the first. For each
    bound of the longest slice, the least sum within it is a shortest path over the tokens before a slice; a larger
    bound is worth its sum only, so that bounds are looked at upwards until no sum can make up for them (Li et al.,
    2021, section 3.3). `step`: slices are multiples of it. Raises ValueError where `tokens` are not.
    """
    if tokens < 1 or step < 1 or tokens % step:
        raise ValueError(f"{tokens} tokens in slices of multiples of {step}")
    count = tokens // step
    times = {(a, b): cost((b - a) * step, a * step) for a in range(count) for b in range(a + 1, count + 1)}
    least = _least_sum(count, times, max(times.values()))
    best, found = float("inf"), tuple[int, ...]()
    for longest in sorted(set(times.values())):
        if least is not None and least[0] + (stages - 1) * longest >= best:
            break
        within = _least_sum(count, times, longest)
        if within is not None and within[0] + (stages - 1) * longest < best:
            best, found = within[0] + (stages - 1) * longest, within[1]
    return tuple(length * step for length in found)


def _least_sum(count: int, times: dict[tuple[int, int], float], longest: float) -> tuple[float, tuple[int, ...]] | None:
    """Return the least sum of times of slices none of which takes longer, and their lengths; None for none."""
    best: list[tuple[float, tuple[int, ...]] | None] = [(0.0, ())]
    for end in range(1, count + 1):
        options = [
            (before[0] + times[start, end], (*before[1], end - start))
            for start in range(end)
            if (before := best[start]) is not None and times[start, end] <= longest
        ]
        best.append(min(options, default=None))
    return best[count]
