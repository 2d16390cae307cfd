"""What a flow is: steps, what each reads and leaves, what it needs of the machine."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from graphlib import TopologicalSorter
from pathlib import Path

STEPS_FOLDER = "steps"
TOKEN = re.compile(r"\$\{([^}]*)\}")
FOLDER = "folder"  # in a token: the step's own


class Leaves(StrEnum):
    """What an output is."""

    RUN = "run"
    STUDY = "study"
    PATH = "path"


@dataclass(frozen=True)
class StepOutput:
    """A file or folder that a step leaves.

    Attributes:
        path: below the step's folder.
        kind: what it is, for steps that read it.
    """

    path: str
    kind: Leaves = Leaves.PATH


@dataclass(frozen=True)
class StepResources:
    """What a step needs while it goes.

    Attributes:
        cores: processor cores; also the compute threads that its processes are told to use.
        time_s: a step that takes longer is ended, and has failed.
    """

    cores: int = 1
    memory_bytes: float = 0.0
    gpus: int = 0
    time_s: float = 24 * 3600.0

    def lacking(self, free: StepResources) -> str:
        """Return what of this is more than there is free; empty: it fits."""
        pairs = {"cores": (self.cores, free.cores), "GPUs": (self.gpus, free.gpus)}
        lacking = [f"{want} {what} (there are {have})" for what, (want, have) in pairs.items() if want > have]
        if self.memory_bytes > free.memory_bytes:
            lacking.append(f"{self.memory_bytes / 1e9:.3g} GB of memory (there are {free.memory_bytes / 1e9:.3g})")
        return ", ".join(lacking)


@dataclass(frozen=True)
class ReadOutput:
    """An output of another step that a step reads."""

    step: str
    output: str

    def __str__(self) -> str:
        """Return it as it stands in arguments."""
        return f"${{{self.step}.{self.output}}}"


@dataclass(frozen=True)
class FlowStep:
    """One step; a matrix makes several of what the file describes once.

    Attributes:
        name: `tune`, or of a matrix `tune[seed=0,lr=0.1]`.
        group: the name in the file.
        axes: its values of the matrix.
        kind: what it does, such as `train`.
        arguments: words; `${step.output}` stands for a path, the same wherever the flow's folder lies.
        settings: options by name; a name may stand several times.
        outputs: by name.
        needs: steps that must be done before, beside those that it reads from.
        priority: of steps that could start the highest does first.
        retry: how often it is started again after a failure.
        where: file and line that describe it.
    """

    name: str
    group: str
    kind: str
    where: str = ""
    axes: Mapping[str, str] = field(default_factory=dict)
    arguments: Sequence[str] = ()
    settings: Sequence[tuple[str, str]] = ()
    outputs: Mapping[str, StepOutput] = field(default_factory=dict)
    needs: Sequence[str] = ()
    resources: StepResources = field(default_factory=StepResources)
    priority: int = 0
    retry: int = 0

    @property
    def reads(self) -> list[ReadOutput]:
        """Outputs of other steps that its arguments and settings name, each once."""
        texts = [*self.arguments, *(value for _, value in self.settings)]
        found = [match[1].rpartition(".") for text in texts for match in TOKEN.finditer(text)]
        return list(dict.fromkeys(ReadOutput(step, output) for step, _, output in found if step))

    @property
    def before(self) -> list[str]:
        """Names of the steps that must be done before it."""
        return list(dict.fromkeys([*(read.step for read in self.reads), *self.needs]))


@dataclass(frozen=True)
class Flow:
    """A whole flow.

    Attributes:
        base: the folder that paths and modules are looked for in: the file's.
        steps: by name, in the file's order; none needs a later one of its own.
        hash_content: whether data is known by its bytes, in place of names, sizes and times.
    """

    name: str
    base: Path
    steps: Mapping[str, FlowStep]
    hash_content: bool = False

    def sorter(self) -> TopologicalSorter[str]:
        """Return the names of all steps, each after those that must be done before it."""
        return TopologicalSorter({name: step.before for name, step in self.steps.items()})


def step_folder(flow_folder: Path, step: str) -> Path:
    """Return where a step works: `tune[seed=0]` in `steps/tune/seed=0`."""
    group, _, axes = step.partition("[")
    if not axes:
        return flow_folder / STEPS_FOLDER / group
    written = axes.removesuffix("]")
    inner = re.sub(r"[^\w=.,+-]", "_", written)[:100]
    if inner != written:  # what was replaced may have told two apart
        inner += f"-{hashlib.sha256(written.encode()).hexdigest()[:8]}"
    return flow_folder / STEPS_FOLDER / group / inner


def output_path(flow: Flow, flow_folder: Path, read: ReadOutput) -> Path:
    """Return where an output lies."""
    return step_folder(flow_folder, read.step) / flow.steps[read.step].outputs[read.output].path


def with_paths(flow: Flow, flow_folder: Path, step: FlowStep, text: str) -> str:
    """Return a text of a step with paths in place of what stands for them.

    `${folder}` is the step's own folder.
    """

    def path(match: re.Match[str]) -> str:
        """Return the path of one."""
        if match[1] == FOLDER:
            return str(step_folder(flow_folder, step.name).absolute())
        name, _, output = match[1].rpartition(".")
        return str(output_path(flow, flow_folder, ReadOutput(name, output)).absolute())

    return TOKEN.sub(path, text)


@dataclass(frozen=True)
class Taken:
    """One argument that a kind of step takes.

    Attributes:
        name: as help would say it.
        kind: what a referenced output must be; None: any.
        many: it may stand several times; it is the last one then.
        needed: the step is refused without it.
    """

    name: str
    kind: Leaves | None = None
    many: bool = False
    needed: bool = True


@dataclass(frozen=True)
class Call:
    """The command of a step, with paths in place.

    Attributes:
        folder: the step's own.
        arguments, settings: those of the step.
    """

    folder: Path
    arguments: Sequence[str]
    settings: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class StepKind:
    """What a step can do.

    Attributes:
        takes: its arguments, in their order.
        command: returns the words of its command.
        outputs: that it leaves by itself.
        declares: whether the file names further outputs.
        goes_on: whether a step that was cut short is resumed, in place of begun anew.
        stdout: file of the step's folder that takes what the command prints; empty: the log.
        check: refuses arguments and settings that cannot be.
    """

    name: str
    takes: Sequence[Taken]
    command: Callable[[Call], list[str]]
    check: Callable[[Sequence[str], Sequence[tuple[str, str]]], None]
    outputs: Mapping[str, StepOutput] = field(default_factory=dict)
    declares: bool = False
    goes_on: bool = False
    stdout: str = ""
