"""Other numbers of devices, and what is found on a machine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnscaler.planning.cluster.description import READY, load_cluster, quantity, show_enough_bytes
from nnscaler.planning.cluster.detect_this_machine import cpu_cluster, described_gpu, found_cluster, ready_device


@pytest.mark.parametrize(
    ("name", "ranks", "sizes"),
    [
        ("a100x8", 1, (1, 1)), ("a100x8", 4, (4, 1)), ("a100x8", 8, (8, 1)), ("a100x8", 12, (6, 2)),
        ("a100x8", 1024, (8, 128)), ("dgx2-v100", 32, (16, 2)), ("dgx2-v100", 8, (8, 1)), ("ethernet10g", 6, (6,)),
        ("h100x8", 11, (1, 11)),
    ],
)  # fmt: skip
def test_scaled(name: str, ranks: int, sizes: tuple[int, ...]) -> None:
    cluster = load_cluster(name).scaled(ranks)
    assert tuple(level.size for level in cluster.levels) == sizes


@given(st.sampled_from(READY), st.integers(1, 5000))
def test_scaled_has_the_ranks_and_only_grows_outside(name: str, ranks: int) -> None:
    cluster = load_cluster(name)
    scaled = cluster.scaled(ranks)
    assert scaled.devices == ranks == scaled.spans[-1]
    assert all(a.size <= b.size for a, b in zip(scaled.levels[:-1], cluster.levels[:-1], strict=True))
    assert scaled.device == cluster.device


def test_ranks_share_the_cores() -> None:
    alone, crowded = cpu_cluster(4, 2**34, 4), cpu_cluster(4, 2**34, 8)
    assert (alone.devices, alone.device.memory) == (4, 2**32) and (crowded.devices, crowded.device.memory) == (8, 2**31)
    assert crowded.device.flops("float32") == alone.device.flops("float32") / 2
    assert crowded.levels[0].latency == alone.levels[0].latency * 2


def test_found() -> None:
    assert found_cluster(3).devices == 3
    assert found_cluster() == found_cluster()


def test_gpus_by_name() -> None:
    known = ready_device("NVIDIA H200")
    assert known is not None and known.name == "h200x8"
    known = ready_device("NVIDIA GeForce RTX 3090")
    assert known is not None and known.name == "ethernet10g"
    assert ready_device("NVIDIA Imaginary 9") is None
    unknown = described_gpu("x", 2**33, 100)
    assert unknown.flops("bfloat16") > unknown.flops("float32") > 1e12


def test_bytes_that_are_told_to_be_enough_are_no_fewer() -> None:
    sizes = (1, 999.6, 1000, 2030, 8040, 64100, 4.684e9, 4_680_000_001, 999_999_999)
    told = [show_enough_bytes(size) for size in sizes]
    assert told == ["1B", "1kB", "1kB", "2.04kB", "8.05kB", "64.2kB", "4.69GB", "4.69GB", "1GB"]
    assert all(quantity(text, "bytes") >= size for text, size in zip(told, sizes, strict=True))
