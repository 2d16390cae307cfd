"""What can be chosen, as the command line shows it: help, lists, explanations and completion, all without torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from echelon.cli.app import COMMANDS, build_command
from echelon.cli.catalogue import Kind, kinds
from echelon.cli.completion import candidates
from echelon.collectives.registry import PATHS
from echelon.compression.registry import CODECS
from echelon.config.build import flag_of, leaves
from echelon.core.registry import Registry
from echelon.sync.registry import STRATEGIES
from tests.unit.cli.conftest import Here
from tests.unit.cli.test_words import echelon

CHOICES = [(registry, name) for registry in (CODECS, STRATEGIES, PATHS) for name in registry.names()]


@pytest.mark.parametrize("arguments", [[], ["-h"], ["--help"], *([name, "-h"] for name in COMMANDS)])
def test_help_fits_in_80_columns(arguments: list[str], here: Here) -> None:
    done = here(*arguments)
    assert done.returncode == 0 and done.stdout.startswith("usage: echelon"), done
    assert not [line for line in done.stdout.splitlines() if len(line) > 80]


def test_help_of_train_has_examples_defaults_and_values_and_what_is_used_first() -> None:
    text = echelon("train", "-h").stdout
    assert "Examples:" in text and "[default: 0.1]" in text
    assert "[cosine, step, poly, constant]" in " ".join(text.split())
    assert all(name in text for name in [*CODECS.names(), *STRATEGIES.names(), *PATHS.names()])
    order = [text.index(f"\n  {flag}") for flag in ("--model", "--epochs", "--sync", "--warmup-epochs", "--log-limit")]
    assert order == sorted(order)
    flags = [flag_of(name, item) for name, item, _ in leaves()]
    missing = [flag for flag in flags if flag not in text and f"--[no-]{flag[2:]}" not in text]
    assert not missing


def test_list_names_all_that_can_be_chosen_without_torch() -> None:
    code = "import sys\nsys.argv = ['', 'list']\nfrom echelon.cli import main\ntry: main()\nexcept SystemExit: pass\n"
    check = "assert not {'torch', 'numpy', 'timm'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code + check], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    titles = ("tasks", "models", "sources", "codecs", "syncs", "paths", "layouts", "tunings", "optimizers", "places")
    assert all(f"\n{title} (" in f"\n{done.stdout}" for title in titles)
    names = {entry.name for kind in kinds() for entry in kind.entries}
    assert not [name for name in names if name.startswith(("fused", "bnb"))]  # --optimizer refuses them
    assert "`" not in done.stdout and "sparse_adam" in names
    assert names >= {"image-classification", "small_cnn", "digits", "cifar10", "huffman", "fsdp", "adamw", "local"}


@pytest.mark.parametrize(("registry", "name"), CHOICES, ids=[name for _, name in CHOICES])
def test_each_choice_says_when_it_helps_and_what_it_needs(registry: Registry, name: str) -> None:
    found = registry.declaration(name)
    assert "Helps: " in found.text and "Needs: " in found.text


def test_explain_says_what_a_codec_does_and_what_was_measured() -> None:
    text = echelon("explain", "topk(0.01)").stdout
    labels = ("when it helps", "what it costs", "what it needs", "Measured:")
    for part in ("v = v + u", "density ", "[required;", *labels, "arXiv:1712.01887"):
        assert part in text
    words = " ".join(text.split())
    assert "topk(0.01) over a link of 100 Mbit/s: 1,778 (±2%) samples/s, 3.89 times as many as plain DDP" in words
    assert "aim" not in words and "measured on" not in words
    assert not [line for line in text.splitlines() if len(line) > 80]
    assert text.lower().count("the largest elements, with momentum correction") == 1, "the summary is said once"
    assert "--task image-classification" in echelon("explain", "image-classification").stdout
    assert "--compression CODEC+huffman" in echelon("explain", "huffman").stdout
    refused = echelon("explain", "toppk")
    assert refused.returncode == 2 and "did you mean topk?" in refused.stderr


@pytest.mark.parametrize(
    ("words", "incomplete", "offered"),
    [
        ([], "tr", ["train"]),
        (["train"], "--sy", ["--sync", "--sync-batchnorm"]),
        (["train", "--sync"], "lo", ["local("]),
        (
            ["train", "--sync"],
            "local(8, o",
            ["local(8, optimizer_state=", "local(8, overlap=", "local(8, outer_lr="],
        ),
        (["train", "--precision"], "bf", ["bf16", "bf16-params"]),
        (["train", "--optimizer"], "adamw", ["adamw", "adamwlegacy"]),
        (["train"], "dig", ["digits"]),
        (["explain"], "powers", ["powersgd"]),
        (["completion"], "", ["bash", "zsh", "fish"]),
    ],
)
def test_completion_knows_commands_options_values_and_specs(
    words: list[str], incomplete: str, offered: list[str]
) -> None:
    assert candidates(words, incomplete) == offered


def test_runs_are_offered_where_a_run_is_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "config.yaml").write_text("")
    assert candidates(["resume"], "ru") == ["runs/a"]


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("echelon tr", "train"),
        ("echelon train --sync lo", r"local\("),
        (r"echelon train --sync local\(per", "period="),
        ('echelon train --sync "local(per', "local(period="),
    ],
)
def test_bash_completes_a_line(line: str, completed: str) -> None:
    """The script as bash runs it: what readline would put in the place of the last word."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    script = 'eval "$(echelon completion bash)"; COMP_LINE=$LINE; COMP_POINT=${#LINE}; _echelon_complete echelon; '
    done = subprocess.run(
        ["bash", "-c", f"{script} printf '%s\\n' \"${{COMPREPLY[@]}}\""],
        capture_output=True, text=True, timeout=60, env={**os.environ, "PATH": path, "LINE": line},
    )  # fmt: skip
    assert done.stdout.splitlines() == [completed], done


@pytest.mark.parametrize("name", list(COMMANDS))
def test_each_command_can_be_built(name: str) -> None:
    assert build_command(name).name == name


@pytest.mark.parametrize("kind", kinds(), ids=[kind.title for kind in kinds()])
def test_names_are_known_without_reading_what_each_does(kind: Kind) -> None:
    assert list(kind.all_names()) == [entry.name for entry in kind.entries]
