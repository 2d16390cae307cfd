"""How runs stand: where each is, how far it is, and what its place says; from their folders and the places' own queues.

Nothing of ours runs beside a run to keep this: it is looked up when somebody asks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from echelon.config import RunConfig, load_run_config
from echelon.core.errors import USER_ERROR_EXIT_CODE, UserError
from echelon.launch.places.cluster import Cluster, JobPhase, PlaceFiles, PlaceSilent
from echelon.records.file import newest
from echelon.records.going import is_held, read_launch
from echelon.records.kinds import End, Evaluation, Start, Steps
from echelon.run.elsewhere import ASK_S, SETTLE_S, brought
from echelon.run.ending import epoch_lengths
from echelon.run.home import home_of
from echelon.run.machine import say
from echelon.run.resolve import nodes_of, place_of
from echelon.trainer.folder import CONFIG_FILE, check_is_run

_OVER = {0, USER_ERROR_EXIT_CODE}  # completed, refused: no place starts such a run again


@dataclass(frozen=True)
class RunOverview:
    """How a run stands.

    Attributes:
        place: where it runs, by its name.
        state: running, completed, stopped, failed, or what its place's queue says.
        progress: steps done of all, as far as known.
        metric: of the newest evaluation; empty: there is none.
        age_s: since it was started last; None: not known.
        home: the URL at which it lives; empty: its folder is all there is of it.
    """

    run: Path
    place: str
    state: str
    progress: str
    metric: str
    age_s: float | None
    home: str = ""


def runs_below(folder: Path) -> Iterator[Path]:
    """Yield the runs in a folder and its subfolders of one level, the newest last."""
    found = {file.parent for pattern in (f"*/{CONFIG_FILE}", f"*/*/{CONFIG_FILE}") for file in folder.glob(pattern)}
    yield from sorted(found, key=lambda run: read_launch(run).launched_t or 0.0)


def overview_of(run: Path) -> RunOverview:
    """Return how a run stands.

    Raises:
        UserError: the folder holds no run.
    """
    config = load_run_config(run / CONFIG_FILE)
    state = _state(run, config)
    launched_t = read_launch(run).launched_t
    age_s = None if launched_t is None else time.time() - launched_t
    home = home_of(replace(config, run=str(run)))
    return RunOverview(run, place_of(config).title, state, _progress(run, config), _metric(run), age_s, home)


def cluster_of(run: Path) -> Cluster | None:
    """Return the place that took a run whole; None: it runs, or ran, on this machine.

    Raises:
        UserError: the folder holds no run.
    """
    check_is_run(run)
    return place_of(load_run_config(run / CONFIG_FILE)).cluster()


def bring_from_place(run: Path, logs: bool = False) -> str:
    """Bring what a run's place has of it into its folder, where that is not common to both and the place answers.

    Args:
        logs: those of all its machines too.

    Returns:
        why it could not be brought, which is said; empty: it was.
    """
    if silent := _bring(run, logs):
        say(f"{run} may be behind: {silent}")
    return silent


def _bring(run: Path, logs: bool = False) -> str:
    """Return why what a run's place has could not be brought; empty: it could."""
    cluster = _apart(run)
    if cluster is None:
        return ""
    return brought(run, cluster, logs)


def _apart(run: Path) -> Cluster | None:
    """Return the place that has a run where its folder is not common to both; None: there is nothing to bring."""
    if not PlaceFiles(run).job() or not (run / CONFIG_FILE).exists():
        return None
    cluster = cluster_of(run)
    return None if cluster is None or cluster.shares_disk else cluster


@contextmanager
def kept_near(run: Path, logs: bool = False) -> Iterator[None]:
    """Bring what a run's place has of it now, and again and again while the block runs.

    Args:
        logs: those of all its machines too.

    Raises:
        UserError: the run's place is none that this machine knows.
    """
    if _apart(run) is None:
        yield
        return
    was_silent = bool(bring_from_place(run, logs))
    over = threading.Event()

    def bring_again(was_silent: bool) -> None:
        """Bring until it is over; that the place is silent is said once."""
        while not over.wait(ASK_S):
            silent = _bring(run, logs)
            if silent and not was_silent:
                say(f"{run} may be behind: {silent}")
            was_silent = bool(silent)

    thread = threading.Thread(target=bring_again, args=(was_silent,), name="bring", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()


def until_over(run: Path, look_s: float) -> Iterator[None]:
    """Yield again and again while a run goes on, and once more when all is here that it leaves.

    A run that its place may queue again is over when it has not gone on for some seconds.
    """
    asked_s = over_since_s = 0.0
    with kept_near(run, logs=True):
        while True:
            yield
            now = time.monotonic()
            if now - asked_s >= ASK_S:
                asked_s = now
                over_since_s = 0.0 if _goes_on(run) else over_since_s or now
            if over_since_s and (_is_settled(run) or now - over_since_s >= SETTLE_S):
                break
            time.sleep(look_s)
    bring_from_place(run, logs=True)
    yield


def _is_settled(run: Path) -> bool:
    """Whether no place starts a run again that does not go on."""
    cluster, ended = cluster_of(run), PlaceFiles(run).ended()
    return cluster is None or (ended is not None and (ended[0] in _OVER or not cluster.starts_again))


def _goes_on(run: Path) -> bool:
    """Whether a run is not known to be over: a machine that is lost may come back."""
    cluster, job = cluster_of(run), PlaceFiles(run).job()
    if cluster is None or not job:
        has_others = nodes_of(load_run_config(run / CONFIG_FILE)).most > 1
        ended = isinstance(next(newest(run, End, Start), None), End)
        return bool(is_held(run)) or (has_others and not ended)
    try:
        return cluster.state(job).phase is not JobPhase.ENDED
    except PlaceSilent:
        return True


def _state(run: Path, config: RunConfig) -> str:
    try:
        cluster = place_of(config).cluster()
    except UserError as error:  # of another version, or a place that this machine does not know
        return str(error)
    job = PlaceFiles(run).job()
    if cluster is None or not job:
        return "running" if is_held(run) else _recorded(run)
    try:
        state = None if _is_settled(run) else cluster.state(job)
        cluster.bring(run)
    except (PlaceSilent, UserError) as silent:
        return f"{_recorded(run)} by its record ({silent})"
    if state is not None and state.phase is not JobPhase.ENDED:
        return f"{state.text} (job {job})"
    return _recorded(run)


def _recorded(run: Path) -> str:
    """Return how the newest start of a run ended, as its record says."""
    end = next(newest(run, End, Start), None)
    if isinstance(end, End):
        return end.status
    ended = PlaceFiles(run).ended()
    if ended is not None and ended[0] == 2:
        return "refused"
    return "interrupted" if end is not None else "not begun"


def _progress(run: Path, config: RunConfig) -> str:
    begun, last = next(newest(run, Start), None), next(newest(run, Steps), None)
    if begun is None or last is None or not begun.steps_per_epoch:
        return ""
    wanted = epoch_lengths(run, begun).steps(config.training.epochs)
    if config.training.max_steps:
        wanted = min(wanted, config.training.max_steps)
    return f"{last.step}/{wanted} steps"


def _metric(run: Path) -> str:
    last, begun = next(newest(run, Evaluation), None), next(newest(run, Start), None)
    if last is None:
        return ""
    name, value = next(iter(last.metrics.items()), ("loss", last.loss))
    title = begun.task.title_of(name) if begun else name
    return f"{title} {value:.4g}" if value is not None else ""
