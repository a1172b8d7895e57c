"""Find stored tensors that a program holds otherwise than it uses them: cut in another way, or another in its place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from nnscaler.layout import Sharded, State
from nnscaler.runtime.shards import shard
from nnscaler.runtime.stage_base_class import Parameter, Stage
from nnscaler.runtime.tensor_bits_and_differences import difference
from verify.programs.causes.explain_wrong_values import cuts
from verify.programs.localise.candidate_repairs import Replay
from verify.programs.localise.culprit_record import Culprit, Key, RoleLine
from verify.programs.localise.judge_taught_statements import CLOSE, Wrong

_GROUPS = ("parameters", "frozen", "buffers", "constants")


def wrongly_held(
    replay: Replay, wrong: Sequence[Wrong], lines: Mapping[Key, RoleLine]
) -> tuple[list[Culprit], frozenset[int]]:
    """Return the declarations that are wrong, and the numbers of the statements that are right once
    they are repaired."""
    culprits: list[Culprit] = []
    explained: set[int] = set()
    numbers = frozenset(one.statement.number for one in wrong)
    for one in wrong:
        if one.statement.number in explained:
            continue
        stage = one.statement.stage
        attributes, text = _repair(replay, one, numbers)
        for attribute in attributes:
            reading = (w.statement.number for w in wrong if f"self.{attribute}" in w.statement.reads)
            explained |= {number for number in reading if replay.run.statements[number].stage == stage}
            culprits.append(_culprit(replay, one, attribute, text, lines))
    return culprits, frozenset(explained)


def _culprit(replay: Replay, user: Wrong, attribute: str, text: str, lines: Mapping[Key, RoleLine]) -> Culprit:
    stage = user.statement.stage
    declared = replay.run.teacher.stored(stage, attribute)
    line = next((lines[stage, g, attribute] for g in _GROUPS if (stage, g, attribute) in lines), None)
    message = f"`{attribute}`, the tensor `{declared.fqn}`, is not held as stage {stage} uses it"
    facts = {"stage": str(stage), "declared": str(dict(declared.states)), "used": f"to compute `{user.result}`"}
    return Culprit("tensor_differs", message, declared.fqn, line, user.statement.model, text, None, facts)


def _always_wrong(replay: Replay, stage: int, attribute: str, numbers: frozenset[int]) -> bool:
    """Return whether every statement that reads the tensor is wrong; if one is right, the stored tensor is too."""
    readers = [s for s in replay.run.statements.values() if s.stage == stage and f"self.{attribute}" in s.reads]
    return all(s.number in numbers for s in readers)


def _repair(replay: Replay, wrong: Wrong, numbers: frozenset[int]) -> tuple[tuple[str, ...], str]:
    """Return the first other holding with which the statement is right: of one stored tensor, or of
    all that it reads."""
    teacher = replay.run.teacher
    stage = teacher.stages[wrong.statement.stage]
    reads = [read.removeprefix("self.") for read in wrong.statement.reads if read.startswith("self.")]
    attributes = [name for name in reads if teacher.stored(stage.index, name) is not None]
    attributes = [name for name in attributes if _always_wrong(replay, stage.index, name, numbers)]
    for name in attributes:
        if _is_stale(replay, wrong, stage, name):
            return (name,), "stale: it is used as it was before the last update"
    choices = [(name, holding) for name in attributes for holding in _holdings(replay, stage, name)]
    for name, (text, tensor, states) in choices:
        if _is_right(replay, wrong, {name: (tensor, states)}):
            return (name,), text
    for _, (text, _, _) in choices:  # the same change of several
        same = {name: (tensor, states) for name, (other, tensor, states) in choices if other == text}
        if len(same) > 1 and _is_right(replay, wrong, same):
            return tuple(same), text
    return (), ""


def _is_stale(replay: Replay, wrong: Wrong, stage: type[Stage], attribute: str) -> bool:
    """Return whether the statement gives the same results with the value from before the last update.

    A correct program reads the value from after the update.
    """
    declared = replay.run.teacher.stored(stage.index, attribute)
    old = None if replay.run.earlier is None else replay.run.earlier.get(declared.fqn)
    if old is None:
        return False

    def instead(here: Stage, read: str) -> Any:
        if read != f"self.{attribute}":
            return None
        return shard(old, declared.states, here.sizes(), here.coordinates()).to(getattr(here, attribute).dtype)

    again = replay.execute(wrong.statement, wrong.statement, instead)
    recorded = replay.run.teacher.seen.executions.get(wrong.statement.number, {})
    if not again or not recorded:
        return False
    return all(_same(again[at].outputs, execution.outputs) for at, execution in recorded.items())


def _same(again: Mapping[str, Any], recorded: Mapping[str, Any]) -> bool:
    pairs = [(again.get(name), tensor) for name, tensor in recorded.items() if isinstance(tensor, Tensor)]
    return bool(pairs) and all(
        isinstance(a, Tensor) and a.shape == b.shape and difference(a, b).relative < CLOSE for a, b in pairs
    )


def _is_right(replay: Replay, wrong: Wrong, held: Mapping[str, tuple[Tensor, Mapping[str, State]]]) -> bool:
    def instead(here: Stage, read: str) -> Any:
        name = read.removeprefix("self.")
        if name == read or name not in held:
            return None
        piece = shard(*held[name], here.sizes(), here.coordinates())
        return piece.to(getattr(here, name).dtype)

    return replay.repairs(wrong.statement, wrong.statement, instead)


def _holdings(replay: Replay, stage: type[Stage], attribute: str) -> Iterator[tuple[str, Tensor, dict[str, State]]]:
    """Yield other layouts of the same local shape, then other tensors of the model."""
    declared = replay.run.teacher.stored(stage.index, attribute)
    sizes = dict(stage.axes)
    states = dict(declared.states)
    values = replay.run.teacher.logical.values
    logical = next(v for t, v in values.items() if declared.fqn in replay.run.graph.tensors[t].fqns)
    for axis, state in states.items():
        for other in cuts(tuple(declared.shape), states, axis, sizes):
            strided = isinstance(state, Sharded) and state.outer == 1 and other.outer > 1
            kind = "strided, not contiguous" if strided else "cut otherwise"
            text = f"held as {other} over {axis} instead of {state} ({kind}), what uses it is right"
            yield text, logical, {**states, axis: other}
    if not isinstance(declared, Parameter) and not states:
        return
    for tensor in replay.run.graph.with_role("parameter", "buffer", "constant"):
        if tensor.fqns[0] != declared.fqn and tuple(tensor.shape) == tuple(declared.shape):
            text = f"with `{tensor.fqns[0]}` in its place, what uses it is right: another tensor is held"
            yield text, values[tensor.name], states
