"""Sound files: their spectrograms, folders of them, and batches."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

import echelon
from echelon.config import DataConfig
from echelon.config.schema import ModelConfig
from echelon.core.errors import UserError
from echelon.core.features import FeatureChoice
from echelon.data import EvalLoader, LoaderConfig, Shard, TrainLoader, open_data
from echelon.data.labelled_files import FileNames, LabelledFiles
from echelon.data.sound_features import BANDS, frame_count, log_mel, mel_filters, open_features
from echelon.data.sounds import SoundFiles, SoundRows, measured
from echelon.models import ModelInput, build_model

RATE = 8000


def make_sounds(root: Path, parts: tuple[str, ...] = ("",), per_class: int = 8, rate: int = RATE) -> Path:
    """Write beeps of two pitches, of different lengths; part by part, one folder a class."""
    numbers = np.random.default_rng(0)
    for part in parts:
        for name, hertz in (("high", 1500), ("low", 300)):
            folder = root / part / name
            folder.mkdir(parents=True)
            for i in range(per_class):
                seconds = np.arange(int(rate * numbers.uniform(0.1, 0.4))) / rate
                wave = np.sin(2 * np.pi * hertz * seconds) + 0.1 * numbers.normal(size=len(seconds))
                soundfile.write(folder / f"{i}.wav", 0.3 * wave, rate)
    return root


def settings(root: Path, **data: object) -> LoaderConfig:
    config = DataConfig(**{"source": str(root), "loaders": 0, "batch_size": 6, **data})  # type: ignore[arg-type]
    return LoaderConfig(config, seed=0, device=torch.device("cpu"))


def test_filters_are_those_of_transformers() -> None:
    audio_utils = pytest.importorskip("transformers.audio_utils")
    theirs = audio_utils.mel_filter_bank(129, BANDS, 0.0, RATE / 2, RATE, mel_scale="htk")
    assert np.allclose(mel_filters(129, BANDS, RATE), theirs.T, atol=1e-4)


def test_a_spectrogram_shows_the_pitch() -> None:
    wave = torch.sin(2 * torch.pi * 1000 * torch.arange(2000) / RATE)
    features = log_mel(wave, RATE)
    assert features.shape == (frame_count(2000, RATE), BANDS)
    centres = 2595 * np.log10(1 + 1000 / 700) / (2595 * np.log10(1 + RATE / 2 / 700)) * (BANDS + 1) - 1
    assert abs(int(features[10].argmax()) - centres) < 2
    assert abs(float(features.mean())) < 1e-5


@pytest.mark.parametrize("loaders", [0, 2])
def test_a_global_batch_does_not_depend_on_ranks_or_loaders(tmp_path: Path, loaders: int) -> None:
    source = open_data(settings(make_sounds(tmp_path)).data, 0)
    alone = TrainLoader(source, settings(tmp_path), Shard(0, 1))
    ranks = [TrainLoader(source, settings(tmp_path, loaders=loaders), Shard(rank, 2)) for rank in range(2)]
    try:
        for epoch in (0, 1):
            for wanted, *parts in zip(alone.epoch(epoch), *(rank.epoch(epoch) for rank in ranks), strict=True):
                for name in ("features", "mask"):
                    mine = [part.inputs[name][: len(part.targets)] for part in parts]  # none of what stands in
                    assert torch.equal(torch.cat(mine), wanted.inputs[name])
                lengths = wanted.inputs["mask"].sum(1)
                assert wanted.inputs["features"].shape == (len(lengths), int(lengths.max()), BANDS)
    finally:
        for each in (alone, *ranks):
            each.close()


def test_parts_of_a_folder(tmp_path: Path) -> None:
    source = open_data(DataConfig(source=str(make_sounds(tmp_path / "a", ("train", "test"), 10))), 0)
    assert (source.info.train_size, source.info.eval_size, len(source.test)) == (18, 2, 20)  # type: ignore[arg-type]
    assert source.info.task == "speech_classification" and source.info.classes == ("high", "low")
    source = open_data(DataConfig(source=str(make_sounds(tmp_path / "b", ("train", "val", "test")))), 0)
    assert (source.info.train_size, source.info.eval_size) == (16, 16) and source.test is not None
    source = open_data(DataConfig(source=str(make_sounds(tmp_path / "c"))), 0)
    assert (source.info.train_size, source.info.eval_size, source.test) == (13, 3, None)


def test_a_model_does_not_see_padding(tmp_path: Path) -> None:
    source = open_data(DataConfig(source=str(make_sounds(tmp_path))), 0)
    info = source.info
    model = build_model(ModelConfig("speech_cnn"), ModelInput(2, 1, 1, several=info.several)).eval()
    batch = next(iter(EvalLoader(source, settings(tmp_path), Shard(0, 1))))
    together = model(**batch.inputs)
    for row in range(len(together)):
        length = int(batch.inputs["mask"][row].sum())
        alone = model(batch.inputs["features"][row : row + 1, :length], batch.inputs["mask"][row : row + 1, :length])
        assert torch.allclose(alone[0], together[row], atol=1e-5)


def test_other_rates_are_resampled(tmp_path: Path) -> None:
    make_sounds(tmp_path)
    soundfile.write(tmp_path / "low" / "zz.flac", np.zeros((44100, 2)), 44100)
    source = open_data(DataConfig(source=str(tmp_path)), 0)
    sounds = source.train if "zz" in source.train.path(len(source.train) - 1) else source.evaluation  # type: ignore[attr-defined]
    assert isinstance(sounds, SoundFiles)
    last = len(sounds) - 1
    assert len(sounds[last][0]) == sounds.frames[last] == frame_count(RATE, RATE)


def test_files_that_are_no_sounds_are_named(tmp_path: Path) -> None:
    make_sounds(tmp_path)
    (tmp_path / "low" / "broken.wav").write_bytes(b"RIFFnothing")
    with pytest.raises(UserError, match=r"broken.wav: this is no sound that can be read"):
        open_data(DataConfig(source=str(tmp_path)), 0)


def test_numbers_that_are_not_finite_are_no_sound(tmp_path: Path) -> None:
    make_sounds(tmp_path)
    soundfile.write(tmp_path / "low" / "0.wav", np.full(RATE, np.nan, np.float32), RATE, subtype="FLOAT")
    source = open_data(DataConfig(source=str(tmp_path)), 0)
    with pytest.raises(UserError, match=r"0.wav: cannot be read \(its numbers are not finite"):
        for samples in (source.train, source.evaluation):
            list(EvalLoader(source, settings(tmp_path), Shard(0, 1), samples))


@pytest.mark.long
def test_sounds_are_learnt_and_the_worst_are_shown(tmp_path: Path) -> None:
    make_sounds(tmp_path / "beeps", ("train", "test"), 30)
    outcome = echelon.train(data=str(tmp_path / "beeps"), run=tmp_path / "run", workers=1, device="cpu", threads=1,
                            epochs=6)  # fmt: skip
    assert outcome.metrics["top1"] == 1.0 and outcome.summary["task"]["name"] == "speech_classification"
    assert outcome.summary["eval_samples"] == 60
    evaluation = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    worst = next(each for each in evaluation["sections"] if each["title"] == "Worst-predicted samples")
    assert worst["pictures"][0]["source"].startswith("data:image/")
    config = (tmp_path / "run" / "config.yaml").read_text()
    assert "adamw" in config and "batch_size: 32" in config


def test_a_readme_beside_class_folders_hides_no_sounds(tmp_path: Path) -> None:
    for root in (make_sounds(tmp_path / "whole"), make_sounds(tmp_path / "cut", ("Train", "Dev", "Test"))):
        for folder in (root, root / "Train"):
            if folder.is_dir():
                (folder / "README.md").write_text("what this is")
                (folder / "LICENSE").write_text("free")
        source = open_data(settings(root).data, 0)
        assert source.info.task == "speech_classification" and source.info.classes == ("high", "low")
    assert source.info.eval_size == 16 and source.test is not None


@pytest.mark.parametrize("name", ["Thumbs.db", "desktop.ini", "Checksums"])
def test_what_systems_leave_beside_sounds_hides_none(tmp_path: Path, name: str) -> None:
    root = make_sounds(tmp_path)
    (root / "high" / name).write_text("")
    for file in (root / "high").glob("*.wav"):
        file.rename(file.with_name(f"tone{file.name}"))  # behind the others
    assert open_data(settings(root).data, 0).info.task == "speech_classification"


def test_sounds_with_parts_but_nothing_to_train_on_are_refused(tmp_path: Path) -> None:
    root = make_sounds(tmp_path, ("val", "test"))
    with pytest.raises(UserError, match="there is test/ but no train/ beside it"):
        open_data(settings(root).data, 0)


def test_a_sound_whose_header_has_no_length_is_refused(tmp_path: Path) -> None:
    """As what an encoder wrote to a pipe: the number of samples is 0 in the header, which means unknown."""
    root = make_sounds(tmp_path)
    file = root / "high" / "z.flac"
    soundfile.write(file, np.zeros(RATE), RATE)
    data = bytearray(file.read_bytes())
    data[21] &= 0xF0
    data[22:26] = bytes(4)
    file.write_bytes(data)
    with pytest.raises(UserError, match=r"z.flac: its header does not say how long it is"):
        open_data(settings(root).data, 0)


def test_files_that_are_no_sounds_are_left_out_where_they_are_only_predicted(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "good.wav", np.sin(np.arange(RATE) / 9).astype(np.float32), RATE)
    soundfile.write(tmp_path / "empty.wav", np.zeros(0, np.float32), RATE)
    (tmp_path / "bad.wav").write_bytes(b"no sound at all")
    names = [str(tmp_path / f"{name}.wav") for name in ("bad", "good", "empty")]
    files = LabelledFiles("", FileNames(names), np.zeros(3, np.int64))
    rows = SoundRows(
        measured(files, open_features(FeatureChoice("log_mel")), RATE, keeps_unreadable=True), None, skip_bad=True
    )
    inputs = {name: np.zeros((3, *spec.shape), np.float32) for name, spec in rows.specs[0].items()}
    bad = rows.fill(0, np.arange(3), inputs, np.zeros(3, np.int64))
    assert [each.position for each in bad] == [0, 2] and bad[1].reason == "it is empty"
