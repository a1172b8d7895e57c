"""The way that a run takes through a user's code, and whether it is another one on fake tensors.

A proof follows an operator on fake tensors. Code may see that they are fake, or catch what they raise where a value is
read; what is proved then is not what runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from nnscaler.is_user_file import is_users
from nnscaler.runtime.start_autograd import start_autograd
from verify.evidence.inputs.concrete_call import outputs_of, with_tensors
from verify.evidence.operator_trace import quiet
from verify.evidence.oracle.run_whole_operator import WholeRun, as_leaves, gradients_of

users = cache(is_users)
Places = frozenset[tuple[CodeType, int]]


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

    before = sys.gettrace()
    sys.settrace(follow)
    try:
        yield
    finally:
        sys.settrace(before)


def other_way_on_fake_tensors(function: Callable[..., Any], whole: WholeRun) -> str:
    """Return the first place of a user's code, forward or backward, that a run on fake tensors of these sizes comes to
    and one on these tensors does not, as `line 7 of my_ops.py`; empty where there is none. Code that does not run on
    fake tensors has no such place: nothing is proved of it.

    A function that only one of the runs calls says nothing: what it gave may be kept from before.
    """
    real = _places(lambda: _run(function, whole, lambda t: t))
    start_autograd()
    with quiet(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = _places(lambda: _run(function, whole, mode.from_tensor))
    seen = {code for code, _ in real}
    other = sorted((code.co_firstlineno, at, code) for code, at in fake - real if code in seen) if real else []
    return line_of(other[0][2], other[0][1]) if other else ""


def _places(run: Callable[[], object]) -> Places:
    """Return the places of a user's code that a run comes to, up to where it raises."""
    found: set[tuple[CodeType, int]] = set()
    with followed(lambda frame: found.add((frame.f_code, frame.f_lasti))), suppress(Exception):
        run()
    return frozenset(found)


def _run(function: Callable[..., Any], whole: WholeRun, made: Callable[[Tensor], Tensor]) -> None:
    concrete = whole.concrete
    leaves: Sequence[Tensor] = [
        made(t).detach().requires_grad_(t.requires_grad)
        for t in as_leaves(concrete.tensors, torch.float64, whole.without_gradient)
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
