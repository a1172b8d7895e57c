"""The README's commands, by their own text, for CI and for the tests of them.

python3 ci/readme_commands.py N     prints the N-th command, counted from 1

A command is the one line of a fenced `sh` block. Needs only the standard library: it runs before anything is installed.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"
BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def read_commands(readme: Path = README) -> list[str]:
    """The commands in order. Raises ValueError for a block of several lines."""
    blocks = [block.strip() for block in BLOCK.findall(readme.read_text(encoding="utf-8"))]
    for block in blocks:
        if "\n" in block:
            raise ValueError(f"{readme}: a block must hold one command on one line, not:\n{block}")
    return blocks


if __name__ == "__main__":
    sys.stdout.write(read_commands()[int(sys.argv[1]) - 1] + "\n")
