"""Checkpoints that lack parts: which are needed, and what becomes of their folders."""

from __future__ import annotations

from pathlib import Path

import torch

from echelon.checkpoint.incomplete import HomeParts, IncompleteCheckpoint, Lacking, PartNote, incompletes, superseded
from echelon.checkpoint.parts import AlikeTensors, PartWriter, RankPart, part_file
from echelon.checkpoint.store import Arriving, BaseState, CheckpointStore, files


def lacking(token: int) -> Lacking:
    return Lacking(token, ranks=2, away=(1,), is_agreed=True)


def described(token: int, step: int, metric: float | None = None) -> IncompleteCheckpoint:
    return IncompleteCheckpoint(Path(f"incomplete-{step}"), step, metric, "", lacking(token))


def test_needed_are_the_oldest_the_newest_and_the_best_of_those_to_come() -> None:
    present = [described(1, 10), described(2, 20, 0.9), described(3, 30, 0.8), described(4, 40), described(5, 50)]
    gone = superseded(present, whole_step=0, tokens={1, 2, 3, 4, 5})
    assert [each.step for each in gone] == [30, 40]
    assert superseded(present[:1], whole_step=0, tokens={1}) == []


def test_what_an_ended_process_left_is_needed_until_something_newer_is_whole() -> None:
    left, own = described(1, 10), described(2, 20)
    assert superseded([left, own], whole_step=5, tokens={2}) == []
    assert superseded([left, own], whole_step=10, tokens={2}) == [left]


def part_of(rank: int, value: float) -> RankPart:
    return RankPart.of(rank, {"own": torch.full((4,), value)}, {}, {}, AlikeTensors())


def save(
    store: CheckpointStore, step: int, token: int, base: BaseState | None = None, **state: object
) -> IncompleteCheckpoint:
    """Save what lacks rank 1's part, and let that come."""
    folder = store.room_for_parts(token)
    writer = PartWriter()
    writer.write({folder / part_file(0): part_of(0, step)})
    arriving = Arriving(folder, [part_file(0)], lambda state, _: state, lacking=lacking(token))
    state = {"model": {"a": torch.ones(3)}, **state}
    store.save(step, state, arriving=arriving, base=base, reason="interval")
    writer.wait()
    store.wait()
    incomplete = next(each for each in incompletes(store.folder) if each.lacking.token == token)
    return incomplete


def bring(incomplete: IncompleteCheckpoint, value: float) -> None:
    incomplete.arrived(1).parent.mkdir()
    writer = PartWriter()
    writer.write({incomplete.arrived(1): part_of(1, value)})
    writer.wait()
    sum_file = incomplete.arrived(1).with_suffix(".sha256")
    incomplete.note(1, PartNote("b", incomplete.arrived(1).stat().st_size, sum_file.read_text()))


def test_it_counts_as_a_checkpoint_once_its_parts_have_come(tmp_path: Path) -> None:
    told = list[int]()
    store = CheckpointStore(tmp_path / "checkpoints", keep=1, on_saved=lambda saved: told.append(saved.step))
    incomplete = save(store, 10, token=1)
    assert store.newest() is None and told == [] and incomplete.missing == [1]
    assert incomplete.lacking.reason == "interval" and incomplete.lacking.saved_t > 0.0
    bring(incomplete, 11.0)
    assert incomplete.missing == [] and incomplete.notes()[1].host == "b"
    store.complete(incomplete, lambda state, _: state)
    found = store.newest()
    assert found is not None and found[0] == 10 and told == [10]
    assert [float(found[1]["ranks"][rank]["own"][0]) for rank in (0, 1)] == [10.0, 11.0]
    assert not incompletes(store.folder)
    store.close()


def test_a_save_of_an_earlier_step_removes_what_was_rolled_back(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=1)
    save(store, 30, token=1)
    save(store, 20, token=2)
    assert [each.step for each in incompletes(store.folder)] == [20]
    store.close()


def test_a_later_one_stays_when_an_earlier_one_becomes_whole(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=1)
    first = save(store, 10, token=1)
    save(store, 20, token=2)
    bring(first, 1.0)
    store.complete(first, lambda state, _: state)
    assert store.newest_step() == 10 and [each.step for each in store.coming()] == [20]
    store.close()
    again = CheckpointStore(tmp_path / "checkpoints", keep=1)
    again.save(15, {"model": {"a": torch.ones(3)}}, background=False)  # a process that could not go on from step 20
    assert not incompletes(again.folder), "another history has begun"
    again.close()


def test_parts_of_all_ranks_of_a_machine_are_removed_but_for_those_that_are_named(tmp_path: Path) -> None:
    home, other = HomeParts(tmp_path, rank=1), HomeParts(tmp_path, rank=2)
    home.folder.mkdir()
    paths = [each.path(token) for each in (home, other) for token in (1, 2)]
    for path in paths:
        path.touch()
        path.with_suffix(".sha256").touch()
    home.keep_only({2})
    assert [path.exists() for path in paths] == [False, True, True, True]
    home.keep_only({2}, of_all=True)
    assert [path.exists() for path in paths] == [False, True, False, True]
    assert len(list(home.folder.iterdir())) == 4


def test_what_was_given_up_while_its_save_waited_is_not_completed_by_this_process(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=1)
    folder = store.room_for_parts(1)
    writer = PartWriter()
    writer.write({folder / part_file(0): part_of(0, 1.0)})
    writer.wait()
    arriving = Arriving(folder, [part_file(0)], lambda state, _: state, lacking=lacking(1))
    with store._changes:  # another one is being completed
        store.save(10, {"model": {"a": torch.ones(3)}}, arriving=arriving)
        store.give_up_arriving()
    store.wait()
    assert [each.step for each in incompletes(store.folder)] == [10] and store.coming() == []
    store.close()


def test_a_part_that_was_changed_after_it_came_is_missing_again(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=1)
    incomplete = save(store, 10, token=1)
    bring(incomplete, 11.0)
    assert incomplete.drop_changed() == [] and incomplete.missing == []
    with incomplete.arrived(1).open("r+b") as file:
        file.write(b"x")
    assert incomplete.drop_changed() == [1] and incomplete.missing == [1]
    assert incompletes(store.folder), "it stays for a start that has the part"
    store.close()


def test_a_base_that_it_names_stays(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=1)
    store.save(5, {"n": 5}, background=False)
    incomplete = save(store, 10, token=1, base=BaseState({"b"}, {"model": {"b": torch.ones(2)}}))
    assert incomplete.base and files.unnamed_bases(store.folder) == []
    store.close()
