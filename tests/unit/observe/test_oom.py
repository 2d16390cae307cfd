"""Which cgroup a process's memory is counted in, of either version, and its counter of kills."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from echelon.observe.oom import log_names, memory_group

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


@pytest.mark.parametrize("who", ["Out of memory: ", "Memory cgroup out of memory: "])
def test_the_kernels_log_names_who_was_killed(who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, ours = ends = os.pipe()
    os.write(ours, f"3,1042,99,-;{who}Killed process 77 (python) total-vm:9kB\n".encode())
    os.set_blocking(ends[0], False)
    monkeypatch.setattr("echelon.observe.oom.os.open", lambda *_: os.dup(ends[0]))
    try:
        assert log_names(77) and not log_names(7)  # the second time nothing is left to read
        os.write(ours, f"3,1043,99,-;{who}Killed process 77 (python)\n".encode())
        assert not log_names(7)
    finally:
        for end in ends:
            os.close(end)
