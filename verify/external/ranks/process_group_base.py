"""Base class of our process groups of torch.distributed, which see each call that is made of them.

A subclass of `ProcessGroup`, for torch has no way to write a `Backend` in Python; its creator is given to
`Backend.register_backend`, and torch then takes what it returns as the group itself. Torch's C++ (functional
collectives, DDP) reaches these methods through virtual functions, Python by name. All of them come down to a
`CollectiveShare`, or to a message; how these travel is left to subclasses: threads that meet, or gloo.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nnscaler.runtime.communication.communicator import CommunicationCall
from verify.external.ranks.call_sites import phase, place_of_call
from verify.external.ranks.collective_semantics import CollectiveShare
from verify.external.ranks.torch_private import BACKEND, ProcessGroup, check_peer, current_worlds, premultiplier
from verify.external.ranks.unwaited_async_calls import BegunLines, BegunWork

Items = Sequence[Sequence[Tensor]]
Real = tuple[Any, ...]  # the name of a method of a group of torch, and its arguments without options

_REDUCING = ("all_reduce", "reduce", "reduce_scatter")
_ROOTED = ("broadcast", "reduce", "scatter", "gather")
_SUM = torch.distributed.ReduceOp.SUM


class AllWorks(BegunWork):
    """Several works as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        super().__init__(tensor for work in works for tensor in work.result())
        self._works = list(works)

    def wait(self, timeout: Any = None) -> bool:
        self.reached()
        for work in self._works:
            work.wait()
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


class RankGroup(ProcessGroup):  # type: ignore[misc]
    """One rank's view of a group.

    name     of the group in torch, equal on all its ranks
    place    of this rank in it
    members  its global ranks, in the order of the group
    """

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    def __init__(self, name: str, place: int, members: tuple[int, ...]) -> None:
        super().__init__(place, len(members))
        self.place = place
        self.members = members
        self.key = (name, members)
        self._coalesced: list[Any] | None = None
        self.begun = BegunLines()

    # -- for subclasses -----------------------------------------------------------------------------------------------

    def begin_collective(self, part: CollectiveShare, root: int | None, options: Any, real: Real) -> Any:
        """Begin a collective, and return its Work."""
        raise AssertionError("subclasses define this")

    def begin_message(self, call: CommunicationCall, tensor: Tensor, peer: int, tag: int) -> Any:
        """Begin to send or receive a message, and return its Work. `peer`: a place in the group, -1 for any."""
        raise AssertionError("subclasses define this")

    # -- what torch asks of a group -----------------------------------------------------------------------------------

    def rank(self) -> int:
        return self.place

    def size(self) -> int:
        return len(self.members)

    def name(self) -> str:
        return "gloo"

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return BACKEND  # not "gloo": DDP's logger would look for its devices

    def _get_backend_name(self) -> str:
        return "gloo"

    @property
    def group_name(self) -> Any:
        worlds = current_worlds()
        return self.key[0] if worlds is None else worlds.pg_names.get(self, self.key[0])

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    def _start_coalescing(self, device: torch.device) -> None:
        """Calls between this and the end of coalescing are made one by one; who waits at the end waits for all."""
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> Any:
        works, self._coalesced = self._coalesced or [], None
        return AllWorks(works)

    def shutdown(self) -> None:
        """Nothing to do: a group holds nothing that must be closed."""

    def abort(self) -> None:
        """Nothing to do: a group holds nothing that must be closed."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.key[0]}, rank {self.place} of {self.members})"

    # -- collectives --------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        return self._in_place("all_reduce", tensors, opts, "allreduce")

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        return self._in_place("all_reduce", tensors, opts, "allreduce_coalesced")

    def reduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        return self._in_place("reduce", tensors, opts, "reduce")

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        return self._in_place("broadcast", tensors, opts, "broadcast")

    def allgather(self, output_lists: Items, inputs: Sequence[Tensor], opts: Any = None) -> Any:
        real = ("allgather", output_lists, inputs)
        return self._collective("all_gather", [[i] for i in inputs], output_lists, opts, real)

    def allgather_coalesced(self, output_lists: Items, inputs: Sequence[Tensor], opts: Any = None) -> Any:
        real = ("allgather_coalesced", output_lists, inputs)
        per_input = list(zip(*output_lists, strict=True))  # one list for each rank, of a tensor for each input
        return self._collective("all_gather", [[i] for i in inputs], per_input, opts, real)

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Any:
        real = ("_allgather_base", output, given)
        return self._collective("all_gather", [[given]], [self._equal_parts(output)], opts, real)

    def all_gather_single_coalesced(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        real = ("allgather_into_tensor_coalesced", outputs, inputs)
        parts = [self._equal_parts(output) for output in outputs]
        return self._collective("all_gather", [[i] for i in inputs], parts, opts, real)

    def reduce_scatter(self, outputs: Sequence[Tensor], input_lists: Items, opts: Any = None) -> Any:
        real = ("reduce_scatter", outputs, input_lists)
        return self._collective("reduce_scatter", input_lists, [[output] for output in outputs], opts, real)

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Any:
        real = ("_reduce_scatter_base", output, given)
        return self._collective("reduce_scatter", [self._equal_parts(given)], [[output]], opts, real)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Any:
        real = ("reduce_scatter_tensor_coalesced", outputs, inputs)
        parts = [self._equal_parts(given) for given in inputs]
        return self._collective("reduce_scatter", parts, [[output] for output in outputs], opts, real)

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        return self._collective("all_to_all", [inputs], [outputs], opts, ("alltoall", outputs, inputs))

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
        real = ("alltoall_base", output, given, list(output_splits or []), list(input_splits or []))
        return self._collective("all_to_all", [pieces], [taken], opts, real)

    def scatter(self, outputs: Sequence[Tensor], input_lists: Items, opts: Any = None) -> Any:
        items = [[output] for output in outputs]
        return self._collective("scatter", input_lists, items, opts, ("scatter", outputs, input_lists))

    def gather(self, output_lists: Items, inputs: Sequence[Tensor], opts: Any = None) -> Any:
        items = [[given] for given in inputs]
        return self._collective("gather", items, output_lists, opts, ("gather", output_lists, inputs))

    def barrier(self, opts: Any = None) -> Any:
        return self._collective("barrier", [], [], opts, ("barrier",))

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
        return self._message("send", tensors, self.place, target, tag)

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> Any:
        return self._message("recv", tensors, source, self.place, tag)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> Any:
        return self._message("recv", tensors, -1, self.place, tag)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _message(self, kind: str, tensors: Sequence[Tensor], source: int, target: int, tag: int) -> Any:
        (tensor,) = tensors
        check_peer(max(source, target), len(self.members))
        ranks = (self.members[source] if source >= 0 else -1, self.members[target])
        place = place_of_call()
        call = CommunicationCall(
            kind, ranks, _shapes(tensors), tensor.dtype, key=(f"tag {tag}",), place=place, context=phase()
        )
        return self._begun(call, self.begin_message(call, tensor, target if kind == "send" else source, tag))

    def _in_place(self, kind: str, tensors: Sequence[Tensor], options: Any, name: str) -> Any:
        items = [[tensor] for tensor in tensors]
        return self._collective(kind, items, items, options, (name, tensors))

    def _collective(self, kind: str, inputs: Items, outputs: Items, options: Any, real: Real) -> Any:
        given = tuple(tuple(item) for item in inputs)
        taken = tuple(tuple(item) for item in outputs)
        tensors = [tensor for item in given or taken for tensor in item]
        reduction, factor = _reduction(getattr(options, "reduceOp", _SUM if kind in _REDUCING else None))
        root = getattr(options, "rootRank", 0) if kind in _ROOTED else None
        call = CommunicationCall(
            kind,
            self.members,
            _shapes(tensors),
            tensors[0].dtype if tensors else None,
            reduction,
            None if root is None else self.members[root],
            place=place_of_call(),
            context=phase(),
        )
        waits_now = getattr(options, "asyncOp", True) is False
        work = self._begun(
            call,
            self.begin_collective(
                CollectiveShare(self.members[self.place], call, given, taken, factor, not waits_now),
                root,
                options,
                real,
            ),
        )
        if waits_now:
            work.wait()
        return work

    def _begun(self, call: CommunicationCall, work: Any) -> Any:
        self.begun.note(call, work)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _equal_parts(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Divide a tensor's memory into equal parts for the ranks, as views of it."""
        size = len(self.members)
        if tensor.numel() % size:
            raise ValueError(f"a tensor of shape {list(tensor.shape)} does not divide into {size} equal parts")
        return tensor.detach().view(size, -1).unbind()


def _shapes(tensors: Sequence[Tensor]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(tensor.shape) for tensor in tensors)


def _reduction(operation: Any) -> tuple[str, float | Tensor]:
    """Return the name of a reduction of torch, and the factor of a sum of products."""
    if operation is None:
        return "", 1.0
    name = getattr(operation, "op", operation).name.lower()
    if name == "premul_sum":
        factor = premultiplier(operation)
        return f"{name} {factor}", factor
    return name, 1.0
