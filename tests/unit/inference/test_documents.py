"""Runs of text files predict whole files, and texts that are handed over."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from echelon.core.errors import UserError
from echelon.inference.samples import Text, samples_of
from echelon.tasks.base import Encoding
from tests.unit.data.test_texts import make_texts, opened


def test_a_file_is_one_text_by_its_name_and_a_text_from_elsewhere_names_none(tmp_path: Path) -> None:
    folder = make_texts(tmp_path / "texts")
    trained = SimpleNamespace(info=opened(folder).info, task=SimpleNamespace(encoding=Encoding.TEXT), folder=tmp_path)
    file = folder / "bad" / "0.txt"
    file.write_text("it was\n\npoor")
    found = samples_of(trained, [str(file), str(folder / "good"), "it was " * 300, Text(str(file))])  # type: ignore[arg-type]
    assert found.names[0] == str(file) and found.names[-1] == str(file)
    assert len(found.names) == 1 + 8 + 2
    ids = [found.source.evaluation[i][0]["input_ids"] for i in (0, len(found.names) - 1)]
    whole, name = (trained.info.tokeniser.decode(each.tolist()).split() for each in ids)
    assert whole == ["it", "was", "poor"] and name != whole
    with pytest.raises(UserError, match="are text files: give paths"):
        samples_of(trained, [{"text": "it was"}])  # type: ignore[arg-type]
