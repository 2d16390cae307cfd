"""Imported by the fork server last: it lets the process that started it know that it can fork now.

What was imported is frozen: a collection in a forked process would write to all of it, and so take a copy of its pages.
"""

from __future__ import annotations

import gc
import os

from echelon.launch.import_server import IMPORTS

gc.freeze()
gc.enable()
if IMPORTS >= 0:
    os.close(IMPORTS)
