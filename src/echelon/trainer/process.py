"""How a process of a run logs, names an error in one line, and leaves."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from torch.distributed import DistError

from echelon.collectives.transfer import PeerLostError
from echelon.core.errors import UserError
from echelon.core.patience import may_pass
from echelon.observe.oom import OUT_OF_MEMORY
from echelon.observe.stacks import circumstances
from echelon.ps.worker_state import ClientFailed
from echelon.records.events import Event
from echelon.records.file import Recorder

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_KEPT, _LARGEST = 128 << 20, 32 << 20  # bytes; glibc gets to the second by itself once such a block was freed
_LIMITS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")
_NO_MEMORY = ("can't allocate memory", "cannot allocate memory", "out of memory")
_COMMUNICATION = (
    "gloo", "NCCL", "ProcessGroup", "Connection closed by peer", "Connection reset by peer",
    "Application timeout caused pair closure",
)  # fmt: skip
_LESS_MEMORY = (
    "divide the model with --parallel fsdp=N, tp=N or pp=N, or use --on-oom halve, --recompute blocks or a smaller "
    "--batch-size; --dry-run predicts what each rank needs"
)


def leave(code: int) -> NoReturn:
    """End this process at once with an exit code, its output and log written."""
    sys.stdout.flush()
    logging.shutdown()
    os._exit(code)


def one_line(error: BaseException) -> str:
    """Return an error, its notes, where the user's own code raised it, and what may help, in one line."""
    where = circumstances(error)
    said = " ".join(str(error).split()).partition(" This is typically caused by")[0]  # gloo's guesses help nobody
    text = f"{type(error).__name__}: {said}"[:400]
    if is_out_of_memory(error):
        short = text.partition(" Error code")[0][:200]
        text = f"{OUT_OF_MEMORY} ({short}): {_LESS_MEMORY}"
    return f"{text} ({where})" if where else text


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there is not enough memory, of the machine or of a GPU."""
    said = str(error).lower()
    return isinstance(error, MemoryError) or any(words in said for words in _NO_MEMORY)


def is_lost_wait(error: BaseException) -> bool:
    """Whether an error says that other processes did not answer in time, or are gone.

    >>> is_lost_wait(RuntimeError("Application timeout caused pair closure"))  # of gloo, which does not say its name
    True
    """
    return isinstance(error, (DistError, PeerLostError, ClientFailed)) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in _COMMUNICATION)
    )


def place_of(error: BaseException) -> str:
    """Return where in the code an error was raised; empty where the same may work later: it is no fault of the code.

    >>> place_of(TimeoutError("a peer"))
    ''
    """
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or may_pass(error) or isinstance(error, TimeoutError | ConnectionError) or is_lost_wait(error):
        return ""
    return f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}"


def record_last(path: Path, *events: Event) -> None:
    """Record what ends this process; where the disk takes nothing it is logged, and the launcher finds out as well."""
    if not events:
        return
    try:
        record = Recorder(path, patience_s=0.0)
        for event in events:
            record.write(event)
        record.close()
    except (UserError, OSError):
        logging.exception("the record of this run cannot be written: %s", "; ".join(e.message for e in events))


class _LogFile(logging.FileHandler):
    """A log whose lines wait in the stream's buffer, or are lost, while the disk takes nothing."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Say nothing of a disk that takes nothing: the run's patience tells of it, once."""
        error = sys.exc_info()[1]
        if error is None or not may_pass(error):
            super().handleError(record)


def log_to(file: Path) -> None:
    """Send this process's log to a file of its rank; warnings too."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handlers = [_LogFile(file)]
    logging.basicConfig(
        handlers=handlers, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", force=True
    )
    logging.captureWarnings(True)


def keep_freed_memory(environment: Mapping[str, str] = os.environ) -> bool:
    """Let this process keep up to 128 MB of what it has freed, for what it asks for next; returns whether it will.

    Gradients and temporaries come and go with each step. glibc gives them back to the system and takes them anew, page
    by page: of a model that computes little with each parameter that was half of a step. Limits that the environment
    sets stay as they are; other libraries have none.
    """
    if any(name in environment for name in _LIMITS):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST) and mallopt(_M_TRIM_THRESHOLD, _KEPT))
