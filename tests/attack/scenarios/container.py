"""Containers that give little: no init, no user, no home, hardly any shared memory, no place for sockets, no ptrace."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from tests.attack.scenario import CannotRunHere, Scenario
from tests.ranks import orphan_parts
from tests.ranks.containers import CANNOT, Container, first_process_of, zombies_below
from tests.ranks.runs import SMALL, Runs


@dataclass(frozen=True)
class Place:
    """A container that gives little, and what it is like in words."""

    container: Container
    words: str


POOR = Place(
    Container(user=True, home="read-only", shm="small", temporary="long"),
    "as a user without a name, with a read-only home, 64 kB of /dev/shm, a long TMPDIR and no ptrace",
)
POORER = Place(
    Container(user=True, home="none", shm="read-only", temporary="read-only", root="read-only"),
    "without a home, on a read-only root, /dev/shm and TMPDIR, and without ptrace",
)
SYNCS = {
    "allreduce": ("allreduce", POOR), "local": ("local(4)", POORER), "diloco": ("diloco(4)", POOR),
    "easgd": ("easgd(4)", POORER), "ps": ("ps(mode=async)", POORER), "ps-sync": ("ps(mode=sync)", POOR),
    "ps-ssp": ("ps(mode=ssp)", POOR),
}  # fmt: skip
OF_EACH_KIND = ("allreduce", "diloco", "ps")  # a step together, rounds, servers: a CI makes do with these
MODEL = ("--workers", "2", "--model", "orphan_parts:mlp")


def _poor(folder: Path, container: Container, sync: str) -> str:
    """Train two epochs in a container, with a model whose code leaves orphans."""
    _prepare(folder)
    with Runs(folder) as runs:
        settings = ("--loaders", "1", "--epochs", "2", "--lr", "0.05", "--sync", sync)
        run = runs.start("train", "digits", *SMALL, *MODEL, *settings, folder="run", prefix=container.prefix(folder))
        code = run.end()
        assert code == 0 and "Traceback" not in run.text(), f"exit code {code}: {run.errors()[-300:]}"
        assert not run.events("worker_died"), run.events("worker_died")[0]["message"]
        assert run.left_behind() == [], "processes were left"
        warnings = run.errors().strip().replace(str(folder), "FOLDER").replace("t" * 20, "")
        logs = "".join(log.read_text() for log in (run.folder / "logs").iterdir())
        ports = "stay open to others" if "stay open to others" in logs else "let nobody in"
    top1 = run.summary()["metrics"]["top1"]
    return f"completed, top-1 {top1:.2f}; ports between ranks {ports}; said: {warnings or 'nothing'}"


def _first_process(folder: Path, container: Container, sync: str, signum: signal.Signals) -> str:
    """Stop a run that is process 1 and whose code leaves orphans, once it has evaluated an epoch."""
    _prepare(folder)
    with Runs(folder) as runs:
        settings = ("--loaders", "1", "--epochs", "1000000", "--sync", sync)
        run = runs.start("train", "digits", *SMALL, *MODEL, *settings, folder="run", prefix=container.prefix(folder))
        run.wait_for(lambda: run.records("evaluation"), "an evaluation")
        first = first_process_of(run.process.pid)
        run.wait_for(lambda: not zombies_below(first), "no zombies", 10.0)
        began = time.monotonic()
        os.kill(first, signum)
        run.end()
        took_s = time.monotonic() - began
        last = run.check_stopped(signum)
    return f"orphans reaped; {signum.name} to process 1 ended it after {took_s:.1f} s with a checkpoint of step {last}"


def _prepare(folder: Path) -> None:
    if CANNOT:
        raise CannotRunHere(CANNOT)
    shutil.copy(orphan_parts.__file__, folder)


SCENARIOS = (
    *(
        Scenario(
            f"first-process-{word}",
            f"As a container's first process, {place.words}, a run by {sync} reaps orphans, saves on SIGTERM, and "
            "leaves nothing",
            functools.partial(_first_process, container=place.container, sync=sync, signum=signal.SIGTERM),
            short=word in OF_EACH_KIND,
        )
        for word, (sync, place) in SYNCS.items()
    ),
    *(
        Scenario(
            f"first-process-{word}-sigquit",
            f"As a container's first process a run by {sync} reaps orphans, saves on SIGQUIT, and leaves nothing",
            functools.partial(_first_process, container=Container(), sync=sync, signum=signal.SIGQUIT),
            short=False,
        )
        for word, (sync, _) in SYNCS.items()
        if word in ("allreduce", "ps")
    ),
    *(
        Scenario(
            f"{name}-{word}",
            f"A run by {sync} works {place.words}",
            functools.partial(_poor, container=place.container, sync=sync),
            short=False,
        )
        for name, place in (("poor", POOR), ("poorer", POORER))
        for word, (sync, _) in SYNCS.items()
    ),
)
