"""Descriptions of flows: what they mean, and what is refused, with the line, before anything starts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from echelon.cli.app import build_command
from echelon.core.errors import UserError
from echelon.flows.base import Call, Flow, step_folder
from echelon.flows.kinds import KINDS
from echelon.flows.page import graph_svg, levels
from echelon.flows.resolve import read_flow
from echelon.flows.run import FlowRequest, plan_flow, start_flow

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
    (
        f"{STEP}    matrix: {{x: [0, 1]}}\n    settings: {{seed: '${{x}}'}}\n  b:\n    evaluate: ${{a.run}}\n",
        "is 2 outputs",
    ),
    ("step: {}\n", "line 1: unknown word in a flow 'step'"),
    ("steps: 3\n", "steps is written as"),
    ("# nothing\n", "line 1: the file is empty"),
    ("steps:\n\ta:\n\t\ttrain: digits\n", "line 2: not YAML: a tab, where YAML takes spaces"),
    (f"{STEP}  b:\n    finetune: [${{a.run}}, digits]\n", "line 5: not YAML: ${...} stands in quotes within [...]"),
    ("steps:\n  a:\n    train: [digits\n", "line 3: not YAML: expected ',' or ']'"),
    (f"{STEP}  a:\n    train: digits\n", "line 4: a stands twice"),
    (f"{STEP}    matrix: {{}}\n", "line 4: the matrix of a is empty"),
    (f"{STEP}    matrix:\n      seed:\n", "line 5: a value is missing here"),
    (f"{STEP}    matrix: {{seed: 1}}\n    settings: {{seed: '${{seed}}'}}\n", "line 4: seed of a matrix is a list"),
    (f"{STEP}    matrix: {{seed: [0, 1]}}\n", "the steps of a would be alike: ${seed} of its matrix is used nowhere"),
    (f"{STEP}    matrix: tune\n", "line 4: no step before a has a matrix"),
    (f"parameters: {{x: 1}}\n{STEP}", "line 1: parameter x is used nowhere"),
    (f"parameters: {{folder: 1}}\n{STEP}", "line 1: 'folder' is no name for a parameter"),
    ("steps:\n  a:\n    train:\n", "line 3: a value is missing here"),
    ("steps:\n  a:\n    train: ${\n", "line 3: '${' has ${ without }"),
    ("steps:\n  a:\n    command: echo\n  b:\n    train: ${a.data}\n", "line 5: a leaves nothing"),
    (
        "steps:\n  a:\n    command: echo ${v}\n    matrix: {v: [1, 2]}\n"
        "  b:\n    command: echo ${v}\n    matrix: {v: [2, 3]}\n    needs: [a]\n",
        "line 8: a has no step for the matrix values of b",
    ),
    (f"{STEP}    resources: {{time: 0s}}\n", "line 4: 0s is none"),
    (f"{STEP}    resources:\n      memory: lots\n      time: 2h\n", "line 5: 'lots' is not a size"),
    (f"{STEP}    settings:\n      model: mlp\n      lr: fast\n", "line 6: step a: --lr"),
    (f"name: a/b\n{STEP}", "line 1: name 'a/b' must be"),
    (
        f"{STEP}    settings:\n      epochs: 1\n      lr: [0.1, 0.01]\n",
        "line 6: step a: 'lr' is 2 values, train takes one",
    ),
    (
        "steps:\n  a:\n    prepare: m:f\n    settings: {classes: [cat, dog]}\n",
        "'classes' is 2 values, prepare takes one",
    ),
    (
        f"{STEP}    matrix: {{x: [0, 1]}}\n    settings: {{seed: '${{x}}'}}\n"
        "  b:\n    evaluate: x\n    settings: {data: '${a.run}'}\n",
        "'data' is 2 values, evaluate takes one: give the step a matrix",
    ),
    (f"{STEP}    settings: {{data: cifar10}}\n", "data is no setting here"),
    (
        "steps:\n  a:\n    command: echo\n    outputs: {data.csv: data.csv}\n",
        "line 4: 'data.csv' is no name for an output",
    ),
]
ABSENT = [
    ("steps:\n  a:\n    train: ./there\n", "line 3: step a: train takes data, and ./there is not there"),
    ("steps:\n  a:\n    evaluate: runs/there\n", "line 3: step a: evaluate takes a run, and runs/there holds none"),
    ("steps:\n  a:\n    prepare: nobody:work\n", "line 3: step a: there is no module nobody"),
    ("steps:\n  a:\n    prepare: own:wrok\n", "has no wrok: did you mean work?"),
    ("steps:\n  a:\n    command: no-such-program --x\n", "line 3: step a: there is no program no-such-program"),
    (f"{STEP}  b:\n    export: ['${{a.run}}', model.onx]\n", "line 5: step b: model.onx: .onx names no format"),
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


def test_resources_may_be_values_of_parameters_and_of_a_matrix(tmp_path: Path) -> None:
    text = """parameters: {memory: 2GB}
steps:
  a:
    train: digits
    matrix: {n: [1, 2], gpus: [0, 1]}
    settings: {workers: "${n}"}
    resources: {memory: "${memory}", gpus: "${gpus}"}
"""
    found = [step.resources for step in _read(tmp_path, text, memory="3GB").steps.values()]
    assert [(each.cores, each.gpus, each.memory_bytes) for each in found] == [
        (1, 0, 3e9), (1, 1, 3e9), (2, 0, 3e9), (2, 1, 3e9)
    ]  # fmt: skip


def test_a_line_of_the_graph_passes_the_boxes_between(tmp_path: Path) -> None:
    flow = _read(tmp_path, "steps: {a: {command: x}, b: {command: x, needs: [a]}, c: {command: x, needs: [a, b]}}")
    drawn = graph_svg(flow, [])
    paths = re.findall(r'd="([^"]*)"', drawn)
    assert len(paths) == 3 and [path.count("L") for path in paths] == [0, 1, 0]
    assert "L452 66 " in paths[1]  # a's box ends at 58


def test_several_outputs_are_several_words_and_stand_one_after_the_other_in_a_text(tmp_path: Path) -> None:
    text = """steps:
  a:
    command: touch ${v} ${folder}/o
    matrix: {v: [x, y]}
    outputs: {o: o}
  b:
    command: [sh, -c, "cat ${a.o} >${folder}/all", "${a.o}", "--in=${a.o}"]
"""
    step = _read(tmp_path, text).steps["b"]
    x, y = "${a[v=x].o}", "${a[v=y].o}"
    assert list(step.arguments) == ["sh", "-c", f"cat {x} {y} >${{folder}}/all", x, y, f"--in={x}", f"--in={y}"]
    assert step.before == ["a[v=x]", "a[v=y]"]


@pytest.mark.parametrize(("text", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_cannot_be_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError) as refusal:
        _read(tmp_path, text)
    assert message in str(refusal.value) and "flow.yaml" in str(refusal.value) and "\n" not in str(refusal.value)
    assert list(tmp_path.iterdir()) == [tmp_path / "flow.yaml"]


@pytest.mark.parametrize(
    ("kind", "settings", "options"),
    [
        ("train", [("sync_batchnorm", "1"), ("Compile", "t"), ("mixup", "0.1")], ["--sync-batchnorm", "--compile"]),
        ("train", [("follow_links", "false"), ("optimizer.name", "adamw")], ["--no-follow-links", "--optimizer=adamw"]),
        ("train", [("checkpoint.every", "10s"), ("data.root", "x")], ["--checkpoint-every=10s", "--data-root=x"]),
        ("predict", [("follow_links", "false"), ("text", "a"), ("text", "b")], ["--text=a", "--text=b"]),
        ("evaluate", [("follow_links", "y"), ("workers", "2")], ["--follow-links", "--workers=2"]),
        (
            "compare",
            [("try", "a"), ("seeds", "0"), ("seeds", "5"), ("tune_lr", "1")],
            ["--try=a", "--tune-lr", "--seeds=0,5"],
        ),
    ],
)
def test_settings_are_options_of_the_command(kind: str, settings: list[tuple[str, str]], options: list[str]) -> None:
    words = KINDS[kind].command(Call(Path("there"), ["a"], settings))
    assert [word for word in words if word in options] == options
    assert not [word for word in words if word.startswith("--no-") and word not in options]


@pytest.mark.parametrize("kind", ["evaluate", "predict", "export"])
def test_steps_take_all_options_of_their_commands(kind: str) -> None:
    flags = {each.opts[0].removeprefix("--") for each in build_command(kind).params if each.opts[0].startswith("--")}
    assert "trust" in flags
    for flag in flags - {"out", "json"}:
        KINDS[kind].check(["a"], [(flag, "true")])


def test_flows_of_one_name_do_not_replace_each_others_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "flow.yaml").write_text("steps:\n  s:\n    command: [sh, -c, exit]\n")
    start_flow(FlowRequest("a/flow.yaml"), print)
    assert [*plan_flow(FlowRequest("a/flow.yaml"))] == ["s: kept"]
    with pytest.raises(UserError, match=r"flows/flow is the folder of .*/a/flow\.yaml"):
        start_flow(FlowRequest("b/flow.yaml"), print)
    assert [*plan_flow(FlowRequest("b/flow.yaml", run="flows/flow"))]
    (tmp_path / "a").rename(tmp_path / "moved")
    assert [*plan_flow(FlowRequest("moved/flow.yaml"))] == ["s: kept"]


@pytest.mark.parametrize(("text", "message"), ABSENT, ids=[message for _, message in ABSENT])
def test_what_is_not_there_is_refused_before_anything_starts(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "own.py").write_text("import os\n\ndef work(folder):\n    pass\n")
    (tmp_path / "flow.yaml").write_text(text)
    request = FlowRequest(str(tmp_path / "flow.yaml"), run=str(tmp_path / "flow"))
    with pytest.raises(UserError) as refusal:
        start_flow(request, print)
    assert message in str(refusal.value) and "\n" not in str(refusal.value) and not (tmp_path / "flow").exists()


def test_a_folder_with_a_description_of_the_users_own_is_no_flows_folder(tmp_path: Path) -> None:
    (tmp_path / "flow.yaml").write_text("steps: {}\n")
    (tmp_path / "other.yaml").write_text("steps:\n  a:\n    command: echo\n")
    with pytest.raises(UserError, match="holds something else than a flow"):
        start_flow(FlowRequest(str(tmp_path / "other.yaml"), run=str(tmp_path)), print)
    assert (tmp_path / "flow.yaml").read_text() == "steps: {}\n"


def test_what_an_earlier_step_may_make_is_not_looked_for(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def work(folder):\n    pass\n")
    text = "steps:\n  a:\n    prepare: own:work\n  b:\n    train: ./made\n    needs: [a]\n"
    (tmp_path / "flow.yaml").write_text(text)
    assert [line.partition(":")[0] for line in plan_flow(FlowRequest(str(tmp_path / "flow.yaml")))] == ["a", "b"]


def test_a_parameter_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="did you mean epochs"):
        _read(tmp_path, WHOLE, epoch="7")
    with pytest.raises(UserError, match="has no parameters, and epoch is given"):
        _read(tmp_path, STEP, epoch="7")
