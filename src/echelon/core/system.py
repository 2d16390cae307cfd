"""Where Echelon runs: asked before anything else is imported, for much of that exists on some systems alone."""

from __future__ import annotations

import os
import sys

_WITHOUT = {
    "win32": "Windows is not supported: use WSL 2, which is Linux",
    "cygwin": "Cygwin is not supported: use WSL 2",
}


def why_unsupported(platform: str = sys.platform, byte_order: str = sys.byteorder) -> str:
    """Return why nothing runs on a system, and what does instead; empty: it is supported, or may be.

    >>> why_unsupported("win32")
    'Windows is not supported: use WSL 2, which is Linux'
    >>> why_unsupported("linux", "big")
    'big-endian processors are not supported: files, messages and codecs are little-endian'
    """
    if platform in _WITHOUT:
        return _WITHOUT[platform]
    if byte_order != "little":
        return "big-endian processors are not supported: files, messages and codecs are little-endian"
    return "" if hasattr(os, "fork") else f"{platform} is not supported: its processes cannot fork; use Linux or macOS"
