"""Tiny data for every task: a function here, and the laws over tasks train a new one (`tests/laws/test_tasks.py`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from tests.unit.data.shapes import make_shapes
from tests.unit.data.test_parallel_text import make_parallel
from tests.unit.data.test_sounds import make_sounds
from tests.unit.data.test_transcripts import make_transcribed

Settings = Mapping[str, object]
"""Of the run, by dotted name: where the data is, its columns."""
WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "saw", "one", "dog", "run", "far")


def table(file: Path, header: str, rows: list[str]) -> Path:
    """Write a table; returns its file."""
    file.write_text("\n".join([header, *rows]) + "\n")
    return file


def _numbers(folder: Path, target: Callable[[float, float], str]) -> Path:
    draws = np.random.default_rng(0).normal(size=(96, 2)).round(3)
    return table(folder / "table.csv", "a,b,y", [f"{a},{b},{target(a, b)}" for a, b in draws])


def classification(folder: Path) -> Settings:
    """Two classes by the sign of a sum."""
    source = _numbers(folder, lambda a, b: "high" if a + b > 0 else "low")
    return {"data.source": str(source), "data.target": "y"}


def image_classification(folder: Path) -> Settings:
    """Digits of 8 x 8 pixels."""
    return {"data.source": "digits", "model.name": "mlp"}


def multi_label(folder: Path) -> Settings:
    """Two labels, each by the sign of a column."""
    source = _numbers(folder, lambda a, b: ("x|z" if b > 0 else "x") if a > 0 else "z")
    return {"data.source": str(source), "data.target": "y"}


def regression(folder: Path) -> Settings:
    """A sum with a product."""
    source = _numbers(folder, lambda a, b: f"{a + a * b:.4f}")
    return {"data.source": str(source), "data.target": "y"}


def recommendation(folder: Path) -> Settings:
    """Ratings that depend on the film."""
    rows = [f"{i * 7 % 12},{i * 5 % 9},{1 + i * 5 % 9 % 5}" for i in range(108)]
    source = table(folder / "ratings.csv", "user,film,stars", rows)
    return {"data.source": str(source), "data.input": "user,film", "data.target": "stars"}


def clicks(folder: Path) -> Settings:
    """Whether a user has clicked, by the film."""
    rows = [f"{i * 7 % 12},{i * 5 % 9},{int(i * 5 % 9 < 4)}" for i in range(108)]
    source = table(folder / "clicks.csv", "user,film,clicked", rows)
    return {"data.source": str(source), "data.input": "user,film", "data.target": "clicked"}


def interactions(folder: Path) -> Settings:
    """Films that a user has seen, in order, of those that lie beside the last one."""
    rows = [f"{user},{(user * 5 + step) % 30}" for user in range(12) for step in range(9)]
    source = table(folder / "seen.csv", "user,film", rows)
    return {"data.source": str(source), "data.input": "user,film", "data.target": ""}


def text_classification(folder: Path) -> Settings:
    """Texts of different lengths, whose last word is of their class."""
    rows = [
        f"{WORDS[i % 7]} {WORDS[i % 9]} {'mat ' * (i % 4)}{'dog' if i % 3 else 'cat'},{i % 3 > 0}" for i in range(96)
    ]
    source = table(folder / "texts.csv", "text,label", rows)
    return {"data.source": str(source), "data.input": "text", "data.target": "label", "data.tokeniser": "bpe(300)"}


def language_modelling(folder: Path) -> Settings:
    """Words in a pattern."""
    file = folder / "long.txt"
    file.write_text("\n".join(" ".join(WORDS[i * j % 12] for j in range(1, 7)) for i in range(120)))
    return {"data.source": str(file), "data.context": 16, "data.holdout": 0.1}


def masked_language_modelling(folder: Path) -> Settings:
    """The same words, some of them masked."""
    return language_modelling(folder)


def speech_classification(folder: Path) -> Settings:
    """Beeps of two pitches and different lengths."""
    return {"data.source": str(make_sounds(folder / "sounds", ("train", "val"), per_class=12))}


def speech_recognition(folder: Path) -> Settings:
    """Sounds with a text beside each."""
    return {"data.source": str(make_transcribed(folder / "spoken", ("train", "val"), 24))}


def segmentation(folder: Path) -> Settings:
    """Discs and squares, with a class for each pixel."""
    source = make_shapes(folder / "shapes", ("train", "val"), 24, sizes=(16,))
    return {"data.source": str(source), "data.image_size": 16}


def translation(folder: Path) -> Settings:
    """Sentences of few words, translated word by word."""
    source = make_parallel(folder / "pairs", {"train": 48, "val": 12})
    languages = {"data.input": "en", "data.target": "de"}
    return {"data.source": str(source), "data.tokeniser": "bpe(300)", **languages}


MAKERS: dict[str, Callable[[Path], Settings]] = {
    "classification": classification,
    "image_classification": image_classification,
    "language_modelling": language_modelling,
    "masked_language_modelling": masked_language_modelling,
    "multi_label": multi_label,
    "recommendation": recommendation,
    "regression": regression,
    "segmentation": segmentation,
    "speech_classification": speech_classification,
    "speech_recognition": speech_recognition,
    "text_classification": text_classification,
    "translation": translation,
}
"""For each task, by its file: what writes its data into a folder, and says the settings that find it."""
VARIANTS: dict[str, Callable[[Path], Settings]] = {
    "recommendation, clicks": clicks,
    "recommendation, ranking": interactions,
}
"""Other data of tasks that learn something else from it, by the task and what that is."""
NO_DATA = {"supervised": "it has no loss of its own: tests/ranks/test_own_parts.py trains it"}
