"""Stored tensors and outputs over all stages: what is held, each gradient's sum, the loss, new values, results.

Every copy of a stored tensor is the same, and each parameter's gradient is summed exactly once, over exactly the
ranks that hold a part of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from nnscaler.ir.conversion_table_and_paths import explain_illegal
from nnscaler.ir.graph import Graph, LogicalTensor
from nnscaler.layout import INVARIANT, PARTIAL, Sharded
from verify.programs.typing.explain_layout_mismatch import disagreement, rounds_to
from verify.programs.typing.lines.type_lines_in_order import Noted, Reading
from verify.programs.typing.program_files.rank_program_syntax import ResultText, StageText, StoredText
from verify.programs.typing.stage import leaf_layout
from verify.programs.typing.typed_value import Held, Mistake, normal

_KINDS = {"parameter": ("parameter", "frozen"), "buffer": ("buffer",), "constant": ("constant",)}


def stored_tensors(graph: Graph) -> dict[str, LogicalTensor]:
    """Return fqn -> tensor, by every name that it has."""
    return {fqn: t for t in graph.with_role("parameter", "buffer", "constant") for fqn in t.fqns}


def check_stored(readings: Sequence[Reading], graph: Graph) -> tuple[int, list[Noted]]:
    """Check the stored tensors; return their number, and the mistakes."""
    known = stored_tensors(graph)
    holders: dict[str, list[tuple[Reading, StoredText]]] = {}
    noted: list[Noted] = []
    for reading in readings:
        for stored in reading.stage.stored:
            tensor = known.get(stored.fqn)
            if tensor is None:
                continue  # said where the stage was read
            mistakes = _declared(reading, stored, tensor, graph)
            noted += [Noted(reading.stage, stored.number, mistake) for mistake in mistakes]
            twice = [s for r, s in holders.get(tensor.name, ()) if r is reading]
            if twice:
                mistake = Mistake("not_covered", f"stage {reading.stage.index} holds `{stored.fqn}` twice")
                noted.append(Noted(reading.stage, stored.number, mistake))
            holders.setdefault(tensor.name, []).append((reading, stored))
    for name, found in holders.items():
        noted += _copies(name, found, graph)
    for tensor in graph.with_role("parameter", "buffer"):
        if tensor.name not in holders:
            message = f"no rank holds the model's {tensor.role} `{tensor.fqns[0]}`"
            noted.append(Noted(readings[0].stage, readings[0].stage.number, Mistake("not_covered", message)))
    return len(holders), noted


def _declared(reading: Reading, stored: StoredText, tensor: LogicalTensor, graph: Graph) -> list[Mistake]:
    found: list[Mistake] = []
    if stored.shape != tensor.shape or stored.dtype != tensor.dtype:
        here, there = (f"{x.dtype}{list(x.shape)}" for x in (stored, tensor))
        message = f"`{stored.fqn}` is {here}, and the model's is {there}"
        found.append(Mistake("not_covered", message, tensor=tensor.name))
    if stored.kind not in _KINDS[tensor.role]:
        found.append(Mistake("not_covered", f"`{stored.fqn}` is a {tensor.role} and is held as a {stored.kind}"))
    if tensor.role != "parameter":
        return found
    if (stored.kind == "parameter") != tensor.needs_grad:
        word = (
            "has no gradient in the model" if stored.kind == "parameter" else "is trained in the model, and frozen here"
        )
        found.append(Mistake("gradient_reduced_wrongly", f"`{stored.fqn}` {word}", tensor=tensor.name))
    for word, here, there in (("rests", stored.master, tensor.master), ("is summed", stored.sums, tensor.sums)):
        if here != there:
            given, right = (dtype or "its own dtype" for dtype in (here, there))
            message = f"`{stored.fqn}` {word} in {given}, and the plan says {right}"
            found.append(
                Mistake("not_covered", message, "small updates, or small gradients, are rounded away", tensor.name)
            )
    misplaced = _wrong_rest(reading, stored, tensor)
    if misplaced:
        message = f"`{stored.fqn}` cannot rest so: {misplaced}"
        why = "the optimizer would update elements that no rank, or several, put back"
        found.append(Mistake("not_covered", message, why, tensor.name))
    unknown = [a for a in stored.reduce if a not in reading.stage.axes]
    sharded = [a for a in stored.reduce if a in stored.states]
    again = [a for a in stored.reduce if stored.reduce.count(a) > 1]
    if unknown or sharded or again:
        message = f"the gradient of `{stored.fqn}` cannot be summed over {list(stored.reduce)}"
        cause = f"{again[0]} is named twice, and its sum is taken once" if again else None
        cause = f"the stage has the axes {list(reading.stage.axes)}" if unknown else cause
        cause = f"over {sharded[0]} each rank has the gradient of another shard" if sharded else cause
        found.append(Mistake("gradient_reduced_wrongly", message, cause, tensor.name))
    in_use = bool(graph.consumers[tensor.name])
    if stored.used != in_use and (tensor.needs_grad or in_use):
        lost = "its gradient would stay None" if tensor.needs_grad else "what another program trains would not come"
        word = f"uses it: {lost}" if in_use else "does not use it: it would get a gradient of zeros"
        message = f"`{stored.fqn}` is declared used={stored.used}, and the model {word}"
        cause = "a missing gradient is None, and not zeros: optimizers treat them differently"
        found.append(Mistake("gradient_reduced_wrongly", message, cause, tensor.name))
    return found


def _wrong_rest(reading: Reading, stored: StoredText, tensor: LogicalTensor) -> str:
    """Return why a parameter cannot lie so between steps; empty where it can.

    The leaf is whole on an axis of `rest`: `Replicated` where `reduce` names it, and else `Invariant`. So what the
    runtime does for each is a row of the conversion table, `Sharded -> Replicated` (all_gather, reduce_scatter) or
    `Sharded -> Invariant` (all_gather, slice).
    """
    if not stored.rest:
        return "" if stored.scatter == "step" else "nothing is scattered"
    if stored.kind != "parameter":
        return "it is not trained"
    for axis, state in stored.rest.items():
        if axis not in reading.stage.axes:
            return f"there is no axis {axis}"
        if axis in stored.states:
            return f"axis {axis} divides it already in the step"
        if not isinstance(state, Sharded):
            return f"{state} over {axis} is no division"
    layout = reading.axes.layout({**stored.states, **stored.rest})
    return explain_illegal(layout, reading.axes.sizes, tensor.shape, at_rest=True) or ""


def _copies(name: str, found: Sequence[tuple[Reading, StoredText]], graph: Graph) -> list[Noted]:
    """Copies on several stages lie alike, and each names the ranks of all, in one order.

    The order counts: the holder that is listed first is the one whose shards are in the norm of the gradients and in
    checkpoints. Copies without gradient need not be listed, but then on no stage.
    """
    tensor = graph.tensors[name]
    held = [(r, s) for r, s in found if s.kind in ("parameter", "frozen")]
    ordered = sorted(held, key=lambda entry: entry[0].stage.index)
    expected = tuple(dict.fromkeys(r.stage.ranks for r, _ in ordered)) if len(ordered) > 1 else ()
    listed = {s.copies for _, s in ordered}
    unlisted = listed == {()} and not tensor.needs_grad
    noted: list[Noted] = []
    for reading, stored in ordered:
        if stored.copies != expected and set(stored.copies) != set(expected) and not unlisted:
            noted.append(Noted(reading.stage, stored.number, _wrong_copies(stored, ordered, expected, tensor)))
        elif stored.copies != expected and len(listed) > 1:
            noted.append(Noted(reading.stage, stored.number, _other_order(stored, expected, tensor)))
    groups: dict[object, list[tuple[Reading, StoredText]]] = {}
    for reading, stored in ordered:
        if stored.kind == "parameter" or stored.copies:  # without gradient and unlisted, each is a tensor of its own
            # gradients of copies are summed position by position
            axes = tuple(reading.stage.axes.items()) if tensor.needs_grad else ()
            lies = tuple(tuple(sorted(states.items(), key=str)) for states in (stored.states, stored.rest))
            key = (lies, stored.scatter, stored.master, stored.sums, tuple(sorted(stored.reduce)), axes, stored.fqn)
            groups.setdefault(key, []).append((reading, stored))
    if len(groups) > 1:
        reading, stored = ordered[-1]
        stages = [r.stage.index for r, _ in ordered]
        message = (
            f"stages {stages} hold `{stored.fqn}` in other layouts or by other names, or sum its gradient otherwise"
        )
        cause = "the sum over the copies would add gradients of different shards, or parts of different sums"
        noted.append(Noted(reading.stage, stored.number, Mistake("gradient_reduced_wrongly", message, cause, name)))
    places: dict[int, set[int]] = {}
    for position, rank in (entry for ranks in expected for entry in enumerate(ranks)):
        places.setdefault(rank, set()).add(position)
    twice = [rank for rank, positions in places.items() if len(positions) > 1]
    if twice and tensor.needs_grad:
        reading, stored = ordered[-1]
        message = f"`{stored.fqn}` is held on the ranks {expected}: rank {twice[0]} has several places among them"
        cause = "the sum over the copies would add gradients of different shards: it is taken over one place of each"
        noted.append(Noted(reading.stage, stored.number, Mistake("gradient_reduced_wrongly", message, cause, name)))
    return noted


def _other_order(stored: StoredText, expected: tuple[tuple[int, ...], ...], tensor: LogicalTensor) -> Mistake:
    message = f"`{stored.fqn}` lists its copies as {stored.copies} here, and as {expected} on another stage"
    cause = (
        "the norm of the gradients and checkpoints take the copy that is listed first: with two orders it counts twice "
        "or never, and clipping scales by a wrong norm"
    )
    return Mistake("gradient_norm_differs", message, cause, tensor.name)


def _wrong_copies(
    stored: StoredText,
    ordered: Sequence[tuple[Reading, StoredText]],
    expected: tuple[tuple[int, ...], ...],
    tensor: LogicalTensor,
) -> Mistake:
    stages = ", ".join(str(r.stage.index) for r, _ in ordered)
    message = f"`{stored.fqn}` is held by stages {stages}, and its gradient is summed over the copies {stored.copies}"
    if not expected:
        cause = "only one stage holds it: there is no other copy to sum with"
    elif not stored.copies:
        cause = "it is tied: each stage has only its own part of the gradient, and the sum over its copies is missing"
    else:
        cause = f"the copies are on the ranks {expected}: a wrong group takes part in the sum"
    return Mistake("gradient_reduced_wrongly", message, cause, tensor.name)


# Check the outputs of a program: the loss that training starts from, and the buffers' new values.


def check_ends(readings: Sequence[Reading], graph: Graph) -> tuple[int, list[Noted]]:
    """Check the outputs of all stages; return their number, and the mistakes."""
    noted: list[Noted] = []
    with_loss = [r for r in readings if r.stage.loss is not None]
    if len(with_loss) != bool(graph.loss):
        stages = [r.stage.index for r in with_loss]
        place = (with_loss or readings)[-1].stage
        wanted = "one" if graph.loss else "none: the model has no loss"
        noted.append(
            Noted(place, place.number, Mistake("not_covered", f"stages {stages} compute the loss, not {wanted}"))
        )
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
    if stage.loss_casts != graph.loss_casts:
        said, wanted = (" to ".join(casts) or "nothing" for casts in (stage.loss_casts, graph.loss_casts))
        message = f"the loss is cast to {said}, and in the model to {wanted}"
        rest = graph.tensors[graph.loss].dtype
        lost = any(rounds_to(cast, rest) for cast in stage.loss_casts if cast not in graph.loss_casts)
        code = "precision_lost" if lost else "operation_differs"
        return Mistake(code, message, "it is rounded otherwise", graph.loss)
    try:
        written = axes.layout(stage.loss)
    except Mistake as mistake:
        return mistake
    other = [state for state in written if state not in (INVARIANT, PARTIAL)]  # refused on axes of one rank as well
    if other:
        message = f"the loss is declared {other[0]}, and the runtime takes one number, or a sum of numbers"
        return Mistake("layouts_disagree", message, None, graph.loss)
    declared = normal(written, axes.sizes, True)
    for number, (axis, have, told) in enumerate(zip(axes.names, held.layout, declared, strict=True)):
        if have != told or told not in (INVARIANT, PARTIAL):  # what training starts from is one number or a sum
            message = f"the loss is {have} over {axis}, and declared {told}"
            return Mistake("layouts_disagree", message, disagreement(have, told, axes, number), graph.loss)
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


# The results of a program besides its loss: each is declared once, as the layout that its stage returns it in.


def check_results(readings: Sequence[Reading], graph: Graph) -> tuple[int, list[Noted]]:
    """Check what the stages return besides the loss; return the number of results, and the mistakes."""
    noted: list[Noted] = []
    wanted = dict(graph.outputs)
    seen: dict[str, int] = {}
    for reading in readings:
        for declared in reading.stage.results:
            mistake: Mistake | None
            if declared.name not in wanted:
                message = f"stage {reading.stage.index} declares the result `{declared.name}`"
                mistake = Mistake("not_covered", f"{message}, which the model does not return")
            elif declared.name in seen:
                stages = f"stages {seen[declared.name]} and {reading.stage.index}"
                mistake = Mistake("not_covered", f"{stages} both declare the result `{declared.name}`")
            else:
                mistake = _result(reading, declared, wanted[declared.name], graph)
            seen.setdefault(declared.name, reading.stage.index)
            if mistake is not None:
                noted.append(Noted(reading.stage, declared.number, mistake))
    place = readings[-1].stage
    for name, tensor in wanted.items():
        if name not in seen:
            mistake = Mistake("not_covered", f"no stage declares the model's result `{name}`", None, tensor)
            noted.append(Noted(place, place.number, mistake))
    return len(wanted), noted


def _result(reading: Reading, declared: ResultText, right: str, graph: Graph) -> Mistake | None:
    name, tensor, axes = declared.name, graph.tensors[right], reading.axes
    if name not in reading.stage.forward.returned:
        message = f"stage {reading.stage.index} declares the result `{name}` and does not return it"
        return Mistake("not_covered", message, None, right)
    if (declared.shape, declared.dtype) != (tensor.shape, tensor.dtype):
        here, there = (f"{x.dtype}{list(x.shape)}" for x in (declared, tensor))
        return Mistake(
            "not_covered", f"the result `{name}` is declared {here}, and the model's is {there}", None, right
        )
    held = reading.returned[name]
    if held is None:
        return None  # what is wrong with it was said
    if held.tensor != right:
        message = f"the result `{name}` is `{held.tensor}`, and the model's is `{right}`"
        return Mistake("operation_differs", message, "another tensor is returned", right)
    try:
        written = axes.layout(declared.states)
    except Mistake as mistake:
        return mistake
    told, have = (normal(layout, axes.sizes, False) for layout in (written, held.layout))
    for number, (axis, one, other) in enumerate(zip(axes.names, have, told, strict=True)):
        if one != other:
            message = f"the result `{name}` is {one} over {axis}, and declared {other}"
            return Mistake("layouts_disagree", message, disagreement(one, other, axes, number), right)
    return None
