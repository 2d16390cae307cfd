"""Language modelling: nats of tokens, perplexity, and texts that a model writes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from echelon.config.schema import ModelConfig
from echelon.core.errors import UserError
from echelon.data.base import DataInfo
from echelon.data.tokenisers import Characters
from echelon.models import ModelInput, build_model
from echelon.models.builtin.small_gpt import SmallGPT
from echelon.tasks.base import NO_TARGET, ChosenSample, TaskSettings
from echelon.tasks.language_modelling import LanguageModelling
from echelon.tasks.masked_language_modelling import MaskedLanguageModelling
from echelon.tasks.nest import TensorSpec
from echelon.tasks.tailored import TailoredTask
from echelon.trainer.inputs import model_input

IDS = TensorSpec((8,), "int64", 4)
INFO = DataInfo(
    "text", (), 1, 1, 9, 3, (), several=IDS, targets=IDS, task="language_modelling", tokeniser=Characters("abc")
)


def task() -> LanguageModelling:
    return LanguageModelling().fitted(INFO, TaskSettings())


def test_the_loss_is_a_sum_over_tokens_that_are_there() -> None:
    logits, targets = torch.randn(2, 8, 4, dtype=torch.float64), torch.randint(0, 4, (2, 8))
    targets[1, 5:] = NO_TARGET
    by_hand = -sum(logits[b, t].log_softmax(-1)[targets[b, t]] for b, t in (targets != NO_TARGET).nonzero().tolist())
    fitted = task()
    assert torch.isclose(fitted.loss_sum(logits, targets), by_hand)
    assert fitted.units(targets) == 13
    counted = fitted.metrics(torch.device("cpu"))
    counted.update(logits[:1], targets[:1])
    counted.update(logits[1:], targets[1:])
    perplexity = counted.compute().metrics["perplexity"]
    assert perplexity == pytest.approx(math.exp(float(by_hand) / 13))
    assert fitted.primary.chance == 4 and fitted.primary.direction == "min"


def test_a_text_is_written_with_a_bounded_number_of_tokens_the_same_each_time() -> None:
    calls: list[tuple[int, ...]] = []

    def model(inputs: torch.Tensor) -> torch.Tensor:
        calls.append(tuple(inputs.shape))
        return torch.nn.functional.one_hot((inputs + 1) % 4, 4).float() * 50

    sections = [task().generated(model, [], None).section for _ in range(2)]
    assert sections[0] == sections[1] and sections[0] is not None
    assert sections[0].texts[0].text.startswith("abc\N{REPLACEMENT CHARACTER}abc")
    assert set(calls) == {(1, 8)} and len(calls) == 2 * len(sections[0].texts[0].text) < 1000
    silent = LanguageModelling().fitted(replace(INFO, tokeniser=None), TaskSettings())
    assert silent.generated(model, [], None).section is None


def test_the_model_that_auto_becomes_reads_the_vocabulary() -> None:
    model = build_model(ModelConfig(), model_input(INFO, task()))
    assert isinstance(model, SmallGPT)
    tokens = torch.randint(0, 4, (2, 8))
    full, cut = model(tokens), model(tokens[:, :5])
    assert full.shape == (2, 8, 4)
    assert torch.allclose(full[:, :5], cut, atol=1e-6), "a token sees none behind it: padding changes nothing"


@pytest.mark.parametrize(
    "name, given, said",
    [
        ("small_gpt", ModelInput(10, 1, 8), "reads token ids, the data has 1-channel images"),
        ("mlp", model_input(INFO, task()), "--model mlp"),
    ],
)
def test_models_of_other_inputs_are_refused(name: str, given: ModelInput, said: str) -> None:
    with pytest.raises(UserError) as refused:
        build_model(ModelConfig(name=name), given)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "info, settings, said",
    [
        (replace(INFO, targets=TensorSpec((), "int64")), TaskSettings(), "needs the next token of each"),
        (INFO, TaskSettings(class_weights="balanced"), "--class-weights are for classes"),
    ],
)
def test_other_targets_and_settings_are_refused(info: Any, settings: TaskSettings, said: str) -> None:
    with pytest.raises(UserError) as refused:
        LanguageModelling().fitted(info, settings)
    assert said in str(refused.value)


def test_speeds_are_in_tokens_and_stay_so_with_a_metric_of_the_user_s_own() -> None:
    tailored = TailoredTask(task(), None, {}, LanguageModelling.primary)
    for facts in (task().facts(), tailored.facts()):
        assert facts.speed(10.0) == ("tokens/s", 80.0)
    assert LanguageModelling().facts().speed(10.0) == ("samples/s", 10.0)  # not fitted to any data


def test_masked_tokens_are_shown_with_what_is_predicted() -> None:
    fitted = MaskedLanguageModelling().fitted(INFO, TaskSettings(worst_samples=9))
    targets = torch.full((1, 8), NO_TARGET)
    targets[0, 2], targets[0, 5] = 3, 2
    sample = ChosenSample(3, torch.tensor([[1, 2, 0, 1, 2, 0, 1, 2]]), targets)
    scores = torch.zeros(1, 8, 4)
    scores[:, :, 3] = 50
    section = fitted.generated(lambda ids: scores.expand(len(ids), 8, 4), [sample], None).section
    assert section is not None
    (shown,) = section.texts
    assert shown.title == "ab [1] ab [2] ab" and shown.text == "[1] 'c': right (1.00)\n[2] 'b': predicted 'c' (1.00)"
    end = ChosenSample(4, torch.tensor([[1, 4, 4, 4, 4, 4, 4, 4]]), torch.tensor([[NO_TARGET, 2, *[NO_TARGET] * 6]]))
    section = fitted.generated(lambda ids: scores.expand(len(ids), 8, 4), [end], None).section
    assert section is not None and section.texts[0].title == "a [1] ", "what fills the last window up is no text"
    assert Characters("abc").decode([1, 4, 0]) == "a\ufffd\ufffd"
    assert fitted.facts().speed(10.0) == ("tokens/s", 80.0), "all of a window are read, masked or not"
    calls: list[torch.Size] = []
    fitted.generated(lambda ids: calls.append(ids.shape) or scores, [], None)  # type: ignore[func-returns-value]
    assert calls == [(1, 8)], "a rank without samples calls the model too"
