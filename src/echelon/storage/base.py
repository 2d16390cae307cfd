"""What a store of files is: whole objects by key, and an object that is written only where its key is free."""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from echelon.core.errors import UserError
from echelon.core.patience import may_pass


@dataclass(frozen=True)
class StoredObject:
    """An object in a store.

    Attributes:
        n_bytes: its size; 0 also where the store does not say it.
        age_s: how long ago it was written; None: not known.
        tag: by which the store tells this content from another of the same key (ETag); empty: it does not.
    """

    key: str
    n_bytes: int
    age_s: float | None = None
    tag: str = ""


class Store(ABC):
    """Objects under one URL, by keys such as `data/abc/weights`.

    An object appears whole or not at all. Every method raises OSError: FileNotFoundError for a key that is not there,
    PermissionError where the store refuses, and one that `may_pass` where the store is away for now.

    Attributes:
        url: as it is shown; it holds no credentials.
    """

    url: str

    @abstractmethod
    def put(self, key: str, data: bytes | Path) -> None:
        """Write an object, from memory or from a file; one that is there is replaced."""

    @abstractmethod
    def create(self, key: str, data: bytes) -> None:
        """Write an object where there is none.

        Raises:
            FileExistsError: there is one. A store that ignores the condition replaces it.
        """

    @abstractmethod
    def get(self, key: str) -> bytes:
        """Return an object's content."""

    @abstractmethod
    def fetch(self, key: str, path: Path) -> None:
        """Write an object's content to a local file."""

    @abstractmethod
    def stat(self, key: str) -> StoredObject:
        """Return what is known of an object without its content."""

    @abstractmethod
    def list(self, prefix: str) -> list[StoredObject]:
        """Return the objects whose keys lie below `prefix`, a key's leading part that ends with `/`, by key."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove an object; one that is gone is none of our concern."""


class StoreAway(OSError):
    """A store does not answer, or not as it should: the same may work later."""

    def __init__(self, reason: str) -> None:
        """Take the reason, in words."""
        super().__init__(errno.EREMOTEIO, reason)


def refused_in_words(url: str, error: OSError) -> UserError:
    """Say why a store cannot be used, where waiting does not help."""
    reason = error.strerror or str(error) or type(error).__name__
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(
            f"{url}: {reason} on this machine, or in the folder that the URL names: free some, and try again"
        )
    hint = "; is it there, and are its credentials in the environment?" if not may_pass(error) else ""
    return UserError(f"{url} cannot be used: {' '.join(reason.split())}{hint}")
