"""`echelon compare` before anything starts: what is wrong in one line, and a dry run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.cli.test_words import echelon


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["compare"], "nothing to compare"),
        (["compare", "digits"], "no candidate to compare"),
        (["compare", "digits", "--try", "snyc=allreduce"], "did you mean sync"),
        (["compare", "digits", "--try", "sync=allreduce", "--seeds", "none"], "how many"),
        (["compare", "digits", "--try", "workers=-3"], "no run of this study can start: --workers"),
        (["compare", "none.yaml"], "cannot read none.yaml"),
        (["compare", "a.yaml", "--seeds", "3"], "describes the whole study"),
        (["compare", "--run", "nowhere"], "holds no study to continue"),
        (["compare", "nowhere", "--try", "sync=allreduce"], "unknown data 'nowhere'"),
    ],
)
def test_bad_words_are_one_line_and_exit_code_2(args: list[str], words: str, tmp_path: Path) -> None:
    done = echelon(*args, cwd=tmp_path)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert list(tmp_path.iterdir()) == []


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
    tries = ("--try", "sync=allreduce", "--try", "compression=topk(3)")
    done = echelon("compare", "digits", "--workers", "2", *tries, "--seeds", "2", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 4
    said = [line for line in done.stderr.splitlines() if "refused" in line]
    assert len(said) == 1 and said[0].startswith("echelon: compression=topk(3) will be refused: --compression: ")
