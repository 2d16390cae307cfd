"""Imported by the fork server last: it lets the process that started it know that it can fork now."""

from __future__ import annotations

import os

from echelon.launch.import_server import IMPORTS

if IMPORTS >= 0:
    os.close(IMPORTS)
