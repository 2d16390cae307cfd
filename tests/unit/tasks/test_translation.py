"""Translation: nats of target tokens, sentences that a model writes, their scores, and a model that sees no padding."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from sacrebleu import corpus_bleu, corpus_chrf
from torch import Tensor

from echelon.config.schema import ModelConfig
from echelon.core.errors import UserError
from echelon.data.base import DataInfo
from echelon.data.tokenisers import Characters
from echelon.models import ModelInput, build_model
from echelon.models.builtin.small_seq2seq import SmallSeq2Seq, build
from echelon.tasks.base import NO_TARGET, ChosenSample, SentenceMarks, TaskSettings
from echelon.tasks.nest import TensorSpec
from echelon.tasks.translation import Translation, Written, scores
from echelon.trainer.inputs import model_input

LETTERS = Characters("abcdefgh")
MARKS = SentenceMarks(LETTERS.count, LETTERS.count + 1)
COUNT = LETTERS.count + 2
IDS = TensorSpec((9,), "int64", COUNT, ragged=True)
INPUTS = {"input_ids": IDS, "attention_mask": replace(IDS, count=0), "decoder_input_ids": IDS}
INFO = DataInfo(
    "pairs", (), 1, 1, 9, 3, (), several=INPUTS, targets=IDS, task="translation", tokeniser=LETTERS, marks=MARKS
)
SENTENCES = ("abc", "fade", "b", "cabbage", "dad")


def task(info: DataInfo = INFO) -> Translation:
    return Translation().fitted(info, TaskSettings(worst_samples=3))


def sample(place: int, text: str, longest: int = 12) -> ChosenSample:
    """Return a sentence whose translation is itself, padded as a batch's longest has it."""
    ids, end = LETTERS.encode([text])[0].tolist(), MARKS.end
    padding = longest - len(ids) - 1
    inputs = {
        "input_ids": [*ids, end, *[0] * padding],
        "attention_mask": [1] * (len(ids) + 1) + [0] * padding,
        "decoder_input_ids": [MARKS.begin, *ids, *[0] * padding],
    }
    tensors = {name: torch.tensor([row]) for name, row in inputs.items()}
    return ChosenSample(place, tensors, torch.tensor([[*ids, end, *[NO_TARGET] * padding]]))


def copying(calls: list[tuple[int, ...]]) -> Callable[[Any], Tensor]:
    """Return a model that writes the source again, but an `a` for each `b`."""

    def model(inputs: dict[str, Tensor]) -> Tensor:
        source, given = inputs["input_ids"], inputs["decoder_input_ids"]
        calls.append(tuple(given.shape))
        place = torch.arange(given.shape[1]).clamp(max=source.shape[1] - 1)
        wanted = source[:, place].where(source[:, place] != 2, torch.tensor(1))
        return torch.nn.functional.one_hot(wanted, COUNT).float()

    return model


def test_the_loss_is_a_sum_over_target_tokens() -> None:
    logits, targets = torch.randn(2, 6, COUNT, dtype=torch.float64), torch.randint(0, COUNT, (2, 6))
    targets[1, 4:] = NO_TARGET
    by_hand = -sum(logits[b, t].log_softmax(-1)[targets[b, t]] for b, t in (targets != NO_TARGET).nonzero().tolist())
    fitted = task()
    assert torch.isclose(fitted.loss_sum(logits, targets), by_hand) and fitted.units(targets) == 10
    counted = fitted.metrics(torch.device("cpu"))
    counted.update(logits[:1], targets[:1])
    counted.update(logits[1:], targets[1:])
    metrics = counted.compute().metrics
    assert metrics == pytest.approx({"loss": float(by_hand) / 10, "perplexity": math.exp(float(by_hand) / 10)})
    smooth = Translation().fitted(INFO, TaskSettings(label_smoothing=0.1))
    log_p = logits.log_softmax(-1)
    mean = -sum(log_p[b, t].mean() for b, t in (targets != NO_TARGET).nonzero().tolist())
    assert torch.isclose(smooth.loss_sum(logits, targets), 0.9 * by_hand + 0.1 * mean)
    assert torch.isclose(smooth.for_evaluation().loss_sum(logits, targets), by_hand)


def test_sentences_are_written_until_their_end_and_scored_as_sacrebleu_does() -> None:
    calls: list[tuple[int, ...]] = []
    generated = task().generated(copying(calls), [sample(i, text) for i, text in enumerate(SENTENCES)], None)
    written = [text.replace("b", "a") for text in SENTENCES]
    assert generated.metrics["chrf"] == pytest.approx(corpus_chrf(written, [list(SENTENCES)]).score)
    assert generated.metrics["bleu"] == pytest.approx(corpus_bleu(written, [list(SENTENCES)]).score)
    assert generated.section is not None and len(generated.section.texts) == 3
    assert generated.section.texts[0].text == "reference:  abc\ntranslated: aac"
    assert calls[0] == (5, 1) and len(calls) == 1 + len("cabbage"), "a sentence that has ended is written no more"
    assert calls[-1][0] == 1
    assert task().primary.name == "chrf" and task().primary.direction == "max"


def test_a_model_that_never_ends_a_sentence_is_stopped() -> None:
    calls: list[int] = []

    def model(inputs: dict[str, Tensor]) -> Tensor:
        calls.append(1)
        return torch.nn.functional.one_hot(torch.ones_like(inputs["decoder_input_ids"]), COUNT).float()

    generated = task().generated(model, [sample(0, "abc")], None)
    assert 4 < len(calls) < 20 and generated.metrics["chrf"] is not None
    assert task().generated(model, [], None).metrics == {"chrf": None, "bleu": None} == scores([])
    assert scores([Written(0, "", "the dog", "the dog")])["chrf"] == 100


def test_without_a_tokeniser_perplexity_judges() -> None:
    silent = task(replace(INFO, tokeniser=None))
    assert silent.primary.name == "perplexity" and silent.generates == () and Translation.primary.name == "chrf"
    assert silent.generated(copying([]), [], None).metrics == {}
    with pytest.raises(UserError, match=r"needs pairs of texts: give a folder with train\.en and train\.de"):
        Translation().fitted(replace(INFO, several=IDS), TaskSettings())
    with pytest.raises(UserError, match="--class-weights are for classes"):
        Translation().fitted(INFO, TaskSettings(class_weights="balanced"))


def test_neither_padding_nor_what_comes_later_changes_the_logits() -> None:
    model = build_model(ModelConfig(), model_input(INFO, task())).double()
    assert isinstance(model, SmallSeq2Seq) and model.head.weight is model.embedding.weight
    source, target = torch.randint(0, COUNT, (2, 5)), torch.randint(0, COUNT, (2, 4))
    alone = model(source, torch.ones(2, 5, dtype=torch.int64), target)
    assert alone.shape == (2, 4, COUNT)
    longer = torch.cat([source, torch.randint(0, COUNT, (2, 3))], 1)
    mask = torch.arange(8).lt(5).long().expand(2, 8)
    padded = model(longer, mask, torch.cat([target, torch.randint(0, COUNT, (2, 2))], 1))
    assert torch.allclose(padded[:, :4], alone, atol=1e-12)
    assert model(source, torch.zeros(2, 5, dtype=torch.int64), target).isfinite().all(), "a blank batch"
    assert task().wrong_outputs(alone, 2) == "" and "(batch, target tokens, 11)" in task().wrong_outputs(alone[0], 2)
    with pytest.raises(UserError, match="reads attention_mask, decoder_input_ids, input_ids"):
        build(ModelInput(10, 1, 8))
