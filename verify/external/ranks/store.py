"""A store of torch.distributed for ranks that are threads."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from verify.external.ranks.exchange import Exchange
from verify.external.ranks.places import place_of_call
from verify.external.ranks.torch_private import Store


class SimulatedStore(Store):  # type: ignore[misc]
    """The keys of a run, one view of them a thread: a rank that waits for a key is seen to wait."""

    def __init__(self, exchange: Exchange) -> None:
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
