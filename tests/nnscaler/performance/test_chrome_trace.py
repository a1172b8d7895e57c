"""Traces have the fields that the trace event format documents, and nothing in one lane overlaps."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from nnscaler.performance.chrome_trace import chrome_trace
from nnscaler.performance.timeline_events import DeviceRanks, Event, StepEvents

NUMBER = (int, float)
DEVICES = (DeviceRanks(0, (0, 1), (0,)), DeviceRanks(1, (2, 3), (1, 2)))


def call(kind: str, device: int, start: float, end: float, **more: Any) -> Event:
    ranks = more.pop("ranks", DEVICES[device].ranks)
    groups = more.pop("groups", (ranks,))
    return Event("communication", kind, device, ranks, start, end, "F0.0", device, groups, 64, axis="tp", **more)


def run(device: int, start: float, end: float, name: str, ranks: tuple[int, ...] | None = None) -> Event:
    return Event("compute", name[0], device, ranks or DEVICES[device].ranks, start, end, name, device)


SIMULATED = StepEvents(
    1,
    "simulated",
    "seconds",
    0.5,
    DEVICES,
    (
        run(0, 0.0, 0.2, "F0.0"),
        call("all_reduce", 0, 0.1, 0.15, module="blocks.*.mlp", where="gpt.py:59"),
        call("send", 0, 0.2, 0.2, groups=((0, 2), (1, 3)), message=7),
        run(1, 0.25, 0.5, "F1.0"),
        call("recv", 1, 0.25, 0.3, groups=((0, 2), (1, 3)), message=7),
        call("all_reduce", 1, 0.3, 0.4, ranks=(2,), groups=((2,),)),
        call("all_gather", 1, 0.35, 0.45, ranks=(3,), groups=((3,),)),
    ),
)
MEASURED = StepEvents(
    1,
    "measured",
    "seconds",
    0.5,
    DEVICES,
    (
        run(0, 0.0, 0.2, "F0.0", (0,)),
        call("send", 0, 0.1, 0.2, ranks=(0,), groups=((0, 2),), message=0),
        run(0, 0.0, 0.3, "F0.0", (1,)),
        call("send", 0, 0.2, 0.3, ranks=(1,), groups=((1, 3),), message=1),
        run(1, 0.0, 0.5, "F1.0", (2,)),
        call("recv", 1, 0.0, 0.3, ranks=(2,), groups=((0, 2),), message=0),
        run(1, 0.0, 0.5, "F1.0", (3,)),
        call("recv", 1, 0.05, 0.4, ranks=(3,), groups=((1, 3),), message=1),
    ),
)


def entries(events: StepEvents) -> list[dict[str, Any]]:
    document = json.loads(chrome_trace(events))
    assert set(document) == {"traceEvents", "displayTimeUnit"} and document["displayTimeUnit"] in ("ms", "ns")
    found: list[dict[str, Any]] = document["traceEvents"]
    return found


@pytest.mark.parametrize("events", [SIMULATED, MEASURED], ids=lambda e: e.source)
def test_entries_have_their_documented_fields(events: StepEvents) -> None:
    for entry in entries(events):
        assert isinstance(entry["name"], str) and isinstance(entry["pid"], int) and isinstance(entry["tid"], int)
        if entry["ph"] == "M":
            assert entry["name"] in ("process_name", "thread_name") and isinstance(entry["args"]["name"], str)
            continue
        assert isinstance(entry["cat"], str) and isinstance(entry["ts"], NUMBER) and entry["ts"] >= 0
        if entry["ph"] == "X":
            assert isinstance(entry["dur"], NUMBER) and entry["dur"] >= 0 and isinstance(entry["args"], dict)
        else:
            assert entry["ph"] in ("s", "f") and isinstance(entry["id"], int)
            assert entry.get("bp") == ("e" if entry["ph"] == "f" else None)


@pytest.mark.parametrize("events", [SIMULATED, MEASURED], ids=lambda e: e.source)
def test_every_event_is_a_slice_in_microseconds_and_slices_of_a_thread_do_not_overlap(events: StepEvents) -> None:
    slices = [e for e in entries(events) if e["ph"] == "X"]
    assert len(slices) == len(events.events)
    assert sorted(e["ts"] for e in slices) == pytest.approx(sorted(e.start * 1e6 for e in events.events))
    threads: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for entry in slices:
        threads.setdefault((entry["pid"], entry["tid"]), []).append(entry)
    for found in threads.values():
        found.sort(key=lambda e: e["ts"])
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-6 for a, b in pairwise(found))
        assert len({e["cat"] for e in found}) == 1, "computation and communication have lanes of their own"


@pytest.mark.parametrize("events", [SIMULATED, MEASURED], ids=lambda e: e.source)
def test_an_arrow_leads_from_the_slice_that_sends_to_the_one_that_receives(events: StepEvents) -> None:
    found = entries(events)
    slices = [e for e in found if e["ph"] == "X"]
    starts, ends = ({e["id"]: e for e in found if e["ph"] == kind} for kind in ("s", "f"))
    assert starts.keys() == ends.keys() == {e.message for e in events.events if e.message is not None}
    for number, start in starts.items():
        end = ends[number]
        assert start["name"] == end["name"] and start["cat"] == end["cat"] and start["pid"] != end["pid"]
        for arrow, kind in ((start, "send"), (end, "recv")):
            around = [
                s
                for s in slices
                if (s["pid"], s["tid"]) == (arrow["pid"], arrow["tid"]) and s["ts"] <= arrow["ts"] < s["ts"] + s["dur"]
            ]
            assert [s["name"].split()[0] for s in around] == [kind]
        assert start["ts"] <= end["ts"]


def test_lanes_have_names() -> None:
    def names(events: StepEvents, what: str) -> list[str]:
        return [e["args"]["name"] for e in entries(events) if e["name"] == what]

    assert names(SIMULATED, "process_name") == ["device 0: ranks 0-1, stage 0", "device 1: ranks 2-3, stages 1, 2"]
    assert names(SIMULATED, "thread_name") == ["compute", "communication"] * 2 + ["communication 2"]
    of_rank = [f"rank {rank} {lane}" for rank in range(4) for lane in ("compute", "communication")]
    assert names(MEASURED, "thread_name") == of_rank


def test_a_slice_says_what_causes_it() -> None:
    (found,) = (e for e in entries(SIMULATED) if e["name"] == "all_reduce tp" and e["pid"] == 0)
    told = {"module": "blocks.*.mlp", "where": "gpt.py:59", "bytes": 128, "bytes of a rank": 64, "groups": "0-1"}
    assert told.items() <= found["args"].items()
