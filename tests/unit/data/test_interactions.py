"""Implicit feedback: who is held out, which negatives are drawn, and what is ranked."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from echelon.config import DataConfig
from echelon.core.errors import UserError
from echelon.data import EvalLoader, LoaderConfig, Shard, Source, TrainLoader, open_data
from echelon.data.interactions import Histories
from echelon.tasks.base import NO_TARGET

ROWS = [
    *((f"u{user}", 10 * item, 100 - item) for user in range(4) for item in range(6 + user)),  # the last row came first
    ("few", 10, 1),
    ("few", 20, 2),
    ("u0", 10, 500),  # again: the first one counts
]


def write(folder: Path, rows: list[tuple[object, ...]] = ROWS, head: str = "user,item,timestamp") -> str:
    """Write a table of interactions."""
    lines = [head, *(",".join(map(str, row)) for row in rows)]
    (folder / "taken.csv").write_text("\n".join(lines) + "\n")
    return str(folder / "taken.csv")


def config(folder: Path, **settings: object) -> DataConfig:
    return DataConfig(source=write(folder), input="user,item", negatives=3, batch_size=7, **settings)  # type: ignore[arg-type]


def opened(data: DataConfig, seed: int = 1) -> Source:
    return open_data(data, seed, "recommendation")


def evaluated(source: Source, samples: object = None) -> tuple[torch.Tensor, ...]:
    """Return users, and the targets of all items, of an evaluation."""
    data = DataConfig(batch_size=8)
    loader = EvalLoader(source, LoaderConfig(data, 1, torch.device("cpu")), Shard(0, 1), samples)  # type: ignore[arg-type]
    batches = list(loader)
    assert all((batch.inputs[1] == torch.arange(batch.inputs[1].shape[1])).all() for batch in batches)
    return torch.cat([batch.inputs[0][:, 0] for batch in batches]), torch.cat([batch.targets for batch in batches])


def test_the_last_of_each_user_is_for_the_test_and_the_one_before_for_validation(tmp_path: Path) -> None:
    source = opened(config(tmp_path))
    users, targets = evaluated(source)
    _, tested = evaluated(source, source.test)
    # times fall: item 0 is the last of each user, item 10 the one before; both are known only where "few" took them
    known = [0, 10, 20, *range(30, 90, 10)][1:]
    column = {item: place + 1 for place, item in enumerate(known)}
    assert users.tolist() == sorted(users.tolist()) and len(users) == 4
    for user, (row, test) in enumerate(zip(targets, tested, strict=True)):
        before = {column[item] for item in range(20, 10 * (6 + user), 10)}
        assert set((row == NO_TARGET).nonzero().flatten().tolist()) == {0, *before}
        assert (row == 1).nonzero().flatten().tolist() == [column[10]]
        assert set((test == NO_TARGET).nonzero().flatten().tolist()) == {0, column[10], *before}
        assert not (test == 1).any(), "item 0 is in no training row: it counts as missed"
    said = " ".join(source.notes)
    assert (
        "1 user with fewer than 3" in said
        and "repeat a pair of user and item: 1;" in said
        and "4 of 8 item held out" in said
    )


def test_negatives_are_a_function_of_seed_epoch_and_index_whoever_draws_them(tmp_path: Path) -> None:
    data = config(tmp_path)

    def drawn(world: int, epoch: int, seed: int = 1, start: int = 0) -> list[tuple[torch.Tensor, ...]]:
        """Return users, items and targets of each global batch."""
        parts = []
        for rank in range(world):
            loader = TrainLoader(opened(data), LoaderConfig(data, seed, torch.device("cpu")), Shard(rank, world))
            parts.append([(*batch.inputs, batch.targets) for batch in loader.epoch(epoch, start)])
            loader.close()
        return [tuple(torch.cat(leaves) for leaves in zip(*batch, strict=True)) for batch in zip(*parts, strict=True)]

    alone, shared, later = drawn(1, 0), drawn(3, 0), drawn(1, 0, start=2)
    for one, three in zip([*alone, *alone[2:]], [*shared, *later], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, three, strict=True))
    assert not torch.equal(alone[0][1], drawn(1, 1)[0][1])
    for users, items, targets in alone:
        assert (users == users[:, :1]).all() and (items > 0).all()
        assert (targets == torch.tensor([1.0, 0, 0, 0])).all()
        assert not (items[:, :1] == items[:, 1:]).any(), "an item that was taken is no negative"


def test_negatives_are_all_items_that_were_not_taken_with_equal_chances() -> None:
    histories = Histories.of(np.array([0, 0, 0, 2, 2]), np.array([1, 4, 4, 9, 2]), 3)
    users, count = np.array([0, 1, 2]), 10
    uniform = np.tile((np.arange(5040) + 0.5) / 5040, (3, 1))
    drawn = histories.others(users, uniform, count)
    for user, taken in enumerate(({1, 4}, set(), {2, 9})):
        values, counts = np.unique(drawn[user], return_counts=True)
        assert set(values.tolist()) == set(range(1, 10)) - taken and len(set(counts.tolist())) == 1
    everything = Histories.of(np.zeros(9, np.int64), np.arange(1, 10), 1)
    assert set(np.unique(everything.others(np.array([0]), uniform[:1], count))) == set(range(1, 10))


DAY = "2021-03-01 07:00:0"
FRACTIONS: dict[str, list[Any]] = {
    "csv": [f"{DAY}{i}" for i in ("0.9", "0.25", "0")],
    "csv with a zone": [f"{DAY}{i}Z" for i in ("0.9", "0.25", "0")],
    "jsonl": [f"{DAY}{i}" for i in ("0.9", "0.25", "0")],
    "parquet ns": [datetime.fromisoformat(f"{DAY}{i}") for i in ("0.900000", "0.250000", "0.000000")],
    "parquet whole": [1_616_161_616_000_000_000 + i for i in (2, 1, 0)],  # as floats these are one number
}


@pytest.mark.parametrize("form", FRACTIONS)
def test_fractions_of_a_second_tell_which_item_was_the_last(tmp_path: Path, form: str) -> None:
    """The rows stand in the order of falling times, so that the first item of each user is the last one taken."""
    rows = [(user, item, FRACTIONS[form][item]) for user in range(4) for item in range(3)]
    head = ("user", "item", "time")
    if form.startswith("csv"):
        source = write(tmp_path, rows, ",".join(head))
    elif form == "jsonl":
        source = str(tmp_path / "taken.jsonl")
        Path(source).write_text("\n".join(json.dumps(dict(zip(head, row, strict=True))) for row in rows))
    else:
        source = str(tmp_path / "taken.parquet")
        table = pa.table({name: [row[i] for row in rows] for i, name in enumerate(head)})
        if form == "parquet ns":
            table = table.set_column(2, "time", table["time"].cast(pa.timestamp("ns")))
        parquet.write_table(table, source)
    run = tmp_path / "run"
    run.mkdir()
    data = open_data(DataConfig(source=source, input="user,item"), 0, "recommendation", run)
    known = json.loads((run / "columns.json").read_text())
    assert "by time" in data.notes[0] and known["item"]["known"] == [2], "the item that is trained on was the first"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"input": "user"}, "name two columns of user, item, timestamp, label, share: --input USER,ITEM"),
        ({"input": "user,itm"}, "did you mean 'item'|no column 'itm'"),
        ({"time": "when"}, "no column 'when'"),
        ({"time": "label"}, "column label: 'l0' in row 1 is no time such as 2021-03-01"),
        ({"input": "user,share"}, "ids are whole numbers or strings"),
        ({"input": "label,item"}, "no label has 3 different item"),
    ],
)
def test_what_cannot_be_used_is_refused_in_words(tmp_path: Path, settings: dict[str, str], message: str) -> None:
    rows = [(f"u{i % 3}", i, i, f"l{i}", i / 7) for i in range(12)]
    source = write(tmp_path, rows, "user,item,timestamp,label,share")
    with pytest.raises(UserError, match=message):
        opened(DataConfig(**{"source": source, "input": "user,item", **settings}))


def test_a_missing_id_and_several_parts_are_refused(tmp_path: Path) -> None:
    source = write(tmp_path, [("a", 1, 1), ("", 2, 2), ("a", 3, 3)])
    with pytest.raises(UserError, match="user is missing in row 2"):
        opened(DataConfig(source=source, input="user,item"))
    for part in ("train", "test"):
        (tmp_path / f"{part}.csv").write_text("user,item\na,1\n")
    with pytest.raises(UserError, match=r"one table; here are .*test\.csv"):
        opened(DataConfig(source=str(tmp_path), input="user,item"))
