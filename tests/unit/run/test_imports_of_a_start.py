"""A plain run imports nothing that only other choices need, and theirs is imported once, for all its processes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from echelon.config import RunConfig
from echelon.run.resolve import launch_request
from echelon.run.start import _preload, _shared

OF_OTHERS = (
    "pyarrow", "scipy.signal", "sklearn", "sympy", "timm", "torch._dynamo", "torch._inductor", "torch.onnx",
    "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.pipelining",
    "torch.distributed.tensor", "torchvision", "transformers", "triton",
)  # fmt: skip
CALLBACK = f"""
import sys
from pathlib import Path
from echelon.observe.callbacks import Callback

class Imports(Callback):
    def on_window(self, window):
        Path("imported").write_text(repr([name for name in {OF_OTHERS!r} if name in sys.modules]))
"""


def _imports(config: RunConfig) -> tuple[str, ...]:
    request = launch_request(config)
    return (*_shared(request), *_preload(request))


def test_what_a_choice_needs_is_imported_for_all_processes_at_once() -> None:
    plain = RunConfig()
    imported = _imports(plain)
    assert not set(OF_OTHERS).intersection(imported) and "echelon.data.sources.digits" in imported
    split = replace(plain, strategy=replace(plain.strategy, parallel="fsdp=2"))
    assert {"torch._dynamo", "torch.distributed.fsdp"} <= {*_imports(split)}
    assert "torch._dynamo" in _imports(replace(plain, model=replace(plain.model, compile=True)))
    assert "torch._dynamo" in _imports(replace(plain, training=replace(plain.training, recompute="blocks")))
    assert "timm" in _imports(replace(plain, model=replace(plain.model, name="timm/resnet18")))
    assert "timm" in _imports(replace(plain, optimizer=replace(plain.optimizer, name="lamb")))
    of_files = _imports(replace(plain, data=replace(plain.data, source="some/folder")))
    assert {"torchvision", "echelon.data.sources.table"} <= {*of_files}
    assert "torchvision" not in _imports(replace(plain, data=replace(plain.data, source="some.txt")))


@pytest.mark.long
def test_a_plain_run_imports_nothing_of_other_choices_before_its_first_steps_are_recorded(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(CALLBACK)
    command = [sys.executable, "-m", "echelon", "train", "digits", "--epochs", "1", "--workers", "2", "--trust"]
    done = subprocess.run(
        [*command, "--callbacks", "own:Imports", "--run", str(tmp_path / "run")],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "imported").read_text() == "[]"
