"""The measured profile: seconds of shards of operators and of collectives, as a JSON file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from nnscaler.atomic_writes import write_text
from nnscaler.errors import NnscalerError
from nnscaler.planning.cluster.description import Cluster
from nnscaler.planning.cost.calls_to_measure import Key
from nnscaler.planning.cost.model_protocol import Collective, Overheads, Shape
from nnscaler.records_as_json import decode, digest, encode

VERSION = 4
_HELP = "`nnscaler profile MODEL.py --out FILE` writes a profile"


@dataclass(frozen=True, slots=True)
class CostEntry:
    """Measured seconds of one shard of an operator.

    signature    text of the call, see `shards.signature_text`
    shapes_in    of the shard's inputs
    shapes_out   of the shard's outputs
    dtype        in which it computes
    forward      seconds
    backward     seconds
    predicted    seconds forward and backward by the analytic model, by which the table is calibrated
    """

    signature: str
    shapes_in: tuple[Shape | None, ...]
    shapes_out: tuple[Shape | None, ...]
    dtype: str
    forward: float
    backward: float
    predicted: tuple[float, float]

    @property
    def key(self) -> Key:
        return self.signature, self.shapes_in, self.shapes_out, self.dtype

    @property
    def operator(self) -> str:
        return self.signature.partition("(")[0]


@dataclass(frozen=True, slots=True)
class CollectiveEntry:
    """Measured seconds of one collective.

    kind      of the collective
    ranks     of the group, on one host
    size      bytes of the tensor, whole along the group
    seconds   of one call
    at_once   ranks that call meanwhile, in groups of so many; 0: those of one group
    """

    kind: Collective
    ranks: int
    size: int
    seconds: float
    at_once: int = 0


@dataclass(frozen=True, slots=True)
class Calibration:
    """Relative errors |predicted / measured - 1|, over `count` shards or calls.

    count                              how many were compared
    analytic_median, analytic_p95      of the analytic model: the median and the 95th percentile
    calibrated_median, calibrated_p95  of it times the operator's factor
    """

    count: int
    analytic_median: float
    analytic_p95: float
    calibrated_median: float
    calibrated_p95: float


@dataclass(frozen=True, slots=True)
class Calibrations:
    """How far off predictions of operators and of collectives are."""

    operators: Calibration
    collectives: Calibration


@dataclass(frozen=True, slots=True)
class NotMeasured:
    """A shard that could not be measured, and why."""

    signature: str
    reason: str


@dataclass(frozen=True)
class Profile:
    """Measurements of a machine. Times of operators and `overheads` are those of a rank while the others compute too.

    cluster       the machine, with the figures that fit the measurements best
    overheads     seconds beside operators and collectives
    calibration   how far off predictions are
    operators     shards of operators
    collectives   collectives inside of a host
    skipped       what could not be measured
    """

    cluster: Cluster
    overheads: Overheads
    calibration: Calibrations
    operators: tuple[CostEntry, ...]
    collectives: tuple[CollectiveEntry, ...]
    skipped: tuple[NotMeasured, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {"version": VERSION, **encode(self)}

    @cached_property
    def identity(self) -> str:
        """A hash of the contents."""
        return digest(self.as_dict())

    def save(self, path: Path) -> None:
        """Write the file. Raises NnscalerError `cannot_write`."""
        write_text(path, json.dumps(self.as_dict(), indent=1) + "\n")


def load_profile(path: str | Path) -> Profile:
    """Return the profile of a file. Raises NnscalerError `no_such_file`, and `profile_invalid` with what is wrong."""
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=_refuse)
    except OSError as error:
        raise NnscalerError("no_such_file", f"cannot read {path}: {error.strerror}", help=_HELP) from None
    except ValueError as error:
        raise NnscalerError("profile_invalid", f"{path} is not JSON: {error}", help=_HELP) from None
    if not isinstance(values, dict) or values.get("version") != VERSION:
        found = values.get("version") if isinstance(values, dict) else None
        message = f"{path} is not a profile of version {VERSION}, but of {found!r}"
        raise NnscalerError("profile_invalid", message, help=_HELP)
    try:
        profile = decode(Profile, values)
        _check_times(profile)
    except ValueError as error:
        raise NnscalerError("profile_invalid", f"{path} is not a profile: {error}", help=_HELP) from None
    return profile


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no number")


def _check_times(profile: Profile) -> None:
    """Check that nothing takes less than no time. Raises ValueError."""
    times = [(f"`{name}` of `overheads`", value) for name, value in encode(profile.overheads).items()]
    for entry in profile.operators:
        where = f"of {entry.signature}"
        times += [(f"`{n}` {where}", getattr(entry, n)) for n in ("forward", "backward", "predicted")]
    times += [(f"`seconds` of {entry.kind}", entry.seconds) for entry in profile.collectives]
    for where, value in times:
        if any(each < 0 for each in (value if isinstance(value, list | tuple) else [value])):
            raise ValueError(f"{where} is {value}")
