"""Texts of classes: ids with a mask, a model to which padding is nothing, the worst texts in the report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from echelon.config import DataConfig
from echelon.config.schema import ModelConfig
from echelon.core.errors import UserError
from echelon.core.tokeniser import TokeniserChoice
from echelon.data.base import DataInfo, DataRequest
from echelon.data.columns import IDS, MASK, encode_texts
from echelon.data.preparation import USUAL
from echelon.models import ModelInput, build_model
from echelon.models.builtin.text_classifier import TextClassifier
from echelon.tasks.base import TaskSettings
from echelon.tasks.text_classification import TextClassification
from echelon.trainer.inputs import model_input

TEXTS = ["the cat sat", "a dog ran to the cat", "", "dogs and cats and dogs"]


def column(tmp_path: Path, texts: list[str] = TEXTS) -> object:
    preparation = replace(USUAL, tokeniser=TokeniserChoice("bpe", 300))
    return encode_texts(DataRequest(DataConfig("table", root=str(tmp_path)), preparation=preparation), texts, 2)


def info(tmp_path: Path) -> DataInfo:
    made = column(tmp_path)
    return DataInfo(
        "table", ("cats", "dogs"), 1, 1, 2, 2, (1, 1), several=made.specs, task="text_classification",
        tokeniser=made.tokeniser,
    )  # fmt: skip


def test_texts_are_ids_with_a_mask_of_those_that_are_there(tmp_path: Path) -> None:
    made = column(tmp_path)
    ids, mask = made.inputs[IDS], made.inputs[MASK]
    assert len(ids) == len(TEXTS) and ids.lengths.tolist() == mask.lengths.tolist()
    assert made.tokeniser.decode(ids[1].tolist()).strip() == TEXTS[1]
    assert ids[2].tolist() == [0], "an empty text is one token of padding"
    assert made.specs[IDS].count == made.tokeniser.count and made.specs[IDS].ragged
    with pytest.raises(UserError, match="holds no text"):
        column(tmp_path, ["", " ", "later"])


def test_padding_changes_no_output(tmp_path: Path) -> None:
    facts = info(tmp_path)
    model = build_model(ModelConfig(), model_input(facts, TextClassification().fitted(facts, TaskSettings()))).double()
    assert isinstance(model, TextClassifier)
    ids = torch.randint(1, 200, (3, 7))
    alone = model(ids, torch.ones(3, 7, dtype=torch.int64))
    longer = torch.cat([ids, torch.randint(0, 200, (3, 5))], 1), torch.arange(12).lt(7).long().expand(3, 12)
    assert torch.allclose(model(*longer), alone, atol=1e-12)
    assert model(ids, torch.zeros(3, 7, dtype=torch.int64)).isfinite().all()


def test_the_worst_texts_are_those_of_the_highest_loss(tmp_path: Path) -> None:
    facts = info(tmp_path)
    task = TextClassification().fitted(facts, TaskSettings(worst_samples=2))
    made, chosen = column(tmp_path), task.examples()
    assert chosen is not None
    logits, targets = torch.tensor([[3.0, 0.0], [5.0, 0.0], [0.0, 1.0], [0.0, 4.0]]), torch.tensor([0, 1, 1, 0])
    for i in (2, 0):  # two batches, each padded by itself
        rows = {name: torch.nn.utils.rnn.pad_sequence([torch.as_tensor(array[j]) for j in (i, i + 1)], True)
                for name, array in made.inputs.items()}  # fmt: skip
        chosen.update(rows, logits[i : i + 2], targets[i : i + 2], i, True)
    section = chosen.section().result()
    assert section is not None and [each.text for each in section.texts] == [TEXTS[1], TEXTS[3]]
    assert section.texts[0].title.startswith("true dogs, predicted cats, loss 5")


@pytest.mark.parametrize("given", [ModelInput(10, 1, 8), ModelInput(2, 1, 1, several={"a": None, "b": None})])
def test_other_inputs_are_refused(given: ModelInput) -> None:
    from echelon.models.builtin.text_classifier import build

    with pytest.raises(UserError, match="reads input_ids and an attention_mask"):
        build(given if given.several is None else ModelInput(10, 1, 8))
