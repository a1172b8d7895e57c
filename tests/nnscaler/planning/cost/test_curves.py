"""Curves through measured collectives."""

from __future__ import annotations

from math import isclose

from nnscaler.planning.cost.collectives import fit_curve, fit_curves, from_others
from nnscaler.planning.cost.measured_profile import CollectiveEntry


def entries(*pairs: tuple[int, float]) -> list[CollectiveEntry]:
    return [CollectiveEntry("send", 2, size, seconds) for size, seconds in pairs]


def test_between_and_beyond_what_was_measured() -> None:
    curve = fit_curve(entries((3000, 4.0), (1000, 1.0), (2000, 2.0)))
    assert [curve.seconds(size) for size in (0, 1000, 1500, 2000, 2500, 3000)] == [1.0, 1.0, 1.5, 2.0, 3.0, 4.0]
    assert isclose(curve.seconds(5000), 4.0 + 2000 * 3.0 / 2000)


def test_seconds_never_fall() -> None:
    """Means of neighbours that fall: 2 and 1, then with what falls below those."""
    assert fit_curve(entries((1, 2.0), (2, 1.0), (3, 5.0))).times == (1.5, 1.5, 5.0)
    assert fit_curve(entries((1, 3.0), (2, 2.0), (3, 1.0))).times == (2.0, 2.0, 2.0)
    assert fit_curve(entries((1, 1.0), (2, 4.0), (3, 2.0), (4, 3.5))).times == (1.0, 3.0, 3.0, 3.5)


def test_one_size() -> None:
    assert fit_curve(entries((1000, 1.0))).seconds(10**6) == 1.0


def test_each_kind_and_group_has_its_own() -> None:
    others = [CollectiveEntry("send", 4, 1000, 2.0), CollectiveEntry("all_reduce", 2, 1, 3.0)]
    measured = [*entries((1000, 1.0)), *others, CollectiveEntry("all_reduce", 2, 1, 4.0, at_once=4)]
    found = fit_curves(measured)
    assert {key: curve.seconds(1000) for key, curve in found.items()} == {
        ("send", 2, 0): 1.0,
        ("send", 4, 0): 2.0,
        ("all_reduce", 2, 0): 3.0,
        ("all_reduce", 2, 4): 4.0,
    }
    assert from_others(measured) == []


def test_what_the_others_say() -> None:
    assert from_others(entries((1000, 1.0), (2000, 9.0), (3000, 5.0))) == [(9.0, 3.0)]
