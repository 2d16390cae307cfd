"""Steps that no other command does: what a function of the user's is called with."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest

from echelon.core.errors import UserError
from echelon.flows.work import prepare, select
from echelon.records.events import StartedOver
from echelon.records.file import Recorder
from echelon.records.kinds import Evaluation, Start

if TYPE_CHECKING:
    from collections.abc import Sequence

_calls: list[object] = []


def split(
    folder: Path, shuffle: bool, most: int | None = None, into: Path = Path(), by: Literal["x", "y"] = "x",
    names: Sequence[str] = (), other: list[str] | str = "",
) -> None:  # fmt: skip
    _calls[:] = [shuffle, most, into, by, other]


def test_settings_have_the_types_of_a_functions_parameters(tmp_path: Path) -> None:
    words = {"shuffle": "false", "most": "3", "into": "there", "by": "y", "other": "a,b"}
    prepare(f"{__name__}:split", tmp_path, words)
    assert _calls == [False, 3, Path("there"), "y", "a,b"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shuffle": "maybe"}, "shuffle is 'maybe': Input should be a valid boolean"),
        ({"shuffle": "1", "by": "z"}, "by is 'z'"),
        ({"shuffle": "1", "names": "a"}, "name 'Sequence' is not defined"),
        ({"shufle": "1"}, "it is called with a folder and the step's settings"),
    ],
)
def test_what_a_function_does_not_take_is_refused(tmp_path: Path, settings: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        prepare(f"{__name__}:split", tmp_path, settings)


def test_evaluations_of_before_a_run_started_over_do_not_count(tmp_path: Path) -> None:
    runs = [tmp_path / "over", tmp_path / "other"]
    name = Start().task.primary.name
    for run, lines in zip(
        runs,
        (
            [Start(), Evaluation(9, metrics={name: 0.9}), StartedOver(""), Start(), Evaluation(9, metrics={name: 0.3})],
            [Start(), Evaluation(9, metrics={name: 0.5})],
        ),
        strict=True,
    ):
        run.mkdir()
        with closing(Recorder(run)) as record:
            for line in lines:
                record.write(line)
    select(tmp_path, runs)
    choice = json.loads((tmp_path / "choice.json").read_text())
    assert [row["value"] for row in choice["runs"]] == [0.3, 0.5] and choice["best"] == 1
