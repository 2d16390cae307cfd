"""What steps can do: one entry for each command, with what it takes and leaves."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence

from echelon.config.build import build, flag_of, leaves
from echelon.core.errors import UserError, unknown
from echelon.flows.base import TOKEN, Call, Leaves, StepKind, StepOutput, Taken

Settings = Sequence[tuple[str, str]]
_ECHELON = [sys.executable, "-m", "echelon"]
_TRUE, _FALSE = ("true", "yes", "on"), ("false", "no", "off")
_MODEL = ("checkpoint", "device", "trust")
_OPTIONS = {
    "evaluate": ("data", "checkpoint", "workers", "follow_links", "trust"),
    "predict": (*_MODEL, "text", "masks", "workers", "tokens", "temperature", "seed", "follow_links"),
    "export": ("trust",),
    "select": (),
    "command": (),
}
_FLAGS = ("follow_links", "trust", "tune_lr", "rescan")
_STUDY = ("try", "seeds", "loss", "equal_time", "tune_lr", "trust")
RUN = {"run": StepOutput("run", Leaves.RUN)}


def _plain(name: str) -> str:
    return name.strip().lower().replace("-", "_")


def _by_flag() -> dict[str, tuple[str, object]]:
    """Return each setting's dotted name and type by what one writes for it."""
    known = {name: (name, kind) for name, _, kind in leaves()}
    return known | {_plain(flag_of(name, item).lstrip("-")): (name, kind) for name, item, kind in leaves()}


def _options(settings: Settings) -> list[str]:
    """Return settings as options of a command; a switch stands alone, or with `no` before it."""
    known, words = _by_flag(), []
    for name, value in settings:
        key = _plain(name)
        flag = f"--{key.rpartition('.')[2].replace('_', '-')}"
        if key in known and known[key][1] is bool:
            words.append(flag if value.lower() in _TRUE else f"--no-{flag[2:]}")
        elif key in _FLAGS:
            words += [flag] if value.lower() in _TRUE else []
        else:
            words.append(f"{flag}={value}")
    return words


def _check_switches(settings: Settings) -> None:
    for name, value in settings:
        if _plain(name) in _FLAGS and value.lower() not in (*_TRUE, *_FALSE):
            raise UserError(f"{name} is {value!r}: write true or false")


def _check_run(arguments: Sequence[str], settings: Settings, extra: Sequence[str] = ()) -> None:
    """Refuse settings of `echelon train` that do not exist or fit, and data that is not there."""
    from echelon.core.model_names import check_model_name
    from echelon.run.data_names import check_data_name
    from echelon.run.resolve import check_names

    known = _by_flag()
    overrides: dict[str, str | int | float | bool | None] = {}
    for name, value in settings:
        key = _plain(name)
        if key in extra:
            continue
        if key == "run":
            raise UserError(f"{name} is the flow's to set: a step's run lies in the step's folder")
        if key not in known:
            raise unknown("setting", name, [flag for flag in [*known, *extra] if "." not in flag and flag != "run"])
        if not TOKEN.search(value):
            overrides[known[key][0]] = value
    config = build(None, overrides).config
    check_names(config)
    check_model_name(config.model.name)
    for data in arguments:
        if not TOKEN.search(data):
            check_data_name(data)


def _check_train(arguments: Sequence[str], settings: Settings) -> None:
    _check_run(arguments, settings)


def _check_finetune(arguments: Sequence[str], settings: Settings) -> None:
    _check_run(arguments[1:], settings)


def _check_compare(arguments: Sequence[str], settings: Settings) -> None:
    _check_switches(settings)
    _check_run(arguments, settings, _STUDY)
    if not any(_plain(name) == "try" for name, _ in settings):
        raise UserError("compare has nothing to compare: write the candidates as a list in settings, `try: [...]`")


def _check_known(kind: str) -> Callable[[Sequence[str], Settings], None]:
    def check(arguments: Sequence[str], settings: Settings) -> None:
        """Refuse options that a command does not have."""
        for name, _ in settings:
            if _plain(name) not in _OPTIONS[kind]:
                raise unknown(f"setting of {kind}", name, _OPTIONS[kind])
        _check_switches(settings)

    return check


def _check_prepare(arguments: Sequence[str], settings: Settings) -> None:
    module, colon, function = arguments[0].partition(":")
    if not (module and colon and function):
        raise UserError(f"{arguments[0]!r} is no module:function")


def _export(call: Call) -> list[str]:
    run, file = call.arguments[0], call.arguments[1]
    return [*_ECHELON, "export", run, str(call.folder / file), *_options(call.settings)]


def _prepare(call: Call) -> list[str]:
    settings = json.dumps(dict(call.settings))
    return [sys.executable, "-m", "echelon.flows.work", "prepare", call.arguments[0], str(call.folder), settings]


_KINDS = (
    StepKind("prepare", (Taken("module:function"),), _prepare, _check_prepare, declares=True),
    StepKind(
        "train", (Taken("data"),),
        lambda call: [*_ECHELON, "train", *call.arguments, "--run", str(call.folder / "run"), *_options(call.settings)],
        _check_train, RUN, goes_on=True,
    ),
    StepKind(
        "finetune", (Taken("run", Leaves.RUN), Taken("data")),
        lambda call: [
            *_ECHELON, "finetune", *call.arguments, "--run", str(call.folder / "run"), *_options(call.settings)],
        _check_finetune, RUN, goes_on=True,
    ),
    StepKind(
        "evaluate", (Taken("run", Leaves.RUN),),
        lambda call: [*_ECHELON, "evaluate", *call.arguments, "--json", *_options(call.settings)],
        _check_known("evaluate"), {"metrics": StepOutput("metrics.json")}, stdout="metrics.json",
    ),
    StepKind(
        "select", (Taken("runs", Leaves.RUN, many=True),),
        lambda call: [sys.executable, "-m", "echelon.flows.work", "select", str(call.folder), *call.arguments],
        _check_known("select"), {**RUN, "choice": StepOutput("choice.json")},
    ),
    StepKind(
        "compare", (Taken("data"),),
        lambda call: [
            *_ECHELON, "compare", *call.arguments, "--run", str(call.folder / "study"), *_options(call.settings)],
        _check_compare, {"study": StepOutput("study", Leaves.STUDY)},
    ),
    StepKind(
        "predict", (Taken("run", Leaves.RUN), Taken("files", many=True, needed=False)),
        lambda call: [
            *_ECHELON, "predict", *call.arguments, "--out", str(call.folder / "predictions.jsonl"),
            *_options(call.settings)],
        _check_known("predict"), {"predictions": StepOutput("predictions.jsonl")},
    ),
    StepKind("export", (Taken("run", Leaves.RUN), Taken("file")), _export, _check_known("export")),
    StepKind(
        "command", (Taken("words", many=True),), lambda call: list(call.arguments), _check_known("command"),
        declares=True,
    ),
)  # fmt: skip

KINDS = {kind.name: kind for kind in _KINDS}
"""What steps can do, by name."""
