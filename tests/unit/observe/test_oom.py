"""Which cgroup a process's memory is counted in, of either version, and its counter of kills."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.observe.oom import memory_group

V1 = "5:cpu,cpuacct:/\n4:memory:/jobs/a\n0::/\n"
V2 = "0::/jobs/a\n"
V1_EVENTS = ("memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n", "memory.limit_in_bytes")
V2_EVENTS = ("memory.events", "low 0\noom 3\noom_kill 2\noom_group_kill 0\n", "memory.max")


@pytest.mark.parametrize(
    ("lines", "folder", "files"),
    [
        pytest.param(V1, "memory/jobs/a", V1_EVENTS, id="version 1"),
        pytest.param(V2, "jobs/a", V2_EVENTS, id="version 2"),
        pytest.param(V2, ".", V2_EVENTS, id="the path is the host's"),
        pytest.param(V1, "memory", V1_EVENTS, id="the path is the host's, version 1"),
        pytest.param("0::/\n", "unified", V2_EVENTS, id="beside version 1"),
    ],
)
def test_kills_and_limit_are_those_of_the_group(
    tmp_path: Path, lines: str, folder: str, files: tuple[str, str, str]
) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7/cgroup").write_text(lines)
    where = tmp_path / "mounted" / folder
    where.mkdir(parents=True)
    events, text, limit = files
    (where / events).write_text(text)
    (where / limit).write_text("536870912\n")
    group = memory_group(7, tmp_path / "mounted", tmp_path)
    assert group is not None and (group.kills(), group.limit_bytes()) == (2, 1 << 29)
    (where / limit).write_text("max\n")
    assert group.limit_bytes() is None


def test_what_cannot_be_seen_is_no_kill(tmp_path: Path) -> None:
    assert memory_group(7, tmp_path, tmp_path) is None
