"""Draw the pictures of the documents, from what the product itself says.

    python -m docs.pictures.draw            all of them, into docs/pictures/
    python -m docs.pictures.draw layouts    these

Each is one SVG for light and dark paper. A test draws them again and compares.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from docs.pictures.svg import Picture

REPOSITORY = Path(__file__).resolve().parents[2]


def _architecture() -> Picture:
    from docs.pictures import architecture

    return architecture.draw(REPOSITORY)


def _layouts() -> Picture:
    from docs.pictures import layouts

    return layouts.draw_states()


def _conversions() -> Picture:
    from docs.pictures import layouts

    return layouts.draw_conversions()


def _timeline() -> Picture:
    from docs.pictures import timelines

    return timelines.draw_two()


def _schedules() -> Picture:
    from docs.pictures import timelines

    return timelines.draw_zoo()


def _certificate() -> Picture:
    from docs.pictures import certificate

    return certificate.draw(REPOSITORY)


def _report() -> Picture:
    from docs.pictures import report

    return report.draw(REPOSITORY)


PICTURES: Mapping[str, Callable[[], Picture]] = MappingProxyType(
    {
        "architecture": _architecture,
        "layouts": _layouts,
        "conversions": _conversions,
        "timeline": _timeline,
        "schedules": _schedules,
        "certificate": _certificate,
        "report": _report,
    }
)


def file_of(name: str) -> Path:
    """Return where a picture lies."""
    return Path(__file__).with_name(f"{name}.svg")


def main(names: Sequence[str]) -> int:
    """Draw the pictures of these names, or all of them."""
    unknown = [name for name in names if name not in PICTURES]
    if unknown:
        sys.stderr.write(f"no picture {unknown[0]!r}; there are: {', '.join(PICTURES)}\n")
        return 2
    for name in names or PICTURES:
        file_of(name).write_text(PICTURES[name]().text(), encoding="utf-8")
        sys.stdout.write(f"wrote {file_of(name).relative_to(REPOSITORY)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
