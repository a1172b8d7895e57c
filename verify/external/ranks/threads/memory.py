"""Keep the memory that ranks free for the next rank, rather than give it back to the system.

Programs over shards make and free buffers as large as layers, and each rank of the process does: page faults of fresh
memory took more than half of a step of `fully_shard`, three times as long as the copying itself.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -3, -4, -8  # parameters of glibc's mallopt
_LARGEST = 32 << 20  # bytes: where glibc's own threshold ends that grows with what is freed


@contextmanager
def kept_memory() -> Iterator[None]:
    """Inside, large blocks come from one heap that does not shrink; at the end it does. Does nothing without glibc."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt") or not hasattr(library, "malloc_trim"):
        yield
        return
    library.mallopt(_ARENA_MAX, 1)  # heaps of threads are too small for large blocks
    library.mallopt(_MMAP_MAX, 0)
    library.mallopt(_TRIM_THRESHOLD, 2**31 - 1)
    try:
        yield
    finally:
        library.mallopt(_TRIM_THRESHOLD, 2 * _LARGEST)  # these three: what glibc comes to by itself
        library.mallopt(_MMAP_THRESHOLD, _LARGEST)
        library.mallopt(_MMAP_MAX, 65536)
        library.mallopt(_ARENA_MAX, 0)
        library.malloc_trim(0)
