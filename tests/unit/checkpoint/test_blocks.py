"""Parts travel as blocks: coded without loss, cut so that what did not change is known as such."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from echelon.checkpoint.blocks import BLOCK_BYTES, BlockList, KnownBlocks, blocks_of, coded, decoded, digest_of
from echelon.checkpoint.tensors import write_file


@pytest.mark.parametrize("n_bytes", [1, 3, 4, 4097, BLOCK_BYTES])
def test_a_block_comes_back_bit_for_bit(n_bytes: int) -> None:
    draws = torch.Generator().manual_seed(n_bytes)
    noise = torch.randint(0, 256, (n_bytes,), generator=draws, dtype=torch.uint8).numpy().tobytes()
    weights = (0.02 * torch.randn(n_bytes, generator=draws)).numpy().tobytes()[:n_bytes]
    for block in (noise, weights, bytes(n_bytes)):
        data, is_coded = coded(block)
        assert len(data) <= n_bytes and decoded(data, is_coded, n_bytes) == block


def test_weights_are_smaller_coded_and_what_is_damaged_is_no_block() -> None:
    data, is_coded = coded((0.02 * torch.randn(BLOCK_BYTES // 4)).numpy().tobytes())
    assert is_coded and len(data) < 0.95 * BLOCK_BYTES
    with pytest.raises(ValueError):
        decoded(b"no block" + data, is_coded, BLOCK_BYTES)


def test_what_did_not_change_is_known_though_the_start_of_the_file_has_grown(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3 * BLOCK_BYTES // 4), "b": torch.randn(BLOCK_BYTES // 2), "c": torch.randn(7)}
    write_file(tmp_path / "before", tensors, {"step": "9"})
    tensors["c"] += 1.0
    write_file(tmp_path / "after", tensors, {"step": "1000000"})
    known, listed = KnownBlocks.of(tmp_path / "before"), blocks_of(tmp_path / "after")
    assert listed.is_sound()
    data, news, read = (tmp_path / "after").read_bytes(), [], b""
    for number in range(len(listed)):
        begin, end = listed.span(number)
        block = known.read(listed.digest(number))
        news += [number] if block is None else []
        read += data[begin:end] if block is None else block
        assert digest_of(data[begin:end]) == listed.digest(number)
    assert read == data and news == [0, len(listed) - 1], "the names, and the tensor that has changed"


def test_blocks_of_a_file_that_is_gone_are_not_known(tmp_path: Path) -> None:
    write_file(tmp_path / "part", {"a": torch.ones(5)})
    known, digest = KnownBlocks.of(tmp_path / "part"), blocks_of(tmp_path / "part").digest(0)
    assert known.read(digest) is not None
    (tmp_path / "part").unlink()
    assert known.read(digest) is None and not KnownBlocks.of(tmp_path / "part").spans


def test_a_list_of_another_length_is_not_sound() -> None:
    assert BlockList(BLOCK_BYTES + 9, 8, bytes(3 * 16)).is_sound()
    for listed in (
        BlockList(BLOCK_BYTES + 9, 8, bytes(2 * 16)),
        BlockList(5, 8, bytes(16)),
        BlockList(5, 0, bytes(16)),
    ):
        assert not listed.is_sound()


@pytest.mark.parametrize("n_bytes", [9 << 20, 33 << 30, 100 << 30, 3 << 40])
def test_digests_of_the_largest_parts_fit_into_one_frame(n_bytes: int) -> None:
    size = BlockList(n_bytes, 1000, b"").block_bytes
    count = 1 + -(-(n_bytes - 1000) // size)
    assert 16 * count <= 33 << 20 and (size == BLOCK_BYTES) == (n_bytes < 32 << 30)
    listed = BlockList(n_bytes, 1000, b"")
    assert listed.span(0) == (0, 1000) and listed.span(1) == (1000, 1000 + size)
    assert listed.span(count - 1)[1] == n_bytes
