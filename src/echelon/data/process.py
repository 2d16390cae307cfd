"""One loader process: takes indices from a pipe, writes samples to shared memory, ends with its parent.

It is a plain fork: milliseconds to start, nothing pickled, allowed in daemonic processes too.
Task: int64 array (slot, first row, epoch, *indices). Reply: a `LoaderReply`, as JSON.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from echelon.core.errors import UserError
from echelon.data.base import BadSample
from echelon.data.ragged import crop, with_lengths
from echelon.data.recipe import Rows
from echelon.data.slots import Slots
from echelon.observe.stacks import circumstances

_PARENT_CHECK_S = 2.0
_SAID = 300  # characters of an error
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class LoaderReply:
    """A part of a batch is there.

    Attributes:
        bad: samples that could not be read; positions in the batch.
        refused: why, where the data is at fault.
        error: why, where the code is, in one line; `traceback` of it.
    """

    slot: int
    bad: tuple[BadSample, ...] = ()
    refused: str = ""
    error: str = ""
    traceback: str = ""

    def to_json(self) -> bytes:
        """Write it for a pipe."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, text: bytes) -> LoaderReply:
        """Read what `to_json` wrote."""
        fields = json.loads(text)
        return cls(**fields | {"bad": tuple(BadSample(**sample) for sample in fields["bad"])})


def start_process(rows: Rows, slots: Slots, pipe: Connection, others: Sequence[Connection]) -> int:
    """Fork one loader; returns its process id.

    Args:
        rows: makes the samples.
        slots: where they are written.
        pipe: the loader's end.
        others: pipe ends that the loader must not keep open, or it would not notice its parent's death.
    """
    parent, in_main_thread = os.getpid(), threading.current_thread() is threading.main_thread()
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # a loader computes on one thread and touches no device: the threads that a fork leaves behind are not missed
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        gc.freeze()  # the parent's objects stay its own: no finalizer of theirs runs here
        _detach(parent, in_main_thread)
        for other in others:
            other.close()
        _serve(rows, slots, pipe, parent)
        code = 0
    except (BrokenPipeError, ConnectionResetError):
        code = 0  # the parent is gone
    except BaseException:  # noqa: BLE001 - must not return into the trainer's code
        traceback.print_exc()
    finally:
        os._exit(code)


def _detach(parent: int, in_main_thread: bool) -> None:
    """Leave Ctrl-C and SIGTERM to the parent, which ends its loaders itself; end at once when it dies."""
    signal.set_wakeup_fd(-1)
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    if sys.platform == "linux" and in_main_thread:
        # by thread: not for a parent's thread that may end before the parent does
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
    torch.set_num_threads(1)


def _serve(rows: Rows, slots: Slots, pipe: Connection, parent: int) -> None:
    while True:
        if not pipe.poll(_PARENT_CHECK_S):
            if os.getppid() != parent:
                return
            continue
        try:
            task = np.frombuffer(pipe.recv_bytes(), dtype=np.int64)
        except EOFError:
            return
        pipe.send_bytes(_work(rows, slots, task).to_json())


def _work(rows: Rows, slots: Slots, task: np.ndarray[Any, np.dtype[np.int64]]) -> LoaderReply:
    slot, first, epoch, count = task[:4].tolist()
    lengths, indices = task[4 : 4 + count].tolist(), task[4 + count :]
    specs = with_lengths(rows.specs, iter(lengths))
    inputs, targets = crop(slots[slot], specs, slice(first, first + len(indices)))
    try:
        bad = rows.fill(epoch, indices, inputs, targets)
    except UserError as error:
        return LoaderReply(slot, refused=str(error))
    except Exception as error:  # noqa: BLE001 - raised again by the parent, with this traceback
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:_SAID]} ({circumstances(error)})"
        return LoaderReply(slot, error=said.removesuffix(" ()"), traceback=traceback.format_exc())
    return LoaderReply(slot, tuple(replace(b, position=b.position + first) for b in bad))
