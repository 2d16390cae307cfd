"""What a command that takes a run needs beside its folder: objects from Python, and the data."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from echelon.core.errors import UserError
from echelon.core.own import calling
from echelon.records.file import newest
from echelon.records.kinds import Start
from echelon.run.data_names import declared_kinds


@dataclass(frozen=True)
class RunUse:
    """A function of `echelon` that takes a run.

    Attributes:
        name: of the function.
        needs: keywords of objects from Python without which it would be of another run, or cannot be.
        argument: that stands behind the run; empty: none.
        takes_all: it takes the run's other objects, too.
    """

    name: str
    needs: tuple[str, ...]
    argument: str = ""
    takes_all: bool = False


_OF_MODEL = ("model", "task", "loss", "metrics")
RESUME = RunUse("resume", ("data", "optimizer", *_OF_MODEL), takes_all=True)
EVALUATE = RunUse("evaluate", ("data", *_OF_MODEL))
EXPORT = RunUse("export", ("data", *_OF_MODEL), "FILE")
PREDICT = RunUse("predict", _OF_MODEL, "SAMPLES")
FINETUNE = RunUse("finetune", ("model",), "DATA")


def check_objects(path: Path, objects: Collection[str], use: RunUse = RESUME) -> None:
    """Refuse to use a run without the objects from Python that it was given.

    Args:
        objects: keywords of those that are there.

    Raises:
        UserError: says which, and the call that gives them again.
    """
    begun = next(newest(path, Start), None)
    taken = [name for name in begun.objects if use.takes_all or name in use.needs] if begun is not None else []
    missing = [name for name in taken if name not in objects]
    if any(name in use.needs for name in missing):
        arguments = [use.argument] * bool(use.argument) + [f"{name}=..." for name in taken]
        several = len(missing) > 1
        was = (
            "were given from Python as objects: give them" if several else "was given from Python as an object: give it"
        )
        raise UserError(f"{', '.join(missing)} of {path} {was} again, {calling(use.name, path, arguments)}")


def check_data_is_here(path: Path, source: str, instead: str) -> None:
    """Refuse a run whose data is a file or folder that is not here, as where the run's folder was moved.

    Args:
        source: the data's name in the run's description.
        instead: what else can be done, for the refusal.

    Raises:
        UserError: says where the data was.
    """
    known = any(source in kind.names for kind in declared_kinds())
    if known or ":" in source or Path(source).expanduser().exists():
        return
    is_relative = not Path(source).expanduser().is_absolute()
    where = ", a path from the folder that the run was started in, which" * is_relative or ", which"
    raise UserError(f"{path}: the run's data is {source!r}{where} is not here: {instead}")
