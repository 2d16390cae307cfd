"""Data of the user's own, by the name of a function: `module:function`."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import ClassVar

from echelon.core.errors import UserError
from echelon.core.own import HUGGING_FACE, find_own
from echelon.data.base import DataRequest, Source
from echelon.data.own import from_datasets
from echelon.data.sources.base import SourceKind
from echelon.storage.url import is_url


class Function(SourceKind):
    """A function that returns the data."""

    form: ClassVar[str] = "module:function"
    packages: ClassVar[tuple[str, ...]] = ("torchvision",)

    def takes(self, name: str) -> bool:
        """Whether the name is of this form, and no path."""
        is_other = is_url(name) or name.startswith(HUGGING_FACE) or Path(name).expanduser().exists()
        return ":" in name and not is_other

    def check(self, name: str) -> None:
        """Refuse a module or function that does not exist.

        Raises:
            UserError: names the nearest.
        """
        find_own("data", name)

    def open(self, request: DataRequest) -> Source:
        """Call the function; the data has a split of its own."""
        return from_function(request.config.source)


SOURCE = Function


def from_function(name: str) -> Source:
    """Call `module:function`, which returns a `Source` or what `from_datasets` takes, (train, evaluation[, classes]).

    The current folder is searched too, as `python -m` does.

    Raises:
        UserError: there is no such module or function, or it returns something else.
    """
    function = find_own("data", name)
    if not callable(function):
        raise UserError(f"data {name} is a {type(function).__name__}: name a function that returns the data")
    try:
        needed = [p.name for p in inspect.signature(function).parameters.values() if _must_be_given(p)]
    except ValueError:  # some functions written in C do not tell
        needed = []
    if needed:
        raise UserError(f"data {name}: it is called without arguments, but needs {', '.join(needed)}: give defaults")
    given = function()
    if isinstance(given, Source):
        return given
    if not isinstance(given, (tuple, list)) or len(given) not in (2, 3):
        raise UserError(f"data {name} must return (train, evaluation) or (train, evaluation, classes)")
    return from_datasets(*given)


def _must_be_given(parameter: inspect.Parameter) -> bool:
    open_ended = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return parameter.default is inspect.Parameter.empty and parameter.kind not in open_ended
