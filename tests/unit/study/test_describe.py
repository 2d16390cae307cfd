"""A study's description: candidates, products, exclusions, terms, and every mistake in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.config import Resolved, build
from echelon.config.build import to_yaml
from echelon.core.errors import UserError
from echelon.study import from_tries, load_study, open_study, planned_runs
from echelon.study.base import Study
from echelon.study.execute import refused_settings
from echelon.study.file import StudyRequest, requested_study
from echelon.study.settings import arguments_of, label_of, read_try

STUDY = """\
base: {data: digits, training: {epochs: 3}, workers: 2}
candidates:
  - sync=allreduce
  - {sync: [local(8), diloco(20)], compression: [none, int8]}
exclude:
  - {sync: local(8), compression: int8}
  - {sync: diloco(20), link: 10mbit}
terms: {link: [100mbit, 10mbit]}
seeds: [3, 5]
loss: 1
"""


def study_file(folder: Path, text: str) -> Path:
    file = folder / "a.yaml"
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("sync=allreduce", {"strategy.sync": "allreduce"}),
        ("sync=diloco(period=20, outer_lr=0.7), compression=topk(0.01)+huffman",
         {"strategy.sync": "diloco(period=20, outer_lr=0.7)", "strategy.compression": "topk(0.01)+huffman"}),
        ("link=10mbit,20ms, lr=0.2", {"launch.link": "10mbit,20ms", "optimizer.lr": "0.2"}),
        ("parallel=dp=2,tp=2", {"strategy.parallel": "dp=2,tp=2"}),
        ("batch-size=64, training.epochs=2", {"data.batch_size": "64", "training.epochs": "2"}),
        ("", {}),
    ],
)  # fmt: skip
def test_a_try_is_read(text: str, settings: dict[str, str]) -> None:
    assert read_try(text) == settings
    assert read_try(label_of(settings) if settings else "") == settings


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("compresion=int8", "did you mean compression"),
        ("sync=allreduce, sync=local(8)", "stands twice"),
        ("allreduce", "no setting=value"),
        ("seed=3", "the study's seeds"),
        ("run=x", "the study's folder"),
        ("sync=local(8", "parentheses"),
    ],
)
def test_a_wrong_try_is_refused_in_words(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        read_try(text)


def test_products_exclusions_and_terms(tmp_path: Path) -> None:
    study = load_study(study_file(tmp_path, STUDY))
    assert [c.label for c in study.candidates][1:3] == [
        "sync=local(8), compression=none",
        "sync=local(8), compression=int8",
    ]
    assert [t.label for t in study.terms] == ["link=100mbit", "link=10mbit"]
    assert (study.seeds, study.loss_points) == ((3, 5), 1.0)
    runs = planned_runs(study)
    assert len(runs) == 2 * (10 - 4)
    assert len({r.name for r in runs}) == len(runs)
    assert not [r for r in runs if r.candidate == "sync=local(8), compression=int8"]
    assert {r.terms for r in runs if "diloco" in r.candidate} == {"link=100mbit"}
    assert runs[0].settings == {
        "data.source": "digits", "training.epochs": "3", "launch.workers": "2", "launch.link": "100mbit",
        "strategy.sync": "allreduce", "training.seed": "3",
    }  # fmt: skip


def test_runs_are_interleaved_by_seed() -> None:
    study = from_tries({}, ["sync=allreduce", "compression=int8", "compression=bf16"], "3")
    runs = planned_runs(study)
    assert [r.seed for r in runs] == [0] * 3 + [1] * 3 + [2] * 3
    assert len({r.candidate for r in runs[::3]}) == 3, "the same candidate begins every seed"


def test_a_study_folder_repeats_the_study(tmp_path: Path) -> None:
    study = load_study(study_file(tmp_path, STUDY))
    opened = open_study(tmp_path / "s", study)
    again = load_study(tmp_path / "s" / "study.yaml")
    assert opened == study == again
    assert planned_runs(again) == planned_runs(study)
    assert open_study(tmp_path / "s", None) == study


def test_the_same_candidate_twice_has_two_names() -> None:
    study = from_tries({}, ["sync=allreduce", "sync=allreduce"], "1")
    assert [c.label for c in study.candidates] == ["sync=allreduce", "sync=allreduce #2"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no candidate"),
        ("candidates: []", "no candidate"),
        ("candiates: [sync=allreduce]", "did you mean candidates"),
        ("candidates: [{snyc: allreduce}]", "candidates 1: unknown setting 'snyc': did you mean sync"),
        ("candidates: sync=allreduce", "candidates is a list"),
        ("candidates: [sync=allreduce]\nbase: {lr: [1, 2]}", "belongs under candidates or terms"),
        ("candidates: [sync=allreduce]\nseeds: 0", "how many"),
        ("candidates: [sync=allreduce]\nseeds: [1, 1]", "each seed once"),
        ("candidates: [sync=allreduce]\nseeds: [x]", "how many"),
        ("candidates: [sync=allreduce]\nloss: much", "points of accuracy"),
        ("candidates: [sync=allreduce]\nexclude: [{sync: local(8)}]", "excludes nothing"),
        ("candidates: [sync=allreduce]\nexclude: [sync=allreduce]", "everything is excluded"),
        ("candidates: [sync=allreduce]\nterms: {link: [10mbit, 10mbit]}", "stands twice"),
        ("candidates: [sync=allreduce]\ncandidates: []", "line 2: candidates stands twice"),
        ("candidates: [sync=allreduce", "not YAML"),
        ("- sync", "expected a study"),
    ],
)
def test_a_wrong_study_file_is_refused_in_words(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UserError, match=words) as refused:
        load_study(study_file(tmp_path, text))
    assert "a.yaml" in str(refused.value) and "\n" not in str(refused.value)


def test_a_folder_with_something_else_is_refused(tmp_path: Path) -> None:
    study = from_tries({}, ["sync=allreduce"], "2")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    with pytest.raises(UserError, match="something else"):
        open_study(tmp_path / "full", study)
    with pytest.raises(UserError, match="no study to continue"):
        open_study(tmp_path / "none", None)
    open_study(tmp_path / "s", study)
    with pytest.raises(UserError, match="another study"):
        open_study(tmp_path / "s", from_tries({}, ["sync=allreduce"], "3"))


def test_a_run_is_a_command_that_one_could_type() -> None:
    settings = {"strategy.sync": "local(8)", "data.source": "digits", "model.compile": "false", "training.seed": "0"}
    assert arguments_of(settings) == ["digits", "--sync", "local(8)", "--no-compile", "--seed", "0"]


@pytest.mark.parametrize(("name", "runs"), [("digits", 21), ("cifar10", 66)])
def test_the_examples_are_studies(name: str, runs: int) -> None:
    study = load_study(Path(__file__).parents[3] / "examples" / "studies" / name / "study.yaml")
    assert len(planned_runs(study)) == runs
    assert refused_settings(study, lambda config: None) == {}


def test_what_will_be_refused_is_known_before_anything_starts() -> None:
    def no_int8(described: Resolved) -> None:
        if described.config.strategy.compression == "int8":
            raise UserError("no int8 here")

    study = from_tries({}, ["sync=allreduce", "compression=int8", "epochs=0"], "3")
    refused = refused_settings(study, no_int8)
    assert list(refused) == ["compression=int8", "epochs=0"] and refused["compression=int8"] == "no int8 here"
    with pytest.raises(UserError, match="no run of this study can start: no int8 here"):
        refused_settings(from_tries({}, ["compression=int8"], "2"), no_int8)


def test_a_runs_own_file_gives_settings_for_every_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(build(None, {"data.source": "digits", "training.seed": "5", "run": "there"}).config))
    study = requested_study(StudyRequest({}, ("sync=allreduce", "compression=int8"), config=str(file)))
    assert study is not None and study.base["data.source"] == "digits"
    assert not {"training.seed", "run"} & study.base.keys() and "training.seed is left out" in capsys.readouterr().err
    assert open_study(tmp_path / "study", study) == load_study(tmp_path / "study" / "study.yaml") == study


def test_a_study_that_could_not_be_read_again_is_refused_before_it_starts(tmp_path: Path) -> None:
    study = Study({"training.seed": "5"}, from_tries({}, ["sync=allreduce"], "3").candidates)
    with pytest.raises(UserError, match=r"'training\.seed' is not for a candidate to set"):
        open_study(tmp_path, study)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("text", "option"),
    [("y", "--sync-batchnorm"), ("T", "--sync-batchnorm"), ("1", "--sync-batchnorm"), ("off", "--no-sync-batchnorm"),
     ("0", "--no-sync-batchnorm"), ("maybe", "--sync-batchnorm=maybe")],
)  # fmt: skip
def test_a_switch_is_read_as_a_run_reads_it(text: str, option: str) -> None:
    assert arguments_of(read_try(f"sync_batchnorm={text}")) == [option]
