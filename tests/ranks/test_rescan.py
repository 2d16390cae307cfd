"""A table that grows under a run: `resume --rescan` trains on each new row in the next epoch, once."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.records.events import DataGrew
from echelon.records.file import read_records
from tests.ranks.run_many import run_many
from tests.ranks.runs import SMALL

pytestmark = pytest.mark.long
BEGUN, NEW = 30, 7
MODULE = """
from pathlib import Path


def seen(inputs):
    with (Path(__file__).parent / "seen.txt").open("a") as file:
        print(f"{float(inputs['numbers'][0]):.6f}", file=file)
    return inputs


"""


def write(table: Path, count: int) -> None:
    rows = [f"{i},{'ab'[i % 2] if i < BEGUN else 'c'},{i / 7}" for i in range(count)]
    table.write_text("\n".join(["a,b,y", *rows]) + "\n")


def test_each_new_row_is_trained_on_once_in_the_next_epoch(tmp_path: Path) -> None:
    (tmp_path / "look.py").write_text(MODULE)
    table, log = tmp_path / "t.csv", tmp_path / "seen.txt"
    write(table, BEGUN)
    train = ["train", table, "--target", "y", *SMALL, "--workers", "2", "--loaders", "0", "--batch-size", "8"]
    (begun,) = run_many(tmp_path, [[*train, "--transform", "look:seen", "--epochs", "1", "--run", "run"]])
    assert begun.code == 0, begun
    before = sorted(map(float, log.read_text().split()))
    write(table, BEGUN + NEW)
    log.unlink()
    resume = ["resume", "run", "--trust", "--epochs", "2", "--workers", "2"]
    refused, resumed = run_many(tmp_path, [resume, [*resume, "--rescan"]])
    assert refused.code == 2 and f"{NEW} samples are new since the run began" in refused.err
    assert resumed.code == 0, resumed
    (grew,) = read_records(tmp_path / "run", DataGrew)
    told = f"{NEW} of {NEW} new rows have a value of b that was not there when the run began"
    assert (grew.epoch, grew.count) == (1, NEW) and told in grew.message and told in resumed.out + resumed.err
    after = sorted(map(float, log.read_text().split()))
    assert len(set(after)) == len(after) == len(before) + NEW
    assert after[: len(before)] == before, "each row of before once, as it was"
    assert after[len(before)] > before[-1], "and each new one, which are the largest"
