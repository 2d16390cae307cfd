"""From a URL, or a folder's name, to a store."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from echelon.core.errors import UserError
from echelon.storage.base import Store
from echelon.storage.local import LocalStore

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def is_url(text: str) -> bool:
    """Whether a text is a URL, and no folder's name.

    >>> is_url("s3://bucket/runs/a"), is_url("runs/a")
    (True, False)
    """
    return _URL.match(text) is not None


def check_url(text: str) -> str:
    """Return a URL without its last slash.

    Raises:
        UserError: it holds credentials, or options, or names nothing; it never says what the credentials are.
    """
    parts = urlsplit(text)
    shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    if "@" in parts.netloc and parts.scheme not in ("abfs", "abfss", "az"):
        raise UserError(f"{shown}: a URL is recorded: leave credentials out of it, they belong in the environment")
    if parts.password is not None or parts.query or parts.fragment:
        raise UserError(f"{shown}: a URL is recorded: leave out what follows ? and #, keys belong in the environment")
    if not (parts.netloc + parts.path).strip("/"):
        raise UserError(f"{shown} names no place: write it as s3://BUCKET/NAME")
    return text.rstrip("/")


def open_store(place: str) -> Store:
    """Return the store at a URL or in a folder; nothing is asked of it yet.

    Raises:
        UserError: the URL cannot be used, or a package for it is not installed.
    """
    if not is_url(place):
        return LocalStore(Path(place))
    url = check_url(place)
    if url.startswith(("file://", "local://")):
        return LocalStore(Path(unquote(urlsplit(url).path)))
    from echelon.storage.remote import RemoteStore

    return RemoteStore(url)
