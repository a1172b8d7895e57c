"""Peak memory of attention on one rank, forward and backward, at as many tokens a rank whatever the ranks are.

    python benchmarks/ring_attention.py
    python benchmarks/ring_attention.py --tokens 2048 --ranks 1 2 4 8 16

Each rank of a simulator counts the bytes of the tensors that live in its thread. `ring` passes keys and values around;
`gathered` has the keys and values of all tokens on each rank, and the scores of its rows with all of them. Exit code 1
where the ring's peak grows by more than 10 % from 2 ranks to the most.
"""

from __future__ import annotations

import argparse
import sys
import weakref
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten

from nnscaler.runtime.communication import differentiable_collectives as comm
from nnscaler.runtime.communication.communicator import Communicator
from nnscaler.runtime.communication.differentiable_collectives import AxisGroup
from nnscaler.runtime.communication.simulator import Simulator
from nnscaler.runtime.ops import causal_rows, ring_attention

Attention = Callable[[Tensor, Tensor, Tensor, AxisGroup], Tensor]
MOST = 1.10  # times as much as on two ranks


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that operators of this thread make, while they live. `peak`: the most at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_flatten(result)[0]:
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or not size:
            return
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


class OwnResults:
    """A communicator whose results are counted where they arrive: the simulator makes those of all ranks in the thread
    that comes last."""

    def __init__(self, communicator: Communicator) -> None:
        self._made = communicator

    def __getattr__(self, name: str) -> Any:
        made = getattr(self._made, name)
        if name not in ("rotate", "all_gather", "reduce_scatter"):
            return made

        def call(*args: Any) -> Any:
            with _disable_current_modes():
                result = made(*args)
            return [t.clone() for t in result] if isinstance(result, list) else result.clone()

        return call


def ring(query: Tensor, key: Tensor, value: Tensor, over: AxisGroup) -> Tensor:
    return ring_attention(query, key, value, over=over, causal=True, outer=8)


def gathered(query: Tensor, key: Tensor, value: Tensor, over: AxisGroup) -> Tensor:
    key, value = (comm.all_gather_replicated(t, over, dim=1) for t in (key, value))
    return causal_rows(query, key, value, over.index * query.shape[1], None, False)


def peak(attention: Attention, ranks: int, tokens: int, heads: int, width: int) -> int:
    """Return the bytes of the rank that holds most, beside its queries, keys and values."""

    def one(communicator: Communicator) -> int:
        over = AxisGroup(
            "cp", ranks, communicator.rank, tuple(range(ranks)), cast(Communicator, OwnResults(communicator))
        )
        own = [torch.randn(heads, tokens, width, requires_grad=True) for _ in range(3)]
        with LiveBytes() as counter:
            attention(own[0], own[1], own[2], over).sum().backward()
        return int(counter.peak)

    return max(Simulator(ranks).run(one))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024, help="of a rank")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=64, help="of a head")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    given = parser.parse_args()
    found = {n: [peak(a, n, given.tokens, given.heads, given.width) for a in (ring, gathered)] for n in given.ranks}
    base = found[2] if 2 in found else found[given.ranks[0]]
    print(f"{given.tokens} tokens a rank, {given.heads} heads of {given.width}, float32; causal, forward and backward")
    print(f"{'ranks':>5} {'tokens':>8} {'ring':>10} {'times':>6} {'gathered':>10} {'times':>6}")
    for n, row in found.items():
        told = (f"{size / 2**20:>6.1f} MiB {size / first:>6.2f}" for size, first in zip(row, base, strict=True))
        print(f"{n:>5} {n * given.tokens:>8} {' '.join(told)}")
    return 0 if max(row[0] for row in found.values()) <= MOST * base[0] else 1


if __name__ == "__main__":
    sys.exit(main())
