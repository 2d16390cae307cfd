"""Terms of a group over several machines: the folders are kept alike, and the first machine decides."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from echelon.core.terms import Term, TermFolder
from echelon.launch.members import TermKeeper
from echelon.launch.term_marks import MarkCopy, MarkLog, MarkNews, Marks
from echelon.messages.plain import from_plain, to_plain
from tests.unit.launch.no_files import no_file_left

MEMBERS = ("rank0.0", "machine1-rank0.0", "machine2-rank0.0")


def _folder(path: Path, shared: bool = True) -> TermFolder:
    folder = TermFolder(path)
    folder.make(shared)
    return folder


def _begun(path: Path) -> tuple[TermFolder, TermKeeper]:
    folder = _folder(path / "first")
    for member in MEMBERS:
        folder.begin(member)
    return folder, TermKeeper(folder, MEMBERS)


@pytest.mark.parametrize("seed", range(5))
def test_folders_become_alike_whatever_messages_are_lost_or_come_twice(tmp_path: Path, seed: int) -> None:
    draws = random.Random(seed)
    first = _folder(tmp_path / "first")
    log, copies = MarkLog(first, 1), [MarkCopy(_folder(tmp_path / f"{i}"), 1) for i in range(2)]
    late: list[tuple[MarkCopy, MarkNews]] = []
    for step in range(60):
        place = draws.choice([first, *(copy.folder for copy in copies)])
        place.begin(f"rank{step}.0") if draws.random() < 0.5 else place.complain(step, "rank0.0")
        if draws.random() < 0.3:
            first.publish(Term(step + 1, ("rank0.0",)))
        copy = draws.choice(copies)
        news = log.answer(from_plain(Marks, to_plain(copy.tell())))
        if draws.random() < 0.6:
            copy.take(from_plain(MarkNews, to_plain(news)))
        late.append((copy, news))
        copy, news = draws.choice(late)
        copy.take(news)
    for copy in copies * 2:
        copy.take(log.answer(copy.tell()))
    for copy in copies:
        assert copy.folder.marks() == first.marks() and copy.folder.newest() == first.newest()
        assert copy.tell().names == ()


def test_what_cannot_be_written_for_now_is_told_again(tmp_path: Path) -> None:
    folder, keeper = _begun(tmp_path)
    log, copy = MarkLog(folder, 1), MarkCopy(_folder(tmp_path / "other"), 1)
    copy.folder.lose(MEMBERS[2])
    said = copy.tell()
    with no_file_left():
        assert log.answer(said).names == ()
    log.answer(copy.tell())
    keeper.look(admits=True)
    news = log.answer(copy.tell())
    with no_file_left():
        copy.take(news)
    assert copy.folder.newest() is None
    copy.take(log.answer(copy.tell()))
    assert copy.folder.newest() == folder.newest() == Term(1, MEMBERS[:2], lost_by=1)


def test_marks_of_another_start_and_names_that_are_no_marks_are_not_taken(tmp_path: Path) -> None:
    log = MarkLog(_folder(tmp_path / "first"), 2)
    assert log.answer(Marks(1, ("rank0.0.begun",))) == MarkNews() and log.folder.marks() == set()
    with pytest.raises(ValueError, match="no mark"):
        log.answer(Marks(2, ("../../etc/passwd",)))


def test_the_others_go_on_without_a_lost_machine_which_comes_back_by_another_name(tmp_path: Path) -> None:
    folder, keeper = _begun(tmp_path)
    folder.lose_machine("machine1-")
    assert not keeper.look(admits=True)
    assert folder.newest() == Term(1, ("rank0.0", "machine2-rank0.0"), lost_by=1)
    folder.arrive("machine1b1-rank0.1")
    keeper.look(admits=True)
    assert folder.newest() == Term(2, ("rank0.0", "machine2-rank0.0", "machine1b1-rank0.1"), lost_by=1)
    assert folder.is_gone("machine1-rank0.0") and not folder.is_gone("machine1b1-rank0.1")


def test_the_others_wait_for_the_first_machines_next_worker_which_leads_them(tmp_path: Path) -> None:
    folder, keeper = _begun(tmp_path)
    folder.lose("rank0.0")
    keeper.look(admits=True)
    assert folder.newest() is None and keeper.wait_for_first
    folder.arrive("machine2-rank0.1")
    keeper.look(admits=True)
    assert folder.newest() is None, "nobody of the first machine has come"
    folder.arrive("rank0.1")
    keeper.look(admits=True)
    term = Term(1, ("rank0.1", "machine1-rank0.0", "machine2-rank0.0", "machine2-rank0.1"), lost_by=1)
    assert folder.newest() == term and not keeper.wait_for_first


def test_a_machine_that_is_lost_before_all_have_begun_ends_the_start(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "first")
    folder.begin("rank0.0")
    keeper = TermKeeper(folder, MEMBERS)
    folder.lose_machine("machine1-")
    assert keeper.look(admits=True) and folder.is_missed("machine1-rank0.0") and folder.newest() is None


def test_the_first_machine_says_whether_all_is_trained(tmp_path: Path) -> None:
    folder, keeper = _begun(tmp_path)
    assert folder.close(0) is None and folder.close(0) is None
    keeper.look(admits=True)
    assert folder.is_closed and folder.close(0) is True
    folder.arrive("machine1-rank0.1")
    keeper.look(admits=True)
    assert folder.newest() is None


def test_nobody_closes_over_a_newcomer(tmp_path: Path) -> None:
    folder, keeper = _begun(tmp_path)
    folder.arrive("machine1-rank0.1")
    assert folder.close(0) is None
    keeper.look(admits=True)  # the members have asked in time; who arrives then is too late
    assert folder.is_closed and folder.newest() is None
    others = _folder(tmp_path / "others")
    for member in MEMBERS:
        others.begin(member)
    keeper = TermKeeper(others, MEMBERS)
    others.arrive("machine1-rank0.1")
    keeper.look(admits=True)
    assert others.close(0) is False and not others.is_closed
