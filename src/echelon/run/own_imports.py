"""What a command of ours imports sparingly: it ends with what it does, and nobody else is in its process."""

from __future__ import annotations

import importlib

from echelon.observe.environment import is_own_command


def import_metrics() -> None:
    """Import torchmetrics without what our tasks never use of it, which takes longer than torch; in a command alone."""
    if is_own_command():
        importlib.import_module("echelon.tasks.metrics_import")
