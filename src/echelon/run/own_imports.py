"""What is imported sparingly where nobody else is in the process to see it: in a command, or a script of one thread."""

from __future__ import annotations

import importlib
import threading

from echelon.observe.environment import is_own_command


def import_metrics() -> None:
    """Import torchmetrics without what our tasks never use of it, which takes longer than torch and 65 MB.

    For that moment other modules stand for scipy's and transformers', which another thread of the caller's could see.
    """
    if is_own_command() or threading.active_count() == 1:
        importlib.import_module("echelon.tasks.metrics_import")
