"""What machines of a run must have in common, and by which name one is known that a place starts again."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

from echelon.config import RunConfig, build
from echelon.config.schema import DataConfig, ModelConfig, traits_of
from echelon.core.errors import UserError
from echelon.launch.meeting import Admission, Register, Shape, check_settings
from echelon.launch.places.cluster import NodeRank
from echelon.launch.plan import LaunchPlan
from echelon.run.machine import arrival_of, common_settings
from tests.unit.run.test_job import plan


def _config(**settings: str) -> RunConfig:
    given = {"launch.nodes": "2", "launch.rendezvous": "a:29400"}
    return build(None, given | {name.replace("__", "."): value for name, value in settings.items()}).config


def _check(first: RunConfig, second: RunConfig, there: LaunchPlan) -> None:
    check_settings(arrival_of(there, common_settings(first)), arrival_of(there, common_settings(second)))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("data__source", "cifar10", "has DATA cifar10, the first machine has digits"),
        ("data__source", "/data/own", "has DATA a file or folder, the first machine has digits"),
        ("data__mixup", "0.4", "was started with --mixup 0.4, the first machine with 0.0"),
        ("data__holdout", "0.3", "--holdout 0.3"),
        ("data__target", "label", '--target label, the first machine with ""'),
        ("model__tune", "head", "--tune head"),
        ("model__weights", "hf:them/theirs", "--weights hf:them/theirs"),
        ("task", "multilabel", "--task multilabel"),
        ("optimizer__name", "adamw", "--optimizer adamw"),
        ("launch__elastic", "off", "--elastic off"),
        ("checkpoint__every", "200", "--checkpoint-every 200"),
    ],
)
def test_a_machine_with_other_settings_is_refused(name: str, value: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        _check(_config(), _config(**{name: value}), plan(tmp_path, 1))
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"data__source": "/data/images"}, {"data__source": "~/images"}),
        ({"data__source": "file:///data/table.csv"}, {"data__source": "table.csv"}),
        ({"model__weights": "runs/a"}, {"model__weights": "/scratch/a.safetensors"}),
        ({"data__root": "/scratch"}, {"data__loaders": "4"}),
        ({"launch__workers": "1"}, {"launch__workers": "3", "training__device": "cpu", "data__eval_batch_size": "8"}),
    ],
)
def test_what_is_a_machines_own_matter_may_differ(
    first: dict[str, str], second: dict[str, str], tmp_path: Path
) -> None:
    _check(_config(**first), _config(**second), plan(tmp_path, 1))


def test_all_other_settings_of_data_and_model_are_compared() -> None:
    flags = {traits_of(f).flag or "--" + f.name.replace("_", "-") for f in (*fields(DataConfig), *fields(ModelConfig))}
    may_differ = {"--data-root", "--data-cache-limit", "--loaders", "--follow-links", "--decode", "--eval-batch-size"}
    assert flags - common_settings(_config()).keys() == may_differ


def test_another_version_is_named_before_the_settings_that_it_has_not(tmp_path: Path) -> None:
    there = plan(tmp_path, 1)
    first, other = arrival_of(there, {"--new": "1"}), arrival_of(there, {})
    with pytest.raises(UserError, match="has torch 1, the first machine has"):
        check_settings(first, replace(other, settings={**other.settings, "torch": "1"}))


def test_a_machine_that_its_place_starts_anew_at_another_address_gets_its_number_again(tmp_path: Path) -> None:
    first, second = (replace(plan(tmp_path, 2), node_rank=NodeRank(n, f"j-{n}", "j-0.j", "j")) for n in range(2))
    register = Register(Shape(2, 2, 1, 0), arrival_of(first, {}, "10.0.0.5"))
    assert register.admit(arrival_of(second, {}, "10.0.0.7")) == Admission(1, 2)
    assert register.admit(arrival_of(second, {}, "10.0.0.9")) == Admission(1, 2)
