"""The node command of a machine that comes when the run is over: it ends well, and leaves what was noted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from echelon.config import RunConfig, load_run_config
from echelon.core.errors import USER_ERROR_EXIT_CODE, UserError
from echelon.launch.places.cluster import NodeRank, PlaceFiles
from echelon.launch.places.ssh import RANK_VARIABLE
from echelon.run import node
from echelon.run.elsewhere import VERSIONS_FILE, versions


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run on two hosts, on the second of which this is."""
    (tmp_path / "config.yaml").write_text("data: {input: digits}\nlaunch: {on: ssh(hosts=a+b)}\n")
    files = PlaceFiles(tmp_path)
    files.prepare()
    (files.folder / VERSIONS_FILE).write_text(json.dumps(versions()))
    monkeypatch.setenv(RANK_VARIABLE, NodeRank(1, "b", "10.0.0.1:29", "job").to_json())
    for name in ("outlive_readers", "stop_at_once"):
        monkeypatch.setattr(node, name, lambda: None)
    return tmp_path


@pytest.mark.parametrize("when", ["before it began", "while it waited"])
def test_a_completed_run_is_not_waited_for(
    run: Path, when: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files, begun = PlaceFiles(run), []

    def wait_in_vain(*_: object) -> int:
        """Wait for a first machine that has completed the run meanwhile."""
        begun.append(1)
        files.end(0)
        raise UserError("nothing answers there")

    monkeypatch.setattr(node, "_run_part", wait_in_vain)
    if when == "before it began":
        files.end(0)
    assert node.main(run) == 0 and len(begun) == (when == "while it waited")
    assert files.ended() == (0, "") and "completed by the other machines" in capsys.readouterr().err


def test_a_refusal_is_noted(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        """Refuse."""
        raise UserError("no such model")

    assert isinstance(load_run_config(run / "config.yaml"), RunConfig)
    monkeypatch.setattr(node, "_run_part", refuse)
    assert node.main(run) == USER_ERROR_EXIT_CODE
    assert PlaceFiles(run).ended() == (USER_ERROR_EXIT_CODE, "no such model")
