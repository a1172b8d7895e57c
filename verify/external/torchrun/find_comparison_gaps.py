"""Find what a comparison of a script with one rank does not show: what was not compared, although all that was agrees,
and differences that decide nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from nnscaler.errors import few
from nnscaler.runtime.tensor_bits_and_differences import FLOAT64_BOUND, difference
from verify.external.comparison.comparison_records import ComparisonResult, Difference, ProgramRun
from verify.external.reference import PlainReference
from verify.external.torchrun.elements_of_one_rank import FilledIn
from verify.external.torchrun.feed_data_of_all_ranks import Material, Way
from verify.external.torchrun.match_one_rank import Layout, reference_of
from verify.external.torchrun.run_ranks_and_reference import Failed, NoReference, NotMatched, ScriptRunner
from verify.external.torchrun.tensors_that_steps_change import is_outside
from verify.external.torchrun.watched_script_record import ReadNumber, ScriptRecord, unlike_numbers
from verify.programs.causes.wrong_tensor import VAGUE
from verify.results.finding import Finding
from verify.results.report import Check
from verify.results.verdict import Verdict

_BUFFERS = "buffers after steps"
_MOVED = 0.02  # how far parameters are moved, at random
_READ = "a count of labels, say, which can be followed where it stays a tensor, without `.item()`"


@dataclass(frozen=True)
class Tried:
    """A comparison in which something differs.

    way      how the script on one rank was fed
    numbers  that it read from tensors
    firm     there is one in which a difference refutes
    reasons  why others could not be made
    coupled  as `coupled_unequal_parts` says
    """

    way: Way
    numbers: tuple[ReadNumber, ...]
    firm: bool
    reasons: tuple[NoReference, ...]
    coupled: bool = False


def coupled_unequal_parts(
    made: Mapping[Way, Sequence[ComparisonResult]], records: Sequence[ScriptRecord], layout: Layout
) -> bool:
    """Return whether data parts count other numbers of rows or labels, and rows of all are coupled, as by a batch norm
    over all ranks: statistics are those of the whole batch, and not of each part by itself."""

    def agree_at_first(way: Way) -> bool | None:
        results = [result for result in made.get(way, ()) if result.name == _BUFFERS and result.count]
        return all(one.step for result in results for one in result.differences) if results else None

    whole, part = agree_at_first("whole") or agree_at_first("own"), agree_at_first("part")
    return bool(whole) and part is False and _of_several_sizes(records, layout)


def losses_add_up(made: Mapping[Way, ProgramRun], layout: Layout) -> bool:
    """Return whether every rank's loss is that of its data part times their number, and rows are coupled: all of them
    together have another loss. As where a sum is divided by the labels of all ranks, behind a batch norm of each."""
    whole = [made[way].reference.steps[0].loss for way in ("own", "whole") if way in made]
    if "part" not in made or not whole:
        return False
    run = made["part"]
    step = run.reference.steps[0]
    losses = [(record.steps[0].loss, step.part_losses[layout.parts[record.rank]]) for record in run.records]
    return all(
        own is not None and difference(own.double(), layout.count * part).relative < _SAME for own, part in losses
    ) and all(min(difference(one, n * step.loss).relative for n in (1, layout.count)) > FLOAT64_BOUND for one in whole)


def doubt_of(
    tried: Tried, differences: Sequence[Difference], records: Sequence[ScriptRecord], layout: Layout
) -> str | None:
    """Return why these differences decide nothing; None where they do."""
    if any(record.drew for record in records):
        return "the forward pass draws random numbers, which are others on one rank"
    if tried.coupled:
        return (
            "the data parts count other numbers of rows or labels, and rows of all ranks are coupled, as by a "
            "SyncBatchNorm: a mean of the parts' means could not be tried on one rank"
        )
    if not tried.firm:
        return "the script could not be run on one rank without more rows or micro-batches than it takes on a rank"
    unlike = next(unlike_numbers(tried.numbers, records[0].numbers), None)
    if tried.way == "part" and unlike is not None:
        alone, here = unlike
        where = f" (line {alone.place})" if alone.place else ""
        return (
            f"on one rank the script reads {alone.value:g} from its data, and {here.value:g} on rank 0{where}: {_READ}"
        )
    if not {"own", "whole"} <= {reason.way for reason in tried.reasons}:
        return None
    gradients = [d.cause for d in differences if d.code.startswith("gradient_differs")]
    causes = gradients or [d.cause for d in differences]
    if causes and all(c.kind == "scaled" and abs(c.factor - layout.count) < _SAME for c in causes):
        return "the gradient is the sum over the data parts: whether the loss is a sum over rows could not be tried"
    vague = any(c.kind in VAGUE or (c.kind == "scaled" and abs(c.factor * layout.count - 1) > _SAME) for c in causes)
    if tried.way == "part" and vague and _of_several_sizes(records, layout):
        reason = why_not_whole(tried.reasons)
        return (
            "the data parts have other numbers of rows or labels, so that a loss over all of them is not the mean over "
            f"the parts, and the script could not be run on one rank with the rows of all: {reason}"
        )
    return None


def why_not_whole(reasons: Sequence[NoReference]) -> str:
    """Say why there is no reference with the rows of all: the last reason, which assumes least."""
    return next(reason.text for reason in reversed(reasons) if reason.way == "whole")


_SAME = 1e-3  # how far a factor may be from a number of data parts, for rounding


def _of_several_sizes(records: Sequence[ScriptRecord], layout: Layout) -> bool:
    """Return whether data parts took in tensors of other shapes, or other numbers of negative ones: labels that a loss
    ignores."""
    sizes = [
        [(t.shape, int((t < 0).sum()) if t.dtype == torch.int64 else 0) for k in sorted(own) for e in own[k] for t in e]
        for own in layout.events(records)
    ]
    return any(own != sizes[0] for own in sizes)


def other_rows_on_shards(records: Sequence[ScriptRecord], run: ProgramRun, layout: Layout) -> str | None:
    """Return the cause of what no other explains, where ranks of several data parts hold shards that are not those of
    DDP or FSDP, and none has a copy: with tensor parallelism these ranks must take in the same data."""
    if layout.count == 1 or any(record.replica is not None for record in records):
        return None
    held: dict[str, list[set[bytes | None]]] = {}
    for record in run.records:
        for piece in record.pieces:
            if piece.trained and piece.addresses is not None:
                held.setdefault(piece.name, [set() for _ in range(layout.count)])[layout.parts[record.rank]].add(
                    piece.key
                )
    split = [name for name, parts in held.items() if all(parts) and any(keys != parts[0] for keys in parts)]
    if not split:
        return None
    return (
        f"ranks of {layout.count} data parts take in different data, and hold different parts of {few(split)}: "
        "ranks that split a layer, as by tensor parallelism, must take in the same data"
    )


def left_open(
    run: ProgramRun, unseen: frozenset[str], idle: Sequence[str], mixed: NoReference | None, unplaced: Sequence[str]
) -> Iterator[tuple[Check, Finding]]:
    """Yield what is open: `unseen` and other buffers that one rank lacks, parameters whose gradient is `idle`, rows
    that are `mixed` up, and `unplaced` tensors whose gradients are filled in."""
    if mixed is not None:
        help = "let every rank take its rows of all tensors of one batch; where others are meant: a check file"
        check = Check("rows that belong together", Verdict.INCONCLUSIVE, 0, detail="the ranks take in others")
        yield check, Finding("not_compared", f"{mixed.text}: rows may be mixed up, lost or taken twice", help=help)
    pieces = [piece for record in run.records for piece in record.pieces if piece.kind == "buffer"]
    if lost := sorted(unseen | {piece.local for piece in pieces if piece.addresses is None}):
        message = f"steps change {few(lost)}, which cannot be found on one rank: not compared"
        help = "start it alike on all ranks; hold several that look alike in one module, where each has a name"
        check = Check("other buffers after steps", Verdict.INCONCLUSIVE, 0, detail="not found on one rank")
        yield check, Finding("not_compared", message, help=help)
    if unplaced:
        message = (
            f"{few(unplaced)} cannot be found on one rank, or not to the last element: the gradients that optimizers "
            "get for what is not found are not compared"
        )
        help = (
            "an optimizer such as Adam hides a factor of them: start them alike on all ranks, from other values than 0"
        )
        check = Check("gradients that are filled in", Verdict.INCONCLUSIVE, 0, detail="not found on one rank")
        yield check, Finding("not_compared", message, help=help)
    if idle:
        message = f"the gradient of {few(idle)} is zero in every step: whether ranks add it up was not compared"
        help = "watch more steps (`--steps`), or start from other values than zeros and a learning rate above 0"
        check = Check("gradients that are not zero", Verdict.INCONCLUSIVE, 0, detail="zero in every step")
        yield check, Finding("not_compared", message, help=help)


def idle_at_start(
    runner: ScriptRunner, reference: PlainReference, material: Material, way: Way, filled: FilledIn
) -> tuple[str, ...]:
    """Return the parameters whose gradient is zero in every step, and would not be if others started elsewhere: behind
    a layer that starts from zeros, at a rate that starts from 0. What no data of these steps reach is left out."""
    zeros = _zeros(reference)
    if not zeros:
        return ()
    generator = torch.Generator().manual_seed(0)
    start = {
        name: value + _MOVED * torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value.dtype)
        if value.is_floating_point() and not is_outside(name)
        else value
        for name, value in material.start.items()
    }
    try:
        made = runner.fed(replace(material, start=start), way)
    except (NotMatched, Failed):
        return zeros
    still = _zeros(reference_of(made, len(reference.steps), filled))
    return tuple(name for name in zeros if name not in still)


def _zeros(reference: PlainReference) -> tuple[str, ...]:
    space = reference.space
    names = [name for name in sorted(space.names) if space.kinds[name] == "parameter" and space.shapes[name].numel()]
    places = {name: slice(space.whole(name).start, space.whole(name).stop) for name in names}
    return tuple(name for name in names if all(bool((s.gradients[places[name]] == 0).all()) for s in reference.steps))
