"""Find what a comparison of a script with one rank does not show, although all that was compared agrees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from nnscaler.errors import few
from verify.external.comparison.comparison_records import ProgramRun
from verify.external.reference import PlainReference
from verify.external.torchrun.feed_data_of_all_ranks import MIXED, Material, Way
from verify.external.torchrun.match_one_rank import reference_of
from verify.external.torchrun.reference_processes import Failed, NotMatched
from verify.external.torchrun.run_ranks_and_reference import ScriptRunner
from verify.external.torchrun.script_state import is_outside
from verify.results.finding import Finding
from verify.results.report import Check
from verify.results.verdict import Verdict

_MOVED = 0.02  # how far parameters are moved, at random


def left_open(
    run: ProgramRun, unseen: frozenset[str], idle: Sequence[str], not_own: str
) -> Iterator[tuple[Check, Finding]]:
    """Yield what is open: `unseen` and other buffers that one rank lacks, parameters whose gradient is `idle`, and data
    that are `not_own`: the reason says which."""
    if not_own.endswith(MIXED):
        help = "let every rank take its rows of all tensors of one batch; where others are meant: a check file"
        check = Check("rows that belong together", Verdict.INCONCLUSIVE, 0, detail="the ranks take in others")
        yield check, Finding("not_compared", f"{not_own}: rows may be mixed up, lost or taken twice", help=help)
    pieces = [piece for record in run.records for piece in record.pieces if piece.kind == "buffer"]
    if lost := sorted(unseen | {piece.local for piece in pieces if piece.addresses is None}):
        message = f"steps change {few(lost)}, which cannot be found on one rank: not compared"
        help = "start it alike on all ranks; hold several that look alike in one module, where each has a name"
        check = Check("other buffers after steps", Verdict.INCONCLUSIVE, 0, detail="not found on one rank")
        yield check, Finding("not_compared", message, help=help)
    if idle:
        message = f"the gradient of {few(idle)} is zero in every step: whether ranks add it up was not compared"
        help = "watch more steps (`--steps`), or start from other values than zeros and a learning rate above 0"
        check = Check("gradients that are not zero", Verdict.INCONCLUSIVE, 0, detail="zero in every step")
        yield check, Finding("not_compared", message, help=help)


def idle_at_start(
    runner: ScriptRunner, reference: PlainReference, material: Material, double: bool, way: Way
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
        made = runner.fed(double, replace(material, start=start), way)
    except (NotMatched, Failed):
        return zeros
    still = _zeros(reference_of(made, len(reference.steps)))
    return tuple(name for name in zeros if name not in still)


def _zeros(reference: PlainReference) -> tuple[str, ...]:
    space = reference.space
    names = [name for name in sorted(space.names) if space.kinds[name] == "parameter" and space.shapes[name].numel()]
    places = {name: slice(space.whole(name).start, space.whole(name).stop) for name in names}
    return tuple(name for name in names if all(bool((s.gradients[places[name]] == 0).all()) for s in reference.steps))
