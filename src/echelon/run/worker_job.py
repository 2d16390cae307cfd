"""One short job on several processes of this machine, an evaluation or predictions: started, watched, its end told."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from echelon.config.schema import LaunchConfig
from echelon.config.validate import Nodes
from echelon.core.errors import USER_ERROR_EXIT_CODE, JobFailed, UserError
from echelon.core.files import write_atomic
from echelon.core.stop import StopFlag
from echelon.launch.culprit import Living
from echelon.launch.places.local import Local
from echelon.launch.plan import LaunchPlan, thread_count
from echelon.launch.supervisor import Death, Refused, Watch, supervise
from echelon.run.machine import ranks_here


@dataclass(frozen=True)
class WorkerFiles:
    """What the processes of a job leave in a folder for who started them."""

    folder: Path

    @property
    def begun(self) -> Path:
        """There, once the first process shows how far it is."""
        return self.folder / "begun"

    @property
    def metrics(self) -> Path:
        """The result of an evaluation, as JSON."""
        return self.folder / "metrics.json"

    @property
    def refusal(self) -> Path:
        """Why the user's input was refused, in one line."""
        return self.folder / "refusal"

    @property
    def failure(self) -> Path:
        """What the first process failed with that failed."""
        return self.folder / "failure"


@dataclass(frozen=True)
class WorkerJob:
    """What each of several processes does.

    Attributes:
        name: what is said to have failed: `the evaluation`.
        entry: `module:function`, called in each process with `files` and `args`.
        launch: of the run, whose settings say how processes are started.
    """

    name: str
    entry: str
    files: WorkerFiles
    args: tuple[Any, ...]
    workers: int
    launch: LaunchConfig

    def run(self, on_look: Callable[[Sequence[Living]], None] = lambda _: None) -> None:
        """Start the processes and wait for their end.

        Args:
            on_look: is called again and again meanwhile.

        Raises:
            UserError: one of them refused the user's input.
            JobFailed: one of them died.
        """
        plan = LaunchPlan(
            entry=self.entry,
            args=(self.files, *self.args),
            workers=self.workers,
            threads=thread_count(replace(self.launch, threads=0), self.workers),
            nodes=Nodes(1, 1),
            voters=(),
            max_restarts=0,
            log_dir=self.files.folder,
        )
        deaths: list[Death] = []
        watch = Watch(on_death=lambda death, _: deaths.append(death), on_look=on_look)
        with closing(Local()) as place, ranks_here(plan) as machine:
            try:
                supervise(machine.job, place, watch, StopFlag(), machine.rounds)
            except Refused:
                raise UserError(self.files.refusal.read_text()) from None
            except JobFailed as failure:
                told = self.files.failure.read_text() if self.files.failure.exists() else ""
                reason = told or str(failure) or ", ".join(map(str, deaths))
                raise JobFailed(f"{self.name} failed: {reason}") from None


@contextmanager
def as_worker(files: WorkerFiles) -> Iterator[int]:
    """Be one process of a job: give its rank; what goes wrong is written for who started it, and ends the process."""
    import torch

    from echelon.trainer.process import leave, log_to, one_line, place_of

    rank = int(os.environ["RANK"])
    log_to(files.folder / f"rank{rank}.log")
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    try:
        yield rank
    except UserError as error:
        write_atomic(files.refusal, str(error))
        leave(USER_ERROR_EXIT_CODE)
    except Exception as error:
        logging.exception("this process failed")
        # The first one's: others follow from it. The folder is gone where the command was stopped.
        with suppress(FileExistsError, FileNotFoundError), files.failure.open("x") as file:
            file.write(f"{one_line(error)} {place_of(error)}".strip())
        leave(1)
