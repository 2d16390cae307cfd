from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from echelon.collectives.registry import PATHS
from echelon.compression.registry import CODECS
from echelon.core.errors import UserError
from echelon.core.registry import Argument, Registry
from echelon.core.spec import parse_spec
from echelon.sync.registry import STRATEGIES

CODE = '''"""Waits.

More of it.
"""
from dataclasses import dataclass
from typing import ClassVar

import a_module_that_does_not_exist


class Plain:
    share: str  # of no dataclass: no setting
    kind: ClassVar[str] = "plain"


@dataclass(frozen=True)
class Base(Plain):
    period: int


@dataclass(frozen=True, kw_only=True)
class Settings(Base):
    """Settings.

    Attributes:
        period: steps.
        share: of the batch,
            above 0.
    """

    name: ClassVar[str] = "waits"
    share: float | None = None


STRATEGY = Settings
'''


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    folder = tmp_path / "toy_strategies"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "helper.py").write_text("x = 1\n")
    (folder / "waits.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    return Registry("toy_strategies", "sync", "STRATEGY")


def test_a_file_is_an_implementation_when_it_says_so(registry: Registry) -> None:
    assert registry.names() == ["waits"]


def test_settings_are_known_without_importing_the_file(registry: Registry) -> None:
    declaration = registry.declaration("waits")
    assert declaration.summary == "Waits."
    assert declaration.arguments == (
        Argument("period", "int", None),
        Argument("share", "float | None", "None", True, "of the batch, above 0."),
    )
    assert declaration.constants == {"kind": "'plain'", "name": "'waits'"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("wait(1)", "unknown sync 'wait': did you mean waits"),
        ("waits", "missing"),
        ("waits(1, shar=0.5)", "did you mean share"),
        ("waits(1, 0.5)", "2 unnamed values"),
        ("waits(period=0.5)", "period must be a whole number"),
    ],
)
def test_what_the_declaration_does_not_allow_is_refused(registry: Registry, text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        registry.check(parse_spec(text))


def test_what_it_allows_is_not(registry: Registry) -> None:
    registry.check(parse_spec("waits(4, share=1)"))


def test_equal_specs_are_written_alike(registry: Registry) -> None:
    assert registry.canonical("waits(4)") == registry.canonical("waits(period=4)") == "waits(period=4)"
    assert CODECS.canonical("topk(0.01, values=sign)+huffman") == "topk(density=0.01, values=sign)+huffman"


def test_registries_of_the_package_import_no_torch() -> None:
    code = (
        "import sys\n"
        "from echelon.collectives.registry import PATHS\n"
        "from echelon.compression.registry import CODECS\n"
        "from echelon.sync.registry import STRATEGIES\n"
        "assert [r.declaration(n) for r in (PATHS, CODECS, STRATEGIES) for n in r.names()]\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize("registry", [PATHS, CODECS, STRATEGIES], ids=lambda r: r.kind)
def test_what_is_declared_is_what_the_class_has(registry: Registry) -> None:
    for name in registry.names():
        fields = dataclasses.fields(registry.settings_class(name))
        arguments = registry.declaration(name).arguments
        assert [(a.name, a.kw_only) for a in arguments] == [(f.name, f.kw_only) for f in fields]
        assert [a.default is None for a in arguments] == [f.default is dataclasses.MISSING for f in fields]
