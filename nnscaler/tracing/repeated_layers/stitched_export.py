"""Export a model and import its graph, with each of many equal layers traced once where that can be done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from nnscaler.errors import NnscalerError
from nnscaler.tracing.canonical import canonical
from nnscaler.tracing.export.importer import import_program
from nnscaler.tracing.export.loss_module import LossModule
from nnscaler.tracing.export.run_export import Exported, export_loss
from nnscaler.tracing.repeated_layers.active_call import repeated_layers
from nnscaler.tracing.repeated_layers.calls import Calls, following
from nnscaler.tracing.repeated_layers.expand import expand
from nnscaler.tracing.rewrite import RawGraph
from nnscaler.tracing.strided_views import name_windows

_AT_LEAST = {"auto": 8, "always": 2}


@dataclass(frozen=True)
class Stitched:
    """An exported and imported loss.

    exported   the training IR
    raw        the imported graph before the passes
    state      its stored tensors
    notes      about the copies
    repeats    how many calls of layers were copied, in words
    """

    exported: Exported
    raw: RawGraph
    state: Mapping[str, Tensor]
    notes: tuple[str, ...] = ()
    repeats: str = ""


def export_graph(wrapper: LossModule, tensors: tuple[Tensor, ...], specialise: bool, repeat_layers: str) -> Stitched:
    """Export and import the graph of the loss. `repeat_layers` as in `trace`: the graph does not depend on it.

    Raises NnscalerError "trace_failed" and "no_loss"; "usage" for another word in `repeat_layers`.
    """
    if repeat_layers != "off" and repeat_layers not in _AT_LEAST:
        raise NnscalerError("usage", f"repeat_layers is {repeat_layers!r}", help='use "auto", "always" or "off"')
    sites = {} if repeat_layers == "off" else repeated_layers(wrapper.model, _AT_LEAST[repeat_layers])
    if not sites:
        return _export(wrapper, tensors, specialise)
    calls = Calls(wrapper.model, sites)
    try:
        with following(calls):
            return _export(wrapper, tensors, False, calls)
    except NnscalerError as error:
        found = _export(wrapper, tensors, specialise)
        return replace(found, notes=(f"every layer is traced by itself: {error.message}",))


def _export(wrapper: LossModule, tensors: tuple[Tensor, ...], specialise: bool, calls: Calls | None = None) -> Stitched:
    exported = export_loss(wrapper, tensors, specialise)
    name_windows(exported.program)
    imported = import_program(exported.program, wrapper.model, tuple(wrapper.sample.tensors))
    if calls is None:
        return Stitched(exported, *canonical(imported.raw, imported.state))
    expanded = canonical(*expand(imported.raw, imported.state, calls.calls))
    return Stitched(exported, *expanded, repeats=_describe(calls))


def _describe(calls: Calls) -> str:
    copies = sum(call.like is not None for call in calls.calls)
    if not copies:
        return ""
    return f"{copies} of {len(calls.calls)} calls of repeated layers copied from {_listed(calls)}"


def _listed(calls: Calls) -> str:
    used: Sequence[str] = [
        calls.calls[n].site.path for n in sorted({c.like for c in calls.calls if c.like is not None})
    ]
    return ", ".join(used[:3]) + (f" and {len(used) - 3} more" if len(used) > 3 else "")
