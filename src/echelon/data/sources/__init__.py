"""From data's name to a source. Each file of this folder that says `SOURCE = ...` is a kind of data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from echelon.config import DataConfig
from echelon.core.errors import UserError, unknown
from echelon.core.registry import Registry
from echelon.data.base import DataRequest, Source
from echelon.data.sources.base import SourceKind
from echelon.data.transforms import Transforms, own_transform
from echelon.data.weights import check_weights
from echelon.tasks.base import Encoding
from echelon.tasks.registry import AUTO, build_task

SOURCES = Registry("echelon.data.sources", "kind of data", "SOURCE")


def open_data(config: DataConfig, seed: int, task: str = AUTO, folder: Path | None = None) -> Source:
    """Open data by name: `digits`, a torchvision name, a folder, a text, or `module:function`.

    A known name wins over a folder of that name; write `./cifar10` for the folder.

    Args:
        config: the data's part of a run's description.
        seed: of the split, where the data has none.
        task: name of what is learnt, which says what is made of columns.
        folder: of the run, which keeps the tokeniser.

    Raises:
        UserError: there is no such data, it cannot be used, or there is no such task.
    """
    encoding = Encoding.AUTO if task == AUTO else build_task(task).encoding
    return kind_of(config.source).open(DataRequest(config, seed, encoding, task, folder))


def check_source(name: str) -> None:
    """Refuse data that is not there, without opening, calling or downloading anything.

    Raises:
        UserError: as `open_data` would.
    """
    kind_of(name).check(name)


@dataclass(frozen=True)
class SourceChoice:
    """The data that a description names; opened where it is needed.

    Attributes:
        config: the data's part of the description.
        seed: of the split, where the data has none.
        task: name of what is learnt.
        folder: of the run; None: it has none yet.
    """

    config: DataConfig
    seed: int
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

    def open(self) -> Source:
        """Open the data (`open_data`)."""
        return open_data(self.config, self.seed, self.task, self.folder)


def kind_of(name: str) -> SourceKind:
    """Return the kind of data that a name is.

    Raises:
        UserError: no kind takes it; names the nearest known one.
    """
    kinds: list[SourceKind] = [SOURCES.settings_class(each)() for each in SOURCES.names()]
    takers = [kind for kind in kinds if name in kind.names] or [kind for kind in kinds if kind.takes(name)]
    if takers:
        return min(takers, key=lambda kind: kind.takes_whatever_is_there)
    if "/" in name or name.startswith((".", "~")):
        raise UserError(f"data {name}: no such folder")
    raise unknown(
        "data", name, [each for kind in kinds for each in kind.names], [k.form for k in kinds if k.form], True
    )
