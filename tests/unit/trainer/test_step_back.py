"""A run never goes on from less than its record says was saved, unless it is told to start over."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from echelon.checkpoint import CheckpointStore, files
from echelon.config import RunConfig, to_yaml
from echelon.core.errors import UserError
from echelon.core.files import write_atomic
from echelon.core.state_tree import StateView
from echelon.models.tuning.plan import UNTUNED
from echelon.records.file import Recorder
from echelon.records.kinds import Checkpoint
from echelon.run.ending import check_checkpoints
from echelon.run.finetune import tuned_from
from echelon.run.overview import overview_of, runs_below
from echelon.trainer.folder import CONFIG_FILE, check_is_run
from echelon.trainer.saving import Captured, Saver, WriterState, best_state, last_saved, start_over
from echelon.trainer.start_weights import bring_weights
from echelon.trainer.state import Cursor, Fingerprint


class _State:
    """A state of one number: the step."""

    leads, bytes_sent = True, 0

    def newest(self, store: CheckpointStore) -> tuple[int, StateView] | None:
        """Return the newest whole checkpoint."""
        return store.newest()

    def load(self, state: StateView) -> Cursor:
        """Return how far it is."""
        return Cursor(**state["cursor"])

    def prepare(self, store: CheckpointStore, begins: bool) -> WriterState:
        """Wait for the one before."""
        store.wait()
        return WriterState.IDLE

    @contextmanager
    def captured(self, cursor: Cursor, store: CheckpointStore) -> Iterator[Captured | None]:
        """Give the cursor alone."""
        yield Captured({"cursor": asdict(cursor)})

    def finish(self) -> None:
        """Do nothing."""


def _saver(folder: Path) -> Saver:
    return Saver(folder, 2, _State(), Recorder(folder), Fingerprint())


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that saved steps 10, 20 and 30."""
    saver = _saver(tmp_path)
    for step in (10, 20, 30):
        saver.save(Cursor(0, step, step), "")
        saver.finish()
    assert last_saved(tmp_path) == 30
    return tmp_path


def test_the_newest_is_restored(run: Path) -> None:
    assert _saver(run).restore() == Cursor(0, 30, 30)


def test_a_missing_folder_is_refused(run: Path) -> None:
    (run / "checkpoints").rename(run / "elsewhere")
    with pytest.raises(UserError, match=r"of step 30 was saved here, and there is none: .*--from-scratch"):
        _saver(run).restore()
    (run / "elsewhere").rename(run / "checkpoints")
    assert _saver(run).restore() == Cursor(0, 30, 30)


def test_an_older_one_than_the_record_says_is_refused(run: Path) -> None:
    shutil.rmtree(run / "checkpoints" / "step-00000030")
    with pytest.raises(UserError, match="of step 30 was saved here, and the newest one is of step 20"):
        _saver(run).restore()


def test_a_damaged_one_is_passed_over_and_said_once(run: Path) -> None:
    (run / "checkpoints" / "step-00000030" / "tree.json").write_text("{}")
    saver = _saver(run)
    assert saver.restore() == Cursor(0, 20, 20) == saver.restore()
    (message,) = saver.passed_over
    assert message.startswith("checkpoint step-00000030 is damaged and was passed over")


def test_who_asks_for_the_best_is_told_of_one_that_was_passed_over(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "checkpoints" / "step-00000030" / "tree.json").write_text("{}")
    assert best_state(run)["cursor"]["step"] == 20
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("echelon: checkpoint step-00000030 is damaged and was passed over")
    (run / "checkpoints" / "step-00000020" / "tree.json").write_text("{}")
    with pytest.raises(UserError, match="no checkpoint here is whole"):
        best_state(run)
    assert not capsys.readouterr().err  # the refusal is one line


@pytest.mark.parametrize("size", [1 << 30, 0])  # as it is; as if the checkpoints were too large to be read twice
def test_who_would_start_processes_is_refused_before(run: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    config = RunConfig()
    write_atomic(run / CONFIG_FILE, to_yaml(config))
    tuned = replace(config.model, weights=str(run))
    monkeypatch.setattr(files, "_QUICK_BYTES", size)
    (run / "checkpoints/step-00000030/tree.json").unlink()
    check_checkpoints(run)  # the other is whole
    bring_weights(tuned, UNTUNED, UNTUNED)
    (run / "checkpoints/step-00000020/tree.json").write_text("{}")
    with pytest.raises(UserError, match=r"no checkpoint here is whole \(2 tried\)"):
        check_checkpoints(run)
    with pytest.raises(UserError, match="no checkpoint here is whole"):
        bring_weights(tuned, UNTUNED, UNTUNED)
    with pytest.raises(UserError, match="no checkpoint here is whole"):
        tuned_from(run, {})


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _circle(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def _deep(path: Path) -> None:
    path.write_text("[" * 100_000)
    if path.name == files.MANIFEST:
        path.with_name(files.MANIFEST_SUM).write_bytes(files._sum_line(path))


def _other(path: Path) -> None:
    path.write_text("[1, {}]")
    if path.name == files.MANIFEST:
        path.with_name(files.MANIFEST_SUM).write_bytes(files._sum_line(path))


@pytest.mark.parametrize("damage", [_pipe, _folder, _circle, _deep, _other], ids=lambda damage: damage.__name__[1:])
@pytest.mark.parametrize("name", [
    "config.yaml", "launch.json", "record.jsonl", "step-00000030/manifest.json", "step-00000030/manifest.sha256",
])  # fmt: skip
def test_no_file_of_a_foreign_run_holds_its_readers_up_or_breaks_them(
    run: Path, name: str, damage: Callable[[Path], None]
) -> None:
    write_atomic(run / CONFIG_FILE, to_yaml(RunConfig()))
    write_atomic(run / "launch.json", "{}")
    damage(run / ("checkpoints" if "/" in name else "") / name)
    list(runs_below(run.parent))
    for read in (check_is_run, overview_of, check_checkpoints, best_state):
        with suppress(UserError):
            read(run)
    if "/" in name:
        assert best_state(run)["cursor"]["step"] == 20


ASKED = """
import sys
import echelon.api
from echelon.cli import main

run = sys.argv[1]

def on_the_command_line(*words):
    sys.argv = ["echelon", *words]
    main()

def asks(checkpoint):
    yield lambda: echelon.predict(run, ["a"], checkpoint=checkpoint)
    yield lambda: echelon.predict(run, ["a"], checkpoint=checkpoint, workers=2)
    yield lambda: echelon.api.trained_model(run, checkpoint)
    yield lambda: echelon.evaluate(run, checkpoint=checkpoint, workers=1)
    yield lambda: echelon.evaluate(run, checkpoint=checkpoint, workers=2)
    yield lambda: on_the_command_line("predict", run, "a", "--checkpoint", checkpoint, "--workers", "2")
    yield lambda: on_the_command_line("predict", run, "a", "--checkpoint", checkpoint, "--out", "a.csv")
    yield lambda: on_the_command_line("serve", run, "--checkpoint", checkpoint)
    if checkpoint == "best":
        yield lambda: echelon.export(run, "a.safetensors")
        yield lambda: echelon.train("small_cnn", "digits", weights=run)
        yield lambda: echelon.train("small_cnn", "digits", weights=run, workers=1)
        yield lambda: on_the_command_line("train", "digits", "--weights", run)
        yield lambda: on_the_command_line("finetune", run, "digits")

for checkpoint in ("best", "newest", "20", "7"):
    for number, ask in enumerate(asks(checkpoint)):
        try:
            ask()
        except echelon.UserError as refusal:
            print(refusal, file=sys.stderr)
        except SystemExit as end:
            assert end.code == 2, end
        assert "torch" not in sys.modules, f"torch was imported before refusal {number} of {checkpoint}"
"""


def test_who_would_use_its_weights_is_refused_before_torch(run: Path, tmp_path: Path) -> None:
    write_atomic(run / CONFIG_FILE, to_yaml(RunConfig()))
    (run / "checkpoints/step-00000030/tree.json").unlink()
    (run / "checkpoints/step-00000020/tree.json").write_text("{}")
    command = [sys.executable, "-c", ASKED, str(run)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    messages = (
        *("no checkpoint here is whole (2 tried)",) * 13, *("step-00000030 is damaged: missing files",) * 8,
        *("step-00000020 is damaged: tree.json has 2 bytes",) * 8, *("has best, newest, 20, 30",) * 8,
    )  # fmt: skip
    for line, message in zip(done.stderr.splitlines(), messages, strict=True):
        assert message in line


def test_starting_over_puts_the_checkpoints_aside(run: Path) -> None:
    start_over(run)
    assert last_saved(run) is None and _saver(run).restore() is None
    assert [path.name for path in (run / "checkpoints-before-1").iterdir() if path.name.endswith("30")]
    start_over(run)  # before anything was saved
    assert not (run / "checkpoints-before-2").exists()
    saver = _saver(run)
    saver.save(Cursor(0, 5, 5), "")
    saver.finish()
    assert last_saved(run) == 5 and _saver(run).restore() == Cursor(0, 5, 5)


def test_a_run_that_was_rolled_back_goes_on_from_there(run: Path) -> None:
    record = Recorder(run)
    record.write(Checkpoint(20))
    record.close()
    shutil.rmtree(run / "checkpoints" / "step-00000030")
    assert _saver(run).restore() == Cursor(0, 20, 20)
