"""What every task obeys after its training: exports are what was trained, and raw samples get predictions."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from PIL import Image

from echelon import api
from echelon.config import build
from echelon.core.errors import UserError
from echelon.run.defaults import with_task_defaults
from echelon.run.in_process import start_in_process
from echelon.run.resolve import launch_request
from echelon.tasks.base import Writing
from tests.ranks.task_data import MAKERS, Settings

pytestmark = pytest.mark.timeout(600)
ALIKE = {"multi_label", "masked_language_modelling"}  # to classification and text_classification: a CI makes do with it


def segmentation(folder: Path) -> Settings:
    """Bright squares on dark images, which are wider than high."""
    numbers = np.random.default_rng(0)
    for name in ("images", "masks"):
        (folder / "pixels" / name).mkdir(parents=True)
    for i in range(12):
        image, mask = np.full((24, 32, 3), 30, np.uint8), np.zeros((24, 32), np.uint8)
        top, left = numbers.integers(2, 12, 2)
        image[top : top + 9, left : left + 9], mask[top : top + 9, left : left + 9] = 220, 1
        Image.fromarray(image).save(folder / "pixels" / "images" / f"{i}.png")
        Image.fromarray(mask).save(folder / "pixels" / "masks" / f"{i}.png")
    return {"data.source": str(folder / "pixels"), "data.holdout": 0.3}


def translation(folder: Path) -> Settings:
    """Numbers in two languages."""
    english, german = ("one two three four five six", "eins zwei drei vier fünf sechs")
    pairs = [(i % 6, i * 5 % 6, i * i % 6) for i in range(60)]
    (folder / "pairs").mkdir()
    for suffix, words in (("en", english.split()), ("de", german.split())):
        lines = [" ".join(words[number] for number in pair) for pair in pairs]
        (folder / "pairs" / f"train.{suffix}").write_text("\n".join(lines) + "\n")
    return {"data.source": str(folder / "pairs"), "data.input": "en", "data.target": "de", "data.tokeniser": "bpe(300)"}


ALL = {**MAKERS, "segmentation": segmentation, "translation": translation}


def _first_files(settings: Settings, suffix: str) -> list[Path]:
    return sorted(Path(str(settings["data.source"])).rglob(f"*{suffix}"))[:3]


RAW: Mapping[str, Callable[[Settings], Any]] = {
    "classification": lambda settings: [{"a": 1.0, "b": 2.0}, {"a": -3.0, "b": None}],
    "image_classification": lambda settings: np.zeros((3, 1, 8, 8), np.uint8),
    "language_modelling": lambda settings: ["the cat", "a dog saw the mat and the cat and the dog and the far mat"],
    "masked_language_modelling": lambda settings: ["the [MASK] sat"],
    "multi_label": lambda settings: [{"b": 1.0, "a": 2.0}],
    "recommendation": lambda settings: [{"user": 1, "film": 2}, {"user": 999, "film": 2}],
    "regression": lambda settings: [{"a": 1.0, "b": 2.0, "more": "x"}],
    "segmentation": lambda settings: _first_files(settings, ".png"),
    "speech_classification": lambda settings: _first_files(settings, ".wav"),
    "speech_recognition": lambda settings: _first_files(settings, ".wav"),
    "text_classification": lambda settings: ["the cat", "", "a word that nobody knows: qwertz"],
    "translation": lambda settings: ["one two", "six"],
}


def _trained(task: str, folder: Path) -> tuple[Path, Settings]:
    settings = ALL[task](folder)
    run = folder / "run"
    limits = {"training.max_steps": 2, "launch.workers": 1, "training.device": "cpu", "data.batch_size": 8}
    resolved = build(None, {**limits, "run": str(run), "task": task.replace("_", "-"), **settings})
    config = with_task_defaults(resolved, None, True).config
    assert start_in_process(launch_request(config), None).status == "completed"
    return run, settings


@pytest.mark.parametrize(
    "task",
    [pytest.param(task, marks=getattr(pytest.mark, "slow" if task in ALIKE else "long")) for task in sorted(ALL)],
)
def test_a_run_is_exported_and_predicts_raw_samples(task: str, tmp_path: Path) -> None:
    run, settings = _trained(task, tmp_path)
    samples = RAW[task](settings)
    rows = api.predict(run, samples, masks=tmp_path / "masks", device="cpu", writing=Writing(most_tokens=5))
    assert len(rows) == len(samples)
    for row in rows:
        json.dumps(row.plain(), allow_nan=False)
        row.flat()
    for name in ("weights.safetensors", "program.pt2", "graph.onnx"):
        exported = api.export(run, tmp_path / name)
        assert exported.agreement is not None and exported.agreement.samples > 0
        assert exported.agreement.difference <= 1e-4 and exported.path.is_file()
    metadata = {each.key: each.value for each in onnx.load(tmp_path / "graph.onnx").metadata_props}
    assert metadata["task"] == task
    source = Path(str(settings["data.source"]))
    if source.exists():  # what a run keeps of its data is enough to go on predicting
        source.rename(tmp_path / "gone")
        if task not in ("segmentation", "speech_classification", "speech_recognition"):
            again = api.predict(run, samples, device="cpu", writing=Writing(most_tokens=5))
            assert [row.plain() for row in again] == [row.plain() for row in rows]


@pytest.mark.long
def test_an_export_that_is_another_function_is_refused_and_not_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from echelon.inference.exports.onnx_file import OnnxFile

    run, _ = _trained("image_classification", tmp_path)
    write = OnnxFile.write

    def write_damaged(self: OnnxFile, trained: Any, path: Path, example: Any) -> None:
        """Write the graph with one weight changed."""
        write(self, trained, path, example)
        graph = onnx.load(path)
        weight = next(each for each in graph.graph.initializer if each.name.endswith("3.weight"))
        values = onnx.numpy_helper.to_array(weight).copy()
        values[0] += 1.0
        weight.CopyFrom(onnx.numpy_helper.from_array(values, weight.name))
        onnx.save(graph, path)

    monkeypatch.setattr(OnnxFile, "write", write_damaged)
    with pytest.raises(UserError, match=r"not what was trained.*first layer that differs is 3$"):
        api.export(run, tmp_path / "graph.onnx")
    assert not list(tmp_path.glob("*.onnx")) and not list(tmp_path.glob(".*.onnx"))


@pytest.mark.long
def test_mistakes_are_refused_in_one_line(tmp_path: Path) -> None:
    run, _ = _trained("regression", tmp_path)
    for samples, words in (
        ([{"a": 1.0}], "no column 'b'"),
        (["x.png"], "rows of a table with a, b"),
        ([{"a": "far", "b": 1}], "column a"),
        ([], "nothing to predict"),
        ([tmp_path / "none.csv"], "none.csv"),
    ):
        with pytest.raises(UserError, match=words) as refusal:
            api.predict(run, samples)
        assert "\n" not in str(refusal.value)
    with pytest.raises(UserError, match="none of transformers: write a file"):
        api.export(run, tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


@pytest.mark.long
def test_a_first_batch_of_nothing_but_a_bad_image_is_passed_over(tmp_path: Path) -> None:
    numbers = np.random.default_rng(0)
    for i, part in enumerate(["train"] * 8 + ["val"] * 4):
        path = tmp_path / "images" / part / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(numbers.integers(0, 255, (16, 16, 3), np.uint8)).save(path)
    (tmp_path / "images" / "val" / "a" / "10.png").write_bytes(b"?")  # the first one by name
    settings = {
        "data.source": str(tmp_path / "images"), "data.on_bad_image": "skip", "data.eval_batch_size": 1,
        "training.max_steps": 2, "launch.workers": 1, "training.device": "cpu", "data.batch_size": 4,
        "model.name": "small_cnn", "run": str(tmp_path / "run"),
    }  # fmt: skip
    config = with_task_defaults(build(None, settings), None, True).config
    assert start_in_process(launch_request(config), None).status in ("completed", "stopped")
    exported = api.export(tmp_path / "run", tmp_path / "weights.safetensors")
    assert exported.agreement is not None and exported.agreement.samples == 3
