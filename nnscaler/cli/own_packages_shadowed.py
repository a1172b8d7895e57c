"""Check that `verify` and `op_registry` are nnScaler's own packages, shadowed by no user's file of the same name.

Both are top-level names that a user's own file, or another distribution, may have as well. When the wrong one was
imported, everything after would fail in ways that read like a verdict. So: compare with our own neighbours, before
anything else of ours is imported. Imports only what stands on the standard library alone for that reason.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from nnscaler.is_user_file import is_installed

NEIGHBOURS = ("op_registry", "verify")


def wrong_package() -> str | None:
    """Say what is wrong, with both paths and the cure, if one of them would come from elsewhere; None if all is
    well."""
    root = Path(__file__).resolve().parents[2]
    for name in NEIGHBOURS:
        found = _file_of(name)
        expected = root / name / "__init__.py"
        if found is None or found.resolve() != expected:
            return (
                f"the package `{name}` in use is not nnScaler's\n"
                f"  imported: {found or 'nothing'}\n  expected: {expected}\n  help: {_cure(name, found)}"
            )
    return None


def _file_of(name: str) -> Path | None:
    module = sys.modules.get(name)
    if module is not None:
        file = getattr(module, "__file__", None)
        return None if file is None else Path(file)
    spec = importlib.util.find_spec(name)
    return None if spec is None or spec.origin is None else Path(spec.origin)


def _cure(name: str, found: Path | None) -> str:
    if found is None:
        return "install nnScaler again: pip install --force-reinstall nnscaler"
    if is_installed(str(found)):
        return f"another distribution owns `{name}`: uninstall it, then pip install --force-reinstall nnscaler"
    folder = found.parent.parent if found.name == "__init__.py" else found.parent
    return (
        "run the `nnscaler` command instead of `python -m nnscaler` (which searches the current folder first), "
        f"or `python -P -m nnscaler`; if PYTHONPATH names {folder}, take it out"
    )
