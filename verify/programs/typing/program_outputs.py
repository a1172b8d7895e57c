"""Check the outputs of a program: the loss that training starts from, and the buffers' new values."""

from __future__ import annotations

from collections.abc import Sequence

from nnscaler.ir.graph import Graph
from nnscaler.ir.layout import INVARIANT, PARTIAL
from verify.programs.typing.explain_mismatch import disagreement
from verify.programs.typing.lines.walk import Noted, Reading
from verify.programs.typing.roles.text import StageText
from verify.programs.typing.stage import leaf_layout
from verify.programs.typing.stored import stored_tensors
from verify.programs.typing.typed_value import Held, Mistake, normal


def check_ends(readings: Sequence[Reading], graph: Graph) -> tuple[int, list[Noted]]:
    """Check the outputs of all stages; return their number, and the mistakes."""
    noted: list[Noted] = []
    with_loss = [r for r in readings if r.stage.loss is not None]
    if len(with_loss) != 1:
        stages = [r.stage.index for r in with_loss]
        place = (with_loss or readings)[-1].stage
        noted.append(Noted(place, place.number, Mistake("not_covered", f"stages {stages} compute the loss, not one")))
    for reading in with_loss:
        mistake = _loss(reading, graph)
        if mistake is not None:
            noted.append(Noted(reading.stage, reading.stage.forward.number, mistake))
    count, wrong = _updates(readings, graph)
    return len(with_loss) + count, noted + wrong


def _loss(reading: Reading, graph: Graph) -> Mistake | None:
    stage, axes = reading.stage, reading.axes
    if "loss" not in reading.returned:
        return Mistake("not_covered", f"stage {stage.index} declares a loss and returns none")
    held = reading.returned["loss"]
    if held is None:
        return None  # what is wrong with it was said
    if held.tensor != graph.loss:
        message = f"the loss is `{held.tensor}`, and the model's is `{graph.loss}`"
        return Mistake("operation_differs", message, "another tensor is returned", graph.loss)
    assert stage.loss is not None
    try:
        written = axes.layout(stage.loss)
    except Mistake as mistake:
        return mistake
    other = [state for state in written if state not in (INVARIANT, PARTIAL)]  # refused on axes of one rank as well
    if other:
        message = f"the loss is declared {other[0]}, and the runtime takes one number, or a sum of numbers"
        return Mistake("layouts_disagree", message, None, graph.loss)
    declared = normal(written, axes.sizes, True)
    for axis, parts, have, told in zip(axes.names, axes.sizes, held.layout, declared, strict=True):
        if have != told or told not in (INVARIANT, PARTIAL):  # what training starts from is one number or a sum
            message = f"the loss is {have} over {axis}, and declared {told}"
            return Mistake("layouts_disagree", message, disagreement(have, told, axis, parts), graph.loss)
    return None


def _updates(readings: Sequence[Reading], graph: Graph) -> tuple[int, list[Noted]]:
    known, wanted = stored_tensors(graph), dict(graph.updates)
    noted: list[Noted] = []
    count = 0
    for reading in readings:
        stage = reading.stage
        holds = {s.variable: s for s in stage.stored if s.fqn in known}
        updated = {attribute: key for key, attribute in stage.updates.items()}
        noted += [Noted(stage, stage.number, mistake) for mistake in _changed(stage)]
        for variable, stored in holds.items():
            tensor = known[stored.fqn]
            if tensor.role != "buffer":
                continue
            count += 1
            held: Held | None = reading.returned.get(updated.get(variable, ""))
            mistake: Mistake | None = None
            if (tensor.name in wanted) != (variable in updated):
                word = "changes" if tensor.name in wanted else "keeps"
                message = f"the model {word} buffer `{stored.fqn}` in a step, and stage {stage.index} does not"
                mistake = Mistake("not_covered", message, "the buffer would be stale", tensor.name)
            elif variable in updated and updated[variable] not in reading.returned:
                mistake = Mistake(
                    "not_covered", f"`{updated[variable]}` is declared and not returned", None, tensor.name
                )
            elif variable in updated and stage.micro_batches > 1 and updated[variable] in stage.forward.returned:
                message = f"buffer `{stored.fqn}` changes with every micro-batch, and once per step in the model"
                mistake = Mistake("not_covered", message, "later micro-batches read the changed buffer", tensor.name)
            elif held is not None:
                at_rest = leaf_layout(stored, reading.axes, tensor)
                right = wanted[tensor.name]
                if held.tensor != right or held.layout != at_rest:
                    message = (
                        f"buffer `{stored.fqn}` becomes `{held.tensor}` {_text(held)}, and should be `{right}`, whole"
                    )
                    cause = "its new value is computed from a part of the batch" if held.tensor == right else None
                    mistake = Mistake("layouts_disagree", message, cause, tensor.name)
            if mistake is not None:
                noted.append(Noted(stage, stored.number, mistake))
    return count, noted


def _changed(stage: StageText) -> list[Mistake]:
    """Check that only buffers change, each by one value."""
    buffers = [s.variable for s in stage.stored if s.kind == "buffer"]
    changed = list(stage.updates.values())
    return [
        Mistake("not_covered", f"stage {stage.index} sets `{name}`, which is no buffer, or sets it twice")
        for name in dict.fromkeys(changed)
        if name not in buffers or changed.count(name) > 1
    ]


def _text(held: Held) -> str:
    return "(" + ", ".join(str(s) for s in held.layout) + ")"
