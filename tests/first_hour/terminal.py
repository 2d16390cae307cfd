"""A shell in tmux, 80 columns wide, whose screen is looked at while a command goes."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

COLUMNS, ROWS = 80, 40
_POLL_S = 0.1
_RC = """PS1='$ '
PROMPT_COMMAND='echo $? >>"$STATUSES"'
"""


class Terminal:
    """A shell of its own tmux server, which ends with it.

    Args:
        folder: where the shell begins.
        scratch: for its own files.
    """

    def __init__(self, folder: Path, scratch: Path, environment: Mapping[str, str]) -> None:
        self._socket, self._statuses = scratch / "tmux", scratch / "statuses"
        rc = scratch / "rc"
        rc.write_text(_RC)
        self._environment = {**environment, "STATUSES": str(self._statuses), "TERM": "xterm-256color", "TMUX": ""}
        size = ["-x", str(COLUMNS), "-y", str(ROWS)]
        self._tmux("-f", "/dev/null", "new-session", "-d", *size, "-c", str(folder), f"bash --noprofile --rcfile {rc}")
        self._tmux("set-option", "-g", "history-limit", "50000")
        self._wait_for_prompts(1, 20.0)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._tmux("kill-server")

    def run(self, command: str, deadline_s: float, stop_at: str = "") -> tuple[int, list[tuple[float, str]]]:
        """Type a command and look at the screen until it has ended.

        Args:
            stop_at: a text on the screen at which Ctrl-C is pressed.

        Returns:
            its exit code, and what stood on the screen after how many seconds: at first, while it went, and whole at
            the end.
        """
        self._tmux("send-keys", "-R")
        self._tmux("clear-history")
        prompts, began, due = self._prompts(), time.monotonic(), 1.0
        screens: list[tuple[float, str]] = []
        self._tmux("send-keys", "-l", command)
        self._tmux("send-keys", "Enter")
        while self._prompts() == prompts:
            passed = time.monotonic() - began
            if passed > deadline_s:
                self._tmux("send-keys", "C-c")
                raise AssertionError(f"{command} did not end in {deadline_s:.0f} s:\n{self.screen()}")
            if stop_at and stop_at in self.screen():
                self._tmux("send-keys", "C-c")
                stop_at = ""
            if passed > due:
                screens.append((passed, self.screen()))
                due *= 2
            time.sleep(_POLL_S)
        screens.append((time.monotonic() - began, self.screen("-S", "-")))
        return int(self._statuses.read_text().split()[-1]), screens

    def screen(self, *options: str) -> str:
        """Return the text on the screen, or with the lines that have left it."""
        return self._tmux("capture-pane", "-p", *options).rstrip()

    def _prompts(self) -> int:
        return len(self._statuses.read_text().split()) if self._statuses.exists() else 0

    def _wait_for_prompts(self, count: int, deadline_s: float) -> None:
        ends = time.monotonic() + deadline_s
        while self._prompts() < count:
            assert time.monotonic() < ends, "no shell in tmux"
            time.sleep(_POLL_S)

    def _tmux(self, *arguments: str) -> str:
        command = ["tmux", "-S", str(self._socket), *arguments]
        done = subprocess.run(command, env=self._environment, capture_output=True, text=True, check=True, timeout=20)
        return done.stdout
