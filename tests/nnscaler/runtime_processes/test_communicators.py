"""The communicators over torch.distributed against the simulator, on real processes."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nnscaler.runtime.communication import cross_memory_attach
from nnscaler.runtime.communication.communicator import CommunicationCall, CommunicationError
from nnscaler.runtime.communication.gloo import GlooCommunicator
from nnscaler.runtime.communication.simulator import Simulator
from nnscaler.runtime.communication.torch_communicator_base import agreement_of, forward_of
from nnscaler.runtime.jobs.job import JobSpecification
from nnscaler.runtime.jobs.launcher import ForkServer, launch
from nnscaler.runtime.program.import_role_and_user_files import load_user_module


@pytest.mark.parametrize("world", [2, 3, 4])
def test_gloo_gives_the_bits_of_the_simulator(server: ForkServer, rank_functions: str, world: int) -> None:
    expected = Simulator(world).run(load_user_module(rank_functions).every_call)
    outcome = launch(JobSpecification(f"{rank_functions}:every_call", world), timeout=60, server=server)
    for found, wanted in zip(outcome.results(), expected, strict=True):
        assert [t.dtype for t in found] == [t.dtype for t in wanted]
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("most", [1, 40, 4000, 100_000])
def test_a_call_that_copies_less_than_it_is_asked_to(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the system does from two GiB on."""

    class Calls:
        @staticmethod
        def process_vm_readv(_: int, into: Any, count: int, source: Any, *__: int) -> int:
            here, there = (ctypes.cast(spans, ctypes.POINTER(cross_memory_attach._Span)) for spans in (into, source))
            done = 0
            for i in range(count):
                assert here[i].length == there[i].length
                size = min(here[i].length, most - done)
                ctypes.memmove(here[i].address, there[i].address, size)
                done += size
                if size < here[i].length:
                    break
            return done

    monkeypatch.setattr(cross_memory_attach, "_CALLS", Calls)
    monkeypatch.setattr(cross_memory_attach, "_SHORT_CALLS", Calls)
    monkeypatch.setattr(cross_memory_attach, "_SPANS", 2)
    sizes = (3, 250, 1, 999, 40) if most > 1 else (3, 5, 1)
    given, found = [torch.randn(n) for n in sizes], [torch.zeros(n) for n in sizes]
    places = [(t.data_ptr(), t.nbytes) for t in found]
    assert cross_memory_attach._copied(0, [t.data_ptr() for t in given], places) is None
    assert all(torch.equal(a, b) for a, b in zip(given, found, strict=True))


@pytest.mark.parametrize("world", [2, 3, 4])
def test_what_is_begun_gives_the_bits_of_the_simulator(server: ForkServer, rank_functions: str, world: int) -> None:
    function = load_user_module(rank_functions).begun
    expected = Simulator(world).run(function)
    outcome = launch(JobSpecification(f"{rank_functions}:begun", world), timeout=60, server=server)
    for others in (outcome.results(), *(Simulator(world, timings=seed).run(function) for seed in range(20))):
        for found, wanted in zip(others, expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize(
    ("function", "world", "links"),
    [
        ("every_call", 3, "sockets"),
        ("begun", 4, "sockets"),
        ("on_two_axes", 4, "sockets"),
        ("together", 3, "sockets"),
        ("together", 3, "memory"),
        ("many", 3, "memory"),
    ],
)
def test_tensors_are_the_same_over_sockets_and_out_of_memory(
    server: ForkServer, rank_functions: str, function: str, world: int, links: str
) -> None:
    """With few slots each serves many messages, and one call reads a few of the tensors of one."""
    expected = Simulator(world).run(getattr(load_user_module(rank_functions), function))
    job = JobSpecification(f"{rank_functions}:over", world, {"function": function, "links": links})
    for found, wanted in zip(launch(job, timeout=60, server=server).results(), expected, strict=True):
        if found is None:
            pytest.skip("this system does not let ranks read each other's memory")
        assert [t.dtype for t in found] == [t.dtype for t in wanted]
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_groups_of_two_axes_give_the_bits_of_the_simulator(server: ForkServer, rank_functions: str) -> None:
    """Torch's own collectives serve them: every rank must know a group by the same name."""
    functions = load_user_module(rank_functions)
    expected = Simulator(4).run(functions.on_two_axes)
    job = JobSpecification(f"{rank_functions}:on_two_axes", 4, groups=functions.TWO_AXES)
    for found, wanted in zip(launch(job, timeout=60, server=server).results(), expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_unequal_tensors_give_the_bits_of_the_simulator(server: ForkServer, rank_functions: str) -> None:
    expected = Simulator(3).run(load_user_module(rank_functions).unequal)
    assert len({tuple(t.shape) for t in expected[0]}) > 6
    outcome = launch(JobSpecification(f"{rank_functions}:unequal", 3), timeout=60, server=server)
    for found, wanted in zip(outcome.results(), expected, strict=True):
        assert [t.shape for t in found] == [t.shape for t in wanted]
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("pairs", [[], [(0, 1), (1, 0), (1, 2), (2, 0), (0, 2), (2, 1)], [(0, 1), (2, 0)]])
def test_messages_without_tags_are_matched_by_announcement(
    server: ForkServer, rank_functions: str, pairs: list[tuple[int, int]]
) -> None:
    """The communicator for NCCL, run over gloo: groups of torch, messages in the sender's order."""
    expected = Simulator(3).run(load_user_module(rank_functions).every_call)
    outcome = launch(JobSpecification(f"{rank_functions}:without_tags", 3, {"pairs": pairs}), timeout=60, server=server)
    for found, wanted in zip(outcome.results(), expected, strict=True):
        for a, b in zip(found, wanted, strict=True):
            # Sums are in gloo's own order here: in bfloat16, terms of size 1 to 3 are rounded by up to 2**-7 each.
            tolerance = 2.0**-6 if a.dtype == torch.bfloat16 else 1e-12
            torch.testing.assert_close(a, b, rtol=0.0, atol=tolerance)


def test_what_lies_in_host_memory_goes_past_nccl(server: ForkServer, rank_functions: str) -> None:
    """Ranks on GPUs agree on shapes before each step, and those are on the host, of which NCCL takes nothing."""
    expected = Simulator(3).run(load_user_module(rank_functions).in_host_memory)
    name = f"{rank_functions}:in_host_memory"
    outcome = launch(JobSpecification(name, 3), timeout=60, server=server)
    for found, wanted in zip(outcome.results(), expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    refused = launch(JobSpecification(name, 3, {"device": "cpu"}), timeout=60, server=server)
    assert "No backend type associated with device type cpu" in refused.describe()


def test_ranks_that_disagree_wait_and_say_in_what(server: ForkServer, rank_functions: str) -> None:
    outcome = launch(JobSpecification(f"{rank_functions}:disagree", 2), timeout=60, stall=0.5, server=server)
    assert (outcome.end, [r.status for r in outcome]) == ("deadlock", ["blocked", "blocked"])
    assert "all_gather float32[3] over ranks (0, 1) at " in outcome[0].waiting
    assert "rank_functions.py:" in outcome[0].waiting
    assert "all_reduce(sum)" in outcome[1].waiting
    assert "disagree" in outcome[0].log_tail  # the stack of the rank, in its log
    with pytest.raises(CommunicationError, match="deadlock: no rank can go on") as caught:
        outcome.results()
    assert caught.value.waiting.keys() == {0, 1}


def test_what_both_sides_must_agree_on() -> None:
    send = CommunicationCall("send", (0, 1), ((2,),), torch.float32, key=("h", 0, 1, 0, "F"), place="a.py:1")
    recv = CommunicationCall("recv", (0, 1), ((2,),), torch.float32, key=("h", 0, 1, 0, "F"), place="b.py:2")
    assert agreement_of(send) == agreement_of(recv)
    assert agreement_of(send) != agreement_of(CommunicationCall("recv", (0, 1), ((3,),), torch.float32, key=recv.key))


@pytest.mark.parametrize("links", ["memory", "sockets"])
def test_what_was_sent_goes_once_it_is_known_to_be_read(server: ForkServer, rank_functions: str, links: str) -> None:
    """Also without another message; a socket tells of nothing before the end. And what is read when it is waited for
    is not received ahead."""
    job = JobSpecification(f"{rank_functions}:over", 2, {"function": "sent", "links": links})
    found = launch(job, timeout=60, server=server).results()
    if found[0] is None:
        pytest.skip("this system does not let ranks read each other's memory")
    near = links == "memory"
    assert found[0] == [not near, True, not near]


def test_two_messages_with_a_rank_have_no_tag_in_common(monkeypatch: pytest.MonkeyPatch) -> None:
    communicator = object.__new__(GlooCommunicator)  # whose messages nobody sends
    communicator._tags, communicator._names = {}, {}
    assert len({communicator._tag(text, peer) for text in ("a", "b", "c") for peer in (1, 2)}) == 3
    monkeypatch.setattr("hashlib.sha256", lambda data: SimpleNamespace(digest=lambda: bytes(32)))
    assert communicator._tag("d", 1) == communicator._tag("d", 1) == communicator._tag("e", 2) == 0
    for text, peer in (("d", 2), ("e", 1), ("f", 2)):
        with pytest.raises(CommunicationError, match=f"two messages with rank {peer} have the tag 0: "):
            communicator._tag(text, peer)


def test_a_gradient_says_that_its_message_arrived() -> None:
    assert forward_of(("B", 0, 1, 2, "B")) == ("B", 0, 1, 2, "F")
    assert forward_of(("h", 0, 1, 2, "B", 4)) == ("h", 0, 1, 2, "F", 4)
    assert forward_of(("B", 0, 1, 2, "F")) is None
