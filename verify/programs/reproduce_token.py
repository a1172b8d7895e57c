"""`nns2:...`: one run of verify-plan as a word. A plan that was read from a file is in it as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from shlex import quote
from typing import Any

from nnscaler.model_file import find_target
from nnscaler.plan_source import is_words, plan_text, schedule_file
from verify.programs.request import PlanRequest
from verify.results.packed_json import WordKind
from verify.results.request_token import RequestToken, RequestWords, Source


def _again(request: Mapping[str, Any]) -> str:
    return f"verify-plan {quote(request['model'].partition('::')[0])} --ranks {request['ranks']}"


_KIND = WordKind("nns2:", "verify-plan", 1 << 24, "which may compile another program")
WORDS = RequestWords(_KIND, PlanRequest, _again)


def make_token(request: PlanRequest) -> RequestToken:
    """Return the token of a request whose ranks and backend are set. Raises NnscalerError `no_such_file`."""
    sources = []

    def named(path: str, function: str = "") -> str:
        sources.append(Source.of(path))
        return sources[-1].path + (f"::{function}" if function else "")

    file, function = find_target(str(request.model))
    request = replace(request, model=named(str(file), function))
    if request.plan is not None and "::" in request.plan:
        path, _, function = request.plan.partition("::")
        request = replace(request, plan=named(path, function))
    elif request.plan is not None and not is_words(request.plan):
        request = replace(request, plan=None, plan_document=plan_text(request.plan))
    if request.program is not None:
        request = replace(request, program=named(request.program))
    if request.schedule is not None and schedule_file(request.schedule) is not None:
        path, _, function = request.schedule.partition("::")
        request = replace(request, schedule=named(path, function))
    return RequestToken.of(request, tuple(sources))
