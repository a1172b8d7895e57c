"""Transfer tensors between ranks of one host through the sender's memory: the receiver reads them where they lie.

A socket copies what it carries twice, and the threads that serve it take processor time from the ranks. Between
processes of one host, where the system lets them, each rank has an inbox instead: memory that the others map, with a
ring of slots for each of them. A sender writes down where a tensor lies; its receiver copies it from there, by
process_vm_readv(2), the cross-memory attach of Linux that MPI libraries use within a node, and marks the slot. Who
waits sleeps on a futex(2) of the slot, or of the ring. The same bytes arrive as over a socket.

The system may forbid it: to processes in containers of their own, or of other users, and where
`kernel.yama.ptrace_scope` is 1 and the user is not root. So ranks try it when they meet, and sockets carry what cannot
be read.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import secrets
import select
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from nnscaler.runtime.communication.torch_communicator_base import add_in_order

_SLOTS = 4096  # of a ring: messages to one rank that it has not read; the next one waits
_RING, _SLOT = 16, 24  # bytes of a ring before its slots, and of a slot
_FULL, _TAKEN = 1, 0
_CHUNK = 1 << 17  # bytes that are read and added at a time
_SMALL = 1 << 16  # bytes that are read without letting another thread run
_SPANS = 1024  # that one call copies: the system's IOV_MAX
_LOOK = 0.2  # seconds of sleep between two looks whether the other rank is still there

Place = tuple[int, int]  # address and bytes

_FUTEX, _WAIT, _WAKE, _EVERYONE = 202, 0, 1, 2**31 - 1  # of x86-64
_CALLS = ctypes.CDLL(None, use_errno=True)  # another thread of Python runs meanwhile
_SHORT_CALLS = ctypes.PyDLL(None, use_errno=True)  # none does: to let one costs more than the call
for _library in (_CALLS, _SHORT_CALLS):
    _word = ctypes.c_long
    _library.syscall.argtypes = (_word, ctypes.c_void_p, _word, _word, ctypes.c_void_p, ctypes.c_void_p, _word)
    _library.syscall.restype = _word
    if hasattr(_library, "process_vm_readv"):
        _library.process_vm_readv.argtypes = (_word, ctypes.c_void_p, _word, ctypes.c_void_p, _word, _word)
        _library.process_vm_readv.restype = _word


def is_possible() -> bool:
    """Say if this system has what it takes: Linux on x86-64, where other processors see stores in their order."""
    here = platform.system() == "Linux" and platform.machine() == "x86_64" and hasattr(os, "pidfd_open")
    return here and hasattr(_CALLS, "process_vm_readv") and hasattr(os, "memfd_create")


class PeerMemory:
    """The ranks of a process group whose memory this one reads, and which read that of this rank.

    near  whether two ranks read each other's memory, as [rank, rank]; the same on every rank

    Every rank of the group makes one at the same time.
    """

    def __init__(self, world: ProcessGroup, rank: int) -> None:
        ranks, self._rank = world.size(), rank
        self.near = torch.zeros(ranks, ranks, dtype=torch.bool)
        self._peers: dict[int, _Peer] = {}
        possible = is_possible()
        inbox = os.memfd_create("nnscaler-inbox") if possible else -1
        mark = torch.tensor([secrets.randbits(62)])
        if possible:
            os.ftruncate(inbox, ranks * _ring_bytes())
        places = _gathered(world, torch.tensor([os.getpid(), inbox, mark.data_ptr(), int(mark)]))
        found = torch.zeros(ranks, dtype=torch.int64)
        for other, place in enumerate(places):
            process, file, address, wanted = place.tolist()
            seen = torch.zeros_like(mark)
            if (
                other == rank
                or not possible
                or file < 0
                or _copied(process, [address], [_place(seen)])
                or int(seen) != wanted
            ):
                continue
            with suppress(OSError):  # another process of that number, which the mark tells, or no permission
                self._peers[other] = _Peer(other, process, inbox, file, (rank, other))
                found[other] = 1
        reads = torch.stack(_gathered(world, found))
        self.near = (reads * reads.T).bool()
        self._peers = {other: peer for other, peer in self._peers.items() if self.near[rank, other]}
        if possible:
            os.close(inbox)

    def reads(self, rank: int) -> bool:
        """Say if tensors from and to a rank are read out of memory. Both sides say the same."""
        return rank in self._peers

    def reads_any(self, ranks: Iterable[int]) -> bool:
        """Say so of one of these ranks."""
        return not self._peers.keys().isdisjoint(ranks)

    def reads_all(self, ranks: Iterable[int]) -> bool:
        """Say so of all of these ranks but this one."""
        return self._peers.keys() >= {*ranks} - {self._rank}

    def send(self, contents: Sequence[Tensor], rank: int, tag: int) -> OfferedTensors:
        """Let a rank read contiguous tensors, which are neither written nor freed before it has."""
        return OfferedTensors(self._peers[rank], contents, tag)

    def recv(self, into: Sequence[Tensor], rank: int, tag: int) -> ReadTensors:
        """Read what a rank sends with this tag into contiguous tensors of the same sizes, when that is waited for."""
        return ReadTensors(self._peers[rank], into, tag)

    def add_up(self, pieces: Mapping[int, Tensor], tag: Callable[[int], int]) -> None:
        """Sum, in place, what each rank has in the place of this rank's piece; every rank of the group calls it.

        `pieces`: parts of one contiguous tensor by rank, in the order of the sum; `tag`: of the messages with a rank.
        What is read is added while it is in the processor's cache.
        """
        own = pieces[self._rank]
        peers = {rank: self._peers[rank] for rank in pieces if rank != self._rank}
        offers = [self.send([pieces[rank]], rank, tag(rank)) for rank in peers]
        others = {rank: (peer, *peer.arrival(tag(rank))) for rank, peer in peers.items()}
        count = _CHUNK // own.element_size()
        read = {rank: own.new_empty(min(count, own.numel())) for rank in others}
        for start in range(0, own.numel(), count):
            chunk = own[start : start + count]
            parts = {rank: chunk if rank == self._rank else read[rank][: len(chunk)] for rank in pieces}
            for rank, (peer, _, address) in others.items():
                peer.copy([address + start * own.element_size()], [_place(parts[rank])])
            add_in_order(list(parts.values()), chunk)
        for peer, number, _ in others.values():
            peer.release(number)
        for offer in offers:
            offer.wait()


class OfferedTensors:
    """Tensors that another rank reads: the message is the address of a single one, or of the addresses of several."""

    def __init__(self, peer: _Peer, contents: Sequence[Tensor], tag: int) -> None:
        addresses = [content.data_ptr() for content in contents]
        table = (ctypes.c_int64 * len(addresses))(*addresses)
        self._peer, self._kept = peer, (contents, table)
        self._number = peer.offer(addresses[0] if len(addresses) == 1 else ctypes.addressof(table), tag)

    def is_read(self) -> bool:
        return self._peer.has_read(self._number)

    def wait(self) -> None:
        """Return when they have been read. Raises RuntimeError where the other rank has ended."""
        self._peer.wait_until_read(self._number)


class ReadTensors:
    """Tensors that this rank is going to read."""

    def __init__(self, peer: _Peer, into: Sequence[Tensor], tag: int) -> None:
        self._peer, self._into, self._tag = peer, into, tag

    def wait(self) -> None:
        """Wait until they may be read, and read them. Raises RuntimeError where the other rank has ended."""
        number, address = self._peer.arrival(self._tag)
        here = [_place(tensor) for tensor in self._into]
        addresses = [address]
        if len(here) > 1:
            table = (ctypes.c_int64 * len(here))()
            self._peer.copy([address], [(ctypes.addressof(table), ctypes.sizeof(table))])
            addresses = list(table)
        self._peer.copy(addresses, here)
        self._peer.release(number)


class _Ring:
    """Slots in an inbox, for what one rank sends to another.

    In the first eight bytes lies the number of messages so far; in a slot a state and a tag of four bytes each, the
    message's number and an address, of eight. What others wait for is written last.
    """

    def __init__(self, file: int, index: int) -> None:
        start, length = index * _ring_bytes(), _ring_bytes()
        page = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        self._memory = mmap.mmap(file, start - page + length, offset=page)
        whole = memoryview(self._memory)[start - page :]
        self._words, self._numbers = whole.cast("i"), whole.cast("q")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory)) + start - page

    @property
    def count(self) -> int:
        return self._numbers[0]

    def put(self, number: int, tag: int, address: int) -> None:
        """Fill a slot; the number of messages says that it is."""
        at = (_RING + number % _SLOTS * _SLOT) // 4
        self._numbers[at // 2 + 1], self._numbers[at // 2 + 2] = number, address
        self._words[at + 1], self._words[at] = tag, _FULL
        self._numbers[0] = number + 1
        _wake(self.address)

    def message(self, number: int) -> tuple[int, int]:
        """Return the tag and the address of a message."""
        at = (_RING + number % _SLOTS * _SLOT) // 4
        return self._words[at + 1], self._numbers[at // 2 + 2]

    def take(self, number: int) -> None:
        """Say that a message has been read."""
        place = _RING + number % _SLOTS * _SLOT
        self._words[place // 4] = _TAKEN
        _wake(self.address + place)

    def is_read(self, number: int) -> bool:
        """Say if a message has been read: its slot says so, or serves another one."""
        at = (_RING + number % _SLOTS * _SLOT) // 4
        return self._words[at] != _FULL or self._numbers[at // 2 + 1] != number

    def state_address(self, number: int) -> int:
        return self.address + _RING + number % _SLOTS * _SLOT


class _Peer:
    """Another rank of this host: the ring from there to here, and the one from here to there."""

    def __init__(self, rank: int, process: int, inbox: int, file: int, ranks: tuple[int, int]) -> None:
        """`inbox`, `file`: of this process and of the other one; `ranks`: this one and the other one."""
        self._rank, self._process = rank, process
        self._handle = os.pidfd_open(process)
        self._arriving = _Ring(inbox, ranks[1])
        there = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR)
        self._leaving = _Ring(there, ranks[0])
        os.close(there)
        self._sending, self._finding = threading.Lock(), threading.Lock()
        self._sent = self._seen = 0  # messages
        self._unread: dict[int, deque[tuple[int, int]]] = {}  # by tag: numbers and addresses of what has arrived

    def offer(self, address: int, tag: int) -> int:
        """Write down where a tensor lies, and return the number of the message."""
        with self._sending:
            number = self._sent
            self.wait_until_read(number - _SLOTS)
            self._leaving.put(number, tag, address)
            self._sent += 1
            return number

    def has_read(self, number: int) -> bool:
        """Return whether the other rank has read a message."""
        return self._leaving.is_read(number)

    def wait_until_read(self, number: int) -> None:
        if number >= 0:
            self._wait_for(self._leaving.state_address(number), _FULL, lambda: self._leaving.is_read(number))

    def arrival(self, tag: int) -> tuple[int, int]:
        """Wait for the first message with a tag; return its number, and the address of what it tells of."""
        found, seen = self._found(tag)
        while found is None:
            self._wait_for(self._arriving.address, seen, partial(self._has_more_than, seen))
            found, seen = self._found(tag)
        return found

    def copy(self, addresses: Sequence[int], into: Sequence[Place]) -> None:
        """Copy memory of the other rank."""
        reason = _copied(self._process, addresses, into)
        if reason is not None:
            raise RuntimeError(f"connection closed by peer: the memory of rank {self._rank} is gone ({reason})")

    def release(self, number: int) -> None:
        """Let the other rank write again what a message tells of."""
        self._arriving.take(number)

    def _found(self, tag: int) -> tuple[tuple[int, int] | None, int]:
        """Return number and address of the first message with a tag, if it is there; and how many messages are."""
        with self._finding:
            while self._seen < self._arriving.count:
                other, address = self._arriving.message(self._seen)
                self._unread.setdefault(other, deque()).append((self._seen, address))
                self._seen += 1
            waiting = self._unread.get(tag)
            return waiting.popleft() if waiting else None, self._seen

    def _has_more_than(self, count: int) -> bool:
        return self._arriving.count > count

    def _wait_for(self, address: int, value: int, done: Callable[[], bool]) -> None:
        """Sleep until it is done; the word at the address then has another value. Raises RuntimeError where the other
        rank has ended before."""
        while not done():
            if not _slept(address, value) and self._has_ended() and not done():
                raise RuntimeError(f"connection closed by peer: the process of rank {self._rank} has ended")

    def _has_ended(self) -> bool:
        look = select.poll()
        look.register(self._handle, select.POLLIN)
        return bool(look.poll(0))


class _Span(ctypes.Structure):
    """`struct iovec`: bytes from an address on."""

    _fields_ = (("address", ctypes.c_void_p), ("length", ctypes.c_size_t))


class _Time(ctypes.Structure):
    """`struct timespec`."""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_PAUSE = _Time(int(_LOOK), int(_LOOK % 1 * 1e9))


def _place(tensor: Tensor) -> Place:
    return tensor.data_ptr(), tensor.nbytes


def _slept(address: int, value: int) -> bool:
    """Sleep while the word at an address has a value; return False where it had it for all of `_LOOK`."""
    result = _CALLS.syscall(_FUTEX, address, _WAIT, value & 0xFFFFFFFF, ctypes.byref(_PAUSE), None, 0)
    return bool(result == 0 or ctypes.get_errno() != errno.ETIMEDOUT)


def _wake(address: int) -> None:
    _SHORT_CALLS.syscall(_FUTEX, address, _WAKE, _EVERYONE, None, None, 0)


def _copied(process: int, addresses: Sequence[int], into: Sequence[Place]) -> str | None:
    """Copy memory of a process, from these addresses to these places; return why that is impossible, if it is."""
    while into:
        if len(into) == 1:  # of most calls; arrays take as long as the call
            size = into[0][1]
            here, there, count = _Span(*into[0]), _Span(addresses[0], size), 1
        else:
            places, count = into[:_SPANS], min(len(into), _SPANS)
            spans: Any = _Span * count
            size = sum(size for _, size in places)
            here, there = spans(*places), spans(*((a, n) for a, (_, n) in zip(addresses, places, strict=False)))
        calls = _SHORT_CALLS if size <= _SMALL else _CALLS
        done = calls.process_vm_readv(process, ctypes.byref(here), count, ctypes.byref(there), count, 0)
        if done <= 0:
            return os.strerror(ctypes.get_errno())
        if done == size and count == len(into):
            return None
        addresses, into = _left(addresses, into, done)
    return None


def _left(addresses: Sequence[int], into: Sequence[Place], done: int) -> tuple[Sequence[int], Sequence[Place]]:
    """Return what is left to copy after so many bytes: one call copies less than two GiB."""
    start = 0
    while start < len(into) and done >= into[start][1]:
        done -= into[start][1]
        start += 1
    addresses, places = list(addresses[start:]), list(into[start:])
    if done:
        addresses[0] += done
        places[0] = places[0][0] + done, places[0][1] - done
    return addresses, places


def _ring_bytes() -> int:
    return _RING + _SLOTS * _SLOT


def _gathered(world: ProcessGroup, own: Tensor) -> list[Tensor]:
    found = [torch.empty_like(own) for _ in range(world.size())]
    world.allgather([found], [own]).wait()
    return found
