"""Record which parts of a model `torch.utils.checkpoint` computes again in backward.

Export runs a checkpointed function like any other and forgets the wish. While this is open, each call leaves its name
on the nodes that are recorded, which the importer keeps as `Region.recompute`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils import checkpoint

_KEY = "nnscaler_checkpoint"
_GENERATOR = "_checkpoint_without_reentrant_generator"  # what `checkpoint(use_reentrant=False)` drives


@dataclass
class Checkpoints:
    """The checkpointed calls of one export. `selective`: some choose what they keep, by a policy."""

    count: int = 0
    selective: bool = False
    _open: bool = False

    def notes(self) -> tuple[str, ...]:
        if not self.selective:
            return ()
        return ("torch.utils.checkpoint(context_fn=...): the policy is not kept, the whole function is computed again",)

    @contextmanager
    def region(self) -> Iterator[None]:
        """Name the nodes of one call. A call inside of another belongs to the outer one."""
        if self._open:
            yield
            return
        name = f"checkpoint_{self.count}"
        self.count += 1
        self._open = True
        try:
            with traceback.annotate({_KEY: name}):
                yield
        finally:
            self._open = False

    def run_reentrant(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run as `checkpoint(use_reentrant=True)` does: without an input that has a gradient, nothing has one."""
        recorded = any(isinstance(a, Tensor) and a.requires_grad for a in args)
        with self.region(), nullcontext() if recorded else torch.no_grad():
            return function(*args)


@contextmanager
def checkpoints_marked() -> Iterator[Checkpoints]:
    """Open it around an export, with `checkpoint_of` for the nodes that come out."""
    found = Checkpoints()
    real = getattr(checkpoint, _GENERATOR)

    def generator(function: Any, preserve: Any, context_fn: Any, *rest: Any, **named: Any) -> Iterator[None]:
        if get_proxy_mode() is None:
            yield from real(function, preserve, context_fn, *rest, **named)
            return
        found.selective |= context_fn is not checkpoint.noop_context_fn
        with found.region():
            yield

    with patch.object(checkpoint, _GENERATOR, generator), traceback.preserve_node_meta():
        yield found


def checkpoint_of(node: fx.Node) -> str | None:
    """Return the checkpointed call that made the node."""
    name = (node.meta.get("custom") or {}).get(_KEY)
    return name if isinstance(name, str) else None
