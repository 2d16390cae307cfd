"""From data's name to a source. Each file of this folder that says `SOURCE = ...` is a kind of data."""

from __future__ import annotations

from dataclasses import dataclass

from echelon.config import DataConfig
from echelon.core.errors import UserError, nearest
from echelon.core.registry import Registry
from echelon.data.base import Source
from echelon.data.sources.base import SourceKind

SOURCES = Registry("echelon.data.sources", "kind of data", "SOURCE")


def open_data(config: DataConfig, seed: int) -> Source:
    """Open data by name: `digits`, a torchvision name, a folder, or `module:function`.

    A known name wins over a folder of that name; write `./cifar10` for the folder.

    Args:
        config: the data's part of a run's description.
        seed: of the split, where the data has none.

    Raises:
        UserError: there is no such data, or it cannot be used.
    """
    return kind_of(config.source).open(config, seed)


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
    """

    config: DataConfig
    seed: int

    def check(self) -> None:
        """Refuse data that is not there (`check_source`)."""
        check_source(self.config.source)

    def open(self) -> Source:
        """Open the data (`open_data`)."""
        return open_data(self.config, self.seed)


def kind_of(name: str) -> SourceKind:
    """Return the kind of data that a name is.

    Raises:
        UserError: no kind takes it; names the nearest known one.
    """
    kinds: list[SourceKind] = [SOURCES.settings_class(each)() for each in SOURCES.names()]
    takers = [kind for kind in kinds if name in kind.names] or [kind for kind in kinds if kind.takes(name)]
    if takers:
        return takers[0]
    if "/" in name or name.startswith((".", "~")):
        raise UserError(f"data {name}: no such folder")
    known = sorted(each for kind in kinds for each in kind.names)
    hint = nearest(name.lower(), known)  # CIFAR-10 is meant for cifar10
    *forms, last = (kind.form for kind in kinds if kind.form)
    raise UserError(f"unknown data {name!r}: {hint}known: {', '.join([*known, *forms])}, or {last}")
