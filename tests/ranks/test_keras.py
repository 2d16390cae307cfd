"""Models of Keras: the function of `fit`, in layouts, saved as Keras's own file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import echelon
from echelon.core.errors import UserError
from echelon.trainer.start_weights import best_weights

os.environ.setdefault("KERAS_BACKEND", "torch")
pytest.importorskip("keras", reason="Keras is not installed")
MEAN = "block/batch_normalization/moving_mean"
PLAIN = {"optimizer": "sgd", "lr": 0.05, "momentum": 0, "weight_decay": 0, "schedule": "constant", "seed": 1}


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _images() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(64, 8, 8, 1)).astype("float32"), np.arange(64) % 10


def _trained(model: Any, **settings: Any) -> Any:
    images, classes = _images()
    data = TensorDataset(torch.from_numpy(images), torch.from_numpy(classes))
    return echelon.train(model, (data, data), batch_size=64, **{"workers": 1, **PLAIN, **settings})


@pytest.mark.parametrize("metric", ["categorical_accuracy", "TopKCategoricalAccuracy"])
def test_metrics_of_one_hot_targets_are_refused(metric: str) -> None:
    import keras

    from tests.ranks.keras_models import residual

    model = residual()
    own = getattr(keras.metrics, metric)() if metric[0].isupper() else metric
    model.compile("adam", loss="sparse_categorical_crossentropy", metrics=[own])
    with pytest.raises(UserError, match="takes one-hot targets"):
        _trained(model, epochs=1)


def test_kinds_of_tuning_know_kerases_layers() -> None:
    from echelon.models.keras_model import keras_module
    from echelon.models.tuning.plan import tuning_plan
    from tests.ranks.keras_models import residual

    module = keras_module(residual(), "model")
    rates = tuning_plan("layer_decay(0.5)", "eval").apply(module).rates
    assert max(rates.values()) == 1 and len(set(rates.values())) > 2
    tuning_plan("norm", "eval").apply(module)
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    assert any("gamma" in name for name in trained) and sum("kernel" in name for name in trained) == 1  # the head's


@pytest.mark.parametrize(("loss", "words"), [
    ("categorical_crossentropy", "their argmax"), ("binary_crossentropy", 'task="multi_label"'),
])  # fmt: skip
def test_one_hot_targets_are_no_numbers_to_be_learnt(loss: str, words: str) -> None:
    from tests.ranks.keras_models import residual

    model, (images, classes) = residual(), _images()
    model.compile("adam", loss=loss)
    data = TensorDataset(torch.from_numpy(images), torch.eye(10)[classes])
    with pytest.raises(UserError, match=words):
        echelon.train(model, (data, data), workers=1, epochs=1)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_losses_are_those_of_fit_and_the_model_is_left_as_kerases_file() -> None:
    import keras

    from tests.ranks.keras_models import Block, residual

    model, images, classes = residual(), *_images()
    model.compile(
        "adam",
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(3, name="top3")],
    )
    before = [value.copy() for value in model.get_weights()]
    outcome = _trained(model, epochs=3)
    assert all(np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True))
    own = residual()
    own.compile(keras.optimizers.SGD(0.05), loss="sparse_categorical_crossentropy")
    fitted = own.fit(images, classes, batch_size=64, epochs=3, shuffle=False, verbose=0).history["loss"]
    assert list(outcome.history.train_loss) == pytest.approx(fitted, abs=1e-5)
    written = outcome.folder / "again.keras"
    exported = echelon.export(outcome.folder, written, model=model, data=_data(images, classes))
    assert exported.agreement is not None and exported.agreement.difference < 1e-5
    for name in ("again.onnx", "again.pt2"):  # batches of any size, though all inputs are one argument of `forward`
        other = echelon.export(outcome.folder, outcome.folder / name, model=model, data=_data(images, classes))
        assert other.agreement is not None and other.agreement.difference < 1e-4
    for file in (written, outcome.folder / "model.keras"):
        loaded = keras.saving.load_model(file, custom_objects={"Block": Block})
        best = best_weights(outcome.folder)
        assert len(loaded.get_weights()) == len(before)
        np.testing.assert_array_equal(loaded.layers[-1].get_weights()[0], best["dense/kernel"].numpy())
        np.testing.assert_array_equal(loaded.layers[2].norm.moving_mean.value, best[MEAN].numpy())


def _data(images: Any, classes: Any) -> Any:
    data = TensorDataset(torch.from_numpy(images), torch.from_numpy(classes))
    return data, data


@pytest.mark.long
@pytest.mark.timeout(600)
def test_layouts_give_the_losses_of_one_process() -> None:
    from tests.ranks.keras_models import plain, residual

    losses = {}
    for parallel in ("dp=1", "dp=2", "fsdp=2"):
        workers = int(parallel[-1])
        outcome = _trained(plain(10, 1, 8), epochs=2, workers=workers, parallel=parallel)
        losses[parallel] = list(outcome.history.train_loss)
        assert (outcome.folder / "model.keras").is_file()
    assert losses["dp=2"] == pytest.approx(losses["dp=1"], abs=1e-5)
    assert losses["fsdp=2"] == pytest.approx(losses["dp=1"], abs=1e-5)
    with pytest.raises(UserError, match="a model of Keras computes as one whole"):
        _trained(plain(10, 1, 8), epochs=1, workers=2, parallel="tp=2")
    with pytest.raises(UserError, match=r"--sync-batchnorm: batch_normalization.* of Keras"):
        _trained(residual(), epochs=1, workers=2, sync_batchnorm=True)


def test_names_do_not_depend_on_how_many_models_were_built() -> None:
    from echelon.models.keras_model import keras_module
    from tests.ranks.keras_models import residual

    first, second = (keras_module(residual(), "model") for _ in range(2))
    assert list(first.state_dict()) == list(second.state_dict())
    assert "block_1/batch_normalization/moving_mean" in dict(first.named_buffers())
    frozen = [name for name, parameter in first.named_parameters() if not parameter.requires_grad]
    assert frozen == ["inner/features/kernel", "inner/features/bias"]


def test_frozen_normalisation_keeps_its_statistics() -> None:
    from echelon.models.keras_model import keras_module
    from echelon.models.tuning.plan import tuning_plan
    from tests.ranks.keras_models import residual

    model = keras_module(residual(), "model").train()
    tuning_plan("head", "eval").apply(model)
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["dense/kernel", "dense/bias"]
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model(torch.randn(4, 1, 8, 8)).sum().backward()
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers() if "moving" in name)
    assert model._graph.model.trainable_variables and model._graph.model.layers[2].norm.trainable


def test_what_depends_on_the_number_of_workers_is_said() -> None:
    import keras
    from keras import layers

    from echelon.models.keras_model import keras_module
    from echelon.trainer.compatibility import worker_notes
    from tests.ranks.keras_models import residual

    drops = keras.Sequential([keras.Input((4,)), layers.Dropout(0.5, name="drops"), layers.Dense(2)])
    assert worker_notes(keras_module(drops, "model"), 1, False) == []
    (said,) = worker_notes(keras_module(drops, "model"), 2, False)
    assert "what drops draws is the same for each worker's part" in said and "BatchNorm" not in said
    (said,) = worker_notes(keras_module(residual(), "model"), 2, False)
    assert "BatchNorm (batch_normalization" in said and "draws" not in said


def test_mistakes_are_refused_in_a_line() -> None:
    import keras
    from keras import layers

    from echelon.models.keras_compiled import compiled_loss
    from echelon.models.keras_model import keras_module

    with pytest.raises(UserError, match=r"keras\.Input"):
        keras_module(keras.Sequential([layers.Dense(3)]), "model")
    with pytest.raises(UserError, match="weight-decay"):
        keras_module(keras.Sequential([keras.Input((4,)), layers.Dense(3, kernel_regularizer="l2")]), "model")
    linear = keras.Sequential([keras.Input((4,)), layers.Dense(3)])
    linear.compile(loss="sparse_categorical_crossentropy")
    with pytest.raises(UserError, match="from_logits=True"):
        compiled_loss(keras_module(linear, "model"))
    linear.compile(loss="mae")
    loss = compiled_loss(keras_module(linear, "model"))
    assert loss is not None
    outputs, targets = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[0.0, 0.0, 0.0]])
    assert loss(outputs, targets).tolist() == [2.0]


def test_losses_that_layers_add_are_not_dropped() -> None:
    import keras
    from keras import layers

    from echelon.models.keras_model import keras_module

    class Penalised(layers.Layer):
        def call(self, x: Any) -> Any:
            self.add_loss(keras.ops.mean(x**2))
            return x

    model = keras.Sequential([keras.Input((4,)), Penalised(), layers.Dense(3)])
    with pytest.raises(UserError, match="add_loss"):
        keras_module(model, "model")(torch.randn(2, 4))


@pytest.mark.long
def test_another_backend_is_told_what_to_set() -> None:
    script = (
        "import keras\n"
        "keras.backend.backend = lambda: 'jax'\n"
        "from echelon.models.keras_model import is_keras_model, keras_module\n"
        "model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])\n"
        "assert is_keras_model(model)\n"
        "keras_module(model, 'model')\n"
    )
    environment = {**os.environ, "KERAS_BACKEND": "torch"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=120)
    assert "of the jax backend: set KERAS_BACKEND=torch before keras is imported" in done.stderr


def test_one_sigmoid_is_two_logits_and_metrics_of_keras_are_added_up() -> None:
    import keras
    from keras import layers

    from echelon.models.keras_compiled import compiled_loss, compiled_metrics
    from echelon.models.keras_model import keras_module

    model = keras.Sequential([keras.Input((4,)), layers.Dense(1, activation="sigmoid")])
    model.compile(loss="binary_crossentropy", metrics=["accuracy", keras.metrics.BinaryAccuracy(name="right")])
    module, inputs = keras_module(model, "model").eval(), torch.randn(8, 4)
    targets = torch.arange(8) % 2
    logits = module(inputs)
    assert compiled_loss(module) is None and logits.shape == (8, 2)
    loss = torch.nn.functional.cross_entropy(logits, targets)
    assert float(loss) == pytest.approx(model.evaluate(inputs, targets[:, None], verbose=0)[0], abs=1e-6)
    [(name, metric)] = compiled_metrics(module).items()
    metric.update(logits[:3], targets[:3, None])
    metric.update(logits[3:], targets[3:, None])
    assert name == "right"
    assert float(metric.compute()) == pytest.approx(float((logits.argmax(1) == targets).float().mean()))
