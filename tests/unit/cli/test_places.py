"""`echelon runs`, `logs` and `stop` on runs of this machine."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from echelon.config import build
from echelon.records.file import Recorder
from echelon.records.kinds import Start
from echelon.trainer.folder import claim
from tests.unit.cli.conftest import Here

HOLD = """
import signal, sys
from pathlib import Path
from echelon.trainer.folder import locked
for number in sys.argv[2:]:
    signal.signal(int(number), signal.SIG_IGN)
with locked(Path(sys.argv[1]), shared=False):
    print("held", flush=True)
    signal.pause()
"""


def _run(folder: Path, **settings: str) -> Path:
    config = build(None, {name.replace("__", "."): value for name, value in settings.items()}).config
    claim(replace(config, run=str(folder)))
    return folder


@contextmanager
def _held(run: Path, *ignored: signal.Signals) -> Iterator[subprocess.Popen[str]]:
    """Let a process hold a run's folder that ignores some signals; it has ended then, or is ended."""
    command = [sys.executable, "-c", HOLD, str(run), *(str(int(signum)) for signum in ignored)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def test_names_with_brackets_are_shown(tmp_path: Path, here: Here) -> None:
    _run(tmp_path / "runs" / "exp[lr=0.1]")
    assert "runs/exp[lr=0.1] " in here("runs").stdout


@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="this system does not tell who holds a lock")
@pytest.mark.parametrize(
    ("nodes", "ignored", "sent", "words"),
    [
        ("1", (), signal.SIGTERM, "saves a checkpoint and ends"),
        ("2", (), signal.SIGINT, "saves a checkpoint and ends"),  # SIGTERM would let this machine alone leave
        ("2", (signal.SIGINT, signal.SIGQUIT), signal.SIGHUP, "saves a checkpoint and ends"),  # a script's cmd &
        ("2", (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT), signal.SIGTERM, "stop it on the first machine"),
    ],
)
def test_a_stop_on_any_machine_is_one_of_the_whole_run(
    nodes: str, ignored: tuple[signal.Signals, ...], sent: signal.Signals, words: str, tmp_path: Path, here: Here
) -> None:
    run = _run(tmp_path / "runs" / "a", launch__nodes=nodes, launch__rendezvous="a:29400")
    with _held(run, *ignored) as process:
        said = here("stop", "runs/a")
        assert process.wait(30) == -sent
    assert said.returncode == 0 and words in said.stderr
    assert "nothing to stop" in here("stop", "runs/a").stderr


def test_a_log_of_a_rank_that_is_not_there_is_refused_also_where_it_is_followed(tmp_path: Path, here: Here) -> None:
    run = _run(tmp_path / "runs" / "a")
    (run / "logs").mkdir()
    refused = here("logs", "runs/a", "--follow", "--rank", "5")
    assert refused.returncode == 2 and "rank5.log is not there; " in refused.stderr
    (run / "logs" / "rank0.log").write_text("trains\n")
    with closing(Recorder(run)) as record:
        record.write(Start(world_size=2))
    with _held(run):
        refused = here("logs", "runs/a", "--follow", "--rank", "5")
    assert refused.returncode == 2 and "has rank0.log" in refused.stderr
