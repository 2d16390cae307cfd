"""Parts of a tensor, written however it was divided, give any other division of it bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from echelon.checkpoint import copy_state
from echelon.checkpoint.parts import (
    AlikeTensors,
    PartWriter,
    RankPart,
    ShardTensor,
    StoredPart,
    StoredTensor,
    WrittenTensors,
    await_parts,
    check_complete,
    join_parts,
    mapped,
    merge,
    part_file,
    take_parts,
    whole,
    write_file,
)
from echelon.checkpoint.tree import flatten, unflatten
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


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


@pytest.mark.parametrize("dtype", [torch.complex64, torch.uint16])
@pytest.mark.parametrize("shape", [(6,), (6, 2)])
def test_types_that_files_do_not_know_come_back(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(6 * (2 if len(shape) == 2 else 1)).view(shape).to(dtype)
    tensor = tensor * (1 + 2j) if dtype.is_complex else tensor
    states = []
    for rank, rows in enumerate(_division(6, 1, 2)):
        region = Region(shape, (rows, ((0, 2),))[: len(shape)])
        state, tensors = take_parts({"w": ShardTensor(cut_out(tensor, region), region)}, part_file(rank))
        write_file(tmp_path / part_file(rank), tensors)
        states.append(state)
    joined = join_parts(merge(states), tmp_path)["w"]
    assert torch.equal(joined.read(), tensor)
    part = Region(shape, (((1, 5),), ((1, 2),))[: len(shape)])
    assert torch.equal(joined.read(part), cut_out(tensor, part))


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


def test_what_ranks_have_alike_is_written_once_and_read_by_each(tmp_path: Path) -> None:
    anchors = {
        "big": torch.arange(1000.0),
        "small": torch.arange(10.0),
        "bits": torch.ones(3, 4, dtype=torch.complex64),
    }
    folded = torch.arange(24.0).reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last)
    states = [
        {"own": torch.full((5,), float(rank)), "sync": {"anchor": {**anchors, "folded": folded.clone()}}}
        for rank in range(2)
    ]
    parts = []
    for rank, state in enumerate(states):
        copied = copy_state(state)
        alike = AlikeTensors(list(copied["sync"]["anchor"].values()), [0, 1])
        parts.append(RankPart.of(rank, copied, {}, {}, alike))
    assert [sum(t.nbytes for t in part.tensors.values()) for part in parts] == [20 + 40 + 96 * 2, 20 + 4000]
    write_parts(tmp_path, parts)

    written = WrittenTensors()
    stored = [StoredPart(tmp_path / part_file(rank), written) for rank in range(2)]
    check_complete(stored)
    for rank, part in enumerate(stored):
        found = part.own({"own", "sync"})
        assert found["own"].tolist() == [float(rank)] * 5
        for name, tensor in found["sync"]["anchor"].items():
            assert torch.equal(tensor, states[0]["sync"]["anchor"][name]), name
        assert found["sync"]["anchor"]["folded"].stride() == folded.stride()
    tree, rest = written.refer(*flatten({"model": stored[0].own({"sync"})["sync"]["anchor"], "new": torch.ones(2)}))
    assert list(rest) == ["new"]
    again = unflatten(tree, {**rest, **mapped(tmp_path, tree, WrittenTensors())})
    assert torch.equal(again["model"]["big"], anchors["big"])


def test_a_part_that_refers_to_what_no_rank_wrote_is_refused(tmp_path: Path) -> None:
    both = [0, 1]
    tensors = [torch.ones(4), torch.ones(6)]
    first = RankPart.of(0, {"sync": {"a": tensors[0]}}, {}, {}, AlikeTensors([tensors[0]], both))
    second = RankPart.of(1, {"sync": {"b": tensors[1]}}, {}, {}, AlikeTensors([tensors[1]], both))
    write_parts(tmp_path, [first, second])
    stored = [StoredPart(tmp_path / part_file(rank), WrittenTensors()) for rank in both]
    with pytest.raises(ValueError, match=r"rank 0 expects ranks\.1\.sync\.a in part-00001"):
        check_complete(stored)


def write_parts(folder: Path, parts: list[RankPart]) -> None:
    """Write each rank's part, as its writer does."""
    for rank, part in enumerate(parts):
        writer = PartWriter()
        writer.write({folder / part_file(rank): part})
        writer.wait()
