"""A place that takes a whole run: a cluster's own engine queues it, gives it machines, and starts it again.

Such a place starts one *node command* on each of its machines (`echelon.run.node`), which runs that machine's part as
the same command by hand would: nothing of a run is made anew for a place. Between the machines and who follows the run
lie files in the run's folder (`PlaceFiles`), which all of them see.
"""

from __future__ import annotations

import json
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import ClassVar, Protocol, runtime_checkable

from echelon.core.errors import UserError
from echelon.core.files import write_atomic
from echelon.launch.places.base import STOP_S

NODE_MODULE = "echelon.run.node"
PLACE_FOLDER = "place"  # below a run's folder
MIRRORED_FILE = ".mirrored.json"  # in a run's folder: what it has in common with its copy at a URL; travels with it
ANSWER_S = 60.0
MEETING = "meeting-"  # begins the name of the file that says where the first machine of a start answers
_HOME = "home"


@dataclass(frozen=True)
class NodeRank:
    """One machine's part in what a place was asked for.

    Attributes:
        number: of the machine; 0 is the first one.
        name: tells it apart, also from others on the same host.
        address: of the first machine, as the place knows it.
        start: names this start of the run, the same on all of its machines.
        machines: of this start, where their number may differ from one to the next; 0: as the place was asked for.
    """

    number: int
    name: str
    address: str
    start: str
    machines: int = 0

    def to_json(self) -> str:
        """Return it as text, by which a node command learns of its rank."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> NodeRank:
        """Read what `to_json` wrote.

        Raises:
            ValueError: it is no JSON.
        """
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Submission:
    """A run as a place is given it.

    Attributes:
        run: its folder, absolute, which all machines see.
        folder: where relative names of data and code begin.
        python: the interpreter.
        home: the URL at which the run lives; empty: it lives in its folder.
    """

    run: Path
    folder: Path = field(default_factory=Path.cwd)
    python: str = sys.executable
    home: str = ""

    @property
    def command(self) -> list[str]:
        """The node command: the same on each machine, and no secret in it."""
        return [self.python, "-m", NODE_MODULE, str(self.run)]

    @property
    def files(self) -> PlaceFiles:
        """What the run and its place tell each other by."""
        return PlaceFiles(self.run)


@dataclass(frozen=True)
class ChainedJob:
    """A command as a job that waits for others, or several that differ in nothing else as an array of jobs.

    Attributes:
        name: under which it is found in the queue again.
        script: file for its text, which all machines see.
        commands: what runs, by its number in the array; 0 ends it well.
        is_array: whether there may be others of the name.
        after: jobs that must end well before; where one does not, this one never begins.
        time_s: after which it is ended.
    """

    name: str
    script: Path
    commands: Mapping[int, Sequence[str]]
    is_array: bool = False
    after: Sequence[str] = ()
    cores: int = 1
    memory_bytes: float = 0.0
    gpus: int = 0
    time_s: float = 0.0


@runtime_checkable
class TakesChains(Protocol):
    """A place whose queue takes single commands as jobs.

    Attributes:
        holds_order: the queue knows jobs that wait for others; else each is handed over when those have ended well.
    """

    holds_order: ClassVar[bool]

    def chained_text(self, job: ChainedJob) -> str:
        """Return exactly what is submitted."""

    def submit_chained(self, job: ChainedJob) -> dict[int, str]:
        """Submit a job, or an array; returns how the queue calls each, by its number."""

    def chained(self, name: str) -> dict[int, str]:
        """Return how the queue calls the jobs of a name that wait or run, by their numbers."""

    def state(self, job: str) -> JobState:
        """Return where a job is."""

    def stop(self, job: str) -> None:
        """End a job, or take it from the queue."""


@dataclass(frozen=True)
class RunArray:
    """Runs that a queue takes as one array of jobs.

    Attributes:
        name: under which it stands in the queue.
        script: file for its text, which all machines see.
        runs: each with its folder made, in their order.
        at_once: so many of them go on at the same time.
    """

    name: str
    script: Path
    runs: Sequence[Submission]
    at_once: int


class JobPhase(StrEnum):
    """Where a job is: before its machines, on them, or over."""

    WAITS = "waits"
    RUNS = "runs"
    ENDED = "ended"


@dataclass(frozen=True)
class JobState:
    """What a place's own queue says of a job.

    Attributes:
        text: in its words.
    """

    phase: JobPhase
    text: str


class Cluster(ABC):
    """A place that takes whole runs. Subclasses are dataclasses: their fields are the settings of the spec."""

    runs_here: ClassVar[bool] = False
    exit_codes_decide: ClassVar[bool] = False
    """Whether the place starts a machine's part again by the exit code of its node command, not by what is noted."""
    starts_again: ClassVar[bool] = True
    """Whether the place may start a run again that has noted its stop, as after a time limit."""

    @property
    def shares_disk(self) -> bool:
        """Whether a run's folder is common to this machine and the place's; else it is brought (`bring`)."""
        return True

    @property
    @abstractmethod
    def machines(self) -> int:
        """How many machines a run is given, at most."""

    @property
    def least_machines(self) -> int:
        """How many it needs."""
        return self.machines

    @property
    def stop_s(self) -> float:
        """Seconds that each machine's part may take from the signal to stop until the place ends it by force."""
        return STOP_S

    @abstractmethod
    def text(self, submission: Submission) -> str:
        """Return exactly what is submitted: a script or a manifest."""

    @abstractmethod
    def submit(self, submission: Submission) -> str:
        """Hand a run over; returns the name of its job.

        Raises:
            UserError: the place refuses it, or is not there.
        """

    @abstractmethod
    def state(self, job: str) -> JobState:
        """Return where a job is.

        Raises:
            PlaceSilent: the place does not answer now.
        """

    @abstractmethod
    def stop(self, job: str) -> None:
        """Ask a job to save a checkpoint and end; one that waits is taken from the queue.

        Raises:
            PlaceSilent: the place does not answer now.
        """

    def check(self, submission: Submission, versions: Mapping[str, str]) -> None:  # noqa: B027 - most places say so when a run is handed over
        """Refuse, before a run has a folder, what the place cannot take.

        Args:
            submission: with the folder that the run will have.
            versions: that its machines must have, by name.

        Raises:
            UserError: says why.
        """

    def lacking(self, submission: Submission) -> str:
        """Return what a run would be refused for whose text can be shown all the same; empty: nothing is known."""
        return ""

    def keep(self, job: str, submission: Submission) -> JobState:
        """Return where a job is, for who follows it: the moment to do what the place itself does not.

        Raises:
            PlaceSilent: the place does not answer now.
        """
        return self.state(job)

    def bring(self, run: Path) -> None:  # noqa: B027 - the folder is common to most
        """Bring what the place has of a run into its folder here, where that is not common to both.

        Raises:
            PlaceSilent: the place does not answer now.
        """

    def bring_logs(self, run: Path) -> None:  # noqa: B027 - likewise
        """Bring the logs that machines other than the first one hold of a run, likewise.

        Raises:
            PlaceSilent: one of them does not answer now.
        """

    def change_members(self, submission: Submission, words: Sequence[str]) -> str:
        """Give `echelon nodes RUN` with some words on the first machine; returns what it prints.

        Raises:
            UserError: this place gives no commands there, or it was refused.
            PlaceSilent: the place does not answer now.
        """
        raise UserError(f"give this command on the first machine of {submission.run}, in the run's folder there")

    @abstractmethod
    def node_rank(self, environment: Mapping[str, str]) -> NodeRank:
        """Return the part of the machine on which the node command has this environment.

        Raises:
            UserError: it was given something else than was asked for.
        """


class ArrayCluster(Cluster):
    """A cluster whose queue takes several runs as one array, and knows each by a job of its own."""

    @abstractmethod
    def submit_array(self, array: RunArray) -> list[str]:
        """Submit runs; returns the name of each one's job.

        Raises:
            UserError: the place refuses them, or is not there.
        """

    @abstractmethod
    def states(self, jobs: Sequence[str]) -> dict[str, JobState]:
        """Return where jobs are, in one question.

        Raises:
            PlaceSilent: the place does not answer now.
        """


class PlaceSilent(Exception):
    """A place does not answer now; it may later."""


class PlaceFiles:
    """The files of a run's folder by which its machines, its place and who follows it tell each other of it."""

    def __init__(self, run: Path) -> None:
        self.folder = run / PLACE_FOLDER

    @property
    def text(self) -> Path:
        """What was submitted."""
        return self.folder / "submitted"

    @property
    def jobs(self) -> Path:
        """The jobs of the run, a line each, the newest last."""
        return self.folder / "jobs"

    @property
    def exit(self) -> Path:
        """How the last start ended: an exit code, then why, on one line."""
        return self.folder / "exit"

    @property
    def stop(self) -> Path:
        """Is there when the run was asked to stop: it is not queued again."""
        return self.folder / "stop"

    def prepare(self, home: str = "") -> None:
        """Make the folder for a new submission, without what an earlier one left.

        Args:
            home: the URL at which the run lives.
        """
        self.folder.mkdir(mode=0o700, exist_ok=True)
        write_atomic(self.folder / _HOME, home)
        for left in (self.exit, self.stop, self.starts):
            left.unlink(missing_ok=True)

    @property
    def home(self) -> str:
        """The URL at which the run lives; empty: it lives in its folder."""
        try:
            return (self.folder / _HOME).read_text().strip()
        except FileNotFoundError:
            return ""

    @property
    def starts(self) -> Path:
        """The step from which each start went on, a line each."""
        return self.folder / "starts"

    def add_job(self, job: str) -> None:
        """Note a job as the newest one."""
        with self.jobs.open("a") as file:
            file.write(f"{job}\n")

    def job(self) -> str:
        """Return the newest job; empty: there is none."""
        try:
            return next(iter(reversed(self.jobs.read_text().split())), "")
        except FileNotFoundError:
            return ""

    def end(self, code: int, reason: str = "") -> None:
        """Note how a start ended."""
        write_atomic(self.exit, f"{code} {' '.join(reason.split())}\n")

    def ended(self) -> tuple[int, str] | None:
        """Return how the last start ended: exit code and why; None: it did not, or died."""
        try:
            code, _, reason = self.exit.read_text().strip().partition(" ")
        except FileNotFoundError:
            return None
        return int(code), reason

    def meet_at(self, node_rank: NodeRank, address: str) -> None:
        """Tell the other machines of a start where the first one answers."""
        for old in self.folder.glob(f"{MEETING}*"):
            old.unlink()
        write_atomic(self.folder / f"{MEETING}{node_rank.start}", json.dumps({"address": address}))

    def meeting(self, node_rank: NodeRank) -> str:
        """Return where the first machine of a start answers; empty while that is not known."""
        name = f"{MEETING}{node_rank.start}"
        # the folder is listed: over a network, a file that was not there a moment ago may stay so in a cache
        if name not in {path.name for path in self.folder.iterdir()}:
            return ""
        return str(json.loads((self.folder / name).read_text())["address"])


def ask(command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """Run a program of a cluster's, and return what it prints.

    Raises:
        UserError: it is not installed, or refuses: in its own words.
        PlaceSilent: it does not end in time.
    """
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, encoding="utf-8", errors="replace", timeout=ANSWER_S,
            check=False,
        )  # fmt: skip
    except FileNotFoundError:
        raise UserError(f"{command[0]} is not there: start this on a machine from which the cluster is used") from None
    except subprocess.TimeoutExpired:
        raise PlaceSilent(f"{command[0]} gives no answer") from None
    if done.returncode:
        words = " ".join((done.stderr or done.stdout).split())
        raise UserError(f"{command[0]}: {words or f'exit code {done.returncode}'}")
    return done.stdout
