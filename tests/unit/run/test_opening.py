"""What a command says of a run before it begins."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from echelon.config import DataConfig, RunConfig
from echelon.data.base import DataOutline
from echelon.launch.culprit import Living
from echelon.observe.notes import Note
from echelon.run.foretold import Foretold, auto_in_words
from echelon.run.opening import Opening
from echelon.run.resolve import launch_request
from echelon.run.start import plan_of, said_before
from echelon.tasks.registry import TASKS

NAMED = replace(RunConfig(), run="runs/mine")


def _opening(told: Foretold, resumes: bool = False) -> Opening:
    return Opening(NAMED, plan_of(launch_request(NAMED), Path(NAMED.run)), told, resumes)


def _shown(opening: Opening) -> str:
    return opening._bar.name if opening._bar is not None else ""


def test_model_parameters_and_folder_are_said_first(capsys: pytest.CaptureFixture[str]) -> None:
    with _opening(Foretold("small_cnn", 98_026)) as opening:
        opening.runs_in(Path(NAMED.run))
    said = "".join(capsys.readouterr()).splitlines()
    assert said[0].startswith("digits, model small_cnn of 98,026 parameters; ")
    assert said[1].startswith("run folder runs/mine; Ctrl-C stops it") and len(said) == 2
    with _opening(Foretold("auto")):
        pass
    assert "".join(capsys.readouterr()).startswith(
        "digits, model auto (parameters: once torch is imported and it is built); "
    )


def test_nothing_starts_where_only_servers_live_on() -> None:
    """At the end of a run with a parameter server the workers are gone first."""

    def note(name: str, pid: int) -> Note | None:
        """Return what a worker that trains is at."""
        return Note("forward", 3, 0.0, 9, pid, 0, True, False) if name == "worker0" else None

    server, worker = Living("server0", "here", 1), Living("worker0", "here", 2)
    with _opening(Foretold("mlp", 650)) as opening:
        opening.runs_in(Path(NAMED.run))
        shown = [_shown(opening)]
        for living in ([server, worker], [server], [server, Living("worker1", "here", 3)]):
            opening.look(living, note, first_machine=True)
            shown.append(_shown(opening))
    assert shown == ["start: 2 workers", "", "", "start: 2 workers"]


def test_most_steps_and_where_a_run_goes_on_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    short = replace(NAMED, training=replace(NAMED.training, max_steps=3))
    plan = plan_of(launch_request(short), Path(short.run))
    with Opening(short, plan, Foretold("mlp", 650, done_steps=1_040), resumes=True):
        pass
    said = "".join(capsys.readouterr()).splitlines()
    assert "; 10 epochs (at most 3 steps) of batches of 128" in said[0], said
    assert said[1].startswith("continues in runs/mine after step 1,040; Ctrl-C stops it"), said


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("resumes", [False, True])
def test_ctrl_c_before_a_new_run_begins_says_that_nothing_is_kept(
    capsys: pytest.CaptureFixture[str], begins: bool, resumes: bool
) -> None:
    with pytest.raises(KeyboardInterrupt), _opening(Foretold("mlp"), resumes) as opening:
        if begins:
            opening.runs_in(Path(NAMED.run))
        raise KeyboardInterrupt
    said = "".join(capsys.readouterr())
    assert ("echelon: stopped before it began: runs/mine is not kept\n" in said) != (begins or resumes)


def _without_torch(folder: Path, command: str) -> str:
    """Return what a command says until it imports torch."""
    (folder / "absent" / "torch").mkdir(parents=True)
    (folder / "absent" / "torch" / "__init__.py").write_text("raise ImportError('it takes seconds')")
    done = subprocess.run(
        [sys.executable, "-m", "echelon", *command.split()],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(folder / "absent")}, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert "it takes seconds" in done.stderr, (done.stdout, done.stderr)
    return done.stdout


def test_what_is_known_of_a_table_or_a_text_is_said_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("x,y\n1,2\n")
    said = _without_torch(tmp_path, "train t.csv --target y --parallel dp=2 --sync local(8)")
    words = (
        "t.csv, model auto (table_mlp, text_classifier or the one of the task that the data is for); "
        "2 workers (dp=2), local(8); a new run folder in "
    )
    assert said.startswith(words), said
    assert {path.name for path in tmp_path.iterdir()} == {"t.csv", "absent"}


def test_what_goes_on_and_where_is_said_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.yaml").write_text("training: {epochs: 3}\n")
    said = _without_torch(tmp_path, "resume mine").splitlines()
    assert said[0].startswith("digits, model small_cnn of 98,026 parameters; ") and "; 3 epochs of " in said[0], said
    assert said[1].startswith("continues in mine; Ctrl-C stops it after a checkpoint"), said


def test_nothing_is_said_before_where_the_description_tells_all(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("to be or not to be")
    assert said_before(RunConfig()) == said_before(replace(RunConfig(), task="image-classification")) == ""
    text = replace(RunConfig(), data=DataConfig(source=str(tmp_path / "text.txt")))
    assert f"{text.data.source}, model small_gpt; " in said_before(text)
    assert "run folder runs/mine; " in said_before(replace(text, run="runs/mine"))


@pytest.mark.parametrize(
    ("data", "task", "model"),
    [
        ("a.txt", "auto", "small_gpt"), ("a.txt", "masked-language-modelling", "small_bert"),
        ("t.csv", "regression", "table_mlp"), ("t.csv", "text-classification", "text_classifier"),
        ("masks", "auto", "small_unet"), ("sounds", "speech-recognition", "small_ctc"),
        ("t.csv", "recommendation", "auto (the one of the task that the data is for)"),
        ("sounds", "auto", "auto (the one of the task that the data is for)"),
    ],
)  # fmt: skip
def test_what_auto_becomes_is_known_by_the_names_of_data_and_task(
    tmp_path: Path, data: str, task: str, model: str
) -> None:
    for name in ("masks/images", "masks/masks", "sounds"):
        (tmp_path / name).mkdir(parents=True)
    config = replace(RunConfig(), task=task, data=DataConfig(source=str(tmp_path / data)))
    assert auto_in_words(config) == model
    assert auto_in_words(replace(config, model=replace(config.model, name="mlp"))) == "mlp"


@pytest.mark.parametrize("name", TASKS.names())
def test_a_task_chooses_the_model_that_its_file_declares(name: str) -> None:
    task = TASKS.settings_class(name)()
    declared = TASKS.declaration(name).constants
    assert repr(task.default_model) == declared["default_model"].replace('"', "'")
    if task.default_model:
        assert task.auto_model(DataOutline(name)) == task.default_model
    elif task.table_model:
        assert task.auto_model(DataOutline(name)) == task.table_model
