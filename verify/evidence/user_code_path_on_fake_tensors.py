"""Find where a run on fake tensors takes another path through a user's code than one on real tensors.

A proof follows an operator on fake tensors. Code may see that they are fake, or catch what they raise where a value is
read; what is proved then is not what runs.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from nnscaler.is_user_file import is_users
from nnscaler.runtime.start_autograd import start_autograd
from verify.evidence.inputs.concrete_call import ConcreteCall, outputs_of, with_tensors
from verify.evidence.operator_trace import quiet
from verify.evidence.oracle.run_whole_operator import WholeRun, as_leaves, gradients_of

users = cache(is_users)
Places = Mapping[tuple[CodeType, int], int]  # how often each is run


@contextmanager
def followed(note: Callable[[FrameType], object]) -> Iterator[None]:
    """While open, call `note` with the frame of each bytecode of a user's file before it runs; it may raise."""

    def follow(frame: FrameType, event: str, _: Any) -> Any:
        if not users(frame.f_code.co_filename):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            note(frame)
        return follow

    before, of_threads = sys.gettrace(), threading.gettrace()
    sys.settrace(follow)
    threading.settrace(follow)  # of those that the code starts
    try:
        yield
    finally:
        threading.settrace(of_threads)
        sys.settrace(before)


def places_on_values(function: Callable[..., Any], whole: WholeRun) -> Places:
    """Return the places of a user's code, forward and backward, that a run on the whole operator's tensors comes to."""
    with places_seen() as found, suppress(Exception):
        _run(function, whole.concrete, lambda t: t, whole.without_gradient)
    return found


def other_way_on_fake_tensors(function: Callable[..., Any], whole: WholeRun, real: Places) -> str:
    """Return where a run on fake tensors of these sizes and the `real` one part, in words; empty where they do not.
    Code that does not run to its end on fake tensors has no such place: nothing is proved of it."""
    start_autograd()
    with quiet(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        ended = False
        with places_seen() as fake, suppress(Exception):
            _run(function, whole.concrete, mode.from_tensor, whole.without_gradient)
            ended = True
    return where_ways_part(fake, real if ended else {}, real, "the fake tensors of a trace")


def where_ways_part(these: Places, wanted: Places, others: Places, what: str) -> str:
    """Return the first place that runs more often on `what` than on tensors with values (the places `others`), or the
    first of the `wanted` ones that runs less often on it; empty where there is none.

    A function that only the run on values calls says nothing: that was the first, and what it gave may be kept.
    """
    if place := _first_of(these, others, {code for code, _ in these}):
        return f"{place} runs more often on {what} than on tensors with values"
    if place := _first_of(wanted, these):
        return f"{place} runs more often on tensors with values than on {what}"
    return ""


def other_way_on_gpus(function: Callable[..., Any], concrete: ConcreteCall) -> str:
    """Return the first place of a user's code that a forward pass on fake tensors of a GPU comes to and one on those of
    a CPU does not, as `line 7 of my_ops.py`; empty where there is none, and where there is a GPU, which fake tensors
    would initialise: forked processes do not survive that. Nor do they autograd's threads for GPUs, so that nothing is
    recorded."""
    if torch.cuda.is_available():
        return ""
    with quiet(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        here = _places(lambda: _forward(function, concrete, [mode.from_tensor(t) for t in concrete.tensors]))
        tensors: list[Tensor] = []
        with suppress(Exception):  # a torch that makes none
            tensors = [torch.empty_like(t, device="cuda") for t in concrete.tensors]
        with patch.object(torch.cuda, "is_available", lambda: True):
            there = _places(lambda: _forward(function, concrete, tensors))
    return _first_of(there, here)


def _forward(function: Callable[..., Any], concrete: ConcreteCall, tensors: Sequence[Tensor]) -> None:
    args, kwargs = with_tensors(concrete.call, tensors, {})
    with torch.no_grad():
        function(*args, **kwargs)


def _first_of(these: Places, others: Places, functions: Collection[CodeType] | None = None) -> str:
    """Return the first place that these have more often, of these functions, or else of those that both have."""
    seen = {code for code, _ in others} if functions is None else functions
    more = (place for place, count in these.items() if count > others.get(place, 0))
    found = sorted(((code.co_firstlineno, at, code) for code, at in more if code in seen), key=lambda f: f[:2])
    return line_of(found[0][2], found[0][1]) if found else ""


@contextmanager
def places_seen() -> Iterator[Counter[tuple[CodeType, int]]]:
    """While open, count the places of a user's code that are run: one helper may be called for several numbers."""
    found: Counter[tuple[CodeType, int]] = Counter()
    with followed(lambda frame: found.update(((frame.f_code, frame.f_lasti),))):
        yield found


def _places(run: Callable[[], object]) -> Places:
    """Return the places of a user's code that a run comes to, up to where it raises."""
    with places_seen() as found, suppress(Exception):
        run()
    return found


def _run(
    function: Callable[..., Any],
    concrete: ConcreteCall,
    made: Callable[[Tensor], Tensor],
    without_gradient: frozenset[int] = frozenset(),
) -> None:
    leaves: Sequence[Tensor] = [
        made(t).detach().requires_grad_(t.requires_grad)
        for t in as_leaves(concrete.tensors, torch.float64, without_gradient | concrete.constants)
    ]
    args, kwargs = with_tensors(concrete.call, leaves, {})
    with torch.enable_grad():
        outputs = outputs_of(function(*args, **kwargs))
    cotangents = [torch.ones_like(o) if o is not None and o.requires_grad else None for o in outputs]
    gradients_of([outputs], [cotangents], [leaves])


def line_of(code: CodeType, place: int) -> str:
    """Return the line of the source on which an instruction stands, in words."""
    return f"line {line_number(code, place)} of {Path(code.co_filename).name}"


def line_number(code: CodeType, place: int) -> int:
    """Return the line of the source on which an instruction stands."""
    return next(line or code.co_firstlineno for start, end, line in code.co_lines() if start <= place < end)
