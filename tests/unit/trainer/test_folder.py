"""A run's folder is had by one command alone, however many begin at the same moment."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from echelon.config import LaunchConfig, RunConfig, load_run_config
from echelon.core.errors import UserError
from echelon.records.file import Recorder
from echelon.records.going import read_launch
from echelon.records.kinds import Start
from echelon.trainer.folder import (
    CONFIG_FILE,
    check_new,
    claim,
    claimed,
    default_folder,
    is_own_launch,
    locked,
    mark_ended,
    prepare,
    put_back,
    reserved,
)

MANY = 10
CLAIM = """
import sys
from pathlib import Path
from echelon.config import RunConfig
from echelon.trainer.folder import claim
sys.stdin.read()
print(claim(RunConfig(), Path(sys.argv[1])).run)
"""


def _names(root: Path) -> list[str]:
    return sorted((path.name for path in root.iterdir()), key=lambda name: int(name.rpartition("-")[2]))


def test_claims_of_the_same_moment_each_get_a_folder(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    with ThreadPoolExecutor(MANY) as pool:
        configs = list(pool.map(lambda _: claim(RunConfig(), root), range(5 * MANY)))
    expected = [f"digits-auto-{i + 1}" for i in range(5 * MANY)]
    assert _names(root) == expected and {Path(config.run).name for config in configs} == set(expected)
    for config in configs:
        assert load_run_config(Path(config.run) / CONFIG_FILE) == config


def test_claims_of_processes_each_get_a_folder(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    command = [sys.executable, "-c", CLAIM, str(root)]
    claims = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(MANY)]
    for process in claims:  # all wait for this: their imports are done
        assert process.stdin is not None
        process.stdin.close()
    folders = [process.stdout.read().strip() for process in claims if process.stdout is not None]
    assert [process.wait(60) for process in claims] == [0] * MANY
    assert len(set(folders)) == MANY and _names(root) == [f"digits-auto-{i + 1}" for i in range(MANY)]


def test_machines_of_one_run_get_the_same_folder_and_a_later_run_another(tmp_path: Path) -> None:
    config = replace(RunConfig(), launch=LaunchConfig(nodes="4", rendezvous="here:1"))
    with ThreadPoolExecutor(4) as pool:
        folders = {made.run for made in pool.map(lambda _: claim(config, tmp_path), range(4))}
    assert folders == {str(tmp_path / "digits-auto-1")}
    mark_ended(tmp_path / "digits-auto-1")
    assert claim(config, tmp_path).run == str(tmp_path / "digits-auto-2")


def test_a_machine_that_joins_late_leaves_the_first_ones_command_as_the_runs(tmp_path: Path) -> None:
    config = replace(RunConfig(), run=str(tmp_path / "run"), launch=LaunchConfig(nodes="2", rendezvous="here:1"))
    claim(config, given_t=100.0)
    claim(config, given_t=130.0, leads=False)
    assert read_launch(tmp_path / "run").launched_t == 100.0
    claim(config, given_t=150.0)  # the first machine is back
    assert read_launch(tmp_path / "run").launched_t == 150.0
    own_disk = replace(config, run=str(tmp_path / "own"))
    claim(own_disk, given_t=130.0, leads=False)
    assert read_launch(tmp_path / "own").launched_t == 130.0


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        claim(RunConfig(), tmp_path / "runs")


def test_nothing_but_the_claim_is_left(tmp_path: Path) -> None:
    config = claim(RunConfig(), tmp_path)
    assert default_folder(RunConfig(), tmp_path).name == "digits-auto-2"
    assert sorted(path.name for path in Path(config.run).iterdir()) == [CONFIG_FILE, "launch.json"]
    assert not json.loads((Path(config.run) / "launch.json").read_text())["ended"]


@pytest.mark.parametrize("ended", [True, False], ids=["refused", "another machine goes on"])
def test_a_run_that_is_refused_leaves_no_folder(tmp_path: Path, ended: bool) -> None:
    root = tmp_path / "runs"
    with pytest.raises(UserError, match="no such"), claimed(RunConfig(), 0.0, "mlp", root) as config:
        folder = Path(config.run)
        assert folder.name == "digits-mlp-1"
        (folder / "logs").mkdir()
        if ended:
            mark_ended(folder)
        raise UserError("no such data")
    assert folder.exists() != ended and root.exists() != ended


def test_checkpoints_without_a_description_are_not_continued_by_a_new_run(tmp_path: Path) -> None:
    config = replace(RunConfig(), run=str(tmp_path))
    (tmp_path / "checkpoints" / "step-1000").mkdir(parents=True)  # another tool's
    check_new(tmp_path, config)
    (tmp_path / "checkpoints" / "step-00000010").mkdir()
    with pytest.raises(UserError, match=r"config.yaml is gone: put it back"):
        check_new(tmp_path, config)


def test_a_folder_that_was_there_or_that_others_are_in_stays(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(UserError), claimed(replace(RunConfig(), run=str(tmp_path / "mine")), 0.0, "") as config:
        mark_ended(Path(config.run))
        raise UserError("no")
    assert (tmp_path / "mine").exists()
    with pytest.raises(UserError), claimed(RunConfig(), 0.0, "", tmp_path / "runs") as config:
        mark_ended(Path(config.run))
        held = locked(Path(config.run), shared=True)
        held.__enter__()
        raise UserError("no")
    assert Path(config.run).exists()
    held.__exit__(None, None, None)


@pytest.mark.parametrize("reason", [UserError("no such model"), KeyboardInterrupt()], ids=["refused", "Ctrl-C"])
def test_a_folder_that_is_held_for_a_run_goes_again_unless_it_is_made(tmp_path: Path, reason: BaseException) -> None:
    root = tmp_path / "runs"
    with pytest.raises(type(reason)), reserved(RunConfig(), "mlp", root) as first:
        with reserved(RunConfig(), "mlp", root) as second:
            assert [Path(each.run).name for each in (first, second)] == ["digits-mlp-1", "digits-mlp-2"]
        assert not Path(second.run).exists() and Path(first.run).exists()
        raise reason
    assert not root.exists()


def test_a_run_is_made_in_the_folder_that_is_held_and_refused_with_it(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    with reserved(RunConfig(), "mlp", root) as named, claimed(named, 5.0) as config:
        assert config.run == named.run
    assert json.loads((Path(config.run) / "launch.json").read_text())["launched_t"] == 5.0
    with pytest.raises(UserError), reserved(RunConfig(), "mlp", root) as named, claimed(named, 5.0):
        mark_ended(Path(named.run))
        raise UserError("no")
    assert [each.name for each in root.iterdir()] == ["digits-mlp-1"]


def test_the_description_before_a_refused_command_is_put_back_unless_the_run_has_begun_by_it(tmp_path: Path) -> None:
    first, later = RunConfig(), replace(RunConfig(), training=replace(RunConfig().training, epochs=7))
    assert prepare(tmp_path, first, 1.0) == "" and prepare(tmp_path, first, 2.0) == ""
    described = (tmp_path / CONFIG_FILE).read_bytes()
    put_back(tmp_path, prepare(tmp_path, later, 3.0))
    assert (tmp_path / CONFIG_FILE).read_bytes() == described
    before = prepare(tmp_path, later, 4.0)
    with closing(Recorder(tmp_path)) as record:
        record.write(Start())  # now
    put_back(tmp_path, before)
    assert load_run_config(tmp_path / CONFIG_FILE) == later


@pytest.mark.parametrize("shared", [True, False])
def test_a_machine_that_shares_a_folder_leaves_what_another_one_wrote_and_not_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    first = replace(RunConfig(), launch=replace(RunConfig().launch, rendezvous="node0:1"))
    later = replace(first, training=replace(first.training, epochs=7))
    prepare(tmp_path, first, 1.0, leads=shared)  # where it was killed, nobody has noted its end
    if shared:
        monkeypatch.setattr("socket.gethostname", lambda: "node1")
    prepare(tmp_path, later, 2.0, leads=False)
    assert load_run_config(tmp_path / CONFIG_FILE) == (first if shared else later)
    assert is_own_launch(tmp_path) is not shared
