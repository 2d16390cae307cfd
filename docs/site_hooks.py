"""What the site is generated from: the registries of the package, its settings and the benchmarks' results.

mkdocs calls the functions whose names begin with `on_`. A page asks for a part with a comment of its own line, such as
`<!-- generated: codecs -->`.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import echelon
from echelon.cli.app import COMMANDS
from echelon.collectives.registry import PATHS
from echelon.compression.registry import CODECS
from echelon.config.build import flag_of, leaves
from echelon.config.schema import traits_of
from echelon.core.registry import Argument, Registry
from echelon.parallel.pipeline.settings import SCHEDULES
from echelon.sync.registry import STRATEGIES

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "RESULTS.md"
STUDY_PAGE = ROOT / "examples" / "studies" / "cifar10" / "report.html"
MARKER = re.compile(r"<!-- generated: ([\w-]+) -->")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the pages of decisions, by name."""
    pages = sorted(f"decisions/{path.name}" for path in (ROOT / "docs" / "decisions").glob("*.md"))
    config.nav = [*(config.nav or []), {"Decisions, for developers": pages}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the results and the page of a study, which lie elsewhere in the repository."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "results.md", content=results()))
    files.append(File.generated(config, "studies/cifar10.html", abs_src_path=str(STUDY_PAGE)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put in what a page asks for."""
    return MARKER.sub(lambda match: GENERATED[match[1]](), markdown)


def results() -> str:
    """Return benchmarks/RESULTS.md as a page; links to other files of the repository become their names."""
    return re.sub(r"\[([^\]]+)\]\((?!http|#)[^)]*\)", r"`\1`", RESULTS.read_text(encoding="utf-8"))


def settings() -> str:
    """Return a table of settings for each section of a run's description."""
    sections: dict[str, list[str]] = {}
    for name, item, kind in leaves():
        section = name.rpartition(".")[0]
        values = " \\| ".join(f"`{value}`" for value in getattr(kind, "__args__", ())) or f"{kind.__name__}"
        traits = traits_of(item)
        bounds = [f"{word} {bound:g}" for word, bound in (("at least", traits.above), ("at most", traits.below))
                  if bound is not None]  # fmt: skip
        default = f"`{item.default}`" if item.default != "" else ""
        sections.setdefault(section or "run", []).append(
            f"| `{flag_of(name, item)}` | `{name}` | {values}{', ' if bounds else ''}{', '.join(bounds)} | {default} "
            f"| {escaped(traits.help)} |"
        )
    head = "| option | in YAML | value | default | what it is |\n|---|---|---|---|---|\n"
    return "\n\n".join(f"## {section}\n\n{head}" + "\n".join(rows) for section, rows in sections.items())


def commands() -> str:
    """Return a table of the commands."""
    rows = (f"| `echelon {name}` | {escaped(words)} |" for name, (_, words) in COMMANDS.items())
    return "| command | what it does |\n|---|---|\n" + "\n".join(rows)


def schedules() -> str:
    """Return a table of the schedules of a pipeline."""
    rows = (f"| `{name}` | {escaped(kind.words)} | {kind.stages_per_rank} |" for name, kind in SCHEDULES.items())
    return "| schedule | what it does | stages a rank, at least |\n|---|---|---|\n" + "\n".join(rows)


def api() -> str:
    """Return a directive of mkdocstrings for each public name of the package."""
    public = (getattr(echelon, name) for name in echelon.__all__)
    return "\n\n".join(f"::: {thing.__module__}.{thing.__qualname__}" for thing in public)


def implementations(registry: Registry) -> str:
    """Return a section for each implementation: what its docstrings say, and a table of its settings."""
    return "\n\n".join("\n\n".join(_implementation(registry, name)) for name in registry.names())


def _implementation(registry: Registry, name: str) -> Iterator[str]:
    declaration = registry.declaration(name)
    kind = registry.settings_class(name)
    yield f"## {name}"
    yield f"**{escaped(declaration.summary.removeprefix(f'{name}: '))}**"
    _, _, module_text = (inspect.getdoc(sys.modules[kind.__module__]) or "").partition("\n")
    if module_text.strip():
        said = {"Helps": "When it helps", "Costs": "What it costs", "Needs": "What it needs"}
        text = escaped(module_text.strip("\n"))
        yield re.sub(r"^(Helps|Costs|Needs):", lambda label: f"\n**{said[label[1]]}:**", text, flags=re.MULTILINE)
    before, _, after = (inspect.getdoc(kind) or "").partition("Attributes:\n")
    if not before.startswith("Settings of `"):
        yield escaped(before.strip("\n"))
    if declaration.arguments:
        yield "| setting | type | default | what it is |\n|---|---|---|---|\n" + "\n".join(
            f"| `{a.name}` | {escaped(_type(a))} | {_default(a)} | {escaped(a.help)} |" for a in declaration.arguments
        )
    rest = "\n".join(line for line in after.splitlines() if line and not line.startswith(" "))
    if rest:
        yield escaped(rest)
    examples = getattr(kind, "examples", ())
    if examples:
        yield "Specs: " + ", ".join(f"`{example}`" for example in examples) + "."


def _type(argument: Argument) -> str:
    return ", ".join(filter(None, [argument.value_type, argument.allowed]))


def _default(argument: Argument) -> str:
    return "required" if argument.default is None else f"`{argument.default}`"


def escaped(text: str) -> str:
    """Return text in which markdown sees no emphasis, tables or tags; code in backticks and indented lines stay."""
    return "\n".join(line if line.startswith("    ") else _escaped_line(line) for line in text.splitlines())


def _escaped_line(line: str) -> str:
    pieces = line.split("`")
    plain = [re.sub(r"([*_|\[\]])", r"\\\1", piece).replace("<", "&lt;") for piece in pieces[::2]]
    code = [f"`{piece}`" for piece in pieces[1::2]]
    return "".join(a + b for a, b in zip(plain, [*code, ""], strict=False))


GENERATED: dict[str, Callable[[], str]] = {
    "settings": settings,
    "commands": commands,
    "schedules": schedules,
    "api": api,
    "codecs": lambda: implementations(CODECS),
    "strategies": lambda: implementations(STRATEGIES),
    "paths": lambda: implementations(PATHS),
}
