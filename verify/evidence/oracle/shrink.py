"""The smallest case that still fails: fewest axes, then parts, then sizes, then the simplest values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from nnscaler.errors import NnscalerError
from nnscaler.ir.operation_placement import Split
from verify.evidence.oracle.case_runner import CaseResult, OperatorRunner, WholeRaised
from verify.evidence.split_case import SplitCase

STEPS = 200


def shrink(runner: OperatorRunner, failed: CaseResult) -> CaseResult:
    """Shrink greedily: take the first simpler case that fails as well, until none does. A case costs under a
    millisecond."""
    steps = 0
    current = failed
    progress = True
    while progress and steps < STEPS:
        progress = False
        for case in _simpler(current):
            steps += 1
            result = _tried(runner, case)
            if result is not None and result.failed and (result.raised is None) == (failed.raised is None):
                current, progress = result, True
                break
            if steps >= STEPS:
                break
    return current


def _tried(runner: OperatorRunner, case: SplitCase) -> CaseResult | None:
    try:
        return runner.run(case)
    except (WholeRaised, NnscalerError, Exception):  # noqa: BLE001 - what does not run is no counter-example
        return None


def _simpler(result: CaseResult) -> Iterator[SplitCase]:
    case = result.case
    inputs = case.inputs
    if len(case.choices) > 1:
        for keep in range(len(case.choices)):
            yield replace(case, choices=(case.choices[keep],), parts=(case.parts[keep],))
    if case.uneven:
        yield replace(case, uneven=False)
    for axis, choice in enumerate(case.choices):
        if isinstance(choice, Split) and choice.outer > 1:
            simple = replace(choice, outer=1)
            yield replace(case, choices=(*case.choices[:axis], simple, *case.choices[axis + 1 :]))
    for axis, parts in enumerate(case.parts):
        for fewer in range(2, parts):
            yield replace(case, parts=(*case.parts[:axis], fewer, *case.parts[axis + 1 :]))
    if inputs.dtype != "float64":
        yield replace(case, inputs=replace(inputs, dtype="float64"))
    yield from _smaller(result)
    for sentinel in inputs.sentinels:
        yield replace(case, inputs=replace(inputs, sentinels=tuple(s for s in inputs.sentinels if s != sentinel)))
    if inputs.factors:
        yield replace(case, inputs=replace(inputs, factors=()))
    if inputs.kind != "bits":
        yield replace(case, inputs=replace(inputs, kind="bits"))


def _smaller(result: CaseResult) -> Iterator[SplitCase]:
    """Yield cases of smaller sizes: two elements per shard of what is split, 1 or 2 of everything else."""
    case, bound = result.case, result.signature.bound
    if bound is None:
        return
    sizes = dict(bound.sizes)
    split: dict[str, int] = {}
    for choice, parts in zip(case.choices, case.parts, strict=True):
        if isinstance(choice, Split):
            for name in bound.tied.get(choice.identifier, (choice.identifier,)):
                split[name] = split.get(name, 1) * parts * choice.outer
    for name, size in sizes.items():
        wanted = [split[name], 2 * split[name]] if name in split else [1, 2, 3]
        for smaller in wanted:
            if smaller < size:
                changed = {**(sizes if case.inputs.sample is None else dict(case.inputs.sizes)), name: smaller}
                yield replace(case, inputs=replace(case.inputs, sizes=tuple(changed.items())))
