"""What all machines of a run must have alike."""

from __future__ import annotations

import platform
from importlib.metadata import version


def versions() -> dict[str, str]:
    """Return the versions that all machines of a run must share."""
    packages = {name: version(name) for name in ("echelon", "torch")}
    return {**packages, "Python": ".".join(platform.python_version_tuple()[:2])}
