"""Versions and machine, for reports: what a reader needs to know before comparing two of them."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version


def environment() -> dict[str, str]:
    """Return the versions of nnscaler, torch and Python, and the platform."""
    return {
        "nnscaler": _version("nnscaler"),
        "torch": _version("torch"),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
