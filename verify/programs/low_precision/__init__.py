"""Programs in bfloat16 and float16, against thresholds measured on the model itself.

`noise` says what is measured, `measures` how far two tensors are apart, `measure` which ratio agrees.
"""

from __future__ import annotations

from verify.programs.low_precision.judge_against_noise import NoiseRow
from verify.programs.low_precision.run import low_precision_outcomes

__all__ = ["NoiseRow", "low_precision_outcomes"]
