"""What README and the pages say holds: commands, settings, numbers, messages, links."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from echelon.cli.app import COMMANDS
from echelon.cli.settings import overrides_of
from echelon.collectives.registry import PATHS
from echelon.compression.registry import CODECS
from echelon.config import build
from echelon.config.build import flag_of, leaves
from echelon.core.registry import Registry
from echelon.run.resolve import check_names
from echelon.study.settings import read_try
from echelon.sync.registry import STRATEGIES
from tests.unit.docs.pages import PAGES, ROOT, blocks, commands

NUMBER = re.compile(r"(?<![\w.])\d+(?:[.,]\d+)*")
RESULTS = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
GUIDE = ROOT / "docs" / "which.md"


def site_hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs" / "site_hooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def click_command(name: str) -> Any:
    module, _, function = COMMANDS[name][0].partition(":")
    return getattr(importlib.import_module(module), function)()


SERVICES = ("wandb", "mlflow", "trackio")  # of --logger, each an extra


@pytest.mark.parametrize("arguments", commands(), ids=" ".join)
def test_a_command_of_the_pages_has_options_and_specs_that_exist(arguments: list[str]) -> None:
    if arguments[0].startswith("-"):
        assert arguments in (["--version"], ["--help"])
        return
    for service in SERVICES:
        if any(service in argument for argument in arguments):
            pytest.importorskip(service, reason=f"{service} is not installed: uv sync --group peers")
    command = click_command(arguments[0])
    context = command.make_context(arguments[0], [*arguments[1:]])  # refuses options that do not exist
    known = {name.replace(".", "__") for name, _, _ in leaves()}
    settings = {name: value for name, value in context.params.items() if name in known}
    check_names(build(None, overrides_of(settings)).config)
    for candidate in context.params.get("tries") or []:
        check_names(build(None, read_try(candidate)).config)


def test_every_command_stands_in_the_pages() -> None:
    assert {arguments[0] for arguments in commands()} >= set(COMMANDS)


@pytest.mark.parametrize("block", blocks("yaml"), ids=lambda block: block.name)
def test_yaml_of_the_pages_is_read(block: Any, tmp_path: Path) -> None:
    file = tmp_path / "file.yaml"
    file.write_text(block.text)
    if "candidates:" in block.text:
        from echelon.study.file import load_study

        assert load_study(file).candidates
    elif "steps:" in block.text:
        from echelon.flows.resolve import read_flow

        assert read_flow(file).steps
    elif "workers:" in block.text and block.text.startswith("- name:"):
        from echelon.config.machines import read_at

        assert read_at(str(file))
    else:
        check_names(build(file).config)


@pytest.mark.parametrize("block", blocks("python"), ids=lambda block: block.name)
def test_python_of_the_pages_is_python(block: Any) -> None:
    ast.parse(block.text)


def section(anchor: str) -> str:
    """Return the text of the section of RESULTS.md with this anchor."""
    for text in re.split(r"^## ", RESULTS, flags=re.MULTILINE)[1:]:
        heading = text.partition("\n")[0]
        if re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) == anchor:
            return text
    raise AssertionError(f"RESULTS.md has no section {anchor}")


def guides_blocks() -> list[str]:
    """Return the guide's paragraphs and list items that hold numbers; a table goes with the paragraph before it."""
    text = re.sub(r"```.*?```", "", GUIDE.read_text(encoding="utf-8"), flags=re.DOTALL)
    text = re.sub(r"^#.*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\n\n(?=\|)", "\n", text)  # a table, and what leads to it
    text = re.sub(r"\n(?=- |\d\. )", "\n\n", text)
    return [block.strip() for block in text.split("\n\n") if numbers(block)]


def numbers(block: str) -> list[str]:
    """Return the numbers of a block, without those in code, in addresses and before the points of a list."""
    plain = re.sub(r"`[^`]*`|\]\([^)]*\)|^\d\. |top-1|\bgroup=N", "", block, flags=re.MULTILINE)
    return NUMBER.findall(plain)


def test_the_guide_has_numbers() -> None:
    assert sum(len(numbers(block)) for block in guides_blocks()) > 80


@pytest.mark.parametrize("block", guides_blocks(), ids=lambda block: block[:40])
def test_each_number_of_the_guide_stands_in_the_results_it_links_to(block: str) -> None:
    anchors = re.findall(r"results\.md#([\w-]+)", block)
    assert anchors, f"numbers without a link to results: {block}"
    there = {number for anchor in anchors for number in NUMBER.findall(section(anchor))}
    there |= {number for anchor in anchors for number in re.findall(r"\d+(?:\.\d+)?", section(anchor))}
    assert [number for number in numbers(block) if number not in there] == []


def test_messages_of_troubleshooting_are_those_of_the_code() -> None:
    texts = []
    for file in (ROOT / "src" / "echelon").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    messages = re.findall(r"^\| `([^`]+)` \|", page, flags=re.MULTILINE)
    assert len(messages) > 20
    joined = "\n".join(texts)
    parts = [part.strip() for message in messages for part in message.split("…")]
    assert [part for part in parts if part not in joined and not re.search(_loosely(part), joined)] == []


def _loosely(part: str) -> str:
    """Match a text that the source divides into two string literals."""
    return r"\s*".join(re.escape(word) for word in part.split())


def test_the_settings_page_has_every_setting() -> None:
    page = site_hooks().settings()
    assert [name for name, item, _ in leaves() if f"`{flag_of(name, item)}` | `{name}`" not in page] == []


@pytest.mark.parametrize("registry", [CODECS, STRATEGIES, PATHS], ids=["codecs", "strategies", "paths"])
def test_the_pages_of_choices_have_every_implementation(registry: Registry) -> None:
    page = site_hooks().implementations(registry)
    for name in registry.names():
        assert f"## {name}\n" in page
        for argument in registry.declaration(name).arguments:
            assert f"| `{argument.name}` |" in page


def test_every_public_name_is_on_the_page_of_python() -> None:
    import echelon

    assert all(f".{name}" in site_hooks().api() for name in echelon.__all__)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_to_files(page: Path) -> None:
    generated = {ROOT / "docs" / "results.md", ROOT / "docs" / "studies" / "cifar10.html"}
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = [match.partition("#")[0] for match in re.findall(r"\]\((?!https?:|#)([^)]+)\)", text)]
    missing = [t for t in targets if not (p := (page.parent / t).resolve()).exists() and p not in generated]
    assert missing == []
