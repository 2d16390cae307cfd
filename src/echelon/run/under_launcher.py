"""Runs that torchrun (or another launcher) started: all ranks agree on one run folder."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from torch.distributed import Store, TCPStore

from echelon.config import RunConfig
from echelon.core.errors import UserError
from echelon.trainer.folder import CONFIG_FILE, create, default_folder

_WAIT = timedelta(seconds=60)


def agree_on_folder(config: RunConfig) -> Path:
    """Return the run's folder: rank 0 makes it and tells the others; a restarted group goes on in the same one.

    Raises:
        UserError: rank 0 could not make the folder.
    """
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    key = "echelon/folder"
    store = _launcher_store()
    if int(os.environ["RANK"]) != 0:
        name = store.get(key).decode()
        if not name:
            raise UserError("rank 0 could not make the run's folder")
        return Path(name)
    if restarted and store.check([key]):
        return Path(store.get(key).decode())
    try:
        path = Path(config.run) if config.run else default_folder(config)
        if not (restarted and (path / CONFIG_FILE).exists()):
            create(path, replace(config, run=str(path)))
    except UserError:
        store.set(key, "")
        raise
    store.set(key, str(path))
    return path


def _launcher_store() -> Store:
    """Connect to the store that the launcher keeps.

    Raises:
        UserError: the launcher keeps none.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise UserError(
            "RANK and WORLD_SIZE are set but no launcher's store was found: start with torchrun, or unset them"
        )
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(host, port, is_master=False, timeout=_WAIT, wait_for_workers=False)
