from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from echelon.core.errors import UserError
from echelon.records.events import PeriodChanged
from echelon.records.kinds import Record, Start
from echelon.records.summary import RunSummary
from echelon.reporting.report import Summary, closing_words, write_report
from echelon.reporting.report.incidents import find_incidents
from echelon.reporting.report.records import RunRecord, load_run
from echelon.reporting.report.summary import summarise
from echelon.reporting.report.timing import SlowRank, chance_of_slowest, independent
from echelon.reporting.report.words import wilson_interval
from tests.unit.reporting.report.fixtures import LiveState, make_run, tell, write_record

BALANCED = (0.010, 0.030, 0.060, 0.010, 0.005, 0.002)
SHORT = LiveState(epochs=2, steps_per_epoch=100, jitter=0.0)
KEYS = {
    *("status", "seconds", "samples_per_s", "wire_bytes_per_step", "phases", "workers", "parameters"),
    *("epochs", "steps", "restarts", "bound", "advice", "bad_images", "startup_s"),
}


def report(folder: Path, **changes: Any) -> tuple[Summary, str]:
    summary = write_report(make_run(folder, replace(SHORT, **changes)))
    return summary, "\n".join(closing_words(summary))


def rewrite(folder: Path, lines: list[dict[str, Any]], tail: str = "") -> tuple[Summary, str]:
    make_run(folder, SHORT)
    write_record(folder, lines, tail)
    summary = write_report(folder)
    return summary, "\n".join(closing_words(summary))


def test_summary_file_holds_what_was_promised(tmp_path: Path) -> None:
    summary, words = report(tmp_path)
    stored = json.loads((tmp_path / "summary.json").read_text())
    assert stored.keys() >= KEYS
    assert {"top1", "top5", "macro_f1", "roc_auc"} <= stored["metrics"].keys()
    assert list(stored["phases"]) == ["data", "forward", "backward", "communicate", "update", "other"]
    assert stored["words"] == words.splitlines()
    assert (stored["status"], stored["workers"], stored["steps"], stored["epochs"]) == ("completed", 2, 200, 2.0)
    assert stored["startup_s"] == pytest.approx(4.1, abs=1e-3)
    assert sum(stored["phases"].values()) == pytest.approx(summary.step_s, rel=0.02)
    assert stored["wire_bytes_per_step"] == pytest.approx(SHORT.wire_bytes_per_step)
    assert not list(tmp_path.glob(".*"))
    known = RunSummary.of(stored)
    assert known.best == summary.best == stored["best_top1"] and known.best_step == summary.best_step
    for name in ("message", "metrics", "tested", "wall_s", "epochs", "steps", "workers", "samples_per_s"):
        assert getattr(known, name) == stored[name] == getattr(summary, name), name
    assert [row.then_s for row in known.predictions] == [row["then_s"] for row in stored["predictions"]]
    assert stored["served"] is False


SLOWER = (0.040, 0.030, 0.060, 0.000, 0.005, 0.002)


@pytest.mark.parametrize(
    ("data_s", "epochs", "named"), [(0.040, 6, True), (0.040, 2, False), (0.021, 6, False)],
    ids=["a slow rank", "too short a time", "too small an effect"],
)  # fmt: skip
def test_a_slow_rank_is_named_once_it_is_more_than_chance(
    tmp_path: Path, data_s: float, epochs: int, named: bool
) -> None:
    summary, words = report(tmp_path, phases_s=(BALANCED, (data_s, *SLOWER[1:])), epochs=epochs, steps_per_epoch=60)
    slow, windows = summary.slowest_rank, 6 * epochs - 1
    assert slow is not None and slow.tested == windows and slow.observations == int(slow.measured_s / 5)
    assert slow.chance == pytest.approx(2 * 0.5**slow.observations)
    assert ("rank 1 works 1.28x as long" in words) == named == slow.is_slow
    assert (f"it was the slowest in {windows} of {windows} windows of steps, counted as 9 obs" in words) == named


SLOW = SlowRank(1, ratio=1.3, phase="forward", wait_s=0.1, saving_s=0.1, persistence=1.0, chance=0.001, measured_s=60)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({}, True),
        ({"ratio": 1.11}, False),
        ({"measured_s": 12.0}, False),
        ({"chance": 0.02}, False),
        ({"ratio": 4.6, "measured_s": 12.0}, True),
        ({"ratio": 4.6, "measured_s": 8.0}, False),
    ],
    ids=str,
)
def test_a_slow_rank_needs_an_effect_a_time_and_a_test(change: dict[str, float], named: bool) -> None:
    assert replace(SLOW, **change).is_slow == named


def test_windows_that_are_close_are_one_observation() -> None:
    """Six windows of two seconds, all with the same slowest rank of two: what a busy core for 12 s makes of them."""
    assert independent(6, 12.0) == 2
    assert chance_of_slowest(6, 6, ranks=2) == pytest.approx(0.03125)
    assert chance_of_slowest(2, independent(6, 12.0), ranks=2) == pytest.approx(0.5)
    assert chance_of_slowest(0, 0, ranks=4) == 1.0
    assert independent(15, 28.0, ratio=4.6) == 15, "a busy core makes no rank four times as slow"


def test_a_death_that_is_told_after_the_survivors_went_on_has_a_cost(tmp_path: Path) -> None:
    lines = tell(SHORT)
    begun, windows = next(x for x in lines if x["kind"] == "start"), [x for x in lines if x["kind"] == "steps"]
    last, following = windows[4], windows[5]
    place, t = lines.index(following), last["t"]
    for line in lines[place:]:
        line["t"] += 3.0  # for which they stood still
    term = {**begun, "t": t + 0.5, "world_size": 1, "start_step": last["step"], "hosts": ["a"], "pids": [1]}
    told = [
        term,
        {"t": t + 0.51, "kind": "event", "name": "members", "message": "rank 0 goes on", "members": [0]},
        {"t": t + 0.52, "kind": "event", "name": "worker_died", "message": "rank 1 died: SIGKILL", "rank": 1},
        {**begun, "t": t + 5.0, "start_step": following["step"]},  # the newcomer's
    ]
    rewrite(tmp_path, [*lines[:place], *told[:3], following, told[3], *lines[place + 1 :]])
    record = load_run(tmp_path)
    (death,) = find_incidents(record, [])
    assert death.cost_s == pytest.approx(3.0, abs=0.01) and death.lost_steps is None and death.continued


@pytest.mark.parametrize("workers", [1, 2])
def test_what_one_worker_cannot_do_is_said(tmp_path: Path, workers: int) -> None:
    words = report(tmp_path, compression="int8", phases_s=(BALANCED,) * workers)[1]
    assert ("One worker has nobody to send to: --compression int8 did nothing." in words) == (workers == 1)


@pytest.mark.parametrize(
    ("sent", "coded", "said"),
    [(750, 4, "25.0% smaller (it coded 4 of 5 streams"), (1000, 0, "Huffman coding did not pay")],
)
def test_whether_entropy_coding_paid_is_said(tmp_path: Path, sent: int, coded: int, said: str) -> None:
    counts = {"plain_bytes": 1000, "sent_bytes": sent, "planes_coded": coded, "planes_plain": 5 - coded}
    lines = tell(SHORT)
    lines.insert(-1, {"kind": "entropy_coding", "t": lines[-1]["t"], "step": 200, **counts})
    assert said in rewrite(tmp_path, lines)[1]


@pytest.mark.parametrize(
    ("rate", "spared_s", "said"),
    [(0.0, 0.0, "no link's rate was measured here"), (1.25e6, 3.0, "at 10 Mbit/s"), (1.25e9, 0.1, "it did not pay")],
)
def test_what_entropy_coding_took_is_set_against_what_it_spared(
    tmp_path: Path, rate: float, spared_s: float, said: str
) -> None:
    counts = {"plain_bytes": 4_000_000, "sent_bytes": 3_000_000, "planes_coded": 4, "planes_plain": 0}
    times = {"coding_s": 0.5, "spared_s": spared_s, "bytes_per_s": rate, "planes_slow": 0}
    lines = tell(SHORT)
    lines.insert(-1, {"kind": "entropy_coding", "t": lines[-1]["t"], "step": 200, **counts, **times})
    words = rewrite(tmp_path, lines)[1]
    assert said in words
    assert ("it pays below 16 Mbit/s" in words) == (rate == 0)


def test_input_bound_run_is_told_the_share_and_the_gain(tmp_path: Path) -> None:
    ranks = ((0.050, 0.015, 0.020, 0.010, 0.003, 0.002),) * 2
    summary, words = report(tmp_path, phases_s=ranks)
    assert summary.bound.kind == "input"
    assert "Loading data bounds this run: 50% of a step" in words
    assert "more --loaders (now 1 per worker)" in words
    assert summary.advice[0].gain == pytest.approx(2.0, rel=0.02)


def test_communication_bound_run_is_told_what_sending_less_saves(tmp_path: Path) -> None:
    ranks = ((0.002, 0.015, 0.020, 0.060, 0.002, 0.001),) * 2
    summary, words = report(tmp_path, phases_s=ranks)
    assert summary.bound.kind == "communication"
    assert summary.advice[0].gain == pytest.approx(2.5, rel=0.03)
    assert "--compression sends less, and takes time to encode, which this run did not measure" in words
    _, said = report(tmp_path, phases_s=ranks, compression="topk(0.01)")
    assert "in spite of topk(0.01)" in said


def test_rank_twice_as_slow_is_named_with_its_ratio_and_phase(tmp_path: Path) -> None:
    slow = tuple(s * (2 if i != 3 else 1) for i, s in enumerate(BALANCED))
    summary, words = report(tmp_path, phases_s=(BALANCED, BALANCED, slow))
    assert summary.bound.kind == "slow rank"
    assert summary.slowest_rank is not None
    assert summary.slowest_rank.rank == 2
    assert summary.slowest_rank.ratio == pytest.approx(2.0, abs=0.1)
    assert "rank 2 works" in words and "mostly in backward" in words


def test_equal_ranks_are_not_blamed(tmp_path: Path) -> None:
    summary, words = report(tmp_path, phases_s=(BALANCED,) * 4)
    assert summary.bound.kind == "compute"
    assert "rank" not in words


def test_death_says_who_when_and_what_it_cost(tmp_path: Path) -> None:
    summary, words = report(tmp_path, epochs=4, steps_per_epoch=60, death_at=150)
    assert summary.restarts == 1
    (incident,) = summary.incidents
    assert incident.lost_steps == 30
    assert incident.cost_s == pytest.approx(2.2, abs=0.01)
    assert "rank 1 on node-a (pid 4101) was killed by signal 9" in words
    assert "30 steps done again" in words
    assert summary.steps == 240


def test_death_without_restart_says_that_it_ended_there(tmp_path: Path) -> None:
    lines = tell(replace(SHORT, death_at=100, status=None))
    died = next(i for i, line in enumerate(lines) if line.get("name") == "worker_died")
    end = {"t": lines[died]["t"] + 1, "kind": "end", "status": "failed", "seconds": 20.0, "message": "gave up."}
    summary, words = rewrite(tmp_path, [*lines[: died + 1], end])
    assert (summary.status, summary.restarts) == ("failed", 0)
    assert "The run did not continue." in words and "gave up." in words
    _, words = rewrite(tmp_path / "went-on", [*lines[: died + 1], {**end, "status": "completed", "message": ""}])
    assert "was killed" in words and "did not continue" not in words  # others worked on
    told_late = {**lines[died], "t": end["t"] + 0.1}  # by another machine
    _, words = rewrite(tmp_path / "late", [*lines[:died], {**end, "status": "completed", "message": ""}, told_late])
    assert "was killed" in words and "did not continue" not in words


def test_deaths_before_the_first_step_are_each_told_and_the_last_ends_the_run(tmp_path: Path) -> None:
    deaths = [
        {"t": 100.0 + i, "kind": "event", "name": "worker_died", "message": f"rank {i} died: exit code 1"}
        for i in range(2)
    ]
    error = {"t": 101.5, "kind": "event", "name": "rank_failed", "message": "ValueError: no such layer"}
    end = {"t": 102.0, "kind": "end", "status": "failed", "message": "no restarts are left"}
    summary, words = rewrite(tmp_path, [*deaths, error, end])
    assert words.count("The run did not continue.") == 1
    assert "Failed" in words and "the last error was ValueError: no such layer" in words
    assert summary.seconds == pytest.approx(2.0)
    _, words = rewrite(tmp_path, [*deaths, error, {**end, "message": "rank 0 died: ValueError: no such layer"}])
    assert "the last error" not in words  # it is told
    raised = "callback Mine.on_step failed at step 4: ValueError: mine"
    callback = {"t": 101.4, "kind": "event", "name": "callback_failed", "message": raised, "rank": 0}
    lost = {**error, "message": "RuntimeError: Connection closed by peer"}
    _, words = rewrite(tmp_path, [callback, lost, {**end, "message": raised}])
    assert raised in words and "Connection closed" not in words  # the other rank's is what followed


def test_resume_counts_no_restart_and_its_pause_no_time(tmp_path: Path) -> None:
    lines = tell(replace(SHORT, epochs=1, status="stopped"))
    for line in lines:
        line.pop("seconds") if line["kind"] == "end" else None
    seconds = lines[-1]["t"] - lines[0]["launched_t"]
    later = [dict(line, t=line["t"] + 86_400) for line in lines]
    counters = {"sent_bytes": 460_000_000, "dropped": 0}
    lines.append({"t": lines[-1]["t"] + 1, "kind": "link", "link": "100mbit", "hosts": [counters]})
    later[0] |= {"launched_t": lines[0]["launched_t"] + 86_400, "start_step": 100}
    summary, words = rewrite(tmp_path, [*lines, *later])
    assert f"`echelon resume {tmp_path}` continues it" in words
    assert "The kernel counted 460 MB of payload sent on the links (100mbit)" in (tmp_path / "report.html").read_text()
    assert summary.restarts == 0
    assert summary.seconds == pytest.approx(2 * seconds, abs=0.01)


def test_torn_last_line_is_left_out_and_said(tmp_path: Path) -> None:
    lines = tell(SHORT)
    summary, words = rewrite(tmp_path, lines[:12], '{"t": 1, "kind": "ste')
    assert summary.status == "unfinished"
    assert "1 torn line of record.jsonl left out" in words


@pytest.mark.parametrize(
    "broken",
    [
        {"kind": "steps", "t": 1.0},
        {"kind": "steps", "t": 1.0, "step": 5, "losses": [], "seconds": 1},
        {"kind": "evaluation", "t": 1.0, "step": None},
        {"kind": "event", "t": "soon"},
        {"kind": "end", "t": math.nan},
        {"kind": "steps", "t": 1.0, "step": 5, "losses": [1], "seconds": math.inf},
        {"kind": "steps", "t": 1.0, "step": 5, "losses": [1], "seconds": 1, "phases": [[1]], "phase_names": []},
    ],
)
def test_strange_entries_are_left_out_and_said(tmp_path: Path, broken: dict[str, Any]) -> None:
    summary, words = rewrite(tmp_path, [*tell(SHORT), broken])
    assert summary.steps == 200
    assert "entries of record.jsonl are not what their kind needs" in words


def test_run_that_failed_before_its_first_step(tmp_path: Path) -> None:
    said = {"t": 5.0, "kind": "end", "status": "failed", "seconds": 3.0, "message": "no space left on device"}
    start = tell(SHORT)[0]
    for lines in ([said], [start, dict(said, t=start["t"] + 1)]):
        summary, words = rewrite(tmp_path, lines)
        assert (summary.status, summary.steps, summary.bound.kind) == ("failed", 0, "unknown")
        assert "no space left on device" in words
        assert summary.samples_per_s is None


def test_empty_folder_gives_a_page_that_says_so(tmp_path: Path) -> None:
    summary = write_report(tmp_path)
    assert summary.status == "unfinished"
    assert any("record.jsonl is missing" in w for w in closing_words(summary))
    assert (tmp_path / "report.html").exists()


def test_torn_evaluation_is_said_and_the_rest_stands(tmp_path: Path) -> None:
    make_run(tmp_path, SHORT)
    (tmp_path / "evaluation.json").write_text('{"epoch": 3, "conf')
    summary = write_report(tmp_path)
    assert summary.metrics["top1"] is not None
    assert any("evaluation.json is torn" in note for note in summary.notes)


def test_missing_folder_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="name the folder of a run"):
        write_report(tmp_path / "nothing")


def test_few_steps_are_thin_evidence(tmp_path: Path) -> None:
    _, words = rewrite(tmp_path, tell(SHORT)[:3])
    assert "These timings are rough: they come from 20 steps, " in words and " measured in 2 parts" in words


def test_loss_that_becomes_nan_is_told_with_its_step(tmp_path: Path) -> None:
    lines = tell(SHORT)
    windows = [line for line in lines if line["kind"] == "steps"]
    windows[3]["losses"][4] = math.nan
    summary, words = rewrite(tmp_path, lines)
    assert summary.nonfinite_step == 35
    assert "not finite from step 35" in words


def test_warm_up_does_not_enter_the_figures(tmp_path: Path) -> None:
    lines = tell(SHORT)
    first = next(line for line in lines if line["kind"] == "steps")
    first["seconds"] = 1000.0
    slow, _ = rewrite(tmp_path / "slow", lines)
    plain, _ = report(tmp_path / "plain")
    assert slow.step_s == pytest.approx(plain.step_s)


def test_falling_accuracy_is_not_flattered(tmp_path: Path) -> None:
    lines = tell(SHORT)
    evaluations = [line for line in lines if line["kind"] == "evaluation"]
    evaluations[0]["metrics"]["top1"], evaluations[1]["metrics"]["top1"] = 0.9, 0.8
    _, words = rewrite(tmp_path, lines)
    assert "The best was 0.9000 at step 100, whose checkpoint is kept: the last is not the best one." in words


def test_wilson_interval_against_its_published_example() -> None:
    # Newcombe (1998), table I: 81 of 263 gives 0.2553 to 0.3662.
    assert wilson_interval(81 / 263, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)


def test_importing_and_writing_needs_no_torch_and_little_time(tmp_path: Path) -> None:
    make_run(tmp_path, LiveState())
    program = (
        "import sys, time; from pathlib import Path; from echelon.reporting.report import write_report; "
        "begin = time.process_time(); write_report(Path(sys.argv[1])); "
        "assert 'torch' not in sys.modules; print(time.process_time() - begin)"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert float(done.stdout) < 1.5


def test_an_image_that_several_ranks_could_not_decode_is_one(tmp_path: Path) -> None:
    bad = {"t": 101.0, "kind": "event", "name": "bad_image", "message": "a.png: it is no image", "path": "a.png"}
    lines = tell(SHORT)
    summary, words = rewrite(tmp_path, [*lines[:-1], bad, bad, {**bad, "path": "b.png"}, lines[-1]])
    assert summary.bad_images == 2 and "2 samples could not be read or used" in words


def test_periods_that_were_chosen_are_told_once_with_the_last_reason() -> None:
    def change(step: int, old: int, new: int) -> PeriodChanged:
        return PeriodChanged("", step, old, new, f"an average takes {new} ms")

    lines: list[Record] = [Start(), change(4, 4, 18), change(22, 18, 25), Start(start_step=10), change(22, 18, 25)]
    (note,) = summarise(RunRecord("run", lines)).notes
    periods = "every 4 steps at first, every 18 from step 4 on, every 25 from step 22 on"
    assert note == f"Replicas agreed {periods} (an average takes 25 ms)."
    lines += [change(step, 25, step) for step in (30, 40, 50)]
    assert "at 6 periods in turn, in the end every 25 from step 22 on" in summarise(RunRecord("run", lines)).notes[-1]
