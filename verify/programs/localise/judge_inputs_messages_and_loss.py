"""Judge the inputs, messages, order of backward passes and loss of a taught run: all that is between statements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nnscaler.ir import gradients_and_kept_values
from nnscaler.layout import Invariant, State
from nnscaler.runtime.shards import shard, unravel
from nnscaler.runtime.stage_base_class import is_trained, sizes_in_time
from nnscaler.runtime.tensor_bits_and_differences import difference
from verify.programs.execution.compare_variables import compare_variable, facts_of
from verify.programs.localise.culprit_record import Culprit, Key, RoleLine
from verify.programs.localise.judge_taught_statements import BOUND
from verify.programs.localise.teacher_forcing import Teacher
from verify.programs.typing.explain_layout_mismatch import named_in_time

Lines = Mapping[Key, RoleLine]


def wrong_ends(teacher: Teacher, lines: Lines, schedules: Mapping[int, RoleLine]) -> list[Culprit]:
    """Find wrong ends, in the order in which they matter: inputs, gradients lost on the way back, the loss.

    `schedules`: by stage.
    """
    found = [*_taken(teacher, lines), *_not_sent_back(teacher, lines)]
    if not any(culprit.code == "tensor_gradient_differs" for culprit in found):
        found += _never_backward(teacher, schedules) or _wrongly_sent_back(teacher, lines)
    return [*found, *_loss(teacher, lines), *_buffers(teacher, lines)]


def _taken(teacher: Teacher, lines: Lines) -> list[Culprit]:
    """Find pieces of inputs, and received tensors, that are not what the stage's layout says."""
    found: list[Culprit] = []
    for (stage, phase, name), pieces in sorted(teacher.seen.entered.items()):
        variable = teacher.variables.get((stage, name))
        expected = None if variable is None else teacher.logical.value(variable.tensor)
        if variable is None or expected is None:
            continue
        declared = teacher.stages[stage]
        inputs = declared.prepare_inputs if phase == "prepare" else declared.inputs
        if name not in inputs and name not in declared.receives:
            continue
        unequal = compare_variable(variable, pieces, expected, BOUND, is_gradient=False)
        if unequal is None:
            continue
        facts = facts_of(variable.name, variable, unequal)
        if name in inputs:
            line = lines.get((stage, "prepare_inputs" if phase == "prepare" else "inputs", name))
            message = f"the pieces of the input `{variable.tensor}` that stage {stage} takes differ: {unequal.text}"
            cause = f"it is cut as {_shown(inputs[name].states)}, and the stage uses it as {variable.layout or 'whole'}"
            if inputs[name].name != variable.tensor:
                cause = f"it is the input `{inputs[name].name}`, and the stage uses `{variable.tensor}`"
        else:
            line = lines.get((stage, "receives", name))
            message = (
                f"`{name}` agrees where it is computed, and differs where stage {stage} receives it: {unequal.text}"
            )
            cause = unequal.cause or "the messages between the stages bring it to the wrong ranks or micro-batches"
        found.append(Culprit("tensor_differs", message, variable.tensor, line, None, cause, None, facts))
    return found


def _not_sent_back(teacher: Teacher, lines: Lines) -> list[Culprit]:
    found: list[Culprit] = []
    for stage, name in sorted(teacher.seen.without_gradient):
        variable = teacher.variables.get((stage, name))
        if variable is None or name not in _differentiated(teacher, stage):
            continue
        message = f"no gradient of `{name}` goes back from stage {stage} to the one that computes it"
        cause = "the gradient is not sent back: the message is declared needs_grad=False"
        line = lines.get((stage, "receives", name))
        facts = {"stage": str(stage)}
        found.append(Culprit("tensor_gradient_differs", message, variable.tensor, line, None, cause, None, facts))
    return found


def _differentiated(teacher: Teacher, stage: int) -> frozenset[str]:
    """Return the variables of a stage that get a gradient in backward."""
    declared = teacher.stages[stage]
    roots = [send.key for send in declared.sends if send.needs_grad] + (["loss"] if declared.loss is not None else [])

    def needing(names: Sequence[str]) -> list[str]:
        tensors = ((name, teacher.tensor_of(stage, name)) for name in names)
        return [n for n, t in tensors if t and teacher.logical.name_of(t) in teacher.logical.cotangents]

    lines = [
        ([s.key] if s.key else needing(s.names), needing(s.reads))
        for _, s in sorted(teacher.statements.items())
        if s.stage == stage and s.phase == "forward"
    ]
    return gradients_and_kept_values.differentiated(lines, roots)


def _never_backward(teacher: Teacher, schedules: Mapping[int, RoleLine]) -> list[Culprit]:
    """Find micro-batches whose forward ran and whose backward did not."""
    missing = {
        stage: ran - teacher.seen.backwards.get(stage, set())
        for stage, ran in teacher.seen.forwards.items()
        if is_trained(teacher.stages[stage])
    }
    stages = [stage for stage, at in missing.items() if at]
    if not stages or not any(teacher.seen.backwards.values()):
        return []
    stage = max(stages)
    micros = sorted({micro for _, micro in missing[stage]})
    left_out = ", ".join(f"B{s}.{m}" for s in sorted(stages) for m in sorted({m for _, m in missing[s]}))
    loss = teacher.logical.graph.loss
    message = f"no gradient comes back for `{loss}` in micro-batch {', '.join(map(str, micros))} of stage {stage}"
    cause = f"a backward pass is missing: the schedule lacks {left_out}"
    facts = {"stage": str(stage), "micro-batch": ", ".join(map(str, micros))}
    line = schedules.get(stage)
    return [Culprit("tensor_gradient_differs", message, loss, line, None, cause, None, facts)]


def _wrongly_sent_back(teacher: Teacher, lines: Lines) -> list[Culprit]:
    """Find wrong gradients of a stage's outputs, as the executor hands them to its backward."""
    found: list[Culprit] = []
    for (stage, key), pieces in sorted(teacher.seen.came_back.items()):
        statement = next((s for s in teacher.statements.values() if s.key == key and s.stage == stage), None)
        variable = None if statement is None else teacher.target(statement, key)
        if variable is None:
            continue
        name = teacher.logical.name_of(variable.tensor)
        known = teacher.logical.gradients if key == "loss" else teacher.logical.cotangents
        if name not in known:
            continue
        unequal = compare_variable(variable, pieces, known[name], BOUND, is_gradient=True)
        if unequal is None:
            continue
        message = f"the gradient of `{variable.name}` differs where it comes back to stage {stage}: {unequal.text}"
        cause = unequal.cause or "the messages back bring it to the wrong ranks or micro-batches"
        line = lines.get((stage, "sends", key)) or lines.get((stage, "loss", ""))
        facts = facts_of(variable.name, variable, unequal)
        found.append(Culprit("tensor_gradient_differs", message, variable.tensor, line, None, cause, None, facts))
    return found


def _loss(teacher: Teacher, lines: Lines) -> list[Culprit]:
    """Judge the sum of the loss over ranks and micro-batches."""
    loss = teacher.logical.graph.loss
    right = teacher.logical.values[loss]
    wrong = sorted(rank for rank, value in teacher.seen.losses.items() if difference(value, right).relative > BOUND)
    if not wrong:
        return []
    stage = next((s for s in teacher.stages.values() if s.loss is not None), None)
    statement = next((s for s in teacher.statements.values() if s.key == "loss"), None)
    variable = None if statement is None else teacher.target(statement, "loss")
    cause = None
    if stage is not None and stage.loss is not None and variable is not None:
        sizes = {**stage.axes, **sizes_in_time(stage)}
        for axis, size in sizes.items():
            declared = stage.loss.states.get(axis, Invariant())
            made = variable.states.get(axis, Invariant())
            if size > 1 and type(declared) is not type(made):
                each = f"ranks of {axis}" if axis in stage.axes else named_in_time(axis)
                cause = (
                    f"each of the {each} has a part of a sum that nobody took: Loss declares {declared} on it, and "
                    f"what is returned is {made}"
                )
                if isinstance(declared, type(Invariant())) is False:
                    cause = f"Loss declares {declared} on {axis}, and what is returned is {made}: summed too often"
    message = (
        f"the loss `{loss}` is put together wrongly from parts that are right, on rank {', '.join(map(str, wrong))}"
    )
    line = None if stage is None else lines.get((stage.index, "loss", ""))
    return [Culprit("loss_differs", message, loss, line, None, cause, None, {"step": str(teacher.logical.step)})]


def _buffers(teacher: Teacher, lines: Lines) -> list[Culprit]:
    """Return the buffers whose new value was right and is not what is stored."""
    found: list[Culprit] = []
    new = dict(teacher.logical.graph.updates)
    for (index, name), pieces in sorted(teacher.seen.buffers.items()):
        stage = teacher.stages[index]
        tensor = teacher.tensor_of(index, f"self.{name}")
        if tensor is None:
            continue
        right = teacher.logical.values[new.get(tensor, tensor)]
        states = stage.buffers[name].states
        wrong = [
            rank
            for rank, piece in sorted(pieces.items())
            if difference(
                piece, shard(right, states, stage.axes, unravel(stage.ranks.index(rank), stage.axes))
            ).relative
            > BOUND
        ]
        if not wrong:
            continue
        fqn = stage.buffers[name].fqn
        message = f"the buffer `{fqn}` is not what was computed for it, on rank {', '.join(map(str, wrong))}"
        stored = name in stage.updates.values()
        cause = None if stored else "its new value is not stored: `updates` does not name it"
        line = lines.get((index, "updates", "")) or lines.get((index, "buffers", name))
        facts = {"stage": str(index), "step": str(teacher.logical.step)}
        found.append(Culprit("buffer_differs", message, fqn, line, None, cause, None, facts))
    return found


def _shown(states: Mapping[str, State]) -> str:
    return ", ".join(f"{axis}: {state}" for axis, state in states.items()) or "whole"
