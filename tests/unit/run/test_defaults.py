"""Defaults of a task: used where the user said nothing, and where they came from is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

from echelon.config import build
from echelon.core.task import TaskDefaults
from echelon.run.defaults import with_task_defaults
from echelon.tasks.registry import TASKS
from echelon.tasks.supervised import Supervised


class Suggesting(Supervised):
    """A task of the user's own."""

    name = "my_task"
    defaults: ClassVar[TaskDefaults] = TaskDefaults("adamw", 1e-3, 0.0, epochs=3, batch_size=32, holdout=0.1)


def test_a_task_s_defaults_stand_where_nobody_set_anything() -> None:
    resolved = with_task_defaults(build(None, {"data.batch_size": 128}), Suggesting())
    optimizer, config = resolved.config.optimizer, resolved.config
    assert (optimizer.name, optimizer.lr, optimizer.weight_decay) == ("adamw", 1e-3, 0.0)
    assert (config.training.epochs, config.data.batch_size, config.data.holdout) == (3, 128, 0.1)
    assert resolved.origins["optimizer.lr"] == "task my-task"
    assert resolved.origins["data.batch_size"] == "command line"


def test_a_learning_rate_goes_with_its_optimizer() -> None:
    optimizer = with_task_defaults(build(None, {"optimizer.name": "sgd"}), Suggesting()).config.optimizer
    assert (optimizer.lr, optimizer.weight_decay) == (0.1, 5e-4)


def test_a_described_run_has_none_a_second_time(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("training: {epochs: 10}\n")
    assert with_task_defaults(build(tmp_path / "config.yaml"), Suggesting()).config.training.epochs == 10


def test_images_and_named_data_are_not_opened(tmp_path: Path) -> None:
    (tmp_path / "train" / "cat").mkdir(parents=True)
    (tmp_path / "train" / "cat" / "1.jpg").write_bytes(b"")
    for source in ("digits", str(tmp_path), str(tmp_path / "nowhere")):
        resolved = build(None, {"data.source": source})
        assert with_task_defaults(resolved) is resolved


@pytest.mark.parametrize("name", TASKS.names())
def test_whether_a_task_has_defaults_is_known_without_importing_it(name: str) -> None:
    """That is read from its file, where they are annotated: `defaults: ClassVar[TaskDefaults] = ...`."""
    declared = TASKS.declaration(name).constants["defaults"] != "TaskDefaults()"
    assert declared == (TASKS.settings_class(name).defaults != TaskDefaults())


def test_a_tokeniser_beside_a_model_of_transformers_is_taken_for_texts(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "text.txt").write_text("to be or not to be " * 50)
    given = {"model.name": f"transformers/{tmp_path}", "data.source": str(tmp_path / "text.txt")}
    resolved = with_task_defaults(build(None, given))
    assert resolved.config.data.tokeniser == str(tmp_path)
    assert resolved.origins["data.tokeniser"] == f"model transformers/{tmp_path}"
    asked = with_task_defaults(build(None, {**given, "data.tokeniser": "characters"}))
    assert asked.config.data.tokeniser == "characters"
    other = with_task_defaults(build(None, given), Suggesting())  # whose task reads no text
    assert other.config.data.tokeniser == "auto"


@pytest.mark.parametrize(
    ("settings", "rate"),
    [
        ({}, 0.01),
        ({"model.tune": "layer_decay(0.75)"}, 0.01),
        ({"model.tune": "head+unfreeze(epoch=2)"}, 0.01),
        ({"model.tune": "head"}, 0.1),
        ({"model.tune": "lora+layer_decay(0.5)"}, 0.03),
        ({"optimizer.lr": 0.2}, 0.2),
        ({"optimizer.name": "adamw"}, 0.1),
    ],
)
def test_weights_that_are_given_are_trained_gently(settings: dict[str, Any], rate: float) -> None:
    described = build(None, {"data.source": "digits", "model.weights": "w.safetensors", **settings})
    assert with_task_defaults(described).config.optimizer.lr == rate
    scratch = with_task_defaults(build(None, {"data.source": "digits", **settings})).config.optimizer.lr
    assert scratch == settings.get("optimizer.lr", 0.1)


@pytest.mark.parametrize(("tune", "rate"), [("all", 5e-5), ("lora", 3e-4), ("head", 5e-4)])
def test_models_of_transformers_are_tuned_at_the_rates_that_they_are_known_to_bear(tune: str, rate: float) -> None:
    settings = {"model.name": "transformers/bert", "model.weights": "pretrained", "model.tune": tune}
    assert with_task_defaults(build(None, settings), Suggesting()).config.optimizer.lr == rate
