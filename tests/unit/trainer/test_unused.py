"""Settings that do nothing are told, and those that act are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from echelon.config import DataConfig, build
from echelon.data import open_data
from echelon.run.resolve import resolve
from echelon.trainer.unused import unread_notes, unused_notes


@pytest.mark.parametrize(
    "settings, said",
    [
        ({}, ""),
        ({"optimizer.step_epochs": 5.0}, "--step-epochs 5.0 does nothing with --schedule cosine"),
        ({"optimizer.step_epochs": 5.0, "optimizer.schedule": "step"}, ""),
        ({"optimizer.momentum": 0.5}, ""),
        ({"optimizer.name": "adamw", "optimizer.momentum": 0.5}, "--momentum 0.5 does nothing with --optimizer adamw"),
        ({"optimizer.name": "lars", "optimizer.momentum": 0.5}, ""),
        ({"training.early_stop_delta": 0.1}, "--early-stop-delta 0.1 does nothing without --early-stop"),
        ({"training.early_stop_delta": 0.1, "training.early_stop": 3}, ""),
        ({"model.head": "new"}, "--head new does nothing without --weights"),
        ({"model.frozen_norm": "train"}, "--frozen-norm train does nothing with --tune all, which freezes nothing"),
        ({"checkpoint.codec": "zstd"}, "--checkpoint-codec zstd does nothing without a run at a URL, or --mirror"),
        ({"checkpoint.codec": "zstd", "checkpoint.mirror": "/copies"}, ""),
        ({"data.cache_limit": "1gb"}, "--data-cache-limit 1gb does nothing for data that is no URL's"),
    ],
)
def test_what_acts_beside_another_setting_alone(settings: dict[str, Any], said: str) -> None:
    assert unused_notes(resolve(build(None, settings).config)) == [said] * bool(said)


_OF_SOME = {
    "input": "a", "target": "b", "split": "c", "columns": "a=number", "tokeniser": "characters", "context": 7,
    "time": "when", "negatives": 3, "decode": "gpu", "follow_links": True,
}  # fmt: skip


def _flags(config: DataConfig, task: str = "auto") -> set[str]:
    notes = unread_notes(config, open_data(config, 0, task))
    assert all(note.endswith(f" does nothing for data {config.source}") for note in notes)
    return {note.split()[0].removeprefix("--").replace("-", "_") for note in notes}


def test_what_the_data_does_not_read(tmp_path: Path) -> None:
    assert _flags(DataConfig("digits", **_OF_SOME)) == {*_OF_SOME} - {"decode"}
    assert not _flags(DataConfig("digits"))
    text, table, taken = tmp_path / "long.txt", tmp_path / "t.csv", tmp_path / "taken.csv"
    text.write_text("abcde" * 400)
    given = DataConfig(str(text), context=7, tokeniser="characters", root=str(tmp_path), negatives=3, follow_links=True)
    assert _flags(given) == {"negatives", "follow_links"}
    table.write_text("a,b\n" + "\n".join(f"{i},{i / 3}" for i in range(40)))
    given = DataConfig(str(table), input="a", target="b", columns="a=number", time="when", tokeniser="characters")
    assert _flags(given) == {"time", "tokeniser"}
    taken.write_text("user,item,when\n" + "\n".join(f"{i % 8},{i // 8},{i}" for i in range(64)))
    assert not _flags(DataConfig(str(taken), input="user,item", time="when", negatives=3), "recommendation")
