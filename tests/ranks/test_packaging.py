"""What is installed works: the wheel by uvx, as somebody without a clone runs it, and the steps of the Dockerfile."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
DEADLINE_S = 280.0


def run(command: list[str], folder: Path, **variables: str) -> str:
    """Run a command to its end; returns what it printed."""
    outside = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    done = subprocess.run(
        command,
        cwd=folder,
        env=outside | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:]
    return done.stdout


def instructions() -> list[tuple[str, str]]:
    """Return the Dockerfile's instructions, each with its arguments."""
    lines = [line for line in DOCKERFILE.splitlines() if line and not line.startswith("#")]
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines)]


def arguments(instruction: str) -> list[str]:
    """Return the arguments of all instructions of one name."""
    return [rest for name, rest in instructions() if name == instruction]


def test_the_dockerfile_copies_what_is_there_and_starts_the_command() -> None:
    assert arguments("ARG") == ["BASE=python:3.11-slim", "TORCH=cpu"] and arguments("FROM") == ["${BASE}"]
    sources = [source for copied in arguments("COPY") for source in copied.split()[:-1]]
    assert all((ROOT / source).exists() for source in sources)
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert {f"!{source}" for source in sources} == {line for line in ignored if line.startswith("!")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert arguments("ENTRYPOINT") == ['["echelon"]'] and "echelon" in project["scripts"]


@pytest.mark.long
def test_the_steps_of_the_dockerfile_install_the_command(tmp_path: Path) -> None:
    """Here without its base image: in a folder instead of /, and with this environment's packages below it."""
    places = {"/opt/echelon": tmp_path / "opt", "/tmp/echelon": tmp_path / "source", "/work": tmp_path / "work"}
    path = os.environ["PATH"]
    for name, rest in instructions():
        for there, here in places.items():
            rest = re.sub(rf"(?<![\w/]){there}", str(here), rest)
        if name == "COPY":
            *sources, target = rest.split()
            for source in sources:
                into = Path(target) / source if target.endswith("/") else Path(target)
                into.parent.mkdir(parents=True, exist_ok=True)
                (shutil.copytree if (ROOT / source).is_dir() else shutil.copy)(ROOT / source, into)
        elif name == "ENV":
            path = rest.removeprefix("PATH=").replace("$PATH", path)
        elif name == "RUN":
            rest = rest.replace("pip install", "pip install --no-deps")
            run(["sh", "-ec", rest], tmp_path, PATH=path, TORCH="default", PYTHONPATH="")
    assert not (tmp_path / "source").exists() and (tmp_path / "work" / "runs").is_dir()
    here = sysconfig.get_paths()["purelib"]
    words = run(["echelon", "--help"], tmp_path / "work", PATH=path, PYTHONPATH=here)
    assert "usage: echelon" in words


@pytest.mark.long
def test_a_built_wheel_runs_by_uvx(tmp_path: Path) -> None:
    uv = shutil.which("uv") or pytest.fail("uv is not installed")
    run([uv, "build", "-q", "--wheel", "--out-dir", str(tmp_path), str(ROOT)], tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    uvx = [uv, "tool", "run", "--python", sys.executable, "--from", str(wheel), "echelon"]
    assert "usage: echelon" in run([*uvx, "--help"], tmp_path)
    small = ["--epochs", "1", "--workers", "2", "--threads", "1", "--device", "cpu", "--run", "first"]
    run([*uvx, "train", "digits", *small], tmp_path)
    assert (tmp_path / "first" / "report.html").stat().st_size > 10_000
