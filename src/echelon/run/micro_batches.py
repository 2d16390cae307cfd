"""`--on-oom halve`: more micro-batches of fewer samples for a run that ran out of memory; its batch stays as it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.config import RunConfig, load_run_config, to_yaml
from echelon.core.errors import UserError
from echelon.core.files import write_atomic
from echelon.launch.plan import is_worker
from echelon.launch.supervisor import Remedy
from echelon.records.events import MoreMicroBatches
from echelon.records.file import Recorder
from echelon.run.machine import say
from echelon.trainer.folder import CONFIG_FILE

if TYPE_CHECKING:
    from echelon.trainer.resolved import ResolvedRun

HALVE = "halve"


def check_micro_batches(run: ResolvedRun, ranks: int) -> None:
    """Refuse a choice of micro-batches where ranks would not agree on it, or where another setting cuts the batches.

    Raises:
        UserError: names what to use instead.
    """
    training = run.config.training
    for flag, used in (("--on-oom halve", training.on_oom == HALVE), ("--accumulate auto", is_open(run.config))):
        if used and is_worker():
            raise UserError(f"{flag} is for ranks that Echelon starts: leave out torchrun, or use --accumulate N")
        if used and run.nodes.most > 1:
            raise UserError(f"{flag} is for runs on one machine: leave out --nodes, or use --accumulate N")
        if used and run.layout_for(ranks).pp > 1:
            raise UserError(f"{flag} with pp: a pipeline cuts its batches itself: use microbatches=N in --parallel")


def is_open(config: RunConfig) -> bool:
    """Whether a description leaves the number of micro-batches to be chosen."""
    return config.training.accumulate == 0


def is_batch_open(config: RunConfig) -> bool:
    """Whether a description leaves the samples of a batch to be chosen."""
    return config.data.batch_size == 0


def with_micro_batches(config: RunConfig, count: int) -> RunConfig:
    """Return a description with another number of micro-batches."""
    return replace(config, training=replace(config.training, accumulate=count))


def samples_of(run: ResolvedRun, ranks: int) -> int:
    """Return the samples of a batch that a rank has, of a run on so many; the most where they differ."""
    return -(-run.config.data.batch_size // run.batch_parts(run.layout_for(ranks)))


def twice(count: int, samples: int) -> int | None:
    """Return twice as many micro-batches, at most one for each sample; None: they have one sample each already.

    >>> twice(1, 6), twice(4, 6), twice(6, 6)
    (2, 6, None)
    """
    return min(2 * count, samples) if count < samples else None


class Halving:
    """Halves the micro-batches of a run, in its description, when one of its processes ran out of memory."""

    def __init__(self, path: Path, samples: int, record: Recorder) -> None:
        """Take the run's folder, and the samples of a batch that a rank has."""
        self._path, self._samples, self._record = path, samples, record
        self._count = load_run_config(path / CONFIG_FILE).training.accumulate
        self._began_with: dict[str, int] = {}

    @classmethod
    def of(cls, run: ResolvedRun, ranks: int, path: Path, record: Recorder) -> Halving | None:
        """Return what halves for a run on so many ranks; None where that is not asked for."""
        return cls(path, samples_of(run, ranks), record) if run.config.training.on_oom == HALVE else None

    def begin(self, process: str) -> None:
        """Note a process that begins, with the micro-batches of now."""
        self._began_with[process] = self._count

    def ease(self, process: str) -> Remedy:
        """Halve the micro-batches that a process ran out of memory with, unless they have become smaller since."""
        if self._began_with.get(process, self._count) == self._count:
            count = twice(self._count, self._samples)
            if count is None:
                return Remedy(hopeless="--on-oom halve cannot help: each micro-batch has one sample already")
            self._set(count)
        return Remedy(eased=f"{self._count} micro-batches")

    def _set(self, count: int) -> None:
        file, before = self._path / CONFIG_FILE, self._count
        config = load_run_config(file)
        write_atomic(file, to_yaml(with_micro_batches(config, count)))
        self._count = count
        each = -(-self._samples // count)
        message = (
            f"out of memory (--on-oom halve): {count} micro-batches of {each} sample{'s' * (each > 1)} a worker from "
            f"now on, not {before}; the batch stays {config.data.batch_size}"
        )
        self._record.write(MoreMicroBatches(message, count))
        say(message)
