"""The dtypes of training: what the optimizer sees is as wide as the parameter at rest, whatever forward computes in.

A run in float64 shows nothing of them. So the first step runs once more in the program's own dtypes, where they are
mixed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from verify.programs.checks.input_and_outcome import CheckOutcome, Tally
from verify.programs.training.rank_loop import RankTraining
from verify.results.finding import Finding
from verify.results.verdict import Verdict

NAME = "training: dtypes of what the optimizer sees"
HALF = (torch.bfloat16, torch.float16)


def is_mixed(precision: object, state: Mapping[str, Tensor]) -> bool:
    """Return whether a program computes in a dtype that is narrower than float32."""
    return precision is not None or any(tensor.dtype in HALF for tensor in state.values())


def check_dtypes(ranks: Sequence[RankTraining], state: Mapping[str, Tensor]) -> CheckOutcome:
    """Compare the dtypes of parameters, gradients and optimizer states with those of the model's parameters."""
    tally = Tally(NAME, Verdict.TESTED_EXACT)
    for rank in ranks:
        for name, what, tensor, cause in _seen(rank):
            right = state[name].dtype
            if tensor.dtype == right:
                tally.add(Verdict.TESTED_EXACT)
                continue
            found, wanted = (str(d).removeprefix("torch.") for d in (tensor.dtype, right))
            message = f"training: the {what} of `{name}` is {found} on rank {rank.rank}, and the parameter is {wanted}"
            facts = {"tensor": name, "step": "0", "rank": str(rank.rank)}
            repeated = any(f.counter_example["tensor"] == name for f in tally.findings)
            finding = Finding("training_dtype_differs", message, None, facts, cause)
            tally.add(Verdict.REFUTED, None if repeated else finding)
    return tally.outcome()


def _seen(rank: RankTraining) -> Iterator[tuple[str, str, Tensor, str]]:
    """Yield what the optimizer of a rank sees: parameter, what of it, the tensor, and what it means to be narrow."""
    step = rank.steps[0]
    for name, tensor in step.parameters.items():
        yield name, "tensor at rest", tensor, "there is no master copy: updates below its rounding are lost"
        gradient = step.gradients.get(name)
        if gradient is not None:
            yield name, "gradient", gradient, "the gradient is cast down before the optimizer has it"
        for key, value in step.states.get(name, {}).items():
            if value.dim() and value.is_floating_point():
                yield (
                    name,
                    f"optimizer's `{key}`",
                    value,
                    "the optimizer's state is in another dtype than its parameter",
                )
