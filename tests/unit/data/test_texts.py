"""Folders of text files: a class each, or one long text."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.config import DataConfig
from echelon.core.errors import UserError
from echelon.data import Source, open_data
from echelon.data.sources import kind_of
from echelon.data.sources.texts import Texts
from tests.unit.data.images import make_image

WORDS = {"bad": ("poor", "sad"), "good": ("fine", "nice")}


def make_texts(folder: Path, part: str = "", per_class: int = 8) -> Path:
    """Write texts of two classes."""
    for label, words in WORDS.items():
        (folder / part / label).mkdir(parents=True)
        for i in range(per_class):
            (folder / part / label / f"{i}.txt").write_text(f"it was {words[i % 2]} {part or 'as ever'} " * (1 + i % 4))
    return folder


def opened(folder: Path, task: str = "auto", **settings: object) -> Source:
    config = DataConfig(source=str(folder), root=str(folder.parent / "cache"), context=16, **settings)  # type: ignore[arg-type]
    return open_data(config, 0, task)


def decoded(source: Source, part: str, i: int) -> str:
    ids, _ = getattr(source, part)[i]
    tokeniser = source.info.tokeniser
    assert tokeniser is not None
    return tokeniser.decode((ids["input_ids"] if isinstance(ids, dict) else ids).tolist())


def joined(source: Source, part: str) -> str:
    return "".join(decoded(source, part, i) for i in range(len(getattr(source, part))))


def test_a_text_is_of_the_class_of_its_folder_and_parts_stay_apart(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    for part, count in (("train", 8), ("val", 3), ("test", 2)):
        make_texts(folder, part, count)
    source = opened(folder)
    assert source.info.classes == ("bad", "good") and source.info.class_counts == (8, 8)
    assert source.test is not None
    for part, count in (("train", 16), ("evaluation", 6), ("test", 4)):
        data = getattr(source, part)
        assert len(data) == count
        for i in range(count):
            text = decoded(source, part, i)
            assert int(data[i][1]) == ("fine" in text or "nice" in text), text
            assert ("val" in text, "test" in text) == (part == "evaluation", part == "test")


def test_without_a_part_to_validate_by_the_test_set_is_none(tmp_path: Path) -> None:
    folder = make_texts(make_texts(tmp_path / "texts", "train", 20), "test", 2)
    source = opened(folder)
    assert (source.info.train_size, source.info.eval_size) == (36, 4)
    assert any("never by the test set" in note for note in source.notes)


def test_for_a_language_model_a_part_is_one_text_and_its_end_is_held_out(tmp_path: Path) -> None:
    folder = make_texts(tmp_path / "texts")
    whole = opened(folder, "language_modelling", holdout=0.25)
    held = joined(whole, "evaluation")
    assert decoded(whole, "train", 0).startswith("it was poor") and "nice" in held and "poor" not in held
    apart = make_texts(make_texts(tmp_path / "apart", "train"), "val", 4)
    source = opened(apart, "language_modelling")
    assert "train" in joined(source, "train") and "train" not in joined(source, "evaluation")
    assert "held out" not in source.notes[0]


@pytest.mark.parametrize("other", ["readme", "train-readme", "captions", "hidden"])
def test_images_with_a_text_beside_them_stay_images(tmp_path: Path, other: str) -> None:
    for label in ("cat", "dog"):
        make_image(tmp_path / "train" / label / "1.jpg", (8, 8), seed=1)
    beside = {"readme": "a.txt", "train-readme": "train/a.txt", "captions": "train/cat/1.txt", "hidden": ".a/b/1.txt"}
    (tmp_path / beside[other]).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / beside[other]).write_text("about")
    assert not isinstance(kind_of(str(tmp_path)), Texts)


def test_what_cannot_be_used_is_refused_in_words(tmp_path: Path) -> None:
    folder = make_texts(tmp_path / "texts")
    with pytest.raises(UserError, match="is a folder of text files, for --task text-classification or language-mod"):
        opened(folder, "regression")
    (folder / "bad" / "0.txt").write_bytes(b"caf\xe9")
    with pytest.raises(UserError, match=r"bad/0.txt: it is not UTF-8 \(byte 3\): convert it"):
        opened(folder)
    with pytest.raises(UserError, match="there is test/ but no train/ beside it"):
        opened(make_texts(tmp_path / "only", "test"))
    for file in folder.rglob("*.txt"):
        file.write_text(" \n")
    with pytest.raises(UserError, match="all texts to train on are empty"):
        opened(folder)
