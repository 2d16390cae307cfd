"""What is to run, as data, and what a place that runs it says: the interface of every file beside this one."""

from __future__ import annotations

import dataclasses
import importlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar

from echelon.core.errors import UserError
from echelon.core.patience import PATIENCE_S
from echelon.core.spec import Quantity
from echelon.launch.link import Host

STOP_S = 600.0  # where nothing is said: a checkpoint is as large as the disk is slow
LEAST_STOP_S = 5.0
_CLOSING_S, _CLOSING_SHARE = 3.0, 0.1
_DATACLASS = "dataclass"


class Restart(StrEnum):
    """What follows the death of a process: its whole group starts again (collectives need everyone), or it alone.

    BESIDE: where it was killed, the others of its group go on, and it alone is started again and joins them; else as
    TOGETHER.
    RESCUED: as TOGETHER, but where it was killed, the others save first what they have trained.
    """

    TOGETHER = "together"
    ALONE = "alone"
    BESIDE = "beside"
    RESCUED = "rescued"


@dataclass(frozen=True)
class Process:
    """One process: `entry` is `package.module:function`, called with `args`.

    Attributes:
        name: unique in its job.
        environment: set in the process on top of what it inherits.
        host: the network namespace that it lives in; None: the machine's own network.
        log: file that its output goes to; empty: the output of the process that starts it.
        leads: the job ends when all processes that lead have ended.
        stops_on_signal: SIGTERM asks it to stop; else it ignores signals, which may reach a whole group of processes,
            and is told to stop by a message.
        folder: working folder, where relative names of data and code begin; empty: the place's own.
    """

    name: str
    entry: str
    args: tuple[Any, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    host: Host | None = None
    log: str = ""
    leads: bool = True
    stops_on_signal: bool = True
    folder: str = ""

    def to_json(self) -> str:
        """Return the process as text, which `from_json` reads in another interpreter.

        Raises:
            UserError: an argument is an object that only this process has, such as a model of the caller's own.
        """
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return json.dumps(fields | {"environment": dict(self.environment)}, default=_as_json)

    @classmethod
    def from_json(cls, text: str) -> Process:
        """Read what `to_json` wrote."""
        fields = json.loads(text, object_hook=_from_json)
        return cls(**fields | {"args": tuple(fields["args"])})


def _as_json(value: object) -> dict[str, object]:
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        raise UserError(
            "objects of your own cannot be sent to another place: name model, data and task as module:function"
        )
    kind = type(value)
    fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    return {_DATACLASS: f"{kind.__module__}:{kind.__qualname__}", **fields}


def _from_json(values: dict[str, Any]) -> Any:
    if _DATACLASS not in values:
        return values
    module, _, name = values.pop(_DATACLASS).partition(":")
    fields = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}  # text knows no tuples
    return getattr(importlib.import_module(module), name)(**fields)


@dataclass(frozen=True)
class Group:
    """Processes, and which of them start again when one has died."""

    processes: tuple[Process, ...]
    restart: Restart = Restart.TOGETHER


@dataclass(frozen=True)
class Job:
    """What runs on one machine.

    Attributes:
        max_restarts: deaths that are followed by a restart, before the job is given up.
    """

    groups: tuple[Group, ...]
    max_restarts: int = 0


@dataclass(frozen=True)
class Started:
    """A process began: its id on a machine."""

    name: str
    pid: int
    host: str


@dataclass(frozen=True)
class Exited:
    """A process ended; a negative exit code is a signal."""

    name: str
    exit_code: int


Event = Started | Exited


class Place(ABC):
    """Where processes run: it starts them, says what became of them, signals them, and ends them when it closes.

    A place restarts nothing: what follows a death is the supervisor's to decide.
    """

    runs_here: ClassVar[bool] = False
    """Whether one worker alone may run in the process that asks for it."""
    stop_s: float = STOP_S
    """Seconds that a run may take from being asked to stop until nothing of it is left."""

    patience_s: float = PATIENCE_S
    """Seconds for which a process that cannot start, as while no file can be opened, is tried again (--io-patience)."""

    @property
    def saving_s(self) -> float:
        """Seconds of `stop_s` for the processes to save and end; the rest is for the record's end and the report."""
        return max(0.5 * self.stop_s, self.stop_s - max(_CLOSING_S, _CLOSING_SHARE * self.stop_s))

    @abstractmethod
    def start(self, processes: Sequence[Process]) -> None:
        """Start processes that begin together; each gives `Started`.

        Raises:
            UserError: the place cannot run them.
            PlaceFailed: it could, and no longer can.
        """

    @abstractmethod
    def events(self, timeout_s: float) -> list[Event]:
        """Return what happened since the last call; wait for it at most so long."""

    @abstractmethod
    def signal(self, names: Sequence[str], signum: int) -> None:
        """Send a signal to processes; those that have ended are left out."""

    @abstractmethod
    def close(self) -> None:
        """End what still runs, and let go of what the place holds."""

    def is_silent(self, name: str) -> bool:
        """Whether a process lives but does not run (SIGSTOP, a debugger); False where that cannot be seen."""
        return False


class PlaceFailed(Exception):
    """A place can start no more processes."""


def checked_grace(name: str, grace: Quantity | None) -> float:
    """Return the seconds of a setting that says how long a stop may take; `STOP_S` where it is left out.

    Raises:
        ValueError: it is no duration, or too short for a run to end in.
    """
    if grace is None:
        return STOP_S
    if grace.kind != "duration" or grace.value < LEAST_STOP_S:
        raise ValueError(f"{name} must be a duration of at least {LEAST_STOP_S:g}s, such as 30s")
    return grace.value
