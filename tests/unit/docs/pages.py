"""README and the pages of docs/: their fenced blocks, and the commands in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PAGES = (
    ROOT / "README.md",
    *sorted(page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "decisions"),
)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Attributes:
        language: as written behind the fence; empty: a shell's commands.
    """

    page: Path
    language: str
    text: str

    @property
    def name(self) -> str:
        """Say where it stands."""
        return f"{self.page.relative_to(ROOT)}: {self.text.splitlines()[0][:60]}"


def blocks(language: str) -> list[Block]:
    """Return the blocks of one language, in the order of the pages."""
    return [
        Block(page, match[1], match[2])
        for page in PAGES
        for match in FENCE.finditer(page.read_text(encoding="utf-8"))
        if match[1] == language
    ]


def commands() -> list[list[str]]:
    """Return the arguments of each `echelon ...` in the blocks without a language; comments are left out."""
    lines = [line for block in blocks("") for line in _lines(block.text)]
    found = [arguments for line in lines if (arguments := _arguments(line)) is not None]
    return [list(arguments) for arguments in dict.fromkeys(map(tuple, found))]


def _lines(text: str) -> Iterator[str]:
    for line in text.replace("\\\n", " ").splitlines():
        yield from line.split("&&")


def _arguments(line: str) -> list[str] | None:
    line = re.sub(r".*\$\((echelon .*)\).*", r"\1", line)  # eval "$(echelon completion bash)"
    if not re.search(r"(^|\s)(echelon|-m echelon)\s", line):
        return None
    words = shlex.split(line, comments=True)
    if "docker" in words or "echelon" not in words[:-1]:
        return None
    return words[words.index("echelon") + 1 :]
