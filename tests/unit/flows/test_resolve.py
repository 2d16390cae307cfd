"""Descriptions of flows: what they mean, and what is refused, with the line, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.core.errors import UserError
from echelon.flows.base import Flow, step_folder
from echelon.flows.page import levels
from echelon.flows.resolve import read_flow

WHOLE = """\
parameters: {epochs: 2}
steps:
  first:
    train: digits
    matrix: {seed: [0, 1]}
    settings:
      model: mlp
      epochs: ${epochs}
      seed: ${seed}
  tune:
    finetune: ["${first.run}", digits]
    matrix: {seed: [0, 1], lr: [0.1, 0.01]}
    settings:
      lr: ${lr}
  judge:
    evaluate: ${tune.run}
    matrix: tune
  best:
    select: ${tune.run}
    priority: 3
    resources: {cores: 2, memory: 1gb, time: 5m}
  file:
    export: ["${best.run}", model.safetensors]
"""
STEP = "steps:\n  a:\n    train: digits\n"
REFUSED = [
    ("steps:\n  a:\n    evaluate: ${b.run}\n", "line 3: unknown step 'b'"),
    (f"{STEP}  b:\n    evaluate: ${{a.rum}}\n", "line 5: unknown output of a 'rum': did you mean run?"),
    (f"{STEP}  b:\n    evaluate: ${{c.metrics}}\n  c:\n    evaluate: ${{a.run}}\n", "line 5: metrics of c is a path"),
    (
        "steps:\n  a:\n    command: echo\n    needs: [b]\n  b:\n    command: echo\n    needs: [a]\n",
        "wait for each other",
    ),
    (f"{STEP}    setings: {{}}\n", "line 4: unknown word in step a 'setings': did you mean settings?"),
    (f"{STEP}    settings: {{epoch: 3}}\n", "step a: unknown setting 'epoch': did you mean epochs?"),
    (f"{STEP}    settings: {{epochs: three}}\n", "step a: --epochs"),
    (f"{STEP}    settings: {{sync: locl(3)}}\n", "did you mean local?"),
    (f"{STEP}    settings: {{run: there}}\n", "is the flow's to set"),
    ("steps:\n  a:\n    train: digitss\n", "did you mean digits?"),
    (f"{STEP}    retry: -1\n", "line 4: retry is -1"),
    (f"{STEP}    resources: {{time: soon}}\n", "line 4: 'soon' is not a duration"),
    (f"{STEP}    outputs: {{x: y}}\n", "train names its outputs itself"),
    ("steps:\n  a:\n    command: echo\n    outputs: {x: ../y}\n", "below its step's own folder"),
    ("steps:\n  a:\n    needs: []\n", "step a does nothing"),
    ("steps:\n  a:\n    train: ${n}\n", "${n} is no parameter"),
    (f"{STEP}    matrix: {{seed: [1, 1]}}\n", "a list of different values"),
    ("steps:\n  a:\n    train: digits\n    matrix: {seed: [0, 1]}\n  b:\n    evaluate: ${a.run}\n", "is 2 outputs"),
    ("step: {}\n", "line 1: unknown word in a flow 'step'"),
    ("steps: 3\n", "steps is written as"),
]


def _read(folder: Path, text: str, **parameters: str) -> Flow:
    file = folder / "flow.yaml"
    file.write_text(text)
    return read_flow(file, parameters)


def test_matrices_and_references_are_written_out(tmp_path: Path) -> None:
    flow = _read(tmp_path, WHOLE, epochs="7")
    assert len(flow.steps) == 2 + 4 + 4 + 1 + 1
    assert dict(flow.steps["first[seed=1]"].settings) == {"model": "mlp", "epochs": "7", "seed": "1"}
    assert flow.steps["tune[seed=1,lr=0.1]"].before == ["first[seed=1]"]
    assert flow.steps["judge[seed=0,lr=0.01]"].before == ["tune[seed=0,lr=0.01]"]
    best = flow.steps["best"]
    assert len(best.before) == 4 and best.priority == 3
    assert (best.resources.cores, best.resources.memory_bytes, best.resources.time_s) == (2, 1e9, 300)
    assert flow.steps["file"].outputs["file"].path == "model.safetensors"
    assert levels(flow)["file"] == 3
    folders = {step_folder(tmp_path, name) for name in flow.steps}
    assert len(folders) == len(flow.steps)


@pytest.mark.parametrize(("text", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_cannot_be_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError) as refusal:
        _read(tmp_path, text)
    assert message in str(refusal.value) and "flow.yaml" in str(refusal.value) and "\n" not in str(refusal.value)
    assert list(tmp_path.iterdir()) == [tmp_path / "flow.yaml"]


def test_a_parameter_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="did you mean epochs"):
        _read(tmp_path, WHOLE, epoch="7")
