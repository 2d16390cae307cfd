"""What steps do that no other command does: `python -m echelon.flows.work prepare|select ...`."""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from echelon.core.errors import USER_ERROR_EXIT_CODE, UserError, naming
from echelon.core.files import write_atomic
from echelon.core.own import find_own
from echelon.records.events import StartedOver
from echelon.records.file import newest
from echelon.records.kinds import Evaluation, Start


def prepare(name: str, folder: Path, settings: dict[str, str]) -> None:
    """Call a function of the user's with the step's folder and its settings, each as its parameter's type.

    Raises:
        UserError: there is no such function, or it does not take the settings.
    """
    function = find_own("prepare", name)
    try:
        with naming(f"prepare {name}"):
            values = _typed(function, settings)
        inspect.signature(function).bind(folder, **values)
    except (NameError, TypeError, ValueError) as error:
        raise UserError(f"prepare {name}: {error}; it is called with a folder and the step's settings") from None
    function(folder, **values)


def _typed(function: Callable[..., object], settings: Mapping[str, str]) -> dict[str, object]:
    """Return settings as the plain types of a function's parameters; what has another type, or none, stays a text.

    Raises:
        UserError: a value does not fit its type.
        NameError: a type of a setting is known to type checkers only.
    """
    code = inspect.unwrap(function)
    annotations = inspect.get_annotations(code)
    wanted = SimpleNamespace(__annotations__={name: annotations[name] for name in settings if name in annotations})
    types = get_type_hints(wanted, globalns=getattr(code, "__globals__", None))
    return {name: _value(name, types.get(name, str), text) for name, text in settings.items()}


def _value(name: str, kind: Any, text: str) -> object:
    if not _is_plain(kind):
        return text
    try:
        return TypeAdapter(kind).validate_python(text)
    except ValidationError as error:
        raise UserError(f"{name} is {text!r}: {error.errors()[0]['msg']}") from None


def _is_plain(kind: object) -> bool:
    """Whether a type is one whose values are written as a word."""
    if get_origin(kind) is Literal:
        return all(isinstance(each, str) for each in get_args(kind))
    if get_origin(kind) in (Union, UnionType):
        return all(map(_is_plain, get_args(kind)))
    return kind in (bool, int, float, str, Path, type(None))


def select(folder: Path, runs: Sequence[Path]) -> None:
    """Link to the run with the best evaluation, and write how they compare into `choice.json`.

    Raises:
        UserError: runs of different metrics, or one without an evaluation.
    """
    found = [_best(run) for run in runs]
    metrics = {metric for metric, _, _ in found}
    if len(metrics) > 1:
        raise UserError(f"runs of different metrics cannot be compared: {', '.join(sorted(metrics))}")
    best = max(range(len(runs)), key=lambda i: found[i][2])  # of equal ones the first
    link = folder / "run"
    link.unlink(missing_ok=True)
    link.symlink_to(os.path.relpath(runs[best], folder), target_is_directory=True)
    rows = [{"run": os.path.relpath(run, folder), "value": value} for run, (_, value, _) in zip(runs, found)]
    write_atomic(folder / "choice.json", json.dumps({"metric": found[0][0], "best": best, "runs": rows}, indent=2))
    print(f"best of {len(runs)} by {found[0][0]}: {runs[best]} ({found[best][1]:.4g})")


def _best(run: Path) -> tuple[str, float, float]:
    """Return a run's primary metric, its best value since it last started over, and a score, higher where better."""
    begun = next(newest(run, Start), None)
    if begun is None:
        raise UserError(f"{run}: no run there")
    metric = begun.task.primary
    lines = takewhile(lambda line: not isinstance(line, StartedOver), newest(run, Evaluation, StartedOver))
    values = [line.metrics.get(metric.name) for line in lines if isinstance(line, Evaluation)]
    known = [value for value in values if value is not None]
    if not known:
        raise UserError(f"{run} has no evaluation with {metric.name}")
    value = max(known, key=metric.score)
    return metric.name, value, metric.score(value)


def main() -> int:
    """Do one step's work; returns the exit code."""
    what, *words = sys.argv[1:]
    try:
        if what == "prepare":
            prepare(words[0], Path(words[1]), json.loads(words[2]))
        else:
            select(Path(words[0]), [Path(run) for run in words[1:]])
    except UserError as error:
        print(f"echelon: {error}", file=sys.stderr)
        return USER_ERROR_EXIT_CODE
    return 0


if __name__ == "__main__":
    sys.exit(main())
