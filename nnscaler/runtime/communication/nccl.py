"""The communicator over NCCL: native collectives, and messages whose order the sender announces.

NCCL's messages carry no tag: what a rank receives from another is what that one sent next. The sender therefore
announces each message (its key, shape and dtype) through the host, in order and without waiting; a receiver that wants
one message takes those before it as well and keeps them until they are asked for. Each direction between two ranks has
a group of its own, so that two ranks that send to each other do not wait for each other on the GPU.

NCCL needs a group to be made by every rank of the job in the same order, hence before the program runs. What was not
foreseen goes through host memory, by the communicator over gloo: slower, but it cannot hang on a group. So does what
lies in host memory, such as the shapes on which ranks agree before a step: NCCL takes none of it.
"""

from __future__ import annotations

from ast import literal_eval
from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from nnscaler.runtime.communication.communicator import CommunicationCall, CommunicationError, Communicator, Key
from nnscaler.runtime.communication.gloo import GlooCommunicator
from nnscaler.runtime.communication.torch_communicator_base import Reporter, neighbours

_ANNOUNCEMENT = 1024  # bytes
_ANNOUNCE_TAG = 1
Pair = tuple[int, int]


class NcclCommunicator(GlooCommunicator):
    """One rank of a process group "cpu:gloo,cuda:nccl" (torch.distributed's default one).

    groups: rank tuples of collectives; pairs: (source, destination) of messages. Every rank of the job gives the same
    ones, its own and others', and all ranks make the communicator together.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        device: torch.device,
        reporter: Reporter | None = None,
        *,
        groups: Sequence[Sequence[int]] = (),
        pairs: Sequence[Pair] = (),
        backend: str = "nccl",
    ) -> None:
        super().__init__(rank, world_size, device, reporter)
        self._on_gpu: dict[tuple[int, ...], ProcessGroup] = {}  # by ascending ranks
        self._pairs: dict[Pair, ProcessGroup] = {}
        self._pending: deque[tuple[torch.distributed.Work, Tensor]] = deque()  # sends, and the memory that they read
        self._arrived: dict[tuple[int, Key], deque[Tensor]] = {}
        for members in sorted({tuple(sorted(group)) for group in groups if len(group) > 1}):
            group = self._new_group(members, backend)
            if rank in members:
                self._on_gpu[members] = group
        for pair in sorted({pair for pair in pairs if pair[0] != pair[1]}):
            group = self._new_group((min(pair), max(pair)), backend)
            if rank in pair:
                self._connect(pair, group)

    def _connect(self, pair: Pair, group: ProcessGroup) -> None:
        """Send a first message, so that NCCL connects now, where both sides are known to be."""
        with self._inside(f"connects ranks {pair[0]} -> {pair[1]}"):
            probe = torch.zeros(1, device=self.device)
            if self.rank == pair[0]:
                group.send([probe], _position(pair[1], pair), 0).wait()
            else:
                group.recv([probe], _position(pair[0], pair), 0).wait()
        self._pairs[pair] = group

    def _nccl(self, call: CommunicationCall, tensors: Sequence[Tensor]) -> ProcessGroup | None:
        """Return the group that carries a call with these tensors; None: it goes through host memory, on every rank."""
        here = all(tensor.device.type == self.device.type for tensor in tensors)
        return self._on_gpu.get(tuple(sorted(call.ranks))) if here else None

    # -- what is begun: NCCL has a stream of its own for each group ------------------------------------------------

    def _begin(self, call: CommunicationCall, given: list[Tensor], into: list[Tensor]) -> Callable[[], None]:
        if call.kind == "recv" and (call.ranks[0], self.rank) in self._pairs:
            return Communicator._begin(self, call, given, into)  # of a pair, in the order of the sender
        group = self._nccl(call, [*given, *into])
        if group is None:
            return super()._begin(call, given, into)
        given, arriving = [_carried(t) for t in given], [_carried(t).contiguous() for t in into]
        start = torch.distributed
        with self._inside(call):
            if call.kind == "all_reduce":
                work = start.all_reduce(arriving[0], _operation(call), group, async_op=True)
            elif call.kind == "reduce_scatter":
                pieces = _in_group_order(given, call.ranks)
                work = start.reduce_scatter(arriving[0], pieces, _operation(call), group, async_op=True)
            else:
                work = start.all_gather(_in_group_order(arriving, call.ranks), given[0], group, async_op=True)

        def wait() -> None:
            with self._inside(call):
                work.wait()
            for found, place in zip(arriving, into, strict=True):
                if found.data_ptr() != place.data_ptr():
                    place.copy_(_restored(found, place.dtype))

        return wait

    # -- collectives ----------------------------------------------------------------------------------------------

    def _collective(self, call: CommunicationCall, given: list[Tensor]) -> list[Tensor]:
        group = self._nccl(call, given)
        if group is None:
            return super()._collective(call, given)
        with self._inside(call):
            found = self._of_group(call, given, group)
            return [tensor if call.dtype is None else _restored(tensor, call.dtype) for tensor in found]

    def _of_group(self, call: CommunicationCall, given: list[Tensor], group: ProcessGroup) -> list[Tensor]:
        """Return the results of a group's own collective, as they are carried."""
        native, carried, members = torch.distributed, [_carried(tensor) for tensor in given], sorted(call.ranks)
        if call.kind == "all_reduce":
            total = carried[0].clone()
            native.all_reduce(total, _operation(call), group)
            return [total]
        if call.kind == "broadcast":
            result = carried[0].clone()
            assert call.source is not None
            native.broadcast(result, call.source, group)
            return [result]
        if call.kind == "reduce_scatter":
            pieces = _in_group_order(carried, call.ranks)
            result = torch.empty_like(pieces[members.index(self.rank)])
            native.reduce_scatter(result, pieces, _operation(call), group)
            return [result]
        if call.kind == "rotate":
            before, after = neighbours(call.ranks, self.rank)
            arriving = _carried(given[0].new_empty(call.arriving(self.rank)[0]))
            sides = [
                native.P2POp(native.isend, carried[0], after, group),
                native.P2POp(native.irecv, arriving, before, group),
            ]
            for work in native.batch_isend_irecv(sides):  # both sides at once: ranks that wait in turn would all wait
                work.wait()
            return [arriving]
        if call.kind == "barrier":
            token = torch.zeros(1, device=self.device)
            native.all_reduce(token, ReduceOp.SUM, group)
            token.item()  # the call above only put work on the GPU; reading its result waits for it
            return []
        there = dict(zip(call.ranks, call.arriving(self.rank), strict=True))
        results = [_carried(given[0].new_empty(there[rank])) for rank in members]
        if call.kind == "all_gather":
            native.all_gather(results, carried[0], group)
        else:
            native.all_to_all(results, _in_group_order(carried, call.ranks), group)
        return _in_axis_order(results, call.ranks)

    # -- messages -------------------------------------------------------------------------------------------------

    def _send(self, tensor: Tensor, call: CommunicationCall) -> None:
        destination = call.ranks[1]
        group = self._pairs.get((self.rank, destination))
        if group is None:
            super()._send(tensor, call)
            return
        with self._inside(call):
            announcement = _announcement(call)
            self._pending.append((self._world.send([announcement], destination, _ANNOUNCE_TAG), announcement))
            if tensor.numel():
                content = _carried(tensor).to(self.device, copy=True)
                self._pending.append((group.send([content], _position(destination, call.ranks), 0), content))

    def _recv(self, call: CommunicationCall) -> Tensor:
        source = call.ranks[0]
        group = self._pairs.get((source, self.rank))
        if group is None:
            return super()._recv(call)
        place = (source, call.key)
        with self._inside(call):
            while not self._arrived.get(place):
                key, content = self._next_message(source, group)
                self._arrived.setdefault((source, key), deque()).append(content)
        waiting = self._arrived[place]
        tensor = waiting.popleft()
        if not waiting:
            del self._arrived[place]
        if tuple(tensor.shape) != call.shapes[0] or tensor.dtype != call.dtype:
            arrived = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
            raise CommunicationError(f"rank {self.rank}: {call}: the message that arrived is {arrived}")
        return tensor

    def _next_message(self, source: int, group: ProcessGroup) -> tuple[Key, Tensor]:
        header = torch.empty(_ANNOUNCEMENT, dtype=torch.uint8)
        self._world.recv([header], source, _ANNOUNCE_TAG).wait()
        key, shape, dtype = _read_announcement(header)
        content = _carried(torch.empty(shape, dtype=dtype, device=self.device))
        if content.numel():
            group.recv([content], _position(source, (source, self.rank)), 0).wait()
        return key, _restored(content, dtype)

    def finish(self) -> None:
        super().finish()
        with self._inside("waits until its messages are taken"):
            while self._pending:
                self._pending[0][0].wait()
                self._pending.popleft()


def _position(rank: int, pair: tuple[int, ...]) -> int:
    """Return the number of `rank` in the torch group of two ranks, which is sorted."""
    return sorted(pair).index(rank)


_CARRIED = {  # dtypes that NCCL does not know, and those that hold them and their sums
    torch.bool: torch.uint8,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
}


def _carried(tensor: Tensor) -> Tensor:
    """Return the tensor in a dtype that NCCL knows; of complex numbers a view, so that what arrives there is in it."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    return tensor.to(_CARRIED.get(tensor.dtype, tensor.dtype))


def _restored(carried: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what was carried, in its own dtype."""
    return torch.view_as_complex(carried) if dtype.is_complex else carried.to(dtype)


def _operation(call: CommunicationCall) -> ReduceOp.RedOpType:
    """Return the reduction; the sum of truths is whether any is, and 256 of them are more than a byte holds."""
    return ReduceOp.MAX if call.reduction == "max" or call.dtype == torch.bool else ReduceOp.SUM


def _in_axis_order(results: list[Tensor], ranks: tuple[int, ...]) -> list[Tensor]:
    """Reorder tensors from the order of a torch group, which is sorted, to the order of the axis."""
    members = sorted(ranks)
    return [results[members.index(rank)] for rank in ranks]


def _in_group_order(pieces: list[Tensor], ranks: tuple[int, ...]) -> list[Tensor]:
    return [pieces[ranks.index(rank)] for rank in sorted(ranks)]


def _announcement(call: CommunicationCall) -> Tensor:
    """Key, shape and dtype as text of fixed size."""
    text = repr((call.key, call.shapes[0], str(call.dtype).removeprefix("torch."))).encode()
    if len(text) > _ANNOUNCEMENT:
        raise CommunicationError(f"{call}: the key is longer than {_ANNOUNCEMENT} bytes")
    return torch.frombuffer(bytearray(text.ljust(_ANNOUNCEMENT)), dtype=torch.uint8)


def _read_announcement(header: Tensor) -> tuple[Key, tuple[int, ...], torch.dtype]:
    key, shape, dtype = literal_eval(bytes(header.tolist()).decode().strip())
    return key, shape, getattr(torch, dtype)
