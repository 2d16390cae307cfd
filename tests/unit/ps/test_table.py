"""The table of keys: covers everything once, balanced by bytes, the same in every process."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.ps.table import Cut, ParameterInfo, cut_table, table_from_bytes

shapes = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=3), min_size=1, max_size=20)


@given(shapes, st.integers(1, 4), st.sampled_from([64, 1024, 65536]), st.booleans())
def test_keys_cover_the_parameters_once(sizes: list[list[int]], servers: int, chunk: int, whole: bool) -> None:
    infos = [ParameterInfo(f"p{i}", tuple(s), len(s) > 1) for i, s in enumerate(sizes)]
    table = cut_table(infos, Cut(servers, chunk, whole))
    assert table.numel == sum(math.prod(s) for s in sizes)
    assert [k.start for k in table.keys] == [0, *(k.stop for k in table.keys[:-1])]
    assert table.keys[-1].stop == table.numel
    for key in table.keys:
        assert [p.start for p in key.parts] == [0, *(p.stop for p in key.parts[:-1])]
        assert key.parts[-1].stop == key.numel
        assert all(p.decay == (len(p.shape) > 1) for p in key.parts)
    assert table_from_bytes(table.to_bytes()) == table


def test_servers_hold_equal_bytes() -> None:
    infos = [ParameterInfo(f"p{i}", (64, 64), True) for i in range(10)] + [ParameterInfo("big", (1000, 1000), True)]
    table = cut_table(infos, Cut(3, 64 * 1024))
    loads = [sum(k.numel for k in table.of_server(s)) for s in range(3)]
    assert max(loads) - min(loads) <= 64 * 1024 / 4


@pytest.mark.parametrize("raw", [b"", b"{}", b"[1]", b'{"numel": 1, "cut": [1, 2, 3], "keys": []}'])
def test_what_is_no_table_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match="table"):
        table_from_bytes(raw)


@pytest.mark.parametrize(
    ("elements", "servers", "keys"), [(250_000, 1, 3), (250_000, 2, 6), (20_000, 1, 2), (100, 1, 1)]
)
def test_a_small_model_is_cut_so_that_a_servers_keys_overlap(elements: int, servers: int, keys: int) -> None:
    table = cut_table([ParameterInfo("w", (elements,), True)], Cut(servers, 1024 * 1024))
    assert len(table.keys) == keys
