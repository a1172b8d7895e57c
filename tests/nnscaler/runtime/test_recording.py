"""A communicator that records is like the one that it stands before, and notes every call and instruction."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nnscaler.runtime.communication.communicator import CommunicationCall, Communicator, ProgramError
from nnscaler.runtime.communication.recording_communicator import (
    RecordedEvent,
    RecordingCommunicator,
    handed_over,
    read_records,
    write_records,
)
from nnscaler.runtime.communication.simulator import Simulator

EVERY = (0, 1)


def calls(communicator: Communicator | RecordingCommunicator) -> list[list[float]]:
    """Make every call of the protocol, and return what came of them."""
    rank = communicator.rank
    value = torch.arange(4.0) + rank
    found: list[Tensor] = [communicator.all_reduce(value, EVERY), communicator.all_reduce(value, EVERY, "max")]
    found += communicator.all_gather(value[: 1 + rank], EVERY, [(1,), (2,)])
    found.append(communicator.reduce_scatter([value, value + 1], EVERY))
    found += communicator.all_to_all([value[:1], value[1:]], EVERY, [[(1,), (3,)], [(1,), (3,)]])
    found.append(communicator.broadcast(value, 1, EVERY))
    communicator.barrier(EVERY)
    if rank == 0:
        communicator.send(value, 1, ("x", 0))
    else:
        found.append(communicator.recv((4,), torch.float32, 0, ("x", 0)))
    communicator.finish()
    return [t.tolist() for t in found]


def test_results_are_the_same_and_calls_are_noted_as_the_listener_hears_them() -> None:
    plain = Simulator(2).run(calls)

    def recorded(communicator: Communicator) -> tuple[list[list[float]], list[RecordedEvent], list[str]]:
        heard: list[CommunicationCall] = []
        recording = RecordingCommunicator(communicator)
        recording.listener = heard.append
        recording.context = "F0.0"
        found = calls(recording)
        recording.context = ""
        assert communicator.context == "" and recording.current is communicator.current is heard[-1]
        return found, recording.events, [call.kind for call in heard]

    for rank, (found, events, heard) in enumerate(Simulator(2).run(recorded)):
        assert found == plain[rank]
        assert [e.kind for e in events] == [*heard, "run"]
        assert all(e.instruction == "F0.0" and e.start <= e.end for e in events)
        assert all(a.end <= b.start for a, b in pairwise(events[:-1]))
        assert events[-1].start <= events[0].start and events[-2].end <= events[-1].end
        gathered, moved = events[2], events[4]
        assert (gathered.bytes, moved.bytes) == (8, 16), "of the rank that gives most"
        assert events[-2].ranks == (0, 1) and events[-2].bytes == 16 and events[-2].dtype == "float32"


def test_an_instruction_lasts_until_its_name_is_taken_back() -> None:
    recording = RecordingCommunicator(Communicator(0, 1))
    recording.context = "the gradient sum"
    recording.context = "the gradient sum of `w`"
    recording.all_reduce(torch.ones(2), (0,))
    assert recording.context == "the gradient sum of `w`"
    recording.context = "the gradient sum"
    recording.context = ""
    recording.context = "B0.1"
    recording.context = ""
    assert [(e.kind, e.instruction) for e in recording.events] == [
        ("all_reduce", "the gradient sum"),
        ("run", "the gradient sum"),
        ("run", "B0.1"),
    ]
    recording.begin()
    assert recording.events == []


def test_what_a_rank_hands_over() -> None:
    shapes = ((2, 3), (4, 3))
    assert handed_over(CommunicationCall("all_reduce", (0, 1), shapes[:1])) == 6
    assert handed_over(CommunicationCall("all_gather", (0, 1), shapes)) == 12
    assert handed_over(CommunicationCall("reduce_scatter", (0, 1), shapes)) == 18
    assert handed_over(CommunicationCall("all_to_all", (0, 1), ((1,), (2,), (3,), (4,)))) == 7
    assert handed_over(CommunicationCall("barrier", (0, 1))) == 0


def test_records_are_written_and_read(tmp_path: Path) -> None:
    events = [RecordedEvent("all_reduce", 1.5, 2.25, "F0.0", (0, 1), 8, "float32"), RecordedEvent("run", 1, 3, "F0.0")]
    folder = tmp_path / "deep" / "records"
    for rank in range(2):
        write_records(folder, rank, events[rank:])
    assert read_records(folder, 2) == [tuple(events), tuple(events[1:])]
    for ranks, reason in ((3, r"has no rank2\.json: 3 ranks write a file each"), (1, "of more than 1 ranks")):
        with pytest.raises(ProgramError, match=reason):
            read_records(folder, ranks)
    for text in ("{", json.dumps({"rank": 0}), json.dumps({"rank": 0, "events": [{"kind": 3}]})):
        (folder / "rank0.json").write_text(text)
        with pytest.raises(ProgramError, match=r"rank0\.json is no record of a rank"):
            read_records(folder, 2)
