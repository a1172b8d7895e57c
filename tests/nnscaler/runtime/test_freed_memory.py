"""Memory that a rank frees is kept for its next step, unless the user has set the C library otherwise."""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys

import pytest

from nnscaler.runtime import keep_freed_memory

BLOCK, BLOCKS = 4 << 20, 40  # bytes of one, below glibc's largest threshold, and how many there are at once
PAGES = BLOCK * BLOCKS // resource.getpagesize()
STEPS = f"""
import ctypes, importlib.util, resource, sys
own = importlib.util.spec_from_file_location("freed_memory", {keep_freed_memory.__file__!r})
module = importlib.util.module_from_spec(own)
own.loader.exec_module(module)
library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
if sys.argv[1] == "keep":
    module.keep_freed_memory()
blocks = [None] * {BLOCKS}
for step in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for i in range({BLOCKS}):
        blocks[i] = library.malloc({BLOCK})
        ctypes.memset(blocks[i], 1, {BLOCK})
    for block in blocks:
        library.free(ctypes.c_void_p(block))
    found = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(found)
"""

pytestmark = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc")


def faults(what: str, **variables: str) -> int:
    """Return the page faults of the last of some steps that take and free the same memory, in a process of its own."""
    plain = {n: v for n, v in os.environ.items() if not n.startswith("MALLOC_") and n != "GLIBC_TUNABLES"}
    command = [sys.executable, "-c", STEPS, what]
    return int(subprocess.run(command, env={**plain, **variables}, check=True, capture_output=True, text=True).stdout)


def test_the_next_step_finds_its_memory() -> None:
    assert faults("keep", MALLOC_ARENA_MAX="2") < PAGES // 100 < PAGES // 2 < faults("leave")


@pytest.mark.parametrize(
    ("name", "value"), [("MALLOC_TRIM_THRESHOLD_", "131072"), ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=131072")]
)
def test_the_users_own_settings_stand(name: str, value: str) -> None:
    assert faults("keep", **{name: value}) > PAGES // 2
