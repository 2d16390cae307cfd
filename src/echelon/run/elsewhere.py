"""A run on a place that takes it whole: it is handed over, followed to its end, and asked to stop.

Nothing of ours goes on beside it: what is told comes from the run's folder and from the place's own queue.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from echelon.config import RunConfig, load_run_config
from echelon.config.validate import check_world, splits_model
from echelon.core.errors import USER_ERROR_EXIT_CODE, UserError
from echelon.core.files import write_atomic
from echelon.core.layout import AUTO
from echelon.core.stop import Stopped, stop_on_signals, stopped_exit_code
from echelon.launch.places import expanded
from echelon.launch.places.cluster import (
    ArrayCluster,
    Cluster,
    JobPhase,
    JobState,
    PlaceFiles,
    PlaceSilent,
    RunArray,
    Submission,
)
from echelon.messages.identity import SECRET_VARIABLE, make_secret, read_secret, write_secret
from echelon.run.home import at_home, check_free, home_of
from echelon.run.machine import say
from echelon.run.outcome import Outcome, outcome_of
from echelon.run.resolve import nodes_of, place_of
from echelon.run.versions import versions
from echelon.storage.url import is_url
from echelon.trainer import folder as folders

Around = Callable[[Path], AbstractContextManager[None]]

LOOK_S = 0.5  # between looks for output
ASK_S = 3.0  # between questions to the queue
SETTLE_S = 10.0  # a job that is requeued may seem over for a moment
GONE_S = 600.0  # a place that is silent for so long is left
FIRST_NODE = "node0.out"
VERSIONS_FILE = "versions"
_LEAVE = (signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True)
class Submitted:
    """A run that a place has taken."""

    run: Path
    job: str
    cluster: Cluster


def submitted(config: RunConfig, cluster: Cluster, model: str, has_objects: bool = False) -> Submitted:
    """Make a new run's folder, and hand the run over.

    Args:
        model: what the folder is called after.
        has_objects: the caller gave objects of its own, which cannot travel.

    Raises:
        UserError: it cannot be, or the place refuses it.
    """
    with _prepared(config, cluster, model, has_objects) as run:
        return _hand_over(run, cluster)


def prepared(config: RunConfig, cluster: Cluster, model: str) -> Submission:
    """Make a new run's folder as `submitted` does; it is handed over later, with others (`submitted_together`).

    Raises:
        UserError: it cannot be.
    """
    with _prepared(config, cluster, model) as run:
        return Submission(run.absolute())


def submitted_together(cluster: ArrayCluster, array: RunArray) -> list[str]:
    """Hand runs over whose folders are made, as an array; returns the job of each.

    Raises:
        UserError: the place refuses them.
    """
    jobs = cluster.submit_array(array)
    for submission, job in zip(array.runs, jobs, strict=True):
        submission.files.add_job(job)
    return jobs


@contextmanager
def _prepared(config: RunConfig, cluster: Cluster, model: str, has_objects: bool = False) -> Iterator[Path]:
    """Make a new run's folder, with all that its machines look for there; where the block refuses it, it goes again."""
    check_described(config, cluster, has_objects)
    if is_url(config.run):
        check_free(config.run)
    config = _on(at_home(config), config.launch.on)
    cluster.check(Submission(_folder_to_be(config, model), home=home_of(config)), versions())
    with folders.claimed(config, time.time(), model) as config:
        _fill(Path(config.run), home_of(config))
        yield Path(config.run)


def submitted_again(
    path: Path, config: RunConfig, cluster: Cluster, has_objects: bool = False, from_scratch: bool = False
) -> Submitted:
    """Hand a run over that has a folder already, to go on.

    Args:
        has_objects: the caller gave objects of its own, which cannot travel.
        from_scratch: it starts over, unless it is refused here.

    Raises:
        UserError: it cannot be, or the place refuses it.
    """
    check_described(_on(config, config.launch.on), cluster, has_objects)
    home = home_of(replace(config, run=str(path)))
    cluster.check(Submission(path.absolute(), home=home), versions())
    if from_scratch:
        from echelon.trainer.saving import start_over  # with torch

        start_over(path)
    before = folders.prepare(path, _on(config, config.launch.on), time.time())
    try:
        _fill(path, home)
        return _hand_over(path, cluster)
    except UserError:
        folders.put_back(path, before)
        raise


def text_for(config: RunConfig, cluster: Cluster, model: str) -> str:
    """Return exactly what would be submitted; says what it lacks.

    Raises:
        UserError: it would be refused, and there is nothing to show.
    """
    check_described(config, cluster)
    config = at_home(config)
    folder = _folder_to_be(config, model)
    folders.check_new(folder, config)
    submission = Submission(folder, home=home_of(config))
    if lacking := cluster.lacking(submission):
        say(f"this would be refused: {lacking}")
    return cluster.text(submission)


def _folder_to_be(config: RunConfig, model: str) -> Path:
    return (Path(config.run) if config.run else folders.default_folder(config, model=model)).absolute()


def check_described(config: RunConfig, cluster: Cluster, has_objects: bool = False) -> None:
    """Refuse what only this machine can do, and what the place's machines cannot do together.

    Raises:
        UserError: names the setting.
    """
    if nodes_of(config).most > 1 or config.launch.rendezvous:
        raise UserError("--nodes and --rendezvous are the place's to say: give nodes in --on, as in slurm(nodes=2)")
    if has_objects:
        raise UserError(
            "objects of your own cannot be sent to another place: name model, data and task as module:function"
        )
    if config.optimizer.lr_find:
        raise UserError("--lr-find is for this machine: find the rate with --on local, then train with --lr")
    if config.launch.link:
        raise UserError("--link shapes links of this machine: it needs --on local")
    if config.launch.workers and config.strategy.parallel != AUTO:
        for machines in sorted({cluster.least_machines, cluster.machines}):
            check_world(config, config.launch.workers * machines)
    if splits_model(config) and cluster.machines > 1 and not cluster.shares_disk:
        raise UserError(
            f"--parallel {config.strategy.parallel}: all ranks write parts of a checkpoint of a model that is split: "
            "leave folder out of --on ssh, give --on k8s claim and mount: a disk that all machines share"
        )


def _on(config: RunConfig, place: str) -> RunConfig:
    """Return the description for the run's folder: the place in full, and what only it can say left open."""
    return replace(config, launch=replace(config.launch, on=expanded(place), nodes="1", rendezvous=""))


def _fill(run: Path, home: str) -> None:
    """Write into a run's folder what its machines look for there: its secret, the versions that they must have."""
    files = PlaceFiles(run)
    files.prepare(home)
    (run / "logs").mkdir(exist_ok=True)
    secrets = run / folders.SECRET_FOLDER
    secrets.mkdir(mode=0o700, exist_ok=True)
    make_secret(secrets)
    if SECRET_VARIABLE in os.environ:  # by the file alone: what a place is given of our environment can be read there
        write_secret(secrets, read_secret(secrets))
    write_atomic(files.folder / VERSIONS_FILE, json.dumps(versions()))


def _hand_over(run: Path, cluster: Cluster) -> Submitted:
    home = PlaceFiles(run).home
    submission = Submission(run.absolute(), home=home)
    job = cluster.submit(submission)
    submission.files.add_job(job)
    where = f"run at {home}, here in {run}" if home else f"run folder {run}"
    say(f"job {job}; {where}; Ctrl-C stops the run after a checkpoint, Ctrl-\\ leaves it to go on")
    return Submitted(run, job, cluster)


def left_place(path: Path) -> None:
    """Refuse to start a run that goes on at the place that took it, whatever place is to be next; else bring it here.

    Raises:
        UserError: it goes on.
    """
    recorded = place_of(load_run_config(path / folders.CONFIG_FILE)).cluster()
    job = PlaceFiles(path).job()
    if recorded is None or not job:
        return
    try:
        over = recorded.state(job).phase is JobPhase.ENDED
    except PlaceSilent as silent:  # it may never answer again
        say(f"{silent}: if the run goes on there, two go on from here")
        return
    if not over:
        raise UserError(f"{path} goes on already, as job {job}: `echelon stop {path}` ends it")
    if missing := brought(path, recorded):
        say(f"{path} may be behind: {missing}")


def brought(run: Path, cluster: Cluster, logs: bool = False) -> str:
    """Bring what a place has of a run into its folder here; returns why it could not be brought, else nothing.

    Args:
        logs: those of all its machines too.
    """
    try:
        cluster.bring(run)
        if logs:
            cluster.bring_logs(run)
    except (PlaceSilent, UserError) as error:
        return str(error)
    return ""


def state_of(cluster: Cluster, job: str) -> JobState:
    """Return where a job is, or that its place does not answer.

    Raises:
        UserError: the place does not answer.
    """
    try:
        return cluster.state(job)
    except PlaceSilent as silent:
        raise UserError(str(silent)) from None


def followed(submitted: Submitted, around: Around = lambda _: nullcontext()) -> Outcome:
    """Follow a run to its end: what its first machine prints, and what the queue says of it.

    The first signal stops the run, and it is followed to its end; another one, or a hang-up, leaves it to go on.

    Raises:
        UserError: the run refused its input.
    """
    follower, signum = _Follower(submitted), 0
    with around(submitted.run):
        while True:
            try:
                with stop_on_signals(raises=True):
                    follower.until_over()
                break
            except Stopped as stopped:
                if signum or stopped.signum in _LEAVE:
                    say(f"left: {submitted.run} goes on as job {submitted.job}")
                    return Outcome("stopped", submitted.run, {}, stopped.signum)
                signum = stopped.signum
                say("stopping the run after a checkpoint")
                stop(submitted.run, submitted.cluster)
    files = PlaceFiles(submitted.run)
    waited = files.stop.exists() and not files.starts.exists()  # stopped before any of its machines began
    code, reason = files.ended() or ((stopped_exit_code(signum), "") if waited else (1, follower.state.text))
    if code == USER_ERROR_EXIT_CODE:
        raise UserError(reason)
    if code == 1 and reason:
        say(reason)
    return outcome_of(submitted.run, {0: "completed", 1: "failed"}.get(code, "stopped"), signum)


def stop(run: Path, cluster: Cluster) -> bool:
    """Ask a run to save a checkpoint and end, and not to be queued again; returns whether there was one to ask.

    Raises:
        UserError: the place does not answer.
    """
    files = PlaceFiles(run)
    job = files.job()
    if not job or state_of(cluster, job).phase is JobPhase.ENDED:
        return False
    write_atomic(files.stop, "")
    try:
        cluster.stop(job)
    except PlaceSilent as silent:
        raise UserError(str(silent)) from None
    return True


def nodes_there(run: Path, cluster: Cluster, words: Sequence[str]) -> list[str]:
    """Change the members of a run at its place; returns what the command says there.

    Raises:
        UserError: the run does not go on, the place does not answer or gives no commands there, or it was refused.
    """
    job = PlaceFiles(run).job()
    if not job or state_of(cluster, job).phase is JobPhase.ENDED:
        raise UserError(f"{run} does not go on")
    try:
        return cluster.change_members(Submission(run.absolute()), words).splitlines()
    except PlaceSilent as silent:
        raise UserError(str(silent)) from None


class _Follower:
    def __init__(self, submitted: Submitted) -> None:
        self._submitted, self._files = submitted, PlaceFiles(submitted.run)
        self._output = LogTail(submitted.run / "logs" / FIRST_NODE)
        self.state = JobState(JobPhase.WAITS, "")
        self._asked_s = self._over_since_s = 0.0
        self._heard_s = time.monotonic()

    def until_over(self) -> None:
        """Show what comes, until the job is over."""
        while not self._is_over():
            self._output.show()
            time.sleep(LOOK_S)
        if missing := brought(self._submitted.run, self._submitted.cluster, logs=True):
            say(f"{self._submitted.run} is not whole here: {missing}; the rest lies on the hosts")
        self._output.show()

    def _is_over(self) -> bool:
        now = time.monotonic()
        if now - self._asked_s >= ASK_S:
            self._ask()
            self._asked_s = now
        if self.state.phase is not JobPhase.ENDED:
            self._over_since_s = 0.0
            return False
        self._over_since_s = self._over_since_s or now
        return self._files.ended() is not None or now - self._over_since_s > SETTLE_S

    def _ask(self) -> None:
        job = self._files.job() or self._submitted.job
        try:
            state = self._submitted.cluster.keep(job, Submission(self._submitted.run.absolute()))
            self._submitted.cluster.bring(self._submitted.run)
        except PlaceSilent as silent:
            if time.monotonic() - self._heard_s > GONE_S:
                raise UserError(f"{silent}; job {job} may go on") from None
            return
        self._heard_s = time.monotonic()
        if state != self.state:
            self.state = state
            say(f"job {job}: {state.text}")


class LogTail:
    """Shows what is added to a file, which may not be there yet, and may be shortened."""

    def __init__(self, path: Path, from_start: bool = False) -> None:
        """Begin at what is there now, which an earlier start wrote, or at the file's start."""
        self._path = path
        self._at = path.stat().st_size if path.exists() and not from_start else 0

    def show(self) -> None:
        """Print what is new."""
        if text := self.read():
            sys.stdout.write(text)
            sys.stdout.flush()

    def read(self) -> str:
        """Return what is new, in whole lines."""
        try:
            with self._path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._at:
                    self._at = 0
                file.seek(self._at)
                new = file.read()
        except FileNotFoundError:
            return ""
        whole = new[: new.rfind(b"\n") + 1]
        self._at += len(whole)
        return whole.decode(errors="replace")
