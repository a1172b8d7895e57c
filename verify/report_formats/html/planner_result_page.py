"""The page of what the planner found, `nnscaler plan --html`: plan, simulated step, runners-up; without scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nnscaler.communication.stage_communication_calls import ranks_text
from nnscaler.communication.stage_memory_and_work import stage_memory
from nnscaler.performance.predict_step_time import Replay
from nnscaler.performance.predicted_events import step_events
from nnscaler.planning.cluster.description import show_bytes, show_seconds
from nnscaler.planning.planner.find_plan import Found
from verify.report_formats.html.comm_memory_bars import communication_panel, memory_panel
from verify.report_formats.html.communication_lane import Pictured, pictured
from verify.report_formats.html.page_elements import escape, facts, page, panel, table
from verify.report_formats.html.timeline import timeline_panel

BARS = 4000  # of the timeline that are drawn


def plan_page(model: str, found: Found, replayed: Replay, sections: Mapping[str, Sequence[str]]) -> str:
    """HTML. `sections`: more text, by its heading."""
    order, communicated, picture = replayed.order, replayed.communicated, picture_of(replayed)
    body = [
        _banner(model, found, replayed),
        _stages(found, replayed),
        timeline_panel(picture.timeline, picture.marks),
        communication_panel(replayed.profile.record),
        memory_panel(stage_memory(communicated, order, found.subject.optimizer)),
        _runners_up(found),
        *(panel(title, f"<pre>{escape(chr(10).join(lines))}</pre>") for title, lines in sections.items() if lines),
        _certificate(found, replayed),
    ]
    return page(f"{found.certificate.configuration}: {model}", "".join(body))


def picture_of(replayed: Replay) -> Pictured:
    """Return the simulated step as data for the picture, as far as it is drawn."""
    rows = replayed.prediction.timeline.rows
    most = max(1, BARS // max(len(rows), 1))
    until = None
    if any(len(row) > most for row in rows):
        until = min(row[min(most, len(row)) - 1].stop for row in rows)
    return pictured(step_events(replayed.communicated, replayed.prediction, until), until)


def _banner(model: str, found: Found, replayed: Replay) -> str:
    of = found.certificate
    priced = f"{show_seconds(of.seconds)} a step by the planner's tables, {show_seconds(replayed.seconds)} simulated"
    least = f"at least {show_seconds(of.bound)} in the space searched: gap {of.gap:.2%}"
    held = f"{show_bytes(of.memory)} of {show_bytes(of.memory_limit)} a rank"
    told = "".join(f"<p>{escape(line)}</p>" for line in (priced, least, held))
    subject = f'<span class="faint">nnscaler plan: {escape(model)} on {escape(of.cluster)}</span>'
    return f'<header class="banner plain">{subject}<div class="word">{escape(of.configuration)}</div>{told}</header>\n'


def _stages(found: Found, replayed: Replay) -> str:
    head = (
        "stage",
        "ranks",
        "layers",
        "forward",
        "backward",
        "once a step",
        "busy",
        "idle",
        "sends",
        "at rest",
        "activations",
    )
    every = [program.stage for program in replayed.communicated.stages]
    own = [stage for stage in every if len(stage.devices) == 1]  # the others are the shared ends of a pipeline
    times = replayed.prediction
    rows = [
        (
            str(number),
            ranks_text(own[number].mesh.ranks),
            found.layers_of(number),
            show_seconds(times.forward[own[number].index]),
            show_seconds(times.backward[own[number].index]),
            show_seconds(times.once[own[number].index]),
            f"{replayed.busy[own[number].devices[0]]:.0%}",
            f"{1 - replayed.busy[own[number].devices[0]]:.0%}",
            show_bytes(replayed.sent[own[number].devices[0]]),
            show_bytes(stage.resting),
            show_bytes(stage.kept),
        )
        for number, stage in enumerate(found.best.stages)
    ]
    remark = (
        "Forward and backward are of one micro-batch, simulated; what a rank sends is of a step, in ring algorithms; "
        "memory is that of the planner's tables."
    )
    return panel("Stages", table(head, rows, "plain"), remark)


def _runners_up(found: Found) -> str:
    others = found.certificate.runners_up
    if not others:
        return ""
    rows = [(escape(c), show_seconds(s), "yes" if fits else "no") for c, s, fits in others]
    remark = "The next ones among the configurations that were solved."
    return panel("Runners-up", table(("configuration", "a step", "fits"), rows, "plain"), remark)


def _certificate(found: Found, replayed: Replay) -> str:
    told = {n: v for n, v in found.certificate.as_dict().items() if n != "runners_up"}
    return panel("Certificate", facts({**told, "simulated_seconds": replayed.seconds}))
