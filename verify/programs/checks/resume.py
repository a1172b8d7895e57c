"""A checkpoint before the last step: it holds the model's state, and training goes on from it to the same bits."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from nnscaler.runtime.shards import same_bits
from verify.programs.checks.context import Comparison, Outcome, Tally
from verify.programs.checks.logical import Holding
from verify.programs.execution.rank_program import RankResult
from verify.results.finding import Finding
from verify.results.tensor_difference import difference
from verify.results.verdict import Verdict


def check(comparison: Comparison, saved: Mapping[str, Tensor]) -> Outcome:
    """`saved`: the logical state as it was read back from all files."""
    tally = Tally("save and load", Verdict.TESTED_EXACT)
    holdings = {**comparison.parameters, **comparison.buffers}
    for holding in holdings.values():
        _complete(tally, comparison, holding, saved)
    for result in comparison.results:
        _continues(tally, comparison, result)
    return tally.outcome()


def _complete(tally: Tally, comparison: Comparison, holding: Holding, saved: Mapping[str, Tensor]) -> None:
    found = saved.get(holding.name)
    if found is not None and tuple(found.shape) == holding.shape:
        tally.add(Verdict.TESTED_EXACT)
        return
    what = "is not in the checkpoint" if found is None else f"has shape {tuple(found.shape)} in the checkpoint"
    tally.add(Verdict.REFUTED, _finding(comparison, holding.name, f"`{holding.name}` {what}"))


def _continues(tally: Tally, comparison: Comparison, result: RankResult) -> None:
    """Compare bitwise: the same program runs on the same numbers."""
    resumed = {(stage, attribute): tensor for stage, attribute, _, tensor in result.resumed}
    for stage, attribute, name, right in (*result.parameters, *result.buffers):
        tensor = resumed.get((stage, attribute))
        if right is None:
            continue
        if tensor is not None and same_bits(tensor, right):
            tally.add(Verdict.TESTED_EXACT)
            continue
        how = "is missing" if tensor is None else f"differs: {difference(tensor, right)}"
        message = f"training from a checkpoint, `{name}` {how} on rank {result.rank}"
        repeated = any(f.counter_example["tensor"] == name for f in tally.findings)
        tally.add(Verdict.REFUTED, None if repeated else _finding(comparison, name, message))


def _finding(comparison: Comparison, name: str, message: str) -> Finding:
    facts = {"tensor": name, "step": str(comparison.steps - 1)}
    return Finding("checkpoint_differs", message, comparison.place(name), facts)
