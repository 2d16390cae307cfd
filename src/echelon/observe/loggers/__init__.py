"""Loggers: files of this folder that say `LOGGER = ...`, each a service that draws a run's curves."""

from __future__ import annotations

import ast
import importlib.util

from echelon.core.errors import UserError, naming
from echelon.core.registry import Registry

LOGGERS = Registry("echelon.observe.loggers", "logger", "LOGGER")
FLAG = "--logger"


def check_loggers(text: str) -> None:
    """Refuse loggers that do not exist, or whose package is not there, without importing any.

    Raises:
        UserError: names the nearest logger, or how its package is installed.
    """
    with naming(FLAG):
        specs = LOGGERS.chain(text) if text.strip() else []
        names = [spec.name for spec in specs]
        for spec in specs:
            LOGGERS.check(spec)
            package = ast.literal_eval(LOGGERS.declaration(spec.name).constants["package"])
            if importlib.util.find_spec(package) is None:
                raise UserError(f"{FLAG} {spec.name} needs the package {package}: pip install 'echelon[{spec.name}]'")
            if names.count(spec.name) > 1:
                raise UserError(f"{FLAG} {text}: {spec.name} is named twice")
