"""Program folders in which something is wrong that no line computes: what the runtime reads beside the lines."""

from __future__ import annotations

from pathlib import Path

from tests.broken.planting import Edit, Original
from verify.finding import Finding


def first_read(original: Original, program: Path) -> Finding:
    result = original.read(program)
    assert not result.proved
    return next(f for outcome in result.outcomes for f in outcome.findings)


def test_copies_in_another_order_on_one_stage(staged: Original, tmp_path: Path) -> None:
    """The norm of the gradients would count the tied weight twice, or never."""
    assert staged.read(staged.folder).proved
    swapped = Edit("copies=((0, 1), (2, 3))", "copies=((2, 3), (0, 1))")
    found = first_read(staged, staged.broken(tmp_path, [swapped]))
    assert found.code == "gradient_norm_differs"
    assert "`words.weight` lists its copies as ((2, 3), (0, 1))" in found.message
    assert "clipping scales by a wrong norm" in str(found.cause)
