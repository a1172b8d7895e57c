"""Cluster files: every ready one loads, units, and each error with its place."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from nnscaler.errors import NnscalerError
from nnscaler.planning.cluster.description import READY, Quantity, load_cluster, quantity

GOOD = """\
[device]
memory = "80GB"
bandwidth = "2TB/s"
peak = { float32 = "19.5TFLOPS", bfloat16 = "312TFLOPS" }

[[level]]
size = 8
bandwidth = "300GB/s"
latency = "2us"
"""


def read(tmp_path: Path, text: str) -> NnscalerError:
    file = tmp_path / "c.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(NnscalerError) as caught:
        load_cluster(file)
    assert caught.value.code == "cluster_invalid"
    return caught.value


@pytest.mark.parametrize("name", READY)
def test_ready_ones_load(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.name == name
    assert 1e9 < cluster.device.bandwidth < 1e13 and 2**31 < cluster.device.memory < 2**40
    assert 1e10 < cluster.device.flops("float32") <= cluster.device.flops("float16") < 1e16
    inner = [level.bandwidth for level in cluster.levels]
    assert inner == sorted(inner, reverse=True), "an outer level is not faster than an inner one"
    assert all(1e-7 < level.latency < 1e-2 for level in cluster.levels)


def test_every_file_of_the_folder_is_listed(repository: Path) -> None:
    folder = repository / "nnscaler" / "planning" / "cluster" / "ready"
    assert sorted(READY) == sorted(path.stem for path in folder.iterdir())


def test_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(GOOD, encoding="utf-8")
    cluster = load_cluster(tmp_path / "mine.toml")
    assert (cluster.name, cluster.devices, cluster.device.memory) == ("mine", 8, 80 * 10**9)
    assert cluster.device.flops("bfloat16") == cluster.device.flops("float16") == 312e12
    assert cluster.device.flops("float64") == 19.5e12
    assert (cluster.levels[0].bandwidth, cluster.levels[0].latency) == (300e9, 2e-6)
    assert pickle.loads(pickle.dumps(cluster)) == cluster
    assert len(cluster.identity) == 16 and cluster.identity != cluster.scaled(4).identity


@pytest.mark.parametrize(
    ("value", "kind", "wanted"),
    [
        ("80GB", "bytes", 80e9), ("512 MiB", "bytes", 2.0**29), (1024, "bytes", 1024.0), ("1e3kB", "bytes", 1e6),
        ("312TFLOPS", "flops", 312e12), ("1.5 PFLOP/s", "flops", 1.5e15), ("300GB/s", "bandwidth", 300e9),
        ("100Gbit/s", "bandwidth", 12.5e9), ("2us", "seconds", 2e-6), (0.5, "seconds", 0.5),
    ],
)  # fmt: skip
def test_units(value: object, kind: Quantity, wanted: float) -> None:
    assert quantity(value, kind) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize(
    ("change", "message", "line"),
    [
        (("memory =", "memroy ="), "[device] has no key 'memroy'", 2),
        (('memory = "80GB"\n', ""), "[device] lacks 'memory'", 1),
        (('"80GB"', '"80GB/s"'), "memory of [device]: '80GB/s' has the unit 'GB/s', where bytes such as", 2),
        (('"80GB"', '"80"'), "memory of [device]: '80' has no unit, where bytes such as \"80GB\"", 2),
        (('"80GB"', "true"), "memory of [device]: True is not bytes such as", 2),
        (('"80GB"', "0"), "memory of [device]: 0 is not positive", 2),
        (('"80GB"', '"-1GB"'), "memory of [device]: '-1GB' is not positive", 2),
        (('"2TB/s"', '"fast"'), "bandwidth of [device]: 'fast' is not bytes a second such as", 3),
        (('"312TFLOPS"', '"312TB"'), "bfloat16 of [device.peak]: '312TB' has the unit 'TB'", 4),
        (("bfloat16", "bf16"), "[device.peak] has no key 'bf16'", 4),
        (("float32 =", "float64 ="), "[device.peak] lacks 'float32'", 4),
        (("size = 8", "size = 0"), "size is a whole number of at least 1, not 0", 7),
        (("size = 8", "size = 8.5"), "size is a whole number of at least 1, not 8.5", 7),
        (("latency", "latancy"), "[[level]] 1 has no key 'latancy'", 9),
        (('latency = "2us"\n', ""), "[[level]] 1 lacks 'latency'", 6),
        (("[[level]]", "[level]"), "level is a list of tables, at least one", 6),
        (("[[level]]", "[[levels]]"), "the file has no key 'levels'", 6),
        (("[device]", "device = 3\n[other]"), "the file has no key 'other'", 2),
        (("size = 8", "name = 3\nsize = 8"), "name is a text, not 3", 7),
        (("size = 8", "size = = 8"), "c.toml is not TOML", 7),
    ],
)
def test_errors_say_where_and_what(tmp_path: Path, change: tuple[str, str], message: str, line: int) -> None:
    assert change[0] in GOOD
    error = read(tmp_path, GOOD.replace(*change))
    assert message in error.message
    assert error.where is not None and (Path(error.where.file).name, error.where.line) == ("c.toml", line)


def test_help(tmp_path: Path) -> None:
    assert read(tmp_path, GOOD.replace("memory", "memroy")).help == "did you mean memory?"
    assert "[[level]]" in str(read(tmp_path, "device = 3\nlevel = []\n").help)
    assert read(tmp_path, GOOD.replace("memory =", "zzz =")).help == (
        "the keys are name, memory, bandwidth, peak, launch"
    )


def test_unknown_name_lists_the_ready_ones() -> None:
    with pytest.raises(NnscalerError) as caught:
        load_cluster("h100x9")
    assert caught.value.code == "cluster_invalid" and "'h100x9'" in caught.value.message
    assert caught.value.help == f"known are {', '.join(READY)}; did you mean h100x8?"
    with pytest.raises(NnscalerError, match=r"cannot read none\.toml"):
        load_cluster("none.toml")
