"""The functions that the ranks of the tests run. Loaded by path in each rank's process."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from nnscaler.runtime.communication import cross_memory_attach
from nnscaler.runtime.communication.communicator import Communicator
from nnscaler.runtime.communication.gloo import GlooCommunicator
from nnscaler.runtime.communication.nccl import NcclCommunicator
from nnscaler.runtime.communication.torch_communicator_base import TorchCommunicator


def greet(communicator: Communicator, text: str, number: int = 0) -> dict[str, object]:
    print(f"out of rank {communicator.rank}")
    print(f"error of rank {communicator.rank}", file=sys.stderr)
    total = communicator.all_reduce(torch.tensor([communicator.rank]), range(communicator.world_size))
    return {"text": text, "number": number, "total": total, "threads": torch.get_num_threads(), "process": os.getpid()}


def every_call(communicator: Communicator) -> list[Tensor]:
    """One of each call and more, on groups in and out of order, with all kinds of dtypes; what came back."""
    world, rank = communicator.world_size, communicator.rank
    generator = torch.Generator().manual_seed(rank)
    results: list[Tensor] = []
    everyone = tuple(range(world))
    for ranks in (everyone, everyone[::-1], everyone[-2:]):
        if rank in ranks:
            results += collectives(communicator, ranks, generator)
    right, left = (rank + 1) % world, (rank - 1) % world
    sent = torch.randn(3, 2, generator=generator)
    # messages are asked for in another order than they were sent in, and two have one key
    communicator.send(sent, right, ("h", 0, 1, 0, "F"))
    communicator.send(sent + 1, right, ("h", 0, 1, 1, "F"))
    communicator.send(sent + 2, right, ("h", 0, 1, 1, "F"))
    communicator.send(torch.tensor(rank > 0), right, ("flag",))
    communicator.send(torch.zeros(0, 4), right, ("empty", 0, 1, 0, "F", 3))
    communicator.send(torch.complex(sent, -sent), right, ("turns",))
    for name, view in views_of_other_values(generator).items():
        communicator.send(view, right, (name,), lasting=True)
    communicator.send(torch.tensor([-3 - rank], dtype=torch.int16), right, ("short",))
    sent.zero_()
    results.append(communicator.recv((), torch.bool, left, ("flag",)))
    for micro in (1, 0, 1):
        results.append(communicator.recv((3, 2), torch.float32, left, ("h", 0, 1, micro, "F")))
    results.append(communicator.recv((0, 4), torch.float32, left, ("empty", 0, 1, 0, "F", 3)))
    communicator.send(results[-2], left, ("h", 0, 1, 1, "B"))
    results.append(communicator.recv((3, 2), torch.float32, right, ("h", 0, 1, 1, "B")))
    results.append(communicator.recv((3, 2), torch.complex64, left, ("turns",)))
    results.append(communicator.recv((1,), torch.int16, left, ("short",)))
    for name, view in views_of_other_values(generator).items():
        results.append(communicator.recv(view.shape, view.dtype, left, (name,)))
    communicator.finish()
    communicator.barrier(everyone)
    return results


def views_of_other_values(generator: torch.Generator) -> dict[str, Tensor]:
    """Views whose memory has other values than they: a conjugate, and a part of one, which is negated."""
    turns = torch.randn(3, dtype=torch.complex128, generator=generator).conj()
    return {"conjugate": turns, "negated": turns.imag}


def collectives(communicator: Communicator, ranks: tuple[int, ...], generator: torch.Generator) -> list[Tensor]:
    def random(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype)

    count, results = len(ranks), []
    tensors = (random(5, 3), random(40000).requires_grad_(), random(), random(2, 0), random(4, 6).t())
    results += [communicator.all_reduce(tensor, ranks) for tensor in tensors]
    results.append(communicator.all_reduce(random(7, dtype=torch.float32), ranks, "max"))
    results.append(communicator.all_reduce(torch.randint(0, 9, (4,), generator=generator), ranks))
    results.append(communicator.all_reduce(random(6) > 0, ranks))
    results.append(communicator.all_reduce(random(4, dtype=torch.bfloat16), ranks))
    results.append(communicator.all_reduce(random(70001).clamp(-1, 1).bfloat16(), ranks))
    results += communicator.all_gather(random(2, 3).t(), ranks)
    results += communicator.all_gather(random(3) > 0, ranks)
    results.append(communicator.reduce_scatter([random(2, 2) for _ in ranks], ranks))
    results.append(communicator.reduce_scatter([random(2) for _ in ranks], ranks, "max"))
    results += communicator.all_to_all([random(count, 2) for _ in ranks], ranks)
    results.append(communicator.broadcast(random(3, 2), ranks[-1], ranks))
    views = views_of_other_values(generator).values()
    for odd in ([random(2, dtype=torch.complex128) for _ in ranks], *([view] * count for view in views)):
        results += communicator.all_gather(odd[0], ranks) + communicator.all_to_all(odd, ranks)
        results += [communicator.all_reduce(odd[0], ranks), communicator.reduce_scatter(odd, ranks)]
        results += [communicator.rotate(odd[0], ranks), communicator.broadcast(odd[0], ranks[0], ranks)]
        part, whole = torch.empty_like(results[-1]), [torch.empty_like(results[-1]) for _ in ranks]
        communicator.start_reduce_scatter(odd, part, ranks).wait()
        communicator.start_all_gather(odd[0], whole, ranks).wait()
        results += [part, *whole]
    short = [(9 * random(3)).short() for _ in ranks]
    results += communicator.all_gather(short[0], ranks) + communicator.all_to_all(short, ranks)
    results += [communicator.all_reduce(short[0], ranks), communicator.reduce_scatter(short, ranks)]
    return results


def begun(communicator: Communicator) -> list[Tensor]:
    """Collectives and messages that are begun and waited for later in another order, beside others of the same shapes;
    what came back."""
    world, rank = communicator.world_size, communicator.rank
    generator = torch.Generator().manual_seed(rank)
    results: list[Tensor] = []
    for ranks in (tuple(range(world)), tuple(range(world))[::-1], tuple(range(world))[-2:]):
        if rank not in ranks:
            continue
        count, here = len(ranks), ranks.index(rank)
        sums = [torch.randn(size, generator=generator) for size in (5, 40000, 1, 3, 40001)]
        pieces = [torch.randn(6, generator=generator) for _ in ranks]
        part = torch.empty(6)
        wholes = [torch.empty(3, 4), torch.empty(3, 2 * count)]
        shards = [torch.randn(3, 4, generator=generator) for _ in wholes]
        gathered = [torch.empty(3, 4) for _ in ranks]
        rows = [wholes[1].narrow(1, 2 * i, 2) for i in range(count)]
        waiting = [communicator.start_all_reduce(tensor, ranks) for tensor in sums]
        waiting.append(communicator.start_reduce_scatter(pieces, part, ranks))
        waiting.append(communicator.start_all_gather(shards[0], gathered, ranks))
        waiting.append(communicator.start_all_gather(shards[1][:, :2], rows, ranks))
        results.append(communicator.all_reduce(torch.full((5,), 1.0 + here), ranks))
        results.append(communicator.all_reduce(torch.randn(40001, generator=generator), ranks))
        for pending in reversed(waiting):
            pending.wait()
        results += [*sums, part, *gathered, wholes[1]]
    right, left = (rank + 1) % world, (rank - 1) % world
    arriving = [torch.empty(3), torch.empty(3)]
    coming = [communicator.start_recv(t, left, ("h", 0, 1, i, "F")) for i, t in enumerate(arriving)]
    for i in (1, 0):
        communicator.send(torch.randn(3, generator=generator), right, ("h", 0, 1, i, "F"))
    coming[1].wait()
    coming[0].wait()
    communicator.finish()
    communicator.barrier(tuple(range(world)))
    return results + arriving


def together(communicator: Communicator) -> list[Tensor]:
    """Gathers and sums that are begun together and last until they are settled, of sizes that are unequal, or none."""
    world, rank = communicator.world_size, communicator.rank
    generator, results = torch.Generator().manual_seed(rank), []
    for ranks in (tuple(range(world)), tuple(range(world))[::-1]) * 3:
        here = ranks.index(rank)
        given, waiting = [], []
        for size in (0, 5, 40000, 1, 7, 20001):
            with communicator.together(lasting=True):
                for dtype in (torch.float32, torch.bfloat16, torch.float64):
                    shapes = [(size + i * bool(size), 2) for i in range(world)]
                    own = torch.randn(shapes[here], generator=generator).to(dtype)
                    wholes = [torch.empty(shape, dtype=dtype) for shape in shapes]
                    pieces = [torch.randn(size, generator=generator).to(dtype) for _ in ranks]
                    part = torch.empty(size, dtype=dtype)
                    waiting.append(communicator.start_all_gather(own, wholes, ranks, shapes))
                    waiting.append(communicator.start_reduce_scatter(pieces, part, ranks))
                    given += [own, *pieces]
                    results += [*wholes, part]
        for pending in waiting[::-1]:
            pending.wait()
        communicator.settle()
        for tensor in given:
            tensor.fill_(torch.nan)
    communicator.finish()
    return results


TWO_AXES = ((0, 1), (0, 2), (1, 3), (2, 3))  # groups of a mesh of 2 x 2: (0, 2) is rank 0's second, and rank 2's first


def on_two_axes(communicator: Communicator) -> list[Tensor]:
    """Sums that are begun on the groups of two axes."""
    generator = torch.Generator().manual_seed(communicator.rank)
    sums = [(ranks, torch.randn(40000, generator=generator)) for ranks in TWO_AXES if communicator.rank in ranks]
    for pending in [communicator.start_all_reduce(tensor, ranks) for ranks, tensor in sums]:
        pending.wait()
    return [tensor for _, tensor in sums]


def unequal(communicator: Communicator) -> list[Tensor]:
    """Collectives in which ranks give and get tensors of unequal sizes, in two orders of the group."""
    results = []
    for ranks in (tuple(range(communicator.world_size)), tuple(reversed(range(communicator.world_size)))):
        here, count = ranks.index(communicator.rank), len(ranks)
        generator = torch.Generator().manual_seed(communicator.rank)
        rows = [(4 + 3 * i, 2) for i in range(count)]
        table = [[(1 + i, 2, 3 + j) for j in range(count)] for i in range(count)]
        results += communicator.all_gather(torch.randn(rows[here], generator=generator), ranks, rows)
        pieces = [torch.randn(shape, generator=generator) for shape in rows]
        results.append(communicator.reduce_scatter(pieces, ranks))
        pieces = [torch.randn(shape, generator=generator) for shape in table[here]]
        results += communicator.all_to_all(pieces, ranks, table)
    return results


def system_lets_read(communicator: Communicator) -> bool:
    """Return whether the system's own call reads a word of every rank's memory: what ours does is not asked."""
    everyone, mark = range(communicator.world_size), torch.tensor([4321])
    places = communicator.all_gather(torch.tensor([os.getpid(), mark.data_ptr()]), everyone)
    read = getattr(ctypes.CDLL(None), "process_vm_readv", None)
    word, words = torch.zeros_like(mark), ctypes.c_size_t * 2  # an iovec: where, and how many bytes
    found = read is not None and platform.machine() == "x86_64"
    for process, address in (place.tolist() for place in places if found):
        here, there = words(word.zero_().data_ptr(), 8), words(address, 8)
        found = found and read(process, here, 1, there, 1, 0) == 8 and int(word) == 4321
    return bool(communicator.all_reduce(torch.tensor([int(not found)]), everyone).item() == 0)


def over(communicator: Communicator, function: str, links: str) -> list[Tensor] | None:
    """A function of this file where tensors travel over "sockets", or by "memory" with rings of few slots. None: this
    system does not let ranks read each other's memory."""
    if links == "memory" and not system_lets_read(communicator):
        return None
    if links == "sockets":
        cross_memory_attach.is_possible = lambda: False
    cross_memory_attach._SLOTS, cross_memory_attach._SPANS = 8, 3
    groups = [g for g in TWO_AXES if max(g) < communicator.world_size]
    inner = GlooCommunicator(communicator.rank, communicator.world_size, torch.device("cpu"), groups=groups)
    assert inner._peers.reads_any(range(communicator.world_size)) == (links == "memory")
    found: list[Tensor] = globals()[function](inner)
    inner.close()
    return found


def sent(communicator: GlooCommunicator) -> list[bool]:
    """Return whether a message may arrive before it is waited for, and whether one is held, before and after it has
    been read: by rank 0, which sends it."""
    rank, key, found = communicator.rank, ("h", 0, 1, 0, "F"), [communicator.receives_ahead(1 - communicator.rank)]
    for runs in (0, 1):
        if rank == runs == 0:
            communicator.send(torch.ones(9), 1, key, lasting=True)
        elif rank == runs:
            communicator.recv((9,), torch.float32, 0, key)
        if runs:
            communicator.barrier((0, 1))  # it has been read
        communicator.let_go()
        found.append(bool(communicator._sent._sent))
        communicator.barrier((0, 1))  # before it is read
    return found


def many(communicator: Communicator) -> list[Tensor]:
    """Messages of all sizes, some in other orders than they are read in, and sums of two groups at once."""
    rank, world = communicator.rank, communicator.world_size
    generator, found = torch.Generator().manual_seed(rank), []
    for step in range(60):
        sizes, dtype = [0, 1, 7, 300, 20_001 * (step % 3)], [torch.float32, torch.bfloat16, torch.complex64][step % 3]
        for number, size in enumerate(sizes):
            given = torch.randn(size, generator=generator).to(dtype)
            communicator.send(given, (rank + 1) % world, ("h", number, step, "F"))
        begun = torch.randn(5000, generator=generator)
        pending = communicator.start_all_reduce(begun, range(world))
        for number, size in reversed(list(enumerate(sizes))):
            found.append(communicator.recv((size,), dtype, (rank - 1) % world, ("h", number, step, "F")))
        found.append(communicator.all_reduce(torch.randn(3, generator=generator), range(world)))
        pending.wait()
        found.append(begun)
        communicator.finish()
    return found


def without_tags(communicator: TorchCommunicator, pairs: list[tuple[int, int]]) -> list[Tensor]:
    """`every_call` on the communicator for NCCL, its groups made by gloo."""
    inner = NcclCommunicator(
        communicator.rank,
        communicator.world_size,
        torch.device("cpu"),
        groups=[(0, 1, 2), (2, 1)],
        pairs=pairs,
        backend="gloo",
    )
    if torch.__version__ < "2.12":
        torch.distributed.all_to_all = all_to_all_of_messages
    return every_call(inner)


def all_to_all_of_messages(received: list[Tensor], given: list[Tensor], group: torch.distributed.ProcessGroup) -> None:
    """Stand for torch's, which gloo of torch 2.11 does not make."""
    here = group.rank()
    received[here].copy_(given[here])
    others = [other for other in range(group.size()) if other != here]
    works = [group.recv([received[other]], other, 0) for other in others]
    for work in [*works, *(group.send([given[other]], other, 0) for other in others)]:
        work.wait()


def in_host_memory(communicator: Communicator, device: str = "cuda") -> list[Tensor]:
    """Collectives of host memory. Of torch's communicators it is the one for NCCL that makes them, for tensors on
    `device`; its group takes only what is on a GPU, as NCCL's do."""
    everyone, rank = tuple(range(communicator.world_size)), communicator.rank
    if isinstance(communicator, TorchCommunicator):
        communicator = NcclCommunicator(
            rank, len(everyone), torch.device(device), groups=[everyone], backend="cuda:gloo"
        )
    generator = torch.Generator().manual_seed(rank)
    results = collectives(communicator, everyone, generator)
    results.append(communicator.rotate(torch.randn(3, generator=generator), everyone))
    summed, part = torch.randn(40000, generator=generator), torch.empty(3)
    pieces, gathered = [torch.randn(3, generator=generator) for _ in everyone], [torch.empty(3) for _ in everyone]
    waiting = [
        communicator.start_all_gather(pieces[rank], gathered, everyone),
        communicator.start_reduce_scatter(pieces, part, everyone),
        communicator.start_all_reduce(summed, everyone),
    ]
    for pending in waiting:
        pending.wait()
    communicator.finish()
    return [*results, *gathered, part, summed]


def fail(communicator: Communicator, rank: int, how: str) -> None:
    """`rank` fails in a way; the others wait for it."""
    if communicator.rank == rank:
        if how == "raise":
            raise ValueError("this rank is the cause")
        if how == "exit":
            os._exit(7)
        os.kill(os.getpid(), signal.SIGSEGV)
    communicator.recv((2,), torch.float32, rank, ("never", 0, 1, 0, "F"))


def disagree(communicator: Communicator) -> None:
    """Rank 0 gathers what the others reduce."""
    if communicator.rank == 0:
        communicator.all_gather(torch.zeros(3), (0, 1))
    else:
        communicator.all_reduce(torch.zeros(3), (0, 1))


def loop_for_ever(communicator: Communicator) -> None:
    if communicator.rank == 1:
        while True:
            time.sleep(0.05)
    communicator.barrier((0, 1))


def sleep_beside_a_child(communicator: Communicator, folder: str) -> None:
    """Says the process ids of this rank and of a process that it started, and stays."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (Path(folder) / f"{communicator.rank}.pid").write_text(f"{os.getpid()} {child.pid}")
    time.sleep(600)
