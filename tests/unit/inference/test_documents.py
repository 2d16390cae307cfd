"""Runs of text files predict whole files, and texts that are handed over."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from echelon.config import DataConfig
from echelon.core.errors import UserError
from echelon.inference import Lines, Text, samples
from echelon.inference.samples import samples_of
from echelon.tasks.base import Encoding
from tests.unit.data.test_texts import make_texts, opened


def _trained(folder: Path, follow_links: bool = False) -> Any:
    """Return what a run of a folder of texts has trained, without a model."""
    config = SimpleNamespace(data=DataConfig(follow_links=follow_links))
    task = SimpleNamespace(encoding=Encoding.TEXT)
    return SimpleNamespace(info=opened(folder).info, task=task, folder=folder.parent, config=config)


def test_a_file_is_one_text_by_its_name_and_a_text_from_elsewhere_names_none(tmp_path: Path) -> None:
    folder = make_texts(tmp_path / "texts")
    trained = _trained(folder)
    file = folder / "bad" / "0.txt"
    file.write_text("it was\n\npoor")
    found = samples_of(trained, [str(file), str(folder / "good"), "it was " * 300, Text(str(file))])
    assert found.names[0] == str(file) and found.names[-1] == str(file)
    assert len(found.names) == 1 + 8 + 2
    ids = [found.source.evaluation[i][0]["input_ids"] for i in (0, len(found.names) - 1)]
    whole, name = (trained.info.tokeniser.decode(each.tolist()).split() for each in ids)
    assert whole == ["it", "was", "poor"] and name != whole
    with pytest.raises(UserError, match="are text files: give paths"):
        samples_of(trained, [{"text": "it was"}])


def test_lines_of_a_file_are_those_that_parallel_text_has(tmp_path: Path) -> None:
    file = tmp_path / "new.txt"
    file.write_bytes("\ufeffone\u2028and\x0con\r\n\r\ntwo".encode())
    tokeniser = SimpleNamespace(encode=lambda texts, most=None: [[len(text)] for text in texts])
    info = SimpleNamespace(rate=0, columns=(), tokeniser=tokeniser, marks=SimpleNamespace(end=0))
    task = SimpleNamespace(encoding=Encoding.TEXT_PAIRS)
    trained: Any = SimpleNamespace(info=info, task=task, folder=tmp_path, config=SimpleNamespace(data=DataConfig()))
    assert samples_of(trained, [file, Text("read new.txt")]).names == ["one\u2028and\x0con", "two", "read new.txt"]
    assert samples_of(trained, [Lines("one\r\n\nnew.txt\n")]).names == ["one", "new.txt"]


def test_a_column_of_texts_keeps_what_is_zero(tmp_path: Path) -> None:
    tokeniser = SimpleNamespace(encode=lambda texts, most=None: [[len(text)] for text in texts])
    info = SimpleNamespace(rate=0, columns=("text",), tokeniser=tokeniser, marks=None)
    task = SimpleNamespace(encoding=Encoding.TEXT)
    trained: Any = SimpleNamespace(info=info, task=task, folder=tmp_path, config=SimpleNamespace(data=DataConfig()))
    assert samples_of(trained, [{"text": 0}, {"text": None}, {"text": 7}]).names == ["0", "", "7"]
    (tmp_path / "digits.csv").write_text("text\n0012\n1.50\n")
    assert samples_of(trained, [tmp_path / "digits.csv"]).names == ["0012", "1.50"]


def test_rows_of_several_types_are_a_table_and_what_is_no_value_is_named() -> None:
    rows = [{"x": 1}, {"x": "2.5", "y": 2**70}, {"x": None, "y": float("nan")}]
    table = samples._table(rows, ("x", "y"))
    assert table["x"].to_pylist() == ["1", "2.5", None] and table["y"].to_pylist()[0] is None
    frame = pd.DataFrame({"x": [1, "2.5", None], "z": [1.0, float("nan"), 3.0]})
    assert samples._table(frame, ("x",)).to_pydict() == {"x": ["1", "2.5", None], "z": [None] * 3}
    beside = [{"x": 1, "tags": [1]}, {"x": 2, "tags": "a"}]
    assert samples._table(beside, ("x",))["x"].to_pylist() == [1, 2]
    with pytest.raises(UserError, match="row 1: column x has"):
        samples._table([{"x": [1]}], ("x",))
    for value, why in ([1], "no number and no string"), ("a\ud800", "character 2 is half of a pair"):
        with pytest.raises(UserError, match=f"row 2: column x .*{why}"):
            samples._table([{"x": 1}, {"x": value}], ("x",))


def test_a_text_that_is_no_unicode_is_refused_by_its_place(tmp_path: Path) -> None:
    folder = make_texts(tmp_path / "texts")
    with pytest.raises(UserError, match="text 2 is no Unicode text"):
        samples_of(_trained(folder), [Text("good"), Text("bad \ud800")])


def test_links_in_a_folder_of_samples_neither_loop_nor_leave_it_unsaid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_texts(tmp_path / "texts")
    (tmp_path / "secret.txt").write_text("it was secret")
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "a.txt").symlink_to(folder / "good" / "0.txt")
    (tmp_path / "new" / "b.txt").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(UserError, match=r"2 links lead out of the folder, the first one .*--follow-links"):
        samples_of(_trained(folder), str(tmp_path / "new"))
    assert len(samples_of(_trained(folder, follow_links=True), str(tmp_path / "new")).names) == 2
    assert "2 links lead out of the folder" in capsys.readouterr().err
    trained = _trained(folder)
    (folder / "good" / "again").symlink_to(".")
    with pytest.raises(UserError, match="leads back to"):
        samples_of(trained, str(folder / "good"))
