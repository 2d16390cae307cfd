"""Who is told of a run's end: webhooks and programs, what they get, and what is said when they cannot be told."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from echelon.config.build import COMMAND_LINE
from echelon.core.errors import UserError
from echelon.run.notify import Notifier, check_notify
from echelon.run.trust import check_settings, named_code
from tests.ranks.runs import SMALL, Runs

TELL = '#!/bin/sh\ncat >>"$(dirname "$0")/told"; echo >>"$(dirname "$0")/told"\n'


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "tell.sh"
    path.write_text(TELL)
    path.chmod(0o755)
    return path


@pytest.fixture
def heard() -> Iterator[tuple[str, list[dict[str, str]]]]:
    bodies: list[dict[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200 if self.path == "/hook/key" else 404)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/hook", bodies
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_webhook(heard: tuple[str, list[dict[str, str]]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    url, bodies = heard
    monkeypatch.setenv("HOOK_KEY", "key")
    Notifier(f"{url}/$HOOK_KEY", tmp_path / "run 1").end("completed", "top1 0.9")
    assert [(b["status"], b["message"], b["run"]) for b in bodies] == [("completed", "top1 0.9", f"{tmp_path}/run 1")]
    assert bodies[0]["text"].startswith("echelon: run 1 on ") and bodies[0]["text"].endswith(": completed: top1 0.9")


@pytest.mark.parametrize(
    ("target", "words"),
    [("{url}/other", "the server answers 404"), ("{url}/$NO_KEY", "'NO_KEY' is not set"), ("http://[/x", "ValueError")],
)
def test_nobody_is_told(
    heard: tuple[str, list[dict[str, str]]], capfd: pytest.CaptureFixture[str], target: str, words: str
) -> None:
    Notifier(target.format(url=heard[0]), Path("a")).end("failed", "")
    said = capfd.readouterr().err
    assert words in said and "--notify" in said and "http" not in said, "a URL may hold a secret"


def test_a_program_and_trouble(program: Path) -> None:
    notifier, told = Notifier(str(program), Path("a")), program.parent / "told"
    notifier.trouble("rank 1 died")
    notifier.trouble("rank 2 died")
    ends = time.monotonic() + 30
    while not (told.exists() and told.read_text().endswith("\n")):
        assert time.monotonic() < ends
        time.sleep(0.02)
    assert [json.loads(line)["message"] for line in told.read_text().splitlines()] == ["rank 1 died"]


def test_what_is_refused_and_what_is_code(program: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a program that can be run"):
        check_notify(str(tmp_path / "nothing.sh"))
    check_notify("")
    check_notify("https://example.org")
    assert [code.file for code in named_code({"tracking.notify": str(program)})] == [str(program)]
    assert list(named_code({"tracking.notify": "https://example.org:8/x"})) == []


@pytest.mark.long
def test_a_run_tells(program: Path, tmp_path: Path) -> None:
    with Runs(tmp_path) as runs:
        settings = (*SMALL, "--model", "mlp", "--workers", "2", "--epochs", "400", "--checkpoint-every", "5")
        run = runs.start("train", "digits", *settings, "--notify", program, folder="run")
        run.wait_for_step(10)
        os.kill(run.pids()[1], signal.SIGKILL)
        run.wait_for(lambda: (tmp_path / "told").exists(), "a word on the death")
        run.process.send_signal(signal.SIGINT)
        assert run.end() == 130, run.text()
    told = [json.loads(line) for line in (tmp_path / "told").read_text().splitlines()]
    assert [each["status"] for each in told] == ["trouble", "stopped"] and "SIGKILL" in told[0]["message"]


def test_a_program_of_another_ones_file(program: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    values, theirs = {"tracking.notify": str(program)}, {"tracking.notify": "run.yaml, line 1"}
    with pytest.raises(UserError, match=r"--notify .* would run"):
        check_settings(values, theirs, trust=False)
    check_settings(values, {"tracking.notify": COMMAND_LINE}, trust=False)
    check_settings(values, theirs, trust=False)
