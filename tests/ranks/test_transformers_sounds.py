"""Runs of models of transformers for sounds, by a folder: the same function in layouts, resumed, used, exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import echelon
from echelon import api
from echelon.config import build
from echelon.core.errors import UserError
from echelon.run.defaults import with_task_defaults
from echelon.run.in_process import start_in_process
from echelon.run.resolve import launch_request
from echelon.trainer.start_weights import best_weights
from tests.ranks.task_data import MAKERS

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]
STILL = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "feat_proj_dropout": 0.0, "final_dropout": 0.0}
SETTINGS: dict[str, Any] = {"epochs": 1, "batch_size": 8, "device": "cpu", "lr": 1e-3, "checkpoint_every": "2"}


def _folder(kind: str, folder: Path) -> str:
    """Write a model of a few thousand parameters, whose frames are 40 samples of sounds at 8 kHz."""
    config = getattr(transformers, f"{kind}Config")(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, classifier_proj_size=8,
        conv_dim=(8, 8), conv_kernel=(16, 5), conv_stride=(8, 5), num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2, vocab_size=9, activation_dropout=0.0, **STILL,
    )  # fmt: skip
    torch.manual_seed(0)  # its weights are drawn
    getattr(transformers, f"{kind}ForCTC")(config).save_pretrained(folder)
    transformers.Wav2Vec2FeatureExtractor(sampling_rate=8000).save_pretrained(folder)
    return str(folder)


def _sounds(task: str, folder: Path) -> str:
    return str(MAKERS[task](folder)["data.source"])


@pytest.mark.parametrize(("task", "kind"), [("speech_classification", "Hubert"), ("speech_recognition", "Wav2Vec2")])
def test_two_workers_train_what_one_does_in_any_layout_and_a_stop_changes_nothing(
    task: str, kind: str, tmp_path: Path
) -> None:
    model, data = f"transformers/{_folder(kind, tmp_path / 'model')}", _sounds(task, tmp_path)
    known = {**SETTINGS, "weights": "pretrained"}
    echelon.train(model, data, tmp_path / "one", workers=1, **known)
    weights = best_weights(tmp_path / "one", "newest")  # the best may be another step
    for layout in ("fsdp=2", "tp=2", "dp=2"):
        two = echelon.train(model, data, tmp_path / layout, workers=2, parallel=layout, **known)
        others = best_weights(tmp_path / layout, "newest")
        for name, tensor in weights.items():
            torch.testing.assert_close(others[name], tensor, atol=2e-4, rtol=2e-3, msg=f"{layout}: {name}")
    with pytest.raises(UserError, match=r"is not known to be a chain of blocks: use fsdp=N instead"):
        echelon.train(model, data, tmp_path / "pp", workers=2, parallel="pp=2", **known)
    assert not (tmp_path / "pp").exists()
    echelon.train(model, data, tmp_path / "stopped", workers=1, max_steps=2, **known)
    echelon.resume(tmp_path / "stopped", max_steps=0)
    for name, tensor in best_weights(tmp_path / "stopped", "newest").items():
        torch.testing.assert_close(tensor, weights[name], atol=0, rtol=0, msg=name)
    scored = echelon.evaluate(two.folder)
    both = set(scored) & set(two.metrics)
    assert both and all(scored[name] == pytest.approx(two.metrics[name], rel=1e-4) for name in both)
    [row] = echelon.predict(two.folder, next(Path(data).rglob("*.wav")), device="cpu")
    assert isinstance(row.prediction.value, str)
    for file in ("folder", "model.onnx", "model.pt2"):
        exported = echelon.export(two.folder, tmp_path / file)
        assert exported.agreement is not None and exported.agreement.difference < 1e-4, file
    extractor = transformers.AutoFeatureExtractor.from_pretrained(tmp_path / "folder")
    assert extractor.sampling_rate == 8000 and api.trained_model(two.folder).info.rate == 8000


def test_whisper_classifies_and_is_refused_for_transcripts(tmp_path: Path) -> None:
    layers = {"encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16, "d_model": 16}
    config = transformers.WhisperConfig(**layers, classifier_proj_size=8, max_source_positions=50, num_mel_bins=20)
    config.save_pretrained(tmp_path / "model")
    name = f"transformers/{tmp_path / 'model'}"

    def started(task: str) -> Any:
        given = {"training.max_steps": 2, "launch.workers": 1, "training.device": "cpu", "data.batch_size": 8}
        resolved = build(None, {**given, **MAKERS[task](tmp_path), "model.name": name, "run": str(tmp_path / task)})
        described = with_task_defaults(resolved, None, True).config
        assert described.data.features == name
        return start_in_process(launch_request(described), None)

    assert started("speech_classification").status == "completed"
    with pytest.raises(UserError, match="makes no symbols of the frames"):
        started("speech_recognition")
