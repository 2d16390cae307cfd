"""The record that a leader feeds to other voters: whole, in order, whatever is sealed, lost or begun anew."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from echelon.launch.record_copy import RecordChunk, RecordCopy, RecordFeed
from echelon.records.file import Recorder, read_records
from echelon.records.kinds import Start, Steps


def _feed(feed: RecordFeed, copy: RecordCopy) -> None:
    for _ in range(1000):
        copy.take(feed.chunk())
        assert feed.take(copy.feed, copy.position)
        if not feed.has_more():
            return
    raise AssertionError("it does not end")


def _steps(folder: Path) -> list[int]:
    return [window.step for window in read_records(folder, Steps)]


def _folders(tmp_path: Path) -> tuple[Path, Path, Path]:
    folders = tmp_path / "leader", tmp_path / "voter", tmp_path / "voter" / "machines"
    for folder in folders:
        folder.mkdir()
    return folders


def test_a_copy_follows_a_record_that_grows_and_is_sealed(tmp_path: Path) -> None:
    leader, voter, place = _folders(tmp_path)
    record = Recorder(leader, segment_bytes=2000)
    record.write(Start(version=1))
    feed, copy = RecordFeed(leader), RecordCopy(place)
    for step in range(1, 60):
        record.write(Steps(step, [1.0], 1.0))
        if step % 7 == 0:
            _feed(feed, copy)
    _feed(feed, copy)
    record.close()
    feed.close()
    own = Recorder(voter)
    own.write(Steps(999, [1.0], 1.0))
    assert copy.become_record(voter) and not copy.become_record(voter)
    own.write(Steps(60, [1.0], 1.0))
    own.close()
    assert _steps(voter) == [*range(1, 61)] and len(read_records(voter, Start)) == 1
    assert len(list(leader.glob("record-*.jsonl"))) > 0, "it was sealed"


def test_what_is_lost_or_repeated_changes_nothing_and_a_new_feed_counts_once_it_is_whole(tmp_path: Path) -> None:
    leader, voter, place = _folders(tmp_path)
    record = Recorder(leader)
    for step in (1, 2):
        record.write(Steps(step, [1.0], 1.0))
    feed, copy = RecordFeed(leader), RecordCopy(place)
    first = feed.chunk()
    copy.take(first)
    copy.take(first)
    assert feed.chunk() == first and feed.take(copy.feed, copy.position)
    record.write(Steps(3, [1.0], 1.0))
    _feed(feed, copy)
    again = RecordCopy(place)  # the voter's process began anew
    again.take(feed.chunk())
    assert not feed.take(again.feed, again.position), "it lacks the beginning"
    anew = RecordFeed(leader)
    begins = anew.chunk()
    again.take(type(begins)(begins.feed, 0, begins.data.partition(b"\n")[0] + b"\n", is_end=False))
    assert again.become_record(voter) and _steps(voter) == [1, 2, 3], "the older copy, which is whole"
    record.close()
    for each in (feed, anew):
        each.close()


def test_what_a_full_disk_cut_short_is_written_once(tmp_path: Path) -> None:
    copy, lines = RecordCopy(tmp_path), [b'{"step": %d}\n' % step for step in range(1000)]
    first, second = b"".join(lines[:500]), b"".join(lines[500:])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for feed in ("begun", "begun anew"):
        for data, position, fits in ((first, 0, 100), (second, len(first), len(first) + 100)):
            chunk = RecordChunk(feed, position, data, is_end=True)
            resource.setrlimit(resource.RLIMIT_FSIZE, (fits, hard))
            try:
                with pytest.raises(OSError):
                    copy.take(chunk)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            assert copy.position == position
            copy.take(chunk)
        assert (tmp_path / "record-copy.jsonl").read_bytes() == first + second
