"""Names that a model's tensors cannot have in a rank program: those of the attributes of a stage."""

from __future__ import annotations

from nnscaler.ir.graph import RESERVED
from nnscaler.runtime.stage_base_class import Stage


def test_every_attribute_of_a_stage_is_reserved() -> None:
    """But the axis of slices, which is taken as all names of axes are where a stage has it."""
    attributes = {name for name in (*vars(Stage), *Stage.__annotations__) if not name.startswith("_")}
    assert attributes - {"slice"} <= RESERVED, attributes - RESERVED
