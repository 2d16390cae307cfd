"""Build a run's description from defaults < YAML file < command line, and remember where each value came from."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import Field, asdict, dataclass, fields, is_dataclass
from functools import cache
from itertools import accumulate
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from echelon.config.schema import RunConfig, traits_of
from echelon.config.validate import check
from echelon.core.errors import UserError, nearest, shown

if TYPE_CHECKING:  # a command that reads no file imports no YAML
    import yaml

DEFAULT = "default"
MAX_NUMBER = 2**63 - 1
COMMAND_LINE = "command line"  # the origin of what a user, or Python, gives directly

SettingValue = str | int | float | bool | None
SettingTree = dict[str, "SettingValue | SettingTree"]


@dataclass(frozen=True)
class Resolved:
    """A checked description and the origin of each value by dotted name (`optimizer.lr`: `run.yaml, line 4`)."""

    config: RunConfig
    origins: Mapping[str, str]


@cache
def leaves() -> tuple[tuple[str, Field[Any], Any], ...]:
    """Return (dotted name, field, type) of every setting."""
    return tuple(_leaves_of(RunConfig, ""))


def _leaves_of(config_type: type, prefix: str) -> Iterator[tuple[str, Field[Any], Any]]:
    hints = get_type_hints(config_type)
    for item in fields(config_type):
        name = f"{prefix}{item.name}"
        if is_dataclass(hints[item.name]):
            yield from _leaves_of(hints[item.name], f"{name}.")
        else:
            yield name, item, hints[item.name]


def leaf_values(config: RunConfig) -> dict[str, str | int | float | bool]:
    """Return every setting's value by dotted name."""
    return {name: attrgetter(name)(config) for name, _, _ in leaves()}


def flag_of(name: str, item: Field[Any]) -> str:
    """Return the command-line flag of a setting."""
    return traits_of(item).flag or "--" + name.rsplit(".", 1)[-1].replace("_", "-")


@cache
def setting_names() -> Mapping[str, str]:
    """Return each setting's dotted name by what one may write for it: that, or its flag as a word, `batch_size`."""
    by_flag = {plain_word(flag_of(name, item).lstrip("-")): name for name, item, _ in leaves()}
    return {name: name for name, _, _ in leaves()} | by_flag


def plain_word(text: str) -> str:
    """Return how a setting that is written by hand is looked up: `batch_size` for `Batch-Size`."""
    return text.strip().lower().replace("-", "_")


def switch_of(flag: str, text: str) -> str:
    """Return the option that turns a switch on or off; a text that is neither stays, and the command refuses it."""
    try:
        return flag if TypeAdapter(bool).validate_python(text) else f"--no-{flag[2:]}"
    except ValidationError:
        return f"{flag}={text}"


def hint_for(name: str) -> str:
    """Return `did you mean X? ` for a setting that does not exist, wherever in the schema the nearest one is.

    >>> hint_for("training.lr"), hint_for("epochs"), hint_for("optimiser")
    ('did you mean optimizer.lr? ', 'did you mean training.epochs? ', 'did you mean optimizer? ')
    """
    known = {setting: flag_of(setting, item).lstrip("-").replace("-", "_") for setting, item, _ in leaves()}
    last = name.rpartition(".")[2].replace("-", "_")
    same = [setting for setting, flag in known.items() if last in (setting.rpartition(".")[2], flag)]
    if same:
        return f"did you mean {' or '.join(same)}? "
    if hint := nearest(name, [*known, *(setting.partition(".")[0] for setting in known)]):
        return hint
    by_leaf = {setting.rpartition(".")[2]: setting for setting in known}
    closest = nearest(last, by_leaf).removeprefix("did you mean ").removesuffix("? ")
    return f"did you mean {by_leaf[closest]}? " if closest else ""


def build(
    file: Path | None = None, overrides: Mapping[str, SettingValue] | None = None, in_python: bool = False
) -> Resolved:
    """Merge defaults, a YAML file and overrides by dotted name, then check the whole.

    Args:
        in_python: overrides are keywords, and are called so where one is refused.

    Raises:
        UserError: an unknown key, a wrong type, a value out of bounds, or settings that contradict each other.
    """
    values: dict[str, SettingValue] = {}
    origins: dict[str, str] = {}
    for name, value, origin in [*_from_file(file), *((k, v, COMMAND_LINE) for k, v in (overrides or {}).items())]:
        values[name], origins[name] = value, origin
    tree: SettingTree = {}
    known = {name: (item, kind) for name, item, kind in leaves()}
    for name, value in values.items():
        if name not in known:
            raise UserError(f"{origins[name]}: unknown setting {name!r}: {hint_for(name)}".rstrip(": "))
        where = f"{origins[name]}: {name}"
        if origins[name] == COMMAND_LINE:
            flag = flag_of(name, known[name][0])
            where = f"{flag.lstrip('-').replace('-', '_') if in_python else flag} ({name})"
        _place(tree, name, _checked(value, known[name], where))
    config = TypeAdapter(RunConfig).validate_python(tree)
    check(config)
    return Resolved(config, {name: origins.get(name, DEFAULT) for name in known})


def load_run_config(file: Path) -> RunConfig:
    """Read a run's own `config.yaml`.

    Raises:
        UserError: the file is missing or not a run's description.
    """
    if file.exists() and not file.is_file():  # of a pipe one would wait for a writer that never comes
        raise UserError(f"{file} cannot be read: it is no plain file")
    return build(file).config


def to_yaml(config: RunConfig) -> str:
    """Write the description so that `build` reads the same one back."""
    import yaml

    return yaml.safe_dump(asdict(config), sort_keys=False, allow_unicode=True)


def _place(tree: SettingTree, name: str, value: SettingValue) -> None:
    *sections, leaf = name.split(".")
    for section in sections:
        inner = tree.setdefault(section, {})
        assert isinstance(inner, dict)
        tree = inner
    tree[leaf] = value


_IN_PLAIN_WORDS = {"Input should be": "it must be", "a valid integer": "a whole number", "a valid ": "a "}  # pydantic's


def _checked(value: SettingValue, known: tuple[Field[Any], Any], where: str) -> SettingValue:
    item, kind = known
    if traits_of(item).counts and isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if isinstance(value, str):
        value = traits_of(item).renamed.get(value, value)
    try:
        checked: SettingValue = TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        reason = error.errors()[0]["msg"].partition(", unable")[0]
        for theirs, ours in _IN_PLAIN_WORDS.items():
            reason = reason.replace(theirs, ours)
        hint = nearest(str(value), [str(a) for a in getattr(kind, "__args__", ())])
        raise UserError(f"{where} is {shown(repr(value))}: {hint}{reason[0].lower()}{reason[1:]}") from None
    if not isinstance(checked, int | float):
        return checked
    if isinstance(checked, int) and abs(checked) > MAX_NUMBER:
        raise UserError(f"{where} has more digits than any setting needs")
    if not math.isfinite(checked):  # nan is below no bound
        raise UserError(f"{where} is {checked}: it must be a finite number")
    low, high = traits_of(item).above, traits_of(item).below
    if (low is not None and checked < low) or (high is not None and checked > high):
        bounds = f"at least {low:g}" if high is None else f"between {low:g} and {high:g}"
        raise UserError(f"{where} is {checked}: it must be {bounds}")
    return checked


def _from_file(file: Path | None) -> Iterator[tuple[str, SettingValue, str]]:
    if file is None:
        return
    import yaml

    from echelon.config.yaml_file import read_yaml

    node = read_yaml(file)
    if node is None:
        return
    if not isinstance(node, yaml.MappingNode):
        raise UserError(f"{file}: expected settings such as `data: {{source: digits}}`")
    yield from _walk(file, node, "")


def _walk(file: Path, node: yaml.MappingNode, prefix: str) -> Iterator[tuple[str, SettingValue, str]]:
    """Yield each leaf; a section given as a scalar is its main setting (`model: resnet20` is `model.name`)."""
    import yaml

    from echelon.config.yaml_file import plain

    settings = {name: kind for name, _, kind in leaves()}
    sections = {start for name in settings for start in accumulate(name.split(".")[:-1], "{}.{}".format)}
    for key_node, value_node in node.value:
        name = f"{prefix}{key_node.value}"
        origin = f"{file}, line {key_node.start_mark.line + 1}"
        is_section = name in sections
        if is_section and isinstance(value_node, yaml.MappingNode):
            yield from _walk(file, value_node, f"{name}.")
            continue
        if is_section:
            main = next((s for s in (f"{name}.name", f"{name}.source") if s in settings), None)
            if main is None or not isinstance(value_node, yaml.ScalarNode):
                raise UserError(f"{origin}: {name} is a group of settings, write `{name}: {{...}}`")
            name = main
        elif name not in settings:
            raise UserError(f"{origin}: unknown setting {shown(name)!r}: {hint_for(name)}".rstrip(": "))
        is_text = settings[name] is str or get_origin(settings[name]) is Literal
        if isinstance(value_node, yaml.ScalarNode) and value_node.tag.endswith(":null"):
            if settings[name] is str:
                yield name, "", origin
        elif is_text and isinstance(value_node, yaml.ScalarNode):
            # as written: YAML reads 1:4 as a number to base 60, and off as false
            yield name, value_node.value, origin
        else:
            yield name, plain(value_node, f"{origin}: {name}"), origin
