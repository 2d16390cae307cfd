"""Files that a trained model is written to, one file of code a format; suffixes are known without an import."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.run.export_names import export_format

if TYPE_CHECKING:
    from echelon.inference.exports.base import ExportFormat


def format_of(path: Path) -> ExportFormat:
    """Return the format that a file's suffix names.

    Raises:
        UserError: no format has it.
    """
    module, _, kind = export_format(path).partition(":")
    built: ExportFormat = getattr(importlib.import_module(f"{__name__}.{module}"), kind)()
    return built
