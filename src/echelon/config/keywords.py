"""Settings as keywords of Python functions: their names, types, signatures and documentation.

`python -m echelon.config.keywords` writes what type checkers read (`echelon.config.typed`) from the schema anew.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import Field, dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args

from echelon.config.build import flag_of, leaves
from echelon.config.schema import traits_of
from echelon.core.errors import UserError, nearest

PARAMETERS = (  # of `train`, for they take objects too
    *("model.name", "data.source", "task", "run"),
    *("optimizer.loss", "training.metrics", "tracking.callbacks"),
)
RESUMABLE = (
    *("launch.", "checkpoint.", "tracking."),
    *("training.epochs", "training.max_steps", "training.eval_every", "data.loaders"),
    *("training.early_stop", "training.early_stop_delta", "training.max_time", "training.profile"),
    *("training.accumulate", "training.on_oom"),
    *("data.on_bad_image", "data.on_nan", "data.follow_links"),  # one may be found hours after the start
    *("data.decode",),
    *("strategy.parallel", "strategy.tensor_plan", "strategy.cuts", "training.recompute"),
)
NOT_OF_STUDIES = ("training.seed", "optimizer.lr_find")
GENERATED = Path(__file__).with_name("typed.py")
_HEAD = '''"""Settings as types: what keywords `echelon.train` and `echelon.resume` take.

Generated from `echelon.config.schema` by `python -m echelon.config.keywords`: change that, and run this.
"""

# fmt: off
# ruff: noqa: E501

from collections.abc import Callable
from typing import Any, Literal, TypedDict
'''
_WIDTH = 120

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Keyword:
    """One setting as a keyword.

    Attributes:
        name: as it is written in Python: that of the command line's option, with underscores.
        setting: its dotted name.
        kind: its type.
    """

    name: str
    setting: str
    field: Field[Any]
    kind: Any

    @property
    def type(self) -> str:
        """Its type, as it is written in Python."""
        values = ", ".join(f'"{value}"' for value in get_args(self.kind))
        if callables := traits_of(self.field).callables:
            return f"str | {callables}"
        if traits_of(self.field).counts:
            return "str | int"
        if words := ", ".join(f'"{word}"' for word in traits_of(self.field).renamed):
            return f"{self.kind.__name__} | Literal[{words}]"
        return f"Literal[{values}]" if values else str(self.kind.__name__)

    @property
    def shown_kind(self) -> Any:
        """Its type in a signature: as text where it takes more than its kind, such as a word or a function."""
        traits = traits_of(self.field)
        return self.type if traits.callables or traits.renamed or traits.counts else self.kind

    @property
    def help(self) -> str:
        """What the setting is, and its default."""
        default = "" if self.field.default == "" else f" [default: {self.field.default!r}]"
        return f"{traits_of(self.field).help}{default}"


def keywords() -> dict[str, Keyword]:
    """Return every setting by its keyword."""
    named = {}
    for setting, item, kind in leaves():
        name = flag_of(setting, item).lstrip("-").replace("-", "_").lower()
        named[name] = Keyword(name, setting, item, kind)
    return named


def setting_of(keyword: str) -> str:
    """Return the dotted name of the setting that a keyword names.

    Raises:
        UserError: there is none; says which is the nearest.
    """
    known = keywords()
    if keyword not in known:
        raise UserError(f"unknown setting {keyword!r}: {nearest(keyword, known)}".rstrip(": "))
    return known[keyword].setting


def for_train() -> list[Keyword]:
    """Return the keywords of `train` beside its parameters."""
    return [keyword for keyword in keywords().values() if keyword.setting not in PARAMETERS]


def for_resume() -> list[Keyword]:
    """Return the keywords of settings that may change when a run is resumed."""
    return [keyword for keyword in for_train() if keyword.setting.startswith(RESUMABLE)]


def for_compare() -> list[Keyword]:
    """Return the keywords of settings that all runs of a study have."""
    return [keyword for keyword in for_train() if keyword.setting not in NOT_OF_STUDIES]


def takes_settings(settings: Iterable[Keyword], *objects: str) -> Callable[[Function], Function]:
    """Give a function that takes `**settings` a signature and a documentation that list each of them.

    Args:
        objects: names of keywords beside settings; None where they are left out.
    """
    listed = list(settings)

    def documented(function: Function) -> Function:
        """Set signature and documentation."""
        signature = inspect.signature(function)
        fixed = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        options = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in objects]
        options += [
            inspect.Parameter(k.name, inspect.Parameter.KEYWORD_ONLY, default=k.field.default, annotation=k.shown_kind)
            for k in listed
        ]
        function.__signature__ = signature.replace(parameters=[*fixed, *options])  # type: ignore[attr-defined]
        text = inspect.cleandoc(function.__doc__ or "")
        lines = "\n".join(_wrapped(f"{k.name} ({k.type}): {k.help}") for k in listed)
        function.__doc__ = f"{text}\n\nSettings:\n{lines}\n"
        return function

    return documented


def source() -> str:
    """Return the module of types that the schema makes."""
    about = "Keywords of `echelon.{}`: settings by the names of the command line's options, with underscores."
    known = {keyword.name for keyword in for_resume()}
    others = [keyword for keyword in for_train() if keyword.name not in known]
    resume = _typed_dict("ResumeSettings", "TypedDict", about.format("resume"), for_resume())
    train = _typed_dict("TrainSettings", "ResumeSettings", about.format("train"), others)
    return "\n\n".join([_HEAD, resume, train])


def _typed_dict(name: str, base: str, about: str, settings: Iterable[Keyword]) -> str:
    return "\n".join([f"class {name}({base}, total=False):", f'    """{about}"""', "", *_entries(settings)]) + "\n"


def _entries(settings: Iterable[Keyword]) -> Iterator[str]:
    for keyword in settings:
        yield f"    {keyword.name}: {keyword.type}"
        yield f'    """{keyword.help}"""'


def _wrapped(text: str) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent="    ", subsequent_indent="        ", break_on_hyphens=False)


if __name__ == "__main__":
    GENERATED.write_text(source(), encoding="utf-8")
