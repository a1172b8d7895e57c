"""Watch what an operator decides by values in one run: the way through its code, and how its comparisons come out.

Two inputs with other decisions lie on two sides of a number, wherever that stands and whatever is compared with it.
A branch of Python that hangs on values and always goes one way has a side that nothing was seen of.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import inf
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from verify.evidence.user_code_path_on_fake_tensors import followed, line_number, line_of, users

Decisions = tuple[Hashable, ...]
_BOUNDING = ("clamp", "maximum", "minimum", "fmax", "fmin", "relu", "hardtanh", "threshold")
_ENDS = frozenset({"RETURN_VALUE", "RERAISE", "JUMP_FORWARD", "JUMP_BACKWARD", "FOR_ITER"})


@dataclass(slots=True)
class WatchedRuns:
    """Decisions seen over several runs.

    sides  of each place in a user's code that was reached: the places that came next
    asked  branches that hang on values: the first after a tensor was read
    most   steps of a user's code in a run, beyond which it is stopped: on an infinity, some loops do not end
    steps  of all runs: bytecodes of the user's code, and operators
    """

    sides: dict[tuple[CodeType, int], set[int]] = field(default_factory=dict)
    asked: set[tuple[CodeType, int]] = field(default_factory=set)
    most: float = inf
    steps: int = 0

    def decisions(self, run: Callable[[], object]) -> Decisions | None:
        """Return what a run decides; None where it raises or does not end, which is a decision too."""
        noted: list[Hashable] = []
        last: dict[FrameType, int] = {}

        def note(frame: FrameType) -> None:
            noted.append(frame.f_lasti)
            if frame in last:
                self.sides.setdefault((frame.f_code, last[frame]), set()).add(frame.f_lasti)
            last[frame] = frame.f_lasti
            if len(noted) > self.most:
                raise _Endless

        try:
            with followed(note), _Watch(noted, self.asked):
                run()
        except Exception:  # noqa: BLE001 - whatever the operator raises there
            return None
        finally:
            self.steps += len(noted)
        return tuple(noted)

    def one_sided(self) -> Iterator[str]:
        """Yield the places of branches that hang on values and went one way always, unless the other one raises."""
        for code, jump in sorted(self.asked, key=lambda place: (place[0].co_firstlineno, place[1])):
            places = _instructions(code)
            at = next(i for i, instruction in enumerate(places) if instruction.offset == jump)
            unseen = {places[at].argval, places[at + 1].offset} - self.sides.get((code, jump), set())
            if len(unseen) == 1 and not _raises(code, *unseen):
                yield line_of(code, jump)


class _Endless(Exception):
    """A run takes far more steps than others."""


class _Watch(TorchDispatchMode):
    """Notes each ATen operator, of those that compare whether all and whether some elements come out so, and where
    numbers are read from tensors."""

    def __init__(self, noted: list[Hashable], asked: set[tuple[CodeType, int]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.noted, self.asked = noted, asked

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func)
        compared: Any = None
        if isinstance(result, bool | int | float):
            compared = result if isinstance(result, bool) else None
            self.asked |= {*_branch_of(sys._getframe())}
        elif isinstance(result, Tensor) and result.numel() and result.dtype == torch.bool:
            compared = result
        elif isinstance(result, Tensor) and result.numel() and name.removeprefix("aten.").startswith(_BOUNDING):
            compared = result == args[0] if args[0].shape == result.shape else None
        outcome = (bool(compared.any()), bool(compared.all())) if isinstance(compared, Tensor) else compared
        self.noted.append((name, outcome))
        return result


def _branch_of(frame: FrameType | None) -> Iterator[tuple[CodeType, int]]:
    """Yield the first branch at or after the place where a user's code is, and those after it on its line."""
    while frame is not None and not users(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return
    line = 0
    for instruction in _instructions(frame.f_code):
        place = instruction.offset
        if place >= frame.f_lasti and "JUMP" in instruction.opname and "IF" in instruction.opname:
            if line and line_number(frame.f_code, place) != line:
                return
            line = line_number(frame.f_code, place)
            yield frame.f_code, place
        elif place > frame.f_lasti and instruction.opname in _ENDS and not line:
            return


@cache
def _instructions(code: CodeType) -> tuple[dis.Instruction, ...]:
    return tuple(dis.get_instructions(code))


def _raises(code: CodeType, place: int) -> bool:
    """Return whether what stands at a place goes straight to an exception."""
    for instruction in _instructions(code):
        if instruction.offset >= place and instruction.opname == "RAISE_VARARGS":
            return True
        if instruction.offset >= place and (instruction.opname in _ENDS or "JUMP" in instruction.opname):
            return False
    return False
