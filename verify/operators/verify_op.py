"""`verify_op`: is an operator's annotation true?

Every identifier is split, every shard runs as the compiler would run it, and outputs and input gradients (under random
cotangents) are compared with the whole operator's. What passes is proved where it can be. The whole and its shards run
the same backward: where that is written by hand, finite differences are a second oracle.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verify.evidence.inputs.find_operator import find_record
from verify.evidence.options import OpOptions
from verify.operators.run.job import make_job
from verify.operators.run.many import run_one
from verify.results.report import Report


def verify_op(
    operator: Any, *, annotation: str | Callable[..., Any] | None = None, seed: int = 0, isolate: bool = True
) -> Report:
    """Compare the shards of `operator` with the whole, in a child process unless `isolate` is off.

    `operator`: a registered operator, its name, `file.py::function`, `package.module:function`, or any callable with
    `annotation`. Raises NnscalerError for what cannot be run at all: an unknown name, no annotation, an annotation
    that is not in the language, a call that needs sample inputs.
    """
    return run_one(make_job(find_record(operator), annotation), OpOptions(seed=seed), isolate)
