"""The tables hold what the words say: recomputed from the Parquet file by other means than the study's."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest
from pyarrow import parquet

from echelon.core.columns import bytes_column
from echelon.core.errors import UserError
from echelon.core.units import format_bytes
from echelon.study import from_tries, load_study, write_study
from echelon.study.folder import discard, run_folder
from echelon.study.intervals import Interval
from echelon.study.metric import PrimaryMetric
from echelon.study.report import report_of
from echelon.study.tables import read_tables
from tests.unit.study.fixtures import EPOCHS, STEPS, Planted, make_study

EXAMPLES = sorted((Path(__file__).parents[3] / "examples" / "studies").glob("*/runs.parquet"))
NUMBERS = re.compile(
    r"([\d.]+)x \(([\d.]+)x to ([\d.]+)x\) as (fast|long).*"
    r"final accuracy ([+-][\d.]+) points \(([+-][\d.]+) to ([+-][\d.]+)\)"
)
TRUTHS = {
    "sync=allreduce": Planted(),
    "compression=int8": Planted(communicate_s=0.008, bytes_per_step=5e5),
    "sync=local(8)": Planted(compute_s=0.05, final=0.90),
}


@pytest.fixture
def study(tmp_path: Path) -> Path:
    folder = make_study(tmp_path / "s", from_tries({}, list(TRUTHS), "3"), TRUTHS)
    write_study(folder)
    return folder


def check_words(folder: Path) -> int:
    """Recompute speed-ups, differences and their intervals from `runs.parquet`; returns how many sentences held them.

    Over three seeds a bootstrap interval reaches from the least to the greatest value.
    """
    rows = parquet.read_table(folder / "runs.parquet").to_pylist()
    summary = json.loads((folder / "summary.json").read_text())
    checked = 0
    for c in summary["comparisons"]:
        found = NUMBERS.search(c["sentence"])
        if not found:
            continue
        pairs = pairs_of(rows, summary["baseline"], c["candidate"], c["terms"])
        end = "run_s" if "run_s" in rows[0] else "train_s"  # of tables from before pauses were counted
        column = "target_s" if "to the target;" in c["sentence"] else end
        ratios = np.array([b[column] / r[column] for b, r in pairs])
        faster = np.exp(np.log(ratios).mean()) >= 1
        times = ratios if faster else 1 / ratios
        points = np.array([100 * (r["top1"] - b["top1"]) for b, r in pairs])
        assert len(pairs) == 3
        wanted = [f"{v:.2f}" for v in (np.exp(np.log(times).mean()), times.min(), times.max())]
        wanted += [f"{round(v, 2) + 0.0:+.2f}" for v in (points.mean(), points.min(), points.max())]
        wanted.insert(3, "fast" if faster else "long")
        assert list(found.groups()) == wanted, c["sentence"]
        assert any(c["sentence"] in word for word in summary["words"])
        checked += 1
    return checked


def check_target(folder: Path) -> int:
    """Recompute the targets, the seconds and bytes to them (from `points.parquet`) and where the words and the page
    say them; returns how many runs reached theirs."""
    rows = parquet.read_table(folder / "runs.parquet").to_pylist()
    points = parquet.read_table(folder / "points.parquet").to_pylist()
    summary = json.loads((folder / "summary.json").read_text())
    study, page = load_study(folder / "study.yaml"), (folder / "report.html").read_text()
    reached = 0
    for terms in sorted({r["terms"] for r in rows}):
        mine = [r for r in rows if r["terms"] == terms and r["status"] == "completed"]
        worst = min(r["top1"] for r in mine if r["candidate"] == summary["baseline"])
        target = worst - study.loss_points / 100
        said = f"The target is {target:.2%}: {study.loss_points:g} points below the worst final accuracy of "
        assert any(word.endswith(f"{said}{summary['baseline']}.") and terms in word for word in summary["words"])
        assert all(c["target"] == pytest.approx(target) for c in summary["comparisons"] if c["terms"] == terms)
        for r in mine:
            own = sorted((p for p in points if p["run"] == r["run"]), key=lambda p: p["point"])
            for column, spent in (("target_s", "seconds"), ("target_bytes", "wire_bytes")):
                wanted = spent_at(target, [p["top1"] for p in own], [p[spent] for p in own])
                assert r[column] == (None if wanted is None else pytest.approx(wanted)), (r["run"], column)
            reached += r["target_s"] is not None
        sent = [[r["target_bytes"] for r in mine if r["candidate"] == c] for c in {r["candidate"] for r in mine}]
        column = bytes_column("sent to target", [None if None in runs else float(np.mean(runs)) for runs in sent])
        assert f">{column.head}<" in page and all(f">{cell}<" in page for cell in column.cells), column
    return reached


def spent_at(target: float, top1: list[float], spent: list[float]) -> float | None:
    """Return what had been spent where a curve first crosses the target."""
    place = next((i for i, y in enumerate(top1) if y >= target), None)
    if place is None:
        return None
    last = slice(max(0, place - 1), place + 1)
    return float(np.interp(target, top1[last], spent[last]))


def check_why(folder: Path) -> int:
    """Recompute the bytes and milliseconds of the sentences on why a candidate is recommended; returns how many."""
    rows = parquet.read_table(folder / "runs.parquet").to_pylist()
    summary = json.loads((folder / "summary.json").read_text())
    checked = 0
    for told in summary["recommendations"]:
        if not told["why"]:
            continue
        done = [r for r in rows if r["terms"] == told["terms"] and r["status"] == "completed"]
        base, best = ([r for r in done if r["candidate"] == name] for name in (summary["baseline"], told["candidate"]))
        sent = [np.mean([r["wire_bytes_per_step"] / r["workers"] for r in own]) for own in (best, base)]
        step, waits = ([1e3 * np.mean([r[c] for r in own]) for own in (best, base)] for c in ("step_s", "exposed_s"))
        times, sizes = sent[1] / sent[0], [format_bytes(n) for n in sent]
        wanted = [
            f"sends {times:.1f}x fewer bytes ({sizes[0]} a step and rank, not {sizes[1]})",
            f"a step takes {step[0]:.3g} ms, not {step[1]:.3g} ms, of which {waits[0]:.3g} ms wait for communication, "
            f"not {waits[1]:.3g} ms",
        ]
        found = [words for words in wanted if words in told["why"]]
        assert len(found) == told["why"].count(";") + 1, told["why"]
        checked += len(found)
    return checked


def pairs_of(rows: list[dict], baseline: str, candidate: str, terms: str) -> list[tuple[dict, dict]]:
    done = {(r["candidate"], r["seed"]): r for r in rows if r["terms"] == terms and r["status"] == "completed"}
    seeds = {seed for name, seed in done if name == candidate} & {seed for name, seed in done if name == baseline}
    return [(done[baseline, seed], done[candidate, seed]) for seed in seeds]


def test_numbers_in_the_words_are_those_of_the_table(study: Path) -> None:
    assert check_words(study) == 2
    assert check_target(study) == 6
    assert check_why(study) == 2


@pytest.mark.parametrize("file", EXAMPLES, ids=[f.parent.name for f in EXAMPLES])
def test_numbers_in_the_words_of_the_examples_are_those_of_their_tables(file: Path) -> None:
    assert check_words(file.parent) >= 1
    assert check_target(file.parent) >= 1
    assert check_why(file.parent) >= 1


def test_the_tables_hold_a_row_per_run_and_per_evaluation(study: Path) -> None:
    runs = parquet.read_table(study / "runs.parquet").to_pylist()
    points = parquet.read_table(study / "points.parquet").to_pylist()
    assert len(runs) == 9 and len(points) == 9 * EPOCHS
    with (study / "runs.csv").open() as file:
        texts = list(csv.DictReader(file))
    assert [t["run"] for t in texts] == [r["run"] for r in runs]
    assert [float(t["train_s"]) for t in texts] == [r["train_s"] for r in runs]
    base = next(r for r in runs if r["candidate"] == "sync=allreduce")
    assert base["wire_bytes"] == pytest.approx(2e6 * STEPS * EPOCHS)
    assert base["train_s"] == pytest.approx(0.05 * STEPS * EPOCHS, rel=0.05)
    own = [p for p in points if p["run"] == base["run"]]
    assert base["run_s"] == pytest.approx(base["train_s"] + EPOCHS * Planted.pause_s, abs=1e-3)
    assert base["pause_evaluation"] == pytest.approx(EPOCHS * Planted.pause_s)
    assert own[-1]["seconds"] == pytest.approx(base["run_s"]) and own[-1]["wire_bytes"] == base["wire_bytes"]
    assert own[0]["samples"] == STEPS * 128


def test_a_table_of_before_a_column_was_added_is_read(study: Path) -> None:
    before, _ = read_tables(study)
    path = study / "runs.parquet"
    parquet.write_table(parquet.read_table(path).drop_columns(["density"]), path)
    assert read_tables(study)[0] == before
    parquet.write_table(parquet.read_table(path).drop_columns(["candidate"]), path)
    with pytest.raises(UserError, match="another version"):
        read_tables(study)


def test_rows_outlive_the_folders_of_their_runs(study: Path) -> None:
    before, points = read_tables(study)
    words = json.loads((study / "summary.json").read_text())
    discard(run_folder(study, "").parent / "runs")
    write_study(study)
    assert read_tables(study) == (before, points)
    assert json.loads((study / "summary.json").read_text()) == words


@pytest.mark.parametrize("file", EXAMPLES, ids=[f.parent.name for f in EXAMPLES])
def test_tables_from_before_metrics_had_names_conclude_the_same(file: Path) -> None:
    folder = file.parent
    runs, points = read_tables(folder)
    report = report_of(folder.name, load_study(folder / "study.yaml"), runs, points, {})
    summary = json.loads((folder / "summary.json").read_text())
    assert report.words == summary["words"]
    assert [str(c.verdict) for g in report.groups for c in g.comparisons] == [
        c["verdict"] for c in summary["comparisons"]
    ]


def test_a_worse_result_is_worse_by_a_positive_number() -> None:
    metric = PrimaryMetric("rmse", "min", "error", False)
    said = [
        metric.gain_text(Interval(value, low, high))
        for value, low, high in ((-0.44, -0.6, -0.2), (0.3, None, None), (0.0, None, None))
    ]
    assert said == ["final error worse by 0.44 % (+0.20 to +0.60)", "final error better by 0.30 %", "final error equal"]
