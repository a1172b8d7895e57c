"""The command line that verifies an operator again."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any

from op_registry.spec import OperatorSpec


def reproduce_line(spec: OperatorSpec, annotation: str | Callable[..., Any] | None, seed: int) -> str | None:
    """The command line that verifies this operator again; None where no text names it."""
    target = spec.name if spec.target is None else None
    if spec.where is not None and spec.qualname and "<" not in spec.qualname:
        target = f"{spec.where.file}::{spec.qualname}"
    if target is None or (annotation is not None and not isinstance(annotation, str)):
        return None
    given = "" if annotation is None else f" --annotation {shlex.quote(annotation)}"
    return f"nnscaler verify-op {target}{given} --seed {seed}"
