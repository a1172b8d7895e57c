"""Names that a rank program can give to tensors and axes."""

from __future__ import annotations

import keyword

# what a rank program uses for other things: its imports, and the attributes of a stage
RESERVED = frozenset(
    "self torch aten comm ops dtypes float recompute user device index ranks axes micro micro_batches parameters "
    "frozen buffers constants inputs prepare_inputs receives sends updates forward prepare context rank coordinates "
    "sizes loss".split()
)


def is_free_name(name: str) -> bool:
    """Return whether the name is an identifier of Python that a rank program does not use already."""
    return name.isidentifier() and not keyword.iskeyword(name) and name not in RESERVED
