"""The store in which the members of a term find each other: who waits in it stops when the term is over."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

_POLL_S = 0.002
_LOOKS_S = 0.02  # between looks whether the term is over


class TermStore(dist.Store):
    """A `torch.distributed` store that is another one, but for waits: these end with what `check_term` raises.

    Keep a reference to it for as long as a process group uses it: torch holds the C++ half alone.
    """

    def __init__(self, store: dist.Store, check_term: Callable[[], None], timeout: timedelta) -> None:
        """Take the store, and what raises an error once members are lost that would be waited for."""
        super().__init__()
        self._store, self._check_term, self._timeout = store, check_term, timeout

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        self._store.set(key, value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """Return a key's value, once it is there; raises what `wait` does."""
        self.wait([key])
        return self._store.get(key)

    def add(self, key: str, value: int) -> int:
        """Add to a key's number, 0 if it has none; returns the sum."""
        return self._store.add(key, value)

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Set a key if it has the expected value, or that is empty and it has none; returns what it has then."""
        return self._store.compare_set(key, expected_value, desired_value)  # type: ignore[arg-type]

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        return self._store.check(list(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there.

        Raises:
            DistStoreError: they were not, in time: one that is stopped, or so, is lost to this process.
        """
        limit = timeout or self._timeout
        began = looked = time.monotonic()
        while not self.check(keys):
            now = time.monotonic()
            if now - looked > _LOOKS_S:
                self._check_term()
                looked = now
            if now - began > limit.total_seconds():
                raise dist.DistStoreError(f"no member has set {', '.join(keys)} within {limit.total_seconds():g} s")
            time.sleep(_POLL_S)

    def delete_key(self, key: str) -> bool:
        """Remove a key; returns whether it was there."""
        return self._store.delete_key(key)

    def num_keys(self) -> int:
        """Count the keys."""
        return self._store.num_keys()

    deleteKey, getNumKeys = delete_key, num_keys

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long `get` and `wait` wait."""
        self._timeout = timeout

    def clone(self) -> TermStore:
        """Return this store."""
        return self
