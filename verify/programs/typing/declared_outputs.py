"""The results of a program besides its loss: each is declared once, as the layout that its stage makes it in."""

from __future__ import annotations

from collections.abc import Sequence

from nnscaler.ir.graph import Graph
from verify.programs.typing.explain_layout_mismatch import disagreement
from verify.programs.typing.lines.walk import Noted, Reading
from verify.programs.typing.program_files.rank_program_syntax import ResultText
from verify.programs.typing.typed_value import Mistake, normal


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
