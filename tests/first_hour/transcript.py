"""What was typed and what came back, as one file of Markdown that grows while it is made."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from pathlib import Path

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass
class Transcript:
    """A file of sections; `problems` are what a program can already tell is wrong."""

    folder: Path
    problems: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    @property
    def file(self) -> Path:
        """Where it is written."""
        return self.folder / "transcript.md"

    def heading(self, text: str) -> None:
        """Begin a section."""
        self._write(f"\n## {text}\n\n")

    def block(self, label: str, text: str) -> None:
        """Add what was shown, as it was shown."""
        self._write(f"{label}\n\n````\n{_ESCAPES.sub('', text).rstrip()}\n````\n\n")

    def picture(self, label: str, file: Path) -> None:
        """Add a picture of this folder."""
        self._write(f"{label}: ![{label}]({file.relative_to(self.folder)})\n\n")

    def expect(self, holds: bool, problem: str) -> None:
        """Note a problem unless something holds."""
        if not holds:
            self.problems.append(problem)
            self._write(f"**PROBLEM: {problem}**\n\n")

    def _write(self, text: str) -> None:
        with self.file.open("a", encoding="utf-8") as out:
            out.write(text)
