"""`echelon list` and `echelon explain`: what can be chosen, read from the registries' files without importing them."""

from __future__ import annotations

import ast
import itertools
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from echelon.cli.app import COMMANDS, as_command
from echelon.cli.help import shown_width
from echelon.collectives.registry import PATHS
from echelon.compression.registry import CODECS, ENTROPY_CODER
from echelon.core.errors import UserError, nearest
from echelon.core.layout import ABOUT_AXES, ABOUT_OPTIONS
from echelon.core.registry import Argument, Registry
from echelon.core.spec import name_of
from echelon.core.tuning import TUNINGS
from echelon.launch.places import PLACES
from echelon.optim.names import supported_optimizers
from echelon.run.data_names import declared_kinds
from echelon.sync.registry import STRATEGIES
from echelon.tasks.registry import TASKS

_PACKAGE = Path(__file__).parents[1]
_MODELS_OF_OTHERS = {
    "timm/NAME": "any model of timm, such as timm/resnet50",
    "torchvision/NAME": "any model of torchvision, such as torchvision/resnet18",
    "module:function": "your own: a function that returns a torch.nn.Module",
}
_LABELS = {"Helps:": "when it helps", "Costs:": "what it costs", "Needs:": "what it needs"}  # as shown
_ONLY_SETTINGS = "Settings of `"  # a class's docstring that says nothing of its own
_MEASURED_KINDS = ("codecs", "syncs", "paths", "layouts")
_RESULTS = (_PACKAGE / "cli" / "RESULTS.md", _PACKAGE.parents[1] / "benchmarks" / "RESULTS.md")  # of a wheel, a clone
_MOST_MEASURED = 3
_MEASURED_ON = "measured on"  # a column of tables
_LINK = re.compile(r"Slow link (\d+)([kmg])bit")
_SAYS = {
    "Codecs": (
        "to encode and decode float32 takes {C} times as long as a copy in memory on one core, and {numpy} times where "
        "its loops are not compiled"
    ),
    "Slow link": (
        "{samples/s} samples/s, {x plain DDP} times as many as plain DDP and {x itself on loopback} times as many as "
        "without the slow link; each rank sends {MB/step a rank sends (kernel)} MB per step"
    ),
    "A straggler": "{samples/s} samples/s, {of the workers alone} of what the workers reach by themselves",
    "Layouts": (
        "{Echelon} samples/s, {Echelon / hand-written} of a hand-written loop and {Echelon / one process} times one "
        "process"
    ),
    "Memory": "{outcome} with a limit of {limit MB} MB for each process; the largest took {most MB} MB",
}
"""What a row of a table says, by how the table's heading begins; a row of another lists its columns."""
_TELLING = ("Codecs", "Layouts", "Memory")


@dataclass(frozen=True)
class Entry:
    """Something that can be chosen.

    Attributes:
        text: paragraphs; lines that begin with a label (`Helps:`, `Costs:`, `Needs:`) say when it helps, and so on.
    """

    name: str
    summary: str
    text: str = ""
    arguments: tuple[Argument, ...] = ()


@dataclass(frozen=True)
class Kind:
    """Things of which one is chosen by a setting.

    Attributes:
        make: reads them.
        names: their names, where these are known without reading all of them; None: they are not.
    """

    title: str
    flag: str
    make: Callable[[], Iterable[Entry]]
    names: tuple[str, ...] | None = None

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Each of them."""
        return tuple(self.make())

    def all_names(self) -> tuple[str, ...]:
        """Return the name of each."""
        return tuple(entry.name for entry in self.make()) if self.names is None else self.names


def kinds() -> list[Kind]:
    """Return all that can be chosen, read from files alone, each kind when it is asked for."""
    return [
        _of_registry("tasks", "--task", TASKS),
        Kind("models", "--model", _models, ("auto", *(file.stem for file in _model_files()), *_MODELS_OF_OTHERS)),
        Kind("sources", "DATA", _sources),
        _codecs(),
        _of_registry("syncs", "--sync", STRATEGIES),
        _of_registry("paths", "--collective", PATHS),
        Kind("layouts", "--parallel", _layouts),
        _of_registry("tunings", "--tune", TUNINGS),
        Kind("optimizers", "--optimizer", lambda: (Entry(*each) for each in supported_optimizers().items())),
        Kind("places", "--on", _places),
    ]


def _of_registry(title: str, flag: str, registry: Registry) -> Kind:
    return Kind(title, flag, partial(_declared, registry), tuple(_shown(name, registry) for name in registry.names()))


def _codecs() -> Kind:
    of_registry = _of_registry("codecs", "--compression", CODECS)
    names = (*of_registry.all_names(), ENTROPY_CODER)
    return replace(of_registry, make=lambda: (*of_registry.entries, _entropy_coder()), names=names)


def _shown(name: str, registry: Registry) -> str:
    return name.replace("_", "-") if registry is TASKS else name


def _declared(registry: Registry) -> Iterator[Entry]:
    for name in registry.names():
        found = registry.declaration(name)
        yield Entry(_shown(name, registry), _summary(found.summary, name), found.text, found.arguments)


def _entropy_coder() -> Entry:
    text = _docstring(_PACKAGE / "compression" / "transforms" / "huffman.py")
    return Entry(ENTROPY_CODER, f"after a codec, as in qsgd+{ENTROPY_CODER}: shorter codes for frequent symbols", text)


def _models() -> Iterator[Entry]:
    yield Entry(
        "auto", "by the images' size: mlp, small_cnn, resnet20 or timm/resnet50; of other data the task's model"
    )
    for file in _model_files():
        text = _docstring(file)
        yield Entry(file.stem, _summary(text, file.stem), text)
    yield from (Entry(name, about) for name, about in _MODELS_OF_OTHERS.items())


def _model_files() -> list[Path]:
    return sorted((_PACKAGE / "models" / "builtin").glob("[!_]*.py"))


def _sources() -> Iterator[Entry]:
    for kind in declared_kinds():
        for name in kind.names or [kind.form or kind.file]:
            yield Entry(name, _summary(kind.text, kind.file), kind.text)


def _layouts() -> Iterator[Entry]:
    yield from (Entry(axis.value, about.partition("\n")[0], about) for axis, about in ABOUT_AXES.items())
    yield from (Entry(name, about.partition("\n")[0], about) for name, about in ABOUT_OPTIONS.items())


def _places() -> Iterator[Entry]:
    yield from _declared(PLACES)
    yield Entry("module:Class", "your own: a subclass of echelon.launch.places.base.Place")


def _docstring(file: Path) -> str:
    return ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""


def _summary(text: str, name: str) -> str:
    return text.partition("\n")[0].rstrip(".").removeprefix(f"{name}: ")


_MOST_ALIKE = 3


def list_command() -> Any:
    """Build `echelon list`."""

    def list_choices(
        what: Annotated[str, typer.Argument(metavar="[KIND]", help="one kind alone, such as codecs")] = "",
    ) -> None:
        """Print what can be chosen."""
        known = {kind.title: kind for kind in kinds()}
        if what and what not in known:
            raise UserError(f"unknown kind {what!r}: {nearest(what, known)}known: {', '.join(known)}")
        for kind in [known[what]] if what else known.values():
            print(f"{kind.title} ({kind.flag})")
            for summary, entries in itertools.groupby(kind.entries, key=lambda entry: entry.summary):
                names = [entry.name for entry in entries]
                if len(names) > _MOST_ALIKE:  # the data sets of torchvision: said once
                    print(textwrap.fill(", ".join(names), shown_width(), initial_indent="  ", subsequent_indent="  "))
                    names = [""]
                for name in names:
                    print(_row(name, summary))
            print()
        if not what:
            print(textwrap.fill("echelon explain NAME says what one of them does, and when it helps.", shown_width()))

    return as_command(list_choices, "list", COMMANDS["list"][1])


def _row(name: str, text: str, width: int = 18) -> str:
    lines = textwrap.wrap(text.replace("`", ""), shown_width() - width - 2) or [""]
    if len(name) >= width:
        lines.insert(0, "")
    rows = [f"  {name if i == 0 else '':{width}}{line}".rstrip() for i, line in enumerate(lines)]
    return "\n".join(rows)


def explain_command() -> Any:
    """Build `echelon explain`."""

    def explain(name: Annotated[str, typer.Argument(help="a name of `echelon list`, or a spec")]) -> None:
        """Print what a choice does, and what it cost where it was measured."""
        names = {kind: kind.all_names() for kind in kinds()}
        known = set(itertools.chain(*names.values()))
        word = name if name in known or ":" in name or "/" in name else name_of(name)
        holding = [kind for kind, held in names.items() if word in held]
        found = [(kind, entry) for kind in holding for entry in kind.entries if word == entry.name]
        if not found:
            raise UserError(f"unknown name {word!r}: {nearest(word, known)}`echelon list` shows all")
        for kind, entry in found:
            print("\n".join(_explanation(kind, entry)).strip() + "\n")

    return as_command(explain, "explain", COMMANDS["explain"][1])


def _explanation(kind: Kind, entry: Entry) -> Iterator[str]:
    """Yield the lines about one choice."""
    paragraphs = [p for p in entry.text.removeprefix(f"{entry.name}: ").split("\n\n") if p.strip()] or [entry.summary]
    paragraphs = [p for p in paragraphs if p is paragraphs[0] or p.rstrip(".") not in paragraphs[0]]  # said once
    paragraphs[0] = paragraphs[0][:1].upper() + paragraphs[0][1:]
    labelled = [p for p in paragraphs if p.startswith(tuple(_LABELS))]
    papers = [p for p in paragraphs if p.startswith(("Paper:", "Papers:"))]
    yield f"{entry.name}   {kind.flag} {_usage(entry)}"
    yield ""
    yield _wrapped(paragraphs[0])
    yield ""
    for paragraph in labelled:
        yield from map(_labelled, re.split(rf"\n(?={'|'.join(_LABELS)})", paragraph))
        yield ""
    for paragraph in paragraphs[1:]:
        if paragraph not in labelled and paragraph not in papers and not paragraph.startswith(_ONLY_SETTINGS):
            yield _wrapped(paragraph)
            yield ""
    if entry.arguments:
        yield "Arguments:"
        for argument in entry.arguments:
            yield _row(argument.name, f"{argument.help or argument.value_type} [{_default(argument)}]")
        yield ""
    rows = re.escape(entry.name) + ("=" if kind.flag == "--parallel" else r"($|\W)")  # dp=2 and the like
    told = list(_measured(rows)) if kind.title in _MEASURED_KINDS else []
    if told:
        yield "Measured:"
        for line in told:
            yield textwrap.fill(line, shown_width(), initial_indent="  ", subsequent_indent="  ")
        yield ""
    for paragraph in papers:
        yield _wrapped(paragraph)


def _labelled(line: str) -> str:
    label, _, text = line.partition(":")
    text = " ".join(text.split()).removesuffix(".")
    return _row(_LABELS[f"{label}:"], f"{text[:1].lower() if text[1:2].islower() else text[:1]}{text[1:]}.")


def _default(argument: Argument) -> str:
    default = "optional" if argument.default == "None" else f"default: {argument.default}"
    return "; ".join(filter(None, ["required" if argument.default is None else default, argument.allowed]))


def _usage(entry: Entry) -> str:
    if entry.name == ENTROPY_CODER:
        return f"CODEC+{ENTROPY_CODER}"
    needed = [a.name for a in entry.arguments if a.default is None]
    return f'"{entry.name}({", ".join(f"{name}=..." for name in needed)})"' if needed else entry.name


def _wrapped(paragraph: str) -> str:
    """Return a paragraph within the width; formulas, which are indented, as they are."""
    if any(line.startswith("    ") for line in paragraph.splitlines()[:1]):
        return paragraph
    return textwrap.fill(" ".join(paragraph.split()), shown_width())


def _measured(rows: str) -> Iterator[str]:
    """Yield what was measured of a choice: a sentence on a row of each of a few tables.

    Args:
        rows: a pattern of what they begin with.
    """
    file = next((file for file in _RESULTS if file.exists()), None)
    lines = file.read_text(encoding="utf-8").splitlines() if file else []
    heading, machine, header, told = "", "", [""], set[str]()
    for line, following in itertools.pairwise(lines):
        if line.startswith("## "):
            heading = line.removeprefix("## ").removesuffix(": samples/s")
        elif re.match(r"20\d\d-\d\d-\d\d · ", line):
            machine = ", ".join(line.split(" · ")[:2])
        elif line.startswith("|"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            spec = re.sub(r"^(echelon|sync):", "", cells[0].strip("`"))
            if following.startswith("|---"):
                header = cells
            elif re.match(rows, spec) and heading not in told and len(told) < _MOST_MEASURED:
                told.add(heading)
                values = {title: value for title, value in zip(header[1:], cells[1:], strict=False) if value}
                where = values.pop(_MEASURED_ON, machine)  # of the row, where its table has rows of several machines
                yield f"{spec}{_place(heading)}: {_says(heading, values)} ({where})."


def _place(heading: str) -> str:
    """Say where a table was measured, after a name: nothing where what its rows say tells already."""
    link = _LINK.match(heading)
    if link is not None:
        return f" over a link of {link[1]} {link[2].upper() if link[2] != 'k' else 'k'}bit/s"
    return "" if heading.startswith(_TELLING) else f", {heading[:1].lower()}{heading[1:]}"


def _says(heading: str, values: Mapping[str, str]) -> str:
    text = next((text for begins, text in _SAYS.items() if heading.startswith(begins)), None)
    wanted = re.findall(r"{([^}]+)}", text or "")
    if text is None or not set(wanted) <= values.keys():
        return ", ".join(f"{title}: {value}" for title, value in values.items())
    for title in wanted:
        text = text.replace(f"{{{title}}}", re.sub(r"\d{4,}(?![\d.])", lambda n: f"{int(n[0]):,}", values[title]))
    return text
