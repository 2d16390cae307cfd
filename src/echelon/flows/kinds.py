"""What steps can do: one entry for each command, with what it takes and leaves."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from echelon.config.build import build, flag_of, leaves, plain_word, setting_names, switch_of
from echelon.core.errors import UserError, unknown
from echelon.flows.base import TOKEN, Call, Leaves, StepKind, StepOutput, Taken

Settings = Sequence[tuple[str, str]]
_ECHELON = [sys.executable, "-m", "echelon"]
_MODEL = ("checkpoint", "device", "trust")
_OPTIONS = {
    "evaluate": ("data", "checkpoint", "workers", "follow_links", "trust"),
    "predict": (*_MODEL, "text", "masks", "workers", "tokens", "temperature", "seed", "follow_links", "on_bad_image"),
    "export": ("trust",),
    "select": (),
    "command": (),
}
_FLAGS = ("follow_links", "trust", "tune_lr")
"""Options that stand alone, or are left out, where they are none of a run's settings."""
_REPEATED = {"compare": ("try", "seeds"), "predict": ("text",)}
_STUDY = ("try", "seeds", "loss", "equal_time", "tune_lr", "trust")
RUN = {"run": StepOutput("run", Leaves.RUN)}


def _options(settings: Settings) -> list[str]:
    """Return options of a command that has no settings of a run."""
    words = []
    for name, value in settings:
        flag = f"--{plain_word(name).replace('_', '-')}"
        if plain_word(name) in _FLAGS:
            words += [flag] if switch_of(flag, value) == flag else []
        else:
            words.append(f"{flag}={value}")
    return words


def _run_options(settings: Settings) -> list[str]:
    """Return settings of a run as options of its command; what is none is an option of the command itself."""
    known = {name: (flag_of(name, item), kind) for name, item, kind in leaves()}
    words = []
    for name, value in settings:
        dotted = setting_names().get(plain_word(name))
        if dotted is None:
            words += _options([(name, value)])
        else:
            flag, kind = known[dotted]
            words.append(switch_of(flag, value) if kind is bool else f"{flag}={value}")
    return words


def _check_switches(settings: Settings) -> None:
    for name, value in settings:
        if plain_word(name) in _FLAGS and "=" in switch_of("--", value):
            raise UserError(f"{name} is {value!r}: write true or false")


def _check_single(kind: str, settings: Settings) -> None:
    """Refuse a setting with several values where a command takes one."""
    counts = Counter(plain_word(name) for name, _ in settings)
    for name, _ in settings:
        if (count := counts[plain_word(name)]) > 1 and plain_word(name) not in _REPEATED.get(kind, ()):
            raise UserError(f"{name!r} is {count} values, {kind} takes one: give the step a matrix")


def _check_run(arguments: Sequence[str], settings: Settings, extra: Sequence[str] = ()) -> None:
    """Refuse settings of `echelon train` that do not exist or fit, and data that is not there."""
    from echelon.core.model_names import check_model_name
    from echelon.run.data_names import check_data_name
    from echelon.run.resolve import check_names

    known = setting_names()
    overrides: dict[str, str | int | float | bool | None] = {}
    for name, value in settings:
        key = plain_word(name)
        if key in extra:
            continue
        if key not in known:
            raise unknown("setting", name, [flag for flag in [*known, *extra] if "." not in flag and flag != "run"])
        if known[key] == "run":
            raise UserError(f"{name} is the flow's to set: a step's run lies in the step's folder")
        if known[key] == "data.source":
            raise UserError(f"{name} is no setting here: the step names its data itself, as in `train: DATA`")
        if not TOKEN.search(value):
            overrides[known[key]] = value
    config = build(None, overrides).config
    check_names(config)
    check_model_name(config.model.name)
    for data in arguments:
        if not TOKEN.search(data):
            check_data_name(data)


def _check_train(arguments: Sequence[str], settings: Settings) -> None:
    _check_single("train", settings)
    _check_run(arguments, settings)


def _check_finetune(arguments: Sequence[str], settings: Settings) -> None:
    _check_single("finetune", settings)
    _check_run(arguments[1:], settings)


def _check_compare(arguments: Sequence[str], settings: Settings) -> None:
    _check_switches(settings)
    _check_single("compare", settings)
    _check_run(arguments, settings, _STUDY)
    if not any(plain_word(name) == "try" for name, _ in settings):
        raise UserError("compare has nothing to compare: write the candidates as a list in settings, `try: [...]`")


def _check_known(kind: str) -> Callable[[Sequence[str], Settings], None]:
    def check(arguments: Sequence[str], settings: Settings) -> None:
        """Refuse options that a command does not have."""
        for name, _ in settings:
            if plain_word(name) not in _OPTIONS[kind]:
                raise unknown(f"setting of {kind}", name, _OPTIONS[kind])
        _check_switches(settings)
        _check_single(kind, settings)

    return check


def _check_prepare(arguments: Sequence[str], settings: Settings) -> None:
    module, colon, function = arguments[0].partition(":")
    if not (module and colon and function):
        raise UserError(f"{arguments[0]!r} is no module:function")
    _check_single("prepare", settings)


def _export(call: Call) -> list[str]:
    run, file = call.arguments[0], call.arguments[1]
    return [*_ECHELON, "export", run, str(call.folder / file), *_options(call.settings)]


def _run_command(name: str, folder: str = "run") -> Callable[[Call], list[str]]:
    """Return what makes a command with settings of a run, which leaves a folder."""

    def command(call: Call) -> list[str]:
        """Return the words of the command."""
        return [*_ECHELON, name, *call.arguments, "--run", str(call.folder / folder), *_run_options(call.settings)]

    return command


def _compare(call: Call) -> list[str]:
    seeds = ",".join(value for name, value in call.settings if plain_word(name) == "seeds")
    others = [(name, value) for name, value in call.settings if plain_word(name) != "seeds"]
    return _run_command("compare", "study")(replace(call, settings=[*others, *([("seeds", seeds)] if seeds else [])]))


def _prepare(call: Call) -> list[str]:
    settings = json.dumps(dict(call.settings))
    return [sys.executable, "-m", "echelon.flows.work", "prepare", call.arguments[0], str(call.folder), settings]


_KINDS = (
    StepKind("prepare", (Taken("module:function"),), _prepare, _check_prepare, declares=True),
    StepKind("train", (Taken("data"),), _run_command("train"), _check_train, RUN, goes_on=True),
    StepKind(
        "finetune", (Taken("run", Leaves.RUN), Taken("data")), _run_command("finetune"), _check_finetune, RUN,
        goes_on=True,
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
        _compare, _check_compare, {"study": StepOutput("study", Leaves.STUDY)},
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
