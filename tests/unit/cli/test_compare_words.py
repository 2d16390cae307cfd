"""`echelon compare` before anything starts: a dry run; `test_words` has what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.cli.test_words import echelon


def test_a_dry_run_shows_the_commands_and_starts_nothing(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("optimizer: {lr: 0.2}\n")
    tries = ("--try", "sync=allreduce", "--try", "sync=diloco(period=20), compression=int8", "--seeds", "2")
    done = echelon("compare", "digits", "--config", "run.yaml", "--workers", "2", *tries, "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 4
    first = "echelon train digits --lr 0.2 --workers 2 --sync allreduce --seed 0 --run runs/compare-digits-1/runs/"
    assert lines[0].startswith(first)
    assert [p.name for p in tmp_path.iterdir()] == ["run.yaml"]


def test_a_dry_run_says_which_candidate_will_be_refused(tmp_path: Path) -> None:
    tries = ("--try", "sync=allreduce", "--try", "sync=local(3, overlap=3)")
    done = echelon("compare", "digits", "--workers", "2", *tries, "--seeds", "2", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 4
    said = [line for line in done.stderr.splitlines() if "refused" in line]
    assert len(said) == 1 and said[0].startswith("echelon: sync=local(3, overlap=3) will be refused: --sync: ")


@pytest.mark.parametrize("more", [("--dry-run",), ("--run", "study"), ()])
def test_several_runs_at_once_on_this_machine_are_refused_before_anything_is_there(
    more: tuple[str, ...], tmp_path: Path
) -> None:
    done = echelon("compare", "digits", "--try", "sync=allreduce", "--at-once", "2", *more, cwd=tmp_path)
    assert done.returncode == 2 and not done.stdout and done.stderr.count("\n") == 1
    assert "--at-once 2 is for runs on a cluster" in done.stderr and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("data", "more", "words"),
    [
        ("table.csv", (), "name the column to predict with --target: a, b"),
        ("table.csv", ("--target", "c"), "no column 'c': it has a, b"),
        ("table.csv", ("--task", "recommendation", "--input", "a"), "name two columns of a, b: --input USER,ITEM"),
        ("nowhere/data", (), "data nowhere/data: no such folder"),
        ("digit", (), "did you mean digits?"),
        ("digits", ("--model", "smal_cnn"), "did you mean small_cnn?"),
    ],
)
def test_what_refuses_all_candidates_is_said_once_before_anything_is_there(
    data: str, more: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    (tmp_path / "table.csv").write_text("a,b\n1,2\n3,4\n5,6\n7,8\n")
    tries = ("--try", "sync=allreduce", "--try", "sync=local(8)", "--workers", "2")
    done = echelon("compare", data, *more, *tries, cwd=tmp_path)
    assert done.returncode == 2 and not done.stdout and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("echelon: ") and words in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["table.csv"]
