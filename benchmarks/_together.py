"""Runs of `echelon train` that go on beside each other until enough was measured."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from echelon.records.file import read_records
from echelon.records.kinds import Steps

DEADLINE_S = 300.0


@dataclass(frozen=True)
class TrainCommand:
    """A run's folder, the command that makes it, and variables beside those of this process."""

    run: Path
    words: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict)


@contextmanager
def training(name: str, commands: Sequence[TrainCommand]) -> Iterator[None]:
    """Start runs; inside, each has trained for a window; afterwards each is stopped and has written its summary.

    Raises:
        RuntimeError: one ended, or did not train by the deadline; says `name`.
    """
    processes = [
        subprocess.Popen(
            c.words, env={**os.environ, **c.variables}, stdout=subprocess.DEVNULL, start_new_session=True
        )
        for c in commands
    ]  # fmt: skip
    try:
        deadline = time.monotonic() + DEADLINE_S
        while not all((c.run / "record.jsonl").exists() and read_records(c.run, Steps) for c in commands):
            if time.monotonic() > deadline or any(process.poll() is not None for process in processes):
                raise RuntimeError(f"{name}: training did not begin")
            time.sleep(0.1)
        yield
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            process.wait(DEADLINE_S)
    finally:
        for process in processes:
            process.kill()
            process.wait(DEADLINE_S)
