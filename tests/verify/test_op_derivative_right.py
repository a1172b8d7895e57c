"""The second oracle: right backwards pass under every seed, whatever they look like."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from op_registry.annotation.parser import parse

from tests.verify.backwards import (
    SEEDS,
    Clamped,
    Dropped,
    Function,
    Kinked,
    Largest,
    Optional,
    RmsNorm,
    Turned,
    assert_right,
    normal,
    weighted_sum,
)
from verify import Verdict
from verify.evidence.inputs.draw_calls import choose_sizes, from_annotation
from verify.evidence.options import KINDS
from verify.operators.audit.derivative import check_derivative
from verify.self_test.operators.mutants.hosts import HOSTS
from verify.self_test.operators.mutants.mutant import spec_of


def test_the_right_norm() -> None:
    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return RmsNorm.apply(x, weight)  # type: ignore[no-any-return]

    assert_right(norm, normal(12, 8), normal(8))


@pytest.mark.parametrize("host", HOSTS, ids=lambda h: h.name)
def test_right_hosts(host: Any) -> None:
    spec = spec_of(host.name, host.annotation, host.right)
    sizes = choose_sizes(parse(host.annotation), (), "distinct")
    for seed in SEEDS:
        for kind in (KINDS[seed % len(KINDS)],):
            concrete = from_annotation(spec, sizes, kind, torch.Generator().manual_seed(seed))
            probed = check_derivative(spec, concrete, seed)
            assert [c.verdict for c in probed.checks] == [Verdict.TESTED_EXACT], (seed, kind, probed)


COMPLEX = torch.complex(normal(4, 3), normal(4, 3, seed=1))
RIGHT: list[tuple[str, Function, tuple[Any, ...]]] = [
    ("kinks", Kinked.apply, (normal(12, 5),)),
    ("kinks at the given values", Kinked.apply, (torch.zeros(6, 4),)),
    ("maximum and ids", Largest.apply, (normal(7, 5), torch.tensor([0, 3, 3, 6]))),
    ("one output of three", lambda x, ids: Largest.apply(x, ids)[0], (normal(7, 5), torch.tensor([0, 3, 3, 6]))),
    ("clamp, setup_context", lambda x: Clamped.apply(x, -0.5, 0.8), (normal(12, 5),)),
    ("complex, vmap", Turned.apply, (COMPLEX, COMPLEX.flip(0))),
    (
        "complex and real",
        lambda x, w: Turned.apply(torch.complex(x, w), torch.complex(w, x)).abs(),
        (normal(4), normal(4, seed=2)),
    ),
    ("no optional input", lambda x, b=None: Optional.apply(x, b), (normal(12, 5), None)),
    ("an optional input", lambda x, b=None: Optional.apply(x, b), (normal(12, 5), normal(5))),
    ("some outputs", lambda x, b=None: Optional.apply(x, b)[1], (normal(12, 5),)),
    ("a list", weighted_sum, ([normal(6, 2), normal(6, 2, seed=1)],)),
    ("random numbers", Dropped.apply, (normal(12, 5),)),
    (
        "large values masked",
        lambda x, m: Kinked.apply(x) + m,
        (normal(4, 4), torch.full((4, 4), -1e9).double().triu(1)),
    ),
    (
        "infinite mask",
        lambda x, m: (Kinked.apply(x) + m).softmax(-1),
        (normal(4, 4), torch.full((4, 4), -torch.inf).double().triu(1)),
    ),
    ("small values", lambda x: Kinked.apply(x * 1e-4), (normal(4, 4) * 1e-3,)),
    ("one number", Kinked.apply, (torch.tensor(1.5).double(),)),
]


@pytest.mark.parametrize(("function", "args"), [r[1:] for r in RIGHT], ids=[r[0] for r in RIGHT])
def test_right_backwards(function: Function, args: tuple[Any, ...]) -> None:
    assert_right(function, *args)


@pytest.mark.long
def test_built_in_derivatives_are_right() -> None:
    """torch's own: what the differences say about them tests the differences."""
    for function, inputs in (
        (lambda x, w: F.layer_norm(x, (8,), w), (normal(4, 8), normal(8))),
        (
            F.scaled_dot_product_attention,
            (normal(1, 2, 5, 4), normal(1, 2, 5, 4, seed=1), normal(1, 2, 5, 4, seed=2)),
        ),
        (lambda x: x.cumsum(0).max(0).values, (normal(6, 4),)),
        (lambda x: torch.fft.rfft(x).abs(), (normal(6, 8),)),
    ):
        assert_right(function, *inputs, always=True)
