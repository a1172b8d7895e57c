"""The wheel works without the source tree."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest


@pytest.mark.long
@pytest.mark.timeout(900)
def test_wheel_works_outside_the_repository(repository: Path) -> None:
    command = ["bash", str(repository / "ci" / "wheel_test.sh")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.strip().splitlines()[-1].startswith("VERIFIED  gpt.py on 2 ranks"), result.stdout
