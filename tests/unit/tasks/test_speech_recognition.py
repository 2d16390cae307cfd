"""CTC: its loss over padded batches, the rates of wrong words and characters, and what is said of models."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from echelon.config.schema import ModelConfig
from echelon.core.errors import UserError
from echelon.data.base import DataInfo
from echelon.data.sound_features import LogMel
from echelon.data.sounds import transcript_spec
from echelon.data.tokenisers import Characters
from echelon.models import ModelInput, build_model
from echelon.models.builtin.small_ctc import SIZE, SmallCTC
from echelon.tasks.base import NO_TARGET, TaskSettings, TightSample
from echelon.tasks.speech_recognition import SpeechRecognition, blank_padding, greedy_labels
from echelon.trainer.inputs import model_input

LETTERS = Characters(" abc")
SYMBOLS = LETTERS.count + 1


def info(tightest: TightSample | None = None, frames: int = 40) -> DataInfo:
    return DataInfo(
        "spoken", (), 1, 1, 4, 2, (), several=LogMel().specs(frames), targets=transcript_spec(9, LETTERS.count),
        task="speech_recognition", tokeniser=LETTERS, tightest=tightest,
    )  # fmt: skip


def fitted(tightest: TightSample | None = None, worst: int = 2) -> SpeechRecognition:
    return SpeechRecognition().fitted(info(tightest), TaskSettings(worst_samples=worst))


def padded(rows: list[Tensor], value: float) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)


def said(text: str) -> Tensor:
    return torch.from_numpy(LETTERS.encode([text])[0])


def by_hand(logits: Tensor, labels: list[int]) -> Tensor:
    """Return -log of the sum over all ways to give each frame (F, S) a symbol, of those that read as the labels."""
    chances, found = logits.softmax(-1), torch.zeros((), dtype=logits.dtype)
    for path in itertools.product(range(logits.shape[1]), repeat=len(logits)):
        if [key for key, _ in itertools.groupby(path) if key != logits.shape[1] - 1] == labels:
            found = found + torch.stack([chances[i, symbol] for i, symbol in enumerate(path)]).prod()
    return -found.log()


def test_the_loss_is_that_of_all_alignments_whatever_samples_are_padded_to() -> None:
    torch.manual_seed(0)
    frames, texts = (4, 3, 2), ("aa", "b", "")
    rows = [torch.randn(count, SYMBOLS, dtype=torch.float64) for count in frames]
    alone = [by_hand(row, said(text).tolist()) for row, text in zip(rows, texts, strict=True)]
    logits = padded([*rows, torch.zeros(7, SYMBOLS, dtype=torch.float64)], 3.0)[:3].requires_grad_()
    mask = padded([torch.ones(count) for count in (*frames, 7)], 0)[:3]
    targets = padded([said(text) for text in (*texts, "abcabc")], NO_TARGET)[:3]
    task = fitted()
    total = task.loss_sum(blank_padding(logits, mask), targets)
    assert torch.allclose(total, torch.stack(alone).sum(), atol=1e-12) and task.units(targets) == 3
    parts = [task.loss_sum(row[None], said(text)[None]) for row, text in zip(rows, texts, strict=True)]
    assert torch.allclose(total, torch.stack(parts).sum(), atol=1e-12)
    (gradient,) = torch.autograd.grad(total, logits)
    assert bool((gradient[mask == 0] == 0).all()) and bool(gradient.isfinite().all())


def symbols(*rows: str) -> Tensor:
    """Return logits whose likeliest symbols are those written, `-` the blank."""
    ids = [[SYMBOLS - 1 if each == "-" else LETTERS.alphabet.index(each) + 1 for each in row] for row in rows]
    return 9.0 * torch.nn.functional.one_hot(torch.tensor(ids), SYMBOLS).float()


def test_rates_of_wrong_words_and_characters() -> None:
    logits = symbols("aa-abb- cc--", "-b--b-------", "------------")
    assert [LETTERS.decode(row) for row in greedy_labels(logits)] == ["aab c", "bb", ""]
    targets = padded([said(text) for text in ("aab a", "bb", "c a c")], NO_TARGET)
    metrics = fitted().metrics(torch.device("cpu"))
    for rows in (slice(0, 0), slice(0, 2), slice(2, 3)):
        metrics.update(logits[rows], targets[rows])
    assert metrics.compute().metrics == pytest.approx({"wer": 4 / 6, "cer": 6 / 12})
    assert fitted().metrics(torch.device("cpu")).compute().metrics == {"wer": None, "cer": None}


def test_the_worst_transcripts_come_first() -> None:
    logits, targets = symbols("ab-", "---", "c-b"), padded([said(text) for text in ("ab", "a", "ca")], NO_TARGET)
    chosen = fitted().examples()
    assert chosen is not None and fitted(worst=0).examples() is None
    chosen.update({}, logits[:2], targets[:2], 0, True)
    chosen.update({}, logits[2:], targets[2:], 2, True)
    section = chosen.section().result()
    assert section is not None
    assert [(each.title, each.text) for each in section.texts] == [
        ("WER 100%, CER 100%, sample 1 of the evaluation data", "reference   a\nrecognised  "),
        ("WER 100%, CER 50%, sample 2 of the evaluation data", "reference   ca\nrecognised  cb"),
    ]


def test_padding_changes_no_output_of_the_small_encoder() -> None:
    task = fitted()
    model = build_model(ModelConfig(), model_input(info(), task)).double()
    assert isinstance(model, SmallCTC)
    assert 0.5e6 < sum(each.numel() for each in SmallCTC(64, 30, SIZE).parameters()) < 1e6
    for frames in (20, 21):
        features, mask = torch.randn(2, frames, 64, dtype=torch.float64), torch.ones(2, frames)
        alone = model(features, mask)
        longer = torch.cat([features, torch.randn(2, 13, 64)], 1), torch.arange(frames + 13).lt(frames).float()
        together = model(longer[0], longer[1].expand(2, -1))
        assert alone.shape[1] == -(-frames // 2) and torch.allclose(together[:, : alone.shape[1]], alone, atol=1e-10)
        assert bool((together[:, alone.shape[1] :].softmax(-1)[..., -1] == 1).all())


@pytest.mark.parametrize(("frames", "refused"), [(5, False), (4, True)])
def test_a_sound_too_short_for_its_transcript_is_named(frames: int, refused: bool) -> None:
    task = fitted(TightSample("train/7.wav", frames, 3))
    if not refused:
        build_model(ModelConfig(), model_input(info(), task))
        return
    with pytest.raises(UserError, match=r"one frame of 2, 2 of train/7.wav, whose transcript needs 3: choose"):
        build_model(ModelConfig(), model_input(info(), task))


def test_outputs_of_other_models_are_refused_in_words() -> None:
    task = fitted()
    assert "must return logits of shape (batch, frames, 6)" in task.wrong_outputs(torch.zeros(2, SYMBOLS), 2)
    assert "end it with" in task.wrong_outputs(torch.zeros(2, 20, SYMBOLS), 2)
    assert task.wrong_outputs(torch.zeros(2, 20, SYMBOLS, device="meta"), 2) == ""
    assert task.wrong_outputs(blank_padding(torch.zeros(2, 20, SYMBOLS), torch.zeros(2, 20)), 2) == ""
    with pytest.raises(UserError, match="--model small_ctc is for sounds"):
        build_model(ModelConfig("small_ctc"), ModelInput(10, 1, 8))
    with pytest.raises(UserError, match="needs sounds with transcripts"):
        SpeechRecognition().fitted(DataInfo("digits", ("0",), 1, 8, 4, 2, (4,)), TaskSettings())
    with pytest.raises(UserError, match="--label-smoothing"):
        SpeechRecognition().fitted(info(), TaskSettings(label_smoothing=0.1))
