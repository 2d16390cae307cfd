"""One long text as windows of tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from echelon.config import DataConfig
from echelon.core.errors import UserError
from echelon.data import open_data
from echelon.data.sources.text_file import windows
from echelon.tasks.base import NO_TARGET


@pytest.mark.parametrize("tokens, context", [(2, 4), (9, 4), (10, 4), (8, 4), (100, 7)])
def test_each_token_but_the_first_is_a_target_once(tokens: int, context: int) -> None:
    ids = np.arange(1, tokens + 1)
    cut = windows(ids, context)
    assert cut.values.shape == cut.targets.shape == (-(-(tokens - 1) // context), context)
    flat, known = cut.targets.ravel(), cut.targets.ravel() != NO_TARGET
    assert flat[known].tolist() == ids[1:].tolist()
    assert (cut.values.ravel()[known] == flat[known] - 1).all(), "the token before it"


def test_the_last_part_is_held_out(tmp_path: Path) -> None:
    file = tmp_path / "long.txt"
    file.write_text("abcde" * 180 + "vwxyz" * 20)
    source = open_data(DataConfig(str(file), holdout=0.1, context=10, root=str(tmp_path)), seed=0)
    tokeniser = source.info.tokeniser
    assert tokeniser is not None and tokeniser.count == 6, "the alphabet is that of the training part"
    assert tokeniser.decode(source.train[0][0].tolist()) == "abcdeabcde"
    assert set(source.evaluation[0][0].tolist()) == {0}
    assert (source.info.train_size, source.info.eval_size) == (90, 10)
    assert source.info.task == "language_modelling" and "last 100 of the text are held out" in source.notes[0]


@pytest.mark.parametrize(
    "content, said", [(b"ab", "too few to train on"), (b"abc\xff" * 100, "it is not UTF-8 (byte 3): convert it")]
)
def test_a_text_that_cannot_be_used_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "long.txt"
    file.write_bytes(content)
    with pytest.raises(UserError) as refused:
        open_data(DataConfig(str(file), root=str(tmp_path)), 0)
    assert said in str(refused.value)
