"""Check the tensors that cross between stages: both sides declare the same message, and what arrives was sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nnscaler.ir.graph import Graph
from nnscaler.ir.layout import shape_of_rank
from verify.programs.typing.exchange import exchanged
from verify.programs.typing.lines.arguments import same_shape, shape_text
from verify.programs.typing.lines.uniform import NO_DIMS, Dims
from verify.programs.typing.lines.walk import Noted, Reading
from verify.programs.typing.roles.text import ExchangeText, MessageText, StageText
from verify.programs.typing.typed_value import Held, Mistake, axes_of

Message = MessageText | ExchangeText


def arrivals(
    stage: StageText,
    readings: Mapping[int, Reading],
    stages: Mapping[int, StageText],
    graph: Graph,
    uniform: Mapping[str, Dims],
) -> tuple[dict[str, Held | None], list[Noted]]:
    """Type each receiving variable of the stage; return the types, and the mistakes found."""
    found: dict[str, Held | None] = {}
    noted: list[Noted] = []
    for receive in stage.receives:
        found[receive.variable] = None
        try:
            found[receive.variable] = _arrival(stage, receive, readings, stages, graph, uniform)
        except Mistake as mistake:
            noted.append(Noted(stage, receive.number, mistake))
    return found, noted


def _arrival(
    stage: StageText,
    receive: Message,
    readings: Mapping[int, Reading],
    stages: Mapping[int, StageText],
    graph: Graph,
    uniform: Mapping[str, Dims],
) -> Held | None:
    source = stages.get(receive.stage)
    if source is None or source.index not in readings:
        raise Mistake(
            "deadlock",
            f"stage {stage.index} waits for `{receive.key}` of stage {receive.stage}, which does not come before it",
        )
    sends = [s for s in source.sends if s.key == receive.key and s.stage == stage.index]
    if len(sends) != 1 or isinstance(sends[0], ExchangeText) != isinstance(receive, ExchangeText):
        raise Mistake(
            "communication_mismatch",
            f"stage {stage.index} receives `{receive.key}`, and stage {source.index} sends it {len(sends)} times",
            "the receiver waits for ever" if not sends else None,
        )
    held = readings[source.index].returned.get(receive.key)
    if receive.key not in readings[source.index].returned:
        raise Mistake("communication_mismatch", f"stage {source.index} sends `{receive.key}` and does not return it")
    if held is None:
        return None
    send, tensor = sends[0], graph.tensors[held.tensor]
    if not send.needs_grad == receive.needs_grad == tensor.needs_grad:
        message = (
            f"`{tensor.name}` {'needs a' if tensor.needs_grad else 'has no'} gradient; it is sent with "
            f"needs_grad={send.needs_grad} and received with needs_grad={receive.needs_grad}"
        )
        cause = "its gradient is not sent back" if tensor.needs_grad else "a gradient is waited for that nobody sends"
        raise Mistake("communication_mismatch", message, cause, tensor.name)
    if receive.dtype != tensor.dtype:
        message = f"`{tensor.name}` is {tensor.dtype}, and stage {stage.index} receives {receive.dtype}"
        raise Mistake("communication_mismatch", message, "the dtypes of the two sides differ", tensor.name)
    if isinstance(send, ExchangeText) and isinstance(receive, ExchangeText):
        return exchanged(source, send, stage, receive, held, tensor, uniform.get(tensor.name, NO_DIMS))
    assert isinstance(send, MessageText) and isinstance(receive, MessageText)
    return _to_same_position(source, send, stage, receive, held, tensor.shape)


def _to_same_position(
    source: StageText, send: MessageText, stage: StageText, receive: MessageText, held: Held, shape: Sequence[int]
) -> Held:
    """Type a transfer between meshes of one shape, rank to rank: the layout stays."""
    if send.peers != stage.ranks or receive.peers != source.ranks:
        raise Mistake(
            "communication_mismatch",
            f"`{held.tensor}` goes from the ranks {_few(source.ranks)} to {_few(send.peers)}, and the ranks "
            f"{_few(stage.ranks)} expect it from {_few(receive.peers)}",
            "source and destination ranks of the messages are not those of the stages, position by position",
            held.tensor,
        )
    here = axes_of(stage.axes, stage.micro_batches)
    if axes_of(source.axes, source.micro_batches).sizes != here.sizes:
        raise Mistake(
            "communication_mismatch",
            f"`{held.tensor}` goes rank to rank between meshes of the shapes {source.axes} and {stage.axes}",
            tensor=held.tensor,
        )
    local = shape_of_rank(held.layout, here.pairs, shape)
    if not same_shape(local, receive.shape, here):
        raise Mistake(
            "communication_mismatch",
            f"stage {stage.index} receives `{held.tensor}` as {shape_text(receive.shape)}, and what is sent has shape "
            f"{shape_text(local)}",
            "the shapes of the two sides differ",
            held.tensor,
        )
    return held


def check_sends(stages: Mapping[int, StageText]) -> tuple[int, list[Noted]]:
    """Check that every send has its receive; return the number of sends, and the mistakes."""
    noted: list[Noted] = []
    count = 0
    for stage in stages.values():
        seen: set[tuple[str, int]] = set()
        for send in stage.sends:
            count += 1
            if send.key not in stage.forward.returned:
                message = f"stage {stage.index} sends `{send.key}`, which its forward does not return"
                noted.append(Noted(stage, send.number, Mistake("communication_mismatch", message)))
            target = stages.get(send.stage)
            wanted = (
                [] if target is None else [r for r in target.receives if (r.key, r.stage) == (send.key, stage.index)]
            )
            if len(wanted) != 1 or (send.key, send.stage) in seen:
                times = f"which receives it {len(wanted)} times"
                message = f"stage {stage.index} sends `{send.key}` to stage {send.stage}, {times}"
                noted.append(Noted(stage, send.number, Mistake("communication_mismatch", message)))
            seen.add((send.key, send.stage))
    return count, noted


def _few(ranks: Sequence[int]) -> str:
    """List ranks, the first ones of many."""
    shown = ", ".join(map(str, ranks[:8]))
    return f"({shown}{', ...' if len(ranks) > 8 else ''})"
