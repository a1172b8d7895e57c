"""Detect the cluster that this machine is: its GPUs if there are any, else its CPU cores.

Figures of devices come from the ready descriptions where one names the GPU, else from safe constants, so that the same
machine gives the same description each time; `nnscaler profile` measures.
"""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from nnscaler.planning.cluster.description import READY, Cluster, Device, Level, load_cluster

_LANES = 128  # float32 multiply-adds of a streaming multiprocessor in a cycle, since Ampere
_CLOCK = 1.4e9
_MATRIX_UNITS = 8  # how much faster half precision is
_NVLINK, _PCI = Level("NVLink", 1, 200e9, 3e-6), Level("PCIe", 1, 12e9, 10e-6)


def found_cluster(ranks: int | None = None) -> Cluster:
    """Return this machine as a cluster of `ranks` devices (None: all that it has).

    More ranks than CPU cores share them.
    """
    if torch.cuda.is_available():
        cluster = _gpus()
        return cluster if ranks is None else cluster.scaled(ranks)
    cores = available_cores()
    return cpu_cluster(cores, host_memory(), cores if ranks is None else ranks)


def cpu_cluster(cores: int, memory: int, ranks: int) -> Cluster:
    """Return `ranks` processes on a computer with `cores` and `memory` bytes as a cluster: each has its part of
    both."""
    base = load_cluster("cpu")
    share = min(1.0, cores / ranks)
    device = replace(
        base.device,
        memory=memory // ranks,
        peak={dtype: peak * share for dtype, peak in base.device.peak.items()},
        bandwidth=base.device.bandwidth * share,
        launch=base.device.launch / share,
    )
    only = base.levels[0]
    level = replace(only, size=ranks, bandwidth=only.bandwidth * share, latency=only.latency / share)
    return Cluster(f"this machine ({cores} CPU cores)", device, (level,))


def available_cores() -> int:
    """Return how many CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def host_memory() -> int:
    """Return the bytes of memory of this computer; 8 GiB where it does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 8 * 2**30


def _gpus() -> Cluster:
    count = torch.cuda.device_count()
    found = torch.cuda.get_device_properties(0)
    linked = count > 1 and torch.cuda.can_device_access_peer(0, 1)
    known = ready_device(found.name)
    if known is not None:
        device = replace(known.device, name=found.name, memory=found.total_memory)
        link = known.levels[0] if linked else _PCI
    else:
        device = described_gpu(found.name, found.total_memory, found.multi_processor_count)
        link = _NVLINK if linked else _PCI
    levels = (replace(link, size=count), Level("network", 1, 3e9, 30e-6))
    return Cluster(f"this machine ({count} x {found.name})", device, levels)


def ready_device(name: str) -> Cluster | None:
    """Return the ready cluster whose device has the model in `name` (`NVIDIA H200` has H200); None where none has."""
    words = set(name.upper().replace("-", " ").split())
    for ready in READY:
        cluster = load_cluster(ready)
        model = cluster.device.name.upper().removeprefix("RTX ").split("-")[0]
        if model in words:
            return cluster
    return None


def described_gpu(name: str, memory: int, processors: int) -> Device:
    """Return a GPU of which only its processors are known, by constants on the safe side."""
    plain = processors * _LANES * 2 * _CLOCK
    half = plain * _MATRIX_UNITS
    return Device(name, memory, {"float32": plain, "bfloat16": half, "float16": half}, 400e9)
