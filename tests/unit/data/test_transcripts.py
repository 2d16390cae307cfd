"""Sounds with transcripts: the layouts of folders, what is refused, and batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from echelon.config import DataConfig
from echelon.core.errors import UserError
from echelon.data import EvalLoader, LoaderConfig, Shard, Source, TrainLoader, open_data
from echelon.data.sounds import SoundFiles
from echelon.data.sources import kind_of
from echelon.tasks.base import NO_TARGET

RATE = 4000
HERTZ = {"a": 300, "b": 600, "c": 1000, "d": 1600}


def say(file: Path, text: str, seconds: float = 0.1) -> None:
    """Write a sound in which each letter is a tone, and a space is silence; all last equally long."""
    file.parent.mkdir(parents=True, exist_ok=True)
    time = np.arange(int(RATE * seconds)) / RATE
    fade = np.minimum(1, 4 * np.minimum(time, time[::-1]) / seconds)  # so that of two equal letters there are two
    waves = [np.sin(2 * np.pi * HERTZ.get(letter, 0) * time) * fade for letter in text]
    soundfile.write(file, 0.3 * np.concatenate([np.zeros(200), *waves, np.zeros(200)]), RATE)


def spoken(count: int, seed: int = 0, words: int = 3) -> list[str]:
    """Return texts of one to `words` words of one to three letters."""
    numbers = np.random.default_rng(seed)

    def word() -> str:
        """Return letters."""
        return "".join(numbers.choice(list(HERTZ), numbers.integers(1, 4)))

    return [" ".join(word() for _ in range(numbers.integers(1, words + 1))) for _ in range(count)]


def make_transcribed(root: Path, parts: tuple[str, ...] = ("",), count: int = 10) -> Path:
    """Write sounds with a text beside each, part by part."""
    for seed, part in enumerate(parts):
        for i, text in enumerate(spoken(count, seed)):
            say(root / part / f"{i:03}.wav", text)
            (root / part / f"{i:03}.txt").write_text(f"{text}\n")
    return root


def opened(root: Path, **data: object) -> Source:
    return open_data(DataConfig(**{"source": str(root), **data}), 0)  # type: ignore[arg-type]


def texts(source: Source, samples: object) -> list[str]:
    """Return the transcripts of a part, from their ids."""
    assert isinstance(samples, SoundFiles) and source.info.tokeniser is not None
    return [source.info.tokeniser.decode(samples[i][1].tolist()) for i in range(len(samples))]


def test_a_text_beside_each_sound(tmp_path: Path) -> None:
    source = opened(make_transcribed(tmp_path / "a"))
    info = source.info
    assert (info.task, info.train_size, info.eval_size, source.test) == ("speech_recognition", 8, 2, None)
    assert sorted(texts(source, source.train) + texts(source, source.evaluation)) == sorted(spoken(10))
    assert info.targets.count == 6 and "the blank, which is the last" in source.notes[0]
    source = opened(make_transcribed(tmp_path / "b", ("train", "test")))
    assert (source.info.train_size, source.info.eval_size, len(source.test)) == (9, 1, 10)  # type: ignore[arg-type]
    assert texts(source, source.test) == spoken(10, 1)
    source = opened(make_transcribed(tmp_path / "c", ("train", "dev")))
    assert (source.info.train_size, source.info.eval_size, source.test) == (10, 10, None)


def test_lists_of_librispeech(tmp_path: Path) -> None:
    (tmp_path / "README.TXT").write_text("about it")
    for part in ("train-clean-100", "train-other-500", "dev-clean", "test-clean"):
        folder = tmp_path / part / "84" / "121123"
        for i, text in enumerate(spoken(3)):
            say(folder / f"84-121123-000{i}.flac", text)
        lines = [f"84-121123-000{i} {text}" for i, text in enumerate(spoken(3))]
        (folder / "84-121123.trans.txt").write_text("\n".join(lines))
    source = opened(tmp_path)
    assert (source.info.train_size, source.info.eval_size) == (6, 3)
    assert texts(source, source.test) == spoken(3) and texts(source, source.train) == spoken(3) * 2


def test_texts_are_put_in_one_form_and_unknown_characters_are_said(tmp_path: Path) -> None:
    make_transcribed(tmp_path, ("train", "val"))
    (tmp_path / "val" / "003.txt").write_bytes("  u\u0308ber\n\tall ".encode("utf-8-sig"))
    (tmp_path / "val" / "004.txt").write_text("")
    source = opened(tmp_path)
    assert texts(source, source.evaluation)[3] == "\ufffdb\ufffd\ufffd a\ufffd\ufffd"
    assert source.notes[1:] == (
        "1 transcripts are empty",
        "4 characters are in no training transcript and cannot be recognised: e l r \u00fc",
    )


def test_what_lacks_a_transcript_is_refused(tmp_path: Path) -> None:
    make_transcribed(tmp_path / "a")
    for number in ("004", "007"):
        (tmp_path / "a" / f"{number}.txt").unlink()
    with pytest.raises(UserError, match=r"004.wav: it has no transcript, nor have 1 other sounds: write .* to 004.txt"):
        opened(tmp_path / "a")
    (tmp_path / "a" / "004.txt").write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"004.txt: it is not UTF-8 \(byte 0\)"):
        opened(tmp_path / "a")
    make_transcribed(tmp_path / "b", count=2)
    for file in (tmp_path / "b").glob("*.txt"):
        file.write_text("\n")
    with pytest.raises(UserError, match="its transcripts are empty"):
        opened(tmp_path / "b")


def test_folders_without_transcripts_are_of_classes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        for i in range(3):
            say(tmp_path / name / f"{i}.wav", name)
    assert type(kind_of(str(tmp_path))).__name__ == "Sounds"
    with pytest.raises(UserError, match="its sounds have no transcripts: write what is said"):
        open_data(DataConfig(source=str(tmp_path)), 0, "speech-recognition")
    for i in range(3):
        (tmp_path / "a" / f"{i}.txt").write_text("a")
        (tmp_path / "b" / f"{i}.txt").write_text("b")
    assert opened(tmp_path).info.task == "speech_recognition"
    assert open_data(DataConfig(source=str(tmp_path)), 0, "speech-classification").info.classes == ("a", "b")
    with pytest.raises(UserError, match="--task regression is for others"):
        open_data(DataConfig(source=str(tmp_path)), 0, "regression")


def test_a_table_of_paths_and_texts(tmp_path: Path) -> None:
    make_transcribed(tmp_path / "clips")
    rows = [f"clips/{i:03}.wav,{text},x" for i, text in enumerate(spoken(10))]
    (tmp_path / "train.csv").write_text("\n".join(["path,text,speaker", *rows[:7]]))
    (tmp_path / "test.csv").write_text("\n".join(["path,text,speaker", *rows[7:]]))
    given = {"input": "path", "target": "text"}
    source = open_data(DataConfig(str(tmp_path), **given), 0, "speech-recognition")  # type: ignore[arg-type]
    assert (source.info.train_size, source.info.eval_size) == (6, 1)
    assert texts(source, source.test) == spoken(10)[7:]
    alone = open_data(DataConfig(str(tmp_path / "train.csv"), **given), 0, "speech-recognition")  # type: ignore[arg-type]
    assert sorted(texts(alone, alone.train) + texts(alone, alone.evaluation)) == sorted(spoken(10)[:7])
    with pytest.raises(UserError, match="--input PATH --target TEXT"):
        open_data(DataConfig(str(tmp_path), target="text"), 0, "speech-recognition")
    (tmp_path / "clips" / "002.wav").unlink()
    with pytest.raises(UserError, match=r"column path names .*, and there is no file"):
        open_data(DataConfig(str(tmp_path), **given), 0, "speech-recognition")  # type: ignore[arg-type]


def test_a_table_of_paths_that_grows_under_a_run_goes_on_with_the_rows_that_it_knows(tmp_path: Path) -> None:
    make_transcribed(tmp_path / "clips")
    rows = [f"clips/{i:03}.wav,{text}" for i, text in enumerate(spoken(10))]
    config = DataConfig(str(tmp_path / "t.csv"), input="path", target="text")
    run = tmp_path / "run"
    run.mkdir()

    def opened_with(lines: list[str]) -> Source:
        """Return the table of these rows as the run sees it."""
        (tmp_path / "t.csv").write_text("\n".join(["path,text", *lines]))
        return open_data(config, 0, "speech-recognition", run)

    before = opened_with(rows[:8])
    assert before.sample_index is not None and before.sample_index.can_grow
    before.sample_index.keep(run)
    grown = opened_with(rows)
    assert grown.sample_index is not None and grown.sample_index.added == 2
    assert texts(grown, grown.evaluation) == texts(before, before.evaluation)
    grown.sample_index.grown(epoch=1).keep(run)
    after = opened_with(rows)
    assert [stage.count for stage in after.info.stages] == [before.info.train_size, before.info.train_size + 2]
    assert texts(after, after.evaluation) == texts(before, before.evaluation)
    with pytest.raises(UserError, match="some of the run's 10 rows are not what they were"):
        opened_with(rows[::-1])


def test_the_sound_with_the_fewest_frames_for_its_labels_is_known(tmp_path: Path) -> None:
    for part, said in (("train", ("ab", "", "aab")), ("val", ("", "abc"))):
        for i, text in enumerate(said):
            say(tmp_path / part / f"{i}.wav", "abc")
            (tmp_path / part / f"{i}.txt").write_text(text)
    tight = opened(tmp_path).info.tightest
    assert tight is not None and (tight.name, tight.needed) == (str(tmp_path / "train" / "2.wav"), 4)
    (tmp_path / "val" / "0.txt").write_text("aabbc")
    tight = opened(tmp_path).info.tightest
    assert tight is not None and (tight.name, tight.needed) == (str(tmp_path / "val" / "0.wav"), 7)


@pytest.mark.parametrize("loaders", [0, 2])
def test_a_global_batch_does_not_depend_on_ranks_or_loaders(tmp_path: Path, loaders: int) -> None:
    source = opened(make_transcribed(tmp_path))

    def settings(loaders: int) -> LoaderConfig:
        return LoaderConfig(DataConfig(str(tmp_path), loaders=loaders, batch_size=5), 0, torch.device("cpu"))

    def units(targets: torch.Tensor) -> int:
        return int((targets != NO_TARGET).sum())

    alone = TrainLoader(source, settings(0), Shard(0, 1), units)
    ranks = [TrainLoader(source, settings(loaders), Shard(rank, 2), units) for rank in range(2)]
    held = EvalLoader(source, settings(loaders), Shard(0, 1))
    try:
        for wanted, *parts in zip(alone.epoch(0), *(rank.epoch(0) for rank in ranks), strict=True):
            assert torch.equal(torch.cat([part.targets for part in parts]), wanted.targets)
            assert {part.global_units for part in parts} == {units(wanted.targets)}
            assert wanted.targets.shape[1] == (wanted.targets != NO_TARGET).sum(1).max()
        assert sum(len(batch.targets) for batch in held) == 2
    finally:
        for each in (alone, *ranks, held):
            each.close()
