"""Waterfall, critical rank, hidden communication, slow steps, predicted gains: from records whose truth is planted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from echelon.records.kinds import Start, Steps
from echelon.reporting.report import Summary, closing_words, load_run, write_report
from echelon.reporting.report.predictions import WayPrediction, pick_ways
from echelon.reporting.report.records import RunRecord
from echelon.reporting.report.tables import slow_step_table
from echelon.reporting.report.timing import measure
from tests.unit.reporting.report.fixtures import LiveState, make_run, tell, write_record

SHORT = LiveState(epochs=2, steps_per_epoch=100, jitter=0.0)
NONE = {"strategy.compression": "none"}
Line = dict[str, Any]


def way(settings: dict[str, str], sent: float, coding_s: float = 0.0, period: int = 1, tail: float = 1.0) -> Line:
    return {
        "settings": settings, "period": period, "wire_bytes": sent, "rounds": 2, "coding_s": coding_s, "tail": tail,
    }  # fmt: skip


def report(folder: Path, lines: list[Line]) -> tuple[Summary, str]:
    make_run(folder, SHORT)
    write_record(folder, lines)
    summary = write_report(folder)
    return summary, "\n".join(closing_words(summary))


def with_waits(lines: list[Line], waits_s: tuple[float, float], busy_s: float, spread_s: float) -> list[Line]:
    """Give each step of each window these waits; a rank's work is what is left of 110 ms."""
    for line in lines:
        if line["kind"] == "steps":
            n = len(line["losses"])
            line["waits"] = [[w] * n for w in waits_s]
            line["phases"] = [[0.01 * n, 0.02 * n, (0.08 - w) * n, w * n, 0.0, 0.0] for w in waits_s]
            line["seconds"] = 0.11 * n
            line["comm_busy_s"], line["comm_spread_s"] = [(busy_s + w) * n for w in waits_s], [spread_s * n] * 2
    return lines


def test_start_phases_pauses_and_end_are_the_wall_time(tmp_path: Path) -> None:
    summary, words = report(tmp_path, tell(SHORT))
    waterfall = summary.waterfall
    assert waterfall is not None and waterfall.missing < 0.02
    assert waterfall.parts["start"][0] == pytest.approx(4.1)
    assert waterfall.parts["evaluation"] == pytest.approx((2.6, 2.6))
    assert "accounts for" not in words
    page = (tmp_path / "report.html").read_text()
    assert "Seconds of the whole run, by rank and part" in page


def test_time_that_nothing_accounts_for_is_said(tmp_path: Path) -> None:
    lines = tell(SHORT)
    for line in lines[len(lines) // 2 :]:
        line["t"] += 5.0  # nobody says what happened then
    lines[-1]["seconds"] += 5.0
    summary, words = report(tmp_path, lines)
    assert summary.waterfall is not None
    assert summary.waterfall.parts["not accounted for"][0] == pytest.approx(5.0, abs=0.1)
    assert "no phase and no pause accounts for" in words


def test_pauses_told_by_each_rank_are_its_own(tmp_path: Path) -> None:
    lines = [line for line in tell(SHORT) if line["kind"] != "evaluation"]
    windows = [line for line in lines if line["kind"] == "steps"]
    for line in windows:
        line["pause_names"], line["pauses"] = ["evaluation", "checkpoint", "recording"], [[0.0] * 3, [0.0] * 3]
    windows[10]["pauses"] = [[1.2, 0.1, 0.0], [1.3, 0.0, 0.0]]
    last = {"t": windows[-1]["t"] + 1.3, "kind": "pause", "name": "evaluation", "step": 200, "seconds": 1.25}
    summary, _ = report(tmp_path, [*lines[:-1], last, lines[-1]])
    assert summary.waterfall is not None
    assert summary.waterfall.parts["evaluation"] == pytest.approx((2.45, 2.55))
    assert summary.waterfall.parts["checkpoint"] == pytest.approx((0.15, 0.05), abs=1e-5)  # the last is written


def test_hidden_and_exposed_communication_and_who_was_waited_for(tmp_path: Path) -> None:
    lines = with_waits(tell(replace(SHORT, epochs=6)), waits_s=(0.01, 0.03), busy_s=0.02, spread_s=0.025)
    summary, _ = report(tmp_path, lines)
    c = summary.communication
    assert c is not None and c.timed and c.by_step
    assert (c.exposed_s, c.hidden_s, c.spread_s) == pytest.approx((0.01, 0.02, 0.025))
    assert c.waited_s == pytest.approx(0.01)  # the mean of 10 and 30 ms, less what both wait
    assert c.critical == (1.0, 0.0)
    page = (tmp_path / "report.html").read_text()
    assert "The critical rank" in page and "hidden behind backward" in page
    assert "One rank is the one that the others wait for" in page


@pytest.mark.parametrize(
    ("epochs", "waits_s", "said"),
    [(1, (0.01, 0.03), "cannot be told from so little: 9.9 s of steps"), (6, (0.02, 0.02), "No rank is the one")],
)
def test_no_critical_rank_is_named_where_none_was_shown_to_be_one(
    tmp_path: Path, epochs: int, waits_s: tuple[float, float], said: str
) -> None:
    lines = with_waits(tell(replace(SHORT, epochs=epochs)), waits_s=waits_s, busy_s=0.0, spread_s=0.0)
    for place, line in enumerate(line for line in lines if line["kind"] == "steps"):
        if waits_s[0] == waits_s[1]:
            line["waits"][place % 2] = [0.019] * len(line["losses"])  # they take turns
    report(tmp_path, lines)
    page = (tmp_path / "report.html").read_text()
    assert said in page and "The critical rank" not in page


def test_predictions_follow_the_formula(tmp_path: Path) -> None:
    lines = with_waits(tell(SHORT), waits_s=(0.04, 0.04), busy_s=0.02, spread_s=0.02)
    rows = [
        way(NONE, 1e6, tail=0.25), way({"strategy.compression": "bf16"}, 5e5, 0.001, tail=0.25),
        way({"strategy.compression": "int8"}, 1e5, 0.003, tail=0.25),
        way({"strategy.sync": "local(period=8)"}, 1e6, period=8), {"settings": "torn"},
        way({"strategy.sync": "local(period=8, overlap=2)"}, 5e6, period=8) | {"overlap": 2},
    ]  # fmt: skip
    told = {"t": lines[-1]["t"], "kind": "alternatives", "now": NONE, "latency_s": 0.0, "rows": rows}
    summary, words = report(tmp_path, [*lines, told])
    then = {p.label: p.then_s for p in summary.predictions}
    # 60 ms of communication, 20 of them hidden, beside 70 ms of work.
    assert then["bf16"] == pytest.approx(0.07 + 0.001 + (0.030 - 0.020))
    assert then["int8"] == pytest.approx(0.07 + 0.003 + 0.25 * 0.006)
    assert then["local(period=8)"] == pytest.approx(0.07 + 0.060 / 8)
    assert then["local(period=8, overlap=2)"] == pytest.approx(0.07 + (0.300 - 2 * 0.07) / 8)
    assert (
        "overlap=2) would save 16% of the run, from its first step to its end, bf16 24%, local(period=8) 27%, int8 29%"
        in words
    )
    page = (tmp_path / "report.html").read_text()
    assert '<th scope="row">none: this run</th><td class="number">0%</td><td class="number">' in page
    assert any("1 row within entries of record.jsonl" in note for note in load_run(tmp_path).notes)
    stored = json.loads((tmp_path / "summary.json").read_text())["predictions"]
    assert [p["label"] for p in stored] == ["int8", "local(period=8)", "bf16", "local(period=8, overlap=2)"]
    assert stored[0]["gain"] == pytest.approx(0.11 / then["int8"])


def test_from_a_codecs_run_others_follow_from_the_measured_link_and_not_from_its_few_bytes(tmp_path: Path) -> None:
    """40 ms of a step encode in training, of which the trial showed 2: it was no link that took the rest."""
    own = {"strategy.compression": "powersgd(rank=2)"}
    lines = with_waits(tell(SHORT), waits_s=(0.05, 0.05), busy_s=0.0, spread_s=0.0)
    rows = [
        way(own, 1e4, 0.002) | {"network_s": 0.010}, way(NONE, 1e6) | {"network_s": 0.040},
        way({"strategy.compression": "int8"}, 2.5e5, 0.003) | {"network_s": 0.012},
        way({"strategy.sync": "local(period=8)"}, 1e6, period=8) | {"network_s": 0.040, "share": 0.25},
    ]  # fmt: skip
    told = {"t": lines[-1]["t"], "kind": "alternatives", "now": own, "latency_s": 0.0, "rows": rows}
    summary, _ = report(tmp_path, [*lines, told])
    then = {p.label: p.then_s for p in summary.predictions}
    assert then["none"] == pytest.approx(0.06 + 0.040)
    assert then["int8"] == pytest.approx(0.06 + 0.003 + 0.012)
    assert then["local(period=8)"] == pytest.approx(0.06 + 0.25 * 0.040)  # as often as it is sent, warm-up counted


def test_coding_that_was_hidden_is_gone_with_its_codec(tmp_path: Path) -> None:
    own = {"strategy.compression": "sign"}
    lines = with_waits(tell(SHORT), waits_s=(0.02, 0.02), busy_s=0.02, spread_s=0.02)
    rows = [way(own, 1e4, 0.03) | {"network_s": 0.008}, way(NONE, 1e6) | {"network_s": 0.010}]
    told = {"t": lines[-1]["t"], "kind": "alternatives", "now": own, "latency_s": 0.0, "rows": rows}
    summary, _ = report(tmp_path, [*lines, told])
    # 110 ms, 20 exposed and 20 behind backward: 8 of the 40 are the network's, of 30 that encode half is hidden.
    assert summary.predictions[0].then_s == pytest.approx(0.11 - 0.02 - 0.015 + 0.010)


def test_waits_that_work_does_not_explain_are_the_links(tmp_path: Path) -> None:
    lines = with_waits(tell(SHORT), waits_s=(0.04, 0.06), busy_s=0.0, spread_s=0.0)
    rows = [way(NONE, 1e6) | {"network_s": 0.04}, way({"strategy.compression": "bf16"}, 5e5) | {"network_s": 0.02}]
    told = {"t": lines[-1]["t"], "kind": "alternatives", "now": NONE, "latency_s": 0.0, "rows": rows}
    for line in (line for line in lines if line["kind"] == "steps"):
        line["phases"] = [
            [0.0, 0.01 * len(line["losses"]), 0.01 * len(line["losses"]), *row[3:]] for row in line["phases"]
        ]
        for place in range(len(line["losses"])):  # they take turns: work does not differ
            if place % 2:
                line["waits"][0][place], line["waits"][1][place] = line["waits"][1][place], line["waits"][0][place]
    summary, _ = report(tmp_path, [*lines, told])
    explained_s = 0.25 * 0.02
    network_s = 0.04 + (0.01 - explained_s)
    assert summary.predictions[0].then_s == pytest.approx(0.11 - network_s / 2, rel=0.02)


def test_updates_that_wait_for_the_link_are_the_links(tmp_path: Path) -> None:
    lines = with_waits(tell(SHORT), waits_s=(0.08, 0.08), busy_s=0.0, spread_s=0.0)
    rows = [way(NONE, 1e6) | {"network_s": 0.08}, way({"strategy.compression": "bf16"}, 5e5) | {"network_s": 0.04}]
    told = {"t": lines[-1]["t"], "kind": "alternatives", "now": NONE, "latency_s": 0.0, "rows": rows}
    for place, line in enumerate(line for line in lines if line["kind"] == "steps"):
        n, update_s = len(line["losses"]), 0.001 if place == 3 else 0.02
        line["phases"] = [[0.0, 0.005 * n, 0.005 * n, 0.08 * n, update_s * n, 0.0]] * 2
    summary, _ = report(tmp_path, [*lines, told])
    network_s = 0.08 + summary.phases["update"] - 0.001 - 0.25 * 0.011
    assert network_s > 0.09
    assert summary.predictions[0].then_s == pytest.approx(0.11 - network_s / 2)


def test_a_prediction_of_two_settings_alone_is_said_too(tmp_path: Path) -> None:
    both = {"strategy.sync": "diloco(period=10)", "strategy.compression": "int8"}
    lines = with_waits(tell(SHORT), waits_s=(0.04, 0.04), busy_s=0.0, spread_s=0.0)
    seldom = way({"strategy.sync": "diloco(period=20)"}, 1e6, 0.1, period=20)  # too seldom in 200 steps
    rows = [way(NONE, 1e6), way(both, 2.5e5, 0.1, period=10), seldom]
    told = {"t": lines[-1]["t"], "kind": "alternatives", "now": NONE, "latency_s": 0.0, "rows": rows}
    summary, words = report(tmp_path, [*lines, told])
    assert pick_ways(summary.predictions)
    assert "diloco(period=10), int8 would save" in words and "diloco(period=20)" not in words


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({}, "data on rank 1 (+180 ms)"),
        ({"gc_s": [0.19, 0.0]}, "garbage collection on rank 0 (190 ms)"),
        ({"phases": [[0.02, 0.02, 0.04, 0.2, 0, 0], [0.02, 0.02, 0.04, 0.2, 0, 0]]}, "communication (+"),
        ({"after": ["evaluation", "checkpoint"]}, "; just after evaluation and checkpoint"),
        (
            {"phases": [[0.02, 0.02, 0.04, 0.016, 0.2, 0], [0.02, 0.02, 0.04, 0.016, 0, 0]]},
            "update on rank 0 (+196 ms)",
        ),
        ({"phases": None, "gc_s": None}, "unknown"),
    ],
)
def test_a_slow_step_has_a_cause(tmp_path: Path, changes: Line, cause: str) -> None:
    lines = tell(replace(SHORT, phases_s=((0.020, 0.022, 0.044, 0.016, 0.004, 0.002),) * 2))
    slow = {
        "t": lines[8]["t"], "kind": "slow_step", "step": 57, "seconds": 0.29, "median_s": 0.108, "after": [],
        "phase_names": ["data", "forward", "backward", "communicate", "update", "other"], "gc_s": [0.0, 0.0],
        "phases": [[0.02, 0.022, 0.044, 0.196, 0.004, 0.002], [0.2, 0.022, 0.044, 0.016, 0.004, 0.002]], **changes,
    }  # fmt: skip
    summary, words = report(tmp_path, [*lines[:8], slow, *lines[8:]])
    (found,) = summary.slow_steps
    assert cause in found.cause
    assert found.waited_for == 0 or "update on rank 0" not in found.cause
    assert "The slowest step (57) took 290 ms; the median of the steps before it was 108 ms" in words


def test_of_a_slow_step_the_rank_is_told_that_the_others_waited_for(tmp_path: Path) -> None:
    lines = tell(SHORT)
    for line in (x for x in lines if x["kind"] == "steps"):
        n = len(line["losses"])
        line["waits"] = [[0.1] * n, [0.1] * n]
        line["waits"][1][n // 2] = 0.001
    window = [x for x in lines if x["kind"] == "steps"][3]
    slow = {
        "t": window["t"] + 0.001, "kind": "slow_step", "seconds": 0.29, "median_s": 0.108,
        "step": window["step"] - len(window["losses"]) + len(window["losses"]) // 2 + 1,
    }  # fmt: skip
    place = lines.index(window) + 1
    summary, _ = report(tmp_path, [*lines[:place], slow, *lines[place:]])
    assert [s.waited_for for s in summary.slow_steps] == [1]
    table = slow_step_table(summary)
    assert table is not None and dict(zip(table.head, table.rows[0], strict=True))["the others waited for"] == "rank 1"


def test_a_record_without_the_new_fields_or_with_torn_ones_is_read(tmp_path: Path) -> None:
    lines = tell(SHORT)
    for line, waits in zip([x for x in lines if x["kind"] == "steps"], ([[1.0]], None, [[0.1] * 10] * 2), strict=False):
        line |= {"waits": waits, "gc_s": [0.1], "pauses": [[1.0]], "comm_busy_s": []}
    summary, _ = report(tmp_path, lines)
    timing = measure(load_run(tmp_path))
    assert summary.communication is not None and not summary.communication.by_step
    assert timing is not None and timing.gc_s == ()


def test_shares_of_few_steps_are_at_most_all_of_a_step() -> None:
    """A window lasts as long as on rank 0: in a step or two the other ranks may have been in a phase for longer."""
    names, rows = ("data", "communicate", "update"), ((0.002, 0.005, 0.005), (0.002, 0.003, 0.015))
    window = Steps(2, (1.0,), 0.012, phase_names=names, phases=rows, t=1.0)
    timing = measure(RunRecord("run", [Start(t=0.0), window]))
    assert timing is not None and sum(map(timing.share, names)) == pytest.approx(1.0)


def test_no_compression_is_named_where_it_saves_time_however_many_other_ways_do() -> None:
    labels = ("sign", "bf16", "none", "local(period=8)", "diloco(period=20)", "local(period=8, overlap=2)")
    ways = [WayPrediction(name, {"x": name}, 1.0, 0.9 - 0.1 * i, 1.0) for i, name in enumerate(labels)]
    assert [way.label for way in pick_ways(ways)] == ["bf16", "none", *labels[3:]]
    assert [way.label for way in pick_ways([w for w in ways if w.label != "none"])] == [
        n for n in labels if n != "none"
    ]


@pytest.mark.parametrize(("layout", "sent"), [({"fsdp": 2}, 0), ({"dp": 2, "fsdp": 2}, 5e5)])
def test_messages_inside_a_replica_are_not_counted_and_not_told_apart(
    tmp_path: Path, layout: dict[str, int], sent: float
) -> None:
    lines = [{**line, "layout": layout} if line["kind"] == "start" else line for line in tell(SHORT)]
    summary, words = report(tmp_path, [{**x, "wire_bytes": sent} if x["kind"] == "steps" else x for x in lines])
    assert (summary.wire_bytes_per_step is None) is (not sent)
    page = (tmp_path / "report.html").read_text()
    assert ("inside of them (fsdp) it is not counted" if sent else "inside a replica (fsdp)") in page
    assert "the messages of fsdp among them (they are not told apart), bounds this run" in words
    assert "twice the --workers" not in page
