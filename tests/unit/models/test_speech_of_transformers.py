"""Models of transformers for sounds: what they say of one depends on no padding, and what does not fit is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from echelon.config import build as build_config
from echelon.config.build import SettingValue
from echelon.config.schema import ModelConfig
from echelon.core.errors import UserError
from echelon.core.features import read_features
from echelon.data.sound_features import open_features
from echelon.models import ModelInput, build_model, load_weights
from echelon.run.defaults import with_task_defaults
from echelon.tasks.base import TightSample

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
LENGTH = 900


def small(kind: str, **other: Any) -> Any:
    """Return the configuration of a model of waveforms with a few thousand parameters: a frame of 20 samples."""
    return getattr(transformers, f"{kind}Config")(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, classifier_proj_size=8,
        conv_dim=(8, 8), conv_kernel=(10, 4), conv_stride=(5, 4), num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2, vocab_size=9, **other,
    )  # fmt: skip


def inputs_for(folder: Path, outputs: int, transcribes: bool, tightest: TightSample | None = None) -> ModelInput:
    specs = open_features(read_features(str(folder))).specs(LENGTH)
    wrong = (lambda *_: "") if transcribes else None
    return ModelInput(outputs, 1, 1, several=specs, transcribes=transcribes, tightest=tightest, wrong_outputs=wrong)


def build(folder: Path, *arguments: Any) -> torch.nn.Module:
    model = build_model(ModelConfig(name=f"transformers/{folder}"), inputs_for(folder, *arguments))
    return model.eval()


@pytest.mark.parametrize("norm", ["group", "layer"])
@pytest.mark.parametrize("kind", ["Wav2Vec2", "Hubert", "WavLM"])
@pytest.mark.parametrize("transcribes", [False, True])
def test_a_sound_is_heard_the_same_alone_and_padded(kind: str, norm: str, transcribes: bool, tmp_path: Path) -> None:
    small(kind, feat_extract_norm=norm).save_pretrained(tmp_path)
    model = build(tmp_path, 5, transcribes)
    short, long = torch.randn(313), torch.randn(LENGTH)
    both = torch.nn.utils.rnn.pad_sequence([short, long], batch_first=True)
    mask = torch.tensor([[i < 313 for i in range(LENGTH)], [True] * LENGTH]).long()
    logits = model(input_values=both, attention_mask=mask)
    assert isinstance(logits, torch.Tensor) and logits.shape[-1] == 5
    for row, sound in enumerate((short, long)):
        alone = model(input_values=sound[None], attention_mask=torch.ones(1, len(sound), dtype=torch.int64))[0]
        found = logits[row][: len(alone)] if transcribes else logits[row]
        torch.testing.assert_close(found, alone, atol=1e-5, rtol=1e-4)
    if transcribes:
        behind = logits[0, int(model._get_feat_extract_output_lengths(torch.tensor(313))) :]  # type: ignore[operator]
        assert len(behind) and bool((behind.argmax(-1) == 4).all()), "only the blank, which is the last"


def test_a_sound_without_padding_is_heard_as_transformers_does(tmp_path: Path) -> None:
    small("Wav2Vec2").save_pretrained(tmp_path)
    model = build(tmp_path, 5, False)
    model.save_pretrained(tmp_path / "saved")  # type: ignore[operator]
    theirs = transformers.AutoModelForAudioClassification.from_pretrained(tmp_path / "saved").eval()
    wave = torch.randn(2, 500)
    found = model(input_values=wave, attention_mask=torch.ones(2, 500, dtype=torch.int64))
    torch.testing.assert_close(found, theirs(input_values=wave).logits, atol=1e-5, rtol=1e-4)


def test_a_sound_too_short_for_a_frame_is_lengthened_by_silence(tmp_path: Path) -> None:
    small("Hubert").save_pretrained(tmp_path)
    model = build(tmp_path, 5, False)
    wave, mask = torch.randn(1, 6), torch.ones(1, 6, dtype=torch.int64)
    longer = torch.nn.functional.pad(wave, (0, 50))
    found = model(input_values=wave, attention_mask=mask)
    assert bool(found.isfinite().all())
    torch.testing.assert_close(found, model(input_values=longer, attention_mask=torch.nn.functional.pad(mask, (0, 50))))


def test_spectrograms_of_one_length_are_classified(tmp_path: Path) -> None:
    layers = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    transformers.ASTConfig(**layers, max_length=40, num_mel_bins=32).save_pretrained(tmp_path / "ast")
    ends = {"encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16, "d_model": 16}
    whisper = transformers.WhisperConfig(**ends, classifier_proj_size=8, max_source_positions=50, num_mel_bins=20)
    whisper.save_pretrained(tmp_path / "whisper")
    for name, shape in (("ast", (40, 32)), ("whisper", (20, 100))):
        features = open_features(read_features(str(tmp_path / name)))
        made = features.of(torch.randn(8000), 16_000)
        assert made.shape == shape == next(iter(features.specs(9).values())).shape
        assert build(tmp_path / name, 3, False)(**{next(iter(features.specs(9))): torch.tensor(made)[None]}).shape == (
            1,
            3,
        )
        with pytest.raises(UserError, match=r"makes no symbols .* such as wav2vec2, .* --task speech-classification"):
            build(tmp_path / name, 3, True)


def test_a_feature_extractor_and_a_model_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    transformers.ASTConfig(max_length=40, num_mel_bins=32).save_pretrained(tmp_path)
    transformers.ASTFeatureExtractor(max_length=40, num_mel_bins=16).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"makes 40 frames of 16 mel bands, and config\.json takes 40 of 32"):
        open_features(read_features(str(tmp_path)))


def test_rate_and_normalisation_are_those_of_the_folder(tmp_path: Path) -> None:
    small("Wav2Vec2").save_pretrained(tmp_path)
    features: Any = open_features(read_features(str(tmp_path)))
    assert (features.rate, features.normalised) == (16_000, True)
    library = transformers.Wav2Vec2FeatureExtractor(sampling_rate=8000, do_normalize=True)
    library.save_pretrained(tmp_path)
    features = open_features(read_features(str(tmp_path)))
    assert (features.rate, features.normalised) == (8000, True)
    wave = torch.randn(100) + 1
    torch.testing.assert_close(
        torch.tensor(features.of(wave, 8000)),
        library(wave.numpy(), sampling_rate=8000, return_tensors="pt").input_values[0],
    )


@pytest.mark.parametrize(
    ("config", "reason"),
    [("Bert", "of a bert, which reads no sounds"), ("Wav2Vec2Bert", "which reads no sounds, or such")],
)
def test_models_of_other_inputs_are_refused(config: str, reason: str, tmp_path: Path) -> None:
    getattr(transformers, f"{config}Config")().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=reason):
        open_features(read_features(str(tmp_path)))
    with pytest.raises(UserError, match="write log_mel, waveform, or a folder"):
        open_features(read_features(str(tmp_path / "nowhere")))


def test_a_model_is_refused_by_its_own_option_where_its_name_tells_the_features(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    transformers.BertConfig().save_pretrained("bert")
    given: dict[str, SettingValue] = {"task": "speech-classification", "model.name": "transformers/bert"}
    features = with_task_defaults(build_config(None, {**given, "data.source": "nowhere"})).config.data.features
    for text, said in (
        (features, r"^--model transformers/bert is of a bert"),
        ("bert", "^--features bert is of a ber"),
    ):
        with pytest.raises(UserError, match=said):
            open_features(read_features(text))
    with pytest.raises(UserError, match=r"^--model transformers/gone: name a folder with a preprocessor_config\.json"):
        open_features(read_features("transformers/gone"))
    small("Wav2Vec2").save_pretrained("transformers/own")
    assert open_features(read_features("transformers/own")).rate == 16_000, "a folder that is there, by its path"


def test_features_that_a_model_does_not_take_are_refused(tmp_path: Path) -> None:
    small("Wav2Vec2").save_pretrained(tmp_path)
    for text, reason in (("log_mel", "leave out --features log_mel"),):
        data = ModelInput(3, 1, 1, several=open_features(read_features(text)).specs(50))
        with pytest.raises(UserError, match=reason):
            build_model(ModelConfig(name=f"transformers/{tmp_path}"), data)
    with pytest.raises(UserError, match=r"makes 24 frames of a\.wav, whose transcript needs 30"):
        build(tmp_path, 3, True, TightSample("a.wav", 500, 30))


def test_weights_of_a_folder_get_a_head_for_other_symbols(tmp_path: Path) -> None:
    config = small("Wav2Vec2")
    transformers.Wav2Vec2ForCTC(config).save_pretrained(tmp_path)
    loaded = load_weights(build(tmp_path, 5, True), tmp_path)
    assert set(loaded.made_anew) == {"lm_head.weight", "lm_head.bias"}
    loaded = load_weights(build(tmp_path, 9, True), tmp_path)
    assert not loaded.made_anew
    loaded = load_weights(build(tmp_path, 4, False), tmp_path)
    assert set(loaded.made_anew) == {
        f"{part}.{kind}" for part in ("projector", "classifier") for kind in ("weight", "bias")
    }
