"""Rows that servers make, in checkpoints: what was streamed is what was there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from echelon.checkpoint import RANKS, Arriving, CheckpointStore, part_file, streamed_part, whole
from echelon.core.state_tree import StateTree
from echelon.parallel.row_values import RowDraw, fill_rows
from echelon.ps.made_rows import ROWS, UPDATES, VALUE, without_rows
from echelon.ps.table import Cut, KeyRange, ParameterInfo, RowStart, cut_table
from echelon.trainer import made_parts
from echelon.trainer.made_parts import first_put, model_name, more_puts, streamed_tensors, without_made

COUNT, WIDTH = 500, 4
START = RowStart(RowDraw("normal", 0.0, 1.0), 3, "embedding")
TABLE = cut_table([ParameterInfo("embedding", (COUNT, WIDTH), True, by_rows=True, begins=START)], Cut(2, 4096))


@pytest.mark.parametrize("exist", [(0, 0), (1, 250), (100, 7)])
def test_a_checkpoint_has_whole_tables_and_gives_back_the_rows_that_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exist: tuple[int, int]
) -> None:
    monkeypatch.setattr(made_parts, "PART_BYTES", 8 * WIDTH * 16)
    states: dict[int, StateTree] = {}
    expected = torch.empty(COUNT, WIDTH)
    fill_rows(expected, 0, START.draw, START.seed, START.name)
    for key, count in zip(TABLE.keys, exist, strict=True):
        assert key.begins is not None
        rows = torch.randperm(key.rows, generator=torch.Generator().manual_seed(1))[:count].sort()[0]
        made = {ROWS: rows, VALUE: torch.randn(count, WIDTH), UPDATES: torch.arange(count, dtype=torch.int32)}
        states[key.index] = {"version": 3, "made": made}
        expected[rows + key.begins.first] = made[VALUE]

    def read(key: KeyRange, name: str, first: int, count: int) -> Tensor:
        assert count <= 16
        part: Tensor = states[key.index]["made"][name][first : first + count]
        return part

    copies = {index: without_rows(state) for index, state in states.items()}
    store = CheckpointStore(tmp_path / "checkpoints", 1)
    room = store.room_for_parts(1)
    lies = streamed_part(room / part_file(0), streamed_tensors(TABLE, copies, read))
    state = {
        "model": {"embedding": lies[model_name("embedding")]}, RANKS: {},
        "keys": {key.index: without_made(copies[key.index], key, lies) for key in TABLE.keys},
    }  # fmt: skip
    store.save(1, state, arriving=Arriving(room, [part_file(0)], lambda s, _: s, with_own=False), background=False)
    found = CheckpointStore(tmp_path / "checkpoints", 1).newest()
    assert found is not None
    assert torch.equal(whole(found[1]["model"])["embedding"], expected)
    for index, saved in found[1]["keys"].items():
        first, parts = first_put(saved), list(more_puts(saved))
        assert first["version"] == 3 and all(len(tensor) == 0 for tensor in first["made"].values())
        assert first["exist"] == len(states[index]["made"][ROWS])
        for name, tensor in states[index]["made"].items():
            assert torch.equal(torch.cat([first["made"][name], *(part[name] for part in parts)]), tensor)


def test_a_part_that_is_not_as_long_as_it_says_is_no_part(tmp_path: Path) -> None:
    key = TABLE.keys[0]
    copies = {k.index: without_rows({"made": {ROWS: torch.arange(9), VALUE: torch.ones(9, WIDTH)}}) for k in TABLE.keys}
    nothing = {ROWS: torch.zeros(0, dtype=torch.int64), VALUE: torch.zeros(0, WIDTH)}
    tensors = streamed_tensors(TABLE, copies, lambda of, name, first, count: nothing[name])
    with pytest.raises(ValueError, match="bytes of tensors"):
        streamed_part(tmp_path / part_file(0), {"rows": tensors[made_parts.key_name(key, ROWS)]})
    assert not list(tmp_path.glob("*.safetensors"))
