"""What a step's fingerprint holds: the files that its words name, and what its code imports."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from echelon.flows.fingerprint import fingerprint
from echelon.flows.resolve import read_flow

NONE: Mapping[str, str] = {}


def _parts(base: Path, words: str, hash_content: bool = False) -> Mapping[str, str]:
    """Return the parts of the fingerprint of a flow's only step."""
    file = base / "flow.yaml"
    file.write_text(f"steps:\n  a:\n    {words}\n")
    flow = read_flow(file, hash_content=hash_content)
    return fingerprint(flow, flow.steps["a"], lambda _: NONE).parts


MODULES = {
    "own.py": "import top\nimport inner.leaf\n\ndef work(folder):\n    from package import part\n",
    "top.py": "import own, sys, json\n",
    "inner/leaf.py": "from . import beside\nfrom ..top import own\n",  # a folder without __init__.py
    "inner/beside.py": "",
    "package/__init__.py": "from package.first import *\n",
    "package/first.py": "",
    "package/part.py": "from .more.last import what\n",
    "package/more/__init__.py": "",
    "package/more/last.py": "",
}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    for name, text in MODULES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "unused.py").write_text("")
    (tmp_path / "json").mkdir()  # of the name of an imported module
    return tmp_path


@pytest.mark.parametrize("changed", [*MODULES, "unused.py"])
@pytest.mark.parametrize("words", ["prepare: own:work", "command: python own.py", "command: python -m own"])
def test_code_is_all_that_is_imported_from_the_flows_folder(base: Path, words: str, changed: str) -> None:
    before = _parts(base, words)
    with (base / changed).open("a") as file:
        file.write("# more\n")
    after = _parts(base, words)
    assert [name for name in before if before[name] != after[name]] == ["code"] * (changed in MODULES)


def test_code_that_is_no_python_is_known_too(base: Path) -> None:
    before = _parts(base, "command: python own.py")
    (base / "own.py").write_text("import (\n")
    assert _parts(base, "command: python own.py")["code"] != before["code"]


@pytest.mark.parametrize(
    "words",
    [
        "train: table.csv",
        "command: cat table.csv",
        "command: cat --from=table.csv",
        'command: [sh, -c, "wc -l <table.csv >${folder}/out"]',
    ],
)
def test_data_that_words_name_is_known_by_size_and_time_or_by_its_bytes(base: Path, words: str) -> None:
    file = base / "table.csv"
    file.write_text("x,y\n")
    before, content = _parts(base, words), _parts(base, words, hash_content=True)
    os.utime(file, (1, 1))
    after = _parts(base, words)
    assert [name for name in before if before[name] != after[name]] == ["data"]
    assert _parts(base, words, hash_content=True) == content
    file.write_text("x,z\n")
    os.utime(file, (1, 1))
    assert _parts(base, words) == after  # of the same size and time
    assert _parts(base, words, hash_content=True)["data"] != content["data"]


def test_files_behind_linked_folders_are_data_too(base: Path) -> None:
    for name in ("elsewhere", "data"):
        (base / name).mkdir()
    (base / "elsewhere" / "a.txt").write_text("a")
    (base / "data" / "linked").symlink_to(base / "elsewhere")
    (base / "data" / "circle").symlink_to(base / "data")
    before = _parts(base, "command: cat data")
    (base / "elsewhere" / "b.txt").write_text("b")
    after = _parts(base, "command: cat data")
    assert [name for name in before if before[name] != after[name]] == ["data"]


@pytest.mark.parametrize("folder", [".", "./", "..", "/"])
def test_the_flows_own_folder_is_no_data(base: Path, folder: str) -> None:
    before = _parts(base, f"command: ls {folder}")
    (base / "flows").mkdir()
    (base / "flows" / "more").write_text("x")
    assert _parts(base, f"command: ls {folder}") == before
