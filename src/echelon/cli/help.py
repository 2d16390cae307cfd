"""Help as wide as the terminal: what is used first comes first, each option with its values and its default."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from typer.core import TyperCommand

_WIDTH = 80  # where nobody tells
_MOST_LEFT = 26
_LEAST_WIDTH, _MOST_WIDTH = 40, 100
_FURTHER = "    "  # before what goes on in the next line
BASIC = "Options"
_DEFAULT = re.compile(r"\[default: [^\]]{1,30}\]")  # is not broken
_ARGUMENT = re.compile(r"""(?:--[\w-]+ (?!-))?(?:[^\s"']|"[^"]*"|'[^']*')+""")  # an option with its value
_COMMENTED = re.compile(r"(\s+)(\S.*?)\s{2,}(\S.*)")


@dataclass(frozen=True)
class Row:
    """An option or argument as help shows it: what is typed, and what it does."""

    typed: str
    text: str


class HelpfulCommand(TyperCommand):
    """A command with help in plain text, by headings."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write usage, description, examples and options."""
        formatter.buffer.append("\n".join(self._lines(ctx, shown_width())))

    def _lines(self, ctx: Any, width: int) -> Iterator[str]:
        arguments = [p for p in self.get_params(ctx) if p.param_type_name == "argument"]
        usage = " ".join([f"usage: {ctx.command_path} [OPTIONS]", *map(_usage, arguments)])
        yield from textwrap.wrap(usage, width, subsequent_indent=_FURTHER, break_on_hyphens=False)
        yield from ("", *paragraphs(self.help or "", width))
        sections: dict[str, list[Row]] = {"Arguments": [], BASIC: []}
        for parameter in self.get_params(ctx):
            if getattr(parameter, "hidden", False):
                continue
            heading = getattr(parameter, "rich_help_panel", None) or BASIC
            is_argument = parameter.param_type_name == "argument"
            sections.setdefault("Arguments" if is_argument else heading, []).append(_row(parameter))
        for heading, rows in sections.items():
            yield from section(heading, rows, width)


def shown_width() -> int:
    """Return how wide help is: as the terminal, where that can be read."""
    return min(_MOST_WIDTH, max(_LEAST_WIDTH, shutil.get_terminal_size((_WIDTH, 24)).columns))


def section(heading: str, rows: Sequence[Row], width: int) -> Iterator[str]:
    """Yield the lines of options below a heading; none where there are none."""
    if not rows:
        return
    yield from ("", f"{heading}:")
    left = min(_MOST_LEFT, width // 3)
    for row in rows:
        text = _DEFAULT.sub(lambda found: found[0].replace(" ", "\u00a0"), row.text)
        lines = textwrap.wrap(text, width - left, break_on_hyphens=False) or [""]
        lines = [line.replace("\u00a0", " ") for line in lines]
        if len(row.typed) + 4 > left:
            yield f"  {row.typed}"
        else:
            yield f"  {row.typed:{left - 2}}{lines.pop(0)}".rstrip()
        yield from (" " * left + line for line in lines)


def paragraphs(text: str, width: int) -> Iterator[str]:
    """Yield the lines of paragraphs, wrapped; indented lines are commands, and stay so."""
    for i, paragraph in enumerate(text.strip().split("\n\n")):
        if i:
            yield ""
        if paragraph.startswith("  ") or "\n  " in paragraph:
            for line in paragraph.splitlines():
                yield from _example(line, width)
        else:
            yield from textwrap.wrap(" ".join(paragraph.split()), width)


def _example(line: str, width: int) -> Iterator[str]:
    """Yield a command, perhaps with words on it behind some spaces, so that it can still be typed as it is shown."""
    if len(line) <= width:
        yield line
        return
    if found := _COMMENTED.fullmatch(line):
        indent, command, comment = found.groups()
        yield from _example(f"{indent}{command}", width)
        yield from textwrap.wrap(comment, width, initial_indent=indent + _FURTHER, subsequent_indent=indent + _FURTHER)
        return
    indent = line[: len(line) - len(line.lstrip())]
    shown, *arguments = _ARGUMENT.findall(line)
    shown = indent + shown
    for argument in arguments:
        if len(shown) + len(argument) + len("  \\") > width:
            yield f"{shown} \\"
            shown = f"{indent}{_FURTHER}{argument}"
        else:
            shown = f"{shown} {argument}"
    yield shown


def _usage(argument: Any) -> str:
    name = _argument_name(argument)
    return name if argument.required or name.startswith("[") else f"[{name}]"


def _argument_name(argument: Any) -> str:
    return str(argument.metavar or argument.name.upper())


def _row(parameter: Any) -> Row:
    if parameter.param_type_name == "argument":
        return Row(_argument_name(parameter), _text(parameter))
    flags = [*parameter.opts, *parameter.secondary_opts]
    if any(flag == f"--no-{parameter.opts[0].removeprefix('--')}" for flag in parameter.secondary_opts):
        return Row(f"--[no-]{parameter.opts[0].removeprefix('--')}", _text(parameter))
    flag = ", ".join(sorted(flags, key=len))
    takes_value = not parameter.is_flag
    return Row(f"{flag} {parameter.metavar or 'TEXT'}" if takes_value else flag, _text(parameter))


def _text(parameter: Any) -> str:
    return re.sub(r"\s+", " ", getattr(parameter, "help", "") or "").strip()
