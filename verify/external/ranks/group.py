"""A process group of torch.distributed whose ranks are threads of this process.

A subclass of `ProcessGroup`, for torch has no way to write a `Backend` in Python; its creator is given to
`Backend.register_backend`, and torch then takes what it returns as the group itself. Torch's C++ (functional
collectives, DDP) reaches these methods through virtual functions, Python by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from nnscaler.runtime.communication.communicator import CommunicationCall
from verify.external.ranks.answers import Part
from verify.external.ranks.exchange import Exchange, GroupKey, Message
from verify.external.ranks.places import place_of_call
from verify.external.ranks.torch_private import (
    BACKEND,
    ProcessGroup,
    Work,
    current_worlds,
    premultiplier,
)

Items = Sequence[Sequence[Tensor]]

_REDUCING = ("all_reduce", "reduce", "reduce_scatter")
_ROOTED = ("broadcast", "reduce", "scatter", "gather")
_SUM = torch.distributed.ReduceOp.SUM


class SimulatedWork(Work):  # type: ignore[misc]
    """A collective or message that was begun. `results`: the tensors that it writes."""

    def __init__(
        self,
        exchange: Exchange,
        call: CommunicationCall,
        ready: Callable[[], bool],
        results: Sequence[Tensor],
        source: Callable[[], int] = lambda: -1,
    ) -> None:
        super().__init__()
        self._exchange = exchange
        self._call = call
        self._ready = ready
        self._results = list(results)
        self._source = source

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._exchange.wait(self._call, self._ready)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._exchange.asked(self._call, self._ready)

    def is_success(self) -> bool:
        return self._ready()

    def exception(self) -> None:
        return None

    def result(self) -> list[Tensor]:
        return self._results

    def source_rank(self) -> int:
        return self._source()

    def _source_rank(self) -> int:
        return self._source()

    def get_future(self) -> Any:
        """Wait, and return a future that has its value: torch lets callbacks run in the thread that completes it."""
        self.wait()
        future: Any = torch.futures.Future()
        future.set_result(self._results)
        return future


class SimulatedGroup(ProcessGroup):  # type: ignore[misc]
    """One rank's view of a group. `members`: its global ranks, in the order of the group."""

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    def __init__(self, exchange: Exchange, name: str, place: int, members: tuple[int, ...]) -> None:
        super().__init__(place, len(members))
        self._exchange = exchange
        self._name = name
        self._place = place
        self._members = members
        self._key: GroupKey = (name, members)

    # -- what torch asks of a group -----------------------------------------------------------------------------------

    def rank(self) -> int:
        return self._place

    def size(self) -> int:
        return len(self._members)

    def name(self) -> str:
        return "gloo"

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return BACKEND  # not "gloo": DDP's logger would look for its devices

    def _get_backend_name(self) -> str:
        return "gloo"

    @property
    def group_name(self) -> Any:
        worlds = current_worlds()
        world = worlds.current() if worlds is not None else None
        return self._name if world is None else world.pg_names.get(self, self._name)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    def _start_coalescing(self, device: torch.device) -> None:
        """Nothing to do: calls between this and the end of coalescing are made one by one."""

    def _end_coalescing(self, device: torch.device) -> Any:
        return self._done()

    def shutdown(self) -> None:
        """Nothing to do: a group holds nothing that must be closed."""

    def abort(self) -> None:
        """Nothing to do: a group holds nothing that must be closed."""

    def __repr__(self) -> str:
        return f"SimulatedGroup({self._name}, rank {self._place} of {self._members})"

    # -- collectives --------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        items = [[tensor] for tensor in tensors]
        return self._collective("all_reduce", items, items, opts)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        items = [[tensor] for tensor in tensors]
        return self._collective("reduce", items, items, opts)

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        items = [[tensor] for tensor in tensors]
        return self._collective("broadcast", items, items, opts)

    def allgather(self, output_lists: Items, inputs: Sequence[Tensor], opts: Any = None) -> Any:
        return self._collective("all_gather", [[i] for i in inputs], output_lists, opts)

    def allgather_coalesced(self, output_lists: Items, inputs: Sequence[Tensor], opts: Any = None) -> Any:
        per_input = list(zip(*output_lists, strict=True))  # one list for each rank, of a tensor for each input
        return self.allgather(per_input, inputs, opts)

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Any:
        return self.all_gather_single_coalesced([output], [given], opts)

    def all_gather_single_coalesced(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        return self.allgather([self._equal_parts(output) for output in outputs], inputs, opts)

    def reduce_scatter(self, outputs: Sequence[Tensor], input_lists: Items, opts: Any = None) -> Any:
        return self._collective("reduce_scatter", input_lists, [[output] for output in outputs], opts)

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Any:
        return self.reduce_scatter_single_coalesced([output], [given], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Any:
        return self.reduce_scatter(outputs, [self._equal_parts(given) for given in inputs], opts)

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        return self._collective("all_to_all", [inputs], [outputs], opts)

    def all_to_all_single(
        self,
        output: Tensor,
        given: Tensor,
        output_splits: Sequence[int] | None,
        input_splits: Sequence[int] | None,
        opts: Any = None,
    ) -> Any:
        taken = output.split(list(output_splits)) if output_splits else self._equal_parts(output)
        pieces = given.split(list(input_splits)) if input_splits else self._equal_parts(given)
        return self.alltoall(taken, pieces, opts)

    def scatter(self, outputs: Sequence[Tensor], input_lists: Items, opts: Any = None) -> Any:
        items = [[output] for output in outputs]
        return self._collective("scatter", input_lists, items, opts)

    def gather(self, output_lists: Items, inputs: Sequence[Tensor], opts: Any = None) -> Any:
        return self._collective("gather", [[i] for i in inputs], output_lists, opts)

    def barrier(self, opts: Any = None) -> Any:
        return self._collective("barrier", [], [], opts)

    # the names of torch before 2.13
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks, as `barrier` does: a rank that does not come is a deadlock here."""
        self.barrier().wait()

    # -- messages -----------------------------------------------------------------------------------------------------

    def send(self, tensors: Sequence[Tensor], target: int, tag: int) -> Any:
        (tensor,) = tensors
        self._check_thread()
        call = self._message("send", tensor, self._place, target, tag)
        message = Message(call, tensor, self._place)
        self._exchange.send(self._key, self._place, target, tag, message)
        return SimulatedWork(self._exchange, call, lambda: message.done, tensors)

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> Any:
        (tensor,) = tensors
        self._check_thread()
        call = self._message("recv", tensor, source, self._place, tag)
        message = Message(call, tensor, source)
        self._exchange.receive(self._key, self._place, tag, message)
        return SimulatedWork(self._exchange, call, lambda: message.done, tensors, lambda: message.source)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> Any:
        return self.recv(tensors, -1, tag)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _message(self, kind: str, tensor: Tensor, source: int, target: int, tag: int) -> CommunicationCall:
        ranks = (self._members[source] if source >= 0 else -1, self._members[target])
        return CommunicationCall(
            kind, ranks, (tuple(tensor.shape),), tensor.dtype, key=(f"tag {tag}",), place=place_of_call()
        )

    def _collective(self, kind: str, inputs: Items, outputs: Items, options: Any) -> Any:
        self._check_thread()
        given = tuple(tuple(item) for item in inputs)
        taken = tuple(tuple(item) for item in outputs)
        tensors = [tensor for item in given or taken for tensor in item]
        reduction, factor = _reduction(getattr(options, "reduceOp", _SUM if kind in _REDUCING else None))
        root = getattr(options, "rootRank", 0 if kind in _ROOTED else None)
        call = CommunicationCall(
            kind,
            self._members,
            tuple(tuple(tensor.shape) for tensor in tensors),
            tensors[0].dtype if tensors else None,
            reduction,
            self._members[root] if root is not None else None,
            place=place_of_call(),
        )
        waits_now = getattr(options, "asyncOp", True) is False
        part = Part(call, given, taken, factor, not waits_now)
        meeting = self._exchange.begin(self._key, self._place, part, root if root is not None else 0)
        results = [tensor for item in taken for tensor in item]
        work = SimulatedWork(self._exchange, call, lambda: meeting.done, results)
        if waits_now:
            work.wait()
        return work

    def _equal_parts(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Divide a tensor's memory into equal parts for the ranks, as views of it."""
        size = len(self._members)
        if tensor.numel() % size:
            raise ValueError(f"a tensor of shape {list(tensor.shape)} does not divide into {size} equal parts")
        return tensor.detach().view(size, -1).unbind()

    def _done(self) -> SimulatedWork:
        call = CommunicationCall("barrier", self._members, place=place_of_call())
        return SimulatedWork(self._exchange, call, lambda: True, [])

    def _check_thread(self) -> None:
        turn = self._exchange.turns.here()
        if turn is None or turn.rank != self._members[self._place]:
            who = "no rank's thread" if turn is None else f"rank {turn.rank}"
            raise RuntimeError(f"the group of rank {self._members[self._place]} is used on {who}")


def _reduction(operation: Any) -> tuple[str, float | Tensor]:
    """Return the name of a reduction of torch, and the factor of a sum of products."""
    if operation is None:
        return "", 1.0
    name = getattr(operation, "op", operation).name.lower()
    if name == "premul_sum":
        factor = premultiplier(operation)
        return f"{name} {factor}", factor
    return name, 1.0
