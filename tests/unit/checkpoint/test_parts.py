"""Parts of a tensor, written however it was divided, give any other division of it bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from echelon.checkpoint.parts import (
    ShardTensor,
    StoredTensor,
    await_parts,
    join_parts,
    merge,
    take_parts,
    whole,
    write_file,
)
from echelon.core.errors import UserError
from echelon.core.shards import Region
from echelon.parallel.local_shards import cut_out

Runs = tuple[tuple[int, int], ...]


def _division(rows: int, parts: int, ranks: int) -> list[Runs]:
    """Cut each of `parts` parts of the rows among ranks, as a fused qkv is."""
    each = rows // parts
    size = -(-each // ranks)
    return [
        tuple((p * each + min(r * size, each), p * each + min((r + 1) * size, each)) for p in range(parts))
        for r in range(ranks)
    ]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from([1, 3]), st.integers(1, 4), st.sampled_from([1, 3]), st.integers(1, 4), st.booleans())
def test_any_division_reads_what_any_other_wrote(
    tmp_path: Path, parts: int, ranks: int, other_parts: int, other_ranks: int, columns: bool
) -> None:
    tensor = torch.arange(12 * 5, dtype=torch.float64).view(12, 5)
    across: Runs = ((0, 2), (2, 5)) if columns else ((0, 5),)
    states = []
    for rank, rows in enumerate(_division(12, parts, ranks)):
        for half, run in enumerate(across):
            region = Region((12, 5), (rows, (run,)))
            name = f"part-{rank}-{half}"
            state, tensors = take_parts({"a": {"w": ShardTensor(cut_out(tensor, region), region)}, "n": 1}, name)
            write_file(tmp_path / name, tensors)
            states.append(state)
    joined = join_parts(merge(states), tmp_path)
    assert joined["n"] == 1 and torch.equal(whole(joined)["a"]["w"], tensor)
    stored = joined["a"]["w"]
    assert isinstance(stored, StoredTensor)
    for rows in _division(12, other_parts, other_ranks):
        if not any(start < stop for start, stop in rows):
            continue  # an empty piece is nobody's
        region = Region((12, 5), (rows, ((1, 4),)))
        assert torch.equal(stored.read(region), cut_out(tensor, region))


def test_a_missing_part_is_an_error_and_files_are_plain_safetensors(tmp_path: Path) -> None:
    tensor = torch.ones(4, 2, dtype=torch.bfloat16)
    state, tensors = take_parts({"w": ShardTensor(tensor[:2], Region((4, 2), (((0, 2),), ((0, 2),))))}, "part")
    write_file(tmp_path / "part", tensors)
    assert torch.equal(load_file(tmp_path / "part")["state.w"], tensor[:2])
    stored = join_parts(state, tmp_path)["w"]
    assert torch.equal(stored.read(Region((4, 2), (((0, 2),), ((0, 2),)))), tensor[:2])
    with pytest.raises(ValueError, match="missing"):
        stored.read()


def test_ranks_that_write_elsewhere_are_named(tmp_path: Path) -> None:
    (tmp_path / "part-0").touch()
    with pytest.raises(UserError, match=r"1 ranks did not write .* storage that all machines share"):
        await_parts(tmp_path, ["part-0", "part-1"], deadline_s=0.05)
