"""Groups and stores of torch.distributed whose ranks are threads of this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor

from nnscaler.runtime.communication.communicator import CommunicationCall
from verify.external.ranks.call_sites import place_of_call
from verify.external.ranks.collective_semantics import CollectiveShare
from verify.external.ranks.process_group_base import RankGroup, Real
from verify.external.ranks.threads.exchange import MessageEnd, ThreadExchange
from verify.external.ranks.torch_private import Store
from verify.external.ranks.unwaited_async_calls import BegunWork


class SimulatedWork(BegunWork):
    """A collective or message that was begun."""

    def __init__(
        self,
        exchange: ThreadExchange,
        call: CommunicationCall,
        ready: Callable[[], bool],
        results: Sequence[Tensor],
        source: Callable[[], int] = lambda: -1,
    ) -> None:
        super().__init__(results)
        self._exchange = exchange
        self._call = call
        self._ready = ready
        self._source = source

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.reached()
        self._exchange.wait(self._call, self._ready)
        return True

    def is_completed(self) -> bool:
        self.reached()
        return self._exchange.asked(self._call, self._ready)

    def is_success(self) -> bool:
        self.reached()
        return self._ready()

    def exception(self) -> None:
        return None

    def _source_rank(self) -> int:
        return self._source()


class SimulatedGroup(RankGroup):
    """A group whose ranks meet in an exchange."""

    def __init__(self, exchange: ThreadExchange, name: str, place: int, members: tuple[int, ...]) -> None:
        super().__init__(name, place, members)
        self._exchange = exchange
        exchange.begun.append(self.begun)

    def begin_collective(self, part: CollectiveShare, root: int | None, options: Any, real: Real) -> SimulatedWork:
        self._check_thread()
        meeting = self._exchange.begin(self.key, self.place, part, root)
        results = [tensor for item in part.outputs for tensor in item]
        return SimulatedWork(self._exchange, part.call, lambda: meeting.done, results)

    def begin_message(self, call: CommunicationCall, tensor: Tensor, peer: int, tag: int) -> SimulatedWork:
        self._check_thread()
        if call.kind == "send":
            message = MessageEnd(call, tensor, self.place)
            self._exchange.send(self.key, peer, tag, message)
        else:
            message = MessageEnd(call, tensor, peer)
            self._exchange.receive(self.key, self.place, tag, message)
        return SimulatedWork(self._exchange, call, lambda: message.done, [tensor], lambda: message.source)

    def _check_thread(self) -> None:
        turn = self._exchange.turns.here()
        if turn is None or turn.rank != self.members[self.place]:
            who = "no rank's thread" if turn is None else f"rank {turn.rank}"
            raise RuntimeError(f"the group of rank {self.members[self.place]} is used on {who}")


class SimulatedStore(Store):  # type: ignore[misc]
    """The keys of a run, one view of them a thread: a rank that waits for a key is seen to wait."""

    def __init__(self, exchange: ThreadExchange) -> None:
        super().__init__()
        self._exchange = exchange

    def set(self, key: str, value: str | bytes) -> None:
        with self._exchange.turns.lock:
            self._exchange.store[key] = _bytes(value)
            self._exchange.turns.poke()

    def get(self, key: str) -> bytes:
        self._wait([key], "get")
        return self._exchange.store[key]

    def add(self, key: str, amount: int) -> int:
        with self._exchange.turns.lock:
            value = int(self._exchange.store.get(key, b"0")) + amount
            self._exchange.store[key] = str(value).encode()
            self._exchange.turns.poke()
        return value

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._wait(keys, "wait")

    def check(self, keys: Sequence[str]) -> bool:
        place = place_of_call()
        return self._exchange.asked(f"store.check({', '.join(keys)}) at {place}", lambda: self._has(keys))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        with self._exchange.turns.lock:
            store = self._exchange.store
            if key not in store and _bytes(expected):
                return _bytes(expected)
            if store.get(key, b"") == _bytes(expected):
                store[key] = _bytes(desired)
                self._exchange.turns.poke()
            return store[key]

    def delete_key(self, key: str) -> bool:
        with self._exchange.turns.lock:
            return self._exchange.store.pop(key, None) is not None

    def num_keys(self) -> int:
        return len(self._exchange.store)

    def append(self, key: str, value: str | bytes) -> None:
        with self._exchange.turns.lock:
            self._exchange.store[key] = self._exchange.store.get(key, b"") + _bytes(value)
            self._exchange.turns.poke()

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        """Nothing to do: what never comes is seen, not waited for."""

    def clone(self) -> SimulatedStore:
        return SimulatedStore(self._exchange)

    def _has(self, keys: Sequence[str]) -> bool:
        return all(key in self._exchange.store for key in keys)

    def _wait(self, keys: Sequence[str], name: str) -> None:
        self._exchange.wait(f"store.{name}({', '.join(keys)}) at {place_of_call()}", lambda: self._has(keys))


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
