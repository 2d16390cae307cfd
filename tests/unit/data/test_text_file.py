"""One long text as windows of tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from echelon.config import DataConfig
from echelon.config.schema import ModelConfig
from echelon.core.errors import UserError
from echelon.data import open_data
from echelon.data.sources.text_file import MaskedWindows, windows
from echelon.models import build_model
from echelon.models.builtin.small_bert import SmallBERT
from echelon.tasks.base import NO_TARGET, TaskSettings
from echelon.tasks.registry import build_task
from echelon.trainer.inputs import model_input


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


def test_fifteen_percent_of_each_window_are_to_be_predicted_anew_in_each_epoch() -> None:
    context, count = 40, 10
    samples = MaskedWindows(np.arange(4 * 1000 * context - 33) % count, context, count, seed=3)

    def made(epoch: int, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs and targets."""
        inputs, targets = (np.empty((len(draws), context), np.int64) for _ in range(2))
        samples.fill(epoch, draws, inputs, targets)
        return inputs, targets

    everything = np.arange(len(samples))
    inputs, targets = made(1, everything)
    chosen, tokens = targets != NO_TARGET, (np.arange(inputs.size) % count).reshape(inputs.shape)
    assert chosen[:-1].sum(1).tolist() == [6] * (len(samples) - 1) and chosen[-1].tolist().count(True) == 1
    assert samples.unit_counts is not None and (samples.unit_counts == chosen.sum(1)).all(), (
        "known before they are drawn"
    )
    assert (inputs[-1, 7:] == count).all() and not chosen[-1, 7:].any(), "the last window has seven tokens"
    assert (targets[chosen] == tokens[chosen]).all() and (inputs[:-1][~chosen[:-1]] == tokens[:-1][~chosen[:-1]]).all()
    assert (inputs[chosen] == count).mean() == pytest.approx(0.8, abs=0.01)
    assert (inputs[chosen] == tokens[chosen]).mean() == pytest.approx(0.1 + 0.1 / count, abs=0.01)
    part = everything[5::7]
    assert all((a[part] == b).all() for a, b in zip((inputs, targets), made(1, part), strict=True)), "whoever makes it"
    assert ((made(2, everything)[1] != NO_TARGET) != chosen).any()


def test_a_masked_text_has_one_more_token_than_its_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("abcde" * 200)
    data = DataConfig(str(tmp_path / "long.txt"), holdout=0.1, context=10, root=str(tmp_path))
    source = open_data(data, 0, "masked-language-modelling")
    task = build_task("masked-language-modelling").fitted(source.info, TaskSettings())
    assert (source.info.inputs.count, task.outputs, source.info.eval_size) == (7, 6, 10)
    model = build_model(ModelConfig(), model_input(source.info, task))
    assert isinstance(model, SmallBERT)
    tokens, changed = source.train[0][0][None], source.train[0][0][None].clone()
    changed[0, -1] = (changed[0, -1] + 1) % 6
    assert not torch.equal(model(tokens)[0, 0], model(changed)[0, 0]), "a token sees those behind it"
    inputs, targets = source.train[0]
    assert task.units(targets[None]) == 2 and inputs.shape == targets.shape
