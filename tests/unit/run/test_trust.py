"""Code that a description names is imported only where its user named it, or trusts who did."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.config.build import build, leaves
from echelon.config.schema import traits_of
from echelon.core.errors import UserError
from echelon.core.own import code_file
from echelon.run.trust import KnownCode, check_trust, named_code

NAMES = {"model.name": "--model", "data.source": "DATA", "task": "--task", "launch.on": "--on"}
NAMES |= {"tracking.callbacks": "--callbacks", "data.transform": "--transform"}
NAMES |= {"data.eval_transform": "--eval-transform"}
NAMES |= {"optimizer.name": "--optimizer", "optimizer.loss": "--loss", "training.metrics": "--metrics"}
NAMES |= {"model.tune": "--tune"}
VALUES = {"model.tune": 'replace("blocks.*", theirs:build)'}  # where the name is not all of the value


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in a foreign folder, as a user who has never named any code."""
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "theirs.py").write_text("raise AssertionError('imported')")
    monkeypatch.chdir(foreign)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def _described(setting: str, value: str = "") -> Path:
    value = value or VALUES.get(setting, "theirs:build")
    section, _, name = setting.rpartition(".")
    text = f"{section}: {{{name}: '{value}'}}" if section else f"{name}: '{value}'"
    file = Path("run.yaml")
    file.write_text(text)
    return file


@pytest.mark.parametrize("setting", NAMES)
def test_code_that_a_file_names_is_refused_by_name_and_file(setting: str) -> None:
    with pytest.raises(UserError) as refusal:
        check_trust(build(_described(setting)), trust=False)
    words = str(refusal.value)
    assert f"run.yaml, line 1: {NAMES[setting]} theirs:build would import {Path('theirs.py').absolute()}" in words
    assert "--trust" in words and "\n" not in words


@pytest.mark.parametrize("setting", NAMES)
def test_trusted_code_is_said_once_and_remembered(setting: str, capsys: pytest.CaptureFixture[str]) -> None:
    resolved = build(_described(setting))
    check_trust(resolved, trust=True)
    assert f"importing {Path('theirs.py').absolute()}" in capsys.readouterr().err
    check_trust(resolved, trust=False)
    assert not capsys.readouterr().err


@pytest.mark.parametrize("setting", NAMES)
def test_what_a_user_names_is_never_asked_about(setting: str, capsys: pytest.CaptureFixture[str]) -> None:
    check_trust(build(None, {setting: VALUES.get(setting, "theirs:build")}), trust=False)
    check_trust(build(_described(setting)), trust=False)
    assert not capsys.readouterr().err


def test_other_code_of_the_same_name_is_other_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_trust(build(None, {"model.name": "theirs:build"}), trust=False)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    Path("theirs.py").write_text("")
    with pytest.raises(UserError, match=r"other/theirs\.py"):
        check_trust(build(_described("model.name")), trust=False)
    with pytest.raises(UserError, match="theirs:another"):
        check_trust(build(_described("model.name", "theirs:another")), trust=False)


def test_code_that_is_there_already_needs_trust_too() -> None:
    with pytest.raises(UserError, match=r"os:system would import .*os\.py"):
        check_trust(build(_described("model.name", "os:system")), trust=False)


def test_where_nothing_can_be_remembered_owners_decide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KnownCode, "_can_remember", lambda self: False)
    file = _described("model.name").absolute()
    for path in (file, file.parent, Path("theirs.py")):
        path.chmod(0o755)
    check_trust(build(file), trust=False)
    assert not (tmp_path / "state").exists()
    file.chmod(0o766)  # others can write it
    with pytest.raises(UserError, match="--trust"):
        check_trust(build(file), trust=False)


def test_a_memory_that_others_can_write_is_not_believed(tmp_path: Path) -> None:
    check_trust(build(None, {"model.name": "theirs:build"}), trust=False)
    (memory,) = (tmp_path / "state" / "echelon").iterdir()
    assert (memory.stat().st_mode & 0o777, memory.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    memory.chmod(0o666)
    with pytest.raises(UserError, match="--trust"):
        check_trust(build(_described("model.name")), trust=False)


def test_names_that_are_no_code_are_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "odd:name"
    folder.mkdir()
    values = {"model.name": "timm/x:y", "data.source": str(folder), "task": "auto", "launch.on": "local"}
    assert not list(named_code(values))


def test_packages_are_not_imported_to_find_their_modules() -> None:
    package = Path("package")
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    (package / "module.py").write_text("")
    assert code_file("package.module:build") == str(package.absolute() / "module.py")
    assert code_file("package.missing:build") == code_file("missing.module:build") == ""
    assert code_file("sys:exit") == "built-in"


def test_every_setting_that_imports_code_says_so() -> None:
    """Its help names `module:`, by which users know it."""
    named = {name for name, item, _ in leaves() if "module:" in traits_of(item).help}
    assert named == {name for name, item, _ in leaves() if traits_of(item).code} == set(NAMES)
