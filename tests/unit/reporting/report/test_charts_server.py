"""The page's part on a parameter server, from records as scheduler and servers write them."""

from __future__ import annotations

import json
from pathlib import Path

from echelon.reporting.report.charts_cost import time_charts, traffic_charts
from echelon.reporting.report.charts_server import server_charts, server_loads, server_table
from echelon.reporting.report.records import load_run


def beat(t: float, name: str, life: int, updates: int, busy_s: float) -> dict:
    return {
        "t": t, "kind": "server", "name": name, "step": updates, "life": life, "updates": updates, "duplicates": 1,
        "late": 0, "busy_s": busy_s, "seconds": t, "sent_bytes": 10 * updates, "received_bytes": 20 * updates,
        "refused": 0, "dropped": {"version": 2}, "staleness": {"0": updates // 2, "3": updates - updates // 2},
    }  # fmt: skip


def clocks(t: float, worker0: int, worker1: int, waited_s: float) -> dict:
    return {
        "t": t, "kind": "staleness", "step": worker0 + worker1, "late": 0,
        "clocks": {"worker0": worker0, "worker1": worker1},
        "waited_s": {"worker0": {"parameters": waited_s, "task": 0.1}, "worker1": {"parameters": 0.5, "task": 0.0}},
        "sent_bytes": {"worker0": 100 * worker0, "worker1": 100 * worker1}, "received_bytes": {"worker0": 7},
    }  # fmt: skip


LINES = [
    {"t": 0.0, "kind": "start", "world_size": 2},
    beat(1, "server0", 11, 4, 0.5), clocks(1, 2, 2, 0.2), beat(2, "server0", 11, 8, 1.0),
    beat(3, "server0", 12, 6, 0.3), clocks(3, 9, 5, 0.1), beat(4, "server0", 12, 9, 0.9),
    {"t": 5.0, "kind": "end", "status": "completed", "seconds": 5.0},
]  # fmt: skip


def run_of(folder: Path, lines: list[dict]) -> Path:
    (folder / "config.yaml").write_text("")
    (folder / "record.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_lives_are_summed(tmp_path: Path) -> None:
    load = server_loads(load_run(run_of(tmp_path, LINES)))["server0"]
    assert load.lives == 2
    assert load.updates == 8 + 9
    assert load.staleness == {0: 8, 3: 9}
    assert load.dropped == {"version": 4}


def test_every_figure_is_shown(tmp_path: Path) -> None:
    record = load_run(run_of(tmp_path, LINES))
    charts = {chart.id: chart for chart in server_charts(record)}
    assert list(charts) == ["staleness", "clocks", "waiting", "directions", "serverload"]
    assert "Mean staleness 1.6" in charts["staleness"].caption
    assert "Batches that each worker has finished" in charts["clocks"].caption
    assert "Two workers were at most 4 batches apart, at 2 counts." in charts["clocks"].caption
    assert charts["waiting"].traces[0]["x"] == [0.2 + 0.1, 0.5]  # worker0's process began anew
    table = server_table(record)
    assert table is not None and table.rows[0][:3] == ["server0", "2", "17"]


def test_a_load_that_was_seen_once_is_a_number_of_the_table(tmp_path: Path) -> None:
    record = load_run(run_of(tmp_path, [*LINES[:4], LINES[-1]]))
    assert "serverload" not in [chart.id for chart in server_charts(record)]
    table = server_table(record)
    assert table is not None and "busy" in table.head


def test_what_workers_do_is_drawn_from_where_training_begins(tmp_path: Path) -> None:
    start = {"t": 20.0, "kind": "start", "world_size": 2, "launched_t": 0.0}
    lines = [start, clocks(21, 2, 2, 0.2), clocks(23, 9, 5, 0.1), {**LINES[-1], "t": 24.0, "seconds": 24.0}]
    (chart,) = [c for c in server_charts(load_run(run_of(tmp_path, lines))) if c.id == "clocks"]
    assert chart.traces[0]["x"] == [1.0, 3.0] and max(chart.layout["xaxis"]["tickvals"]) == 3.0


def test_clocks_of_earlier_runs_are_not_called_batches_finished(tmp_path: Path) -> None:
    """A worker that paused was put where the slowest of the others was: together they were further than the steps."""
    lifted = {**clocks(3, 9, 5, 0.1), "step": 11}
    (chart,) = [c for c in server_charts(load_run(run_of(tmp_path, [*LINES[:-1], lifted]))) if c.id == "clocks"]
    assert "after a pause it goes on where the slowest other one is" in chart.caption
    ahead = {**clocks(3, 9, 5, 0.1), "step": 12}  # a batch of each is in the next window
    (chart,) = [c for c in server_charts(load_run(run_of(tmp_path, [*LINES[:-1], ahead]))) if c.id == "clocks"]
    assert "Batches that each worker has finished" in chart.caption


def test_bytes_of_servers_are_pushed_and_pulled_from_nothing_on(tmp_path: Path) -> None:
    window = {
        "t": 1.5, "kind": "steps", "step": 11, "seconds": 1.0, "losses": [1.0] * 11, "wire_bytes": 1e6,
        "wire_bytes_by_group": {"pushed": 5e5, "pulled": 5e5},
    }  # fmt: skip
    sent, groups = traffic_charts(load_run(run_of(tmp_path, [*LINES[:2], window, LINES[-1]])))
    assert sent.traces[0]["x"] == [0.0, 11.0] and sent.traces[0]["y"] == [0.0, 1e6]
    assert "by workers and servers" in sent.caption and groups.title == "Bytes pushed and pulled"


def test_the_slowest_window_is_as_high_as_it_is_drawn(tmp_path: Path) -> None:
    """The first window of a run with servers is longer than its phases: its workers begin one after the other."""
    phases = {"phase_names": ["forward", "evaluation"], "epoch": 0, "losses": [1.0] * 4}
    windows = [
        {"t": 8.0, "kind": "steps", "step": 4, "seconds": 8.0, "phases": [[0.4, 0.0]] * 2, **phases},
        {"t": 9.0, "kind": "steps", "step": 8, "seconds": 1.0, "phases": [[0.6, 0.2]] * 2, **phases},
    ]
    record = load_run(run_of(tmp_path, [LINES[0], *windows, LINES[-1]]))
    (chart,) = [chart for chart in time_charts(record, None) if chart.id == "steptime"]
    assert chart.caption == "The slowest window ends at step 8: 150 ms per step."  # evaluation is no phase
    assert [(trace["name"], trace["x"]) for trace in chart.traces] == [("forward", [4.0, 8.0])]


def test_no_part_without_a_server(tmp_path: Path) -> None:
    record = load_run(run_of(tmp_path, [LINES[0], LINES[-1]]))
    assert server_charts(record) == []
    assert server_table(record) is None


def test_strange_records_are_survived(tmp_path: Path) -> None:
    lines = [LINES[0], {"t": 1.0, "kind": "server", "name": 3, "staleness": "x", "dropped": {"a": None}},
             {"t": 2.0, "kind": "staleness", "clocks": [1], "waited_s": {"worker0": 4}}, LINES[-1]]  # fmt: skip
    assert server_charts(load_run(run_of(tmp_path, lines))) == []


def test_what_split_workers_wait_for_is_more_than_servers(tmp_path: Path) -> None:
    for layout, served in (({"dp": 2}, True), ({"dp": 2, "pp": 2}, False), (None, True)):
        start = {**LINES[0], "backend": "zmq", "layout": layout}
        assert load_run(run_of(tmp_path, [start, *LINES[1:]])).waits_for_servers == served


def test_one_replica_has_nothing_to_compress(tmp_path: Path) -> None:
    for layout, alone in (({"tp": 2}, True), ({"dp": 2, "tp": 2}, False), ({"dp": 2}, False), ({}, False)):
        start = {**LINES[0], "backend": "gloo", "layout": layout}
        assert load_run(run_of(tmp_path, [start])).one_replica == alone
