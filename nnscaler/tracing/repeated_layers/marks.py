"""Operators that mark calls of layers in an export. They compute nothing and are gone in the final graph.

`begin(n)` and `end(given, made, n)` enclose the traced call number n, with all tensors that it reads from outside and
all that it makes. `again(given, n)` stands for a call that equals a traced one, `made(n, i)` for its i-th result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.node import has_side_effect

NAMESPACE = "nnscaler_layer"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
for _schema in (
    "begin(int call) -> ()",
    "end(Tensor[] given, Tensor[] made, int call) -> ()",
    "again(Tensor[] given, int call) -> ()",
    "made(int call, int number) -> Tensor",
):
    _LIBRARY.define(_schema)
_OPS: Any = getattr(torch.ops, NAMESPACE)
BEGIN, END, AGAIN, MADE = (getattr(_OPS, name).default for name in ("begin", "end", "again", "made"))
for _mark in (BEGIN, END, AGAIN):
    has_side_effect(_mark)
