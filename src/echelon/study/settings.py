"""Settings by the names that people write: `sync`, `batch-size`, `training.epochs`; and back to a command."""

from __future__ import annotations

from collections.abc import Mapping

from echelon.config.build import flag_of, leaves, plain_word, setting_names, switch_of
from echelon.core.axes import Axis
from echelon.core.errors import UserError, nearest
from echelon.core.spec import split_top_level

SET_BY_STUDY = {"run": "the study's folder (--run)", "training.seed": "the study's seeds (--seeds)"}


def full_name(word: str, where: str) -> str:
    """Return the dotted name of a setting.

    >>> full_name("batch-size", "--try")
    'data.batch_size'

    Raises:
        UserError: there is no such setting, or the study sets it itself.
    """
    names, key = setting_names(), plain_word(word)
    if key not in names:
        raise UserError(f"{where}: unknown setting {word.strip()!r}: {nearest(key, names)}".rstrip(": "))
    name = names[key]
    if name in SET_BY_STUDY:
        raise UserError(f"{where}: {word.strip()!r} is not for a candidate to set: it is {SET_BY_STUDY[name]}")
    return name


def short_name(name: str) -> str:
    """Return what one writes for a dotted name, such as `sync` or `batch_size`."""
    item = next(item for known, item, _ in leaves() if known == name)
    return plain_word(flag_of(name, item).lstrip("-"))


def read_try(text: str) -> dict[str, str]:
    """Read a candidate such as `sync=diloco(period=20), compression=int8`; an empty one is the study's own settings.

    Raises:
        UserError: not a list of setting=value, or an unknown setting.
    """
    settings: dict[str, str] = {}
    last = ""
    for part in split_top_level(text, ","):
        key, equals, value = part.partition("=")
        goes_on = last and (not equals or (last == "strategy.parallel" and key.strip() in list(Axis)))
        if goes_on:  # a value with a comma in it: 10mbit,20ms or dp=2,tp=2
            settings[last] += f",{part.strip()}"
            continue
        if not part.strip():
            continue
        if not equals:
            raise UserError(f"--try {text!r}: {part.strip()!r} is no setting=value, such as sync=allreduce")
        last = full_name(key, f"--try {text!r}")
        if last in settings:
            raise UserError(f"--try {text!r}: {key.strip()} stands twice")
        settings[last] = value.strip()
    return settings


def label_of(settings: Mapping[str, str]) -> str:
    """Write settings as one would for `--try`.

    >>> label_of({"strategy.sync": "local(8)"})
    'sync=local(8)'
    """
    words = [f"{short_name(n)}={value}" if value else f"no {short_name(n)}" for n, value in settings.items()]
    return ", ".join(words) or "as it is"


def arguments_of(settings: Mapping[str, str]) -> list[str]:
    """Return the arguments of `echelon train` for these settings, the data first."""
    known = {name: (item, kind) for name, item, kind in leaves()}
    positional, options = [], []
    for name, value in settings.items():
        item, kind = known[name]
        flag = flag_of(name, item)
        if not flag.startswith("--"):
            positional.append(value)
        elif kind is bool:
            options.append(switch_of(flag, value))
        else:
            options += [flag, value]
    return [*positional, *options]
