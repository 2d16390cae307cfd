"""Which training samples a run knows, in the order of their numbers: what lets its data grow under it.

Samples keep their numbers for as long as the run goes on, so that an epoch in progress is finished with the samples
that it began with, each once; new ones have the numbers behind them, and come from a later epoch on.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from echelon.core.errors import UserError
from echelon.core.files import write_atomic
from echelon.records.decode import decode

RUN_FILE = "samples.json"


@dataclass(frozen=True)
class Growth:
    """From an epoch on, the first `count` samples are there."""

    epoch: int
    count: int


@dataclass(frozen=True)
class SampleIndex(ABC):
    """The samples of a run.

    Attributes:
        source: name of the data.
        begun: how many there were when the run began; of these some may be held out.
        stages: in the order of their epochs; the first one begins with the run.
        is_kept: whether the run's folder has it.
        can_grow: whether new ones can be taken while the run goes on.
    """

    can_grow: ClassVar[bool] = True
    source: str
    begun: int
    stages: tuple[Growth, ...]
    is_kept: bool

    @property
    def count(self) -> int:
        """How many the run knows."""
        return self.stages[-1].count

    @property
    @abstractmethod
    def added(self) -> int:
        """How many are there that the run does not know."""

    @property
    @abstractmethod
    def example(self) -> str:
        """What the first of these is called."""

    @abstractmethod
    def grown(self, epoch: int) -> SampleIndex:
        """Return the samples with the new ones from an epoch on."""

    def check(self, folder: Path) -> None:
        """Refuse data that has grown under a run.

        Raises:
            UserError: names the command that takes the new samples.
        """
        if self.added:
            raise UserError(
                f"data {self.source}: {self.added} samples are new since the run began, such as {self.example}: "
                f"`echelon resume {folder} --rescan` takes them from the next epoch on"
            )

    def trained_stages(self, train: int) -> tuple[Growth, ...]:
        """Return the stages in samples that are trained on: `train` of all; empty where the data did not grow."""
        if self.count == self.begun:
            return ()
        return tuple(replace(stage, count=stage.count - (self.count - train)) for stage in self.stages)

    def keep(self, folder: Path) -> None:
        """Write it to the folder of a run."""
        write_atomic(folder / RUN_FILE, json.dumps({**asdict(self), "is_kept": True}))  # any name is written in ASCII

    def _stages_with(self, epoch: int, count: int) -> tuple[Growth, ...]:
        return (*(stage for stage in self.stages if stage.epoch < epoch), Growth(epoch, count))


@dataclass(frozen=True)
class NamedSampleIndex(SampleIndex):
    """Samples that are known by their names, wherever new ones sort among them.

    Attributes:
        classes: of the samples, sorted; a run can learn no others.
        names: of the samples, in the order of their numbers.
        new: names of samples that are there, and that the run does not know.
    """

    classes: tuple[str, ...]
    names: Sequence[str]
    new: Sequence[str] = ()

    @classmethod
    def of(cls, folder: Path | None, source: str, classes: tuple[str, ...], names: Sequence[str]) -> NamedSampleIndex:
        """Return the samples that a run's folder keeps, of those that are there now; else all of these.

        Raises:
            UserError: one that the run knows is gone, there is another class, or the file cannot be read.
        """
        kept = None
        if (file := _read(folder, source)) is not None and file.names is not None:
            kept = cls(source, file.begun, tuple(file.stages), True, tuple(file.classes), file.names)
        if kept is None:
            return cls(source, len(names), (Growth(0, len(names)),), False, classes, names)
        if kept.classes != classes:
            other = sorted(set(kept.classes) ^ set(classes))[0]
            change = "is new" if other in classes else "is gone"
            raise UserError(f"data {source}: the class {other} {change} since the run began: a run keeps its classes")
        known, there = set(kept.names), set(names)
        if gone := [name for name in kept.names if name not in there]:
            more = f" and {len(gone) - 1} more" if len(gone) > 1 else ""
            raise UserError(
                f"data {source}: {gone[0]}{more} of the run's samples is gone, or has another name: put it back; a run "
                "goes on with all samples that it began with, or start a new one with --weights"
            )
        return replace(kept, new=[name for name in names if name not in known])

    @property
    def added(self) -> int:
        """How many are there that the run does not know."""
        return len(self.new)

    @property
    def example(self) -> str:
        """Return the name of the first new one."""
        return self.new[0]

    def order(self, names: Sequence[str]) -> NDArray[np.int64]:
        """Return where the samples lie among `names`."""
        places = {name: i for i, name in enumerate(names)}
        return np.array([places[name] for name in self.names], dtype=np.int64)

    def grown(self, epoch: int) -> NamedSampleIndex:
        """Return the samples with the new ones from an epoch on."""
        names = [*self.names, *self.new]
        return replace(self, names=names, new=(), stages=self._stages_with(epoch, len(names)))

    def keep(self, folder: Path) -> None:
        """Write it to the folder of a run."""
        super(NamedSampleIndex, replace(self, names=list(self.names), new=[])).keep(folder)


@dataclass(frozen=True)
class RowSampleIndex(SampleIndex):
    """Samples that are known by their place, as rows of a table are: new ones stand behind those that a run knows.

    Attributes:
        digests: of the rows up to the end of each stage: by them it is seen that earlier rows are what they were.
        there: how many rows there are now.
        digest: of all that are there.
    """

    digests: tuple[str, ...]
    there: int = 0
    digest: str = ""

    @classmethod
    def of(cls, folder: Path | None, source: str, there: int, digest_of: Callable[[int], str]) -> RowSampleIndex:
        """Return the rows that a run's folder keeps; else all that are there.

        Args:
            there: how many rows there are.
            digest_of: returns the digest of so many first rows.

        Raises:
            UserError: rows that the run knows are gone or are others, or the file cannot be read.
        """
        kept = None
        if (file := _read(folder, source)) is not None and file.digests is not None:
            kept = cls(source, file.begun, tuple(file.stages), True, tuple(file.digests))
        if kept is None:
            digest = digest_of(there)
            return cls(source, there, (Growth(0, there),), False, (digest,), there, digest)
        if there < kept.count:
            raise UserError(
                f"data {source}: {kept.count - there} of the run's {kept.count} rows are gone: put them back; a run "
                "goes on with all samples that it began with, or start a new one with --weights"
            )
        if digest_of(kept.count) != kept.digests[-1]:
            raise UserError(
                f"data {source}: some of the run's {kept.count} rows are not what they were: put them back as they "
                "were; new rows stand behind them, or start a new run with --weights"
            )
        return replace(kept, there=there, digest=digest_of(there) if there > kept.count else kept.digests[-1])

    @property
    def added(self) -> int:
        """How many are there that the run does not know."""
        return self.there - self.count

    @property
    def example(self) -> str:
        """Return what the first new row is called."""
        return f"row {self.count + 1}"

    def grown(self, epoch: int) -> RowSampleIndex:
        """Return the samples with the new ones from an epoch on."""
        return replace(self, stages=self._stages_with(epoch, self.there), digests=(*self.digests, self.digest))


@dataclass(frozen=True)
class FixedSampleIndex(SampleIndex):
    """Samples to which none can be added: by a digest it is seen that all are what they were.

    Attributes:
        digests: one, of all.
    """

    can_grow: ClassVar[bool] = False
    digests: tuple[str, ...]

    @classmethod
    def of(cls, folder: Path | None, source: str, count: int, digest: str) -> FixedSampleIndex:
        """Return the samples, which a run's folder may know.

        Raises:
            UserError: the folder knows others, or its file cannot be read.
        """
        file = _read(folder, source)
        if file is not None and file.digests and file.digests[-1] != digest:
            raise UserError(
                f"data {source}: it is not what it was when the run began, and cannot grow under a run: put it back as "
                "it was, or start a new run with --weights"
            )
        return cls(source, count, (Growth(0, count),), file is not None, (digest,))

    @property
    def added(self) -> int:
        """None."""
        return 0

    @property
    def example(self) -> str:
        """Nothing."""
        return ""

    def grown(self, epoch: int) -> FixedSampleIndex:
        """Return it as it is: there is nothing new."""
        return self


@dataclass(frozen=True)
class _IndexFile:
    """What a run's folder keeps: `names`, or `digests`, by the way in which samples are known."""

    source: str
    begun: int
    stages: Sequence[Growth]
    classes: Sequence[str] = ()
    names: Sequence[str] | None = None
    digests: Sequence[str] | None = None


def _read(folder: Path | None, source: str) -> _IndexFile | None:
    """Return what a run's folder keeps of this data; None: nothing, or it is of other data.

    Raises:
        UserError: the file cannot be read.
    """
    path = folder / RUN_FILE if folder is not None else None
    if path is None or not path.is_file():
        return None
    try:
        file = decode(_IndexFile, json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: cannot be read ({error}): which samples the run has is lost") from error
    return file if file.source == source else None
