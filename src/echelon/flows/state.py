"""A flow's folder, and how its steps stand: what each step's own record says, and whether somebody works at it."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from echelon.core.errors import UserError
from echelon.core.files import write_atomic
from echelon.flows.base import Flow, FlowStep, output_path, step_folder
from echelon.flows.base import ReadOutput as _Read
from echelon.flows.fingerprint import hash_output
from echelon.flows.resolve import read_flow
from echelon.records.decode import decode
from echelon.records.file import newest, read_records
from echelon.records.going import LOCK_FILE, is_held
from echelon.records.kinds import FlowStepEnd, FlowStepStart
from echelon.records.segments import RECORD_FILE

DESCRIPTION_FILE, GIVEN_FILE, PAGE_FILE, LOG_FILE = "flow.yaml", "flow.json", "flow.html", "log.txt"
COMPLETED, FAILED, REFUSED, STOPPED = "completed", "failed", "refused", "stopped"
_ENDS_S = 120.0  # a server of files holds the lock of a machine that has died for a while: NFS 90 s
_POLL_S = 0.2


class Stands(StrEnum):
    """How a step stands."""

    DONE = "done"
    RUNS = "runs"
    FAILED = "failed"
    CUT_SHORT = "cut short"
    BLOCKED = "blocked"
    WAITS = "waits"


@dataclass(frozen=True)
class StepStatus:
    """How one step stands.

    Attributes:
        starts: how often it was started, ever.
        seconds: that all starts with its newest fingerprint took; of those whose process was killed nothing is known.
        message: why it failed.
        report: a page about it, below the flow's folder; empty: there is none.
    """

    step: FlowStep
    stands: Stands
    starts: int = 0
    seconds: float = 0.0
    message: str = ""
    report: str = ""


@dataclass(frozen=True)
class FlowArguments:
    """What a flow's command was given beside the file.

    Attributes:
        file: the description, where the user keeps it.
        parameters: in place of the file's.
        on: where its steps run.
    """

    file: str
    parameters: Mapping[str, str]
    hash_content: bool = False
    on: str = "local"


def write_description(folder: Path, file: Path, arguments: FlowArguments) -> None:
    """Keep a flow's description in its folder, so that it can be continued."""
    folder.mkdir(parents=True, exist_ok=True)
    text = file.read_text(encoding="utf-8")
    write_arguments(folder, arguments)  # first: by it a flow's folder is known
    write_atomic(folder / DESCRIPTION_FILE, text)


def write_arguments(folder: Path, arguments: FlowArguments) -> None:
    """Keep what a flow's command was given in its folder."""
    write_atomic(folder / GIVEN_FILE, json.dumps(asdict(arguments), indent=2))


def load_arguments(folder: Path) -> FlowArguments:
    """Return what the flow of a folder was given last.

    Raises:
        UserError: there is none.
    """
    try:
        return decode(FlowArguments, json.loads((folder / GIVEN_FILE).read_bytes()))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{folder}: no flow there; name the folder of one, such as flows/NAME") from None
    except (TypeError, ValueError, KeyError, AttributeError):
        raise UserError(
            f"{folder / GIVEN_FILE} is damaged: start the flow from its file, with --run {folder}"
        ) from None


def load_flow(folder: Path) -> Flow:
    """Return the flow of a folder, as it was described last.

    Raises:
        UserError: there is none.
    """
    arguments = load_arguments(folder)
    flow = read_flow(folder / DESCRIPTION_FILE, arguments.parameters, arguments.hash_content)
    return Flow(flow.name, Path(arguments.file).parent, flow.steps, flow.hash_content)


@contextmanager
def only_driver(folder: Path) -> Iterator[None]:
    """Hold a flow's lock: two drivers exclude each other.

    Raises:
        UserError: another one goes on.
    """
    with _locked(folder, 0.0, f"a flow goes on in {folder}: wait for it, or end it: echelon flow stop {folder}"):
        yield


@contextmanager
def only_start(folder: Path, patience_s: float = _ENDS_S) -> Iterator[None]:
    """Hold a step's lock: a job of a queue may go on where no driver does.

    Args:
        patience_s: how long one that is about to end is waited for.

    Raises:
        UserError: another process does the step.
    """
    with _locked(folder, patience_s, f"another process, or a job of a queue, does this step in {folder}"):
        yield


@contextmanager
def _locked(folder: Path, patience_s: float, refusal: str) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    fd = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    until = time.monotonic() + patience_s
    with os.fdopen(fd, "r+"):
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise UserError(refusal) from None
            time.sleep(_POLL_S)
        yield


def last_line(folder: Path) -> FlowStepStart | FlowStepEnd | None:
    """Return the newest line of a step's record."""
    line = next(newest(folder, FlowStepStart, FlowStepEnd), None) if folder.is_dir() else None
    return line if isinstance(line, FlowStepStart | FlowStepEnd) else None


def completed_end(folder: Path) -> FlowStepEnd | None:
    """Return how a step ended, if it came to its end and was not started again."""
    line = last_line(folder)
    return line if isinstance(line, FlowStepEnd) and line.status == COMPLETED else None


def undamaged(flow: Flow, flow_folder: Path, step: FlowStep, end: FlowStepEnd) -> bool:
    """Whether a step's outputs are what they were when it ended."""
    try:
        return output_hashes(flow, flow_folder, step) == dict(end.outputs)
    except OSError:
        return False


def output_hashes(flow: Flow, flow_folder: Path, step: FlowStep) -> dict[str, str]:
    """Return the hash of each output of a step.

    Raises:
        OSError: one is not there, or cannot be read.
    """
    return {
        name: hash_output(output_path(flow, flow_folder, _Read(step.name, name)), output.kind)
        for name, output in step.outputs.items()
    }


def clear(folder: Path) -> None:
    """Remove what a step left, its record and log aside."""
    for entry in folder.iterdir() if folder.is_dir() else ():
        if entry.name in (RECORD_FILE, LOG_FILE, LOCK_FILE):
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def step_statuses(flow: Flow, folder: Path, queued: Set[str] = frozenset()) -> list[StepStatus]:
    """Return how each step stands, in the flow's order.

    Args:
        queued: steps that a queue has jobs for, whether or not a driver follows them.
    """
    found: dict[str, StepStatus] = {}
    for name in flow.steps:
        _stand(flow, folder, name, queued, found)
    return [found[name] for name in flow.steps]


def _is_locked(folder: Path) -> bool:
    """Whether a process of this machine works in a folder, as far as that is known."""
    return is_held(folder) is not False and (folder / LOCK_FILE).exists()


def _stand(flow: Flow, folder: Path, name: str, queued: Set[str], known: dict[str, StepStatus]) -> StepStatus:
    """Return how one step stands, looking at those before it where it has not begun.

    Args:
        queued: steps that a queue works at, if they have begun; those of this machine hold their locks.
    """
    if name in known:
        return known[name]
    step, where = flow.steps[name], step_folder(folder, name)
    line = last_line(where)
    starts = len(read_records(where, FlowStepStart)) if line is not None else 0
    report = _report(folder, where)
    ends = read_records(where, FlowStepEnd) if line is not None else []
    took = sum(end.seconds for end in ends if line is not None and end.fingerprint == line.fingerprint)
    if isinstance(line, FlowStepEnd):
        stands = {COMPLETED: Stands.DONE, STOPPED: Stands.CUT_SHORT}.get(line.status, Stands.FAILED)
        known[name] = StepStatus(step, stands, starts, took, line.message, report)
    elif line is not None:
        goes_on = name in queued or _is_locked(where)
        stands = Stands.RUNS if goes_on else Stands.CUT_SHORT
        known[name] = StepStatus(step, stands, starts, took + (time.time() - line.t) * goes_on, "", report)
    else:
        before = [_stand(flow, folder, each, queued, known).stands for each in step.before]
        blocked = any(each in (Stands.FAILED, Stands.BLOCKED) for each in before)
        known[name] = StepStatus(step, Stands.BLOCKED if blocked else Stands.WAITS)
    return known[name]


def _report(folder: Path, where: Path) -> str:
    for part in ("run", "study"):
        page = where / part / "report.html"
        if page.exists() and not (where / part).is_symlink():
            return os.path.relpath(page, folder)
    return ""
