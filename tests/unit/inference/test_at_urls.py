"""Samples at URLs are those of the files, called by their URLs; a text that speaks of a URL stays a text."""

from __future__ import annotations

import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from echelon.config import DataConfig
from echelon.core.errors import UserError
from echelon.data import by_url
from echelon.inference import Address, Text
from echelon.inference.samples import samples_of
from echelon.storage.url import open_store
from echelon.tasks.base import Encoding


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(by_url, "_in_use", {})
    return f"memory://{uuid.uuid4().hex}/new"


def _trained(root: Path, encoding: Encoding = Encoding.AUTO, **info: Any) -> Any:
    """Return what a run has trained, without a model."""
    known = {"rate": 0, "columns": (), "tokeniser": None, "mean": (), "marks": None, **info}
    config = SimpleNamespace(data=DataConfig(root=str(root)))
    task = SimpleNamespace(encoding=encoding)
    return SimpleNamespace(info=SimpleNamespace(**known), task=task, folder=root, config=config)


def test_images_below_a_url_and_one_by_its_name(tmp_path: Path, url: str) -> None:
    store = open_store(url)
    for name, value in {"a.png": 10, "deep/b.PNG": 20, ".hidden/c.png": 30}.items():
        file = tmp_path / "image.png"
        Image.new("L", (4, 4), value).save(file)
        store.put(name, file)
    store.put("labels.csv", b"a,b")
    trained = _trained(tmp_path / "root", mean=(0.5,))
    found = samples_of(trained, [url, Address(f"{url}/a.png")])
    assert list(found.names) == [f"{url}/a.png", f"{url}/deep/b.PNG", f"{url}/a.png"]
    assert [Image.open(file).getpixel((0, 0)) for file in found.files] == [10, 20, 10]
    with pytest.raises(UserError, match=r"there are no files that end in \.jpg"):
        samples_of(trained, f"{url}/deep/deeper")
    with pytest.raises(UserError, match=r"there is no b\.png at"):
        samples_of(trained, f"{url}/b.png")


def test_lines_of_a_text_and_texts_that_speak_of_one(tmp_path: Path, url: str) -> None:
    open_store(url).put("new.txt", b"one\ntwo\n")
    tokeniser = SimpleNamespace(encode=lambda texts: [[len(text)] for text in texts])
    trained = _trained(tmp_path, Encoding.TEXT_PAIRS, tokeniser=tokeniser, marks=SimpleNamespace(end=0))
    texts = [f"{url}/new.txt", f"see {url}", f"{url} is down", Text(f"{url}/new.txt")]
    assert samples_of(trained, texts).names == ["one", "two", *texts[1:]]


def test_arrays_are_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(UserError, match="samples are arrays, which are not read by URL"):
        samples_of(_trained(tmp_path), url)
