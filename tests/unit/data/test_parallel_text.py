"""Parallel text: files of two languages as pairs of ids, which files are which part, what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from echelon.config import DataConfig
from echelon.core.errors import UserError
from echelon.data import LoaderConfig, Shard, TrainLoader, open_data
from echelon.data.base import Source
from echelon.data.sources import kind_of
from echelon.data.sources.parallel_text import ParallelText, marks_of
from echelon.data.tokenisers import Characters
from echelon.tasks.base import NO_TARGET
from echelon.tasks.translation import Translation

WORDS = (("a", "ein"), ("red", "roter"), ("dog", "Hund"), ("cat", "Kater"), ("sees", "sieht"), ("small", "kleiner"))


def sentences(count: int, first: int = 0) -> tuple[list[str], list[str]]:
    """Return made-up sentences of 1 to 6 words, and their translations word by word."""
    chosen = [[WORDS[(i * j + j) % 6] for j in range(1, 2 + i % 6)] for i in range(first, first + count)]
    return tuple([" ".join(pair[side] for pair in row) for row in chosen] for side in (0, 1))  # type: ignore[return-value]


def make_parallel(folder: Path, parts: Mapping[str, int] = {"train": 40, "val": 10, "test": 7}) -> Path:
    """Write files of English and German; a part's sentences follow those of the part before."""
    folder.mkdir(parents=True, exist_ok=True)
    first = 0
    for stem, count in parts.items():
        for language, lines in zip(("en", "de"), sentences(count, first), strict=True):
            (folder / f"{stem}.{language}").write_text("\n".join(lines) + "\n", encoding="utf-8")
        first += count
    return folder


def opened(folder: Path, **settings: str) -> Source:
    """Open a folder from English to German, with a small vocabulary."""
    chosen = {"input": "en", "target": "de", "tokeniser": "bpe(300)", **settings}
    return open_data(DataConfig(str(folder), root=str(folder.parent / "data"), **chosen), seed=0)


def test_a_pair_is_source_and_target_with_their_marks(tmp_path: Path) -> None:
    source = opened(make_parallel(tmp_path / "pairs"))
    info, (english, german) = source.info, sentences(40)
    assert info.task == "translation" and info.marks is not None and info.tokeniser is not None
    decode, marks = info.tokeniser.decode, info.marks
    for i in (0, 5, 39):
        inputs, targets = source.train[i]
        given, wanted = inputs["decoder_input_ids"].tolist(), targets.tolist()
        assert inputs["input_ids"][-1] == wanted[-1] == marks.end and given[0] == marks.begin
        assert given[1:] == wanted[:-1], "the decoder is given what it was to predict before"
        assert decode(inputs["input_ids"][:-1].tolist()).strip() == english[i]
        assert decode(wanted[:-1]).strip() == german[i]
        assert inputs["attention_mask"].tolist() == [1] * len(inputs["input_ids"])
    assert (info.train_size, info.eval_size, len(source.test)) == (40, 10, 7)  # type: ignore[arg-type]


def test_batches_are_grouped_by_length_padded_and_know_their_tokens(tmp_path: Path) -> None:
    source = opened(make_parallel(tmp_path / "pairs", {"train": 60, "val": 5}))
    config = LoaderConfig(DataConfig(str(tmp_path), batch_size=6), 0, torch.device("cpu"))
    task = Translation().fitted(source.info, _settings())
    loaders = [TrainLoader(source, config, Shard(rank, 2), task.units) for rank in range(2)]
    lengths = []
    for first, second in zip(*(loader.epoch(0) for loader in loaders), strict=True):
        assert first.targets.shape[1:] == second.targets.shape[1:] == first.inputs["decoder_input_ids"].shape[1:]
        assert task.units(first.targets) + task.units(second.targets) == first.global_units == second.global_units
        padding = first.inputs["attention_mask"] == 0
        assert (first.inputs["input_ids"][padding] == 0).all()
        lengths += [int((row != NO_TARGET).sum()) for row in torch.cat([first.targets, second.targets])]
    spread = np.array(lengths).reshape(-1, 6)
    assert len(lengths) == 60 and (spread.max(1) - spread.min(1)).mean() < 2, "neighbours are of one length"


def _settings() -> object:
    from echelon.tasks.base import TaskSettings

    return TaskSettings()


def test_parts_are_found_by_name_and_else_held_out(tmp_path: Path) -> None:
    folder = make_parallel(tmp_path / "a", {"train": 20, "dev": 4, "test_2017": 6, "test_2016_flickr": 5, "testing": 3})
    source = opened(folder)
    assert (source.info.eval_size, len(source.test)) == (4, 5)  # type: ignore[arg-type]
    assert "the test set is test_2016_flickr, the first by name of test_2016_flickr, test_2017" in source.notes
    without = opened(make_parallel(tmp_path / "b", {"train": 30, "test": 6}))
    assert (without.info.train_size, without.info.eval_size) == (27, 3)
    assert any("3 of 30 training pairs are held out" in note for note in without.notes)
    assert opened(make_parallel(tmp_path / "c", {"train": 30}), holdout=0.2).info.eval_size == 6  # type: ignore[arg-type]


def test_lines_are_cut_at_line_feeds_alone_and_empty_pairs_are_left_out(tmp_path: Path) -> None:
    folder = make_parallel(tmp_path / "pairs", {"train": 4, "val": 2})
    (folder / "train.en").write_text("one\x85two\nthree\n\nfour\r\n", encoding="utf-8")
    source = opened(folder)
    assert source.info.train_size == 3 and any("train: 1 pairs are left out" in note for note in source.notes)


def test_a_tokeniser_without_marks_gets_two_behind_its_vocabulary(tmp_path: Path) -> None:
    marks, count = marks_of(Characters("abc"))
    assert (marks.begin, marks.end, count) == (4, 5, 6)
    info = opened(make_parallel(tmp_path / "pairs"), tokeniser="characters").info
    assert info.inputs["input_ids"].count == info.targets.count == info.tokeniser.count + 2


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"input": ""}, "is in de, en: say from which language to which, such as --input de --target en"),
        ({"target": "dee"}, "--target dee: .* has no train.dee: did you mean de"),
        ({"target": "en"}, "--input and --target are both en"),
    ],
)
def test_languages_that_are_not_there_are_refused(tmp_path: Path, settings: dict[str, str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        opened(make_parallel(tmp_path / "pairs"), **settings)


def test_files_that_do_not_match_are_refused(tmp_path: Path) -> None:
    folder = make_parallel(tmp_path / "pairs")
    config = DataConfig(str(folder), input="en", target="de", root=str(tmp_path))
    with pytest.raises(UserError, match="is parallel text, for --task translation, not language-modelling"):
        open_data(config, 0, task="language-modelling")
    (folder / "val.de").write_text("ein\n")
    with pytest.raises(UserError, match=r"val.en has 10 lines and val.de 1: line i of one must be"):
        opened(folder)
    (folder / "val.de").write_text((folder / "val.en").read_text() + "\n")
    with pytest.raises(UserError, match=r"of line i of the other; the last 1 line of val.de is empty$"):
        opened(folder)
    (folder / "val.de").write_bytes(b"\xff\n" * 10)
    with pytest.raises(UserError, match=r"val.de: it is not UTF-8 \(byte 0\)"):
        opened(folder)
    for language in ("en", "de"):
        (folder / f"train.{language}").write_text("\n \n")
    with pytest.raises(UserError, match="hold no pair of sentences"):
        opened(folder)


def test_only_a_folder_of_two_languages_is_of_this_kind(tmp_path: Path) -> None:
    folder = make_parallel(tmp_path / "pairs")
    assert isinstance(kind_of(str(folder)), ParallelText)
    (folder / "train.de").unlink()
    (folder / "train.txt").write_text("none")
    assert not isinstance(kind_of(str(folder)), ParallelText)
