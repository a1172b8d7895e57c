"""`nnscaler self-test plans`: does verify-plan find what is wrong with a program?"""

from __future__ import annotations

import time
from collections.abc import Callable

from verify.self_test.plans.run import LEVELS, judge_all
from verify.self_test.plans.subjects import MODELS, specs
from verify.self_test.plans.tally import PlansSelfTest, gather

PROCESSES = 2


def run_plans_self_test(
    progress: Callable[[str], None],
    *,
    quick: bool = False,
    seed: int = 0,
    levels: tuple[str, ...] = LEVELS,
    models: tuple[str, ...] = MODELS,
    each: int = 1,
    processes: int = PROCESSES,
) -> PlansSelfTest:
    """Mutants of every model under every plan: `each` of every kind, and of those every second one. `quick`: one plan
    a model, and every third. Raises NnscalerError for a model that there is not."""
    started = time.perf_counter()
    chosen = specs(models, quick)
    batches = list(judge_all(chosen, seed, each, levels, progress, processes, 3 if quick else 2))
    return gather(batches, levels, quick, time.perf_counter() - started)
