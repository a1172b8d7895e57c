"""Find mistakes in how gradients of parameters are put together, after a taught step whose every part was right."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import prod

from torch import Tensor

from nnscaler.ir.graph import Graph
from nnscaler.runtime.shards import cut_further, shard, unravel
from nnscaler.runtime.stage_base_class import Parameter, Stage, sizes_in_time
from nnscaler.runtime.tensor_bits_and_differences import difference, largest, real_numbers
from verify.programs.causes.explain_wrong_values import cause_of
from verify.programs.causes.wrong_tensor import CLOSE, Part, WrongTensor, on_ranks
from verify.programs.checks.input_and_outcome import SHOWN
from verify.programs.localise.culprit_record import Culprit, Key, RoleLine
from verify.programs.localise.instrument_statements import Foreign
from verify.programs.localise.teacher_forcing import Teacher

Summed = Mapping[tuple[int, str], frozenset[str]]
Ranks = Mapping[int, Tensor | None]
Finals = Mapping[tuple[int, str], Ranks]


def wrongly_summed(teacher: Teacher, summed: Summed, lines: Mapping[Key, RoleLine]) -> list[Culprit]:
    """Find parameters whose `reduce` is not the axes on which their readers leave parts."""
    found: list[Culprit] = []
    for stage, attribute in _in_order(teacher, summed):
        axes = summed[stage, attribute]
        declared = teacher.stages[stage].parameters.get(attribute)
        if declared is None or not declared.used:
            continue
        sizes = teacher.stages[stage].axes
        missing = [a for a in sizes if a in axes and a not in declared.reduce]
        extra = [a for a in declared.reduce if a not in axes and sizes.get(a, 1) > 1]
        if not missing and not extra:
            continue
        if missing:
            over = " and ".join(missing)
            cause = (
                f"the gradients of the ranks of {over} add up to the model's: an all_reduce over {over} is missing, "
                f"and its reduce={declared.reduce} does not name {over}"
            )
        else:
            times = prod(sizes[axis] for axis in extra)
            over = " and ".join(extra)
            cause = (
                f"it is {times} times the model's, the size of {over}: summed once too often, for "
                f"its reduce={declared.reduce} names {over}, on which it is whole"
            )
        found.append(_culprit("gradient_differs", stage, attribute, declared, lines, cause))
    return _merged(found) if len(found) > SHOWN else found


def _in_order(teacher: Teacher, keys: Collection[tuple[int, str]]) -> list[tuple[int, str]]:
    """Return (stage, attribute) in the order of the declarations."""
    order = [(index, name) for index, stage in sorted(teacher.stages.items()) for name in stage.parameters]
    return [key for key in order if key in keys]


def frozen(teacher: Teacher, graph: Graph, lines: Mapping[Key, RoleLine]) -> list[Culprit]:
    """Find trained tensors that the program declares frozen, or unused although the model uses them."""
    found: list[Culprit] = []
    for index, stage in teacher.stages.items():
        for attribute, declared in {**stage.frozen, **stage.parameters}.items():
            tensor = teacher.tensor_of(index, f"self.{attribute}")
            trained = tensor in teacher.logical.cotangents and bool(graph.consumers.get(tensor or ""))
            if not trained or (attribute in stage.parameters and declared.used):
                continue
            where = "frozen" if attribute in stage.frozen else "parameters"
            cause = "it is declared frozen" if where == "frozen" else "it is declared used=False: nothing is summed"
            found.append(_culprit("gradient_missing", index, attribute, declared, lines, cause, where))
    return found


def wrongly_accumulated(
    teacher: Teacher, before: Finals, lines: Mapping[Key, RoleLine], foreign: Sequence[Foreign]
) -> list[Culprit]:
    """Find parameters whose gradient is not the sum of the right parts. `before`: what the last step left."""
    found: list[Culprit] = []
    for stage, attribute in _in_order(teacher, teacher.seen.gradients):
        pieces = teacher.seen.gradients[stage, attribute]
        declared = teacher.stages[stage].parameters.get(attribute)
        right = (
            None
            if declared is None
            else teacher.logical.cotangents.get(teacher.tensor_of(stage, f"self.{attribute}") or "")
        )
        if declared is None or right is None or not declared.used:
            continue
        wrong = [rank for rank, piece in pieces.items() if not _is_right(teacher, stage, declared, rank, piece, right)]
        if not wrong:
            continue
        ranks = {"now": pieces, "before": before.get((stage, attribute), {})}
        cause = _cause(teacher, teacher.stages[stage], declared, wrong[0], right, ranks)
        culprit = _culprit("gradient_differs", stage, attribute, declared, lines, cause)
        facts = {**culprit.facts, "step": str(teacher.logical.step), "ranks": _named(wrong)}
        culprit = replace(culprit, facts=facts)
        found.append(_at_foreign(culprit, foreign, stage, attribute))
    return _merged(found)


def changed(teacher: Teacher, lines: Mapping[Key, RoleLine], foreign: Sequence[Foreign]) -> list[Culprit]:
    """Find parameters that the program itself writes to during a step."""
    found: list[Culprit] = []
    for (stage, attribute), ranks in sorted(teacher.seen.changed.items()):
        declared = teacher.stages[stage].parameters.get(attribute) or teacher.stages[stage].frozen.get(attribute)
        if declared is None:
            continue
        some = len(ranks) < len(teacher.stages[stage].ranks)
        message = f"the program writes to the parameter `{declared.fqn}` during the step, on rank {_named(ranks)}"
        cause = "only the optimizer may change a parameter" + (": its copies on other ranks stay as they were" * some)
        code = "replicas_differ" if some else "parameter_differs"
        line = lines.get((stage, "parameters", attribute))
        facts = {"stage": str(stage), "step": str(teacher.logical.step)}
        culprit = Culprit(code, message, declared.fqn, line, None, cause, None, facts)
        found.append(_at_foreign(culprit, foreign, stage, attribute))
    return found


def _at_foreign(culprit: Culprit, foreign: Sequence[Foreign], stage: int, attribute: str) -> Culprit:
    """Return the statement that no generated program has, where one names the parameter."""
    line = next((f for f in foreign if f"self.{attribute}." in f.text and f.stage == stage), None)
    return culprit if line is None else replace(culprit, line=RoleLine(line.file, line.line, line.text))


def _named(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))


def _culprit(
    code: str,
    stage: int,
    attribute: str,
    declared: Parameter,
    lines: Mapping[Key, RoleLine],
    cause: str | None,
    group: str = "parameters",
) -> Culprit:
    if code == "gradient_missing":
        message = f"the program has no gradient of `{declared.fqn}`, and the model has one"
    else:
        message = f"the gradient of `{declared.fqn}` is put together wrongly from parts that are right"
    line = lines.get((stage, group, attribute))
    return Culprit(code, message, declared.fqn, line, None, cause, None, {"stage": str(stage), "step": "0"})


def _merged(culprits: list[Culprit]) -> list[Culprit]:
    """Merge the culprits that have one cause into one, which names the other tensors."""
    by_cause: dict[str, list[Culprit]] = {}
    for culprit in culprits:
        by_cause.setdefault(culprit.cause or culprit.tensor, []).append(culprit)
    merged: list[Culprit] = []
    for same in by_cause.values():
        names = [name for name in dict.fromkeys(c.tensor for c in same) if name != same[0].tensor]
        merged.append(replace(same[0], others=tuple(names)))
    return merged


def _is_right(
    teacher: Teacher, stage: int, declared: Parameter, rank: int, piece: Tensor | None, right: Tensor
) -> bool:
    if piece is None:
        return False
    expected = _own(teacher.stages[stage], declared, rank, right)
    return difference(piece, expected, largest(right)).relative < CLOSE


def _own(stage: type[Stage], declared: Parameter, rank: int, tensor: Tensor) -> Tensor:
    here = unravel(stage.ranks.index(rank), stage.axes)
    return shard(tensor, declared.at_rest, stage.axes, here)


def _cause(
    teacher: Teacher, stage: type[Stage], declared: Parameter, rank: int, right: Tensor, ranks: Mapping[str, Ranks]
) -> str | None:
    """Explain the wrong gradient of a rank. `right`: the logical one; `ranks`: "now" and "before", what all have."""
    piece, last = ranks["now"][rank], ranks["before"].get(rank)
    if piece is None:
        return "the gradient is None: nothing was added to it"
    local = WrongTensor(
        "gradient",
        {(rank, 0): real_numbers(piece)},
        real_numbers(_own(stage, declared, rank, right)),
        {(rank, 0): {}},
        sizes={**stage.axes, **sizes_in_time(stage)},
        judged=((rank, 0),),
        before=None if last is None else real_numbers(last),
        parts=lambda: _parts(teacher, stage, declared, rank),
    )
    held = {owner: theirs for owner, theirs in ranks["now"].items() if theirs is not None}
    return cause_of(local, on_ranks("gradient", (stage.ranks, stage.axes), held, right, declared.at_rest)).text or None


def _parts(teacher: Teacher, stage: type[Stage], declared: Parameter, rank: int) -> dict[Part, Tensor]:
    """Return each rank's contribution in each micro-batch, from every stage that holds the parameter."""
    found: dict[Part, Tensor] = {}
    here = unravel(stage.ranks.index(rank), stage.axes)
    for index, other in teacher.stages.items():
        for theirs in other.parameters.values():
            if theirs.fqn != declared.fqn or not theirs.used or dict(theirs.states) != dict(declared.states):
                continue
            for position, owner in enumerate(other.ranks):
                there = unravel(position, other.axes)
                if any(there.get(a, i) != i for a, i in here.items() if a not in theirs.reduce):
                    continue
                for micro in range(prod(sizes_in_time(other).values())):
                    part = teacher.part_of(index, theirs, (owner, micro))
                    if part is not None:
                        at = {**there, **{axis: here[axis] for axis in declared.rest}}
                        found[str(index), owner, micro] = _at_rest(part, declared, other, at)
    return found


def _at_rest(part: Tensor, declared: Parameter, stage: type[Stage], at: Mapping[str, int]) -> Tensor:
    """Return what the tensor at rest at these coordinates gets of a part of the leaf's gradient."""
    return cut_further(part, declared.shape, declared.states, declared.at_rest, stage.axes, at)
