"""Profiles: fits on data made by known laws, what is answered from the table and what is not, and files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from math import isclose
from pathlib import Path

import pytest

from nnscaler.errors import NnscalerError
from nnscaler.ir.operation_annotations import Signature
from nnscaler.planning.cluster.description import Cluster, Level
from nnscaler.planning.cost.analytic import EFFICIENCY, AnalyticCost
from nnscaler.planning.cost.build_machine_profile import (
    collective_calls,
    collectives_error,
    crowded,
    fit_device,
    fit_level,
    operator_factors,
    operators_error,
)
from nnscaler.planning.cost.calls_to_measure import key_of
from nnscaler.planning.cost.collectives import seconds
from nnscaler.planning.cost.flops_and_memory_traffic import Work
from nnscaler.planning.cost.measured_profile import (
    Calibrations,
    CollectiveEntry,
    CostEntry,
    NotMeasured,
    Profile,
    load_profile,
)
from nnscaler.planning.cost.model_protocol import AxisPlace, Overheads
from nnscaler.planning.cost.profile_cost import TableCost

Make = Callable[..., Signature]
SHAPE, HALF, QUARTER = (64, 512), (32, 512), (16, 512)


def gelu(make: Make) -> Signature:
    return make("aten.gelu.default", [SHAPE], SHAPE)


@pytest.fixture
def profile(make: Make, cluster: Cluster) -> Profile:
    """Two shards of a gelu that take three times what is predicted in forward and five times in backward, and one of an
    exp; collectives of groups of two that take 1 ms and 1 ns a byte."""
    cost = AnalyticCost(cluster)
    entries = []
    for signature, shape, times in ((gelu(make), SHAPE, 3), (gelu(make), HALF, 3)):
        forward, backward = cost.compute(signature, [shape], [shape], "float32")
        key = key_of(signature, (shape,), (shape,), "float32")
        entries.append(CostEntry(*key, times * forward, 5 * backward, (forward, backward)))
    calls = tuple(CollectiveEntry("all_reduce", 2, size, 1e-3 + size * 1e-9) for size in (10**4, 10**6, 10**7))
    return Profile(
        cluster,
        Overheads(),
        Calibrations(operators_error(entries), collectives_error(cluster, calls)),
        tuple(entries),
        calls,
    )


def test_entries_and_what_is_missing(make: Make, cluster: Cluster, profile: Profile) -> None:
    cost, plain = TableCost(profile), AnalyticCost(cluster)
    assert cost.coverage().describe() == "0 of 0 shards are not in the profile"
    entry = profile.operators[1]
    assert cost.compute(gelu(make), [HALF], [HALF], "float32") == (entry.forward, entry.backward)
    # a shard without entry: the operator's factors; an operator without: those of the others
    for signature in (gelu(make), make("aten.exp.default", [SHAPE], SHAPE)):
        forward, backward = cost.compute(signature, [QUARTER], [QUARTER], "float32")
        predicted = plain.compute(signature, [QUARTER], [QUARTER], "float32")
        assert isclose(forward, 3 * predicted[0]) and isclose(backward, 5 * predicted[1])
    view = make("aten.reshape.default", [SHAPE], (64 * 512,), [64 * 512])
    assert cost.compute(view, [SHAPE], [(64 * 512,)], "float32") == (0.0, 0.0)
    cost.compute(gelu(make), [QUARTER], [QUARTER], "float32")
    coverage = cost.coverage()
    assert coverage.describe() == "2 of 3 shards are not in the profile"
    assert [key[0] for key in coverage.missing] == ["aten.gelu.default(float32)", "aten.exp.default(float32)"]


def test_collectives_of_the_table(cluster: Cluster, profile: Profile) -> None:
    cost, plain = TableCost(profile), AnalyticCost(cluster)
    assert isclose(cost.collective("all_reduce", 5e6, AxisPlace(2)), 1e-3 + 5e-3, rel_tol=1e-6)
    assert isclose(cost.collective("all_reduce", 5e6, AxisPlace(2, 4)), 1e-3 + 5e-3, rel_tol=1e-6)
    for place in (AxisPlace(2, 8), AxisPlace(4), AxisPlace(1)):  # across hosts; a size that was not measured; alone
        assert cost.collective("all_reduce", 5e6, place) == plain.collective("all_reduce", 5e6, place)
    assert cost.collective("all_gather", 5e6, AxisPlace(2)) == plain.collective("all_gather", 5e6, AxisPlace(2))
    other = replace(cluster, levels=(Level("other", 16, 1e9, 1e-6),))
    moved = TableCost(profile, other)
    assert moved.collective("all_reduce", 5e6, AxisPlace(2)) == seconds(other, "all_reduce", 5e6, AxisPlace(2))
    assert moved.identity != cost.identity


def test_errors_of_calibration(profile: Profile) -> None:
    found = profile.calibration.operators
    assert found.count == 2 and found.calibrated_p95 == 0.0 and 0.7 < found.analytic_median < 0.8
    assert profile.calibration.collectives.calibrated_p95 < 1e-3 < profile.calibration.collectives.analytic_median
    factors = operator_factors(profile.operators)
    assert isclose(factors["aten.gelu.default"][0], 3) and isclose(factors["aten.gelu.default"][1], 5)
    assert operators_error([]).count == 0


def test_a_level_is_found_again(cluster: Cluster) -> None:
    true = replace(cluster, levels=(Level("inside", 8, 3e9, 4e-5),))
    guess = replace(cluster, levels=(Level("inside", 8, 1e9, 1e-6),))
    calls = [c for c in collective_calls(8) if c[0] != "all_reduce"]
    measured = [CollectiveEntry(k, n, s, seconds(true, k, s, AxisPlace(n)), at_once) for k, n, s, at_once in calls]
    found = fit_level(guess, measured)
    assert isclose(found.latency, 4e-5, rel_tol=1e-6) and isclose(found.bandwidth, 3e9, rel_tol=1e-6)
    assert fit_level(guess, []) == guess.levels[0]


def test_overheads_of_a_table(make: Make, cluster: Cluster, profile: Profile) -> None:
    """A statement takes its time whether it is a view, in the table or not; ranks that share cores slow all down."""
    assert TableCost(profile).overheads == AnalyticCost(cluster).overheads == Overheads()
    overheads = Overheads(1e-4, 2e-4, 3e-4, (1.0, 1.5, 2.0))
    found = crowded(profile, overheads)
    cost, before, entry = TableCost(found), TableCost(profile), profile.operators[1]
    assert cost.overheads == overheads and found.calibration.operators == profile.calibration.operators
    assert cost.compute(gelu(make), [HALF], [HALF], "float32") == (1e-4 + 2 * entry.forward, 2 * entry.backward)
    view = make("aten.reshape.default", [SHAPE], (64 * 512,), [64 * 512])
    assert cost.compute(view, [SHAPE], [(64 * 512,)], "float32") == (1e-4, 0.0)
    for signature in (gelu(make), make("aten.exp.default", [SHAPE], SHAPE)):
        alone = before.compute(signature, [QUARTER], [QUARTER], "float32")
        forward, backward = cost.compute(signature, [QUARTER], [QUARTER], "float32")
        assert isclose(forward, 1e-4 + 2 * alone[0]) and isclose(backward, 2 * alone[1])
    other = TableCost(found, replace(cluster, levels=(Level("other", 16, 1e9, 1e-6),)))
    assert other.overheads == replace(overheads, crowding=())
    assert crowded(profile, Overheads(1e-4)).operators == profile.operators


def test_relief() -> None:
    shared = Overheads(crowding=(1.0, 1.5, 2.0))
    assert [shared.relief(n) for n in (0, 1, 2, 3, 9)] == [0.5, 0.5, 0.75, 1.0, 1.0]
    assert Overheads().relief(3) == 1.0


def test_a_device_is_found_again(cluster: Cluster) -> None:
    products = [(Work(2e9 * n, 1e6), 1e-2 * n + 3e-6, "float32") for n in range(1, 9)]
    copies = [(Work(0.0, 1e8 * n), 1e-2 * n + 3e-6, "float32") for n in range(1, 9)]
    small = [(Work(10.0, 40.0), 3e-6, "float32")] * 4
    device = fit_device(cluster.device, [*products, *copies, *small])
    assert isclose(device.flops("float32"), 2e11 / EFFICIENCY) and isclose(device.bandwidth, 1e10 / EFFICIENCY)
    assert isclose(device.launch, 3e-6)
    assert fit_device(cluster.device, []) == cluster.device


def test_files(profile: Profile, tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    full = replace(profile, skipped=(NotMeasured("aten.x(float32)", "RuntimeError: no"),))
    full.save(file)
    assert load_profile(file) == full
    assert load_profile(file).identity == full.identity != profile.identity
    assert json.loads(file.read_text())["calibration"]["operators"]["count"] == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: "{", "is not JSON"),
        (lambda d: json.dumps([1]), "is not a profile of version 4, but of None"),
        (lambda d: json.dumps({**d, "version": 7}), "is not a profile of version 4, but of 7"),
        (lambda d: json.dumps({k: v for k, v in d.items() if k != "operators"}), "lacks operators"),
        (lambda d: json.dumps({**d, "operators": 3}), "is not a profile"),
        (lambda d: json.dumps({**d, "collectives": [{"kind": "x", "ranks": 2, "size": 1, "seconds": 1}]}),
         "collectives[0].kind is 'x', and not one of"),
        (lambda d: json.dumps({**d, "overheads": {**d["overheads"], "statement": float("nan")}}), "NaN is no number"),
        (lambda d: json.dumps({**d, "overheads": {**d["overheads"], "hidden": [0.5, -0.1]}}),
         "`hidden` of `overheads` is [0.5, -0.1]"),
        (lambda d: json.dumps({**d, "operators": [{**d["operators"][0], "forward": -1.0}]}), "`forward` of aten."),
    ],
)  # fmt: skip
def test_wrong_files(profile: Profile, tmp_path: Path, change: Callable[[object], str], message: str) -> None:
    file = tmp_path / "p.json"
    file.write_text(change(profile.as_dict()), encoding="utf-8")
    with pytest.raises(NnscalerError) as caught:
        load_profile(file)
    assert caught.value.code == "profile_invalid" and message in caught.value.message
    assert caught.value.help is not None and "nnscaler profile" in caught.value.help


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(NnscalerError, match="cannot read"):
        load_profile(tmp_path / "none.json")
