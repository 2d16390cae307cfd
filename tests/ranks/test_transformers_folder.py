"""Folders for transformers: what plain `from_pretrained` reads gives the outputs of the run's model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import echelon
from echelon import api
from echelon.config import build
from echelon.run.defaults import with_task_defaults
from echelon.run.in_process import start_in_process
from echelon.run.resolve import launch_request
from tests.ranks.task_data import MAKERS

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]
SMALL = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
LIMITS = {"training.max_steps": 2, "launch.workers": 1, "training.device": "cpu", "data.batch_size": 8}


def _trained(task: str, config: Any, folder: Path) -> Path:
    config.save_pretrained(folder / "config")
    settings = {**LIMITS, **MAKERS[task](folder), "model.name": f"transformers/{folder / 'config'}"}
    run = folder / "run"
    resolved = build(None, {**settings, "run": str(run), "task": task.replace("_", "-")})
    described = with_task_defaults(resolved, None, True).config
    assert start_in_process(launch_request(described), None).status == "completed"
    return run


def test_a_classifier_is_read_by_from_pretrained_with_its_classes(tmp_path: Path) -> None:
    run = _trained("text_classification", transformers.BertConfig(vocab_size=2000, **SMALL), tmp_path)
    exported = echelon.export(run, tmp_path / "folder")
    assert exported.agreement is not None and exported.agreement.difference < 1e-5
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "folder").eval()
    trained = api.trained_model(run)
    assert list(loaded.config.id2label.values()) == list(trained.info.classes)
    ids = torch.randint(1, 20, (3, 7))
    mask = torch.ones_like(ids)
    with torch.no_grad():
        expected = trained.model(input_ids=ids, attention_mask=mask)
        torch.testing.assert_close(loaded(input_ids=ids, attention_mask=mask).logits, expected)


def test_a_language_model_is_read_by_from_pretrained_and_writes_on(tmp_path: Path) -> None:
    shape = {"n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 512}
    run = _trained("language_modelling", transformers.GPT2Config(vocab_size=4000, **shape), tmp_path)
    exported = echelon.export(run, tmp_path / "folder")
    assert exported.agreement is not None and exported.agreement.difference < 1e-5
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder").eval()
    ids = torch.randint(1, 10, (2, 5))
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=ids).logits, api.trained_model(run).model(ids))
        assert loaded.generate(ids, max_new_tokens=3, do_sample=False).shape == (2, 8)


def test_a_model_of_masked_tokens_is_read_by_from_pretrained(tmp_path: Path) -> None:
    run = _trained("masked_language_modelling", transformers.BertConfig(vocab_size=4000, **SMALL), tmp_path)
    exported = echelon.export(run, tmp_path / "folder")
    assert exported.agreement is not None and exported.agreement.difference < 1e-5
    assert transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "folder").config.vocab_size < 4000


def test_a_translator_writes_and_is_read_by_from_pretrained(tmp_path: Path) -> None:
    shape = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    run = _trained("translation", transformers.T5Config(vocab_size=4000, **shape), tmp_path)
    assert api.trained_model(run).model.config.vocab_size < 4000
    assert json.loads((run / "summary.json").read_text())["metrics"]["chrf"] is not None
    exported = echelon.export(run, tmp_path / "folder")
    assert exported.agreement is not None and exported.agreement.difference < 1e-5
    assert transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "folder") is not None


def test_a_graph_takes_batches_of_any_size_and_says_what_it_reads(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    outcome = echelon.train("small_cnn", "digits", tmp_path / "run", max_steps=2, workers=1, device="cpu")
    echelon.export(outcome.folder, tmp_path / "graph.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "graph.onnx"), providers=["CPUExecutionProvider"])
    known = session.get_modelmeta().custom_metadata_map
    names = [str(i) for i in range(10)]
    assert json.loads(known["classes"]) == names and json.loads(known["names"]) == {name: name for name in names}
    steps = json.loads(known["preprocessing"])
    pixels = np.random.default_rng(0).integers(0, 255, (5, 1, 8, 8), np.uint8)
    mean, std = (np.array(steps[each], np.float32)[:, None, None] for each in ("mean", "std"))
    prepared = (pixels.astype(np.float32) / steps["divide_by"] - mean) / std
    [read] = session.get_inputs()
    rows = echelon.predict(outcome.folder, pixels, device="cpu")
    for count in (1, 2, 5):
        [logits] = session.run(None, {read.name: prepared[:count]})
        assert logits.shape == (count, 10)
        shares = torch.tensor(logits).softmax(-1)
        for row, given in zip(rows[:count], shares.tolist(), strict=True):
            assert list(row.prediction.probabilities.values()) == pytest.approx(given, abs=1e-4)
