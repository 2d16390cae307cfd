"""Where Echelon runs: asked before anything else is imported, for much of that exists on some systems alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

UNTRIED = "ECHELON_UNTRIED"  # set to 1: go on where Echelon was never tried
_SPINS, _WAIT_POLICY = "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"
_FEW_SPINS = "1000"  # a few tens of microseconds, where by itself a waiting thread turns for milliseconds
_WITHOUT = {
    "win32": "Windows is not supported: use WSL 2, which is Linux",
    "cygwin": "Cygwin is not supported: use WSL 2",
}

COMPILER = "torch._dynamo"
"""The module that torch.compile, `fully_shard` and recomputation import, for a third of the time of torch itself.

All other private names of torch are in `torch_compat`, which imports torch: a command that starts a run must not wait
for that only to say what its processes are to be forked from.
"""


def why_untried(what: str, instead: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return why nothing runs where Echelon was never tried, and what does instead; empty: the user tries it.

    >>> why_untried("macOS", "use Linux", {})
    'Echelon was never tried on macOS: use Linux, or set ECHELON_UNTRIED=1 to try it'
    >>> why_untried("macOS", "use Linux", {"ECHELON_UNTRIED": "1"})
    ''
    """
    if environment.get(UNTRIED) == "1":
        return ""
    return f"Echelon was never tried on {what}: {instead}, or set {UNTRIED}=1 to try it"


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
    if not hasattr(os, "fork"):
        return f"{platform} is not supported: its processes cannot fork; use Linux"
    return why_untried("macOS", "use Linux, a container has one") if platform == "darwin" else ""


def short_spins(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return what makes threads of one operator sleep soon while they wait for each other; empty: the user decides.

    Beside other programs the thread that is waited for may not be running, and whoever spins holds its core. OpenMP
    reads it when torch is imported.

    >>> short_spins({"OMP_WAIT_POLICY": "active"})
    {}
    >>> short_spins({})
    {'GOMP_SPINCOUNT': '1000'}
    """
    return {} if _SPINS in environment or _WAIT_POLICY in environment else {_SPINS: _FEW_SPINS}


@contextmanager
def short_spins_inside() -> Iterator[None]:
    """Let what is imported or started inside read `short_spins`; then this process's environment is as it was."""
    added = short_spins()
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
