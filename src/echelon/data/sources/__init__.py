"""From data's name to a source. Each file of this folder that says `SOURCE = ...` is a kind of data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from echelon.config import DataConfig
from echelon.core.errors import UserError, unknown
from echelon.core.registry import Registry
from echelon.data.base import DataOutline, DataRequest, Source
from echelon.data.by_url import check_there, local_path
from echelon.data.measures import measured_as, measures_for
from echelon.data.parts import TEST, VALIDATION
from echelon.data.preparation import Preparation, read_preparation
from echelon.data.sources.base import SourceKind
from echelon.data.transforms import Transforms, own_transform
from echelon.data.weights import check_weights
from echelon.storage.url import check_url, folder_of_url, is_url
from echelon.tasks.base import Encoding
from echelon.tasks.registry import AUTO, build_task

SOURCES = Registry("echelon.data.sources", "kind of data", "SOURCE")


def open_data(
    config: DataConfig,
    seed: int,
    task: str = AUTO,
    folder: Path | None = None,
    tell_whole: Callable[[], None] | None = None,
) -> Source:
    """Open data by name for a loop or a script of one's own; a run opens its `SourceChoice`.

    Names are `digits`, those of torchvision, a folder, a text, or `module:function`. A known name wins over a folder of
    that name; write `./cifar10` for the folder.

    Args:
        config: the data's part of a run's description.
        seed: of the split, where the data has none.
        task: name of what is learnt, which says what is made of columns.
        folder: of the run, which keeps the tokeniser.
        tell_whole: as in `DataRequest`.

    Raises:
        UserError: there is no such data, it cannot be used, or there is no such task.
    """
    return SourceChoice(config, seed, read_preparation(config, folder), task, folder).open(tell_whole)


def outline_of(request: DataRequest) -> DataOutline | None:
    """Return what data tells without being opened (`SourceKind.outline`).

    Raises:
        UserError: there is no such data, or it cannot be read.
    """
    kind, request = _asked(request)
    return kind.outline(request)


def _asked(request: DataRequest) -> tuple[SourceKind, DataRequest]:
    """Return the kind of the data that is asked for, and the request with where it lies; from a URL it is brought."""
    name = _on_this_machine(request.config.source)
    if not is_url(name):
        return kind_of(name), replace(request, config=replace(request.config, source=name))
    path = local_path(request.config)
    kind = kind_of(str(path))
    if not kind.is_read_by_url:
        raise UserError(f"data {name}: tar shards and tables are read by URL; copy other data to a folder")
    return kind, replace(request, brought=path)


def _on_this_machine(name: str) -> str:
    """Return a `file://` URL as the path that it names, and any other name as it is."""
    path = folder_of_url(check_url(name)) if is_url(name) else None
    return name if path is None else str(path)


def check_source(name: str) -> None:
    """Refuse data that is not there, without opening, calling or downloading anything.

    Raises:
        UserError: as `open_data` would.
    """
    name = _on_this_machine(name)
    if is_url(name):
        check_there(name)
    else:
        kind_of(name).check(name)


@dataclass(frozen=True)
class SourceChoice:
    """The data that a description names; opened where it is needed.

    Attributes:
        config: the data's part of the description.
        seed: of the split, where the data has none.
        preparation: how samples are made of it.
        task: name of what is learnt.
        folder: of the run; None: it has none yet.
    """

    config: DataConfig
    seed: int
    preparation: Preparation
    task: str = AUTO
    folder: Path | None = None

    def check(self) -> None:
        """Refuse data that is not there (`check_source`)."""
        check_source(self.config.source)

    def check_options(self, transforms: Transforms) -> None:
        """Refuse a file of weights, or transforms, that are not there.

        Args:
            transforms: a caller's own, which need no name.

        Raises:
            UserError: names the setting.
        """
        check_weights(self.config.sample_weights)
        own_transform("--transform", self.config.transform, transforms.training, self.seed)
        own_transform("--eval-transform", self.config.eval_transform, transforms.evaluation, self.seed)

    def bring(self) -> None:
        """Bring data that lies at a URL to this machine, so that none of its processes has to wait for that.

        Raises:
            UserError: it cannot be brought.
        """
        if is_url(_on_this_machine(self.config.source)):
            local_path(self.config)

    def open(self, tell_whole: Callable[[], None] | None = None) -> Source:
        """Open the data.

        Args:
            tell_whole: as in `DataRequest`.

        Raises:
            UserError: there is no such data, it cannot be used, or there is no such task.
        """
        encoding = Encoding.AUTO if self.task == AUTO else build_task(self.task).encoding
        request = DataRequest(
            self.config, self.seed, encoding, self.task, self.folder, self.preparation, tell_whole=tell_whole
        )
        kind, request = _asked(request)
        kept, source = measures_for(request), replace(kind.open(request), reads=kind.reads)
        return (source if kept is None else measured_as(source, kept)).normalised(self.preparation.normalisation)

    def open_other(self) -> tuple[Source, str]:
        """Open data that is not the run's, to be evaluated.

        Returns:
            the data, and the part that is evaluated, `test` or `val`; empty: all of it, as it has no parts.

        Raises:
            UserError: as `open`.
        """
        whole: list[bool] = []
        source = self.open(lambda: whole.append(True))
        return source, "" if whole else VALIDATION if source.test is None else TEST


def kind_of(name: str) -> SourceKind:
    """Return the kind of data that a name is.

    Raises:
        UserError: no kind takes it; names the nearest known one.
    """
    if name in SOURCES.names() and name in (own := SOURCES.settings_class(name)()).names:
        return own  # its file is called like its data: no other is imported
    kinds: list[SourceKind] = [SOURCES.settings_class(each)() for each in SOURCES.names()]
    takers = [kind for kind in kinds if name in kind.names] or [kind for kind in kinds if kind.takes(name)]
    if takers:
        return min(takers, key=lambda kind: kind.takes_whatever_is_there)
    if "/" in name or name.startswith((".", "~")):
        raise UserError(f"data {name}: no such folder")
    raise unknown(
        "data", name, [each for kind in kinds for each in kind.names], [k.form for k in kinds if k.form], True
    )
