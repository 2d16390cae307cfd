"""What a run keeps of its data (`data.json`): enough to use its model on other samples, where the data is gone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from echelon.core.errors import UserError
from echelon.core.files import DATA_FILE, write_atomic
from echelon.data.base import DataInfo
from echelon.data.tokenisers import RUN_FILE as TOKENISER_FILE
from echelon.data.tokenisers import read_json
from echelon.tasks.base import SentenceMarks
from echelon.tasks.nest import Nest, TensorSpec

RUN_FILE = DATA_FILE
_ELSEWHERE = ("tokeniser", "tightest", "stages", "target_values")  # in files of their own, or for training alone
_NESTS = ("several", "targets")
_SPEC, _TUPLE, _LIST, _DICT = "spec", "tuple", "list", "dict"


def keep_info(folder: Path, info: DataInfo) -> None:
    """Write what is known of the data to a run's folder, where it is not there yet.

    Data whose samples are named tuples or dataclasses of the caller's own is not kept: no file leads back to these.
    """
    file = folder / RUN_FILE
    if file.exists() or not folder.is_dir():
        return
    try:
        values = {each.name: _plain(each.name, getattr(info, each.name)) for each in fields(info)}
    except TypeError:
        return
    write_atomic(file, json.dumps({name: value for name, value in values.items() if name not in _ELSEWHERE}))


def read_info(folder: Path) -> DataInfo | None:
    """Return what a run keeps of its data; None: it keeps nothing, as runs of older versions.

    Raises:
        UserError: the file cannot be read.
    """
    file, tokeniser = folder / RUN_FILE, folder / TOKENISER_FILE
    if not file.is_file():
        return None
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        known = {each.name for each in fields(DataInfo)} - set(_ELSEWHERE)
        info = DataInfo(**{name: _typed(name, value) for name, value in values.items() if name in known})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{file}: cannot be read ({error}): what the run keeps of its data is lost") from error
    return replace(info, tokeniser=read_json(tokeniser)) if tokeniser.is_file() else info


def _plain(name: str, value: Any) -> Any:
    """Return a field's value for JSON.

    Raises:
        TypeError: it is a nest of containers that no text leads back to.
    """
    if name in _ELSEWHERE:
        return None
    if name in _NESTS:
        return None if value is None else _plain_nest(value)
    if isinstance(value, SentenceMarks):
        return [value.begin, value.end]
    return value


def _plain_nest(specs: Nest) -> dict[str, Any]:
    if isinstance(specs, TensorSpec):
        return {_SPEC: [list(specs.shape), specs.dtype, specs.count, specs.ragged]}
    if type(specs) in (tuple, list):
        return {_TUPLE if isinstance(specs, tuple) else _LIST: [_plain_nest(each) for each in specs]}
    if isinstance(specs, Mapping):
        return {_DICT: {name: _plain_nest(each) for name, each in specs.items()}}
    raise TypeError(f"{type(specs).__name__} is no plain container")


def _typed(name: str, value: Any) -> Any:
    if name in _NESTS:
        return None if value is None else _typed_nest(value)
    if name == "marks":
        return None if value is None else SentenceMarks(*value)
    return tuple(value) if isinstance(value, list) else value


def _typed_nest(value: Mapping[str, Any]) -> Nest:
    ((kind, content),) = value.items()
    if kind == _SPEC:
        shape, dtype, count, ragged = content
        return TensorSpec(tuple(shape), dtype, count, ragged)
    if kind == _DICT:
        return {name: _typed_nest(each) for name, each in content.items()}
    children = [_typed_nest(each) for each in content]
    return tuple(children) if kind == _TUPLE else children
