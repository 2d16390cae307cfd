"""Any store that `fsspec` knows, by URL: s3, gs, az, memory, sftp. A request that is a coroutine has a deadline.

Credentials and endpoints are what each store's own client reads from the environment.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

from echelon.core.errors import UserError
from echelon.core.patience import may_pass
from echelon.storage.base import Store, StoreAway, StoredObject

_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "az": "az", "abfs": "az", "adl": "az"}
_LEAST_S = 60.0
_SLOWEST = 64 << 10  # bytes a second below which a store counts as away
_FINAL = (errno.EACCES, errno.EPERM, errno.EEXIST, errno.ENOENT, errno.EISDIR, errno.ENOTDIR)
_TAG_NAMES = ("ETag", "etag", "generation", "md5Hash", "content_md5", "Last-Modified")
_TIME_NAMES = ("LastModified", "last_modified", "updated", "created", "mtime")

R = TypeVar("R")


class RemoteStore(Store):
    """Objects below a URL of `fsspec`."""

    def __init__(self, url: str) -> None:
        """Take the URL.

        Raises:
            UserError: no package for it is installed, or fsspec does not know it.
        """
        import fsspec

        self.url = url.rstrip("/")
        protocol = url.partition("://")[0]
        try:
            options: dict[str, bool] = {"use_listings_cache": False, "skip_instance_cache": True}
            self._files, self._root = fsspec.core.url_to_fs(self.url, **options)
        except ImportError as error:
            extra = _EXTRAS.get(protocol)
            fix = f"pip install 'echelon[{extra}]'" if extra else f"install what it needs ({_in_words(error)})"
            raise UserError(f"{url}: the package for {protocol}:// is not installed: {fix}") from None
        except ValueError as error:
            raise UserError(f"{url}: {error}; such as s3://BUCKET/NAME, gs://, az://, file:///FOLDER") from None

    def put(self, key: str, data: bytes | Path) -> None:
        """Write an object, in parts where it is large."""
        if isinstance(data, Path):
            size = data.stat().st_size
            self._call("put_file", str(data), self._path(key), n_bytes=size)
        else:
            self._make_folder(key)
            self._call("pipe_file", self._path(key), data, n_bytes=len(data))

    def create(self, key: str, data: bytes) -> None:
        """Write an object on the condition that there is none (`If-None-Match: *`).

        Raises:
            FileExistsError: there is one.
        """
        self._make_folder(key)
        try:
            self._call("pipe_file", self._path(key), data, n_bytes=len(data), mode="create")
        except OSError as error:
            if _says_taken(error):
                raise FileExistsError(errno.EEXIST, "it is there already", key) from error
            raise

    def _make_folder(self, key: str) -> None:
        if not hasattr(self._files, "async_impl") or not self._files.async_impl:  # these may have real folders
            self._call("makedirs", self._path(key).rpartition("/")[0], exist_ok=True)

    def get(self, key: str) -> bytes:
        """Return an object's content."""
        content: bytes = self._call("cat_file", self._path(key))
        return content

    def fetch(self, key: str, path: Path) -> None:
        """Write an object's content to a local file."""
        size = int(self._call("info", self._path(key)).get("size") or 0)
        self._call("get_file", self._path(key), str(path), n_bytes=size)

    def stat(self, key: str) -> StoredObject:
        """Return an object's size, age and tag."""
        info: Mapping[str, Any] = self._call("info", self._path(key))
        if info.get("type") == "directory":
            raise FileNotFoundError(errno.ENOENT, "it is no object", key)
        return _stored(key, info, time.time())

    def list(self, prefix: str) -> list[StoredObject]:
        """Return the objects below a prefix."""
        folder = self._path(prefix).rstrip("/")
        try:
            found: Mapping[str, Mapping[str, Any]] = self._call("find", folder, detail=True)
        except FileNotFoundError:
            return []
        start, now = len(self._root.rstrip("/")) + 1, time.time()
        names = [(name.lstrip("/") if not self._root.startswith("/") else name, info) for name, info in found.items()]
        objects = [_stored(name[start:], info, now) for name, info in names]
        return sorted(objects, key=lambda each: each.key)

    def delete(self, key: str) -> None:
        """Remove an object."""
        try:
            self._call("rm_file", self._path(key))
        except FileNotFoundError:
            return

    def _path(self, key: str) -> str:
        return f"{self._root.rstrip('/')}/{key}"

    def _call(self, name: str, *args: Any, n_bytes: int = 0, **options: Any) -> Any:
        """Call a method of the file system; a coroutine is ended when its time is over.

        Raises:
            OSError: see `Store`.
        """
        deadline_s = _LEAST_S + n_bytes / _SLOWEST
        method = getattr(self._files, f"_{name}", None) if self._files.async_impl else None
        try:
            if method is None or not asyncio.iscoroutinefunction(method):
                return getattr(self._files, name)(*args, **options)
            return _within(deadline_s, self._files.loop, lambda: method(*args, **options))
        except FileNotFoundError as error:
            if _is_of_http(error.__cause__):  # `fsspec` says so of each server that does not answer
                raise _translated(error.__cause__) from error
            raise
        except (FileExistsError, PermissionError):
            raise
        except concurrent.futures.TimeoutError:
            raise StoreAway(f"no answer within {deadline_s:.0f} s") from None
        except OSError as error:
            if error.errno in _FINAL or may_pass(error):
                raise
            raise StoreAway(_in_words(error)) from error
        except UserError:
            raise
        except Exception as error:  # each client has errors of its own; what is not the caller's fault may pass
            raise _translated(error) from error


def _within(deadline_s: float, loop: asyncio.AbstractEventLoop, start: Callable[[], Any]) -> Any:
    future = asyncio.run_coroutine_threadsafe(start(), loop)
    try:
        return future.result(deadline_s)
    except concurrent.futures.TimeoutError:
        future.cancel()
        raise


def _is_of_http(error: BaseException | None) -> TypeGuard[Exception]:
    """Whether an error is of the client that `fsspec` reads web servers with."""
    return isinstance(error, Exception) and type(error).__module__.startswith("aiohttp")


def _translated(error: Exception) -> OSError:
    """Return a client's own error as an OSError: what names missing credentials or rights is final."""
    name = type(error).__name__
    if _is_of_http(error):
        status = getattr(error, "status", 0)
        if status in (404, 410):
            return FileNotFoundError(errno.ENOENT, _in_words(error))
        if 400 <= status < 500 and status not in (408, 425, 429):
            return PermissionError(errno.EACCES, _in_words(error))
    if any(word in name for word in ("Credential", "Auth", "Forbidden", "AccessDenied", "ParamValidation")):
        return PermissionError(errno.EACCES, _in_words(error))
    return StoreAway(_in_words(error))


def _says_taken(error: BaseException | None) -> bool:
    """Whether an error, or what it came from, is a store's 412: clients of `fsspec` translate that differently."""
    while error is not None:
        response = getattr(error, "response", None)
        code = response.get("Error", {}).get("Code") if isinstance(response, dict) else getattr(error, "code", None)
        if isinstance(error, FileExistsError) or str(code) in ("PreconditionFailed", "412"):
            return True
        error = error.__cause__
    return False


def _in_words(error: Exception) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(str(text).split())[:200]


def _stored(key: str, info: Mapping[str, Any], now: float) -> StoredObject:
    written = _written(info)
    told = [str(info[name]).strip('"') for name in _TAG_NAMES if info.get(name)] or [str(written or "")]
    age_s = None if written is None else max(0.0, now - written)
    return StoredObject(key, int(info.get("size") or 0), age_s, told[0])


def _written(info: Mapping[str, object]) -> float | None:
    """Return when an object was written, in unix seconds; None: not known."""
    for name in _TIME_NAMES:
        value = info.get(name)
        if isinstance(value, datetime):
            return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
        if isinstance(value, int | float):
            return float(value)
    return None
