"""Law 8: what cannot work is refused in one line with exit code 2, nothing is lost, and no traceback is shown."""

from __future__ import annotations

import re
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.ranks.run_many import Result, run_many
from tests.ranks.runs import Runs

pytestmark = pytest.mark.timeout(400)
QUICK = ("--threads", "1", "--device", "cpu", "--epochs", "1", "--max-steps", "2", "--batch-size", "8")


def _pictures(folder: Path, per_class: int) -> Path:
    rng = np.random.default_rng(0)
    for part in ("train", "val"):
        for name in ("cat", "dog"):
            (folder / part / name).mkdir(parents=True)
            for i in range(per_class):
                pixels = rng.integers(0, 255, (16, 16, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / part / name / f"{i}.png")
    return folder


def _refused(result: Result, *words: str, code: int = 2) -> None:
    """Check one refusal: its exit code (1 once steps were made), one line on stderr, and what it must say."""
    assert result.code == code, result
    assert result.err.startswith("echelon: ") and result.err.count("\n") == 1, result
    assert [word for word in words if word not in result.err] == [], result


def _run_cases(folder: Path, cases: Sequence[tuple[Sequence[str], tuple[str, ...]]], dry: bool = False) -> None:
    """Run commands that are refused; with `dry`, dry runs of the same must say the same and print nothing else."""
    commands = [command for command, _ in cases]
    tried = [[*command, "--dry-run"] for command in commands] if dry else []
    results = run_many(folder, [*commands, *tried])
    for result, (_, words) in zip(results, cases, strict=False):
        _refused(result, *words)
    for result, said in zip(results, results[len(commands) :], strict=False):
        assert (said.code, said.out) == (2, ""), said
        assert _of_any_worker(said.err) == _of_any_worker(result.err)


def _of_any_worker(text: str) -> str:
    return re.sub(r"worker \d+ finds", "worker finds", text)  # whichever was first to look


def test_settings_that_cannot_work_are_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    (tmp_path / "empty").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        _run_cases(
            tmp_path,
            [
                (["trian", "digits"], ("trian", "did you mean train?")),
                (["train", "digits", "--epoch", "3"], ("--epoch", "--epochs")),
                (["train", "digits", "--epochs", "0"], ("--epochs", "at least 1")),
                (["train", "digits", "--batch-size", "1", "--workers", "2"], ("--batch-size 1", "2 workers")),
                (["train", "digits", "--sync", "alreduce"], ("alreduce", "did you mean allreduce?")),
                (["train", "digits", "--run", "file/run", *QUICK], ("--run file/run", "cannot be written")),
                (
                    ["train", "digits", "--nodes", "2", "--rendezvous", f"127.0.0.1:{port}", "--run", "port", *QUICK],
                    (f"127.0.0.1:{port}", "taken"),
                ),
                (["resume", "nowhere"], ("nowhere", "holds no run")),
                (["evaluate", "nowhere"], ("nowhere", "holds no run")),
                (["report", "nowhere"], ("nowhere", "holds no run")),
                (["train", "digits", "--precision", "fp8", "--device", "cpu"], ("--precision fp8", "bf16")),
            ],
        )
    assert not (tmp_path / "runs").exists()


@pytest.mark.long
def test_a_choice_that_only_its_own_file_can_refuse_leaves_nothing(tmp_path: Path) -> None:
    cases = {
        ("--sync", "ps(mode=asink)"): "did you mean async?",
        ("--on", "slrm"): "did you mean slurm?",
        ("--on", "nowhere:Place"): "no module 'nowhere'",
        ("--on", "json:Place"): "json has no 'Place'",
        ("--on", "collections:Counter"): "not a Place",
        ("--task", "regresion"): "known: auto",
        ("--task", "nowhere:Task"): "no module 'nowhere'",
        ("--task", "collections:Counter"): "name a subclass of",
        ("--link", "fast"): "--link",
        ("--timeout", "soon"): "--timeout",
    }
    _run_cases(tmp_path, [(["train", "digits", *choice], (choice[0], words)) for choice, words in cases.items()])
    ours = ("command", "results", "state")  # of the test: its output, and what its user is remembered to have named
    left = [p.name for p in tmp_path.iterdir() if not p.name.startswith(ours)]
    assert not left


@pytest.mark.long
def test_a_resume_that_is_refused_leaves_the_run_as_it_is(tmp_path: Path) -> None:
    mlp = ["train", "digits", *QUICK, "--workers", "1", "--model", "mlp", "--run", "run"]
    (done,) = run_many(tmp_path, [mlp])
    assert done.code == 0, done
    before = {file: file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()}
    _run_cases(tmp_path, [(["resume", "run", flag, "slrm"], (flag,)) for flag in ("--on", "--timeout")])
    assert {file: file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()} == before
    file = tmp_path / "run" / "config.yaml"
    file.write_bytes(b"# a note of its user's\r\n" + file.read_bytes())
    described = file.read_bytes()
    longer = ["resume", "run", "--max-steps", "4"]
    (refused,) = run_many(tmp_path, [[*longer, "--workers", "4", "--parallel", "pp=4"]])  # by its ranks, which read it
    assert refused.code == 2 and "--parallel pp=4" in refused.err and file.read_bytes() == described, refused
    (resumed,) = run_many(tmp_path, [longer])
    assert resumed.code == 0 and file.read_bytes() != described, resumed


def test_a_dry_run_refuses_before_it_prints_and_says_that_the_batch_is_too_large(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "config.yaml").write_text("run: taken\n")
    before = sorted(tmp_path.iterdir())
    dry = ["train", "digits", "--workers", "1", *QUICK, "--dry-run"]
    *refused, large, whole = run_many(
        tmp_path,
        [
            [*dry, "--run", "file/run"],
            [*dry, "--run", "taken"],
            [*dry, "--weights", "missing.pt"],
            ["train", "./nowhere", *QUICK, "--dry-run"],
            [*dry, "--batch-size", "100000"],
            [*dry, "--batch-size", "1438"],
        ],
    )
    words = ["--run file/run cannot be written (Not a directory)", "taken holds a run already", "missing.pt", "nowhere"]
    for result, said in zip(refused, words, strict=True):
        _refused(result, said)
        assert result.out == ""
    assert large.code == whole.code == 0, (large, whole)
    assert "--batch-size 100000 is more than the 1438 training samples of digits" in large.out
    assert "is more than" not in whole.out
    left = {p.name for p in tmp_path.iterdir()} - {p.name for p in before}
    assert not [name for name in left if not name.startswith(("command", "results"))], left


@pytest.mark.slow
def test_data_and_models_that_cannot_work_are_refused_by_name(tmp_path: Path) -> None:
    good = _pictures(tmp_path / "good", 4)
    (tmp_path / "empty").mkdir()
    hollow = shutil.copytree(good, tmp_path / "hollow")
    shutil.rmtree(hollow / "train" / "cat")
    (hollow / "train" / "cat").mkdir()
    torch.save({"fc.weight": torch.zeros(3, 5)}, tmp_path / "other.pt")

    def train(data: Path | str, *settings: str) -> list[str]:
        return ["train", str(data), *QUICK, "--workers", "2", "--run", "run", *settings]

    cases = [
        (train("./nowhere"), ("nowhere", "no such folder")),
        (train("digts"), ("did you mean digits?",)),
        (train(tmp_path / "empty"), ("empty",)),
        (train(hollow), ("train/cat", "no images")),
        (train(good, "--model", "resnt20"), ("did you mean resnet20?",)),
        (train(good, "--optimizer", "adamww"), ("adamww", "did you mean adamw?")),
        (train(good, "--workers", "9", "--batch-size", "16"), ("8 samples for 9 workers", "fewer workers")),
        (train(good, "--weights", "other.pt", "--model", "mlp"), ("other.pt",)),
        (train(good, "--weights", "missing.pt", "--model", "mlp"), ("missing.pt",)),
    ]
    if not torch.cuda.is_available():
        cases += [
            (train(good, "--device", "cuda", "--workers", "0"), ("--device cuda", "finds 0 GPUs")),
            (train(good, "--device", "auto", "--precision", "fp8"), ("--precision fp8", "bf16")),
        ]
    _run_cases(tmp_path, cases, dry=True)
    # what was refused has left nothing in the way: the same folder takes the corrected command
    (result,) = run_many(tmp_path, [train(good, "--model", "mlp")])
    assert result.code == 0, result


@pytest.mark.slow
def test_a_run_is_never_lost_to_another_one(tmp_path: Path) -> None:
    mlp = ["train", "digits", *QUICK, "--workers", "1", "--model", "mlp"]
    done, *_ = run_many(tmp_path, [[*mlp, "--run", "done"]])
    assert done.code == 0
    other = shutil.copytree(tmp_path / "done", tmp_path / "other")
    text = (other / "config.yaml").read_text()
    (other / "config.yaml").write_text(text.replace("name: mlp", "name: small_cnn").replace("done", "other"))
    before = (tmp_path / "done" / "record.jsonl").read_bytes()
    with Runs(tmp_path) as runs:
        going = runs.train("digits", "--workers", "1", "--epochs", "1000", "--model", "mlp", folder="going")
        going.wait_for_step(1)
        _run_cases(
            tmp_path,
            [
                ([*mlp, "--run", "done"], ("done", "holds a run already", "echelon resume done")),
                ([*mlp, "--run", "going"], ("going", "holds a run already")),
                (["resume", "going"], ("going", "a run goes on")),
                (["resume", "other", "--max-steps", "4"], ("another", "mlp", "small_cnn")),
                (["resume", "done", "--max-restarts", "x"], ("--max-restarts",)),
            ],
        )
        going.process.terminate()
        assert going.end() == 143
    assert (tmp_path / "done" / "record.jsonl").read_bytes() == before


@pytest.mark.long
def test_an_image_that_is_none_stops_the_run_by_name_or_is_skipped_and_listed(tmp_path: Path) -> None:
    data = _pictures(tmp_path / "data", 8)
    (data / "train" / "dog" / "3.jpg").write_text("this is no picture")
    command = ["train", str(data), *QUICK, "--workers", "2", "--model", "mlp", "--max-steps", "3"]
    stopped, skipped = run_many(
        tmp_path, [[*command, "--run", "stop"], [*command, "--run", "skip", "--on-bad-image", "skip"]]
    )
    _refused(stopped, "train/dog/3.jpg", code=1)  # it is in the second batch
    assert skipped.code == 0, skipped
    page = (tmp_path / "skip" / "report.html").read_text().replace("<wbr>", "")  # where long paths may break
    assert "train/dog/3.jpg" in page


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    with Runs(tmp_path) as runs:
        run = runs.start("train", "digits", "--epochs", "0", "--debug")
        assert run.end() != 0
        assert "Traceback" in run.errors() and "UserError" in run.errors()


@pytest.mark.long
def test_a_run_that_is_done_is_not_done_again_and_its_description_repeats_it(tmp_path: Path) -> None:
    mlp = ["train", "digits", *QUICK, "--workers", "1", "--model", "mlp", "--max-steps", "0", "--batch-size", "256"]
    (done,) = run_many(tmp_path, [[*mlp, "--run", "runs/one"]])
    assert done.code == 0, done
    before = {file: file.read_bytes() for file in (tmp_path / "runs").rglob("*") if file.is_file()}
    again, fewer, steps, onnx = run_many(
        tmp_path,
        [
            ["resume", "runs/one"],
            ["resume", "runs/one", "--max-steps", "2"],
            ["resume", "runs/one", "--epochs", "0"],
            ["export", "runs/one", "x.txt"],
        ],
    )
    assert again.code == 0 and "is complete" in again.err and "nothing to do" in again.err, again
    _refused(fewer, "--max-steps 2 is less than what is done", "6 steps")
    _refused(steps, "--epochs")
    _refused(onnx, "x.txt", ".safetensors")
    assert {file: file.read_bytes() for file in (tmp_path / "runs").rglob("*") if file.is_file()} == before
    repeated, more = run_many(
        tmp_path, [["train", "--config", "runs/one/config.yaml"], ["resume", "runs/one", "--epochs", "2"]]
    )
    assert repeated.code == 0 and "runs/digits-mlp-1/report.html" in repeated.out, repeated
    assert more.code == 0, more
    (shorter,) = run_many(tmp_path, [["resume", "runs/one", "--epochs", "1"]])
    _refused(shorter, "--epochs 1 is less than what is done", "2")
