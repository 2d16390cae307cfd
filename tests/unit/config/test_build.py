from __future__ import annotations

from pathlib import Path

import pytest

from echelon.config import RunConfig, build, to_yaml
from echelon.config.validate import check_world
from echelon.core.errors import UserError


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    return file


def test_defaults_then_file_then_command_line(tmp_path: Path) -> None:
    file = written(tmp_path, "model: resnet20\noptimizer:\n  lr: 0.2\n  momentum: 0.5\n")
    resolved = build(file, {"optimizer.lr": "0.3"})
    assert resolved.config.model.name == "resnet20"
    assert (resolved.config.optimizer.lr, resolved.config.optimizer.momentum) == (0.3, 0.5)
    assert resolved.origins["optimizer.lr"] == "command line"
    assert resolved.origins["optimizer.momentum"] == f"{file}, line 4"
    assert resolved.origins["training.epochs"] == "default"


def test_the_written_description_is_read_back(tmp_path: Path) -> None:
    config = build(None, {"training.epochs": 3, "optimizer.lr": 1e-4, "launch.nodes": "1", "run": "a b/ü"}).config
    assert build(written(tmp_path, to_yaml(config))).config == config


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    assert build(written(tmp_path, "")).config == RunConfig()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("modle: x", "line 1: unknown setting 'modle': did you mean model"),
        ("optimizer: {lrr: 1}", "did you mean optimizer.lr"),
        ("optimizer: {lr: abc}", "optimizer.lr is 'abc'"),
        ("optimizer: {lr: -1}", "at least 0"),
        ("optimizer: {lr: .nan}", "a finite number"),
        ("optimizer: {weight_decay: .inf}", "a finite number"),
        ("strategy: {sync: 'local(3'}", "--sync: cannot read spec"),
        ("strategy: {compression: ''}", "--compression: cannot read spec"),
        ("training: {precision: bf61}", "did you mean bf16"),
        ("a: [", "is not YAML"),
        ("[1, 2]", "expected settings"),
        ("launch: 3", "is a group of settings"),
        ("data: {batch_size: 1}\ndata: {batch_size: 2}", "stands twice"),
        ("strategy: {parallel: dp=3}\nlaunch: {workers: 2}", "3 ranks, but there are 2 workers"),
        ("launch: {nodes: 2}", "needs --rendezvous"),
        ("launch: {nodes: 4:2, rendezvous: a:1}", "the least number of machines comes first"),
        ("launch: {rendezvous: nowhere}", "write HOST:PORT"),
        ("launch: {workers: 8}\ndata: {batch_size: 4}", "smaller than the 8 workers"),
        ("checkpoint: {every: soon}", "a number of steps"),
        ("training: {epochs: 2}\noptimizer: {warmup_epochs: 2}", "shorter warm-up"),
        ("training: {precision: fp8, device: cpu}", "needs a GPU"),
    ],
)
def test_bad_descriptions_are_refused_in_words(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UserError, match=words) as refusal:
        build(written(tmp_path, text))
    assert "\n" not in str(refusal.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*none\.yaml"):
        build(tmp_path / "none.yaml")


def test_the_layout_is_the_world() -> None:
    config = build(None, {"strategy.parallel": "dp=4"}).config
    check_world(config, 4)
    with pytest.raises(UserError, match="--workers 4"):
        check_world(config, 2)


def test_a_value_that_has_another_name_now_is_shown_by_it(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("strategy: {collective: auto}\n")
    assert build(file).config.strategy.collective == "backend"
    assert build(None, {"strategy.collective": "auto"}).config == build().config
