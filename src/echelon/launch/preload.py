"""Workers are forked from a server process that has imported torch: (re)starting one takes no imports."""

from __future__ import annotations

import multiprocessing
from multiprocessing import forkserver


def start_import_server(modules: tuple[str, ...]) -> None:
    """Start the fork server, importing `modules` in the background; later calls do nothing.

    It runs beside the imports of the calling process, and ends when this process ends. Modules must not start threads
    or touch a GPU when imported.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(["echelon.launch.import_server", *modules])
    forkserver.ensure_running()
