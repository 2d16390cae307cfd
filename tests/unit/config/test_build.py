from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from echelon.config import RunConfig, build, to_yaml
from echelon.config.validate import check_world
from echelon.core.errors import UserError
from echelon.study.file import load_study


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
        ("a: [", "not YAML"),
        ("[1, 2]", "expected settings"),
        ("launch: 3", "is a group of settings"),
        ("data: {batch_size: 1}\ndata: {batch_size: 2}", "stands twice"),
        ("strategy: {parallel: dp=3}\nlaunch: {workers: 2}", "3 ranks, but there are 2 workers"),
        ("launch: {nodes: 2}", "needs --rendezvous"),
        ("launch: {nodes: 4:2, rendezvous: a:1}", "the least number of machines comes first"),
        ("launch: {rendezvous: nowhere}", "write HOST:PORT"),
        ("launch: {workers: 8}\ndata: {batch_size: 4}", "smaller than the 8 workers"),
        ("checkpoint: {every: soon}", "a number of steps"),
        ("checkpoint: {every: 0}", "at least 1"),
        ("checkpoint: {every: 0s}", "or a duration such as 5m"),
        ("training: {epochs: 2}\noptimizer: {warmup_epochs: 2}", "shorter warm-up"),
        ("training: {precision: fp8, device: cpu}", "needs a GPU"),
    ],
)
def test_bad_descriptions_are_refused_in_words(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UserError, match=words) as refusal:
        build(written(tmp_path, text))
    assert "\n" not in str(refusal.value)


def test_words_that_yaml_takes_for_other_things_are_words(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("launch: {elastic: off, log_dir: null}\ncheckpoint: {mirror: ~}\nrun: null\n")
    config = build(tmp_path / "run.yaml", {}).config
    assert (config.launch.elastic, config.launch.log_dir, config.checkpoint.mirror, config.run) == ("off", "", "", "")


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
    file.write_text("training: {accumulate: auto}\n")
    assert build(file).config.training.accumulate == 0


def _billion(name: str) -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    return "\n".join([*lines, f"{name}: *a11"])


HOSTILE = {
    "exponential aliases": (_billion("optimizer"), "values, which no description needs"),
    "an alias to itself": ("optimizer: &a {lr: [*a]}", "stands for what it is in"),
    "a list of itself": ("candidates: &a [*a]", "stands for what it is in"),
    "a tag of Python": ("model: !!python/object/apply:os.system ['touch never']", "!!python/object/apply:os.system"),
    "a tag on a text": ("model: {name: !!python/name:os.system x}", "!!python/name:os.system is not used"),
    "a tag of one's own": ("model: !mine x", "!mine is not used"),
    "a huge file": ("# " + "x" * 50_000_000, "kB, which no description needs"),
    "a long file": ("".join(f"a{i}: 1\n" for i in range(10_000)), "kB, which no description needs"),
    "lists within lists": ("optimizer: {lr: " + "[" * 20_000 + "]" * 20_000 + "}", "deeper than any setting needs"),
    "aliases behind aliases": (
        "a0: &a0 [1]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 2000)), "more than 10000 values"),
    "a key twice": ("data:\n  batch_size: 1\n  batch_size: 2", "line 3: batch_size stands twice"),
    "a key that is a list": ("? [a, b]\n: 1", "a key must be a word"),
    "a number of many digits": ("optimizer: {lr: " + "9" * 10_000 + "}", "integer string conversion"),
    "a number to base 60": ("training: {epochs: 1" + ":59" * 15_000 + "}", "more digits than any setting needs"),
    "a word without end": ("x" * 60_000 + ": 1", "unknown|not YAML"),
    "bytes that are no text": ("\x00\x01", "not YAML"),
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("read", [build, load_study], ids=["run", "study"])
def test_hostile_files_are_refused_at_once_in_one_line(
    kind: str, read: Callable[[Path], object], tmp_path: Path
) -> None:
    text, words = HOSTILE[kind]
    file = written(tmp_path, text)
    tracemalloc.start()
    began = time.process_time()
    with pytest.raises(UserError, match=words if read is build else ".") as refusal:
        read(file)
    seconds, (_, peak) = time.process_time() - began, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(str(refusal.value)) < 500 and "\n" not in str(refusal.value)
    assert seconds < 4 and peak < 100e6  # with every allocation traced, which takes several times as long


def test_aliases_that_stand_for_little_are_read(tmp_path: Path) -> None:
    file = written(tmp_path, "data: {batch_size: &n 64, eval_batch_size: *n}")
    assert build(file).config.data.eval_batch_size == 64


@pytest.mark.parametrize(
    "text",
    [
        "candidates: [sync=allreduce]\nseeds: 99999999999",
        "candidates: [sync=allreduce]\nseeds: " + "9" * 9000,
        "candidates: [{" + ", ".join(f"{k}: {list(range(1, 30))}" for k in ("lr", "epochs", "accumulate")) + "}]",
    ],
    ids=["seeds", "digits", "combinations"],
)  # fmt: skip
def test_studies_of_more_runs_than_anyone_could_do_are_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"at most|how many"):
        load_study(written(tmp_path, text))


def test_a_text_that_may_be_a_number_takes_one_from_python_and_no_other_value() -> None:
    given = {"launch.nodes": 2, "launch.rendezvous": "host:29400", "checkpoint.every": 100}
    config = build(overrides=given, in_python=True).config
    assert (config.launch.nodes, config.checkpoint.every) == ("2", "100")
    for wrong in (2.5, True):
        with pytest.raises(UserError, match="must be a string"):
            build(overrides={"launch.nodes": wrong}, in_python=True)
