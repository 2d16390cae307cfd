"""Law 11: a place adds nothing. The same description gives the same bits wherever its processes run.

Places of the registry that run processes are tried (clusters: `tests/clusters`), and one of a user's own that is as
foreign as a place on the same machine can be: each process is started by a shell, in another folder, with an empty
environment, from its description as text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from echelon.checkpoint import CheckpointStore
from echelon.launch import places
from echelon.launch.places.base import Place
from tests.ranks.run_many import run_many
from tests.ranks.runs import SMALL, losses_of

pytestmark = pytest.mark.timeout(400)
STEPS = 12
PROCESS_PLACES = [
    n for n in places.PLACES.names() if issubclass(places.PLACES.settings_class(n), Place)
]  # others: clusters
SETTINGS = (*SMALL, "--workers", "2", "--max-steps", str(STEPS), "--batch-size", "100", "--eval-every", "0",
            "--model", "mlp")  # fmt: skip
OWN = "shell_place:Shell"
SHELL = """
from __future__ import annotations

import shlex
import socket
import subprocess
import sys
import tempfile
import time

from echelon.launch.places.base import Exited, Place, Started


class Shell(Place):
    def __init__(self):
        self._running, self._started = {}, []
        self._folder = tempfile.TemporaryDirectory()

    def start(self, processes):
        for process in processes:
            python = f"env -i PATH=/usr/bin:/bin {shlex.quote(sys.executable)} -m echelon.launch.process"
            command = ["sh", "-c", f"cd {shlex.quote(self._folder.name)} && exec {python}"]
            child = subprocess.Popen(command, stdin=subprocess.PIPE, cwd="/", text=True)
            child.stdin.write(process.to_json())
            child.stdin.close()
            self._running[process.name] = child
            self._started.append(Started(process.name, child.pid, socket.gethostname()))

    def events(self, timeout_s):
        events, self._started = self._started, []
        ends = time.monotonic() + timeout_s
        while not events:
            ended = [name for name, child in self._running.items() if child.poll() is not None]
            events = [Exited(name, self._running.pop(name).returncode) for name in ended]
            if time.monotonic() > ends:
                break
            time.sleep(0.01)
        return events

    def signal(self, names, signum):
        for name in names:
            if name in self._running:
                self._running[name].send_signal(signum)

    def close(self):
        for child in self._running.values():
            child.kill()
            child.wait()
        self._folder.cleanup()
"""


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of the newest checkpoint, optimizer and generators too, by its way through the state."""
    newest = CheckpointStore(folder / "checkpoints", keep=1).newest()
    assert newest is not None and newest[0] == STEPS
    return dict(_below("", newest[1]))


def _below(way: str, state: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(state, torch.Tensor):
        yield way, state
    for key, value in state.items() if isinstance(state, Mapping) else ():
        yield from _below(f"{way}/{key}", value)


@pytest.mark.parametrize(
    ("place", "sync"),
    [
        pytest.param(OWN, "ps(mode=sync)", marks=pytest.mark.long),  # has more processes than replicas have
        *(pytest.param(place, "allreduce", marks=pytest.mark.slow) for place in PROCESS_PLACES),
        *(pytest.param(place, "ps(mode=sync)", marks=pytest.mark.slow) for place in PROCESS_PLACES),
        pytest.param(OWN, "allreduce", marks=pytest.mark.long),
    ],
)
def test_the_same_description_gives_the_same_bits(tmp_path: Path, place: str, sync: str) -> None:
    (tmp_path / "shell_place.py").write_text(SHELL)
    # A server's steps begin with the workers that are there: with one, every step has the same shares.
    workers = ["--workers", "1"] if sync.startswith("ps") else []
    run = ["train", "digits", *SETTINGS, "--sync", sync, *workers]
    here, there = run_many(tmp_path, [[*run, "--run", "here"], [*run, "--on", place, "--run", "there"]])
    assert (here.code, there.code) == (0, 0), (here, there)
    assert list(losses_of(tmp_path / "here")) == list(range(1, STEPS + 1))
    assert losses_of(tmp_path / "there") == losses_of(tmp_path / "here")
    ours, theirs = _tensors(tmp_path / "here"), _tensors(tmp_path / "there")
    assert any("optimizer" in name for name in ours) or sync.startswith("ps"), "whose servers hold it"
    assert ours and ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
