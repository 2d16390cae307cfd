"""`study.yaml`: read from a user's file or from the command line's words, written into the study's folder."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import reduce
from pathlib import Path

import yaml

from echelon.config import RunConfig, build
from echelon.config.build import DEFAULT
from echelon.config.yaml_file import read_yaml
from echelon.core.errors import UserError, naming, nearest, shown
from echelon.core.files import write_atomic
from echelon.core.model_names import check_model_name
from echelon.optim.names import check_optimizer_name
from echelon.run.data_names import check_data_name
from echelon.run.resolve import check_names
from echelon.study.base import DEFAULT_LOSS, Choices, Settings, Study
from echelon.study.grid import candidates_of, exclusions_of, flatten, planned_runs, terms_of
from echelon.study.settings import SET_BY_STUDY
from echelon.study.stages import check_stages

STUDY_FILE = "study.yaml"
Node = str | None | list["Node"] | dict[str, "Node"]
"""A YAML file's contents: texts as written, lists and mappings."""

MAX_SEEDS = 1000
KEYS = ("base", "candidates", "exclude", "terms", "seeds", "loss", "tune_lr", "equal_time", "choices")


def load_study(file: Path) -> Study:
    """Read a study file.

    Raises:
        UserError: the file cannot be read, is not YAML, or holds what a study has not; with the nearest that it has.
    """
    node = _read(file)
    for key in node:
        if key not in KEYS:
            raise UserError(f"{file}: unknown key {key!r}: {nearest(key, KEYS)}a study has {', '.join(KEYS)}")
    base = {
        name: _single(file, name, values) for name, values in flatten(node.get("base") or {}, f"{file}: base").items()
    }
    candidates = candidates_of(_list(file, node, "candidates"), f"{file}: candidates")
    terms = terms_of(node.get("terms"), f"{file}: terms")
    seeds = seeds_of(node.get("seeds", "3"), f"{file}: seeds")
    study = Study(base, candidates, terms, (), seeds, _points(node.get("loss"), f"{file}: loss"))
    study = replace(
        study,
        tune_lr=_is_on(node.get("tune_lr"), f"{file}: tune_lr"),
        equal_time=str(node.get("equal_time") or ""),
        choices=_choices(node.get("choices"), f"{file}: choices"),
    )
    return replace(study, exclude=exclusions_of(_list(file, node, "exclude"), f"{file}: exclude", study))


@dataclass(frozen=True)
class StudyRequest:
    """A study as the command line describes it; what was not given is empty.

    Attributes:
        settings: of every run, by dotted name.
        tries: a candidate each, as for `--try`.
        equal_time: `baseline`, or a time.
        config: path of a YAML file of settings for every run.
    """

    settings: Settings
    tries: tuple[str, ...] = ()
    seeds: str = ""
    loss: str = ""
    config: str = ""
    tune_lr: bool = False
    equal_time: str = ""


def study_file(request: StudyRequest) -> Path | None:
    """Return the study file that stands in place of data, if one does."""
    data = request.settings.get("data.source", "")
    return Path(data) if data.endswith((".yaml", ".yml")) else None


def requested_study(request: StudyRequest) -> Study | None:
    """Return the study that the command line describes; None: it describes none, but that in a folder.

    Raises:
        UserError: settings beside a study file, no candidate, or a setting that does not exist.
    """
    file = study_file(request)
    given = [name for name in ("tries", "seeds", "loss", "config", "tune_lr", "equal_time") if getattr(request, name)]
    if file is not None:
        beside = given + [name for name in request.settings if name != "data.source"]
        if beside:
            raise UserError(f"{file} describes the whole study: write there what {beside[0]} should be")
        return checked(load_study(file))
    if not request.tries:
        if request.settings or given:
            raise UserError('no candidate to compare: give each with --try, such as --try "sync=allreduce"')
        return None
    base = {**_from_config(request.config), **request.settings}
    study = from_tries(base, request.tries, request.seeds or "3", request.loss or None)
    return checked(replace(study, tune_lr=request.tune_lr, equal_time=request.equal_time))


def checked(study: Study) -> Study:
    """Return a study whose settings name what exists; imports no torch.

    Values that are out of range, and choices that do not go together, refuse a run alone: found where it is planned.

    Raises:
        UserError: the data, a strategy or another choice is misspelt; with the candidate and the nearest name.
    """
    check_stages(study)
    _check_names(build(None, dict(study.base)).config)
    for name, run in {run.title: run for run in planned_runs(study)}.items():  # seeds make no difference
        try:
            config = build(None, run.settings).config
        except UserError:
            continue
        with naming(name):
            _check_names(config)
    return study


def _check_names(config: RunConfig) -> None:
    check_names(config)
    check_data_name(config.data.source)
    check_model_name(config.model.name)
    check_optimizer_name(config.optimizer.name)


def requested_folder(study: Study | None, request: StudyRequest) -> Path:
    """Return the folder of a study whose `--run` was not given: `runs/compare-DATA-NUMBER`, the next free number.

    Raises:
        UserError: no study is described.
    """
    if study is None:
        raise UserError("nothing to compare: give DATA and --try, a study file, or --run of a study to continue")
    name = re.sub(r"[^A-Za-z0-9_.]+", "-", Path(request.settings.get("data.source", "digits")).stem).strip("-")
    name, root = name or "study", Path("runs")
    numbers = [int(m[1]) for p in root.glob(f"compare-{name}-*") if (m := re.fullmatch(r".*-(\d+)", p.name))]
    return root / f"compare-{name}-{max(numbers, default=0) + 1}"


def claim_folder(study: Study | None, request: StudyRequest) -> Path:
    """Make the folder of a study whose `--run` was not given: of studies that begin at the same moment each gets one.

    Raises:
        UserError: no study is described, or the folder cannot be written.
    """
    while True:
        path = requested_folder(study, request)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir()
            return path
        except FileExistsError:
            if path.parent.is_dir():  # taken meanwhile
                continue
            raise UserError(f"--run {path} cannot be written: {path.parent} is a file") from None
        except OSError as error:
            raise UserError(f"--run {path} cannot be written: {error.strerror}") from None


def _from_config(file: str) -> dict[str, str]:
    """Return the settings that a YAML file of a run gives, by dotted name, without what the study sets itself."""
    if not file:
        return {}
    from echelon.run.machine import say

    resolved = build(Path(file))
    names = [name for name, origin in resolved.origins.items() if origin != DEFAULT]
    if "training.seed" in names:
        say(f"{file}: its training.seed is left out: it is {SET_BY_STUDY['training.seed']}")
    names = [name for name in names if name not in SET_BY_STUDY]
    return {name: str(reduce(getattr, name.split("."), resolved.config)) for name in names}


def from_tries(base: Settings, tries: Sequence[str], seeds: str, loss: str | None = None) -> Study:
    """Build a study from candidates as for `--try`.

    Raises:
        UserError: no candidate, an unknown setting, or no number of seeds.
    """
    candidates = candidates_of(tries, "--try")
    return Study(base, candidates, seeds=seeds_of(seeds, "--seeds"), loss_points=_points(loss, "--loss"))


def seeds_of(value: Node, where: str) -> tuple[int, ...]:
    """Read `3` (seeds 0, 1, 2), `0,5,7`, or a list.

    Raises:
        UserError: neither, or none, or one that stands twice.
    """
    words = [str(v).strip() for v in value] if isinstance(value, list) else [w.strip() for w in str(value).split(",")]
    count = len(words) == 1 and not isinstance(value, list)
    if not all(w.isdecimal() and len(w) < 19 for w in words) or (count and int(words[0]) == 0):
        raise UserError(f"{where} {shown(repr(value))}: write how many (3), or which (0,5,7)")
    if max(int(words[0]) if count else 0, len(words)) > MAX_SEEDS:
        raise UserError(f"{where} {shown(repr(value))}: a study has at most {MAX_SEEDS} seeds")
    seeds = list(range(int(words[0]))) if count else [int(w) for w in words]
    if not seeds or len(set(seeds)) < len(seeds):
        raise UserError(f"{where} {shown(repr(value))}: each seed once, and at least one")
    return tuple(seeds)


def to_yaml(study: Study) -> str:
    """Write a study so that `load_study` reads the same one back: products are written out."""
    node = {
        "base": dict(study.base),
        "candidates": [dict(c.settings) for c in study.candidates],
        "exclude": [dict(wanted) for wanted in study.exclude],
        "terms": _terms_node(study),
        "seeds": list(study.seeds),
        "loss": study.loss_points,
        "tune_lr": study.tune_lr,
        "equal_time": study.equal_time,
        "choices": {name: _plain(chosen) for name, chosen in asdict(study.choices).items() if chosen},
    }
    return yaml.safe_dump(
        {k: v for k, v in node.items() if v or k in ("base", "loss")}, sort_keys=False, allow_unicode=True
    )


def is_study(path: Path) -> bool:
    """Return whether a folder holds a study."""
    return (path / STUDY_FILE).is_file()


def open_study(path: Path, study: Study | None) -> Study:
    """Make a study's folder, or return the same study that it holds already; `None`: whatever study it holds.

    Raises:
        UserError: it holds another study, or something else, or nothing to go on with, or cannot be written.
    """
    if is_study(path):
        present = load_study(path / STUDY_FILE)
        if study is not None and replace(present, choices=Choices()) != replace(study, choices=Choices()):
            raise UserError(
                f"{path} holds another study: continue it with `echelon compare --run {path}`, or choose another --run"
            )
        return present
    if study is None:
        raise UserError(f"{path} holds no study to continue: give DATA and --try, or a study file")
    try:
        if path.exists() and any(p.name != ".lock" for p in path.iterdir()):
            raise UserError(f"{path} holds something else: choose another --run")
        path.mkdir(parents=True, exist_ok=True)
        write_atomic(path / STUDY_FILE, to_yaml(study))
    except OSError as error:
        raise UserError(f"--run {path} cannot be written: {error.strerror}") from None
    _check_written(path / STUDY_FILE, study)
    return study


def _check_written(file: Path, study: Study) -> None:
    """Refuse a study before anything starts whose report could not be written: it is read from the file again.

    Raises:
        UserError: the file does not hold this study; it is removed.
    """
    try:
        if load_study(file) != study:
            raise UserError(f"{file} would not be read as the study that it was written for")
    except UserError:
        file.unlink()
        raise


def write_choices(path: Path, study: Study) -> Study:
    """Write what a study chose by measuring into its file, and return the study."""
    write_atomic(path / STUDY_FILE, to_yaml(study))
    return study


def _plain(chosen: Mapping[str, object]) -> dict[str, object]:
    return {name: dict(v) if isinstance(v, Mapping) else v for name, v in chosen.items()}


def _is_on(value: Node, where: str) -> bool:
    if value is None or str(value).lower() in ("true", "false"):
        return str(value).lower() == "true"
    raise UserError(f"{where} {shown(repr(value))}: write true or false")


def _choices(node: Node, where: str) -> Choices:
    """Read what a study wrote down itself.

    Raises:
        UserError: it was changed by hand into something else.
    """
    if node is None:
        return Choices()
    try:
        rates, seconds, epochs = (_labelled(node, name) for name in ("rates", "seconds", "epochs"))
        return Choices(
            {label: f"{float(str(rate)):.6g}" for label, rate in rates.items()},
            {label: float(str(limit)) for label, limit in seconds.items()},
            {label: {name: int(str(n)) for name, n in _labelled(epochs, label).items()} for label in epochs},
        )
    except ValueError:
        raise UserError(f"{where}: is what a study writes itself: rates, seconds and epochs by label") from None


def _labelled(node: Node, name: str) -> dict[str, Node]:
    value = node.get(name) if isinstance(node, dict) else name
    if value is not None and not isinstance(value, dict):
        raise ValueError(name)
    return value or {}


def _terms_node(study: Study) -> dict[str, list[str]]:
    names = study.terms[0].settings
    return {name: list(dict.fromkeys(t.settings[name] for t in study.terms)) for name in names}


def _read(file: Path) -> dict[str, Node]:
    node = read_yaml(file)
    texts = _texts(node) if node is not None else {}
    if not isinstance(texts, dict):
        raise UserError(f"{file}: expected a study: {', '.join(KEYS)}")
    return texts


def _texts(node: yaml.Node) -> Node:
    """Return texts as written, lists and mappings: YAML would read 1:4 as a number to base 60, and `off` as false."""
    if isinstance(node, yaml.MappingNode):
        return {str(key.value): _texts(value) for key, value in node.value}
    if isinstance(node, yaml.SequenceNode):
        return [_texts(item) for item in node.value]
    return None if node.tag.endswith(":null") else str(node.value)


def _single(file: Path, name: str, values: list[str]) -> str:
    if len(values) > 1:
        raise UserError(f"{file}: base: {name} is a list: what varies belongs under candidates or terms")
    return values[0]


def _list(file: Path, node: Mapping[str, Node], key: str) -> list[Node]:
    value = node.get(key) or []
    if not isinstance(value, list):
        raise UserError(f"{file}: {key} is a list, each on a line that begins with a dash")
    return value


def _points(value: Node, where: str) -> float:
    if value is None:
        return DEFAULT_LOSS
    try:
        points = float(str(value))
    except ValueError:
        points = -1.0
    if not 0 <= points < 100:
        raise UserError(f"{where} {value!r}: write points of accuracy below the baseline, such as 0.5")
    return points
