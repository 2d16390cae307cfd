"""A flow from its file: names, matrices and references resolved, or refused with the line."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from graphlib import CycleError
from pathlib import Path

import yaml

from echelon.config.yaml_file import read_yaml
from echelon.core.errors import UserError, naming, nearest, unknown
from echelon.core.units import parse_bytes, parse_seconds
from echelon.flows.base import FOLDER, TOKEN, Flow, FlowStep, ReadOutput, StepOutput, StepResources, Taken
from echelon.flows.kinds import KINDS

_NULL = "tag:yaml.org,2002:null"
_NAME = re.compile(r"[A-Za-z][\w-]*")
_TOP = ("name", "parameters", "steps")
_FIELDS = ("settings", "outputs", "matrix", "needs", "resources", "priority", "retry")
_RESOURCES = ("cores", "memory", "gpus", "time")
_MOST_STEPS = 1000


@dataclass(frozen=True)
class _Text:
    """A scalar of the file, and where it stands."""

    value: str
    where: str


@dataclass(frozen=True)
class _Described:
    """A step as the file has it, a matrix not yet written out.

    Attributes:
        resources: returns them, given the values of parameters and of the matrix.
        resource_words: what they refer to.
    """

    name: str
    kind: str
    where: str
    arguments: Sequence[_Text]
    settings: Sequence[tuple[str, _Text]]
    outputs: Mapping[str, StepOutput]
    matrix: Mapping[str, Sequence[str]]
    needs: Sequence[_Text]
    resources: Callable[[Mapping[str, str]], StepResources]
    resource_words: Set[str]
    priority: int
    retry: int

    def words(self) -> set[str]:
        """Return what its texts refer to: parameters, words of its matrix, outputs of steps."""
        texts = [*self.arguments, *(text for _, text in self.settings)]
        return {match[1] for text in texts for match in TOKEN.finditer(text.value)} | self.resource_words

    def combinations(self) -> list[dict[str, str]]:
        """Return each combination of the matrix's values; one empty one without a matrix."""
        return [dict(zip(self.matrix, values)) for values in itertools.product(*self.matrix.values())]


def read_flow(file: Path, parameters: Mapping[str, str] | None = None, hash_content: bool = False) -> Flow:
    """Read a flow from a file.

    Args:
        parameters: values in place of those that the file gives.
        hash_content: know data by its bytes.

    Raises:
        UserError: it cannot be; names the line.
    """
    node = read_yaml(file)
    if node is None:
        raise UserError(f"{file}, line 1: the file is empty: a flow has `steps:`")
    top = _fields(file, node, _TOP, "a flow")
    if "steps" not in top:
        raise UserError(f"{_line(file, node)}: a flow has `steps:`, each with a name and what it does")
    given = _parameters(file, top.get("parameters"))
    for word in parameters or {}:
        if not given:
            raise UserError(f"{file} has no parameters, and {word} is given")
        if word not in given:
            raise unknown("parameter", word, given)
    values = {word: text.value for word, text in given.items()} | dict(parameters or {})
    described = _described(file, top["steps"], values)
    _check_used(described, given)
    steps = {step.name: step for step in _instances(described, values)}
    name = _scalar(file, top["name"]) if "name" in top else _Text(file.stem, str(file))
    if not _NAME.fullmatch(name.value):
        raise UserError(f"{name.where}: name {name.value!r} must be letters, digits, - and _, and begin with a letter")
    flow = Flow(name.value, file.resolve().parent, steps, hash_content)
    _check_order(flow)
    return flow


def _line(file: Path, node: yaml.Node) -> str:
    return f"{file}, line {node.start_mark.line + 1}"


def _fields(file: Path, node: yaml.Node | None, known: Sequence[str] | None, what: str) -> dict[str, yaml.Node]:
    if not isinstance(node, yaml.MappingNode):
        where = _line(file, node) if node is not None else str(file)
        raise UserError(f"{where}: {what} is written as `name: value` lines")
    found = {key.value: value for key, value in node.value}
    for key, _ in node.value:
        if known is not None and key.value not in known:
            raise UserError(f"{_line(file, key)}: {unknown(f'word in {what}', key.value, known)}")
    return found


def _scalar(file: Path, node: yaml.Node) -> _Text:
    if not isinstance(node, yaml.ScalarNode):
        raise UserError(f"{_line(file, node)}: expected one value here")
    if node.tag == _NULL:
        raise UserError(f"{_line(file, node)}: a value is missing here ('' is an empty one)")
    if "${" in TOKEN.sub("", node.value):
        raise UserError(f"{_line(file, node)}: {node.value!r} has ${{ without }}")
    return _Text(node.value, _line(file, node))


def _scalars(file: Path, node: yaml.Node) -> list[_Text]:
    return [_scalar(file, each) for each in (node.value if isinstance(node, yaml.SequenceNode) else [node])]


def _parameters(file: Path, node: yaml.Node | None) -> dict[str, _Text]:
    fields = _fields(file, node, None, "parameters") if node is not None else {}
    values = {name: _scalar(file, value) for name, value in fields.items()}
    for name, text in values.items():
        if not _NAME.fullmatch(name) or name == FOLDER:
            taken = " (that is the step's own folder)" if name == FOLDER else ": letters, digits, - and _"
            raise UserError(f"{text.where}: {name!r} is no name for a parameter{taken}")
    return values


def _check_used(described: Mapping[str, _Described], parameters: Mapping[str, _Text]) -> None:
    """Refuse parameters that nothing uses, and matrices whose steps would all do the same.

    Raises:
        UserError: names the line.
    """
    used = {step.name: step.words() for step in described.values()}
    for name, text in parameters.items():
        if not any(name in words for words in used.values()):
            raise UserError(f"{text.where}: parameter {name} is used nowhere: write ${{{name}}} where it is meant")
    for step in described.values():
        read = {word.partition(".")[0] for word in used[step.name]} | {text.value for text in step.needs}
        axes = {axis for name in read if name in described for axis in described[name].matrix}
        for axis in step.matrix:
            if axis not in used[step.name] and axis not in axes:
                raise UserError(
                    f"{step.where}: the steps of {step.name} would be alike: ${{{axis}}} of its matrix is used nowhere"
                )


def _described(file: Path, node: yaml.Node, parameters: Mapping[str, str]) -> dict[str, _Described]:
    fields = _fields(file, node, None, "steps")
    if not fields:
        raise UserError(f"{_line(file, node)}: a flow has at least one step")
    found: dict[str, _Described] = {}
    for name, value in fields.items():
        if not _NAME.fullmatch(name):
            raise UserError(f"{_line(file, value)}: {name!r} is no name for a step: letters, digits, - and _")
        step = _step(file, name, value, found)
        for axis in step.matrix:
            if axis in parameters:
                raise UserError(f"{step.where}: {axis} is a parameter too: give the matrix of {name} another word")
        found[name] = step
    return found


def _step(file: Path, name: str, node: yaml.Node, known: Mapping[str, _Described]) -> _Described:
    where = _line(file, node)
    fields = _fields(file, node, [*KINDS, *_FIELDS], f"step {name}")
    kinds = [word for word in fields if word in KINDS]
    if len(kinds) != 1:
        said = " and ".join(kinds) or "nothing"
        raise UserError(f"{where}: step {name} does {said}: write one of {', '.join(KINDS)}")
    kind = kinds[0]
    arguments = _arguments(file, kind, fields[kind])
    settings = _settings(file, name, fields.get("settings"))
    resources = _fields(file, fields["resources"], _RESOURCES, f"resources of {name}") if "resources" in fields else {}
    amounts = {word: _scalar(file, value) for word, value in resources.items()}
    return _Described(
        name, kind, where, arguments, settings,
        outputs=_outputs(file, name, kind, arguments, fields.get("outputs")),
        matrix=_matrix(file, name, fields.get("matrix"), known),
        needs=_scalars(file, fields["needs"]) if "needs" in fields else (),
        resources=partial(_resources, amounts, settings),
        resource_words={match[1] for text in amounts.values() for match in TOKEN.finditer(text.value)},
        priority=_number(_scalar(file, fields["priority"]), "priority", None) if "priority" in fields else 0,
        retry=_number(_scalar(file, fields["retry"]), "retry", 0) if "retry" in fields else 0,
    )  # fmt: skip


def _arguments(file: Path, kind: str, node: yaml.Node) -> list[_Text]:
    """Return a step's arguments; a command in one line is split as a shell does."""
    texts = _scalars(file, node)
    if kind == "command" and isinstance(node, yaml.ScalarNode):
        try:
            texts = [_Text(word, texts[0].where) for word in shlex.split(texts[0].value)]
        except ValueError as error:
            raise UserError(f"{texts[0].where}: {error}") from None
    takes = KINDS[kind].takes
    least = sum(each.needed for each in takes)
    if len(texts) < least or (len(texts) > len(takes) and not takes[-1].many):
        raise UserError(f"{_line(file, node)}: {kind} takes {', '.join(each.name for each in takes)}")
    return texts


def _settings(file: Path, step: str, node: yaml.Node | None) -> list[tuple[str, _Text]]:
    if node is None:
        return []
    fields = _fields(file, node, None, f"settings of {step}")
    return [(name, text) for name, value in fields.items() for text in _scalars(file, value)]


def _outputs(
    file: Path, step: str, kind: str, arguments: Sequence[_Text], node: yaml.Node | None
) -> dict[str, StepOutput]:
    outputs = dict(KINDS[kind].outputs)
    if kind == "export":
        outputs["file"] = _below(arguments[1])
    if node is None:
        return outputs
    if not KINDS[kind].declares:
        raise UserError(f"{_line(file, node)}: {kind} names its outputs itself: {', '.join(outputs)}")
    fields = _fields(file, node, None, f"outputs of {step}")
    for name, value in fields.items():
        if "." in name:
            raise UserError(f"{_line(file, value)}: {name!r} is no name for an output: write it without a dot")
    return {name: _below(_scalar(file, value)) for name, value in fields.items()}


def _below(text: _Text) -> StepOutput:
    path = Path(text.value)
    if path.is_absolute() or ".." in path.parts or not path.parts or TOKEN.search(text.value):
        raise UserError(f"{text.where}: {text.value!r}: an output lies below its step's own folder, as `data.csv` does")
    return StepOutput(text.value)


def _matrix(
    file: Path, step: str, node: yaml.Node | None, known: Mapping[str, _Described]
) -> Mapping[str, Sequence[str]]:
    """Return a matrix; the name of a step stands for that step's."""
    if node is None:
        return {}
    if isinstance(node, yaml.ScalarNode):
        if node.value not in known or not known[node.value].matrix:
            with_one = [name for name, other in known.items() if other.matrix]
            if not with_one:
                raise UserError(f"{_line(file, node)}: no step before {step} has a matrix: write seed: [0, 1]")
            raise UserError(f"{_line(file, node)}: {unknown('step with a matrix', node.value, with_one)}")
        return known[node.value].matrix
    axes = {}
    fields = _fields(file, node, None, f"matrix of {step}")
    if not fields:
        raise UserError(f"{_line(file, node)}: the matrix of {step} is empty: leave it out, or write seed: [0, 1]")
    for name, value in fields.items():
        values = [text.value for text in _scalars(file, value)]
        is_list = isinstance(value, yaml.SequenceNode) and bool(values)
        if not is_list or len(set(values)) != len(values) or not _NAME.fullmatch(name):
            raise UserError(f"{_line(file, value)}: {name} of a matrix is a list of different values")
        if any(letter in each for each in values for letter in "${}[]"):
            raise UserError(f"{_line(file, value)}: values of a matrix have none of $ {{ }} [ ] in them")
        axes[name] = values
    return axes


def _resources(
    amounts: Mapping[str, _Text], settings: Sequence[tuple[str, _Text]], values: Mapping[str, str]
) -> StepResources:
    """Return what a step needs, by its amounts and, where no cores are named, its workers.

    Raises:
        UserError: an amount is none; names its line.
    """
    given = {word: _Text(_filled(text, values), text.where) for word, text in amounts.items()}
    workers = next((_filled(text, values) for name, text in settings if name == "workers"), "1")
    found = StepResources(int(workers) if workers.isdigit() and int(workers) else 1)
    if "cores" in given:
        found = replace(found, cores=_number(given["cores"], "cores", 1))
    if "gpus" in given:
        found = replace(found, gpus=_number(given["gpus"], "gpus", 0))
    if "memory" in given:
        found = replace(found, memory_bytes=_amount(given["memory"], parse_bytes))
    if "time" in given:
        found = replace(found, time_s=_amount(given["time"], parse_seconds))
    return found


def _amount(text: _Text, parse: Callable[[str], float]) -> float:
    try:
        value = parse(text.value)
    except UserError as error:
        raise UserError(f"{text.where}: {error}") from None
    if value <= 0:
        raise UserError(f"{text.where}: {text.value} is none: give more, or leave it out")
    return value


def memory_given(text: str) -> float:
    """Return the bytes of a machine's memory that a command gives.

    Raises:
        UserError: it is no amount.
    """
    with naming("--memory"):
        return parse_bytes(text)


def _number(text: _Text, name: str, least: int | None) -> int:
    try:
        value = int(text.value)
    except ValueError:
        raise UserError(f"{text.where}: {name} is {text.value!r}: it must be a whole number") from None
    if least is not None and value < least:
        raise UserError(f"{text.where}: {name} is {value}: it must be at least {least}")
    return value


def _filled(text: _Text, values: Mapping[str, str]) -> str:
    """Return a text with the values of parameters and of the matrix; references to outputs stay."""
    return TOKEN.sub(lambda match: values.get(match[1], match[0]), text.value)


def _instances(described: Mapping[str, _Described], parameters: Mapping[str, str]) -> Iterator[FlowStep]:
    count = 0
    for step in described.values():
        for axes in step.combinations():
            count += 1
            if count > _MOST_STEPS:
                raise UserError(f"{step.where}: a flow has at most {_MOST_STEPS} steps")
            yield _instance(step, axes, described, {**parameters, **axes})


def _instance(
    step: _Described, axes: Mapping[str, str], described: Mapping[str, _Described], values: Mapping[str, str]
) -> FlowStep:
    arguments = _checked_arguments(step, axes, described, values)
    settings = []
    for name, text in step.settings:
        filled = _Text(_filled(text, values), text.where)
        settings += [(name, each) for each in _expanded(step, axes, described, filled)]
    needs = [name for text in step.needs for name in _needed(step, axes, described, text)]
    kind = KINDS[step.kind]
    try:
        kind.check(arguments, settings)
    except UserError as error:
        raise UserError(f"{_said_of(step, str(error))}: step {step.name}: {error}") from None
    name = _instance_name(step.name, axes)
    return FlowStep(
        name, step.name, step.kind, step.where, axes, arguments, settings, step.outputs, needs,
        step.resources(values), step.priority, step.retry,
    )  # fmt: skip


def _said_of(step: _Described, message: str) -> str:
    """Return the line of the setting that a refusal names, else the step's."""
    for name, text in step.settings:
        option = f"--{name.strip().replace('_', '-')}"
        if re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", message) or repr(name) in message:
            return text.where
    return step.where


def _instance_name(name: str, axes: Mapping[str, str]) -> str:
    return f"{name}[{','.join(f'{axis}={value}' for axis, value in axes.items())}]" if axes else name


def _checked_arguments(
    step: _Described, axes: Mapping[str, str], described: Mapping[str, _Described], values: Mapping[str, str]
) -> list[str]:
    """Return a step's arguments, each reference by the name of the one step that it is to.

    Raises:
        UserError: an output that does not exist, or is not what the step takes there.
    """
    takes = KINDS[step.kind].takes
    found: list[str] = []
    for i, text in enumerate(step.arguments):
        taken = takes[min(i, len(takes) - 1)]
        filled = _Text(_filled(text, values), text.where)
        texts = _expanded(step, axes, described, filled)
        if len(texts) > 1 and not taken.many:
            raise UserError(
                f"{text.where}: {text.value} is {len(texts)} outputs, {step.kind} takes one {taken.name} here: "
                f"give {step.name} the same matrix"
            )
        for each in texts:
            _check_kind(step, described, taken, each, text.where)
        found += texts
    return found


def _check_kind(step: _Described, described: Mapping[str, _Described], taken: Taken, text: str, where: str) -> None:
    match = TOKEN.fullmatch(text)
    if taken.kind is None or match is None:
        return
    name, _, output = match[1].rpartition(".")
    kind = described[name.partition("[")[0]].outputs[output].kind
    if kind is not taken.kind:
        raise UserError(
            f"{where}: {output} of {name} is a {kind}: {step.kind} takes a {taken.kind} as its {taken.name}"
        )


def _expanded(step: _Described, axes: Mapping[str, str], described: Mapping[str, _Described], text: _Text) -> list[str]:
    """Return a text with each `${step.output}` by the name of the one step that it is to.

    Axes that both have must agree; a step with further axes is referred to as a list: a word of several outputs becomes
    several words, and in a text of several words, as for a shell, they stand one after the other.
    """
    is_word = not re.search(r"\s", TOKEN.sub("", text.value))
    texts = [text.value]
    for word in dict.fromkeys(match[1] for match in TOKEN.finditer(text.value)):
        if word == FOLDER:
            continue
        name, dot, output = word.partition(".")
        if not dot:
            raise UserError(
                f"{text.where}: ${{{word}}} is no parameter and of no matrix of {step.name}: "
                f"{nearest(word, described)}write ${{STEP.OUTPUT}} for what a step leaves".strip()
            )
        if name not in described:
            raise UserError(f"{text.where}: {unknown('step', name, described)}")
        if not described[name].outputs:
            raise UserError(f"{text.where}: {name} leaves nothing: name it there, `outputs: {{{output}: FILE}}`")
        if output not in described[name].outputs:
            raise UserError(f"{text.where}: {unknown(f'output of {name}', output, described[name].outputs)}")
        reads = [str(ReadOutput(one, output)) for one in _matching(described[name], axes)]
        if not reads:
            raise UserError(f"{text.where}: {name} has no step for the matrix values of {step.name}")
        written = reads if is_word else [" ".join(reads)]
        texts = [each.replace(f"${{{word}}}", read) for each in texts for read in written]
    return texts


def _matching(step: _Described, axes: Mapping[str, str]) -> list[str]:
    """Return the names of a step's instances whose values agree with some others'."""
    alike = [a for a in step.combinations() if all(axes.get(name, value) == value for name, value in a.items())]
    return [_instance_name(step.name, each) for each in alike]


def _needed(
    step: _Described, axes: Mapping[str, str], described: Mapping[str, _Described], text: _Text
) -> Sequence[str]:
    if text.value not in described:
        raise UserError(f"{text.where}: {unknown('step', text.value, described)}")
    if not (found := _matching(described[text.value], axes)):
        raise UserError(f"{text.where}: {text.value} has no step for the matrix values of {step.name}")
    return found


def _check_order(flow: Flow) -> None:
    """Refuse steps that wait for each other."""
    try:
        flow.sorter().prepare()
    except CycleError as error:
        names = list(reversed(error.args[1]))
        raise UserError(f"{flow.steps[names[0]].where}: steps wait for each other: {' needs '.join(names)}") from None
