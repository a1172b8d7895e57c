"""`nnscaler self-test plans`: does verify-plan find what is wrong with a program?"""

from __future__ import annotations

import time
from collections.abc import Callable

from verify.self_test.programs.corpus import MODELS, Spec, specs
from verify.self_test.programs.run import LEVELS, judge_all
from verify.self_test.programs.tally import PlansSelfTest, gather
from verify.self_test.programs.tiny_models import TINY

PROCESSES = 2
# small programs with sections, outer sizes, unequal sizes, copies, buffers and constants
SMALL = (
    "packed", "packed, dp", "strided", "uneven", "words", "words, 3", "rested", "tied", "cube", "staged", "normed",
    "turned", "adapted",
)  # fmt: skip
NAMES = (*MODELS, *SMALL)


def run_plans_self_test(
    progress: Callable[[str], None],
    *,
    quick: bool = False,
    seed: int = 0,
    levels: tuple[str, ...] = LEVELS,
    models: tuple[str, ...] = NAMES,
    each: int = 1,
    processes: int = PROCESSES,
) -> PlansSelfTest:
    """Return mutants of every model under every plan: `each` of every kind, and of those every second one.

    `quick`: one plan a model, and every third; and of the small programs every third. Raises NnscalerError for a model
    that there is not.
    """
    started = time.perf_counter()
    small = tuple(Spec(n, TINY[n].plan, TINY[n].ranks, TINY[n].micro_batches) for n in SMALL if n in models)
    if quick and len(small) == len(SMALL):
        small = small[::3]
    chosen = (*specs(tuple(n for n in models if n not in TINY), quick), *small)
    batches = list(judge_all(chosen, seed, each, levels, progress, processes, 3 if quick else 2))
    return gather(batches, levels, quick, time.perf_counter() - started)
