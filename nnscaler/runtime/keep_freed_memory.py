"""Keep memory that tensors free for what comes next, rather than give it back to the system.

A step frees at its end what the next one asks for again. By itself glibc gives the end of its heap back then, and the
next step takes a page fault for each 4 KiB of it: a tenth of the time of a step of a small model on two ranks. So ranks
keep it. Who sets one of glibc's own variables for this (`MALLOC_TRIM_THRESHOLD_` and so on) has it as they say.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -3, -4, -8  # parameters of glibc's mallopt
_LARGEST = 32 << 20  # bytes: where glibc's own threshold ends that grows with what is freed; larger blocks are mapped
_NEVER = 2**31 - 1
_OWN = ("trim_threshold", "mmap_threshold", "mmap_max")  # in glibc's variables, and among its GLIBC_TUNABLES


def keep_freed_memory() -> None:
    """Keep what this process frees from now on, and give back what it has freed so far, some 250 MiB after compiling.

    Blocks of more than 32 MiB go back as before. Does nothing without glibc; where its variables are set, they decide.
    """
    library = _glibc()
    if library is None:
        return
    give_back_freed_memory()
    told = os.environ.get("GLIBC_TUNABLES", "")
    if not any(f"MALLOC_{name.upper()}_" in os.environ or f"glibc.malloc.{name}=" in told for name in _OWN):
        library.mallopt(_MMAP_THRESHOLD, _LARGEST)  # else the next line would fix it where it is
        library.mallopt(_TRIM_THRESHOLD, _NEVER)


def give_back_freed_memory() -> None:
    """Give what this process has freed so far back to the system. Does nothing without glibc."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


@contextmanager
def kept_memory() -> Iterator[None]:
    """Keep, inside, what ranks that are threads of this process free, blocks of any size; give it back at the end.

    All blocks come from one heap. Does nothing without glibc. Programs over shards make and free buffers as large as
    layers, and each rank of the process does: page faults of fresh memory took more than half of a step of
    `fully_shard`, three times as long as the copying itself.
    """
    library = _glibc()
    if library is None:
        yield
        return
    library.mallopt(_ARENA_MAX, 1)  # heaps of threads are too small for large blocks
    library.mallopt(_MMAP_MAX, 0)
    library.mallopt(_TRIM_THRESHOLD, _NEVER)
    try:
        yield
    finally:
        library.mallopt(_TRIM_THRESHOLD, 2 * _LARGEST)  # these three: what glibc comes to by itself
        library.mallopt(_MMAP_THRESHOLD, _LARGEST)
        library.mallopt(_MMAP_MAX, 65536)
        library.mallopt(_ARENA_MAX, 0)
        give_back_freed_memory()


def _glibc() -> ctypes.CDLL | None:
    library = ctypes.CDLL(None)
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None
