"""Make a model's own code, and the libraries that it uses, believe that they are not being exported.

Code that asks `torch.compiler.is_exporting()` or `is_compiling()` takes another path than the one that trains:
`transformers` makes explicit attention masks, gives up grouped-query attention, or leaves a default mask out.
Torch itself and registered operators still hear the truth, which they need.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from nnscaler.tracing.export.locations import OURS, TORCH

_QUESTIONS = ("is_compiling", "is_exporting")
_FLAGS = ("_is_compiling_flag", "_is_exporting_flag")
_TRANSFORMERS = "transformers.utils.import_utils"


@contextmanager
def as_eager(is_known: Callable[[Any], bool]) -> Iterator[None]:
    """Open it around the model's forward, inside of the export.

    `is_known`: whether a tensor's values are known (`known_values`). `transformers` does not look at the values of
    the fake tensors of an export; it is told that those with known values are real.
    """
    with ExitStack() as stack:
        for name in _QUESTIONS:
            stack.enter_context(patch.object(torch.compiler, name, _for_torch_alone(name)))
        for name in _FLAGS:  # what `from torch.compiler import is_compiling` reads
            stack.enter_context(patch.object(torch.compiler, name, False))
        library = sys.modules.get(_TRANSFORMERS)  # not imported for a model that does without
        if library is not None and hasattr(library, "is_fake_tensor"):
            real = library.is_fake_tensor
            stack.enter_context(patch.object(library, "is_fake_tensor", lambda x: real(x) and not is_known(x)))
        yield


def _for_torch_alone(name: str) -> Callable[[], bool]:
    def answer() -> bool:
        frame = sys._getframe(1)
        while frame.f_code.co_name in _QUESTIONS and frame.f_back is not None:  # the aliases in torch
            frame = frame.f_back
        return frame.f_code.co_filename.startswith((TORCH, *OURS))

    answer.__name__ = name
    return answer
