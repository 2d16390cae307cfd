"""Settings as keywords: what is generated is current, signatures and help list each, and a type checker knows them."""

from __future__ import annotations

import inspect
import pydoc
from pathlib import Path

import pytest
from mypy import api as mypy

import echelon
from echelon.api import Outcome
from echelon.config.keywords import GENERATED, RESUMABLE, for_train, keywords, source
from echelon.core.errors import UserError


def test_the_types_are_those_of_the_schema() -> None:
    assert GENERATED.read_text() == source(), "run: python -m echelon.config.keywords"


def test_the_signature_of_train_has_each_setting_with_its_default() -> None:
    parameters = inspect.signature(echelon.train).parameters
    assert not [p for p in parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD]
    assert set(parameters) >= set(keywords())
    assert (parameters["epochs"].default, parameters["epochs"].annotation) == (10, int)


def test_resume_takes_what_may_change() -> None:
    parameters = inspect.signature(echelon.resume).parameters
    resumable = {name for name, keyword in keywords().items() if keyword.setting.startswith(RESUMABLE)}
    assert {"epochs", "workers"} <= resumable <= set(parameters)
    assert "lr" not in parameters


def test_help_tells_of_every_setting() -> None:
    text = " ".join(pydoc.plain(pydoc.render_doc(echelon.train)).split())
    assert [k.name for k in for_train() if " ".join(f"{k.name} ({k.type}): {k.help}".split()) not in text] == []


@pytest.mark.parametrize("call", [echelon.train, lambda **settings: echelon.resume("runs/none", **settings)])
def test_an_unknown_keyword_is_refused_with_the_nearest(call: Outcome) -> None:
    with pytest.raises(UserError, match=r"^unknown setting 'epoch': did you mean epochs\?$"):
        call(epoch=3)


SCRIPT = """
import echelon

outcome = echelon.train("mlp", "digits", epochs=2, lr=0.1, schedule="cosine", sync="local(8)")
print(outcome.status, echelon.resume("runs/x", epochs=3).folder)
echelon.train(epochs="two")
echelon.train(epoch=2)
echelon.train(schedule="cosinus")
echelon.resume("runs/x", lr=0.1)
"""
CHECKED = """
[mypy]
follow_imports = skip
[mypy-echelon,echelon.api,echelon.config.*]
follow_imports = silent
"""


def test_a_type_checker_refuses_wrong_keywords_of_a_script(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "mypy.ini").write_text(CHECKED)
    options = ["--config-file", str(tmp_path / "mypy.ini"), "--cache-dir", str(tmp_path / "cache")]
    told, _, _ = mypy.run([*options, str(tmp_path / "script.py")])
    errors = [line.partition("script.py:")[2] for line in told.splitlines() if "error:" in line]
    assert [int(error.partition(":")[0]) for error in errors] == [6, 7, 8, 9], told
    assert 'Argument "epochs" to "train" has incompatible type "str"; expected "int"' in errors[0]
    assert 'Unexpected keyword argument "epoch" for "train"' in errors[1]
