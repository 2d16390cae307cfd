"""What a real run says it sent, by group: the groups are the whole, and the report lists them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks.runs import SMALL, Runs

WAYS = {
    "powersgd": (["--model", "mlp", "--compression", "powersgd(rank=2)"], ["weights", "small"]),
    "local": (
        ["--model", "mlp", "--sync", "local(period=5, optimizer_state=average)", "--compression", "topk(density=0.01)"],
        ["weights", "small", "moments"],
    ),
    "ps": (["--model", "mlp", "--sync", "ps(mode=sync)"], ["pulled", "pushed"]),
}


@pytest.mark.parametrize(
    "way",
    [  # `local` has the groups of `powersgd`, and one more; `server/test_machines.py` counts what goes to servers
        pytest.param(way, marks=pytest.mark.long if way == "local" else pytest.mark.slow) for way in WAYS
    ],
)
def test_groups_add_up_to_all_bytes(tmp_path: Path, way: str) -> None:
    settings, groups = WAYS[way]
    with Runs(tmp_path) as runs:
        run = runs.start("train", "digits", "--epochs", "2", "--workers", "2", *settings, *SMALL,
                         folder="run")  # fmt: skip
        assert run.end() == 0, run.text()
        windows = run.records("steps")
        page = (run.folder / "report.html").read_text()
    for window in windows:
        assert sum(window["wire_bytes_by_group"].values()) == window["wire_bytes"]
    sent = {name for window in windows for name, n_bytes in window["wire_bytes_by_group"].items() if n_bytes}
    assert sorted(sent) == sorted(groups)
    said = page.partition('id="groups"')[2].partition("</")[0]
    assert sum(f"{name} " in said for name in groups) == min(3, len(groups)), said
