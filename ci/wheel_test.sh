#!/usr/bin/env bash
# Builds the wheel, installs it into a fresh environment, and verifies an example from outside the repository:
# what users get must work without the source tree.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

python3 -m venv "$work/venv"
"$work/venv/bin/pip" wheel --quiet --no-deps --wheel-dir "$work/wheel" "$root"
"$work/venv/bin/pip" install --quiet "$work"/wheel/nnscaler-*.whl
mkdir "$work/user"
cp "$root/examples/gpt.py" "$work/user/"
cd "$work/user"
unset PYTHONPATH
"$work/venv/bin/python" - <<'PYTHON'
import importlib
from pathlib import Path

for name in ("nnscaler", "verify", "op_registry"):
    folder = Path(importlib.import_module(name).__file__).parent
    assert folder.parent.name == "site-packages", f"{name} was imported from {folder}"
    assert (folder / "py.typed").exists(), f"{name} has lost its py.typed"
PYTHON
"$work/venv/bin/nnscaler" verify-plan gpt.py --ranks 2
